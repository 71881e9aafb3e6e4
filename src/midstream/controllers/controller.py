"""Controllers: pure functions from a situation to proposals, each with a memory that it returns and gets again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from midstream.change.migration_goals import Drain, Goal, Rebalance
from midstream.controllers.situation import Situation
from midstream.engine.control_operations import ControlOperation
from midstream.flow.edits import Edit

__all__ = ["Controller", "Executors", "Operation", "Proposal"]


@dataclass(frozen=True)
class Executors:
    """Another number of executors, requested from the cluster manager. Only a standalone or local cluster takes
    requests.

    >>> Executors(3).count
    3
    """

    count: int


Operation = Edit | Rebalance | Drain | Goal | ControlOperation | Executors
"""The operations that a controller may propose: edits of a change, goals of a migration, a control operation,
executors."""


@dataclass(frozen=True)
class Proposal:
    """An operation that a controller wants, and why.

    >>> from midstream import Tune
    >>> Proposal(Tune(pace="500 ms"), "rows are young", {"p95 ms": 120.0}).reason
    'rows are young'
    """

    operation: Operation
    """The operation, as the job's methods take it."""
    reason: str
    """The reason, in a few words."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The observations that led to it."""
    how: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``job.migrate`` or ``job.update``, such as ``{"strategy": "fluid"}``."""


class Controller(ABC):
    """Looks at a job after each epoch, and proposes operations.

    A subclass defines :meth:`decide` and is best a frozen dataclass: all that it remembers is in the memory that it
    returns and gets again. It has no clock and touches nothing, so it can be tested with situations made by hand.

    >>> from midstream import Tune
    >>> from midstream.observation import Observation
    >>> @dataclass(frozen=True)
    ... class Relax(Controller):
    ...     '''Fewer epochs while there is little to do.'''
    ...     rows_per_s: float
    ...     def decide(self, seen, memory):
    ...         if seen.observation.rows_per_s >= self.rows_per_s or seen.knobs["pace"] == 1_000_000:
    ...             return [], memory
    ...         return [Proposal(Tune(pace="1 second"), "there is little to do")], memory
    >>> quiet = Observation(flow="f", job="j", epoch=3, revision=1, observed_at=0.0)
    >>> Relax(100).decide(Situation(quiet, knobs={"pace": 0}), None)[0][0].operation
    Tune(pace=1000000)
    """

    touches: ClassVar[frozenset[str]] = frozenset(
        {"knobs", "partitions", "bins", "executors", "operators", "plan", "state"}
    )
    """The kinds of subjects that it may propose to change; anything else is refused. ``state`` stands for control
    operations."""

    @property
    def name(self) -> str:
        """The name under which it is attached if no other is given."""
        return type(self).__name__

    def first(self) -> Any:
        """Its memory when it is attached."""
        return None

    @abstractmethod
    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        """Its proposals, most often none, and its memory until the next epoch."""
