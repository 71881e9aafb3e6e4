"""Simulated plants for controllers: jobs whose best setting is known, and a desk that steers them.

A plant answers as a job does (:class:`midstream.runtime.controller_desk.Steerable`), and gives an observation for each
epoch. Its noise comes from a seed.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from midstream.change.migration_goals import Rebalance
from midstream.controllers.controller import Controller, Executors, Proposal
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.controllers.situation import Situation, StageLoad
from midstream.flow.edits import Rescale, Tune
from midstream.ids import PartitionId
from midstream.observation import Observation, OperatorObservation
from midstream.planner.assignment import Assignment, spread
from midstream.planner.balance import balanced
from midstream.planner.reassignment import rescaled
from midstream.runtime.controller_desk import ControllerDesk, Requested

BINS = 256
TAKES = 2
"""Epochs until an operation is complete."""


class Plant(ABC):
    """A simulated job; ``settings`` has how it was set in each epoch."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.epoch = -1
        self.settings: list[Any] = []
        self.in_progress: str | None = None
        self._done_at = 0
        self._effect: Callable[[], None] | None = None

    @abstractmethod
    def observation(self) -> Observation:
        """The observation of the next epoch."""

    @property
    @abstractmethod
    def setting(self) -> Any:
        """The present setting of the plant."""

    @abstractmethod
    def effect(self, operation: Any) -> Callable[[], None]:
        """What an operation does."""

    def situation(self, seen: Observation) -> Situation:
        """What controllers see."""
        return Situation(seen, cores=16, in_progress=self.in_progress)

    def request(self, proposal: Proposal, by: str, note: str) -> Requested:
        """Begin an operation, which takes effect some epochs later."""
        assert self._effect is None, "one operation at a time"
        self._effect, done_at = self.effect(proposal.operation), self.epoch + TAKES
        self._done_at = done_at

        def state() -> tuple[ProposalOutcome, str | None]:
            return (ProposalOutcome.PENDING if self.epoch < done_at else ProposalOutcome.APPLIED), None

        return Requested(state)

    def advance(self) -> Observation:
        """One epoch."""
        self.epoch += 1
        if self._effect is not None and self.epoch >= self._done_at:
            self._effect()
            self._effect = None
        self.settings.append(self.setting)
        return self.observation()

    def varied(self, value: float, by: float) -> float:
        """A value with noise."""
        return value * self.rng.uniform(1 - by, 1 + by)

    @property
    def changes(self) -> list[int]:
        """The epochs in which the setting changed."""
        return [n for n in range(1, len(self.settings)) if self.settings[n] != self.settings[n - 1]]


def steer(plant: Plant, controllers: Sequence[Controller], epochs: int) -> ControllerDesk:
    """Have controllers look after a plant for some epochs."""
    desk = ControllerDesk(plant, wall=lambda: float(plant.epoch), time_limit_s=None)
    for each in controllers:
        desk.attach(each)
    for _ in range(epochs):
        desk.observe(plant.advance())
    return desk


