"""Operators that emit all they hold before they are removed: once, whatever crashes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, Insert, ListSource, MemorySink, Remove, State, Update, agg, sessions, tumbling
from midstream.checkpoint.change_records import Outcome, RemoveRecord
from midstream.checkpoint.inspection import StateReader
from midstream.errors import FlowError
from midstream.flow.edits import Edit
from midstream.runtime.edge import DriverCrashed
from midstream.runtime.local.runtime import _Runtime
from midstream.testing import ChangeAt, Faults, LocalRun, ManualClock, run_local
from tests.keyed_oracle import moment
from tests.oracle import Row

pytestmark = pytest.mark.long

EPOCHS, ROWS, KEYS, SECOND = 6, 12, 4, 1_000_000
SIZE = 600 * SECOND
BAD_LUCK = Faults(crash=0.05, speculate=0.05, repeat=0.3, give_up=0.01, crash_driver=0.02, lose=0.3, lose_output=0.05)
STEPS = ("computed", "sealed", "manifest written", "published", "counted")


def rows_of(epochs: range) -> list[list[Row]]:
    """Rows of four keys, one each 20 seconds of event time."""
    return [
        [{"k": n % KEYS, "n": n, "at": moment(20 * SECOND * n)} for n in range(ROWS * e, ROWS * (e + 1))]
        for e in epochs
    ]


def flow_of(out: MemorySink, every: MemorySink, epochs: range = range(EPOCHS), *, has_windows: bool = True) -> Flow:
    flow = Flow("windows")
    rows = flow.source(
        "in", ListSource(rows_of(epochs), "k bigint, n bigint, at timestamp", event_time="at", partitions=2)
    )
    rows.sink("all", every)
    if has_windows:
        windows = rows.key_by("by k", "k").aggregate("w", window=tumbling("10 minutes"), n=agg.count(), s=agg.sum("n"))
        windows.map("shown", lambda row: row).sink("out", out)
    return flow


def gone(*, flush: bool) -> list[Edit]:
    return [Remove("out"), Remove("shown"), Remove("w", flush=flush), Remove("by k")]


def last_epoch(out: MemorySink) -> int:
    """The epoch that emits what is open: there is always something open, and later there are no windows."""
    return max(epoch for epoch, table in out.tables.items() if table.num_rows)


def windows_until(epoch: int) -> list[Row]:
    """The oracle: one result for each key and window of all rows up to an epoch."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for n in range(ROWS * (epoch + 1)):
        found[n % KEYS, 20 * SECOND * n // SIZE].append(n)
    return [
        {"k": k, "window_start": moment(w * SIZE), "window_end": moment((w + 1) * SIZE), "n": len(ns), "s": sum(ns)}
        for (k, w), ns in found.items()
    ]


def ordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["k"], row["window_start"]))


def check(run: LocalRun, out: MemorySink, every: MemorySink) -> None:
    [record] = [each for each in run.history if each.outcome is not Outcome.REFUSED]
    assert record.outcome is Outcome.APPLIED
    assert ordered(out.rows) == ordered(windows_until(last_epoch(out)))
    assert len(every.rows) == EPOCHS * ROWS


def test_all_open_windows_are_emitted_in_the_last_epoch_before_the_removal() -> None:
    out, every = MemorySink(), MemorySink()
    run = run_local(flow_of(out, every), changes=[ChangeAt.of(2, *gone(flush=True))], clock=ManualClock())
    check(run, out, every)
    [record] = run.history
    assert record.epoch == last_epoch(out) + 1
    assert "the epoch before that emits all that it holds open" in record.plan
    assert [edit.flush for edit in record.edits if isinstance(edit, RemoveRecord)].count(True) == 1


def test_without_a_flush_windows_stay_in_the_kept_state_and_continue_when_the_operator_comes_back(
    tmp_path: Path,
) -> None:
    at, out, every = str(tmp_path / "job"), MemorySink(), MemorySink()
    run_local(flow_of(out, every), checkpoint=at, changes=[ChangeAt.of(2, *gone(flush=False))], clock=ManualClock())
    [held] = StateReader.at(at).overview()
    assert (held.operator, held.is_kept) == ("w", True)
    assert held.nbytes > 0
    assert sum(row["n"] for row in out.rows) < 3 * ROWS


@pytest.mark.parametrize("seed", range(12))
def test_windows_are_flushed_once_whatever_crashes(seed: int) -> None:
    out, every = MemorySink(), MemorySink()
    changes = [ChangeAt.of(seed % 4, *gone(flush=True))]
    run = run_local(flow_of(out, every), seed=seed, faults=BAD_LUCK, changes=changes, clock=ManualClock())
    check(run, out, every)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("offset", [0, 1])
