"""The figures of ``benchmarks.plan_changes`` from a course that is known by heart: an epoch each second, no noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.due_times import Timeline
from benchmarks.plan_changes import Results, figures_of, measured, plot, show
from benchmarks.plan_timeline import CYCLE, INSERT, KEYED, REDEPLOY, RESTART, UNKEYED, Course, Event
from benchmarks.rivals.flink import Cycle
from benchmarks.workloads import smq
from tests.chaos.plans import Round

RATE, CALM, APART = 100, 5, 10
KINDS = (*CYCLE, RESTART, REDEPLOY)


def course() -> Course:
    """Epoch e is committed at e + 1, but those of a restart take 4 s longer; a change comes in the middle of each tenth
    epoch, and the first row of the new plan 20 ms after the call, or with the next epoch."""
    made = Course(RATE, Timeline())
    at, rows = 0.0, 0
    for epoch in range(APART * (len(KINDS) + 1)):
        kind = KINDS[epoch // APART - 1] if epoch % APART == 1 and epoch > APART else None
        at += 5.0 if kind in (RESTART, REDEPLOY) else 1.0
        rows += RATE
        made.timeline.ends[epoch] = rows, at
    for number, kind in enumerate(KINDS):
        running = APART * (number + 1)
        begun = made.timeline.ends[running - 1][1]
        is_within = kind in CYCLE and kind not in (KEYED, UNKEYED)
        epoch = running if is_within else running + 1
        change = CYCLE.get(kind, smq.Change(smq.BASE, smq.BASE))
        effect = {"in_effect_ms": 15.0, "delay_ms": 8.0, "met_tasks": True} if is_within else {}
        made.events.append(Event(kind, change, begun + 0.5, running, epoch, **effect))  # type: ignore[arg-type]
        first = begun + 0.52 if is_within else made.timeline.ends[epoch][1] - 0.9
        made.verdict.seams.append(smq.Seam(epoch, begun + 0.51, first))
    made.stamps = np.arange(0.0, at, 0.01)
    return made


def test_delays_count_from_the_call_and_epochs_from_steady_ones() -> None:
    found = {each.event.kind: each for each in measured(course(), CALM)}
    insert, keyed, restart = found[INSERT], found[KEYED], found[RESTART]
    assert insert.first_new_ms == pytest.approx(20)
    assert insert.last_old_ms == pytest.approx(10)
    assert insert.epoch_s == pytest.approx(1.0)
    assert insert.longest == pytest.approx(1.0)
    assert insert.pause_ms == pytest.approx(10)
    # In the midst of an epoch of one second, and 0.1 s after the next one has begun.
    assert keyed.epochs == pytest.approx(0.6)
    assert restart.longest == pytest.approx(5.0)
    assert restart.first_new_ms == pytest.approx(4600)


def test_figures_leave_out_what_was_not_measured(tmp_path: Path) -> None:
    cycles = [Cycle(0.0, 0.5, 1.5, 6.0, 5.0)]
    results = Results(course(), cycles, Round(changes=100, lives=3, kills=["worker"] * 9, lost=1))
    figures = figures_of(results, CALM)
    assert figures["within_stage_p50_ms"] == 8.0
    assert figures["within_stage_met_tasks"] == 3
    assert figures["exchange_epochs"] == pytest.approx(0.6)
    assert figures["longest_epoch_ratio"] == pytest.approx(1.0)
    assert figures["over_pyflink"] == pytest.approx(300)
    assert (figures["lost"], figures["random_drivers_killed"]) == (1, 2)
    show(results, figures, RATE)
    plot(tmp_path / "plot.svg", results, CALM)
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    nothing = figures_of(Results(), CALM)
    assert nothing == dict.fromkeys(
        ("within_stage_p50_ms", "exchange_epochs", "longest_epoch_ratio", "handover_s", "over_pyflink", "lost")
    )
    show(Results(missing="not there"), nothing, RATE)
