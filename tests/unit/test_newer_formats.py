"""Whatever a later midstream wrote in a newer format is refused, before anything is changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from midstream import (
    ControlOperation,
    FileSink,
    Flow,
    ListSource,
    Update,
    committed_files,
    fork,
    savepoints,
    take_savepoint,
)
from midstream.change.configuration import read_configuration
from midstream.change.fork import ForkRecord
from midstream.checkpoint.audit_files import read_history
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.rewind_record import Rewind
from midstream.checkpoint.sink_files import MERGING, Merge
from midstream.control.journal import read as read_journal
from midstream.errors import CheckpointError, JobFailed
from midstream.ids import Revision
from midstream.planner.assignment import pack_assignments, unpack_assignments
from midstream.planner.programs import StageProgram
from midstream.storage.checksums import with_checksum, without_checksum
from midstream.storage.documents import FORMAT, write_struct
from midstream.testing import ChangeAt, ControlAt, run_local
from tests.unit.test_growth import count

NO_OWNERS = pack_assignments({}).data
READERS: dict[str, Callable[[Path, Path], object]] = {
    "midstream.json": lambda folder, file: Checkpoint.of_any_flow(str(folder / "c")),
    "epochs": lambda folder, file: Checkpoint.of_any_flow(str(folder / "c")).newest_manifest(),
    "changes": lambda folder, file: Checkpoint.of_any_flow(str(folder / "c")).changes.records(),
    "controls": lambda folder, file: Checkpoint.of_any_flow(str(folder / "c")).controls.records(),
    "savepoints": lambda folder, file: savepoints(str(folder / "c")),
    "rewind.json": lambda folder, file: Checkpoint.of_any_flow(str(folder / "c")).rewind_under_way(),
    "fork.json": lambda folder, file: fork(str(folder / "c"), "here", str(folder / "fork")),
    "configuration": lambda folder, file: read_configuration(file.read_bytes(), Revision(1), NO_OWNERS),
    "assignments": lambda folder, file: unpack_assignments(file.read_bytes()),
    "program": lambda folder, file: StageProgram.from_bytes(file.read_bytes()),
    "journal": lambda folder, file: read_journal(file.read_bytes()),
    "index of histories": lambda folder, file: read_history(str(folder / "c" / "audit")),
    "history": lambda folder, file: read_history(str(folder / "c" / "audit")),
    "_midstream.json": lambda folder, file: run(folder, fails_at=9),
    "_committed.json": lambda folder, file: committed_files(str(folder / "out")),
    "_merge.json": lambda folder, file: committed_files(str(folder / "out")),
}
"""By kind of document, what reads it. Files of state have a test in ``test_state_files.py``."""


def run(folder: Path, fails_at: int) -> None:
    def checked(row: dict[str, int]) -> dict[str, int]:
        assert row["n"] != fails_at
        return row

    flow = Flow("f")
    rows = flow.source("in", ListSource([[{"n": n}] for n in range(4)], "n int")).map("m", checked)
    rows.key_by("k", "n").process("p", count, returns="n int").sink("out", FileSink(folder / "out"))
    update = ChangeAt.of(1, Update("m", checked), scheduler="epoch")
    run_local(flow, checkpoint=str(folder / "c"), changes=[update, ControlAt(1, Asked())], audit="n")


class Asked(ControlOperation):
    mode = "blocking"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that failed, so that there is a journal, and whose sink was about to merge files; a fork of it and
    a rewind that were not finished."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.raises(JobFailed):
        run(folder, fails_at=3)
    (folder / "out" / MERGING).write_bytes(write_struct(Merge("_staged/new", "new", ("old",))))
    checkpoint = str(folder / "c")
    savepoint = take_savepoint(checkpoint, "here")
    rewind = Rewind(savepoint.manifest, 1, (), "test", 0.0)
    (folder / "c" / "rewind.json").write_bytes(with_checksum(write_struct(rewind)))
    identity = Checkpoint.of_any_flow(checkpoint).identity
    (folder / "fork").mkdir()
    record = ForkRecord(identity.job, savepoint.name, savepoint.epoch, identity)
    (folder / "fork" / "fork.json").write_bytes(write_struct(record))
    return folder


def kind_of(path: Path, folder: Path) -> str | None:
    """The kind of document that a file is; None for other files."""
    parts = path.relative_to(folder).parts
    match parts:
        case ("c", "blobs", *_):
            data = path.read_bytes()
            kinds = {b'"stage":': "program", b'"stages":': "assignments", b'"operators":': "configuration"}
            return next((kind for mark, kind in kinds.items() if data.startswith(b"{") and mark in data), None)
        case ("c", "audit", name):
            return "index of histories" if name.endswith(".json") else "history"
        case ("c", "state" | "lock", *_) | ("out", "_staged", *_):
            return None
        case ("fork", name):
            return name
        case ("c", name, *_) | ("out", name):
            return name if parts[0] == "c" or name.startswith("_") else None
    raise AssertionError(parts)


def newer(path: Path) -> None:
    """Write a document as it is, but for the number of its format."""
    data = path.read_bytes()
    ours, next_one = (f'"format":{number}'.encode() for number in (FORMAT, FORMAT + 1))
    if (content := without_checksum(data)) is not None:
        path.write_bytes(with_checksum(content.replace(ours, next_one)))
    elif data.startswith(b"{"):
        path.write_bytes(data.replace(ours, next_one))
    elif path.suffix == ".arrow":
        table = pa.ipc.open_file(data).read_all().replace_schema_metadata({"format": str(FORMAT + 1)})
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_bytes(msgspec.msgpack.encode(msgspec.msgpack.decode(data) | {"format": FORMAT + 1}))
    assert path.read_bytes() != data


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("kind", READERS)
def test_a_document_in_a_newer_format_is_refused_and_nothing_is_changed(written: Path, tmp_path: Path, kind: str):
    folder = Path(shutil.copytree(written, tmp_path / "copy"))
    file = max(path for path in folder.rglob("*") if path.is_file() and kind_of(path, folder) == kind)
    if kind != "rewind.json":
        (folder / "c" / "rewind.json").unlink()
    if kind not in ("_midstream.json", "_merge.json", "fork.json"):
        (folder / "out" / MERGING).unlink()
        READERS[kind](folder, file)  # as it is, it can be read
    newer(file)
    before = contents(folder)
    with pytest.raises(CheckpointError, match=f"has format {FORMAT + 1}.*newer than format {FORMAT}.*Upgrade"):
        READERS[kind](folder, file)
    assert contents(folder) == before


def test_no_kind_of_document_is_forgotten(written: Path):
    found = {kind_of(path, written) for path in written.rglob("*") if path.is_file()}
    assert found - {None} == READERS.keys()
