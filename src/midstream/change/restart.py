"""What a job runs after a restart: its script, with the changes that were made while it ran."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pyarrow as pa

from midstream.change.configuration import FIRST_REVISION, Configuration, state_kept
from midstream.change.knob_records import after_tuning, knob_warnings, recorded_knobs
from midstream.change.newer_script import newer_functions, newest_deployment_in
from midstream.change.plan_records import loaded_payload, steps_towards
from midstream.change.prepare import PreparedChange, prepare
from midstream.change.timeline import Course, RevisionStep, courses, known_revisions, listed, migrations_of, settled
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import (
    NOT_STORED,
    ChangeRecord,
    InsertRecord,
    MoveRecord,
    Outcome,
    RescaleRecord,
)
from midstream.data.schema import parse_ddl, to_ddl
from midstream.errors import CheckpointError, MidstreamError
from midstream.flow.edits import Edit, Move, Redraw, Rescale, Tune, Update, added_by, revise
from midstream.flow.model import Graph, Operator
from midstream.flow.plan_steps import Add, Step, TakeOut, outlined
from midstream.ids import Digest, Revision
from midstream.planner.carried_assignments import carried
from midstream.planner.change_plan import Scheduler
from midstream.planner.merged_flow import difference_of
from midstream.planner.stages import compile_plan
from midstream.storage.blobs import BlobStore

__all__ = ["Pending", "Restart", "drop_changes", "restart_of"]


@dataclass(frozen=True)
class Pending:
    """The change that was on trial when the driver died. ``is_committed``: it was in effect in a committed epoch.

    ``is_flushed``: only the epoch before it is committed, the one in which operators emitted what they held.
    """

    record: ChangeRecord
    prepared: PreparedChange
    is_committed: bool
    is_flushed: bool = False


@dataclass(frozen=True)
class Restart:
    """What to run after a restart; ``messages`` are for the user, ``settled`` has the records that got an outcome."""

    configuration: Configuration
    pending: Pending | None
    messages: tuple[str, ...]
    settled: tuple[ChangeRecord, ...] = ()


def restart_of(
    first: Configuration,
    store: BlobStore,
    records: Sequence[ChangeRecord],
    committed: Revision | None,
    before: Configuration | None = None,
) -> Restart:
    """What to run, given the script's configuration, all changes, and the revision of the last committed epoch.

    ``before`` is what the job ran when it stopped: operators that had no state there have left none.

    Operators that were changed run the newest recorded function, and only that is loaded: older ones may have been
    removed. A pending change goes on trial again. If it led to the revision of the last committed epoch, it was in
    effect in all or part of that epoch; so it keeps its number, on which the levels of state depend. If it led to an
    older revision, it was applied, and the driver died before it could record that.
    """
    outcomes, pending = settled(records, committed)
    applied = [record for record in outcomes if record.outcome is Outcome.APPLIED and not record.migration]
    is_committed = pending is not None and pending.revision == committed
    revision = max([FIRST_REVISION, *(record.revision for record in applied)])
    if not is_committed:
        revision = Revision(max(revision, committed or 0))
    number = newest_deployment_in(first, applied, store)
    later = [record for record in applied if record.number > number]
    steps = _steps(first, later, store, applied)
    known = {name: course for name, course in courses(later).items() if _is_left(name, first, steps)}
    configuration = _in_force(first, store, known, applied, later, revision, steps, before or first)
    resumed = None
    if pending is not None:
        try:
            resumed = _resumed(configuration, pending, store, outcomes, is_committed=is_committed)
            if is_committed and before is not None and before.flushed:
                resumed = replace(resumed, is_committed=False, is_flushed=True)
        except _NothingToResume as reason:
            # A change of owners alone is over with its first epoch; the manifest has the owners.
            is_applied = is_committed and not pending.updates
            ended = msgspec.structs.replace(
                pending,
                outcome=Outcome.APPLIED if is_applied else Outcome.REFUSED,
                error=None if is_applied else str(reason),
            )
            outcomes = [ended if record.number == pending.number else record for record in outcomes]
            configuration = configuration.as_revision(Revision(max(revision, committed or 0)))
    changed = tuple(after for before, after in zip(records, outcomes, strict=True) if before != after)
    knobs = knob_warnings(first.knobs, recorded_knobs(applied), first.graph)[1]
    deployed = newer_functions(first, [record for record in applied if record.number <= number], store)
    warnings = (*deployed, *_plan_warnings(first, configuration, later), *_warnings(first, known, resumed), *knobs)
    return Restart(configuration, resumed, warnings, changed)


def _in_force(
    first: Configuration,
    store: BlobStore,
    known: Mapping[str, Course],
    applied: Sequence[ChangeRecord],
    later: Sequence[ChangeRecord],
    revision: Revision,
    steps: tuple[Step, ...],
    before: Configuration,
) -> Configuration:
    """The script's configuration with the plan of the newest change, and the newest function of each operator.

    ``later`` are the changes that no deployment has brought into the script.
    """
    if not applied:
        return first.as_revision(revision)
    stored = {name: course for name, course in known.items() if course.newest.update.function != NOT_STORED}
    edits: list[Edit] = [Redraw(steps)] if steps else []
    try:
        outline = outlined(first.graph, steps) if steps else first.graph
    except MidstreamError as error:
        raise _no_longer_fits(known, applied, error) from error
    for course in stored.values():
        returns = course.newest.update.returns if course.changed_columns else None
        edits.append(_load(course.newest, outline, store, returns, applied))
    try:
        graph = revise(first.graph, edits) if edits else first.graph
        graph = replace(graph, written_for={**graph.written_for, **_written_for(graph, stored)})
        inserted = {name: digest for name, digest in _inserted(later).items() if name in added_by(edits)}
        own = {name: digest for name, digest in first.blobs.items() if name not in added_by(edits) and name in graph}
        blobs = {**own, **inserted, **{name: course.newest.update.function for name, course in stored.items()}}
        plan = compile_plan(graph, first.plan.numbers)
        changed = replace(
            first,
            plan=plan,
            revision=revision,
            assignments=carried(first.plan, first.assignments, plan, first.partitions) if steps else first.assignments,
            blobs=blobs,
            migrations=migrations_of(applied),
            kept=state_kept(before, graph),
            knobs=knob_warnings(first.knobs, recorded_knobs(applied), graph)[0],
        )
        return changed.store(store)
    except MidstreamError as error:
        raise _no_longer_fits(known, applied, error) from error


def _no_longer_fits(
    known: Mapping[str, Course], applied: Sequence[ChangeRecord], error: MidstreamError
) -> CheckpointError:
    steps = [course.newest for course in known.values()]
    found = {step.update.operator: step.record.revision for step in steps}
    found |= {edit.subject: record.revision for record in applied for edit in record.plan_edits}
    what = ", ".join(f"{name} by revision {revision}" for name, revision in found.items())
    return CheckpointError(
        f"the changes made while the job ran ({what}) no longer fit the flow: {error}. Start a flow that "
        f"they fit; {_ways_out(applied, min(found.values()))}"
    )


def _is_left(name: str, first: Configuration, steps: tuple[Step, ...]) -> bool:
    """Whether an operator is in the flow after these steps."""
    is_there = name in first.graph
    for step in steps:
        match step:
            case Add(operator=op) if op.name == name:
                is_there = True
            case TakeOut(name=gone) if gone == name:
                is_there = False
            case _:
                pass
    return is_there


def _since_drop(records: Sequence[ChangeRecord]) -> list[ChangeRecord]:
    """The changes since the script alone was last in force."""
    found: list[ChangeRecord] = []
    for record in records:
        found = [] if record.drops else [*found, record]
    return found


def _inserted(records: Sequence[ChangeRecord]) -> dict[str, Digest]:
    """The digests of what inserted operators run."""
    edits = [edit for record in _since_drop(records) for edit in record.plan_edits]
    return {
        edit.operator: edit.function for edit in edits if isinstance(edit, InsertRecord) and edit.function != NOT_STORED
    }


def _steps(
    before: Configuration, edits: Sequence[ChangeRecord], store: BlobStore, records: Sequence[ChangeRecord]
) -> tuple[Step, ...]:
    """The steps of the plan's changes that a flow does not have yet."""
    # What an inserted operator ran at first may be gone, if it was updated since.
    newest = {name: course.newest.update.function for name, course in courses(edits).items()}

    def load(op: Operator, digest: Digest) -> Any:
        try:
            return loaded_payload(op, store.get(newest.get(op.name, digest)))
        except Exception as error:  # a user's module may raise anything when it is imported
            [revision, *_] = [
                record.revision
                for record in edits
                if any(edit.operator == op.name for edit in record.plan_edits if isinstance(edit, InsertRecord))
            ]
            raise CheckpointError(
                f"{op.kind} {op.name!r} was inserted while the job ran, and what it runs can no longer be loaded: "
                f"{type(error).__name__}: {error}. Bring back what it needs; {_ways_out(records, revision)}"
            ) from error

    found = [edit for record in _since_drop(edits) for edit in record.plan_edits]
    steps = steps_towards(before.graph, found, load)
    for step in steps:
        if not isinstance(step, Add) or step.payload is not None:
            continue
        if step.operator.spec.is_outlet or step.operator.spec.reads_stream:
            raise CheckpointError(
                f"{step.operator.kind} {step.operator.name!r} was inserted while the job ran, and its object could not "
                f"be stored. Put it into the script under that name; or start with changes='drop', which runs the "
                f"script alone"
            )
    return steps


