"""Flows that are changed while they run, on the local runtime. Thousands: ``python -m tests.simulation.run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, ListSource, MemorySink, Update
from midstream.checkpoint.change_records import Outcome
from midstream.testing import ChangeAt, Faults, LocalRun, ManualClock, run_local
from tests.naive import naive_scheduler
from tests.oracle import Row
from tests.simulation.changing_check import attempts_of, audited, check_changes, mixtures
from tests.simulation.changing_flows import CONSISTENT, changing_case_of
from tests.simulation.switching_flows import check_switching

BAD_LUCK = Faults(crash=0.05, speculate=0.05, repeat=0.3, give_up=0.002, crash_driver=0.002, lose=0.3, lose_output=0.05)


@pytest.mark.long
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 4))])
def test_every_row_is_processed_entirely_before_or_after_each_change(block: int, tmp_path: Path):
    for seed in range(3 * block, 3 * (block + 1)):
        run = check_changes(changing_case_of(seed, tmp_path / str(seed)))
        assert run.history


@pytest.mark.long
@pytest.mark.parametrize("scheduler", sorted(set(CONSISTENT)))
def test_every_scheduler_is_consistent_without_faults(scheduler: str, tmp_path: Path):
    run = check_changes(changing_case_of(3, tmp_path, schedulers=[scheduler], faults=False, broken=False))
    assert {record.outcome for record in run.history} == {Outcome.APPLIED}


@pytest.mark.long
def test_a_seed_replays_exactly(tmp_path: Path):
    def ran(folder: str) -> tuple[LocalRun, list[Any]]:
        case = changing_case_of(8, tmp_path / folder)
        case.faults = BAD_LUCK
        return case.run(), [sink.rows for sink in case.sinks.values()]

    (one, rows), (other, again) = ran("one"), ran("other")
    assert one.story == other.story
    assert one.revision == other.revision
    assert rows == again


# ── the naive scheduler must be caught ────────────────────────────────────────────────────────────────────────────


POWER_SEEDS = range(24)
OTHERS = tuple(scheduler for scheduler in CONSISTENT if scheduler != "fries")


def caught(seed: int, scheduler: str, folder: Path) -> tuple[bool, bool]:
    """Whether a scheduler let rows meet a mixture: according to the output, and to the auditor."""
    case = changing_case_of(seed, folder / str(seed), schedulers=[scheduler], faults=False, broken=False)
    run = case.run()
    return bool(mixtures(case, run)), not audited(run).serialisable


@pytest.mark.long
def test_the_simulation_catches_the_naive_scheduler_in_a_third_of_its_runs(tmp_path: Path):
    """A simulation that cannot catch a wrong scheduler proves nothing about a correct one."""
    with naive_scheduler():
        found = [caught(seed, "fries", tmp_path) for seed in POWER_SEEDS]
    by_rows, by_auditor = (sum(each) for each in zip(*found, strict=True))
    assert all(auditor for rows, auditor in found if rows), "rows show a mixture that the auditor does not see"
    assert by_rows >= 0.3 * len(found), f"{by_rows} of {len(found)} by rows, {by_auditor} by the auditor"


@pytest.mark.long
def test_on_the_same_seeds_no_other_scheduler_is_caught(tmp_path: Path):
    for seed in POWER_SEEDS:
        scheduler = "fries" if seed % 2 else OTHERS[seed // 2 % len(OTHERS)]
        assert caught(seed, scheduler, tmp_path) == (False, False), f"seed {seed}, {scheduler}"


def figure_2(seed: int, scheduler: str) -> tuple[list[Row], LocalRun]:
    """FM before an exchange and MC behind it; each writes its version on the row."""
    flow, out = Flow("fraud"), MemorySink()
    epochs = [[{"id": 200 * epoch + i, "fm": 1, "mc": 1} for i in range(200)] for epoch in range(2)]
    payments = flow.source("payments", ListSource(epochs, "id bigint, fm int, mc int", partitions=2))
    payments.map("FM", lambda row: row).key_by("by_id", "id").map("MC", lambda row: row).sink("out", out)
    change = ChangeAt.of(
        0,
        Update("FM", lambda row: {**row, "fm": 2}),
        Update("MC", lambda row: {**row, "mc": 2}),
        scheduler=scheduler,
    )
    run = run_local(flow, seed=seed, changes=[change], audit="id", clock=ManualClock())
    return out.tables[0].to_pylist(), run


def versions(rows: list[Row]) -> set[tuple[int, int]]:
    return {(row["fm"], row["mc"]) for row in rows}


def test_figure_2_the_naive_scheduler_lets_rows_meet_a_mixture_and_is_caught():
    for seed in range(20):
        with naive_scheduler():
            rows, run = figure_2(seed, "fries")
        if (1, 2) in versions(rows):
            verdict = audited(run)
            assert not verdict.serialisable
            assert "passed 'FM' under revision 1 and 'MC' under revision 2" in str(verdict.witness)
            return
    raise AssertionError("no seed of 20 showed a mixture")


@pytest.mark.parametrize("scheduler", sorted(set(CONSISTENT)))
def test_figure_2_no_other_scheduler_lets_rows_meet_a_mixture(scheduler: str):
    seen = set()
    for seed in range(5):
        rows, run = figure_2(seed, scheduler)
        assert versions(rows) <= {(1, 1), (2, 2)}
        assert audited(run).serialisable
        seen |= versions(rows)
    assert (1, 1) in seen or scheduler == "replay"


# ── single things ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_broken_change_leaves_no_trace_and_the_next_one_is_made():
    flow, out = Flow("f"), MemorySink()
    epochs = [[{"id": 10 * epoch + i, "v": 0} for i in range(10)] for epoch in range(6)]
    rows = flow.source("in", ListSource(epochs, "id bigint, v int"))
    rows.map("m", lambda row: row).sink("out", out)
    changes = [
        ChangeAt.of(1, Update("m", lambda row: 1 // 0)),
        ChangeAt.of(1, Update("m", lambda row: {**row, "v": "text"})),
        ChangeAt.of(1, Update("m", lambda row: {**row, "v": 3})),
    ]
    run = run_local(flow, changes=changes, audit="id", clock=ManualClock())
    assert [str(record.outcome) for record in run.history] == ["rolled back", "rolled back", "applied"]
    assert [row["id"] for row in out.rows] == list(range(60))
    assert {row["v"] for row in out.rows} == {0, 3}
    assert {row["v"] for row in out.tables[5].to_pylist()} == {3}


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 3])  # the meaning of seeds may change: then look for others
def test_lost_output_that_is_computed_again_is_the_same_including_timers(seed: int, tmp_path: Path):
    case = changing_case_of(
        seed, tmp_path, schedulers=["fries", "fries-unpruned", "marker"], faults=False, broken=False
    )
    case.faults = Faults(crash=0.02, speculate=0.05, lose=0.2, lose_output=0.05)
    check_changes(case)
    several = [found for found in attempts_of(case.checkpoint, case.flow.graph).values() if len(found) > 1]
    assert several, "nothing was computed again"


@pytest.mark.long
def test_all_attempts_of_a_task_switch_at_the_same_row(tmp_path: Path):
    # The first few seeds are known to switch within a task; if the meaning of seeds changes, others may.
    found = [check_switching(seed, tmp_path / str(seed)) for seed in (13, 21, 27, 29, 33, *range(10))]
    assert sum(each.compared for each in found) > 20
    assert sum(each.in_the_midst for each in found) > 1, "within a task, or it would prove little"


def test_rows_that_bypass_a_head_meet_the_old_version_until_the_epoch_ends():
    """One of two branches bypasses the head. Its rows stay with the old version until the epoch is over."""
    flow, out = Flow("f"), MemorySink()
    epochs = [[{"id": 300 * epoch + i, "h": 0, "m": 1} for i in range(300)] for epoch in range(3)]
    split = flow.source("in", ListSource(epochs, "id bigint, h int, m int")).route(
        "r", lambda row: ("via", "past")[row["id"] % 2], branches=("via", "past")
    )
    split["via"].map("h", lambda row: {**row, "h": 1}).union("u", split["past"]).map("m", lambda row: row).sink(
        "o", out
    )
    change = ChangeAt.of(0, Update("h", lambda row: {**row, "h": 2}), Update("m", lambda row: {**row, "m": 2}))
    run = run_local(flow, seed=5, changes=[change], audit="id", clock=ManualClock())
    assert versions_of(out, 0) <= {(1, 1), (2, 2), (0, 1), (0, 2)}
    assert versions_of(out, 1) == versions_of(out, 2) == {(2, 2), (0, 2)}
    assert audited(run).serialisable


def versions_of(out: MemorySink, epoch: int) -> set[tuple[int, int]]:
    return {(row["h"], row["m"]) for row in out.tables[epoch].to_pylist()}


def test_the_history_has_who_changed_what_and_when_it_took_effect(tmp_path: Path):
    flow, out = Flow("f"), MemorySink()
    rows = flow.source("in", ListSource([[{"id": i} for i in range(50)]] * 3, "id bigint"))
    rows.map("m", lambda row: row).sink("out", out)
    run = run_local(flow, changes=[ChangeAt.of(1, Update("m", lambda row: row), scheduler="epoch")])
    [record] = run.history
    assert (record.number, record.revision, record.by, record.scheduler) == (1, 2, "test", "epoch")
    assert (record.operators, record.epoch, record.outcome) == (("m",), 2, Outcome.APPLIED)
    assert record.delay_ms is not None
