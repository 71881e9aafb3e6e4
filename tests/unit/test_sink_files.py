"""How files of committed epochs become visible, and how small ones are merged: exactly once at every crash."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as papq
import pytest

from midstream.checkpoint import sink_files
from midstream.checkpoint.sink_files import (
    COMMITTED,
    MERGE_FILES,
    MERGING,
    SinkFolder,
    SinkFolders,
    committed_files,
    merges_of,
)
from midstream.errors import CheckpointError
from midstream.flow.spec import SinkTable
from midstream.storage import disk
from midstream.storage.disk import Unsynced
from midstream.storage.table_files import SinkFile, TableFiles, epochs_of, file_name
from midstream.storage.table_format import TableFormat
from tests.power_loss import Recorder, Renamed, Synced

SCHEMA = pa.schema([("n", pa.int64())])


class Crash(BaseException):
    """The driver dies here."""


def sink_of(folder: Path) -> SinkFolder:
    return SinkFolder(SinkTable(str(folder), TableFormat.of("parquet", {}), merge=True), durable=False)


def stage(
    folder: Path, epoch: int, rows: list[int], attempt: str = "0", schema: pa.Schema = SCHEMA
) -> tuple[SinkFile, ...]:
    files = TableFiles(
        pafs.LocalFileSystem(),
        str(folder),
        TableFormat.of("parquet", {}),
        schema,
        epoch=epoch,
        partition=0,
        attempt=f"{epoch}-{attempt}",
        unsynced=Unsynced(),
        durable=False,
    )
    columns = {name: rows if name == "n" else [None] * len(rows) for name in schema.names}
    files.write(pa.record_batch(columns, schema=schema))
    return files.finish()


def seen_by_plain_reader(folder: Path) -> list[int]:
    """What somebody sees who reads the folder as a table: names with a leading underscore are skipped."""
    return sorted(ds.dataset(folder).to_table()["n"].to_pylist())


def seen_in_committed(folder: Path) -> list[int]:
    files = committed_files(str(folder))
    return sorted(ds.dataset(files).to_table()["n"].to_pylist()) if files else []


def test_staged_files_are_invisible_until_they_are_published(tmp_path):
    first = stage(tmp_path, 0, [1, 2])
    assert seen_in_committed(tmp_path) == []
    assert ds.dataset(tmp_path).files == []
    folder = sink_of(tmp_path)
    folder.publish(0, first)
    folder.publish(0, first)
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == [1, 2]
    assert sink_of(tmp_path).epoch == 0


def test_all_names_of_an_epoch_are_on_disk_before_any_list_says_so_and_each_folder_is_synced_once(tmp_path):
    sinks = {str(tmp_path / name): SinkTable(str(tmp_path / name), TableFormat.of("parquet", {})) for name in "abc"}
    files = {location: stage(Path(location), 0, [1], "0") + stage(Path(location), 0, [2], "1") for location in sinks}
    folders = SinkFolders(sinks.values(), durable=True, at=lambda step: None)
    recorder = Recorder()
    with recorder.recording():
        disk._on_disk.update([str(tmp_path), *sinks])
        folders.publish(0, files)
    moved = [i for i, each in enumerate(recorder.operations) if isinstance(each, Renamed) and "_staged" in each.path]
    listed = [i for i, each in enumerate(recorder.operations) if isinstance(each, Renamed) and COMMITTED in each.other]
    between = recorder.operations[max(moved) + 1 : min(listed)]
    synced = [each.path for each in between if isinstance(each, Synced) and each.is_folder]
    assert (len(moved), len(listed)) == (6, 3)
    assert sorted(synced) == sorted(sinks)


def test_an_epoch_without_rows_costs_nothing(tmp_path):
    folder = sink_of(tmp_path / "out")
    folder.publish(0, ())
    assert not (tmp_path / "out").exists()
    assert committed_files(str(tmp_path / "out")) == []
    folder.publish(1, stage(tmp_path / "out", 1, [1]))
    assert seen_in_committed(tmp_path / "out") == [1]


def test_files_of_an_uncommitted_epoch_are_not_listed(tmp_path):
    folder = sink_of(tmp_path)
    folder.publish(0, stage(tmp_path, 0, [1]))
    [file] = stage(tmp_path, 1, [2])
    (tmp_path / file.staged).rename(tmp_path / file.name)  # half of a publication
    assert seen_by_plain_reader(tmp_path) == [1, 2]
    assert seen_in_committed(tmp_path) == [1]


def test_a_lost_file_is_an_error_that_says_so(tmp_path):
    [file] = stage(tmp_path, 0, [1])
    (tmp_path / file.staged).unlink()
    with pytest.raises(CheckpointError, match=r"of a committed epoch cannot be put in place.*a restart tries again"):
        sink_of(tmp_path).publish(0, [file])


def test_a_restart_publishes_what_the_manifest_names_and_removes_the_rest(tmp_path):
    sink_of(tmp_path).publish(0, stage(tmp_path, 0, [1]))
    stage(tmp_path, 1, [77], attempt="lost")  # of a run that failed
    named = stage(tmp_path, 1, [2], attempt="kept")
    folder = sink_of(tmp_path)
    folder.recover(1, named)
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == [1, 2]
    assert list((tmp_path / "_staged").iterdir()) == []


def test_a_job_starts_although_someone_removed_files(tmp_path, caplog):
    files = stage(tmp_path, 0, [1])
    sink_of(tmp_path).publish(0, files)
    (tmp_path / files[0].name).unlink()  # archived, say: they were in place, so nothing is wrong
    sink_of(tmp_path).recover(0, files)
    assert caplog.text == ""
    (tmp_path / COMMITTED).unlink()
    sink_of(tmp_path).recover(0, files)
    assert "1 file(s) of the committed epoch 0 were removed from" in caplog.text
    assert seen_in_committed(tmp_path) == []


def test_a_merge_whose_file_was_removed_is_dropped(tmp_path):
    sink = filled(tmp_path, MERGE_FILES + 2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sink, "_finish_merge", lambda: None)
        assert sink.merge()
    [staged] = (tmp_path / "_staged").glob("merge-*")
    staged.unlink()
    sink_of(tmp_path).recover(MERGE_FILES + 2, ())  # an epoch without rows
    assert not (tmp_path / MERGING).exists()
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == list(range(2 * (MERGE_FILES + 2)))


def filled(folder: Path, epochs: int) -> SinkFolder:
    sink = sink_of(folder)
    for epoch in range(epochs):
        sink.publish(epoch, stage(folder, epoch, [2 * epoch, 2 * epoch + 1]))
    return sink


def test_small_files_are_merged(tmp_path):
    sink = filled(tmp_path, MERGE_FILES)
    assert not sink.merge(), "the newest epoch may be run again, and stays by itself"
    sink = filled(tmp_path, MERGE_FILES + 1)
    assert sink.merge()
    assert not sink.merge()
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == list(range(2 * MERGE_FILES + 2))
    file, newest = sorted(path for path in tmp_path.iterdir() if path.suffix == ".parquet")
    assert epochs_of(file.name) == (0, MERGE_FILES - 1)
    assert epochs_of(newest.name) == (MERGE_FILES, MERGE_FILES)
    table = ds.dataset(file).to_table()
    assert table["epoch"].to_pylist() == [n // 2 for n in table["n"].to_pylist()]


def test_merged_files_are_merged_again_when_there_are_many(tmp_path):
    sink = filled(tmp_path, MERGE_FILES * MERGE_FILES // 8)
    while sink.merge():
        pass
    assert len([path for path in tmp_path.iterdir() if path.suffix == ".parquet"]) <= MERGE_FILES
    assert seen_in_committed(tmp_path) == list(range(2 * MERGE_FILES * MERGE_FILES // 8))


def crash_points(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Let the driver die before its ``at``-th write, rename or removal; the list says what came before."""
    steps: list[str] = []

    def guarded(name: str) -> None:
        original = getattr(sink_files, name) if name != "rename_file" else disk.rename_file

        def step(*arguments: Any, **more: Any) -> Any:
            if len(steps) == at:
                raise Crash
            steps.append(name)
            return original(*arguments, **more)

        monkeypatch.setattr(disk if name == "rename_file" else sink_files, name, step)

    for name in ("write_atomically", "remove_file", "rename_file"):
        guarded(name)
    return steps


