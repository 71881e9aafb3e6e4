"""State files are read exactly as written, or not at all."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from midstream.errors import CheckpointError
from midstream.ids import Epoch, PartitionId, Run
from midstream.state.files import Author, FileKind, FileRef, StateFiles, bin_ranges, table_of
from midstream.state.garbage import garbage
from midstream.storage.documents import FORMAT


def author(operator: str = "count", epoch: int = 3, attempt: int = 0) -> Author:
    return Author(operator, Epoch(epoch), Run(0), PartitionId(1), attempt)


ROWS = table_of([b"\x02\x00a", b"\x02\x00b", b"\xff\x00c"], [b"1", None, b""])


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    return StateFiles(str(tmp_path / "state"))


def path_of(files: StateFiles, ref: FileRef) -> Path:
    return Path(files.location) / ref.name


@pytest.mark.parametrize("table", [ROWS, ROWS.slice(0, 0), ROWS.slice(1, 1), pa.concat_tables([ROWS, ROWS.slice(2)])])
def test_rows_are_read_as_written(files, table):
    ref = files.write(table, FileKind.DELTA, author())
    assert files.read(ref).equals(table)
    assert ref.rows == table.num_rows


def test_a_file_ref_counts_the_rows_of_each_bin(files):
    ref = files.write(ROWS, FileKind.DELTA, author())
    assert (ref.bins, ref.counts, ref.epoch) == (b"\x02\xff", (2, 1), 3)
    assert list(bin_ranges(files.read(ref))) == [(2, 0, 2), (255, 2, 3)]


def test_attempts_never_overwrite_each_other(files):
    refs = [files.write(ROWS, FileKind.DELTA, author(attempt=attempt)) for attempt in range(3)]
    other = files.write(ROWS.slice(1), FileKind.DELTA, author())  # the same attempt, by another driver process
    assert len({ref.name for ref in [*refs, other]}) == 4
    assert all(files.read(ref).equals(ROWS) for ref in refs)


def test_a_file_truncated_anywhere_is_an_error(files):
    ref = files.write(ROWS, FileKind.DELTA, author())
    path = path_of(files, ref)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=f"expected {ref.size} bytes.*found {size} bytes") as caught:
            files.read(ref)
        assert caught.value.file == ref.name


def test_a_bit_flipped_anywhere_is_an_error(files):
    ref = files.write(ROWS, FileKind.DELTA, author())
    path = path_of(files, ref)
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(CheckpointError, match="is damaged"):
            files.read(ref)


def test_a_missing_file_is_an_error_that_says_what_to_do(files):
    ref = files.write(ROWS, FileKind.SNAPSHOT, author())
    path_of(files, ref).unlink()
    with pytest.raises(CheckpointError, match=r"is missing from .*Restore it from a copy") as caught:
        files.read(ref)
    assert caught.value.file == ref.name


def test_a_file_with_other_columns_is_an_error(files):
    table = ROWS.rename_columns(["k", "v"])
    with pytest.raises(KeyError):
        files.write(table, FileKind.DELTA, author())
    ref = files.write(ROWS.append_column("extra", pa.array([1, 2, 3])), FileKind.DELTA, author())
    with pytest.raises(CheckpointError, match="another version of midstream"):
        files.read(ref)


@pytest.mark.parametrize("operator", ["a/b", "..", "ünï", "x" * 500, "a-b c%", ".hidden"])
def test_any_operator_name_yields_a_valid_file(files, operator):
    ref = files.write(ROWS, FileKind.DELTA, author(operator))
    assert files.names() == [ref.name]
    assert files.read(ref).equals(ROWS)


def test_long_operator_names_get_distinct_folders(files):
    first = files.write(ROWS, FileKind.DELTA, author("x" * 500 + "1"))
    second = files.write(ROWS, FileKind.DELTA, author("x" * 500 + "2"))
    assert first.name.split("/")[0] != second.name.split("/")[0]


def test_files_can_be_listed_and_removed(files):
    assert files.names() == []
    refs = [files.write(ROWS, FileKind.DELTA, author(epoch=epoch)) for epoch in (2, 1)]
    (Path(files.location) / "count" / "notes.txt").write_text("not ours")
    assert files.names() == sorted(ref.name for ref in refs)
    files.remove([refs[0].name, refs[0].name])
    assert files.names() == [refs[1].name]


def test_a_location_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot write '.*/count/"):
        StateFiles(str(tmp_path / "state")).write(ROWS, FileKind.DELTA, author())


def test_a_location_may_be_a_uri(tmp_path):
    files = StateFiles(f"file://{tmp_path}/state")
    assert files.read(files.write(ROWS, FileKind.DELTA, author())).equals(ROWS)


def test_the_sweep_finds_unfinished_files(files, tmp_path):
    half = "count/0000000003-0-0-0-delta-0123456789abcdef.arrow.77.tmp"
    (tmp_path / half).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / half).write_bytes(b"half of it")
    found = StateFiles(str(tmp_path))
    assert found.names() == [half]
    assert garbage(found.names(), [], Epoch(2)) == []
    assert garbage(found.names(), [], Epoch(3)) == [half]
    found.remove([half])
    assert found.names() == []


def test_a_file_of_another_format_is_refused(files, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("midstream.state.files.FORMAT", FORMAT + 1)
        ref = files.write(ROWS, FileKind.DELTA, author())
    with pytest.raises(CheckpointError, match=rf"file of state 'count/.* has format {FORMAT + 1}, which is newer"):
        files.read(ref)
