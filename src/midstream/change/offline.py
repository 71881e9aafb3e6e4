"""The checkpoint of a job that is not running, for commands that change it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError

__all__ = ["claimed"]


@contextlib.contextmanager
def claimed(location: str, instead: str, *, mid_rewind: bool = False) -> Iterator[Checkpoint]:
    """Claim a checkpoint for this process until the end of the block.

    Refused while a job holds its lock; ``instead`` says what to do then. Storage that is not local has no locks, so
    there the caller must know that no job runs.
    """
    checkpoint = Checkpoint.of_any_flow(location)
    try:
        checkpoint.claim(mid_rewind=mid_rewind)
    except CheckpointError as error:
        if "holder" not in error.fields:
            raise
        raise CheckpointError(
            f"a job is running on the checkpoint {location!r} ({error.fields['holder']}). {instead}"
        ) from None
    try:
        yield checkpoint
    finally:
        checkpoint.release()
