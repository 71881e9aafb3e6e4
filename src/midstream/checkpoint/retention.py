"""Decides which blobs a job still needs, from what it runs and from the records of its changes. Pure.

==============================  ====================================================================================
needed                          reason
==============================  ====================================================================================
everything in a configuration   workers run it, or will if a change is rolled back or starts
everything in a pending record  a restart continues with it
configurations of pending and   they say what the job ran at a revision
of the newest applied changes
the newest applied function     a restart runs it instead of the script's
of each operator that is there
all applied migrations          keys without rows since then are still at old levels
functions before and after the  ``revert`` goes back to them
newest applied changes
==============================  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable

from midstream.checkpoint.change_records import (
    NOT_STORED,
    ChangeRecord,
    InsertRecord,
    Outcome,
    RemoveRecord,
    UpdateRecord,
)
from midstream.ids import Digest

__all__ = ["KEPT_REVISIONS", "blobs_on_record"]

KEPT_REVISIONS = 10
"""Number of newest applied changes that can be reverted."""


def blobs_on_record(records: Iterable[ChangeRecord], kept: int = KEPT_REVISIONS) -> frozenset[Digest]:
    """The blobs that a restart or a revert needs, given all records, oldest first."""
    records = list(records)
    pending = [record for record in records if record.outcome is Outcome.PENDING]
    applied = _applied(records)
    newest: dict[str, Digest] = {}
    for record in applied:  # an operator that was inserted runs that function until it is updated, or goes again
        if record.drops:
            newest.clear()
        for edit in record.edits:
            if isinstance(edit, InsertRecord | UpdateRecord):
                newest[edit.operator] = edit.function
            elif isinstance(edit, RemoveRecord):
                newest.pop(edit.operator, None)
    # Those that tuned knobs hold no functions, and there may be very many of them.
    with_functions = [record for record in applied if record.updates or record.plan_edits]
    recent = [*pending, *applied[-kept:], *with_functions[-kept:]]
    configurations = {record.configuration for record in recent if record.configuration is not None}
    functions = {
        digest for record in recent for update in record.updates for digest in (update.function, update.before)
    } | {edit.function for record in recent for edit in record.edits if isinstance(edit, InsertRecord | RemoveRecord)}
    inserts = [edit for record in pending for edit in record.edits if isinstance(edit, InsertRecord)]
    states = {edit.state for edit in inserts if edit.state is not None}
    migrations = {
        update.migrate for record in [*pending, *applied] for update in record.updates if update.migrate is not None
    }
    return frozenset({*newest.values(), *configurations, *functions, *migrations, *states} - {NOT_STORED})


def _applied(records: Iterable[ChangeRecord]) -> list[ChangeRecord]:
    return [record for record in records if record.outcome is Outcome.APPLIED and not record.migration]
