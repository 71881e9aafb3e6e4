"""How files of committed epochs become visible, and how small ones are merged: exactly once at every crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pytest

from midstream.checkpoint import sink_files
from midstream.checkpoint.sink_files import COMMITTED, MERGE_FILES, SinkFolder, committed_files, merge_of
from midstream.errors import CheckpointError
from midstream.storage.table_files import SinkFile, TableFiles, file_name
from midstream.storage.table_format import TableFormat

SCHEMA = pa.schema([("n", pa.int64())])


class Crash(BaseException):
    """The driver dies here."""


def stage(folder: Path, epoch: int, rows: list[int], attempt: str = "0") -> tuple[SinkFile, ...]:
    files = TableFiles(
        pafs.LocalFileSystem(),
        str(folder),
        TableFormat.of("parquet", {}),
        SCHEMA,
        epoch=epoch,
        partition=0,
        attempt=f"{epoch}-{attempt}",
        durable=False,
    )
    files.write(pa.record_batch({"n": rows}, schema=SCHEMA))
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
    folder = SinkFolder(str(tmp_path))
    folder.publish(0, first)
    folder.publish(0, first)
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == [1, 2]
    assert SinkFolder(str(tmp_path)).epoch == 0


def test_an_epoch_without_rows_is_committed_too(tmp_path):
    folder = SinkFolder(str(tmp_path))
    folder.publish(0, ())
    assert folder.epoch == 0
    assert committed_files(str(tmp_path)) == []


def test_a_file_of_an_epoch_in_the_making_is_not_listed(tmp_path):
    folder = SinkFolder(str(tmp_path))
    folder.publish(0, stage(tmp_path, 0, [1]))
    [file] = stage(tmp_path, 1, [2])
    (tmp_path / file.staged).rename(tmp_path / file.name)  # half of a publication
    assert seen_by_plain_reader(tmp_path) == [1, 2]
    assert seen_in_committed(tmp_path) == [1]


def test_a_lost_file_is_an_error_that_says_so(tmp_path):
    [file] = stage(tmp_path, 0, [1])
    (tmp_path / file.staged).unlink()
    with pytest.raises(CheckpointError, match=r"of a committed epoch cannot be put in place.*a restart tries again"):
        SinkFolder(str(tmp_path)).publish(0, [file])


def test_a_restart_publishes_what_the_manifest_names_and_removes_the_rest(tmp_path):
    SinkFolder(str(tmp_path)).publish(0, stage(tmp_path, 0, [1]))
    stage(tmp_path, 1, [77], attempt="lost")  # of a run that failed
    named = stage(tmp_path, 1, [2], attempt="kept")
    folder = SinkFolder(str(tmp_path))
    folder.recover(1, named)
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == [1, 2]
    assert list((tmp_path / "_staged").iterdir()) == []


def filled(folder: Path, epochs: int) -> SinkFolder:
    sink = SinkFolder(str(folder), durable=False)
    for epoch in range(epochs):
        sink.publish(epoch, stage(folder, epoch, [2 * epoch, 2 * epoch + 1]))
    return sink


def test_small_files_are_merged(tmp_path):
    sink = filled(tmp_path, MERGE_FILES)
    assert sink.merge()
    assert not sink.merge()
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == list(range(2 * MERGE_FILES))
    [file] = [path for path in tmp_path.iterdir() if path.suffix == ".parquet"]
    assert file.name == file_name(0, MERGE_FILES - 1, "merged", 0, ".parquet")
    table = ds.dataset(file).to_table()
    assert table["epoch"].to_pylist() == [n // 2 for n in table["n"].to_pylist()]


def test_merged_files_are_merged_again_when_there_are_many(tmp_path):
    sink = filled(tmp_path, MERGE_FILES * MERGE_FILES // 8)
    while sink.merge():
        pass
    assert len([path for path in tmp_path.iterdir() if path.suffix == ".parquet"]) < MERGE_FILES
    assert seen_in_committed(tmp_path) == list(range(2 * MERGE_FILES * MERGE_FILES // 8))


def crash_points(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Let the driver die before its ``at``-th write, rename or removal; the list says what came before."""
    steps: list[str] = []

    def guarded(name: str) -> None:
        original = getattr(sink_files, name) if name != "rename_file" else sink_files.disk.rename_file

        def step(*arguments: Any, **more: Any) -> Any:
            if len(steps) == at:
                raise Crash
            steps.append(name)
            return original(*arguments, **more)

        monkeypatch.setattr(sink_files.disk if name == "rename_file" else sink_files, name, step)

    for name in ("write_atomically", "remove_file", "rename_file"):
        guarded(name)
    return steps


@pytest.mark.parametrize("at", range(MERGE_FILES + 4))
def test_a_merge_survives_a_crash_at_every_step(tmp_path, at):
    filled(tmp_path, MERGE_FILES)
    with pytest.MonkeyPatch.context() as monkeypatch:
        steps = crash_points(monkeypatch, at)
        try:
            SinkFolder(str(tmp_path), durable=False).merge()
            died = False
        except Crash:
            died = True
    assert died == (at < MERGE_FILES + 3), steps
    everything = list(range(2 * MERGE_FILES))
    assert seen_in_committed(tmp_path) == everything, "before the restart"
    SinkFolder(str(tmp_path), durable=False).recover(MERGE_FILES - 1, ())
    assert seen_by_plain_reader(tmp_path) == seen_in_committed(tmp_path) == everything


@pytest.mark.parametrize("at", range(4))
def test_publishing_survives_a_crash_at_every_step(tmp_path, at):
    SinkFolder(str(tmp_path), durable=False).publish(0, stage(tmp_path, 0, [1]))
    files = (
        *stage(tmp_path, 1, [2], "a"),
        *[SinkFile(f.staged, f"x=1/{f.name}", f.rows, f.size) for f in stage(tmp_path, 1, [3], "b")],
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        crash_points(monkeypatch, at)
        try:
            SinkFolder(str(tmp_path), durable=False).publish(1, files)
            died = False
        except Crash:
            died = True
    assert died == (at < 3)
    assert seen_in_committed(tmp_path) in ([1], [1, 2, 3])
    SinkFolder(str(tmp_path), durable=False).recover(1, files)
    assert seen_in_committed(tmp_path) == [1, 2, 3]


def test_large_files_and_text_are_left_alone():
    sizes = {file_name(epoch, epoch, 0, 0, ".parquet"): sink_files.SMALL_BYTES for epoch in range(100)}
    assert merge_of(sizes) is None
    assert merge_of({file_name(epoch, epoch, 0, 0, ".csv"): 10 for epoch in range(100)}) is None


def test_a_merge_stays_within_one_folder():
    sizes = {f"day={epoch % 2}/{file_name(epoch, epoch, 0, 0, '.parquet')}": 10 for epoch in range(2 * MERGE_FILES)}
    names = merge_of(sizes)
    assert names is not None
    assert {Path(name).parent for name in names} == {Path("day=0")}


def test_a_damaged_or_newer_list_is_refused(tmp_path):
    (tmp_path / COMMITTED).write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        committed_files(str(tmp_path))
    (tmp_path / COMMITTED).write_text('{"epoch": 3, "format": 2}')
    with pytest.raises(CheckpointError, match="has format 2; this midstream reads up to 1"):
        committed_files(str(tmp_path))
