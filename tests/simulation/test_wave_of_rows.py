"""Megaphone's third experiment (its Figure 2c) as arithmetic: a job is scaled out under a load that rises and falls.

The load rises above what the first executor can do, and falls below. The paper asks for steps that stabilise sooner
than batched ones.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

import pytest

from midstream.ids import StageIndex
from midstream.planner.assignment import Assignment
from midstream.planner.migration import BinMove, Steps, batched, budgeted, fluid, moves_between, sudden
from midstream.planner.step_cost import Budget, StepCost

BINS, FIXED_S, LOW, HIGH, PERIOD_S, PERIODS = 64, 0.25, 0.5, 1.2, 8.0, 3
"""Rates are shares of what one executor can do."""


def due_between(since: float, until: float) -> float:
    """Rows that fall due: the integral of the wave, which begins high."""

    def due(until: float) -> float:
        periods, rest = divmod(until, PERIOD_S)
        high = min(rest, PERIOD_S / 2)
        return periods * PERIOD_S * (LOW + HIGH) / 2 + high * HIGH + (rest - high) * LOW

    return due(until) - due(since)


@dataclass(frozen=True)
class Ridden:
    """How a migration went, in seconds from the request."""

    ended: float
    stable: float
    worst: float
    """The longest latency."""


def ride(steps: Steps, bin_ms: float) -> Ridden:
    """Epochs are as long as the executor with more bins needs for the rows that were due during the last one, and as
    what has moved needs to be loaded."""
    now = since = 0.0
    requested = 2 * PERIOD_S
    moved, ended, cost = 0, None, None
    epochs = list[tuple[float, float]]()
    while now < requested + (PERIODS + 2) * PERIOD_S:
        rows, since, count = due_between(since, now), now, 0
        if now >= requested and ended is None:
            try:
                count = len(steps.send(cost))
            except StopIteration:
                ended = now
        moved += count
        took = FIXED_S + rows * (1 - moved / BINS) + count * bin_ms / 1000
        if now >= requested:
            steady = statistics.median(took for began, took in epochs if began < requested)
            cost = StepCost(count, count << 20, 1000 * took, 1000 * steady)
        now += took
        epochs.append((now - took, took))
    assert ended is not None
    waited = [(began, last + took) for (_, last), (began, took) in pairwise(epochs)]
    usual = max(latency for began, latency in waited if began > ended + PERIOD_S)
    late = [began for began, latency in waited if began >= requested and latency > 1.2 * usual]
    worst = max(latency for began, latency in waited if began >= requested)
    return Ridden(ended - requested, max(late, default=requested) - requested, worst)


def moves() -> tuple[BinMove, ...]:
    """Each of two partitions gives half of its bins to another one, which is elsewhere."""
    before = Assignment(4, tuple(number % 2 for number in range(BINS)))
    after = Assignment(4, tuple(number % 2 + 2 * (number // 2 % 2) for number in range(BINS)))
    return moves_between({StageIndex(1): before}, {StageIndex(1): after})


@pytest.mark.parametrize("bin_ms", [1.0, 5.0])
def test_a_budget_stabilises_sooner_than_batches_and_waits_no_longer(bin_ms: float):
    found = {
        "fluid": ride(fluid(moves()), bin_ms),
        "batched": ride(batched(moves()), bin_ms),
        "budgeted": ride(budgeted(moves(), lambda move: 1 << 20, Budget()), bin_ms),
    }
    assert found["budgeted"].stable <= 0.6 * found["batched"].stable < found["fluid"].ended
    assert found["budgeted"].ended <= 0.7 * found["batched"].ended
    assert found["budgeted"].worst <= 1.1 * found["batched"].worst


def test_costly_bins_move_in_smaller_steps_and_a_single_step_makes_rows_wait():
    dear = 150.0
    at_once, by_budget = ride(sudden(moves()), dear), ride(budgeted(moves(), lambda move: 1 << 20, Budget()), dear)
    assert by_budget.worst <= 0.7 * at_once.worst


def test_the_wave_matches_its_description():
    assert due_between(0, PERIOD_S) == pytest.approx(PERIOD_S * (LOW + HIGH) / 2)
    assert due_between(3 * PERIOD_S, 3 * PERIOD_S + 1) == pytest.approx(HIGH)
    assert due_between(PERIOD_S - 1, PERIOD_S) == pytest.approx(LOW)
