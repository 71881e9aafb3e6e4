"""Reassignment: the assignments of a job after edits that move bins or change numbers of partitions.

Pure. Nothing but ownership changes: the same rows meet the same state, in other tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from midstream.data.ddl import closest
from midstream.errors import FlowError
from midstream.flow.edits import Divide, Move, Reassignment, Rescale
from midstream.ids import StageIndex
from midstream.planner.assignment import Assignment, Assignments
from midstream.planner.division import divided
from midstream.planner.stages import Plan

__all__ = ["goal_of", "keyed_stages", "moved", "reassigned", "rescaled", "stage_names", "stages_named", "unique_names"]


def stage_names(plan: Plan) -> dict[StageIndex, str]:
    """A name for each stage behind an exchange: its ``key_by``, else an operator that runs in it."""
    found: dict[StageIndex, str] = {}
    for name, stages in keyed_stages(plan).items():
        for stage in stages:
            found.setdefault(stage, name)
    return {stage: found.get(stage, f"stage {stage}") for stage in plan.exchanged}


def unique_names(plan: Plan) -> dict[str, StageIndex]:
    """Each stage behind an exchange by a name that no other one has, and that outlasts changes of other operators."""
    leads_to = keyed_stages(plan)
    return {
        name if leads_to.get(name) == (stage,) else next(iter(plan.stages[stage].operators), name): stage
        for stage, name in stage_names(plan).items()
    }


def keyed_stages(plan: Plan) -> dict[str, tuple[StageIndex, ...]]:
    """The stages behind an exchange, by every name that an edit may use for them. A ``key_by`` may lead to several."""
    exchanged = set(plan.exchanged)
    found: dict[str, list[StageIndex]] = {}
    for wire in plan.wires:
        if wire.key is not None and wire.target in exchanged and wire.target not in found.get(wire.port.operator, []):
            found.setdefault(wire.port.operator, []).append(wire.target)
    for stage in plan.stages:
        if stage.index in exchanged:
            for name in stage.operators:
                found.setdefault(name, [stage.index])
    return {name: tuple(sorted(stages)) for name, stages in found.items()}


def stages_named(plan: Plan, name: str | None) -> tuple[StageIndex, ...]:
    """The stages that an edit means; None means all. Raises :class:`FlowError` if there is none of that name."""
    if not plan.exchanged:
        raise FlowError(
            f"flow {plan.graph.name!r} has no stage behind an exchange, so it has no bins; a key_by makes one"
        )
    if name is None:
        return plan.exchanged
    known = keyed_stages(plan)
    if name not in known:
        near = closest(str(name), list(known))
        raise FlowError(
            f"flow {plan.graph.name!r} has no stage {name!r} behind an exchange"
            + (f"; did you mean {near!r}?" if near else ".")
            + f" A stage is named by its key_by or by an operator in it: {', '.join(known)}"
        )
    return known[name]


def moved(before: Assignment, bins: Mapping[int, int]) -> Assignment:
    """The assignment after some bins got other owners.

    >>> moved(Assignment(2, (0, 1, 0, 1)), {0: 1}).owners
    (1, 1, 0, 1)
    """
    owners = list(before.owners)
    for number, owner in bins.items():
        if type(number) is not int or not 0 <= number < before.bins:
            raise FlowError(f"there is no bin {number!r} to move; the bins are 0 to {before.bins - 1}")
        if type(owner) is not int or not 0 <= owner < before.partitions:
            raise FlowError(
                f"bin {number} cannot move to partition {owner!r}; the partitions are 0 to {before.partitions - 1}. "
                f"Rescale makes more"
            )
        owners[number] = owner
    return replace(before, owners=tuple(owners))


def rescaled(before: Assignment, partitions: int) -> Assignment:
    """An even spread over another number of partitions that moves as few bins as possible.

    The partitions own equal numbers of bins, give or take one. Bins of partitions that stay move only if their owner
    has more than its share.

    >>> rescaled(Assignment(2, (0, 1, 0, 1)), 4).owners
    (0, 1, 2, 3)
    >>> rescaled(Assignment(4, (0, 1, 2, 3)), 2).owners
    (0, 1, 0, 1)
    """
    if type(partitions) is not int or not 1 <= partitions <= before.bins:
        raise FlowError(
            f"partitions={partitions!r}: give a whole number from 1 to {before.bins}, the number of bins: a bin "
            f"has one owner"
        )
    share, more = divmod(before.bins, partitions)
    held = Counter(owner for owner in before.owners if owner < partitions)
    # Partitions with most bins keep one more, so that fewer bins move.
    richest = sorted(range(partitions), key=lambda owner: (-held[owner], owner))[:more]
    quota = {owner: share + (owner in richest) for owner in range(partitions)}
    kept: Counter[int] = Counter()
    owners: list[int | None] = []
    for owner in before.owners:
        stays = owner < partitions and kept[owner] < quota[owner]
        kept[owner] += stays
        owners.append(owner if stays else None)
    free = iter(sorted(owner for owner in quota for _ in range(quota[owner] - kept[owner])))
    spread = tuple(next(free) if owner is None else owner for owner in owners)
    return replace(before, partitions=partitions, owners=spread)


def reassigned(plan: Plan, before: Assignments, edits: Sequence[Reassignment]) -> dict[StageIndex, Assignment]:
    """The assignments after edits, made in order. Raises :class:`FlowError` if one does not fit or changes nothing."""
    after = dict(before)
    for edit in edits:
        wanted = _after(plan, after, edit)
        if wanted == after:
            raise FlowError(f"{edit} changes nothing: {_as_it_is(plan, after, [edit])}")
        after = wanted
    return after


def goal_of(
    plan: Plan, before: Assignments, edits: Sequence[Reassignment], *, or_same: bool = False
) -> dict[StageIndex, Assignment]:
    """Like :func:`reassigned`, but the edits need to change something only together; with ``or_same`` they need not."""
    after = dict(before)
    for edit in edits:
        after = _after(plan, after, edit)
    if after == before and not or_same:
        raise FlowError(f"nothing is to be moved: {_as_it_is(plan, before, edits)}")
    return after


def _after(plan: Plan, before: Assignments, edit: Reassignment) -> dict[StageIndex, Assignment]:
    stages = stages_named(plan, edit.stage)
    after = dict(before)
    match edit:
        case Move(bins=bins):
            [stage] = _only(plan, stages, edit.stage)
            if not bins:
                raise FlowError("Move names no bin; give the new owner of each bin, e.g. Move({0: 1})")
            after[stage] = moved(before[stage], bins)
        case Rescale(partitions=partitions):
            after.update({stage: rescaled(before[stage], partitions) for stage in stages})
        case Divide():
            [stage] = _only(plan, stages, edit.stage)
            after[stage] = divided(plan, before[stage], edit)
    return after


def _as_it_is(plan: Plan, now: Assignments, edits: Sequence[Reassignment]) -> str:
    names = stage_names(plan)
    stages = sorted({stage for edit in edits for stage in stages_named(plan, edit.stage)})
    found = ", ".join(f"{names[stage]!r} has {now[stage].partitions} partitions" for stage in stages)
    return f"every bin has that owner already ({found})"


def _only(plan: Plan, stages: Sequence[StageIndex], name: str | None) -> tuple[StageIndex]:
    if len(stages) == 1:
        return (stages[0],)
    names = stage_names(plan)
    raise FlowError(
        f"{'Move' if name is None else repr(name)} could mean several stages; say which with stage=, the name of an "
        f"operator in it: {', '.join(repr(names[stage]) for stage in stages)}"
    )
