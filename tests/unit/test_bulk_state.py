"""Whole bins: large files of which only some bins are read, loading ahead of time, dropping, compacting."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from midstream.control.messages import WorkerId
from midstream.data.key_space import KeySpace
from midstream.engine.clock import ManualClock
from midstream.errors import CheckpointError, StateError
from midstream.ids import BinId, Epoch, PartitionId, Run
from midstream.runtime.prefetcher import Prefetcher
from midstream.state import base as base_module
from midstream.state import file_index, mapped
from midstream.state import files as files_module
from midstream.state import lineage as lineage_module
from midstream.state.access import StateAccess
from midstream.state.base import Base
from midstream.state.files import Author, FileKind, FileRef, StateFiles, rows_of_bins, table_of
from midstream.state.lineage import Lineage
from midstream.state.mapped import Mapped
from midstream.state.task import TaskState

SPACES = [KeySpace(1), KeySpace(16), KeySpace(256), KeySpace(4096)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks of a few rows, and turns of fewer."""
    for module in (file_index, files_module):
        monkeypatch.setattr(module, "BLOCK", 1000)
    monkeypatch.setattr(base_module, "_TURN", 7)
    monkeypatch.setattr(base_module, "_LIGHT", 500)
    monkeypatch.setattr(mapped, "FIRST_SIZE", 1 << 20)


def author(epoch: int, partition: int = 0) -> Author:
    return Author("count", Epoch(epoch), Run(0), PartitionId(partition), 0)


def keys_of(space: KeySpace, count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return sorted({space.prefix(rng.randrange(space.bins), 0) + b"%06d" % rng.randrange(10**6) for _ in range(count)})


class Job:
    """A checkpoint with the state of one operator, and a dict with the truth."""

    def __init__(self, folder: Path, space: KeySpace) -> None:
        self.folder, self.space = folder, space
        self.files = StateFiles(str(folder / "checkpoint"), durable=False, space=space)
        self.lineage = Lineage.start("count", space.bins)
        self.truth: dict[bytes, bytes] = {}
        self._writer = self.base("writer")

    def base(self, name: str) -> Base:
        return Base(str(self.folder / name), "job, count", self.files)

    def commit(self, keys: list[bytes], value: bytes | None) -> None:
        with TaskState(self._writer, self.lineage, self.space.all) as state:
            if value is None:
                state.delete_many(keys)
            else:
                state.put_many(keys, [value] * len(keys))
            epoch = self.lineage.epoch + 1
            delta = state.write_delta(author(epoch))
            rewrites = state.write_rewrites(author(epoch))
        assert delta is not None
        self.lineage = Lineage.decode(self.lineage.after(Epoch(epoch), [delta], rewrites).encode())
        for key in keys:
            if value is None:
                self.truth.pop(key, None)
            else:
                self.truth[key] = value

    def check(self, base: Base, bins: list[BinId]) -> None:
        assert base.catch_up(self.lineage, bins) == 0, "everything was there"
        with base.view(self.lineage, bins) as view:
            table = view.table(bins)
            wanted = {key: value for key, value in self.truth.items() if self.space.bin_of(key) in set(bins)}
            assert dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)) == wanted
            assert [view.count(number) for number in bins] == [
                sum(self.space.bin_of(key) == number for key in wanted) for number in bins
            ]


@pytest.fixture(
    params=[*SPACES[:-1], pytest.param(SPACES[-1], marks=pytest.mark.long)], ids=lambda space: f"{space.bins} bins"
)
def job(tmp_path, request):
    made = Job(tmp_path, request.param)
    keys = keys_of(made.space, 400)
    made.commit(keys, b"first")
    made.commit(keys[::3], b"second, which is longer" * 20)
    made.commit(keys[::7], None)
    yield made
    made._writer.close()


