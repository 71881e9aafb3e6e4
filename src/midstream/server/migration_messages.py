"""Messages about migrations between a job and its clients, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import get_args

import msgspec

from midstream.change.migration import Migration, MigrationProgress
from midstream.change.migration_goals import Drain, Goal, Rebalance
from midstream.checkpoint.change_records import ChangeRecord
from midstream.errors import FlowError
from midstream.flow.edits import Divide, Move, Rescale
from midstream.planner.assignment import Assignment
from midstream.server.messages import MoveMessage, RescaleMessage

__all__ = [
    "GOAL_KINDS",
    "AssignmentMessage",
    "DivideMessage",
    "DrainMessage",
    "FreezeRequest",
    "Frozen",
    "GoalMessage",
    "MigrationExplained",
    "MigrationState",
    "MigrationTurn",
    "MigrationWish",
    "RebalanceMessage",
    "goal_messages",
]


class RebalanceMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="rebalance"):
    """A :class:`~midstream.Rebalance` as a message."""

    stage: str | None = None
    by: str = "work"

    def edit(self) -> Rebalance:
        """The goal."""
        return Rebalance(self.stage, self.by)


class DrainMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="drain"):
    """A :class:`~midstream.Drain` as a message."""

    executor: str

    def edit(self) -> Drain:
        """The goal."""
        return Drain(self.executor)


class AssignmentMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="assignment"):
    """An :class:`~midstream.Assignment` of a stage as a message; without a name, of the only stage."""

    partitions: int
    owners: tuple[int, ...]
    stage: str | None = None

    def edit(self) -> Assignment | dict[str, Assignment]:
        """The goal."""
        found = Assignment(self.partitions, self.owners)
        return found if self.stage is None else {self.stage: found}


class DivideMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="divide"):
    """A :class:`~midstream.Divide` as a message."""

    join: str
    key: dict[str, str | int | bool] | None = None
    bin: int | None = None
    into: int = 2
    spread: str = "left"

    def edit(self) -> Divide:
        """The goal."""
        return Divide(self.join, self.key, self.bin, self.into, self.spread)


GoalMessage = MoveMessage | RescaleMessage | DivideMessage | RebalanceMessage | DrainMessage | AssignmentMessage
"""A goal of a migration on its way, by its ``kind``."""
GOAL_KINDS = tuple(repr(kind.__struct_config__.tag) for kind in get_args(GoalMessage))
"""The kinds of goals, for messages to people."""


def goal_messages(goal: Goal) -> tuple[GoalMessage, ...]:
    """A goal as messages.

    >>> goal_messages(Rescale(4))
    (RescaleMessage(partitions=4, stage=None),)
    """
    match goal:
        case Move(bins=bins, stage=stage):
            return (MoveMessage(dict(bins), stage),)
        case Rescale(partitions=partitions, stage=stage):
            return (RescaleMessage(partitions, stage),)
        case Divide(join=join, key=key, bin=number, into=into, spread=spread):
            return (DivideMessage(join, None if key is None else dict(key), number, into, spread),)
        case Rebalance(stage=stage, by=by):
            return (RebalanceMessage(stage, by),)
        case Drain(executor=executor):
            return (DrainMessage(executor),)
        case Assignment(partitions=partitions, owners=owners):
            return (AssignmentMessage(partitions, owners),)
        case Mapping():
            return tuple(AssignmentMessage(each.partitions, each.owners, stage) for stage, each in goal.items())
    raise FlowError(
        f"a migration cannot lead to {type(goal).__name__} {goal!r:.60}; allowed: Move, Rescale, Divide, "
        f"Rebalance, Drain and assignments"
    )


class MigrationWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /migrate`` and ``POST /explain-migration``: what ``job.migrate`` takes. ``at_time`` is event time
    in ISO 8601."""

    goals: tuple[GoalMessage, ...]
    strategy: str = "budgeted"
    budget: str | int | None = None
    prewarm: bool = True
    at_epoch: int | None = None
    at_time: datetime | None = None
    queue: bool = False
    by: str | None = None
    note: str | None = None

    def unpacked(self) -> tuple[Goal, ...]:
        """The goals."""
        return tuple(message.edit() for message in self.goals)

    def how(self) -> dict[str, object]:
        """The other arguments of ``job.migrate``."""
        if self.at_epoch is not None and self.at_time is not None:
            raise FlowError("a migration begins at an epoch or at an event time; give at_epoch or at_time")
        return {
            "strategy": self.strategy,
            "budget": self.budget,
            "prewarm": self.prewarm,
            "at": self.at_epoch if self.at_time is None else self.at_time,
            "queue": self.queue,
            "by": self.by,
            "note": self.note,
        }


class MigrationState(msgspec.Struct, frozen=True):
    """Answer of ``POST /migrate`` and of ``GET /migrations/{number}``: the record of a migration, and its progress."""

    record: ChangeRecord
    progress: MigrationProgress

    @classmethod
    def of(cls, migration: Migration) -> MigrationState:
        """The state of a migration now."""
        return cls(migration.record, migration.progress)


class MigrationTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /migrations/{number}``: ``"cancel"`` or ``"reverse"``."""

    turn: str


class MigrationExplained(msgspec.Struct, frozen=True):
    """Answer of ``POST /explain-migration``. ``seconds`` is null as long as no epoch was measured."""

    text: str
    svg: str
    steps: int
    bins: int
    bytes: int
    seconds: float | None


class FreezeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /freeze``: for how many epochs assignments must not change."""

    epochs: int


class Frozen(msgspec.Struct, frozen=True):
    """Answer of ``POST /freeze``."""

    free_from: int
