"""Drops the state that a removed operator has left, in the checkpoint of a job that is not running."""

from __future__ import annotations

import time

from midstream.change.configuration import FIRST_REVISION
from midstream.change.offline import claimed
from midstream.change.timeline import settled
from midstream.checkpoint.change_records import ChangeRecord, ForgetRecord, Outcome, whoami
from midstream.checkpoint.layouts import kept_layouts, layouts_in_use
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.data.ddl import closest
from midstream.errors import CheckpointError, StateError
from midstream.ids import Revision
from midstream.planner.change_plan import Scheduler

__all__ = ["forget_state"]


def forget_state(checkpoint: str, operator: str, *, by: str | None = None) -> ChangeRecord:
    """Drop the state that an operator left when it was removed from the flow; return its record in the history.

    An operator that is added under its name starts with empty state. Files that no savepoint needs are removed after
    the first epoch of the next start. A rewind to an earlier epoch brings the state back if its files are still there.

    >>> import tempfile
    >>> from midstream import Flow, ListSource, NoopSink, agg, forget_state
    >>> from midstream.testing import run_local
    >>> def run(folder, counts):
    ...     flow = Flow("words")
    ...     keyed = flow.source("in", ListSource([[{"k": "a"}]], "k string")).key_by("by k", "k")
    ...     (keyed.aggregate("count", n=agg.count()) if counts else keyed).sink("out", NoopSink())
    ...     _ = run_local(flow, checkpoint=folder)
    >>> folder = tempfile.mkdtemp()
    >>> run(folder, counts=True)
    >>> run(folder, counts=False)
    >>> str(forget_state(folder, "count").edits[0])
    'kept state of count: dropped'

    :param checkpoint: the folder of the job, which must not be running.
    :param operator: the name that the removed operator had.
    :param by: who asked for it, for the history; default: the user of this process.
    """
    with claimed(checkpoint, "Stop it before dropping state that it keeps") as location:
        newest = location.newest_manifest()
        if newest is None:
            raise CheckpointError(f"no epoch has been committed in {checkpoint!r} yet; there is no state to drop")
        records, pending = settled(location.changes.records(), newest.revision)
        _require_kept(location, newest, operator)
        if pending is not None:
            raise CheckpointError(
                f"the change to revision {pending.revision} ({pending.subjects}) was in progress when the job stopped. "
                f"The next start continues it, and may roll it back: start the job and let the change end first"
            )
        record = ChangeRecord(
            number=location.changes.next_number(),
            revision=Revision(max([newest.revision, FIRST_REVISION, *(each.revision for each in records)]) + 1),
            requested_at=time.time(),
            by=by or whoami(),
            scheduler=str(Scheduler.EPOCH),
            edits=(ForgetRecord(operator),),
            plan=f"the state that {operator!r} left when it was removed is dropped",
            outcome=Outcome.APPLIED,
        )
        location.changes.keep(record)
        return record


def _require_kept(checkpoint: Checkpoint, newest: Manifest, operator: str) -> None:
    if operator in layouts_in_use(checkpoint, newest):
        raise StateError(
            f"operator {operator!r} is in the flow and uses its state; only state that removed operators have left can "
            f"be dropped. Remove it first: job.update(Remove({operator!r}))"
        )
    kept = kept_layouts(checkpoint, newest)
    if operator not in kept:
        near = closest(operator, list(kept))
        raise StateError(
            f"no removed operator {operator!r} has left state in {checkpoint.location!r}; those that have: "
            f"{', '.join(kept) or 'none'}" + (f". Did you mean {near!r}?" if near else "")
        )
