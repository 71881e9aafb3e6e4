"""Takes savepoints: of a running job, by its driver, and of one that is not running."""

from __future__ import annotations

import time

from midstream.change.configuration import blobs_of, configuration_of
from midstream.change.offline import claimed
from midstream.checkpoint.change_records import whoami
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.checkpoint.savepoints import Savepoint, check_savepoint_name
from midstream.errors import CheckpointError
from midstream.storage.blobs import Blob

__all__ = ["delete_savepoint", "savepoint_of", "savepoints", "take_savepoint"]


def savepoint_of(
    checkpoint: Checkpoint, manifest: Manifest | None, name: str, *, by: str, note: str | None = None
) -> Savepoint:
    """Write a savepoint of a committed epoch.

    The caller holds the epoch's files of state, and is preparing (:mod:`midstream.storage.holds`), so that
    nothing is swept before the savepoint is written. A refusal changes nothing.
    """
    check_savepoint_name(name)
    checkpoint.savepoints.require_free(name)
    if manifest is None:
        raise CheckpointError(
            f"no epoch has been committed in {checkpoint.location!r} yet, so there is nothing to take a savepoint of"
        )
    if manifest.closing:
        raise CheckpointError(
            f"epoch {manifest.epoch} has closed all windows, so nothing could go on from a savepoint of it; rewind to "
            f"an earlier epoch first"
        )
    store = checkpoint.blobs
    blobs = blobs_of(manifest, store)
    for digest in blobs:
        store.holds.touch(digest)
    log, files = checkpoint.log_after(manifest.epoch, configuration_of(manifest, store).graph.sources)
    spark = {file: store.put(Blob.of(data)) for file, data in files.items()}
    savepoint = Savepoint(name, time.time(), by, manifest, tuple(sorted(blobs)), spark, note, log=log)
    if missing := checkpoint.lacks(savepoint.manifest, savepoint.digests()):
        raise CheckpointError(f"epoch {manifest.epoch} is not whole in {checkpoint.location!r}: {missing[0]!r} is gone")
    checkpoint.savepoints.keep(savepoint)
    return savepoint


def take_savepoint(checkpoint: str, name: str, *, note: str | None = None, by: str | None = None) -> Savepoint:
    """Take a savepoint of a job that is not running, after its last committed epoch.

    Of a running job: :meth:`midstream.Job.savepoint`.

    >>> import tempfile
    >>> from midstream import Flow, ListSource, NoopSink, savepoints, take_savepoint
    >>> from midstream.testing import run_local
    >>> flow, folder = Flow("numbers"), tempfile.mkdtemp()
    >>> flow.source("in", ListSource([[{"n": 1}], [{"n": 2}]], "n int")).sink("out", NoopSink())
    >>> _ = run_local(flow, checkpoint=folder)
    >>> take_savepoint(folder, "before tuning").epoch
    1
    >>> [each.name for each in savepoints(folder)]
    ['before tuning']
    """
    instead = f"While it runs: job.savepoint({name!r}), or 'midstream savepoint JOB' if it is served; or stop it first"
    with claimed(checkpoint, instead) as found:
        return savepoint_of(found, found.newest_manifest(), name, by=by or whoami(), note=note)


def savepoints(checkpoint: str) -> list[Savepoint]:
    """The savepoints of a job, running or not, oldest epoch first.

    >>> import tempfile
    >>> from midstream import Flow, ListSource, NoopSink, savepoints, take_savepoint
    >>> from midstream.testing import run_local
    >>> flow, folder = Flow("numbers"), tempfile.mkdtemp()
    >>> flow.source("in", ListSource([[{"n": 1}]], "n int")).sink("out", NoopSink())
    >>> _ = run_local(flow, checkpoint=folder), take_savepoint(folder, "first")
    >>> [(each.name, each.epoch) for each in savepoints(folder)]
    [('first', 0)]
    """
    return Checkpoint.of_any_flow(checkpoint).savepoints.all()


def delete_savepoint(checkpoint: str, name: str) -> Savepoint:
    """Delete a savepoint of a job that is not running; its next start removes what only the savepoint needed.

    Of a running job: :meth:`midstream.Job.delete_savepoint`.

    >>> import tempfile
    >>> from midstream import Flow, ListSource, NoopSink, delete_savepoint, savepoints, take_savepoint
    >>> from midstream.testing import run_local
    >>> flow, folder = Flow("numbers"), tempfile.mkdtemp()
    >>> flow.source("in", ListSource([[{"n": 1}]], "n int")).sink("out", NoopSink())
    >>> _ = run_local(flow, checkpoint=folder), take_savepoint(folder, "first")
    >>> delete_savepoint(folder, "first").name, savepoints(folder)
    ('first', [])
    """
    instead = (
        f"While it runs: job.delete_savepoint({name!r}), or 'midstream savepoints JOB --delete' if it is served; or "
        f"stop it first"
    )
    with claimed(checkpoint, instead) as found:
        return found.savepoints.delete(name)