@pytest.mark.parametrize("at", range(MERGE_FILES + 4))
def test_a_merge_survives_a_crash_at_every_step(tmp_path, at):
    filled(tmp_path, MERGE_FILES + 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        steps = crash_points(monkeypatch, at)
        try:
            sink_of(tmp_path).merge()
            died = False
        except Crash:
            died = True
    assert died == (at < MERGE_FILES + 3), steps
    everything = list(range(2 * MERGE_FILES + 2))
    assert seen_in_committed(tmp_path) == everything, "before the restart"
    sink_of(tmp_path).recover(MERGE_FILES + 1, ())
    assert not (tmp_path / MERGING).exists()
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == everything


@pytest.mark.parametrize("at", range(4))
def test_publishing_survives_a_crash_at_every_step(tmp_path, at):
    sink_of(tmp_path).publish(0, stage(tmp_path, 0, [1]))
    files = (
        *stage(tmp_path, 1, [2], "a"),
        *[SinkFile(f.staged, f"x=1/{f.name}", f.rows, f.size) for f in stage(tmp_path, 1, [3], "b")],
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        crash_points(monkeypatch, at)
        try:
            sink_of(tmp_path).publish(1, files)
            died = False
        except Crash:
            died = True
    assert died == (at < 3)
    assert seen_in_committed(tmp_path) in ([1], [1, 2, 3])
    sink_of(tmp_path).recover(1, files)
    assert seen_in_committed(tmp_path) == [1, 2, 3]


def test_an_epoch_that_was_planned_again_replaces_its_published_files(tmp_path):
    """As when Spark's log was lost with the machine's power, and the manifest was not."""
    sink = filled(tmp_path, 3)
    [file] = stage(tmp_path, 2, [70], attempt="anew")
    files = [SinkFile(file.staged, file_name(2, 2, 9, 0, ".parquet"), file.rows, file.size)]
    sink.publish(2, files)
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == [0, 1, 2, 3, 70]
    sink.publish(2, files)
    assert seen_by_plain_reader(tmp_path) == [0, 1, 2, 3, 70]
    sink_of(tmp_path).publish(2, ())
    assert seen_by_plain_reader(tmp_path) == [0, 1, 2, 3], "now it has no rows"


def test_a_restart_removes_files_of_epochs_whose_manifests_were_lost(tmp_path):
    filled(tmp_path, 4)
    sink_of(tmp_path).recover(1, ())
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == [0, 1], "no rows were named for epoch 1"
    sink_of(tmp_path).recover(-1, ())
    assert ds.dataset(tmp_path).files == committed_files(str(tmp_path)) == []


def test_files_of_other_schemas_are_never_merged_into_one(tmp_path):
    sink = filled(tmp_path, MERGE_FILES - 1)
    wider = pa.schema([("n", pa.int64()), ("more", pa.string())])
    for epoch in range(MERGE_FILES - 1, 2 * MERGE_FILES):
        sink.publish(epoch, stage(tmp_path, epoch, [2 * epoch, 2 * epoch + 1], schema=wider))
    assert sink.merge()
    assert not sink.merge()
    spans = sorted(epochs_of(path.name) or (0, 0) for path in tmp_path.glob("*.parquet"))
    alone = [*range(MERGE_FILES - 1), 2 * MERGE_FILES - 1]
    assert spans == sorted([(MERGE_FILES - 1, 2 * MERGE_FILES - 2), *((epoch, epoch) for epoch in alone)])
    assert seen_by_plain_reader(tmp_path) == list(range(4 * MERGE_FILES))


def test_many_files_of_one_epoch_are_merged_without_overwriting_each_other(tmp_path, monkeypatch):
    """Two merges may span the same epochs."""
    monkeypatch.setattr(sink_files, "MERGED_BYTES", 40 * 1000)
    sink = sink_of(tmp_path)
    files: list[SinkFile] = []
    for number in range(3 * MERGE_FILES):
        [file] = stage(tmp_path, 0, [number], attempt=str(number))
        files.append(SinkFile(file.staged, file_name(0, 0, number, 0, ".parquet"), 1, 1000))
    sink.publish(0, files)
    sink.publish(1, stage(tmp_path, 1, [1000]))
    while sink.merge():
        pass
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == [*range(3 * MERGE_FILES), 1000]
    assert len(list(tmp_path.glob("*.parquet"))) < 2 * MERGE_FILES


def test_tidying_lists_the_folder_now_and_then_and_removes_files_of_failed_attempts(tmp_path, monkeypatch):
    sink = filled(tmp_path, MERGE_FILES - 1)
    stage(tmp_path, 3, [77], attempt="failed")
    running = stage(tmp_path, MERGE_FILES + 1, [88], attempt="running")
    sink.tidy()
    assert len(list(tmp_path.glob("*.parquet"))) == MERGE_FILES - 1, "too few to look"
    for epoch in (MERGE_FILES - 1, MERGE_FILES):
        sink.publish(epoch, stage(tmp_path, epoch, [2 * epoch, 2 * epoch + 1]))
    sink.tidy()
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    assert [str(path.relative_to(tmp_path)) for path in (tmp_path / "_staged").iterdir()] == [running[0].staged]


def test_a_merge_that_fails_is_logged_and_harms_nothing(tmp_path, monkeypatch, caplog):
    sink = filled(tmp_path, MERGE_FILES + 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(papq.ParquetWriter, "write_batch", full)
        sink.tidy()
    assert "are not merged for now: [Errno 28] No space left on device" in caplog.text
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == list(range(2 * MERGE_FILES + 2))


def test_large_files_and_text_files_are_not_merged():
    sizes = {file_name(epoch, epoch, 0, 0, ".parquet"): sink_files.SMALL_BYTES for epoch in range(100)}
    assert list(merges_of(sizes)) == []
    assert list(merges_of({file_name(epoch, epoch, 0, 0, ".csv"): 10 for epoch in range(100)})) == []


def test_a_merge_stays_within_one_folder():
    sizes = {f"day={epoch % 2}/{file_name(epoch, epoch, 0, 0, '.parquet')}": 10 for epoch in range(2 * MERGE_FILES)}
    assert [{Path(name).parent for name in names} for names in merges_of(sizes)] == [{Path("day=0")}, {Path("day=1")}]


def test_a_damaged_or_newer_document_of_a_sink_is_refused(tmp_path):
    (tmp_path / COMMITTED).write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        committed_files(str(tmp_path))
    (tmp_path / COMMITTED).write_text('{"epoch": 3, "format": 99}')
    with pytest.raises(CheckpointError, match=r"format 99.*newer"):
        committed_files(str(tmp_path))
