"""What a job runs when it is started again: its script, and the changes that were made while it ran."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from midstream.change.configuration import Configuration, configured
from midstream.change.log import ChangeLog
from midstream.change.prepare import Prepared, prepare
from midstream.change.records import NOT_STORED, ChangeRecord, Outcome, UpdateRecord
from midstream.data.blobs import BlobStore
from midstream.engine.program import Migration
from midstream.engine.resources import table_from_bytes
from midstream.errors import CheckpointError, MidstreamError
from midstream.flow.model import Lookup
from midstream.flow.schema import to_ddl
from midstream.flow.updates import Update
from midstream.ids import Revision
from midstream.planner.change import Scheduler

__all__ = ["Pending", "Restart", "drop_changes", "load_update", "restored"]


@dataclass(frozen=True)
class Pending:
    """The change that was on trial when the driver died. ``is_committed``: it was in effect in a committed epoch."""

    record: ChangeRecord
    prepared: Prepared
    is_committed: bool


@dataclass(frozen=True)
class Restart:
    """What to go on with; ``messages`` are for the user."""

    configuration: Configuration
    pending: Pending | None
    messages: tuple[str, ...]


def restored(first: Configuration, store: BlobStore, log: ChangeLog, committed: Revision | None) -> Restart:
    """What to run, given the script's configuration and the revision of the last committed epoch.

    A change whose outcome is open goes on trial again. If it is the revision of the last committed epoch, then that
    epoch was one of its own, or it took effect in a part of it: so it keeps its number, by which the levels of state
    go. If it is an older one, then the driver died before it could write down that it was applied.
    """
    configuration, messages = first, list[str]()
    pending: ChangeRecord | None = None
    records = log.records()
    newest = {
        update.operator: record.number
        for record in records
        if record.outcome is Outcome.APPLIED or _is_applied_by(record, committed)
        for update in record.updates
    }
    for record in records:
        if record.drops:
            if pending is not None:
                log.keep(msgspec.structs.replace(pending, outcome=Outcome.REFUSED, error="changes='drop' left it out"))
                pending = None
            configuration = configured(
                first.graph, store, record.revision, first.partitions, first.blobs, configuration.migrations
            )
            messages.clear()
            continue
        if _is_applied_by(record, committed):
            record = msgspec.structs.replace(record, outcome=Outcome.APPLIED)
            log.keep(record)
        if record.outcome is Outcome.PENDING:
            # Only the first one was on trial; those that waited behind it were never sent to anybody.
            if pending is None:
                pending = record
            else:
                log.keep(msgspec.structs.replace(record, outcome=Outcome.REFUSED, error="the driver died before"))
        elif record.outcome is Outcome.APPLIED and record.updates:
            superseded = tuple(update for update in record.updates if newest[update.operator] != record.number)
            configuration = _without_functions(configuration, record.revision, superseded, store)
            left = tuple(update for update in record.updates if update not in superseded)
            record = msgspec.structs.replace(record, updates=left)
            prepared = _again(configuration, record, store)
            configuration = configuration if prepared is None else prepared.after
            messages += _messages(record)
    is_committed = pending is not None and pending.revision == committed
    if not is_committed:
        configuration = configuration.as_revision(Revision(max(configuration.revision, committed or 0)))
    if pending is None:
        return Restart(configuration, None, tuple(messages))
    number = Revision(max(pending.revision, configuration.revision + 1))
    resumed = msgspec.structs.replace(pending, revision=number)
    prepared = _again(configuration, resumed, store)
    if prepared is None:
        log.keep(msgspec.structs.replace(pending, outcome=Outcome.REFUSED, error="the flow has no such operator now"))
        return Restart(
            configuration.as_revision(Revision(max(configuration.revision, committed or 0))), None, tuple(messages)
        )
    messages.append(
        f"the change to revision {pending.revision} ({', '.join(pending.operators)}) was on its way when the driver "
        f"ended; it takes effect with the first epoch of this start"
    )
    return Restart(configuration, Pending(resumed, prepared, is_committed), tuple(messages))


def _is_applied_by(record: ChangeRecord, committed: Revision | None) -> bool:
    """Whether a change was applied, although the driver died before it could write that down."""
    return record.outcome is Outcome.PENDING and committed is not None and record.revision < committed


def _without_functions(
    current: Configuration, revision: Revision, updates: Sequence[UpdateRecord], store: BlobStore
) -> Configuration:
    """With updates whose functions later ones have replaced: nobody needs these, but state still needs their steps."""
    steps = {
        update.operator: (*current.migrations.get(update.operator, ()), Migration(revision, update.migrate))
        for update in updates
        if update.migrate is not None and update.operator in current.graph
    }
    if not steps:
        return current
    migrations = {**current.migrations, **steps}
    return configured(current.graph, store, revision, current.partitions, current.blobs, migrations)


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


def load_update(update: UpdateRecord, current: Configuration, store: BlobStore) -> Update:
    """A stored update, as a user would give it."""
    spec = current.graph[update.operator].spec
    try:
        data = store.get(update.function)
        function = table_from_bytes(data) if isinstance(spec, Lookup) else pickle.loads(data)
        migrate = None if update.migrate is None else pickle.loads(store.get(update.migrate))
    except MidstreamError:
        raise
    except Exception as error:  # a user's module may raise anything when it is imported
        raise CheckpointError(
            f"operator {update.operator!r} was changed while the job ran, to {update.label}, which cannot be loaded "
            f"any more: {type(error).__name__}: {error}. Bring back what it needs, or start the flow with "
            f"changes='drop', which leaves such changes out"
        ) from error
    # Compared with what it has now: earlier updates that gave it other columns may have been left out.
    columns = to_ddl(current.graph[update.operator].schema)
    is_declared = not isinstance(spec, Lookup) and update.returns not in (None, columns)
    return Update(update.operator, function, migrate=migrate, returns=update.returns if is_declared else None)


def _again(configuration: Configuration, record: ChangeRecord, store: BlobStore) -> Prepared | None:
    """A recorded change, on the flow as the script has it now; None if nothing of it is left."""
    known = [
        update for update in record.updates if update.operator in configuration.graph and update.function != NOT_STORED
    ]
    if not known:
        return None
    try:
        updates = [load_update(update, configuration, store) for update in known]
        return prepare(
            configuration,
            updates,
            store,
            revision=record.revision,
            scheduler=Scheduler(record.scheduler),
            stored={update.operator: update.function for update in known},
            migrates={update.operator: update.migrate for update in known if update.migrate is not None},
        )
    except CheckpointError:
        raise
    except MidstreamError as error:
        raise CheckpointError(
            f"the change to revision {record.revision} ({', '.join(record.operators)}), made while the job ran, does "
            f"not fit the flow any more: {error}. Start the flow with changes='drop' to leave such changes out"
        ) from error


def _messages(record: ChangeRecord) -> list[str]:
    found = []
    for update in record.updates:
        if update.function == NOT_STORED:
            found.append(
                f"transform {update.operator!r} was changed by revision {record.revision}, but its function could not "
                f"be stored; the script's is used"
            )
        else:
            found.append(
                f"operator {update.operator!r} runs {update.label} of revision {record.revision}, to which {record.by} "
                f"changed it while the job ran, and not what the script says; changes='drop' goes by the script"
            )
    return found
