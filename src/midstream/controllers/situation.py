"""What a controller sees: an observation, and the job's set-up at that time. Frozen, and easily made in a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from midstream.controllers.proposal_records import ProposalRecord
from midstream.observation import Observation
from midstream.planner.assignment import Assignment
from midstream.planner.balance import imbalance

__all__ = ["Situation", "StageLoad"]


@dataclass(frozen=True)
class StageLoad:
    """A stage behind an exchange: its operators, who owns which bin, and what each bin weighs.

    >>> load = StageLoad("by user", ("count",), Assignment(2, (0, 0, 1, 1)), work=(0.25, 0.25, 0.125, 0.125))
    >>> load.partitions, load.max_over_mean
    (2, 1.3333333333333333)
    """

    name: str
    """Its name in migrations: that of its ``key_by``."""
    operators: tuple[str, ...]
    """The operators that run in it."""
    assignment: Assignment
    work: tuple[float, ...]
    """By bin: the share of a core that it has kept busy, smoothed over some 20 seconds."""
    bytes: float = 0.0
    """Bytes of state of all bins."""

    @property
    def partitions(self) -> int:
        """How many partitions it has."""
        return self.assignment.partitions

    @property
    def max_over_mean(self) -> float:
        """The work of the busiest partition over the mean of all; 1 if none has any."""
        return imbalance(self.assignment, self.work)


@dataclass(frozen=True)
class Situation:
    """A job after a committed epoch, as a controller sees it.

    >>> seen = Observation(flow="f", job="j", epoch=3, revision=1, observed_at=0.0, rows_in=50, elapsed_ms=100.0)
    >>> Situation(seen).observation.rows_per_s
    500.0
    """

    observation: Observation
    stages: tuple[StageLoad, ...] = ()
    """The stages behind an exchange, in the order of the flow."""
    knobs: Mapping[str, int | None] = field(default_factory=dict)
    """The value of every knob, in microseconds, bytes or rows."""
    executors: int = 1
    """How many executors Spark has now."""
    cores: int = 1
    """How many tasks can run at a time."""
    can_ask_for_executors: bool = False
    """Whether this cluster's manager can be asked for more executors."""
    in_progress: str | None = None
    """The operation in progress, in words, whoever requested it. Observations made meanwhile are not typical."""
    last: ProposalRecord | None = None
    """The outcome of this controller's newest proposal."""

    def stage(self, name: str) -> StageLoad | None:
        """A stage by its name, or by that of an operator that runs in it."""
        return next((each for each in self.stages if name == each.name or name in each.operators), None)

    def busy_of(self, stage: StageLoad) -> float:
        """How many cores the operators of a stage kept busy in this epoch."""
        return sum(each.busy_share for each in self.observation.operators if each.operator in stage.operators)

    @property
    def lag_ms(self) -> float:
        """How old a row may be when its epoch is committed: how far sources are behind, and the epoch itself."""
        behind = [each.behind_ms for each in self.observation.sources if each.behind_ms is not None]
        return max(behind, default=0.0) + self.observation.duration_ms

    def latency_ms(self, operator: str | None = None) -> float:
        """The 95th percentile of the age of rows as they leave an operator; default: of the one with the oldest rows.
        Where rows carry no event time, :attr:`lag_ms`."""
        ages = [
            each.latency_p95_ms
            for each in self.observation.operators
            if each.latency_p95_ms is not None and operator in (None, each.operator)
        ]
        return max(ages, default=self.lag_ms)
