"""Controllers on simulated plants whose best setting is known: they find it, stay there, and keep their limits.

Each policy has a naive rival, which the same checks catch: so they can fail.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from midstream import AutoScale, Balance, Controller, Pace, Proposal, Rebalance, Rescale, Situation, Tune
from midstream.controllers.arbiter import HOLD, MOST_TURNS, REST, TURNS_WITHIN
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.planner.balance import balanced, imbalance
from tests.plants import BINS, PacePlant, Plant, ScalePlant, steer, uneven

SEEDS = range(6)


def least(load: float, *, utilisation: float = 0.7, capacity: float = 1.0) -> int:
    """The oracle: the least number of partitions that keep up with a load, noise included."""
    return math.ceil(load / (utilisation * capacity) - 1e-9)


def swings(settings: Sequence[Any]) -> int:
    """How often the direction of a setting turned."""
    steps = [later - earlier for earlier, later in pairwise(settings) if later != earlier]
    return sum(1 for one, other in pairwise(steps) if one * other < 0)


def turns_within(settings: Sequence[Any], epochs: int) -> int:
    """The most turns within so many epochs."""
    return max(swings(settings[start : start + epochs]) for start in range(len(settings) - epochs + 1))


def found(plant: Plant, best: range, within: int) -> bool:
    """Whether it has reached the best setting in time, and stayed there."""
    return all(each in best for each in plant.settings[within:])


# ── AutoScale ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", [0.4, 1.3, 3.1, 6.5])
def test_auto_scale_finds_the_least_number_of_partitions_and_stays_there(load: float, seed: int) -> None:
    for start in (1, 12):
        plant = ScalePlant(lambda epoch: load, start, seed=seed)
        desk = steer(plant, [AutoScale(between=(1, 16))], 160)
        # Noise of a tenth may call for one more, and the way down leaves a margin; bins are not quite even either.
        best = range(least(0.9 * load), least(1.1 * load / 0.8) + 2)
        assert found(plant, best, 120), plant.settings
        assert swings(plant.settings) <= 3, "down if it began with too many, and a try with fewer"
        assert len(plant.changes) <= 8
        assert {each.outcome for each in desk.proposals()} <= {ProposalOutcome.APPLIED, ProposalOutcome.PENDING}
        assert plant.lengths[-1] < 1.0, "the job keeps up"


@pytest.mark.parametrize("seed", SEEDS)
def test_auto_scale_follows_a_load_that_doubles_and_falls(seed: int) -> None:
    def load(epoch: int) -> float:
        return 3.0 if 60 <= epoch < 140 else 1.2

    plant = ScalePlant(load, 2, seed=seed)
    steer(plant, [AutoScale()], 240)
    assert plant.settings[59] in (2, 3)
    assert plant.settings[75] >= least(2.7), "within a few epochs"
    assert plant.settings[-1] in (2, 3), "and gives them back"
    assert max(plant.settings) <= 8
    assert swings(plant.settings) <= 2


@pytest.mark.parametrize("capacity", [0.6, 0.8])
def test_auto_scale_learns_that_a_partition_cannot_be_busy_all_the_time(capacity: float) -> None:
    plant = ScalePlant(lambda epoch: 1.5, 1, capacity=capacity)
    steer(plant, [AutoScale(utilisation=0.9)], 160)
    assert plant.lengths[-1] < 1.0, "by busy time alone, two would be enough for 0.6"
    assert plant.settings[-1] >= math.ceil(1.5 / capacity)
    assert swings(plant.settings) <= 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("capacity", "best"), [(0.6, range(5, 7)), (1.0, range(4, 5))])
def test_auto_scale_comes_down_from_a_busy_hour_as_far_as_the_job_keeps_up(
    capacity: float, best: range, seed: int
) -> None:
    """With 0.6 of a core to a partition, four would just do: epochs get longer and longer."""
    plant = ScalePlant(lambda epoch: 6.0 if 60 <= epoch < 160 else 2.2, 2, capacity=capacity, seed=seed)
    steer(plant, [AutoScale()], 800)
    ending = plant.settings[500:]
    assert plant.settings[-1] in best
    assert sum(each in best for each in ending) >= 0.9 * len(ending), "but for a try now and then"
    assert max(plant.lengths[500:]) < 1.0
    assert turns_within(plant.settings, TURNS_WITHIN) <= 3


@pytest.mark.parametrize("seed", range(3))
def test_auto_scale_asks_for_executors_and_gives_them_back(seed: int) -> None:
    plant = ScalePlant(lambda epoch: 3.5 if 60 <= epoch < 160 else 1.2, 2, executors=2, seed=seed)
    steer(plant, [AutoScale(executors=(1, 6))], 500)
    assert max(plant.executors_seen[:160]) in range(least(0.9 * 3.5), 7)
    assert plant.settings[-1] == 2
    assert plant.executors_seen[-1] == 2
    assert swings(plant.executors_seen) == 1


def test_auto_scale_keeps_its_limits_and_those_of_the_cluster() -> None:
    plant = ScalePlant(lambda epoch: 20.0, 2)
    steer(plant, [AutoScale(between=(2, 5))], 60)
    assert max(plant.settings) == plant.settings[-1] == 5
    plant = ScalePlant(lambda epoch: 20.0, 2, cores=3)
    steer(plant, [AutoScale(between=(2, 5))], 60)
    assert plant.settings[-1] == 3
    plant = ScalePlant(lambda epoch: 0.01, 4)
    steer(plant, [AutoScale(between=(2, 5))], 60)
    assert min(plant.settings) == plant.settings[-1] == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_auto_scale_meets_a_latency_and_stops_where_more_partitions_are_of_no_use(seed: int) -> None:
    plant = ScalePlant(lambda epoch: 0.9, 1, seed=seed, noise=0.03)
    steer(plant, [AutoScale(utilisation=1.0, latency="380 ms")], 150)
    # 0.2 s until the epoch, 0.05 s, and 0.18 s of work by the number of partitions.
    assert plant.settings[-1] == 2
    assert len(plant.changes) == 1
    plant = ScalePlant(lambda epoch: 0.9, 1, seed=seed, noise=0.03)
    steer(plant, [AutoScale(utilisation=1.0, latency="100 ms")], 150)
    assert plant.settings[-1] <= 4, "no number of partitions makes rows younger than 250 ms"
    assert swings(plant.settings) == 0


@dataclass(frozen=True)
class NaiveScale(Controller):
    """As many partitions as the last epoch needed."""

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        [stage] = seen.stages
        wanted = max(1, math.ceil(seen.busy_of(stage) / 0.7))
        return ([Proposal(Rescale(wanted, stage.name), "now")] if wanted != stage.partitions else []), None


def test_a_naive_rival_is_caught() -> None:
    plant = ScalePlant(lambda epoch: 1.4, 2)
    steer(plant, [NaiveScale()], 160)
    assert swings(plant.settings) > 1
    assert len(plant.changes) > 4, "until it is stopped"


# ── Balance ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", SEEDS)
def test_balance_reaches_the_best_possible_and_leaves_it_there(seed: int) -> None:
    plant = ScalePlant(lambda epoch: 1.0, 4, seed=seed)
    plant.weights = [plant.rng.paretovariate(1.5) for _ in range(BINS)]
    plant.assignment = uneven([number // 100 for number in range(BINS)], 4)  # one partition has nothing
    before = imbalance(plant.assignment, plant.weights)
    best = imbalance(balanced_of(plant), plant.weights)
    desk = steer(plant, [Balance(max_over_mean=1.2)], 60)
    assert before > 1.2
    assert imbalance(plant.assignment, plant.weights) == pytest.approx(best)
    assert len(desk.proposals()) == 1, "and nothing more"


def balanced_of(plant: ScalePlant) -> Any:
    return balanced(plant.assignment, plant.weights)


def test_balance_leaves_a_bin_that_is_too_heavy_where_it_is() -> None:
    plant = ScalePlant(lambda epoch: 1.0, 4)
    plant.weights = [1000.0, *[1.0] * (BINS - 1)]
    plant.assignment = balanced_of(plant)
    assert imbalance(plant.assignment, plant.weights) > 3
    assert steer(plant, [Balance()], 60).proposals() == []


@dataclass(frozen=True)
class NaiveBalance(Controller):
    """Rebalances whenever a stage is uneven."""

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        [stage] = seen.stages
        return ([Proposal(Rebalance(stage.name), "uneven")] if stage.max_over_mean > 1.2 else []), None


def test_a_naive_rebalance_never_ends() -> None:
    plant = ScalePlant(lambda epoch: 1.0, 4)
    plant.weights = [1000.0, *[1.0] * (BINS - 1)]
    assert len(steer(plant, [NaiveBalance()], 60).proposals()) > 5


# ── Pace ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("start", [60_000, 5_000_000])
def test_pace_finds_the_longest_pace_overshoots_once_and_reverts(start: int, seed: int) -> None:
    plant = PacePlant(start, seed=seed)
    desk = steer(plant, [Pace(latency="1 s")], 250)
    best, settled = plant.best(1000), plant.settings[-1]
    assert best / 1.5 / 1.1 <= settled <= best, "within a step"
    assert len(set(plant.settings[150:])) == 1, "and stays there"
    over = [plant.settings[n] > best for n in range(len(plant.settings))]
    overshoots = sum(1 for one, other in pairwise(over) if other and not one)
    assert overshoots <= 1
    assert all(each.reason.startswith("rows are ") for each in desk.proposals())


@pytest.mark.parametrize("seed", SEEDS)
def test_pace_follows_another_load(seed: int) -> None:
    plant = PacePlant(
        60_000,
        slope=lambda epoch: 2.4 if epoch >= 150 else 1.2,
        rate=lambda epoch: 2000.0 if epoch >= 150 else 1000.0,
        seed=seed,
    )
    steer(plant, [Pace(latency="1 s")], 330)
    assert plant.best(1000) / 1.5 / 1.1 <= plant.settings[-1] <= plant.best(1000)
    assert sum(each > 1000 for each in plant.latencies[170:]) <= 20


@pytest.mark.parametrize("seed", SEEDS)
def test_pace_comes_back_from_a_disturbance(seed: int) -> None:
    plant = PacePlant(100_000, slope=lambda epoch: 3.6 if 100 <= epoch < 160 else 1.2, seed=seed)
    steer(plant, [Pace(latency="1 s")], 700)
    assert min(plant.settings[130:160]) <= plant.best(1000) / 2, "rows were three times as old"
    assert plant.best(1000) / 1.5 / 1.1 <= plant.settings[-1] <= plant.best(1000)


def test_pace_tries_ever_more_rarely_what_has_missed() -> None:
    plant = PacePlant(100_000)
    steer(plant, [Pace(latency="1 s")], 2_500)
    tries = [epoch for epoch in plant.changes if plant.settings[epoch] > plant.best(1000)]
    waits = [later - earlier for earlier, later in pairwise(tries)]
    assert len(waits) == 3
    assert all(later > 1.8 * earlier for earlier, later in pairwise(waits))
    assert sum(each > 1000 for each in plant.latencies) <= 0.02 * len(plant.latencies)


def test_pace_keeps_its_limits() -> None:
    plant = PacePlant(100_000, floor_ms=2000.0)
    steer(plant, [Pace(latency="1 s", between=("80 ms", "1 s"))], 100)
    assert plant.settings[-1] == min(plant.settings) == 80_000, "it cannot be met, but no less is allowed"
    plant = PacePlant(100_000)
    steer(plant, [Pace(latency="20 s", between=("80 ms", "1 s"))], 100)
    assert plant.settings[-1] == max(plant.settings) == 1_000_000


@dataclass(frozen=True)
class NaivePace(Controller):
    """Longer while rows are young, shorter when they are old."""

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        now = seen.knobs["pace"] or 50_000
        factor = 1.5 if seen.latency_ms() < 1000 else 1 / 1.5
        return [Proposal(Tune(pace=round(now * factor)), "now")], None


def test_a_naive_pace_oscillates_and_is_held_back() -> None:
    plant = PacePlant(60_000)
    desk = steer(plant, [NaivePace()], 250)
    assert swings(plant.settings) > 2
    assert turns_within(plant.settings, TURNS_WITHIN) == MOST_TURNS
    assert any(
        "it contradicts itself: it turned knob pace back 6 times" in (each.error or "") for each in desk.proposals()
    )


@pytest.mark.parametrize("period", [7, 15, 20, 30, 50])
def test_a_load_that_comes_and_goes_stops_no_controller_and_is_followed_for_good(period: int) -> None:
    def is_high(epoch: int) -> bool:
        return epoch // period % 2 == 1

    paced = PacePlant(100_000, rate=lambda epoch: 1500.0 if is_high(epoch) else 1000.0)
    scaled = ScalePlant(lambda epoch: 3.0 if is_high(epoch) else 1.2, 2)
    for plant, policy in ((paced, Pace(latency="1 s")), (scaled, AutoScale())):
        [state] = steer(plant, [policy], 1000).controllers
        assert state.stopped is None
        assert turns_within(plant.settings, TURNS_WITHIN) <= MOST_TURNS
    assert max(scaled.settings[-4 * period :]) >= 5, "as the high load calls for"


# ── several at once ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", SEEDS)
def test_scale_and_balance_together_reach_what_each_would_alone(seed: int) -> None:
    plant = ScalePlant(lambda epoch: 2.0, 1, skew=3.0, seed=seed)
    desk = steer(plant, [Balance(), AutoScale()], 200)
    assert plant.settings[-1] in range(least(1.8), least(2.2 / 0.8) + 1)
    assert imbalance(plant.assignment, plant.weights) <= max(
        1.2, imbalance(balanced_of(plant), plant.weights) / 0.95 + 1e-9
    )
    assert len(plant.changes) <= 4
    numbers = [each.number for each in desk.proposals()]
    assert numbers == sorted(set(numbers)), "one order"


@dataclass(frozen=True)
class Restless(Controller):
    """Wants something at random, from a seed."""

    seed: int

    def first(self) -> Any:
        return random.Random(self.seed)

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        [stage] = seen.stages
        wanted = [
            Proposal(Rescale(memory.randrange(1, 9), stage.name), "why not"),
            Proposal(Rebalance(stage.name), "why not"),
        ]
        return memory.sample(wanted, memory.randrange(3)), memory


@pytest.mark.parametrize("seed", range(12))
def test_random_proposals_of_several_controllers_come_to_one_serial_order(seed: int) -> None:
    plant = ScalePlant(lambda epoch: 1.0, 2, seed=seed)
    desk = steer(plant, [], 0)
    for number in range(3):
        desk.attach(Restless(100 * seed + number), name=f"c{number}")
    for _ in range(150):
        desk.observe(plant.advance())
    failed = [each.error for each in desk.proposals() if each.outcome is ProposalOutcome.FAILED]
    assert failed == [], "the plant refuses a second operation while one is in progress"
    applied = [each for each in desk.proposals() if each.outcome is ProposalOutcome.APPLIED]
    assert len(applied) > 5
    assert [each.number for each in applied] == sorted(each.number for each in applied)
    # Replayed one after the other, they come to the same setting.
    again = ScalePlant(lambda epoch: 1.0, 2, seed=seed)
    for each in applied:
        scaled = re.fullmatch(r"rescale 'by k' to (\d+)", each.operation)
        again.effect(Rescale(int(scaled[1]), "by k") if scaled else Rebalance("by k"))()
    assert again.assignment == plant.assignment
    # What one has changed is nobody else's for a while.
    for kind in ("rescale", "rebalance"):
        own = [each for each in applied if each.operation.startswith(kind)]
        for one, other in pairwise(own):
            assert other.epoch - one.epoch >= (REST if one.controller == other.controller else HOLD)
