"""A controller that makes a migration at a quiet moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from midstream.change.migration_goals import Drain, Goal, Rebalance
from midstream.controllers.controller import Controller, Proposal
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.controllers.situation import Situation, StageLoad
from midstream.data.durations import duration
from midstream.errors import FlowError
from midstream.flow.edits import Move, Rescale
from midstream.planner.migration import StepStrategy

__all__ = ["Migrate"]

PATIENCE = 3
"""Epochs that must be quiet, one after the other."""
LOOK = 10
"""Epochs to watch first, to learn what a high load is."""
SMALL_BYTES = 1_000_000
"""State below this many bytes moves in one step."""
LEAST_BUDGET_MS = 10


@dataclass(frozen=True)
class _Waiting:
    """What the controller remembers."""

    epochs: int = 0
    peak: float = 0.0
    """Most rows per second so far."""
    quiet: int = 0
    is_done: bool = False


@dataclass(frozen=True)
class Migrate(Controller):
    """Makes a migration when there is little to do, in steps that keep within the latency.

    It waits until the rows per second are at most ``quiet`` of the most that it has seen, for three epochs, or until
    ``at_latest`` epochs have passed. State below a megabyte then moves in one step; more of it in steps with a budget:
    half of what is left to ``latency``, or what ``job.migrate`` chooses. If a start of the job finds bins where a
    :class:`midstream.Rescale` or :class:`midstream.Move` wants them, nothing is done.

    :param goal: where bins are to be, as ``job.migrate`` takes it.
    :param strategy: how the moves are cut into steps; default: chosen as said above.
    :param latency: the 95th percentile of the age of rows that steps should not exceed.
    :param quiet: the share of the highest load at which it begins.
    :param at_latest: after how many epochs it begins whatever the load is.

    >>> Migrate(Rescale(8), quiet=0.3).quiet
    0.3
    """

    goal: Goal
    strategy: str | None = None
    latency: str | None = None
    quiet: float = 0.5
    at_latest: int = 500

    touches: ClassVar[frozenset[str]] = frozenset({"bins", "partitions"})

    def __post_init__(self) -> None:
        if not isinstance(self.goal, Move | Rescale | Rebalance | Drain):
            raise FlowError(f"Migrate: goal={self.goal!r:.60} must be a Move, Rescale, Rebalance or Drain")
        if self.strategy is not None and self.strategy not in list(StepStrategy):
            raise FlowError(f"Migrate: strategy {self.strategy!r} is not known; allowed: {', '.join(StepStrategy)}")
        if self.latency is not None:
            duration(self.latency, "Migrate: latency")
        if not 0 <= self.quiet <= 1 or self.at_latest < 1:
            raise FlowError(
                f"Migrate: quiet={self.quiet} must be a share from 0 to 1, and at_latest={self.at_latest} at least 1"
            )

    def first(self) -> Any:
        """Nothing is known yet."""
        return _Waiting()

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        """The migration, once."""
        now: _Waiting = memory
        applied = seen.last is not None and seen.last.outcome is ProposalOutcome.APPLIED
        if now.is_done or applied or self._is_reached(seen):
            return (), replace(now, is_done=True)
        if seen.in_progress is not None:
            return (), replace(now, quiet=0)
        rate = seen.observation.rows_per_s
        now = replace(now, epochs=now.epochs + 1, peak=max(now.peak, rate))
        is_quiet = now.epochs > LOOK and rate <= self.quiet * now.peak
        now = replace(now, quiet=now.quiet + 1 if is_quiet else 0)
        figures = {"rows/s": round(rate, 1), "most rows/s": round(now.peak, 1)}
        if now.quiet >= PATIENCE:
            reason = f"there are {rate:.0f} rows/s, of {now.peak:.0f} at most"
        elif now.epochs >= self.at_latest and not (now.epochs - self.at_latest) % LOOK:
            reason = f"it has waited for {now.epochs} epochs"
        else:
            return (), now
        return (Proposal(self.goal, reason, figures, self._how(seen)),), replace(now, quiet=0)

    def _is_reached(self, seen: Situation) -> bool:
        """Whether bins are where they are to be, as far as the goal itself says where: the job may have been started
        again since the migration was made."""
        match self.goal:
            case Rescale(partitions=partitions, stage=stage):
                found = _named(stage, seen)
                return bool(found) and all(each.partitions == partitions for each in found)
            case Move(bins=bins, stage=stage):
                found = _named(stage, seen)
                return bool(found) and all(
                    bins.items() <= dict(enumerate(each.assignment.owners)).items() for each in found
                )
            case _:
                return False

    def _how(self, seen: Situation) -> dict[str, Any]:
        """How the moves are cut into steps."""
        if self.strategy is not None and self.strategy != StepStrategy.BUDGETED:
            return {"strategy": self.strategy}
        if self.strategy is None and sum(each.bytes for each in seen.stages) <= SMALL_BYTES:
            return {"strategy": str(StepStrategy.SUDDEN)}
        if self.latency is None:
            return {}
        left_ms = duration(self.latency, "Migrate: latency") / 1000 - seen.latency_ms()
        return {"budget": f"{max(LEAST_BUDGET_MS, round(left_ms / 2))} ms"}


def _named(stage: str | None, seen: Situation) -> list[StageLoad]:
    """The stages that a goal is about."""
    return [each for each in seen.stages if stage in (None, each.name, *each.operators)]
