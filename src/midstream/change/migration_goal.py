"""The goal of a migration, in its record and in the job: edits, and assignments by the names of their stages. Pure.

Names outlast changes that renumber stages, and restarts with another script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from midstream.change.migration_request import MigrationRequest
from midstream.checkpoint.change_records import (
    DivideRecord,
    EditRecord,
    MigrationRecord,
    MoveRecord,
    RescaleRecord,
)
from midstream.errors import FlowError
from midstream.flow.edits import Divide, Move, Reassignment, Rescale
from midstream.ids import StageIndex
from midstream.planner.assignment import Assignment, Assignments
from midstream.planner.division import in_words
from midstream.planner.migration import Itinerary, StepStrategy
from midstream.planner.reassignment import goal_of, unique_names
from midstream.planner.stages import Plan

__all__ = [
    "described",
    "edit_of",
    "goal_documents",
    "is_scheduled",
    "lenient_goal",
    "moment_of",
    "record_of",
    "stages_of",
    "targets_of",
]


def record_of(edit: Reassignment) -> EditRecord:
    """An edit, for the history."""
    if isinstance(edit, Move):
        return MoveRecord(dict(edit.bins), edit.stage)
    if isinstance(edit, Divide):
        key = None if edit.key is None else dict(edit.key)
        return DivideRecord(edit.join, edit.into, edit.spread, key, edit.bin)
    return RescaleRecord(edit.partitions, edit.stage)


def edit_of(record: EditRecord) -> Reassignment:
    """The inverse of :func:`record_of`."""
    match record:
        case MoveRecord(bins=bins, stage=stage):
            return Move(bins, stage)
        case RescaleRecord(partitions=partitions, stage=stage):
            return Rescale(partitions, stage)
        case DivideRecord(join=join, into=into, spread=spread, key=key, bin=number):
            return Divide(join, key, number, into, spread)
    raise AssertionError(f"a migration has no {type(record).__name__}")


def lenient_goal(plan: Plan, now: Assignments, records: Sequence[EditRecord]) -> dict[StageIndex, Assignment]:
    """The assignments that an earlier migration will lead to; the present ones if it no longer fits."""
    try:
        return goal_of(plan, now, [edit_of(record) for record in records])
    except FlowError:
        return dict(now)


def goal_documents(plan: MigrationRecord) -> Mapping[str, object]:
    """The assignments to reach: the target, or the first ones if the migration is reversed."""
    return plan.first if plan.is_reversed else plan.target


def stages_of(plan: Plan, migration: MigrationRecord) -> dict[str, StageIndex]:
    """The stages of a migration that the flow has."""
    known = unique_names(plan)
    return {name: known[name] for name in migration.target if name in known}


def targets_of(plan: Plan, documents: Mapping[str, object]) -> dict[StageIndex, Assignment]:
    """Assignments of documents, for the stages that the flow has."""
    known = unique_names(plan)
    return {known[name]: Assignment.from_document(found) for name, found in documents.items() if name in known}


def is_scheduled(plan: MigrationRecord) -> bool:
    """Whether it waits for an epoch or an event time."""
    return plan.at_epoch is not None or plan.at_time is not None


def moment_of(plan: MigrationRecord | MigrationRequest) -> str:
    """The moment that a scheduled migration waits for, in words."""
    return (
        f"epoch {plan.at_epoch}"
        if plan.at_time is None
        else f"event time {datetime.fromtimestamp(plan.at_time / 1e6, UTC)}"
    )


def described(
    plan: Plan, before: Assignments, after: Assignments, strategy: StepStrategy, *, spreads: bool = False
) -> str:
    """A few lines for people: what moves where."""
    names = {stage: name for name, stage in unique_names(plan).items()}
    lines = [f"{strategy} migration:"]
    for stage, wanted in after.items():
        was = before[stage]
        if was != wanted:
            count = Itinerary({stage: wanted}).count_left(before)
            partitions = (
                "" if was.partitions == wanted.partitions else f"; {was.partitions} → {wanted.partitions} partitions"
            )
            lines.append(f"  {names[stage]}: {count} of {wanted.bins} bins move{partitions}")
            lines += [f"  {line}" for line in in_words(was, wanted)]
    if spreads:
        lines.append("  partitions are spread anew over executors")
    return "\n".join(lines)
