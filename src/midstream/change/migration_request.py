"""A migration as a user asks for it, with the checks that need no job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from midstream.data.durations import microseconds
from midstream.data.sizes import size_in_bytes
from midstream.errors import FlowError
from midstream.flow.edits import Reassignment
from midstream.ids import Epoch
from midstream.planner.migration import StepStrategy
from midstream.planner.step_cost import Budget

__all__ = ["MigrationRequest", "budget_of", "migration_request"]


@dataclass(frozen=True)
class MigrationRequest:
    """A migration as the user requested it. Without a budget, one is chosen when it begins."""

    edits: tuple[Reassignment, ...]
    by: str
    strategy: StepStrategy = StepStrategy.BUDGETED
    budget: Budget = field(default_factory=Budget)
    prewarm: bool = False
    at_epoch: Epoch | None = None
    at_time: int | None = None
    queue: bool = False
    """Whether it waits if another one is running, instead of being refused."""
    note: str | None = None
    spreads: bool = False
    """Whether the partitions of its stages get other executors, so that each has about as many. The record does not say
    which: every start of the job spreads partitions anyway."""

    @property
    def is_scheduled(self) -> bool:
        """Whether it waits for an epoch or an event time."""
        return self.at_epoch is not None or self.at_time is not None


def migration_request(
    edits: Iterable[Reassignment],
    *,
    by: str,
    strategy: str = "budgeted",
    budget: str | int | None = None,
    prewarm: bool = True,
    at: int | datetime | None = None,
    queue: bool = False,
    note: str | None = None,
) -> MigrationRequest:
    """Check what a user asks for; raises :class:`FlowError` if it cannot be understood.

    >>> from midstream import Rescale
    >>> migration_request([Rescale(4)], by="ann", strategy="fluid", at=12).at_epoch
    12
    >>> migration_request([Rescale(4)], by="ann", strategy="slow")
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: strategy 'slow' is not known; allowed: sudden, fluid, batched, budgeted
    """
    wanted = tuple(edits)
    if not wanted:
        raise FlowError("a migration needs something to move: Move({bin: partition}) or Rescale(partitions)")
    for edit in wanted:
        if not isinstance(edit, Reassignment):
            raise FlowError(
                f"a migration moves bins, found {type(edit).__name__} {edit!r:.60}; allowed: Move, Rescale and "
                f"Divide. Other edits are for job.update, which may run at the same time"
            )
    if strategy not in list(StepStrategy):
        raise FlowError(f"strategy {strategy!r} is not known; allowed: {', '.join(StepStrategy)}")
    if budget is not None and strategy != StepStrategy.BUDGETED:
        raise FlowError(f"budget={budget!r} is for strategy='budgeted'; the steps of {strategy!r} do not depend on it")
    at_epoch, at_time = _moment(at)
    return MigrationRequest(
        wanted, by, StepStrategy(strategy), budget_of(budget), prewarm, at_epoch, at_time, queue, note
    )


def budget_of(budget: str | int | None) -> Budget:
    """A budget: a length of time, or a number of bytes with or without a unit.

    >>> budget_of("50 ms"), budget_of("16 MB"), budget_of(4096)
    (Budget(ms=50.0, bytes=None), Budget(ms=None, bytes=16000000), Budget(ms=None, bytes=4096))
    """
    if budget is None:
        return Budget()
    if type(budget) is int and budget > 0:
        return Budget(bytes=budget)
    if isinstance(budget, str):
        if number := size_in_bytes(budget):
            return Budget(bytes=number)
        if time := microseconds(budget):
            return Budget(ms=time / 1000)
    raise FlowError(
        f"budget={budget!r} is not what a step may cost; give a length of time ('50 ms'), or bytes ('16 MB', 4096)"
    )


def _moment(at: int | datetime | None) -> tuple[Epoch | None, int | None]:
    if at is None:
        return None, None
    if type(at) is int and at >= 0:
        return Epoch(at), None
    if isinstance(at, datetime):
        moment = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return None, round(moment.timestamp() * 1e6)
    raise FlowError(f"at={at!r} is not a moment; give the number of an epoch, or a datetime of event time")