def test_windows_are_flushed_once_if_the_driver_dies_at_any_step_of_the_commit(
    step: str, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the epoch that emits what is open, and in the one after it."""
    died: list[int] = []
    flushing: list[int] = []

    def at(runtime: Any, now: str) -> None:
        if runtime._driver.changes.configuration.flushed:
            flushing.append(runtime._epoch)
        if not died and now == step and flushing and runtime._epoch == flushing[0] + offset:
            died.append(runtime._epoch)
            raise DriverCrashed

    monkeypatch.setattr(_Runtime, "at", at)
    out, every = MemorySink(), MemorySink()
    run = run_local(flow_of(out, every), changes=[ChangeAt.of(1, *gone(flush=True))], clock=ManualClock())
    check(run, out, every)
    assert died


def test_a_restart_between_the_two_epochs_continues_with_the_second(tmp_path: Path) -> None:
    at, out, every = str(tmp_path / "job"), MemorySink(), MemorySink()
    changes = [ChangeAt.of(2, *gone(flush=True), scheduler="epoch")]
    flow = flow_of(out, every, range(4))
    run_local(flow, checkpoint=at, changes=changes, clock=ManualClock())
    second, more = MemorySink(), MemorySink()
    run_local(flow_of(second, more, range(4, EPOCHS)), checkpoint=at, clock=ManualClock())
    assert ordered(out.rows + second.rows) == ordered(windows_until(last_epoch(out)))


def test_after_a_roll_back_from_the_new_plan_flushed_windows_begin_anew() -> None:
    """The results that were emitted stay as they are; windows begin anew."""
    out, every = MemorySink(), MemorySink()

    def fails(row: Row) -> Row:
        raise ValueError("no")

    insert = Insert(lambda rows: rows.map("new", fails), between=("in", "all"))
    changes = [ChangeAt.of(1, insert, *gone(flush=True), preflight=False)]
    run = run_local(flow_of(out, every), changes=changes, clock=ManualClock())
    [record] = run.history
    assert record.outcome is Outcome.REVERTED
    assert len(every.rows) == EPOCHS * ROWS
    assert "w" in {op.operator for op in run.progress[-1].operators}
    [told] = [event.what for event in record.events if "is the last one of w" in event.what]
    until = int(told.split()[1])
    flushed = [row for epoch, table in out.tables.items() if epoch <= until for row in table.to_pylist()]
    assert ordered(flushed) == ordered(windows_until(until))


def test_sessions_and_timers_are_flushed_too() -> None:
    class Alarm:
        def __call__(self, key: int, row: Row, state: State) -> None:
            state.event_timer(row["at"].replace(year=2100))

        def on_timer(self, key: int, time: Any, state: State) -> Row:
            return {"k": key}

    flow, visits, alarms = Flow("others"), MemorySink(), MemorySink()
    source = ListSource(rows_of(range(3)), "k bigint, n bigint, at timestamp", event_time="at")
    keyed = flow.source("in", source).key_by("by k", "k")
    keyed.aggregate("visits", window=sessions("1 day"), n=agg.count()).sink("v", visits)
    keyed.process("alarm", Alarm(), returns="k bigint").sink("a", alarms)
    keyed.sink("rest", MemorySink())
    edits = [Remove("v"), Remove("visits", flush=True), Remove("a"), Remove("alarm", flush=True)]
    run = run_local(flow, changes=[ChangeAt.of(0, *edits)], clock=ManualClock())
    assert run.history[0].outcome is Outcome.APPLIED
    assert sorted(row["k"] for row in visits.rows) == list(range(KEYS))
    assert {row["k"] for row in alarms.rows} == set(range(KEYS))


@pytest.mark.parametrize(
    ("operator", "says"),
    [("shown", "this map holds no rows or results back"), ("total", "this aggregate emits its totals in every epoch")],
)
def test_a_flush_of_an_operator_that_holds_nothing_back_is_refused(operator: str, says: str) -> None:
    flow = flow_of(MemorySink(), MemorySink())
    totals = Insert(
        lambda rows: rows.key_by("by n", "n").aggregate("total", c=agg.count()).sink("t", MemorySink()), after="in"
    )
    changes = [ChangeAt.of(0, totals), ChangeAt.of(2, Remove("t"), Remove(operator, flush=True))]
    with pytest.raises(FlowError, match=says):
        run_local(flow, changes=changes, clock=ManualClock())


def test_a_flush_and_updates_can_be_one_change() -> None:
    out, every = MemorySink(), MemorySink()
    double = Update("new", lambda row: {**row, "n": -1 - row["n"]})
    insert = Insert(lambda rows: rows.map("new", lambda row: row), between=("in", "all"))
    changes = [ChangeAt.of(0, insert, scheduler="epoch"), ChangeAt.of(2, *gone(flush=True), double)]
    run_local(flow_of(out, every), changes=changes, clock=ManualClock())
    until = last_epoch(out)
    assert ordered(out.rows) == ordered(windows_until(until))
    for epoch, table in every.tables.items():
        assert all((row["n"] < 0) == (epoch > until) for row in table.to_pylist()), "the old plan's last epoch is whole"
