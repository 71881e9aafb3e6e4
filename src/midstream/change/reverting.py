"""Going back: which updates undo what was changed since a revision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from midstream.change.configuration import FIRST_REVISION, Configuration
from midstream.change.records import NOT_STORED, ChangeRecord, Outcome, UpdateRecord
from midstream.change.restart import load_update
from midstream.change.retention import KEPT_REVISIONS, revisions_to_revert_to
from midstream.data.blobs import BlobStore
from midstream.errors import FlowError
from midstream.flow.updates import Update
from midstream.ids import Digest, Revision

__all__ = ["Undoing", "undoing"]


@dataclass(frozen=True)
class Undoing:
    """The updates, and where their functions are stored."""

    updates: tuple[Update, ...]
    stored: Mapping[str, Digest]


def undoing(
    records: Iterable[ChangeRecord],
    revision: Revision,
    current: Configuration,
    store: BlobStore,
    migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
) -> Undoing:
    """What leads back to ``revision``. Raises :class:`FlowError` when there is no way, or nothing to be done."""
    applied = [record for record in records if record.outcome is Outcome.APPLIED]
    known = sorted({FIRST_REVISION, *(record.revision for record in applied)})
    if revision not in known:
        raise FlowError(f"there is no revision {revision} to go back to; the job has run {', '.join(map(str, known))}")
    since = [record for record in applied if record.revision > revision]
    if any(record.drops for record in since):
        raise FlowError(
            f"the job was started with changes='drop' after revision {revision}, so what ran then is not what the "
            f"script says; update the operators one by one instead"
        )
    first: dict[str, UpdateRecord] = {}
    migrated: dict[str, Revision] = {}
    for record in since:
        for update in record.updates:
            first.setdefault(update.operator, update)
            if update.migrate is not None:
                migrated[update.operator] = record.revision
    if not first:
        raise FlowError(f"the job runs what it ran at revision {revision}; there is nothing to revert")
    steps = dict(migrate or {})
    _check_steps(steps, first, migrated)
    _check_stored(first, revision, applied, store)
    updates = []
    for operator, update in first.items():
        if update.before == NOT_STORED:
            raise FlowError(
                f"transform {operator!r} had a function before revision {revision + 1} that is not stored; update it "
                f"by hand: job.update(Update({operator!r}, …))"
            )
        back = msgspec.structs.replace(
            update, function=update.before, returns=update.returned, returned=update.returns, migrate=None
        )
        loaded = load_update(back, current, store)
        updates.append(Update(operator, loaded.function, migrate=steps.get(operator), returns=loaded.returns))
    return Undoing(tuple(updates), {operator: update.before for operator, update in first.items()})


def _check_stored(
    first: Mapping[str, UpdateRecord], revision: Revision, applied: Sequence[ChangeRecord], store: BlobStore
) -> None:
    stored = store.digests()
    lost = [name for name, update in first.items() if update.before not in {*stored, NOT_STORED}]
    if lost:
        possible = [str(each) for each in revisions_to_revert_to(applied, stored) if each < applied[-1].revision]
        assert possible, "what ran before the newest change is kept"
        raise FlowError(
            f"there is no way back to revision {revision}: what {', '.join(lost)} ran then is no longer stored. The "
            f"functions of the newest {KEPT_REVISIONS} applied changes are kept, so the job can go back to revision "
            f"{', '.join(possible)}; to run an older function, give it again: job.update(Update({lost[0]!r}, …))"
        )


def _check_steps(steps: Mapping[str, Any], first: Mapping[str, UpdateRecord], migrated: Mapping[str, Revision]) -> None:
    if strangers := sorted(set(steps) - set(first)):
        raise FlowError(f"migrate= names {', '.join(strangers)}; what is reverted are {', '.join(first)}")
    for operator, since in migrated.items():
        if operator not in steps:
            raise FlowError(
                f"the state of {operator!r} was migrated by revision {since}, so its old function could not read it; "
                f"say how it gets back: migrate={{{operator!r}: function(key, state)}}"
            )
