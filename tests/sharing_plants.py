"""Simulated jobs that share a budget, side by side: each has epochs of its own, and a desk of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from midstream import Flow, GeneratorSource, NoopSink
from midstream.controllers.controller import Controller, Proposal
from midstream.controllers.proposal_records import ControllerState, ProposalOutcome, ProposalRecord
from midstream.controllers.situation import Situation, StageLoad
from midstream.flow.edits import Rescale, Tune
from midstream.flow.model import Graph
from midstream.observation import Observation, OperatorObservation, SourceObservation
from midstream.planner.assignment import Assignment, spread
from midstream.runtime.controller_desk import ControllerDesk, Requested
from tests.plants import BINS, TAKES, Plant


class SharingPlant(Plant):
    """A simulated job as :class:`midstream.Sharing` knows it. ``load(second)`` is what comes to it each second."""

    def __init__(self, name: str, load: Callable[[float], float], *, noise: float = 0.1, seed: int = 0) -> None:
        super().__init__(seed)
        self.name, self.load, self.noise = name, load, noise
        self.is_over = False
        self.now_s = 0.0
        """When the last epoch has ended."""
        self.length_s = 1.0
        self.backlog = 0.0
        flow = Flow(name)
        flow.source("in", GeneratorSource(lambda index, rng: {}, "k bigint", rate=1)).sink("out", NoopSink())
        self.graph: Graph = flow.graph
        self._desk = ControllerDesk(self, wall=lambda: float(self.epoch), time_limit_s=None)

    @property
    def taken(self) -> float:
        """Of the budget, now."""
        return float(self.setting)

    @property
    def controllers(self) -> tuple[ControllerState, ...]:
        """Those that are attached."""
        return self._desk.controllers

    def attach(self, controller: Controller, *, name: str | None = None, advise: bool = False) -> ControllerState:
        """Have a controller look at it."""
        return self._desk.attach(controller, name=name, advise=advise)

    def detach(self, name: str) -> ControllerState:
        """Ask a controller no more."""
        return self._desk.detach(name)

    def proposals(self) -> list[ProposalRecord]:
        """What controllers have proposed."""
        return self._desk.proposals()

    def stage_loads(self) -> tuple[StageLoad, ...]:
        """None."""
        return ()

    def run_epoch(self) -> None:
        """One epoch, and what controllers make of it."""
        self._desk.observe(self.advance())

    def observed(self, **seen: Any) -> Observation:
        """The observation of an epoch that has ended now."""
        self.now_s += self.length_s
        return Observation(
            flow=self.name,
            job=self.name,
            epoch=self.epoch,
            revision=1,
            observed_at=self.now_s,
            elapsed_ms=1000 * self.length_s,
            **seen,
        )


class RowsPlant(SharingPlant):
    """Takes the rows that have come, up to a limit for each epoch; those above it wait.

    With ``slowed_by`` an epoch lasts the longer, the more rows all of the jobs took in their last one: they share a
    machine. Without, it lasts a second.
    """

    def __init__(self, name: str, load: Callable[[float], float], limit: int | None = None, **how: Any) -> None:
        super().__init__(name, load, **how)
        self.limit = limit
        self.rows = 0
        self.slowed_by: Sequence[RowsPlant] = ()

    @property
    def setting(self) -> int:
        """The limit; without one, as much as there is."""
        return 10**9 if self.limit is None else self.limit

    def situation(self, seen: Observation) -> Situation:
        """With the knob."""
        return Situation(seen, knobs={"rows_per_epoch": self.limit}, in_progress=self.in_progress)

    def effect(self, operation: Any) -> Callable[[], None]:
        """Tune the limit."""
        assert isinstance(operation, Tune)
        wanted = operation.knobs["rows_per_epoch"]

        def apply() -> None:
            self.limit = wanted

        return apply

    def observation(self) -> Observation:
        """What has come since the last epoch, and what was left then."""
        self.backlog += self.varied(self.load(self.now_s), self.noise) * self.length_s
        self.rows = round(min(self.backlog, self.setting))
        self.backlog -= self.rows
        if self.slowed_by:
            self.length_s = 0.5 + 5e-5 * sum(each.rows for each in self.slowed_by)
        return self.observed(rows_in=self.rows, sources=(SourceObservation(source="in", rows=self.rows),))


class TrialPlant(RowsPlant):
    """Its changes have their effect at once, and every second one is rolled back after its trial."""

    def request(self, proposal: Proposal, by: str, note: str) -> Requested:
        """Begin a trial."""
        before, done_at, is_rolled_back = self.limit, self.epoch + TAKES, bool(self.rng.randrange(2))
        self.effect(proposal.operation)()

        def state() -> tuple[ProposalOutcome, str | None]:
            if self.epoch < done_at:
                return ProposalOutcome.PENDING, None
            return (ProposalOutcome.FAILED, "rolled back") if is_rolled_back else (ProposalOutcome.APPLIED, None)

        def end() -> None:
            if is_rolled_back:
                self.limit = before

        self._effect, self._done_at = end, done_at
        return Requested(state)


class CoresPlant(SharingPlant):
    """A stage to which ``load`` cores of work come; what its partitions cannot do waits. Each gets ``capacity`` of a
    core done."""

    def __init__(
        self, name: str, load: Callable[[float], float], partitions: int, *, capacity: float = 1.0, **how: Any
    ) -> None:
        super().__init__(name, load, **how)
        self.capacity = capacity
        self.assignment: Assignment = spread(partitions, BINS)
        self.busy = 0.0

    @property
    def setting(self) -> int:
        """The number of partitions."""
        return self.assignment.partitions

    def stage_loads(self) -> tuple[StageLoad, ...]:
        """The one stage."""
        return (StageLoad("by k", ("count",), self.assignment, (self.busy / BINS,) * BINS),)

    def situation(self, seen: Observation) -> Situation:
        """With the one stage."""
        return Situation(seen, self.stage_loads(), {}, 1, 16, in_progress=self.in_progress)

    def effect(self, operation: Any) -> Callable[[], None]:
        """Rescale."""
        assert isinstance(operation, Rescale)
        wanted = operation.partitions

        def apply() -> None:
            self.assignment = spread(wanted, BINS)

        return apply

    def observation(self) -> Observation:
        """What has come and what was left, as far as the partitions get in a second."""
        self.backlog += self.varied(self.load(self.now_s), self.noise)
        most = self.capacity * self.setting
        self.busy = min(self.backlog, most)
        self.backlog -= self.busy
        operator = OperatorObservation(operator="count", kind="process", busy_share=self.busy)
        source = SourceObservation(source="in", behind_ms=1000 * self.backlog / most)
        return self.observed(rows_in=round(1000 * self.busy), operators=(operator,), sources=(source,))


def run_side_by_side(jobs: Sequence[SharingPlant], until_s: float) -> list[float]:
    """Run those that are not over, always the one whose last epoch ended first; what they took together after each."""
    taken = []
    while going := [each for each in jobs if not each.is_over and each.now_s < until_s]:
        min(going, key=lambda each: each.now_s).run_epoch()
        taken.append(sum(each.taken for each in jobs if not each.is_over))
    return taken