class ScalePlant(Plant):
    """A stage that has ``load(epoch)`` cores of work and runs with ``partitions``, each of which has ``capacity`` of a
    core. Epochs take what came during the one before, so they grow without end if the partitions cannot keep up."""

    def __init__(
        self,
        load: Callable[[int], float],
        partitions: int = 1,
        *,
        capacity: float = 1.0,
        noise: float = 0.1,
        skew: float = 0.0,
        cores: int = 16,
        executors: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.executors = executors
        """How many there are, if its manager can be asked; each has one core."""
        self.executors_seen: list[int] = []
        self.load, self.capacity, self.noise, self.cores = load, capacity, noise, cores
        self.assignment = spread(partitions, BINS)
        self.weights = [1.0 + skew * (number < 8) for number in range(BINS)]
        self.length_s = 0.2
        self.lengths: list[float] = []

    @property
    def setting(self) -> int:
        """The number of partitions."""
        return self.assignment.partitions

    def situation(self, seen: Observation) -> Situation:
        """With the one stage."""
        busy = seen.operators[0].busy_share
        work = tuple(busy * weight / sum(self.weights) for weight in self.weights)
        stage = StageLoad("by k", ("count",), self.assignment, work)
        executors, cores = (2, self.cores) if self.executors is None else (self.executors, self.executors)
        asks = self.executors is not None
        self.executors_seen.append(executors)
        return Situation(seen, (stage,), {"pace": 0}, executors, cores, asks, in_progress=self.in_progress)

    def effect(self, operation: Any) -> Callable[[], None]:
        """Rescale, rebalance, and other numbers of executors."""

        def apply() -> None:
            match operation:
                case Rescale(partitions=partitions):
                    self.assignment = rescaled(self.assignment, partitions)
                case Executors(count=count):
                    self.executors = count
                case Rebalance():
                    self.assignment = balanced(self.assignment, self.weights)
                case _:
                    raise AssertionError(operation)

        return apply

    def observation(self) -> Observation:
        """Rows that came during the last epoch are worked on by all partitions; the busiest decides when it ends."""
        work = self.varied(self.load(self.epoch), self.noise)
        shares = [
            sum(self.weights[number] for number in self.assignment.owned_by(PartitionId(partition)))
            for partition in range(self.assignment.partitions)
        ]
        busiest = max(shares) / sum(self.weights)
        came_s = max(self.length_s, 0.2)
        busy_s = work * came_s
        self.length_s = min(60.0, 0.05 + busiest * busy_s / self.capacity)
        elapsed_s = max(self.length_s, 0.2)
        self.lengths.append(self.length_s)
        latency_ms = 1000 * (came_s + self.length_s)
        return Observation(
            flow="plant",
            job="p",
            epoch=self.epoch,
            revision=1,
            observed_at=0.0,
            duration_ms=1000 * self.length_s,
            elapsed_ms=1000 * elapsed_s,
            rows_in=round(1000 * work * came_s),
            operators=(
                OperatorObservation(
                    operator="count", kind="process", busy_share=busy_s / elapsed_s, latency_p95_ms=latency_ms
                ),
            ),
        )


class PacePlant(Plant):
    """A job with a pace: rows get ``slope`` times as old as the pace is long, on top of ``floor_ms``; each epoch costs
    the same, so the longest pace whose rows are young enough is the best one."""

    def __init__(
        self,
        pace_us: int,
        *,
        floor_ms: float = 120.0,
        slope: Callable[[int], float] = lambda epoch: 1.2,
        rate: Callable[[int], float] = lambda epoch: 1000.0,
        noise: float = 0.03,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.pace_us, self.floor_ms, self.slope, self.rate, self.noise = pace_us, floor_ms, slope, rate, noise
        self.latencies: list[float] = []

    @property
    def setting(self) -> int:
        """The pace, in microseconds."""
        return self.pace_us

    def situation(self, seen: Observation) -> Situation:
        """With the knob."""
        return Situation(seen, knobs={"pace": self.pace_us, "rows_per_epoch": None}, in_progress=self.in_progress)

    def effect(self, operation: Any) -> Callable[[], None]:
        """Tune the pace."""
        assert isinstance(operation, Tune)
        wanted = operation.knobs["pace"]
        assert wanted is not None

        def apply() -> None:
            self.pace_us = wanted

        return apply

    def latency_at(self, pace_us: float) -> float:
        """What the latency is at a pace, without noise."""
        return self.floor_ms + self.slope(self.epoch) * pace_us / 1000

    def best(self, objective_ms: float) -> float:
        """The longest pace that meets an objective, in microseconds."""
        return 1000 * (objective_ms - self.floor_ms) / self.slope(self.epoch)

    def observation(self) -> Observation:
        """An epoch of the length of the pace."""
        latency_ms = self.varied(self.latency_at(self.pace_us), self.noise)
        self.latencies.append(latency_ms)
        length_ms = max(50.0, self.pace_us / 1000)
        return Observation(
            flow="plant",
            job="p",
            epoch=self.epoch,
            revision=1,
            observed_at=0.0,
            duration_ms=50.0,
            elapsed_ms=length_ms,
            rows_in=round(self.varied(self.rate(self.epoch), self.noise) * length_ms / 1000),
            operators=(OperatorObservation(operator="m", kind="map", latency_p95_ms=latency_ms),),
        )


def uneven(owners: Sequence[int], partitions: int) -> Assignment:
    """An assignment by its owners."""
    return Assignment(partitions, tuple(owners))