def load(base: Base, job: Job, bins: list[BinId], limit: int) -> int:
    """Load all of these bins; return the number of calls that it took."""
    calls, left = 0, [number for number in bins if job.lineage.position(number)]
    while left:
        loaded = base.prefetch(job.lineage, left, limit)
        assert loaded.bins
        assert not set(loaded.bins) & set(loaded.left)
        left, calls = list(loaded.left), calls + 1
    return calls


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("space", SPACES, ids=lambda space: f"{space.bins} bins")
@pytest.mark.parametrize("rows", [1, 30, 400])
def test_some_bins_of_a_file_are_those_of_the_whole_file(tmp_path, space, rows):
    files = StateFiles(str(tmp_path), durable=False, space=space)
    keys = keys_of(space, rows)
    table = table_of(keys, [None if key[-1] == 48 else key * 3 for key in keys])
    ref = files.write(table, FileKind.SNAPSHOT, author(0))
    assert files.read(ref).equals(table)
    rng = random.Random(1)
    present = sorted({space.bin_of(key) for key in keys})
    for size in {0, 1, len(present) // 2, len(present)}:
        bins = rng.sample(present, size)
        parts = list(files.read_bins(ref, bins))
        found = pa.concat_tables([table.slice(0, 0), *parts])
        assert found.equals(rows_of_bins(table, bins, space))
        assert all(part.num_rows for part in parts)


def test_a_large_file_is_an_arrow_file_that_others_can_read(tmp_path):
    files = StateFiles(str(tmp_path), durable=False)
    table = table_of(keys_of(files.space, 400), [b"x"] * len(keys_of(files.space, 400)))
    ref = files.write(table, FileKind.SNAPSHOT, author(0))
    with pa.OSFile(str(tmp_path / ref.name)) as source:
        reader = pa.ipc.open_file(source)
        assert reader.num_record_batches > 5
        assert reader.read_all().replace_schema_metadata().equals(table)


def test_a_bin_is_read_without_the_rest_of_the_file(tmp_path, monkeypatch):
    files = StateFiles(str(tmp_path), durable=False)
    keys = keys_of(files.space, 400)
    ref = files.write(table_of(keys, keys), FileKind.SNAPSHOT, author(0))
    blocks = []
    real = StateFiles._block

    def block(*args: Any) -> pa.RecordBatch:
        blocks.append(args)
        return real(*args)

    monkeypatch.setattr(StateFiles, "_block", block)
    assert sum(part.num_rows for part in files.read_bins(ref, [files.space.bin_of(keys[200])])) >= 1
    assert 1 <= len(blocks) <= 2


def test_every_byte_that_is_read_was_checked(tmp_path):
    files = StateFiles(str(tmp_path), durable=False)
    keys = keys_of(files.space, 120)
    ref = files.write(table_of(keys, keys), FileKind.SNAPSHOT, author(0))
    path = tmp_path / ref.name
    good = path.read_bytes()
    whole = files.read(ref)
    found = file_index.index_in(len(good), lambda size, at: good[at : at + size], files.space)
    assert found is not None
    checked = range(found[0].blocks[0].offset, good.index(file_index.MAGIC) + len(file_index.MAGIC))
    assert len(checked) > 0.7 * len(good), "the rest is what other readers of Arrow files need"
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        if at in checked:
            with pytest.raises(CheckpointError, match="damaged"):
                files.read(ref)
        else:
            with contextlib.suppress(CheckpointError):  # if the index cannot be found
                assert files.read(ref).equals(whole)


@pytest.mark.parametrize("left", [0, 5, 100, 2000])
def test_a_shortened_file_is_refused(tmp_path, left):
    files = StateFiles(str(tmp_path), durable=False)
    keys = keys_of(files.space, 120)
    ref = files.write(table_of(keys, keys), FileKind.SNAPSHOT, author(0))
    path = tmp_path / ref.name
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match="damaged"):
        list(files.read_bins(ref, files.space.all))


def test_a_large_file_from_before_there_were_indexes_is_read(tmp_path, monkeypatch):
    files = StateFiles(str(tmp_path), durable=False)
    keys = keys_of(files.space, 120)
    with monkeypatch.context() as patch:
        patch.setattr(files_module, "BLOCK", 1 << 30)
        ref = files.write(table_of(keys, keys), FileKind.SNAPSHOT, author(0))
    assert ref.size > 2000
    assert files.read(ref).equals(table_of(keys, keys))
    [part] = files.read_bins(ref, [files.space.bin_of(keys[0])])
    assert part["key"].to_pylist() == [key for key in keys if key[0] == keys[0][0]]


# ── loading ahead of time ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limit", [1, 3000, 1 << 30])
def test_bins_loaded_ahead_of_time_are_complete(job, limit):
    base = job.base("taker")
    wanted = [number for number in job.space.all if number % 3 == 0]
    calls = load(base, job, wanted, limit)
    assert calls >= 1
    job.check(base, wanted)
    assert set(base.positions()) <= set(wanted), "nothing else was loaded"
    base.close()


def test_loading_follows_new_deltas_and_reads_only_them(job, monkeypatch):
    base = job.base("taker")
    load(base, job, list(job.space.all), 1 << 30)
    [first, *_] = job.truth
    job.commit([first], b"third")
    read = []
    real = StateFiles.read_bins

    def read_bins(self: StateFiles, ref: FileRef, bins: Any) -> Any:
        read.append(ref)
        return real(self, ref, bins)

    monkeypatch.setattr(StateFiles, "read_bins", read_bins)
    assert load(base, job, list(job.space.all), 1 << 30) == 1
    assert [ref.rows for ref in read] == [1]
    job.check(base, list(job.space.all))
    assert base.prefetch(job.lineage, job.space.all, 1).bins == ()
    base.close()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("turn", range(0, 40, 7))