def _given_states(record: ChangeRecord, steps: Iterable[Step]) -> dict[str, Digest]:
    """The initial states of the operators that these steps add."""
    added = {step.operator.name for step in steps if isinstance(step, Add)}
    inserts = [edit for edit in record.edits if isinstance(edit, InsertRecord) and edit.operator in added]
    return {edit.operator: edit.state for edit in inserts if edit.state is not None}


def _written_for(graph: Graph, stored: Mapping[str, Course]) -> dict[str, tuple[pa.Schema, ...]]:
    """The columns that recorded functions were written for, where their inputs have more columns now."""
    found = {}
    for name, course in stored.items():
        update = course.newest.update
        if update.takes is None:  # recorded by an older version, or while the job was not running
            continue
        takes = tuple(parse_ddl(ddl) for ddl in update.takes)
        inputs = tuple(graph.schema_of(port) for port in graph[name].inputs)
        if takes != inputs and len(takes) == len(inputs) and all(map(_is_part_of, takes, inputs)):
            found[name] = takes
    return found


def _is_part_of(part: pa.Schema, whole: pa.Schema) -> bool:
    return all(field.name in whole.names and whole.field(field.name).type.equals(field.type) for field in part)


class _NothingToResume(Exception):
    """Why a change that was in progress does not go on trial again."""


