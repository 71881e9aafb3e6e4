"""A controller that keeps any partition from having much more work than the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from midstream.change.migration_goals import Rebalance
from midstream.controllers.controller import Controller, Proposal
from midstream.controllers.situation import Situation, StageLoad
from midstream.errors import FlowError
from midstream.planner.balance import balanced, imbalance

__all__ = ["Balance"]

PATIENCE = 5
"""Epochs that must agree."""
LEAST_WORK = 0.05
"""Share of a core below which a stage is left alone: its work hardly costs anything, wherever it is done."""
WORTH = 0.95
"""A rebalance must leave the heaviest partition at most this share of its work."""


@dataclass(frozen=True)
class _Balancing:
    """What the controller remembers."""

    uneven: Mapping[str, int] = field(default_factory=dict)
    """By stage: for how many epochs it has been uneven."""


@dataclass(frozen=True)
class Balance(Controller):
    """Rebalances a stage whose busiest partition has more than ``max_over_mean`` of the mean, if that can be helped.

    The result of a rebalance is computed first. A single bin that is too heavy, because of a hot key, stays where
    it is, and nothing is proposed again and again.

    :param max_over_mean: how much more work than the mean is accepted.
    :param stage: the stage; default: all of them.

    >>> Balance(max_over_mean=0.9)
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: Balance: max_over_mean=0.9 must be above 1, the value when all have the same
    """

    max_over_mean: float = 1.2
    stage: str | None = None

    touches: ClassVar[frozenset[str]] = frozenset({"bins"})

    def __post_init__(self) -> None:
        if not self.max_over_mean > 1:
            raise FlowError(
                f"Balance: max_over_mean={self.max_over_mean} must be above 1, the value when all have the same"
            )

    def first(self) -> Any:
        """Nothing is known yet."""
        return _Balancing()

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        """A rebalance of the most uneven stage."""
        now: _Balancing = memory
        if seen.in_progress is not None:
            return (), _Balancing()
        stages = [each for each in seen.stages if self.stage in (None, each.name, *each.operators)]
        uneven = {each.name: now.uneven.get(each.name, 0) + 1 for each in stages if self._is_uneven(each)}
        due = [each for each in stages if uneven.get(each.name, 0) >= PATIENCE]
        for stage in sorted(due, key=lambda each: -each.max_over_mean):
            before, after = stage.max_over_mean, imbalance(balanced(stage.assignment, stage.work), stage.work)
            if after <= WORTH * before:
                figures = {"max over mean": round(before, 3), "afterwards": round(after, 3)}
                reason = f"a partition of {stage.name!r} has {before:.2f} of the mean, and need have {after:.2f}"
                return (Proposal(Rebalance(stage.name), reason, figures),), replace(now, uneven={})
            uneven[stage.name] = 0  # nothing helps; look again later
        return (), replace(now, uneven=uneven)

    def _is_uneven(self, stage: StageLoad) -> bool:
        return stage.partitions > 1 and sum(stage.work) >= LEAST_WORK and stage.max_over_mean > self.max_over_mean