@pytest.mark.parametrize("work", ["load", "drop"])
def test_work_that_stops_at_any_turn_leaves_a_base_that_is_correct(job, monkeypatch, turn, work):
    bins = list(job.space.all)
    base = job.base("host")
    if work == "drop":
        base.catch_up(job.lineage, bins)
    left = [turn]
    real = Base._in_turn

    def in_turn(self, change, room=0):
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        return real(self, change, room)

    with monkeypatch.context() as patch:
        patch.setattr(Base, "_in_turn", in_turn)
        with contextlib.suppress(Stopped):
            _ = load(base, job, bins, 1 << 30) if work == "load" else base.drop(bins)
    # Keys that are deleted meanwhile are in no file any more, once there are snapshots without them.
    monkeypatch.setattr(lineage_module, "MAX_ENTRIES", 1)
    job.commit(sorted(job.truth)[::2], None)
    job.commit(sorted(job.truth)[::3], b"last")
    job.commit(sorted(job.truth)[::3], b"at last")
    base.catch_up(job.lineage, bins)
    job.check(base, bins)
    base.close()


def test_a_task_that_needs_a_bin_while_it_is_being_loaded_loads_it_itself(job, monkeypatch):
    base = job.base("host")
    bins = list(job.space.all)
    real = Base._in_turn
    turns = []

    def in_turn(self, change, room=0):
        turns.append(change)
        if len(turns) == 4:
            base.catch_up(job.lineage, bins)
        return real(self, change, room)

    monkeypatch.setattr(Base, "_in_turn", in_turn)
    left, taken = bins, False
    while left:
        loaded = base.prefetch(job.lineage, left, 1 << 30)
        taken |= loaded.left == () != tuple(left) and not loaded.bins
        left = loaded.left
    assert taken, "all that was claimed was loaded by the task"
    job.check(base, bins)
    base.close()


def test_a_thread_may_load_while_another_reads(job):
    base = job.base("host")
    bins = list(job.space.all)
    half = len(bins) // 2 or 1
    own, others = bins[:half], bins[half:]
    base.catch_up(job.lineage, own)
    thread = threading.Thread(target=load, args=(base, job, others, 2000))
    thread.start()
    while thread.is_alive():
        job.check(base, own)
    thread.join()
    job.check(base, bins)
    base.close()


# ── dropping ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_host_keeps_what_it_owns_and_reads_the_rest_again(job):
    access = StateAccess("job", job.files.location, str(job.folder / "bases"), durable=False)
    base = access.base(job.lineage)
    bins = list(job.space.all)
    base.catch_up(job.lineage, bins)
    kept = [number for number in bins if number % 4 == 1]
    access.drop(job.lineage, set(bins) - set(kept))
    assert set(base.positions()) <= set(kept)
    job.check(base, [number for number in kept if number in base.positions()])
    base.catch_up(job.lineage, bins)
    job.check(base, bins)
    access.close()


READER = """
import sys
from midstream.ids import BinId
from midstream.state import mapped
from midstream.state.base import Base
from midstream.state.files import StateFiles
from midstream.state.lineage import Lineage
mapped.FIRST_SIZE = 1 << 20
folder, lineage = sys.argv[1], Lineage.decode(bytes.fromhex(sys.argv[2]))
base = Base(folder + "/host", "job, count", StateFiles(folder + "/checkpoint", durable=False, space=lineage.space))
view = base.view(lineage, [BinId(3)])
for line in sys.stdin:
    if line == "load\\n":
        print(base.catch_up(lineage, [BinId(5)]), flush=True)
    else:
        print(sum(1 for _ in view.scan(BinId(3), 0)), flush=True)
"""