def _resumed(
    configuration: Configuration,
    pending: ChangeRecord,
    store: BlobStore,
    records: Sequence[ChangeRecord],
    *,
    is_committed: bool,
) -> Pending:
    """A change that goes on trial again, on the script's current flow.

    If an epoch with it is committed, its bins have moved: they start where the manifest says.
    """
    record = msgspec.structs.replace(pending, revision=Revision(max(pending.revision, configuration.revision + 1)))
    steps = _steps(configuration, [record], store, records)
    if is_committed:  # then an epoch before it has emitted what they held
        steps = tuple(TakeOut(step.name) if isinstance(step, TakeOut) else step for step in steps)
    known = [
        update
        for update in record.updates
        if _is_left(update.operator, configuration, steps) and update.function != NOT_STORED
    ]
    reassignments = () if is_committed else _reassignments(record)
    tuned = record.tuned if after_tuning(configuration.knobs, record.tuned) != configuration.knobs else {}
    if not known and not reassignments and not steps and not tuned:
        raise _NothingToResume(
            "the flow lacks its operators now" if record.updates else "the job was started with all of it already"
        )
    edits: list[Edit] = [*reassignments]
    if tuned:
        edits.append(Tune(**tuned))
    if steps:
        edits.append(Redraw(steps))
    for each in known:
        returns = None if each.returns == each.returned else each.returns
        edits.append(_load(RevisionStep(record, each), configuration.graph, store, returns, records))
    try:
        prepared = prepare(
            configuration,
            edits,
            store,
            revision=record.revision,
            scheduler=Scheduler(record.scheduler),
            stored={**_inserted([record]), **{update.operator: update.function for update in known}},
            migrates={update.operator: update.migrate for update in known if update.migrate is not None},
            states={} if is_committed else _given_states(record, steps),
        )
    except MidstreamError as error:
        if not known and not steps:
            raise _NothingToResume(f"it does not fit what the job was started with: {error}") from error
        raise CheckpointError(
            f"the change to revision {record.revision} ({record.subjects}), which was in progress when the driver "
            f"ended, no longer fits the flow: {error}. Start a flow that it fits; "
            f"{_ways_out(records, pending.revision)}"
        ) from error
    return Pending(record, prepared, is_committed)


def _reassignments(record: ChangeRecord) -> tuple[Move | Rescale, ...]:
    """The edits of a change that move bins, from its record."""
    found: list[Move | Rescale] = []
    for edit in record.edits:
        match edit:
            case MoveRecord(bins=bins, stage=stage):
                found.append(Move(bins, stage))
            case RescaleRecord(partitions=partitions, stage=stage):
                found.append(Rescale(partitions, stage))
            case _:
                pass
    return tuple(found)


def drop_changes(first: Configuration, log: ChangeLog, committed: Revision | None, *, by: str, now: float) -> None:
    """Record that the job runs its script from now on. Migrations of state stay in force."""
    records = log.records()
    if not any((record.updates or record.plan_edits or record.tuned) and not record.drops for record in records):
        return
    highest = max([committed or 0, first.revision, *(record.revision for record in records)])
    log.keep(
        ChangeRecord(
            number=log.next_number(),
            revision=Revision(highest + 1),
            requested_at=now,
            by=by,
            scheduler=str(Scheduler.EPOCH),
            edits=(),
            plan="started with changes='drop': all functions and knobs are those of the script",
            outcome=Outcome.APPLIED,
            drops=True,
        )
    )


