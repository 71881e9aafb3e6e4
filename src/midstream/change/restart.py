"""What a job runs when it is started again: its script, and the changes that were made while it ran."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import pyarrow as pa

from midstream.change.configuration import FIRST_REVISION, Configuration, configured
from midstream.change.prepare import PreparedChange, prepare
from midstream.change.timeline import Course, RevisionStep, courses, known_revisions, listed, migrations_of, settled
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import NOT_STORED, ChangeRecord, Outcome
from midstream.data.schema import parse_ddl, to_ddl
from midstream.errors import CheckpointError, MidstreamError
from midstream.flow.edits import Update, revise
from midstream.flow.model import Graph
from midstream.ids import Revision
from midstream.planner.change_plan import Scheduler
from midstream.planner.stages import compile_plan
from midstream.storage.blobs import BlobStore

__all__ = ["Pending", "Restart", "drop_changes", "restart_of", "restored"]


@dataclass(frozen=True)
class Pending:
    """The change that was on trial when the driver died. ``is_committed``: it was in effect in a committed epoch."""

    record: ChangeRecord
    prepared: PreparedChange
    is_committed: bool


@dataclass(frozen=True)
class Restart:
    """What to go on with; ``messages`` are for the user, ``settled`` the records whose outcome is known only now."""

    configuration: Configuration
    pending: Pending | None
    messages: tuple[str, ...]
    settled: tuple[ChangeRecord, ...] = ()


def restored(first: Configuration, store: BlobStore, log: ChangeLog, committed: Revision | None) -> Restart:
    """What to run, see :func:`restart_of`; and keep on record what became of changes that were on their way."""
    restart = restart_of(first, store, log.records(), committed)
    for record in restart.settled:
        log.keep(record)
    return restart


def restart_of(
    first: Configuration, store: BlobStore, records: Sequence[ChangeRecord], committed: Revision | None
) -> Restart:
    """What to run, given the script's configuration, all changes, and the revision of the last committed epoch.

    Operators that were changed run the newest function that is on record, and only that is loaded: what came before it
    may be gone by now. A change whose outcome is open goes on trial again. If it is the revision of the last committed
    epoch, then that epoch was one of its own, or it took effect in a part of it: so it keeps its number, by which the
    levels of state go. If it is an older one, then the driver died before it could write down that it was applied.
    """
    outcomes, pending = settled(records, committed)
    applied = [record for record in outcomes if record.outcome is Outcome.APPLIED]
    is_committed = pending is not None and pending.revision == committed
    revision = max([FIRST_REVISION, *(record.revision for record in applied)])
    if not is_committed:
        revision = Revision(max(revision, committed or 0))
    known = {name: course for name, course in courses(applied).items() if name in first.graph}
    configuration = _in_force(first, store, known, applied, revision)
    resumed = None if pending is None else _resumed(configuration, pending, store, outcomes)
    if pending is not None and resumed is None:
        refused = msgspec.structs.replace(pending, outcome=Outcome.REFUSED, error="the flow has no such operator now")
        outcomes = [refused if record.number == pending.number else record for record in outcomes]
        configuration = configuration.as_revision(Revision(max(revision, committed or 0)))
    if resumed is not None:
        resumed = replace(resumed, is_committed=is_committed)
    changed = tuple(after for before, after in zip(records, outcomes, strict=True) if before != after)
    return Restart(configuration, resumed, _warnings(first, known, resumed), changed)


def _in_force(
    first: Configuration,
    store: BlobStore,
    known: Mapping[str, Course],
    applied: Sequence[ChangeRecord],
    revision: Revision,
) -> Configuration:
    """The script with the newest function of each operator that was changed."""
    if not applied:
        return first.as_revision(revision)
    stored = {name: course for name, course in known.items() if course.newest.update.function != NOT_STORED}
    updates = []
    for course in stored.values():
        returns = course.newest.update.returns if course.changed_columns else None
        updates.append(_load(course.newest, first.graph, store, returns, applied))
    try:
        graph = revise(first.graph, updates) if updates else first.graph
        graph = replace(graph, written_for={**graph.written_for, **_written_for(graph, stored)})
        blobs = {**first.blobs, **{name: course.newest.update.function for name, course in stored.items()}}
        return configured(
            compile_plan(graph, first.plan.numbers), store, revision, first.assignments, blobs, migrations_of(applied)
        )
    except MidstreamError as error:
        steps = [course.newest for course in known.values()]
        what = ", ".join(f"{step.update.operator} by revision {step.record.revision}" for step in steps)
        raise CheckpointError(
            f"what was changed while the job ran ({what}) does not fit the flow any more: {error}. Start a flow that "
            f"it fits; {_ways_out(applied, min(step.record.revision for step in steps))}"
        ) from error


def _written_for(graph: Graph, stored: Mapping[str, Course]) -> dict[str, tuple[pa.Schema, ...]]:
    """The columns that recorded functions were written for, where their inputs have more by now."""
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


def _resumed(
    configuration: Configuration, pending: ChangeRecord, store: BlobStore, records: Sequence[ChangeRecord]
) -> Pending | None:
    """A change that goes on trial again, on the flow as the script has it now; None if nothing of it is left."""
    record = msgspec.structs.replace(pending, revision=Revision(max(pending.revision, configuration.revision + 1)))
    known = [
        update for update in record.updates if update.operator in configuration.graph and update.function != NOT_STORED
    ]
    if not known:
        return None
    updates = []
    for each in known:
        returns = None if each.returns == each.returned else each.returns
        updates.append(_load(RevisionStep(record, each), configuration.graph, store, returns, records))
    try:
        prepared = prepare(
            configuration,
            updates,
            store,
            revision=record.revision,
            scheduler=Scheduler(record.scheduler),
            stored={update.operator: update.function for update in known},
            migrates={update.operator: update.migrate for update in known if update.migrate is not None},
        )
    except MidstreamError as error:
        raise CheckpointError(
            f"the change to revision {record.revision} ({', '.join(record.operators)}), which was on its way when the "
            f"driver ended, does not fit the flow any more: {error}. Start a flow that it fits; "
            f"{_ways_out(records, pending.revision)}"
        ) from error
    return Pending(record, prepared, is_committed=False)


def drop_changes(first: Configuration, log: ChangeLog, committed: Revision | None, *, by: str, now: float) -> None:
    """Put on record that the job goes by its script from here on. How state is brought up to date stays as it is."""
    records = log.records()
    if not any(record.updates and not record.drops for record in records):
        return
    highest = max([committed or 0, first.revision, *(record.revision for record in records)])
    log.keep(
        ChangeRecord(
            number=log.next_number(),
            revision=Revision(highest + 1),
            requested_at=now,
            by=by,
            scheduler=str(Scheduler.EPOCH),
            updates=(),
            plan="started with changes='drop': all functions are those of the script",
            outcome=Outcome.APPLIED,
            drops=True,
        )
    )


def _load(
    step: RevisionStep, graph: Graph, store: BlobStore, returns: str | None, records: Iterable[ChangeRecord]
) -> Update:
    """A recorded update, as a user would give it. Its migration is loaded only if it has yet to be checked."""
    update, spec = step.update, graph[step.update.operator].spec
    try:
        function = spec.loaded(store.get(update.function))
        is_new = step.record.outcome is Outcome.PENDING
        migrate = pickle.loads(store.get(update.migrate)) if is_new and update.migrate is not None else None
    except Exception as error:  # a user's module may raise anything when it is imported
        raise CheckpointError(
            f"operator {update.operator!r} was changed while the job ran, to {update.label}, which cannot be loaded "
            f"any more: {type(error).__name__}: {error}. Bring back what it needs; "
            f"{_ways_out(records, step.record.revision)}"
        ) from error
    return Update(update.operator, function, migrate=migrate, returns=returns if spec.declares_columns else None)


def _ways_out(records: Iterable[ChangeRecord], revision: Revision) -> str:
    """What to do about a change that keeps a job from starting."""
    earlier = {known: what for known, what in known_revisions(records).items() if known < revision}
    target = max(earlier, default=FIRST_REVISION)
    return (
        f"or take it back: flow.start(…, revert_to={target}) or 'midstream revert CHECKPOINT {target}' (it has run "
        f"{listed(earlier)}); or start with changes='drop', which goes by the script alone"
    )


def _is_scripts(first: Configuration, operator: str, course: Course) -> bool:
    """Whether changes have led an operator back to what the script says."""
    update = course.newest.update
    ddl = to_ddl(first.graph[operator].schema)
    return update.function == first.blobs.get(operator) and (not course.changed_columns or update.returns == ddl)


def _warnings(first: Configuration, known: Mapping[str, Course], resumed: Pending | None) -> tuple[str, ...]:
    """One sentence for each operator that does not run what the script says, or what was requested last."""
    found = {name: _differs(course.newest) for name, course in known.items() if not _is_scripts(first, name, course)}
    if resumed is not None:
        on_trial = {update.operator for update in resumed.prepared.updates}
        for update in resumed.record.updates:
            if update.operator in on_trial:
                found[update.operator] = _goes_on_trial(RevisionStep(resumed.record, update))
            elif update.operator in first.graph:
                found.setdefault(update.operator, _not_stored(RevisionStep(resumed.record, update)))
    return tuple(found.values())


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
