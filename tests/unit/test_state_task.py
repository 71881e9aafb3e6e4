"""The state that a task reads and writes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.errors import StateError
from midstream.ids import BinId, Epoch, PartitionId, Run
from midstream.state import lineage as lineage_module
from midstream.state.base import Base
from midstream.state.files import Author, StateFiles
from midstream.state.keys import Namespace
from midstream.state.lineage import Lineage
from midstream.state.task import TaskState

A, B = BinId(1), BinId(2)


def key(name: str, bin_id: BinId = A, namespace: Namespace = Namespace.VALUE) -> bytes:
    return bytes([bin_id, namespace]) + name.encode()


def author(epoch: int) -> Author:
    return Author("count", Epoch(epoch), Run(0), PartitionId(0), 0)


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Base]:
    made = Base(str(tmp_path / "base"), "count", StateFiles(str(tmp_path / "checkpoint")))
    yield made
    made.close()


@pytest.fixture
def lineage(base: Base) -> Lineage:
    """A lineage with one committed epoch: ann and bob have a value, and there are timers."""
    with TaskState(base, Lineage.start("count"), [A, B]) as state:
        state.put_many([key("ann"), key("bob", B)], [b"1", b"2"])
        state.put_many([key(name, A, Namespace.EVENT_TIMER) for name in "135"], [b"", b"", b""])
        delta = state.write_delta(author(0))
    assert delta is not None
    return Lineage.start("count").after(Epoch(0), [delta])


def test_a_task_sees_what_is_committed_and_what_it_changed(base, lineage):
    with TaskState(base, lineage, [A, B]) as state:
        assert state.get_many([key("ann"), key("bob", B), key("cem")]) == [b"1", b"2", None]
        state.put_many([key("cem"), key("ann")], [b"", b"9"])
        state.delete_many([key("bob", B), key("nobody")])
        assert state.get_many([key("ann"), key("bob", B), key("cem"), key("dan")]) == [b"9", None, b"", None]
        assert state.get_many([key("dan")]) == [None]


def test_other_tasks_see_changes_only_after_the_commit(base, lineage):
    with TaskState(base, lineage, [A]) as state, TaskState(base, lineage, [A]) as twin:
        state.put_many([key("ann")], [b"9"])
        state.write_delta(author(1))
        assert twin.get_many([key("ann")]) == [b"1"]
    with TaskState(base, lineage, [A]) as retried:
        assert retried.get_many([key("ann")]) == [b"1"]


def test_changes_are_sorted_and_include_deletions(base, lineage):
    with TaskState(base, lineage, [A, B]) as state:
        state.put_many([key("z", B), key("b"), key("a")], [b"1", b"2", b"3"])
        state.delete_many([key("b")])
        assert state.changes().to_pylist() == [
            {"key": key("a"), "value": b"3"},
            {"key": key("b"), "value": None},
            {"key": key("z", B), "value": b"1"},
        ]


def test_a_task_that_changed_nothing_writes_nothing(base, lineage):
    with TaskState(base, lineage, [A]) as state:
        state.put_many([], [])
        state.get_many([key("ann")])
        assert state.write_delta(author(1)) is None


def timers(state: TaskState, start: bytes = b"", stop: bytes | None = None) -> str:
    return "".join(chr(found[2]) for found, _ in state.scan(A, Namespace.EVENT_TIMER, start, stop))


@pytest.mark.parametrize("many", [0, 100])
def test_a_scan_merges_changes_in_order(base, lineage, many):
    with TaskState(base, lineage, [A]) as state:
        state.put_many([key(f"x{number}") for number in range(many)], [b""] * many)
        assert timers(state) == "135"
        state.put_many([key("4", A, Namespace.EVENT_TIMER)] * 2, [b"", b""])
        state.put_many([key("0", A, Namespace.EVENT_TIMER)], [b""])
        state.delete_many([key("3", A, Namespace.EVENT_TIMER), key("9", A, Namespace.EVENT_TIMER)])
        assert timers(state) == "0145"
        state.put_many([key("3", A, Namespace.EVENT_TIMER)], [b"again"])
        assert timers(state) == "01345"
        assert timers(state, b"1", b"4") == "13"


def test_changes_may_be_made_during_a_scan(base, lineage):
    with TaskState(base, lineage, [A]) as state:
        for found, _ in state.scan(A, Namespace.EVENT_TIMER):
            state.delete_many([found])
            state.put_many([key("7", A, Namespace.EVENT_TIMER)], [b""])
        assert timers(state) == "7"


def test_keys_of_other_bins_are_refused(base, lineage):
    with TaskState(base, lineage, [A]) as state:
        for use in (
            lambda: state.get_many([key("bob", B)]),
            lambda: state.put_many([key("bob", B)], [b""]),
            lambda: state.delete_many([key("bob", B)]),
            lambda: state.scan(B, Namespace.VALUE),
        ):
            with pytest.raises(StateError, match=r"keys of the bins \[2\] do not belong to this task"):
                use()


def test_a_stored_key_must_not_be_too_long(base, lineage):
    with TaskState(base, lineage, [A]) as state:
        state.put_many([key("x" * 509)], [b"fits"])
        with pytest.raises(StateError, match="a stored key takes 512 bytes; at most 511 are allowed"):
            state.put_many([key("x" * 510)], [b""])
        delta = state.write_delta(author(1))
    assert delta is not None
    with TaskState(base, lineage.after(Epoch(1), [delta]), [A]) as state:
        assert state.get_many([key("x" * 509)]) == [b"fits"]


@pytest.mark.parametrize("lag", [1, 2, 3, 5])
def test_a_base_that_follows_some_epochs_behind_reads_all_state_once(base: Base, tmp_path: Path, lag: int):
    """Bins that are loaded ahead follow in the background, while deltas are merged, and keys come, change and go."""
    rng, truth = random.Random(lag), dict[bytes, bytes]()
    elsewhere = Base(str(tmp_path / "another base"), "count", base.files)
    lineage, merges, loaded = Lineage.start("count"), 0, list[int]()
    with contextlib.closing(elsewhere):
        for epoch in range(80):
            changed = {key(str(rng.randrange(2000)), rng.choice((A, B))): b"%d" % epoch for _ in range(10)}
            if not epoch:
                changed = {key(f"{number:04}", bin_id): b"value" for number in range(4000) for bin_id in (A, B)}
            with TaskState(base, lineage, [A, B]) as state:
                gone = [name for name in changed if epoch and rng.random() < 0.3]
                state.put_many(list(changed), list(changed.values()))
                state.delete_many(gone)
                rewrites = state.write_rewrites(author(epoch))
                delta = state.write_delta(author(epoch))
            truth = {name: value for name, value in {**truth, **changed}.items() if name not in gone}
            assert delta is not None
            lineage = lineage.after(Epoch(epoch), [delta], rewrites)
            merges += any(not rewrite.complete for rewrite in rewrites)
            if epoch >= 10 and epoch % lag == 0:
                done = elsewhere.prefetch(lineage, [A, B], 1 << 30)
                loaded.append(done.nbytes)
                with TaskState(elsewhere, lineage, [A, B]) as state:
                    assert state.get_many(sorted(truth)) == [truth[name] for name in sorted(truth)]
                    assert sum(state._view.count(bin_id) for bin_id in (A, B)) == len(truth)
    assert merges >= 3
    assert sum(loaded[1:]) < loaded[0] / 2


def test_each_key_needs_a_value(base, lineage):
    with TaskState(base, lineage, [A]) as state, pytest.raises(StateError, match="2 keys and 1 values"):
        state.put_many([key("a"), key("b")], [b""])


def test_due_rewrites_are_written_and_replace_older_files(base, lineage, monkeypatch, tmp_path):
    monkeypatch.setattr(lineage_module, "MIN_ROWS", 3)
    monkeypatch.setattr(lineage_module, "MERGED_AT_ONCE", 2)
    kinds = []
    for epoch in range(1, 6):
        with TaskState(base, lineage, [A, B]) as state:
            state.put_many([key("bob", B), key("ann")], [b"%d" % epoch] * 2)
            rewrites = state.write_rewrites(author(epoch))
            delta = state.write_delta(author(epoch))
        assert delta is not None
        kinds.append([(rewrite.complete, list(rewrite.bins)) for rewrite in rewrites])
        lineage = lineage.after(Epoch(epoch), [delta], rewrites)
    assert [(True, [A])] in kinds
    assert any((False, [A, B]) in kind or (False, [B]) in kind for kind in kinds)
    with TaskState(base, lineage, [A, B]) as state:
        assert state.get_many([key("ann"), key("bob", B)]) == [b"5", b"5"]
    elsewhere = Base(str(tmp_path / "another base"), "count", base.files)
    with contextlib.closing(elsewhere), TaskState(elsewhere, lineage, [A, B]) as state:
        assert state.get_many([key("ann"), key("bob", B)]) == [b"5", b"5"]
        assert timers(state) == "135"