def _load(
    step: RevisionStep, graph: Graph, store: BlobStore, returns: str | None, records: Iterable[ChangeRecord]
) -> Update:
    """Load a recorded update, as a user would pass it. Its migration is loaded only if it was not checked yet."""
    update, spec = step.update, graph[step.update.operator].spec
    try:
        function = spec.loaded(store.get(update.function))
        is_new = step.record.outcome is Outcome.PENDING
        migrate = pickle.loads(store.get(update.migrate)) if is_new and update.migrate is not None else None
    except Exception as error:  # a user's module may raise anything when it is imported
        raise CheckpointError(
            f"operator {update.operator!r} was changed while the job ran, to {update.label}, which can no longer be "
            f"loaded: {type(error).__name__}: {error}. Bring back what it needs; "
            f"{_ways_out(records, step.record.revision)}"
        ) from error
    return Update(update.operator, function, migrate=migrate, returns=returns if spec.declares_columns else None)


def _ways_out(records: Iterable[ChangeRecord], revision: Revision) -> str:
    """The remedies for a change that keeps a job from starting."""
    earlier = {known: what for known, what in known_revisions(records).items() if known < revision}
    target = max(earlier, default=FIRST_REVISION)
    return (
        f"or revert it: flow.start(…, revert_to={target}) or 'midstream revert CHECKPOINT {target}' (the job has run "
        f"{listed(earlier)}); or start with changes='drop', which runs the script alone"
    )


def _is_scripts(first: Configuration, operator: str, course: Course) -> bool:
    """Whether changes have led an operator back to the script's function."""
    update = course.newest.update
    if operator not in first.graph:
        return False
    ddl = to_ddl(first.graph[operator].schema)
    return update.function == first.blobs.get(operator) and (not course.changed_columns or update.returns == ddl)


def _warnings(first: Configuration, known: Mapping[str, Course], resumed: Pending | None) -> tuple[str, ...]:
    """One sentence for each operator that does not run the script's function, or not the one requested last."""
    found = {name: _differs(course.newest) for name, course in known.items() if not _is_scripts(first, name, course)}
    if resumed is not None:
        on_trial = set(resumed.prepared.plan.updated)
        for update in resumed.record.updates:
            if update.operator in on_trial:
                found[update.operator] = _goes_on_trial(RevisionStep(resumed.record, update))
            elif update.operator in first.graph and update.function == NOT_STORED:
                found.setdefault(update.operator, _not_stored(RevisionStep(resumed.record, update)))
    return tuple(found.values())


def _plan_warnings(first: Configuration, now: Configuration, applied: Sequence[ChangeRecord]) -> tuple[str, ...]:
    """One sentence for each operator that changes have added to the script's plan, or removed from it."""
    difference = difference_of(first.graph, now.graph)
    by = {edit.operator: f"{record.by}, revision {record.revision}" for record in applied for edit in record.plan_edits}
    way_out = "put that into the script, or start with changes='drop' to go by the script"
    found = [
        f"{now.graph[name].kind} {name!r} runs although the script does not have it: it was inserted while the job ran "
        f"({by.get(name, 'by a change')}): {way_out}"
        for name in difference.added
    ]
    found += [
        f"{first.graph[name].kind} {name!r} of the script does not run: it was removed while the job ran "
        f"({by.get(name, 'by a change')}): {way_out}"
        for name in difference.removed
    ]
    told = {*difference.added, *difference.removed}
    for name in difference.rewired:
        ends = {port.operator for port in (*first.graph[name].inputs, *now.graph[name].inputs)}
        if not ends & told:
            found.append(
                f"{now.graph[name].kind} {name!r} reads {', '.join(map(str, now.graph[name].inputs))}, to which it was "
                f"rewired while the job ran ({by.get(name, 'by a change')}), not what the script says: {way_out}"
            )
    return tuple(found)


def _differs(step: RevisionStep) -> str:
    record, update = step.record, step.update
    if update.function == NOT_STORED:
        return _not_stored(step)
    return (
        f"operator {update.operator!r} runs {update.label}, to which {record.by} changed it (revision "
        f"{record.revision}), not what the script says: put that into the script, or start with changes='drop' to go "
        f"by the script"
    )


def _goes_on_trial(step: RevisionStep) -> str:
    record, update = step.record, step.update
    return (
        f"operator {update.operator!r} runs {update.label} from the first epoch of this start: {record.by} had "
        f"requested it (revision {record.revision}), and it was on trial when the driver ended; start with "
        f"changes='drop' to leave it out"
    )


def _not_stored(step: RevisionStep) -> str:
    record, update = step.record, step.update
    return (
        f"transform {update.operator!r} runs what the script says: the function to which {record.by} changed it "
        f"(revision {record.revision}) could not be stored; request the change again, or put it into the script"
    )