def test_the_space_of_dropped_bins_is_given_back_without_disturbing_readers(tmp_path):
    job = Job(tmp_path, KeySpace(16))
    job.commit(keys_of(job.space, 6000), bytes(2000))
    base = job.base("host")
    base.catch_up(job.lineage, job.space.all)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path), job.lineage.encode().hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(word: str) -> int:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(word + "\n")
        reader.stdin.flush()
        return int(reader.stdout.readline())

    rows = {number: sum(key[0] == number for key in job.truth) for number in job.space.all}
    assert ask("read") == rows[BinId(3)]
    assert base.drop(job.space.all[12:]) == sum(rows[number] for number in job.space.all[12:])
    assert base.compact() == 0, "more than a quarter is in use, if what is kept in reserve is counted"
    assert base.drop([number for number in job.space.all[:12] if number != 3]) > 500
    before = base.disk_bytes  # more than at first: while somebody reads, LMDB keeps what was deleted
    freed = base.compact()
    assert freed == before - base.disk_bytes > 0
    assert base.disk_bytes <= before // 4
    assert sum(1 for _ in (tmp_path / "host").glob("*/data.mdb")) == 1
    assert ask("read") == rows[BinId(3)], "it reads the old file"
    assert ask("load") == rows[BinId(5)], "it goes on with the new one"
    assert ask("read") == rows[BinId(3)]
    job.check(base, [BinId(3), BinId(5)])
    base.close()
    reader.communicate()


def mostly_free(tmp_path: Path) -> tuple[Job, Base]:
    """A base of which three bins of 16 are left."""
    job = Job(tmp_path, KeySpace(16))
    job.commit(keys_of(job.space, 6000), bytes(2000))
    base = job.base("host")
    base.catch_up(job.lineage, job.space.all)
    base.drop(job.space.all[3:])
    return job, base


@pytest.mark.parametrize("step", ["_allocate", "_open_env", "_write_current"])
def test_a_copy_that_does_not_fit_leaves_all_as_it_was(tmp_path, step):
    job, base = mostly_free(tmp_path)
    kept = list(job.space.all[:3])
    before = sorted(path.name for path in (tmp_path / "host").iterdir())
    with base.view(job.lineage, kept) as view, pytest.MonkeyPatch.context() as patch:
        rows = view.table(kept)

        def full(*_: Any) -> None:
            patch.undo()
            raise OSError(errno.ENOSPC, "no space left")

        patch.setattr(mapped if step == "_allocate" else Mapped, step, full)
        with pytest.raises(StateError, match="the disk is full"):
            base.compact()
        assert sorted(path.name for path in (tmp_path / "host").iterdir()) == before, "no copy is left behind"
        assert view.table(kept) == rows
    job.check(base, kept)
    assert base.compact() > 0
    job.check(base, kept)
    base.close()


def test_a_copy_is_made_only_if_the_disk_has_room_for_it_and_others(tmp_path, monkeypatch):
    job, base = mostly_free(tmp_path)
    left = tmp_path / "host" / "copy of a process that was killed"
    left.mkdir()
    (left / "data.mdb").write_bytes(bytes(1000))
    free = mapped.ROOM_BESIDE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert base.compact() == 0
    free = 2 * mapped.ROOM_BESIDE
    assert base.compact() > 0
    assert not left.exists()
    job.check(base, list(job.space.all[:3]))
    base.close()


def test_the_space_of_bins_that_an_executor_gave_away_is_given_back_while_its_tasks_read(tmp_path):
    job = Job(tmp_path, KeySpace(16))
    job.commit(keys_of(job.space, 6000), bytes(2000))
    access = StateAccess("job", job.files.location, str(tmp_path / "bases"), durable=False)
    base = access.base(job.lineage)
    base.catch_up(job.lineage, job.space.all)
    before = base.disk_bytes
    kept = [BinId(3)]
    prefetcher = Prefetcher(access, WorkerId("host", 1), ManualClock())
    with base.view(job.lineage, kept) as view:
        rows = view.table(kept)
        prefetcher.free(job.lineage, [number for number in job.space.all if number not in kept])
        while prefetcher.step() is not None:
            assert view.table(kept) == rows
        assert view.table(kept) == rows
    assert base.disk_bytes <= before // 4
    assert access.held(job.lineage) == set(kept)
    job.check(base, kept)
    access.close()


def test_a_base_with_another_number_of_bins_is_refused(tmp_path):
    base = Job(tmp_path, KeySpace(16)).base("host")
    with pytest.raises(StateError, match="'count' has 4096 bins, but its base was opened with 16"):
        base.catch_up(Lineage.start("count", 4096), [BinId(0)])
    base.close()


def test_references_count_rows_by_bin_in_any_key_space(tmp_path):
    for space in SPACES:
        files = StateFiles(str(tmp_path / str(space.bins)), durable=False, space=space)
        keys = keys_of(space, 50)
        ref: FileRef = files.write(table_of(keys, keys), FileKind.DELTA, author(0))
        bins = [space.bin_of(key) for key in keys]
        assert space.unpack(ref.bins).tolist() == sorted(set(bins))
        assert list(ref.counts) == [bins.count(number) for number in sorted(set(bins))]
