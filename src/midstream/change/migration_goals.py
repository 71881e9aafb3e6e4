"""The goals of migrations, and the edits that lead there. Pure.

=================== ==================================================================
goal                leads to
=================== ==================================================================
`Move`, `Rescale`   other owners of some bins; another number of partitions
`Divide`            a hot key of a join that several partitions share
`Rebalance`         partitions of about the same weight, as it was measured, and executors with as many of them
`Drain`             nothing on an executor any more
an `Assignment`     exactly these owners
=================== ==================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from midstream.errors import FlowError
from midstream.flow.edits import Divide, Move, Reassignment, Rescale
from midstream.ids import StageIndex
from midstream.planner.assignment import Assignment, Assignments
from midstream.planner.balance import balanced, drained, imbalance
from midstream.planner.reassignment import stage_names, stages_named, unique_names
from midstream.planner.stages import Plan
from midstream.planner.weights import BinWeights, StageWeights

__all__ = ["MEASURES", "Drain", "Goal", "Rebalance", "edits_of"]

MEASURES = ("work", "rows", "bytes")
"""The measures that a rebalance can even out: the time that operators work, rows that arrive, or bytes of state."""


@dataclass(frozen=True)
class Rebalance:
    """Give the partitions of a stage, or of every stage, about the same weight, with few moves. Executors get about
    equal numbers of partitions if one has far fewer, for example because it has just joined.

    :param by: what is evened out: ``"work"``, the time that operators need for the rows of each bin; ``"rows"`` that
        arrive; or ``"bytes"`` of state.

    >>> Rebalance(stage="by user")
    Rebalance(stage='by user', by='work')
    """

    stage: str | None = None
    by: str = "work"


@dataclass(frozen=True)
class Drain:
    """Move everything off an executor, in all stages, so that it can be removed.

    >>> Drain("3")
    Drain(executor='3')
    """

    executor: str


Goal = Move | Rescale | Divide | Rebalance | Drain | Assignment | Mapping[str, Assignment]
"""The goals that a migration may have. A mapping has assignments by the names of stages."""

Places = Mapping[StageIndex, Mapping[int, str]]
"""By stage and partition: the executor that runs it."""


def edits_of(
    goals: Sequence[Goal],
    plan: Plan,
    now: Assignments,
    weights: BinWeights,
    places: Places,
    uneven: Collection[int] = (),
) -> tuple[Reassignment, ...]:
    """The edits that lead to goals. Raises :class:`FlowError` if one cannot be reached.

    ``uneven`` has the numbers of partitions that executors could share more evenly: a rebalance names stages with as
    many even if all of their bins stay with their partitions.
    """
    found: list[Reassignment] = []
    for goal in goals:
        match goal:
            case Rebalance(stage=stage, by=by):
                found += _rebalance(plan, now, weights, stage, by, uneven)
            case Drain(executor=executor):
                found += _drain(plan, now, places, executor, weights)
            case Assignment() | Mapping():
                found += _assigned(plan, now, goal)
            case _:
                found.append(goal)
    return tuple(found)


def _assigned(
    plan: Plan, now: Assignments, target: Assignment | Mapping[str, Assignment]
) -> tuple[Move | Rescale, ...]:
    """Edits that lead to assignments, by the name of a stage; a single one is for the only stage of a flow."""
    if isinstance(target, Assignment):
        stages = stages_named(plan, None)
        if len(stages) > 1:
            names = ", ".join(map(repr, stage_names(plan).values()))
            raise FlowError(f"an assignment is for one stage, and the flow has several: give a dict of {names}")
        target = {stage_names(plan)[stages[0]]: target}
    edits: list[Move | Rescale] = []
    for name, assignment in target.items():
        if not isinstance(assignment, Assignment):
            raise FlowError(f"the target of stage {name!r} must be an Assignment, found {type(assignment).__name__}")
        for stage in stages_named(plan, name):
            if now[stage].bins != assignment.bins:
                raise FlowError(
                    f"stage {name!r} has {now[stage].bins} bins, and the assignment has {assignment.bins}; the number "
                    f"of bins is chosen when a job is made"
                )
        edits += [Rescale(assignment.partitions, name), Move(dict(enumerate(assignment.owners)), name)]
    return tuple(edits)


def _rebalance(
    plan: Plan, now: Assignments, weights: BinWeights, stage: str | None, by: str, uneven: Collection[int]
) -> tuple[Move | Rescale, ...]:
    """Edits after which the partitions of a stage, or of every stage, have about the same weight."""
    if by not in MEASURES:
        raise FlowError(f"by={by!r} is not measured; allowed: {', '.join(MEASURES)}")
    edits: list[Move | Rescale] = []
    found: list[str] = []
    names = {index: name for name, index in unique_names(plan).items()}
    for index in stages_named(plan, stage):
        assignment, measured = now[index], weights.stages.get(index)
        weight = [0.0] * assignment.bins if measured is None else _measured(measured, by)
        if assignment.partitions in uneven:
            after = balanced(assignment, weight) if any(weight) else assignment
            edits += [Rescale(after.partitions, names[index]), Move(dict(enumerate(after.owners)), names[index])]
            continue
        if not any(weight):
            found.append(f"nothing has been measured yet for {names[index]!r}")
            continue
        after = balanced(assignment, weight)
        moved = {
            number: new
            for number, (old, new) in enumerate(zip(assignment.owners, after.owners, strict=True))
            if old != new
        }
        if moved:
            edits.append(Move(moved, names[index]))
        else:
            found.append(
                f"{names[index]!r}: its heaviest partition has {imbalance(assignment, weight):.2f} of the mean"
            )
    if not edits:
        raise FlowError(f"there is nothing to rebalance by {by}: {'; '.join(found)}")
    return tuple(edits)


def _measured(weights: StageWeights, by: str) -> list[float]:
    found = {"work": weights.busy, "rows": weights.rows_per_s, "bytes": weights.nbytes}[by]
    measured: list[float] = found.tolist()
    return measured


def _drain(plan: Plan, now: Assignments, places: Places, executor: str, weights: BinWeights) -> tuple[Move, ...]:
    """Moves after which the partitions of an executor own nothing, in any stage. Their bins go to partitions elsewhere.

    Raises :class:`FlowError` if it runs no partition, or if there is no other executor.
    """
    known = sorted({name for found in places.values() for name in found.values()})
    if not known:
        raise FlowError(
            f"it is not known which partitions run on executor {executor!r}: partitions do not stick to executors in "
            f"this session, or no epoch is committed yet (midstream doctor says what is missing)"
        )
    if executor not in known:
        raise FlowError(f"no partition runs on an executor {executor!r}; those with partitions are {', '.join(known)}")
    if known == [executor]:
        raise FlowError(f"executor {executor!r} is the only one with partitions; add another one before it is drained")
    names = {index: name for name, index in unique_names(plan).items()}
    edits = []
    for index, assignment in now.items():
        at = places.get(index, {})
        leaving = {number for number in range(assignment.partitions) if at.get(number) == executor}
        if not leaving & set(assignment.owners):
            continue
        measured = weights.stages.get(index)
        weight = None if measured is None or not measured.nbytes.any() else measured.nbytes.tolist()
        after = drained(assignment, leaving, weight)
        moved = {
            number: new
            for number, (old, new) in enumerate(zip(assignment.owners, after.owners, strict=True))
            if old != new
        }
        edits.append(Move(moved, names[index]))
    if not edits:
        raise FlowError(f"the partitions on executor {executor!r} own nothing; it can be removed")
    return tuple(edits)
