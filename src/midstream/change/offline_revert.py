"""Taking changes back of a job that is not running: its checkpoint is all that is needed, and nothing is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from midstream.change.revert import TakenBack, taken_back
from midstream.checkpoint.change_records import whoami
from midstream.checkpoint.layouts import stored_layouts
from midstream.checkpoint.location import Checkpoint, Manifest
from midstream.errors import CheckpointError, FlowError
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
    """Let the next start of a job run what it ran at ``revision``, and put that on record.

    Behind ``midstream revert CHECKPOINT``. Refused while a job holds the checkpoint's lock; storage that is not local
    has no locks, so there the caller must know that no job runs. Whatever is refused leaves all as it was, but for
    stored functions that nothing refers to.
    """
    checkpoint = Checkpoint.of_any_flow(location)
    try:
        checkpoint.claim()
    except CheckpointError as error:
        if "holder" not in error.fields:
            raise
        raise CheckpointError(
            f"a job is running on the checkpoint {location!r} ({error.fields['holder']}). Take its changes back while "
            f"it runs: job.revert({revision}), or 'midstream revert NAME {revision}' if it is served; or stop it first"
        ) from None
    try:
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
    finally:
        checkpoint.release()


def _stored(
    checkpoint: Checkpoint, newest: Manifest | None, migrate: Mapping[str, Callable[[Any, Any], None]]
) -> dict[str, Digest]:
    """Check migrations and store them. Nothing has been kept if there is no committed epoch."""
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
