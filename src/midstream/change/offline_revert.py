"""Reverts changes of a job that is not running. Needs only its checkpoint, and loads no functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from midstream.change.offline import claimed
from midstream.change.revert import TakenBack, taken_back
from midstream.checkpoint.change_records import whoami
from midstream.checkpoint.layouts import stored_layouts
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.errors import FlowError
from midstream.flow.functions import check_callable, pack
from midstream.ids import Digest, Revision

__all__ = ["revert_offline"]


def revert_offline(
    location: str,
    revision: int,
    migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
    *,
    by: str | None = None,
) -> TakenBack:
    """Make the next start of a job run what it ran at ``revision``, and record that.

    Used by ``midstream revert CHECKPOINT``. Refused while a job holds the checkpoint's lock; storage that is not local
    has no locks, so the caller must know that no job runs. A refusal changes nothing, except that it may leave
    stored functions that nothing refers to.
    """
    instead = (
        f"Take its changes back while it runs: job.revert({revision}), or 'midstream revert NAME {revision}' if it is "
        f"served; or stop it first"
    )
    with claimed(location, instead) as checkpoint:
        newest = checkpoint.newest_manifest()
        taken = taken_back(
            checkpoint.changes.records(),
            Revision(revision),
            None if newest is None else newest.revision,
            checkpoint.blobs,
            _stored(checkpoint, newest, migrate or {}),
            by=by or whoami(),
            now=time.time(),
            how="offline",
        )
        if taken.record is None:
            raise FlowError(f"the job runs what it ran at revision {revision}; there is nothing to revert")
        for record in taken.changed:
            checkpoint.changes.keep(record)
        return taken


def _stored(
    checkpoint: Checkpoint, newest: Manifest | None, migrate: Mapping[str, Callable[[Any, Any], None]]
) -> dict[str, Digest]:
    """Check migrations and store them. Without a committed epoch there is no state to migrate."""
    if not migrate:
        return {}
    layouts = {} if newest is None else stored_layouts(checkpoint, newest)
    processes = [name for name, layout in layouts.items() if layout.operator.spec.keeps_user_state]
    for operator, function in migrate.items():
        if operator not in processes:
            raise FlowError(
                f"migrate= names {operator}, which keeps no state of the user's in {checkpoint.location!r}; those that "
                f"do: {', '.join(processes) or 'none'}"
            )
        check_callable(function, operator, "a key", "its state")
    return {operator: checkpoint.blobs.put(pack(function, operator)) for operator, function in migrate.items()}
