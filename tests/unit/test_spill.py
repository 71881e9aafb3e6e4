"""Changes that do not fit in memory."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.data.times import EpochTimes
from midstream.errors import StateError
from midstream.ids import BinId, Epoch, PartitionId, Revision, Run
from midstream.state import keeper as keeper_module
from midstream.state import spill as spill_module
from midstream.state import task as task_module
from midstream.state.access import mapped_bytes, resident_bytes
from midstream.state.base import ALL_BINS, Base
from midstream.state.files import Author, StateFiles
from midstream.state.keeper import HandleKeeper
from midstream.state.keys import Namespace
from midstream.state.lineage import Lineage
from midstream.state.spill import UNKNOWN, Spill
from midstream.state.task import TaskState
from midstream.state.values import ObjectCodec
from tests.disks import small_disk

ALL = [BinId(1), BinId(2)]


def key(number: int, bin_id: int = 1, namespace: Namespace = Namespace.VALUE) -> bytes:
    return bytes([bin_id, namespace]) + b"%07d" % number


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[Spill]:
    made = Spill(tmp_path)
    yield made
    made.close()


@given(st.lists(st.dictionaries(st.binary(min_size=1, max_size=3), st.none() | st.binary(max_size=3)), max_size=5))
def test_a_spill_behaves_like_a_dict(
    tmp_path_factory: pytest.TempPathFactory, puts: list[dict[bytes, bytes | None]]
) -> None:
    spill, wanted = Spill(tmp_path_factory.getbasetemp()), dict[bytes, bytes | None]()
    for changes in puts:
        spill.put(sorted(changes.items(), key=lambda change: change[0]))
        wanted |= changes
        assert spill.get_many([*wanted, b"none"]) == [*wanted.values(), UNKNOWN]
        assert list(spill.scan()) == sorted(wanted.items(), key=lambda change: change[0])
        assert len(spill) == len(wanted)
    spill.close()


def test_a_scan_sees_what_was_there_when_it_began(spill: Spill) -> None:
    spill.put([(b"a", b"1"), (b"b", b"2"), (b"d", b"4")])
    rows = spill.scan(b"a", b"d")
    spill.put([(b"b", None), (b"c", b"3")])
    assert list(rows) == [(b"a", b"1"), (b"b", b"2")]
    assert list(spill.scan(b"a", b"d")) == [(b"a", b"1"), (b"b", None), (b"c", b"3")]


def test_the_file_of_a_spill_has_no_name_that_could_be_left_behind(spill: Spill, tmp_path: Path) -> None:
    spill.put([(key(number), b"x" * 1000) for number in range(1000)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(mapped_bytes() == 0, reason="this system does not tell how much memory is mapped from files")
def test_it_takes_little_memory_however_many_pages_keys_are_spread_over(spill: Spill) -> None:
    value = b"x" * 1500  # two of them to a page
    before = resident_bytes() - mapped_bytes()
    for _ in range(2):
        spill.put((key(number), value) for number in range(20_000))
    assert resident_bytes() - mapped_bytes() - before < 25 << 20, "40 MB were kept when there was one transaction"
    assert len(spill) == 20_000


def fill(spill: Spill) -> None:
    for start in itertools.count(step=100):
        spill.put([(key(number), b"x" * 500) for number in range(start, start + 100)])


def test_a_full_disk_is_a_clear_error_and_space_that_is_freed_is_used(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", megabytes=2) as folder:
        spill = Spill(folder)
        with pytest.raises(StateError, match=r"too many for memory .*small.*the disk is full.*Nothing is lost.*Free"):
            fill(spill)
        spill.close()
        spill = Spill(folder)
        spill.put([(key(0), b"1")])
        assert spill.get_many([key(0)]) == [b"1"]
        spill.close()


def test_more_than_the_file_can_hold_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "MAP_BYTES", 4 << 20)
    spill = Spill(tmp_path)
    with pytest.raises(
        StateError, match=r"cannot be written .*a task can change 4 MB for each operator.*bound the rows"
    ):
        fill(spill)
    spill.close()


def test_a_task_with_more_changes_than_fit_in_memory_is_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    for held in (1 << 30, 2_000):
        monkeypatch.setattr(task_module, "HELD_BYTES", held)
        files = StateFiles(str(tmp_path / f"checkpoint {held}"))
        base = Base(str(tmp_path / f"base {held}"), "count", files)
        lineage = Lineage.start("count")
        with TaskState(base, lineage, ALL) as state:
            state.put_many([key(n) for n in range(0, 60, 2)], [b"%d" % n for n in range(0, 60, 2)])
            delta = state.write_delta(Author("count", Epoch(0), Run(0), PartitionId(0), 0))
        assert delta is not None
        with TaskState(base, lineage.after(Epoch(0), [delta]), ALL) as state:
            for start in range(0, 50, 10):
                state.put_many([key(n) for n in range(start, start + 10)], [b"new"] * 10)
                state.delete_many([key(n) for n in range(start, start + 20, 3)])
                state.put_many([key(start, 2 if start else 1, Namespace.EVENT_TIMER)], [b""])
            found.append(
                (
                    state.get_many([key(n) for n in range(70)]),
                    list(state.scan(BinId(1), Namespace.VALUE)),
                    list(state.scan(BinId(1), Namespace.VALUE, b"0000010", b"0000020")),
                    state.occupied(Namespace.EVENT_TIMER),
                    state.occupied(Namespace.LIST),
                    state.changes().to_pylist(),
                )
            )
            assert (state._spill is not None) == (held == 2_000)
        base.close()
    assert found[0] == found[1]
    assert len(found[0][5]) > 50
    assert found[0][3] == ALL


def test_the_same_keys_again_and_again_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "HELD_BYTES", 10_000)
    base = Base(str(tmp_path / "base"), "count", StateFiles(str(tmp_path / "checkpoint")))
    with TaskState(base, Lineage.start("count"), ALL) as state:
        for _ in range(100):
            state.put_many([key(n) for n in range(10)], [b"x"] * 10)
        assert state._spill is None
    base.close()


@pytest.mark.parametrize(("keys", "written"), [(100, range(1, 4)), (250, range(1, 8)), (2_000, range(300, 400))])
def test_handles_of_keys_that_come_again_and_again_are_kept_if_they_are_not_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: int, written: range
) -> None:
    monkeypatch.setattr(keeper_module, "HELD_BYTES", 20_000)  # 50 handles without values
    base = Base(str(tmp_path / "base"), "count", StateFiles(str(tmp_path / "checkpoint")))
    with TaskState(base, Lineage.start("count"), ALL) as state:
        keeper, writes = HandleKeeper("process 'count'", state, ObjectCodec("count"), times=EpochTimes(0, None)), 0
        for start in range(0, 20_000, 20):
            held = len(keeper._handles)
            keeper.relieve(Revision(0))
            writes += len(keeper._handles) < held
            for handle in keeper.handles([key(number % keys) for number in range(start, start + 20)]):
                handle.set(handle.get(0) + 1)
        assert writes in written
        assert keeper._held_bytes < 10 * 20_000
        keeper.write(Revision(0))
        assert [each.get() for each in keeper.handles([key(n) for n in range(keys)])] == [20_000 // keys] * keys
    base.close()


def own_megabytes_after(keys: int) -> float:
    """The most memory of its own that a task has which gives so many keys a value; in a new process."""
    folder = tempfile.mkdtemp()
    base = Base(f"{folder}/base", "count", StateFiles(f"{folder}/checkpoint"))
    most = 0
    with TaskState(base, Lineage.start("count"), ALL_BINS) as state:
        keeper = HandleKeeper("process 'count'", state, ObjectCodec("process 'count'"), times=EpochTimes(0, None))
        for start in range(0, keys, 10_000):
            keeper.relieve(Revision(0))
            for handle in keeper.handles([key(number) for number in range(start, start + 10_000)]):
                handle.set({"seen": 1})
            most = max(most, resident_bytes() - mapped_bytes())
        keeper.write(Revision(0))
        most = max(most, resident_bytes() - mapped_bytes())
        assert state.changes().num_rows == keys
    base.close()
    return most / (1 << 20)


@pytest.mark.slow
@pytest.mark.skipif(mapped_bytes() == 0, reason="this system does not tell how much memory is mapped from files")
def test_memory_of_a_process_does_not_follow_the_keys_of_an_epoch() -> None:
    few, many = 200_000, 1_000_000
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        grown = pool.apply(own_megabytes_after, [many]) - pool.apply(own_megabytes_after, [few])
    assert grown < 60, "800,000 more keys took 450 MB more when all were kept until the end of the epoch"
