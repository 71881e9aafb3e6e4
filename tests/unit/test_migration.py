"""State in another layout: migrated key by key, when a function first asks for it, once for each revision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, ListSource, MemorySink, State, Update
from midstream.data.times import EpochTimes
from midstream.ids import BINS, BinId, Epoch, PartitionId, Revision, Run
from midstream.state.base import Base
from midstream.state.files import Author, StateFiles
from midstream.state.keeper import HandleKeeper, Migrations
from midstream.state.lineage import Lineage
from midstream.state.task import TaskState
from midstream.state.values import ObjectCodec
from midstream.testing import ChangeAt, ManualClock, run_local

ANN, BOB = b"\x01\x00ann", b"\x02\x00bob"


class Steps:
    """Migrations that append their revision to a key's value, and remember whom they were called for."""

    def __init__(self, *revisions: int) -> None:
        self.calls: list[tuple[int, bytes]] = []
        self.all: Migrations = [(Revision(number), self._step(number)) for number in revisions]

    def _step(self, revision: int) -> Callable[[bytes, State], None]:
        def migrate(key: bytes, state: State) -> None:
            self.calls.append((revision, key))
            state.set([*state.get([]), revision])

        return migrate


class Kept:
    """The state of one operator over epochs."""

    def __init__(self, folder: Path) -> None:
        self.base = Base(str(folder / "base"), "p", StateFiles(str(folder / "checkpoint")))
        self.lineage = Lineage.start("p")
        self.epoch = 0

    def run(
        self, function: Callable[[HandleKeeper], Any], *, levels: bool = False, clock: int = 0, ttl: int | None = None
    ) -> Any:
        """One epoch, in which this is done; committed."""
        with TaskState(self.base, self.lineage, [BinId(number) for number in range(BINS)]) as state:
            codec = ObjectCodec("process 'p'")
            times = EpochTimes(clock=clock)
            keeper = HandleKeeper("process 'p'", state, codec, times=times, ttl_us=ttl, has_levels=levels)
            found = function(keeper)
            keeper.write(Revision(1))
            delta = state.write_delta(Author("p", Epoch(self.epoch), Run(0), PartitionId(0), 0))
        self.lineage = self.lineage.after(Epoch(self.epoch), [] if delta is None else [delta])
        self.epoch += 1
        return found

    def set(self, *keys: bytes, value: Any = ()) -> None:
        """An epoch without migrations, in which these keys get a value."""

        def function(keeper: HandleKeeper) -> None:
            for handle in keeper.handles(keys):
                handle.set(list(value))

        self.run(function)

    def values(self, steps: Steps, *keys: bytes, **options: Any) -> list[Any]:
        """An epoch in which a function asks for the values of these keys; ``steps`` lead to the layout it wants."""
        return list(
            self.run(
                lambda keeper: [handle.get() for handle in keeper.handles(keys, steps.all)],
                levels=bool(steps.all),
                **options,
            )
        )


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.base.close()


# ── when ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_is_migrated_when_it_is_first_asked_for(kept: Kept):
    kept.set(ANN, BOB)
    steps = Steps(2)
    assert kept.values(steps, ANN) == [[2]]
    assert steps.calls == [(2, ANN)], "bob is left alone"


def test_a_key_is_migrated_once_over_all_epochs(kept: Kept):
    kept.set(ANN, BOB)
    kept.values(Steps(2), ANN)
    steps = Steps(2)
    assert kept.values(steps, ANN, BOB) == [[2], [2]]
    assert steps.calls == [(2, BOB)]


def test_a_key_is_migrated_once_within_an_epoch(kept: Kept):
    kept.set(ANN)
    steps = Steps(2)
    kept.run(lambda keeper: [keeper.handles([ANN], steps.all) for _ in range(3)], levels=True)
    assert steps.calls == [(2, ANN)]


def test_without_migrations_state_stays_as_it_is(kept: Kept):
    kept.set(ANN, value=[7])
    assert kept.values(Steps(), ANN) == [[7]]


def test_migrations_are_chained_over_the_revisions_since_a_key_was_last_touched(kept: Kept):
    kept.set(ANN, BOB)
    kept.values(Steps(2), ANN)
    steps = Steps(2, 5, 9)
    assert kept.values(steps, ANN, BOB) == [[2, 5, 9], [2, 5, 9]]
    assert steps.calls == [(5, ANN), (9, ANN), (2, BOB), (5, BOB), (9, BOB)]


def test_a_migration_that_changes_nothing_is_still_done_only_once(kept: Kept):
    kept.set(ANN)
    calls: list[bytes] = []
    steps: Migrations = [(Revision(2), lambda key, state: calls.append(key))]
    for _ in range(2):
        kept.run(lambda keeper: keeper.handles([ANN], steps), levels=True)
    assert calls == [ANN]


# ── the epoch in which the change takes effect: old and new functions share handles ───────────────────────────────


def test_what_the_old_function_wrote_in_the_same_epoch_is_migrated(kept: Kept):
    steps = Steps(2)

    def function(keeper: HandleKeeper) -> Any:
        [old] = keeper.handles([ANN])
        old.set([0])
        [new] = keeper.handles([ANN], steps.all)
        return new.get()

    assert kept.run(function) == [0, 2]
    assert kept.values(Steps(2), ANN) == [[0, 2]], "and that it was is remembered"


def test_a_key_that_the_new_function_does_not_read_is_migrated_in_a_later_epoch(kept: Kept):
    steps = Steps(2)

    def function(keeper: HandleKeeper) -> None:
        keeper.handles([ANN])[0].set([0])
        keeper.handles([BOB], steps.all)[0].set([1])

    kept.run(function)
    later = Steps(2)
    assert kept.values(later, ANN, BOB) == [[0, 2], [1]]
    assert later.calls == [(2, ANN)]


