"""A restart of a job of which only the log of changes and the blobs are there."""

from __future__ import annotations

from midstream.change.configuration import Configuration
from midstream.change.restart import Restart, restart_of
from midstream.checkpoint.change_log import ChangeLog
from midstream.ids import Revision
from midstream.storage.blobs import BlobStore


def restored(first: Configuration, store: BlobStore, log: ChangeLog, committed: Revision | None) -> Restart:
    """What the job runs, after the outcomes of changes that were in progress are on record."""
    restart = restart_of(first, store, log.records(), committed)
    for record in restart.settled:
        log.keep(record)
    return restart
