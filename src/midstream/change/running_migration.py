"""The migration that is running: its steps, the one that is not committed yet, and what it waits for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from midstream.change.migration import Migration
from midstream.checkpoint.committed_state import CommittedState
from midstream.ids import Epoch, StageIndex
from midstream.planner.assignment import Assignments
from midstream.planner.migration import BinMove, Itinerary, SizeOf, Steps, StepStrategy, steps_of
from midstream.planner.stages import Plan
from midstream.planner.step_cost import Budget, StepCost

__all__ = ["PATIENCE", "NoWarming", "OpenStep", "RunningMigration", "Warming"]

PATIENCE = 10
"""Most epochs that a step waits for state to be loaded where it is going, counted from when a bin was loaded last."""


class Warming(Protocol):
    """Loads the state of bins where they are going, before they move. It only saves time: nothing else depends on
    it."""

    def want(self, now: Assignments, later: Sequence[Assignments]) -> None:
        """From now on, load the state that moves under any of these assignments, and nothing else."""

    def are_warm(self, now: Assignments, then: Assignments, committed: CommittedState) -> bool:
        """Whether the state that moves is loaded where it is going, except for the last epoch's changes. True where
        that is unknown, so that nobody waits in vain."""

    def cold(self, now: Assignments, then: Assignments) -> int | None:
        """How many bins that move are not loaded where they are going; None where that is unknown."""

    def flip(self, now: Assignments, then: Assignments) -> None:
        """The next epoch begins with these assignments."""

    def spread(self, assignments: Assignments) -> None:
        """With the next flip, partitions of stages with these numbers of partitions get other executors."""


class NoWarming:
    """Where all tasks share their state, there is nothing to load."""

    def want(self, now: Assignments, later: Sequence[Assignments]) -> None:
        """Nothing to do."""

    def are_warm(self, now: Assignments, then: Assignments, committed: CommittedState) -> bool:
        """There is nothing to wait for."""
        return True

    def cold(self, now: Assignments, then: Assignments) -> int | None:
        """There is nothing to load."""
        return 0

    def flip(self, now: Assignments, then: Assignments) -> None:
        """Nothing to do."""

    def spread(self, assignments: Assignments) -> None:
        """There is only one place."""


@dataclass
class OpenStep:
    """A step that is not committed yet."""

    epoch: Epoch
    moves: tuple[BinMove, ...]
    plan: Plan
    """The configuration whose stages these are; a change may have put another one in force since."""
    before: Assignments
    bytes: int
    step_ms: float
    waited: int
    is_loaded: bool
    """Whether its takers had its state before."""
    losses: int = 0


@dataclass
class RunningMigration:
    """The migration that is running: its steps, and the one that waits for its takers."""

    migration: Migration
    stages: Mapping[str, StageIndex]
    target: Assignments
    steps: Steps
    steps_left: int | None
    cost: StepCost | None = None
    planned: tuple[BinMove, ...] | None = None
    is_pausing: bool = False
    """Whether nothing moves in the next epoch, to measure how long epochs take without moves."""
    waited: int = 0
    cold: int | None = None
    """The fewest bins so far that were not loaded where they are going."""
    idle: int = 0
    """Epochs in which no bin was loaded."""
    patience: int = PATIENCE
    """Most epochs that the next step waits while no bin is loaded. The first step of a migration that was prepared for
    a certain time does not wait."""
    is_cancelled: bool = False
    spreads: bool = False
    """Whether partitions get other executors with its first step."""

    def wait_once_more(self, cold: int | None) -> bool:
        """Have the next step wait for one more epoch, while so many bins are not loaded where they are going; return
        whether it does. However large state is, it waits as long as there is progress.
        """
        if cold is not None and (self.cold is None or cold < self.cold):
            self.cold, self.idle = cold, 0
        if self.idle >= self.patience:
            return False
        self.idle += 1
        self.waited += 1
        return True

    def waits_anew(self) -> None:
        """Another step is the next one."""
        self.waited, self.idle, self.cold = 0, 0, None

    def next_step(self) -> tuple[BinMove, ...]:
        """The next step, which may depend on what the one before has cost."""
        cost, self.cost = self.cost, None
        if inspect.getgeneratorstate(self.steps) == inspect.GEN_CREATED:
            cost = None
        return self.steps.send(cost)

    def lay_out(self, now: Assignments, sizes: SizeOf) -> None:
        """Divide what is left ``now`` into steps."""
        self.cost, self.planned, self.is_pausing = None, None, False
        self.waits_anew()
        moves, plan = Itinerary(self.target).left(now), self.migration.plan
        steps = steps_of(StepStrategy(plan.strategy), moves, sizes, Budget(plan.budget_ms, plan.budget_bytes))
        self.steps_left = None
        if plan.strategy != StepStrategy.BUDGETED:  # they are known, whatever they cost
            known = list(steps)
            steps, self.steps_left = _each(known), len(known)
        self.steps = steps


def _each(steps: Sequence[tuple[BinMove, ...]]) -> Steps:
    for step in steps:  # noqa: UP028 - `yield from` would send the costs to the list
        yield step
