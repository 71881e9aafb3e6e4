"""The subjects that a proposal touches, in which direction, and its words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from midstream.change.migration_goals import Drain, Rebalance
from midstream.controllers.controller import Executors, Operation
from midstream.controllers.situation import Situation
from midstream.engine.control_operations import ControlOperation
from midstream.flow.edits import Divide, Edit, Insert, Move, Remove, Rescale, Rewire, Tune, Update
from midstream.flow.knobs import in_words
from midstream.planner.assignment import Assignment

__all__ = ["Subject", "is_operation", "subjects_of", "words_of"]

Subject = tuple[str, str]
"""Something that can be changed: a kind, as in :attr:`.Controller.touches`, and a name."""


def is_operation(found: object) -> bool:
    """Whether this is an operation that a job takes."""
    return (isinstance(found, Edit) and type(found) is not Edit) or isinstance(
        found, Rebalance | Drain | Assignment | Mapping | ControlOperation | Executors
    )


def subjects_of(operation: Operation, seen: Situation) -> dict[Subject, int]:
    """The subjects that an operation touches, each with the direction of the change: 1 for more, -1 for less, 0 if it
    has none.

    >>> from midstream.observation import Observation
    >>> seen = Situation(Observation(flow="f", job="j", epoch=0, revision=1, observed_at=0.0), knobs={"pace": 1000})
    >>> subjects_of(Tune(pace="5 ms"), seen), subjects_of(Executors(1), seen)
    ({('knobs', 'pace'): 1}, {('executors', ''): 0})
    """
    match operation:
        case Tune(knobs=knobs):
            return {("knobs", name): _direction(value, seen.knobs.get(name)) for name, value in knobs.items()}
        case Rescale(partitions=partitions, stage=stage):
            named = _named(stage, seen).items()
            return {("partitions", name): _direction(partitions, now) for name, now in named} or {
                ("partitions", stage or ""): 0
            }
        case Rebalance(stage=stage) | Move(stage=stage) | Divide(stage=stage):
            return {("bins", name): 0 for name in _named(stage, seen)} or {("bins", stage or ""): 0}
        case Executors(count=count):
            return {("executors", ""): _direction(count, seen.executors)}
        case Update(operator=operator):
            return {("operators", operator): 0}
        case Insert() | Remove() | Rewire():
            return {("plan", ""): 0}
        case ControlOperation():
            return {("state", ""): 0}
        case Drain() | Assignment():
            return {("bins", each.name): 0 for each in seen.stages} or {("bins", ""): 0}
        case Mapping():
            return {("bins", str(name)): 0 for name in operation}
        case _:
            return {("plan", ""): 0}


def words_of(operation: Operation) -> str:
    """An operation for people.

    >>> words_of(Tune(pace="500 ms")), words_of(Rescale(4, "by user")), words_of(Executors(2))
    ('tune pace to 500 ms', "rescale 'by user' to 4", 'have 2 executors')
    """
    match operation:
        case Tune(knobs=knobs):
            return "tune " + ", ".join(f"{name} to {in_words(name, value)}" for name, value in knobs.items())
        case Rescale(partitions=partitions, stage=stage):
            return f"rescale {'all stages' if stage is None else repr(stage)} to {partitions}"
        case Rebalance(stage=stage, by=by):
            return f"rebalance {'all stages' if stage is None else repr(stage)} by {by}"
        case Move(bins=bins, stage=stage):
            return f"move {len(bins)} bins{'' if stage is None else f' of {stage!r}'}"
        case Divide(join=join, into=into):
            return f"divide a key of {join!r} into {into}"
        case Drain(executor=executor):
            return f"drain executor {executor}"
        case Executors(count=count):
            return f"have {count} executor{'' if count == 1 else 's'}"
        case Update(operator=operator):
            return f"update {operator!r}"
        case ControlOperation():
            return f"control operation {type(operation).__name__}"
        case Assignment() | Mapping():
            return "move bins to where they are told"
        case _:
            return f"{operation!r:.80}"


def _named(stage: str | None, seen: Situation) -> dict[str, int]:
    """The partitions of the stages that a name stands for; of all if there is none."""
    return {each.name: each.partitions for each in seen.stages if stage in (None, each.name, *each.operators)}


def _direction(wanted: int | None, now: int | None) -> int:
    """The direction in which a number changes; neither if it is unknown what a default means."""
    if wanted is None or now is None:
        return 0
    return (wanted > now) - (wanted < now)
