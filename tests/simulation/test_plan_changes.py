"""Flows whose plans are changed while they run, on the local runtime. Thousands: ``python -m tests.simulation.run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, Insert, ListSource, MemorySink, Remove, Rewire, State, Update, agg, tumbling
from midstream.change.offline_revert import revert_offline
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.inspection import StateReader, read_state
from midstream.errors import FlowError
from midstream.testing import ChangeAt, Faults, ManualClock, run_local
from tests.naive import naive_scheduler
from tests.oracle import Row
from tests.simulation.changing_check import audited, check_changes, mixtures
from tests.simulation.changing_flows import CONSISTENT, changing_case_of

BAD_LUCK = Faults(crash=0.05, speculate=0.05, repeat=0.3, give_up=0.004, crash_driver=0.004, lose=0.3, lose_output=0.05)


@pytest.mark.long
@pytest.mark.parametrize("block", [*range(8), *(pytest.param(block, marks=pytest.mark.slow) for block in range(8, 60))])
def test_every_row_is_processed_entirely_under_one_plan(block: int, tmp_path: Path):
    for seed in range(4 * block, 4 * (block + 1)):
        check_changes(changing_case_of(seed, tmp_path / str(seed), plans=True))


@pytest.mark.long
def test_the_simulation_catches_operators_that_take_the_new_plan_by_themselves(tmp_path: Path):
    """Where a change meets running tasks, three of four wrong ones are seen; the others fall between two epochs."""
    found = []
    for seed in range(32):
        case = changing_case_of(
            seed, tmp_path / str(seed), schedulers=["fries"], faults=False, broken=False, plans=True
        )
        with naive_scheduler():
            run = case.run()
        has_met = any((record.met or "").startswith("met") for record in run.history)
        found.append((bool(mixtures(case, run)), not audited(run).serialisable, has_met))
    assert all(auditor for rows, auditor, _ in found if rows), "rows show a mixture that the auditor does not see"
    met = [rows for rows, _, has_met in found if has_met]
    assert len(met) >= 5, "few changes met running tasks"
    assert sum(met) >= 0.5 * len(met), f"{sum(met)} of {len(met)} by rows"
    assert sum(rows for rows, _, _ in found) >= 0.15 * len(found)


# ── single things ─────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(epochs: int = 4, first: int = 0) -> tuple[Flow, MemorySink]:
    """Twenty numbers in each epoch, through a map to a sink."""
    flow, out = Flow("numbers"), MemorySink()
    rows = [[{"n": i} for i in range(20 * epoch, 20 * epoch + 20)] for epoch in range(first, first + epochs)]
    flow.source("numbers", ListSource(rows, "n bigint", partitions=2)).map("m", lambda row: row).sink("out", out)
    return flow, out


def fifth(row: Row) -> bool:
    return bool(row["n"] % 5 == 0)


FIFTH = Insert(lambda rows: rows.filter("every 5th", fifth), between=("numbers", "m"))


def values(out: MemorySink) -> list[list[int]]:
    return [sorted(row["n"] for row in table.to_pylist()) for table in out.tables.values()]


@pytest.mark.parametrize("scheduler", sorted(set(CONSISTENT)))
def test_a_filter_inserted_live_passes_every_row_before_and_every_5th_after(scheduler: str):
    """Bartnik et al., E-B4: no row is lost at the seam."""
    for seed in range(4):
        flow, out = numbers()
        change = ChangeAt.of(1, FIFTH, scheduler=scheduler, preflight=True)
        run = run_local(flow, seed=seed, changes=[change], audit="n", clock=ManualClock())
        [record] = run.history
        assert record.outcome is Outcome.APPLIED
        assert audited(run).serialisable
        rows = values(out)
        assert rows[0] == list(range(20))
        assert rows[3] == [60, 65, 70, 75]
        if record.epoch == 1:
            gone = set(range(20, 40)) - set(rows[1])
            assert not any(n % 5 == 0 for n in gone)


def test_a_change_within_an_epoch_meets_running_tasks():
    met = []
    for seed in range(12):
        flow, _ = numbers()
        run = run_local(flow, seed=seed, changes=[ChangeAt.of(1, FIFTH)], clock=ManualClock())
        met.append(run.history[0].met or "")
    assert any("within an epoch" in each for each in met), met


def test_removing_the_filter_again_gives_every_row_again():
    flow, out = numbers(5)
    changes = [ChangeAt.of(0, FIFTH, scheduler="epoch"), ChangeAt.of(2, Remove("every 5th"), scheduler="epoch")]
    run = run_local(flow, changes=changes, clock=ManualClock())
    assert [record.outcome for record in run.history] == [Outcome.APPLIED] * 2
    assert values(out)[4] == list(range(80, 100))
    assert [5 * n for n in range(8, 12)] in values(out)


def test_a_keyed_operator_with_an_exchange_is_inserted_from_the_next_epoch():
    flow, out = numbers()
    insert = Insert(lambda rows: rows.key_by("by n", "n").process("count", counted), after="m")
    run = run_local(flow, changes=[ChangeAt.of(0, insert)], clock=ManualClock(), audit="n")
    [record] = run.history
    assert "keeps state" in record.plan
    assert record.outcome is Outcome.APPLIED
    assert record.epoch == 1 or "fell between" in str(record.met)
    assert values(out)[-1] == [1000 + n for n in range(60, 80)]


def counted(key: int, row: Row, state: State) -> Row:
    state.set(state.get(0) + 1)
    return {"n": 1000 * state.get() + row["n"]}


# ── state that stays ──────────────────────────────────────────────────────────────────────────────────────────────


def keyed(epochs: int = 2, with_count: bool = True) -> tuple[Flow, MemorySink]:
    flow, out = Flow("counts"), MemorySink()
    rows = [[{"k": "a", "c": 0}] for _ in range(epochs)]
    by_key = flow.source("in", ListSource(rows, "k string, c bigint")).key_by("by k", "k")
    (by_key.process("count", count_up) if with_count else by_key).sink("out", out)
    return flow, out


def count_up(key: str, row: Row, state: State) -> Row:
    state.set(state.get(0) + 1)
    return {**row, "c": state.get()}


BACK = Insert(lambda rows: rows.process("count", count_up), after="by k")


def counts(out: MemorySink) -> list[int]:
    return [row["c"] for row in out.rows]


def test_the_state_of_a_removed_operator_is_found_when_it_comes_back(tmp_path: Path):
    flow, out = keyed(6)
    changes = [ChangeAt.of(1, Remove("count"), scheduler="epoch"), ChangeAt.of(3, BACK, scheduler="epoch")]
    run = run_local(flow, changes=changes, clock=ManualClock())
    assert "its state is kept under its name" in run.history[0].plan
    assert "finds the state that was kept" in run.history[1].plan
    found = counts(out)
    kept = max(found[:3])
    assert found[-1] == kept + (6 - found.index(0) - found.count(0))
    assert 0 in found


def test_the_state_of_a_removed_operator_survives_a_restart_with_a_script_that_lacks_it(tmp_path: Path):
    at = str(tmp_path / "checkpoint")
    flow, _ = keyed(3)
    run_local(flow, checkpoint=at, clock=ManualClock())
    flow, out = keyed(2, with_count=False)
    run_local(flow, checkpoint=at, clock=ManualClock())
    assert counts(out) == [0, 0]
    [held] = StateReader.at(at).overview()
    assert (held.operator, held.kind, held.is_kept) == ("count", "process", True)
    assert read_state(at, "count").num_rows == 1
    flow, out = keyed(3, with_count=False)
    run_local(flow, checkpoint=at, changes=[ChangeAt.of(5, BACK, scheduler="epoch")], clock=ManualClock())
    assert counts(out)[-1] == 3 + 3 - counts(out).count(0)


def test_state_that_does_not_fit_refuses_the_operator(tmp_path: Path):
    at = str(tmp_path / "checkpoint")
    run_local(keyed(2)[0], checkpoint=at, clock=ManualClock())
    flow, _ = keyed(2, with_count=False)
    other = Insert(
        lambda rows: rows.aggregate("count", c=agg.count()).map("m", lambda row: {**row, "c": 0}), after="by k"
    )
    with pytest.raises(FlowError, match="the state that process 'count' left when it was removed does not fit"):
        run_local(flow, checkpoint=at, changes=[ChangeAt.of(2, other)], clock=ManualClock())


# ── restarts and ways back ────────────────────────────────────────────────────────────────────────────────────────


def test_a_restart_keeps_the_plan_whether_the_script_has_it_or_not(tmp_path: Path, caplog: Any):
    at = str(tmp_path / "checkpoint")
    run_local(numbers(3)[0], checkpoint=at, changes=[ChangeAt.of(0, FIFTH, scheduler="epoch")], clock=ManualClock())
    flow, out = numbers(2, first=3)
    run_local(flow, checkpoint=at, clock=ManualClock())
    assert values(out) == [[60, 65, 70, 75], [80, 85, 90, 95]]
    flow, out = Flow("numbers"), MemorySink()
    source = flow.source("numbers", ListSource([[{"n": n} for n in range(10)]], "n bigint", partitions=2))
    source.filter("every 5th", fifth).map("m", lambda row: row).sink("out", out)
    run_local(flow, checkpoint=at, clock=ManualClock())
    assert values(out) == [[0, 5]]


def test_a_revert_of_a_stopped_job_undoes_the_plan_and_another_one_brings_it_back(tmp_path: Path):
    at = str(tmp_path / "checkpoint")
    changes = [ChangeAt.of(0, FIFTH, scheduler="epoch"), ChangeAt.of(2, Remove("every 5th"), scheduler="epoch")]
    run_local(numbers(5)[0], checkpoint=at, changes=changes, clock=ManualClock())
    taken = revert_offline(at, 2)
    assert taken.record is not None
    assert [edit.subject for edit in taken.record.edits] == ["+every 5th", "inputs of m"]
    flow, out = numbers(1, first=5)
    run_local(flow, checkpoint=at, clock=ManualClock())
    assert values(out) == [[100, 105, 110, 115]]
    revert_offline(at, 1)
    flow, out = numbers(1, first=6)
    run_local(flow, checkpoint=at, clock=ManualClock())
    assert values(out) == [list(range(120, 140))]


def test_a_broken_insert_is_rolled_back_and_no_row_is_lost():
    flow, out = numbers()
    broken = Insert(lambda rows: rows.filter("broken", lambda row: 1 // 0), after="numbers")
    run = run_local(flow, changes=[ChangeAt.of(1, broken)], clock=ManualClock(), audit="n")
    [record] = run.history
    assert record.outcome is Outcome.ROLLED_BACK
    assert "the new broken" in str(record.error) or "broken" in str(record.error)
    assert values(out) == [list(range(20 * epoch, 20 * epoch + 20)) for epoch in range(4)]


def test_a_broken_insert_is_found_by_the_preflight_on_rows_of_its_upstream():
    flow, out = numbers()
    broken = Insert(lambda rows: rows.filter("broken", lambda row: 1 // 0), after="numbers")
    run = run_local(flow, changes=[ChangeAt.of(1, broken, preflight=True)], clock=ManualClock())
    [record] = run.history
    assert record.outcome is Outcome.REFUSED
    assert "fails in preflight" in str(record.error)
    assert values(out)[3] == list(range(60, 80))


def test_windows_that_are_removed_while_open_are_kept_and_close_when_they_come_back(tmp_path: Path):
    from datetime import UTC, datetime, timedelta

    start = datetime(2026, 1, 1, tzinfo=UTC)
    flow, out, past = Flow("windows"), MemorySink(), MemorySink()
    rows = [[{"k": "a", "at": start + timedelta(seconds=30 * epoch)}] for epoch in range(8)]
    by_key = flow.source("in", ListSource(rows, "k string, at timestamp", event_time="at")).key_by("by k", "k")
    by_key.map("past", lambda row: row).sink("rows", past)
    by_key.aggregate("per minute", window=tumbling("1 minute"), rows=agg.count()).sink("out", out)
    # Epoch 2 opens the second window; it is removed before that closes, and comes back when its end has passed.
    back = Insert(
        lambda keyed: keyed.aggregate("per minute", window=tumbling("1 minute"), rows=agg.count()).sink("out", out),
        after="by k",
    )
    gone = ChangeAt.of(2, Remove("out"), Remove("per minute"), scheduler="epoch")
    run_local(flow, changes=[gone, ChangeAt.of(4, back, scheduler="epoch")], clock=ManualClock(), seed=1)
    assert len(past.rows) == 8
    windows = [(row["window_start"], row["rows"]) for row in out.rows]
    assert len({window for window, _ in windows}) == len(windows), "each window closes once"


# ── counters without gaps ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_smq_counters_are_gapless_through_modifications_and_kills(tmp_path: Path):
    """Bartnik et al.: each key is counted 1..N, in order, whatever is inserted, removed, moved or killed (B10)."""
    epochs, keys = 26, 8
    flow, out = Flow("smq"), MemorySink()
    rows = [
        [{"k": f"{i % keys}", "i": 10 * epoch + i // keys, "c": 0} for i in range(10 * keys)] for epoch in range(epochs)
    ]
    source = flow.source("in", ListSource(rows, "k string, i bigint, c bigint", partitions=2))
    source.map("a", lambda row: row).key_by("by k", "k").process("count", count_up).map("b", lambda row: row).sink(
        "out", out
    )
    changes = []
    for epoch in range(0, epochs - 2, 2):
        name = f"x{epoch}"
        where = ("a", "by k") if epoch % 4 else ("count", "b")
        changes.append(ChangeAt.of(epoch, Insert(_passing(name), between=where), Update("a", lambda row: row)))
        changes.append(ChangeAt.of(epoch + 1, Remove(name), Update("b", lambda row: row)))
    faults = Faults(crash=0.01, speculate=0.02, repeat=0.2, give_up=0.001, crash_driver=0.001, lose=0.2)
    run = run_local(flow, changes=changes, faults=faults, seed=3, checkpoint=str(tmp_path / "smq"), clock=ManualClock())
    applied = [record for record in run.history if record.outcome is Outcome.APPLIED]
    assert len(applied) > epochs // 2
    for key in range(keys):
        mine = [row["c"] for table in out.tables.values() for row in table.to_pylist() if row["k"] == f"{key}"]
        assert mine == list(range(1, 10 * epochs + 1)), key


def _passing(name: str) -> Any:
    return lambda rows: rows.filter(name, lambda row: True)


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────


BAD: dict[str, tuple[Any, str]] = {
    "cycle": (Rewire("m", to="m"), "has a cycle: m → m"),
    "unknown": (Insert(lambda rows: rows, after="nobody"), "has no operator 'nobody'"),
    "no edge": (Insert(lambda rows: rows, between=("numbers", "out")), "'out' does not read 'numbers'"),
    "taken": (Insert(lambda rows: rows.filter("m", fifth), after="numbers"), "an operator 'm' already"),
    "missing input": (Insert(lambda rows: rows.filter("f", fifth)), "say where"),
    "columns": (
        Insert(lambda rows: rows.map("x", lambda row: row, returns="z int"), after="numbers"),
        "it needs 'n' of type bigint",
    ),
    "columns before": (
        Insert(lambda rows: rows.aggregate("x", c=agg.count()), after="numbers"),
        "aggregate",
    ),
    "source": (Remove("numbers"), "map 'm' reads it, and would have no input"),
    "last sink": (Remove("out"), "has no sink"),
    "function": (Insert(lambda rows: rows.map("x", 3), after="numbers"), "expected a function that takes a dict"),
    "raises": (Insert(lambda rows: 1 // 0, after="numbers"), "its function raised ZeroDivisionError"),
    "nothing": (Insert(lambda rows: rows, after="numbers"), "adds no operator"),
    "no function": (Insert("filter", after="numbers"), "Insert"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", BAD)
def test_bad_edits_are_refused_and_nothing_changes(what: str):
    edit, told = BAD[what]
    flow, _out = numbers(2)
    with pytest.raises(FlowError) as refusal:
        run_local(flow, changes=[ChangeAt.of(0, edit)], clock=ManualClock())
    assert told in str(refusal.value), refusal.value


def test_an_edge_that_crosses_into_another_key_is_refused():
    flow, _ = keyed()
    inserted = Insert(lambda rows: rows.map("m", lambda row: row), between=("by k", "count"))
    with pytest.raises(FlowError, match="may only be operators that leave the key columns alone"):
        run_local(flow, changes=[ChangeAt.of(0, inserted)], clock=ManualClock())


def test_an_operator_that_leaves_the_key_alone_can_be_inserted_behind_a_key_by():
    flow, out = keyed()
    inserted = Insert(lambda rows: rows.filter("none", lambda row: False), between=("by k", "count"))
    run = run_local(flow, changes=[ChangeAt.of(0, inserted, scheduler="epoch")], clock=ManualClock())
    assert [record.outcome for record in run.history] == [Outcome.APPLIED]
    assert out.tables[0].num_rows > 0
    assert sum(table.num_rows for epoch, table in out.tables.items() if epoch > 0) == 0


def test_removing_an_operator_whose_branches_others_read_is_refused():
    flow, out = Flow("f"), MemorySink()
    rows = flow.source("in", ListSource([[{"n": 1}]] * 2, "n bigint"))
    parts = rows.route("split", lambda row: "a", branches=("a", "b"))
    parts["a"].union("all", parts["b"]).sink("out", out)
    with pytest.raises(FlowError, match="'all' read its branch 'a'"):
        run_local(flow, changes=[ChangeAt.of(0, Remove("split"))], clock=ManualClock())