# ── keys without state ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_key_needs_no_migration_then_or_later(kept: Kept):
    steps = Steps(2)

    def function(keeper: HandleKeeper) -> None:
        keeper.handles([ANN], steps.all)[0].set([1])

    kept.run(function, levels=True)
    assert kept.values(steps, ANN) == [[1]]
    assert steps.calls == []


def test_a_new_key_is_migrated_by_later_migrations(kept: Kept):
    kept.run(lambda keeper: keeper.handles([ANN], Steps(2).all)[0].set([1]), levels=True)
    assert kept.values(Steps(2, 3), ANN) == [[1, 3]]


def test_a_key_that_stays_without_state_leaves_nothing_behind(kept: Kept):
    kept.values(Steps(2), ANN)
    assert kept.lineage.entries == Lineage.start("p").entries, "not a byte is written"


def test_a_key_whose_state_was_deleted_needs_no_migration(kept: Kept):
    kept.set(ANN)
    kept.run(lambda keeper: keeper.handles([ANN])[0].delete())
    steps = Steps(2)
    assert kept.values(steps, ANN) == [None]
    assert steps.calls == []


@pytest.mark.parametrize("view", ["value", "list", "map"])
def test_a_key_whose_state_was_deleted_in_the_same_epoch_needs_no_migration(kept: Kept, view: str):
    kept.run(lambda keeper: fill(keeper.handles([ANN])[0], view))
    steps = Steps(2)

    def function(keeper: HandleKeeper) -> None:
        keeper.handles([ANN])[0].clear()
        keeper.handles([ANN], steps.all)

    kept.run(function)
    assert steps.calls == []


def fill(state: State, view: str) -> None:
    match view:
        case "value":
            state.set([])
        case "list":
            state.list("l").append(1)
        case "map":
            state.map("m")["x"] = 1


# ── lists and maps ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("view", ["list", "map"])
def test_a_key_that_has_only_a_list_or_a_map_has_state(kept: Kept, view: str):
    kept.run(lambda keeper: fill(keeper.handles([ANN])[0], view))
    steps = Steps(2)
    assert kept.values(steps, ANN) == [[2]]
    assert kept.values(steps, ANN) == [[2]]
    assert steps.calls == [(2, ANN)]


def test_a_migration_may_move_state_from_one_view_to_another(kept: Kept):
    kept.run(lambda keeper: keeper.handles([ANN])[0].list("l").extend([3, 4]))

    def to_map(key: bytes, state: State) -> None:
        for item in state.list("l"):
            state.map("m")[item] = True
        state.list("l").clear()

    steps: Migrations = [(Revision(2), to_map)]

    def function(keeper: HandleKeeper) -> Any:
        [handle] = keeper.handles([ANN], steps)
        return sorted(handle.map("m")), list(handle.list("l"))

    for _ in range(2):
        assert kept.run(function, levels=True) == ([3, 4], [])


# ── time to live ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_state_that_has_expired_is_not_migrated_and_its_level_is_forgotten(kept: Kept):
    def touch(keeper: HandleKeeper) -> None:
        keeper.handles([ANN], Steps(2).all)[0].set([1])

    kept.run(touch, levels=True, ttl=100)
    steps = Steps(2, 3)
    assert kept.values(steps, ANN, clock=100, ttl=100) == [None]
    assert steps.calls == []


def test_a_migration_counts_as_a_write(kept: Kept):
    kept.run(lambda keeper: keeper.handles([ANN])[0].set([1]), ttl=100)
    kept.values(Steps(2), ANN, clock=60, ttl=100)
    assert kept.values(Steps(2), ANN, clock=120, ttl=100) == [[1, 2]]


# ── in a flow ─────────────────────────────────────────────────────────────────────────────────────────────────────

Row = dict[str, Any]


def total(key: str, row: Row, state: State) -> Row:
    state.set(state.get(0) + row["n"])
    return {**row, "n": state.get()}


def totals(key: str, row: Row, state: State) -> Row:
    """Another layout: a dict."""
    found = state.get({"sum": 0})
    state.set({"sum": found["sum"] + row["n"]})
    return {**row, "n": found["sum"] + row["n"]}


def to_dict(key: str, state: State) -> None:
    state.set({"sum": state.get()})


def broken(key: str, state: State) -> None:
    raise ValueError("cannot be converted")


def run_with(migrate: Callable[[str, State], None]) -> tuple[list[Row], Any]:
    flow, out = Flow("f"), MemorySink()
    epochs = [[{"k": k, "n": 1} for k in "aabb"]] * 4
    rows = flow.source("in", ListSource(epochs, "k string, n int")).key_by("key", "k")
    rows.process("sums", total).sink("out", out)
    change = ChangeAt.of(1, Update("sums", totals, migrate=migrate))
    run = run_local(flow, changes=[change], clock=ManualClock())
    return out.rows, run.history[0]


def test_a_function_with_another_layout_continues_where_the_old_one_stopped():
    rows, record = run_with(to_dict)
    assert sorted(row["n"] for row in rows if row["k"] == "a") == list(range(1, 9))
    assert str(record.outcome) == "applied"


def test_a_migration_that_fails_is_rolled_back_and_names_the_key_and_the_function():
    rows, record = run_with(broken)
    assert sorted(row["n"] for row in rows if row["k"] == "b") == list(range(1, 9))
    assert str(record.outcome) == "rolled back"
    assert "ValueError: cannot be converted" in str(record.error)
    assert "'migrate': 'broken'" in str(record.error)
    assert "'key': 'a'" in str(record.error) or "'key': 'b'" in str(record.error)
