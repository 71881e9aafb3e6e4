"""Forks: a new checkpoint that goes on from a savepoint of another one, which stays as it is.

Nothing is shared that either could break. Files of state and blobs never change once they are written, so on one disk
they get a second name and are copied elsewhere; all others are written anew. The fork is another job: it has a number
of its own, so fences, copies of state, folders of file sinks and tables of databases do not mix. Its manifest names no
files of sinks, because those are the other job's to put in place.
"""

from __future__ import annotations

import posixpath
import uuid

import msgspec
import pyarrow.fs as pafs

from midstream.change.configuration import configuration_of
from midstream.change.timeline import rewound
from midstream.checkpoint.identity import IDENTITY
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Identity
from midstream.checkpoint.retention import blobs_on_record
from midstream.checkpoint.savepoints import Savepoint
from midstream.errors import CheckpointError
from midstream.state.lineage import Lineage
from midstream.storage.blobs import filesystem_of, remove_file, write_atomically
from midstream.storage.documents import read_struct, write_struct
from midstream.version import __version__

__all__ = ["fork"]

UNFINISHED = "fork.json"


class ForkRecord(msgspec.Struct, frozen=True):
    """The content of ``fork.json`` until a fork is whole: its origin, so that the fork can be finished after a
    crash."""

    job: str
    """The job that is forked."""
    savepoint: str
    epoch: int
    identity: Identity
    """Of the fork."""


def fork(checkpoint: str, savepoint: str, new: str) -> Savepoint:
    """Make a new checkpoint that goes on from a savepoint of another job, which may be running.

    Start a flow of the same name and with the same sources on it, with other functions if you like. Its file sinks need
    other folders, and its database sinks other tables: those of the first job are refused. They get the rows of epochs
    after the savepoint. A function that is a sink is called with those epochs; it must not write where the first job
    writes.

    >>> import tempfile
    >>> from midstream import Flow, ListSource, MemorySink, agg
    >>> from midstream.testing import run_local
    >>> def count(epochs, folder, sink):
    ...     flow = Flow("counts")
    ...     keyed = flow.source("in", ListSource(epochs, "k string")).key_by("by", "k")
    ...     keyed.aggregate("count", n=agg.count()).sink("out", sink)
    ...     _ = run_local(flow, checkpoint=folder)
    >>> first, new, sink = tempfile.mkdtemp(), tempfile.mkdtemp(), MemorySink()
    >>> count([[{"k": "a"}], [{"k": "a"}]], first, MemorySink())
    >>> from midstream import take_savepoint
    >>> take_savepoint(first, "two rows").epoch
    1
    >>> fork(first, "two rows", new).name
    'two rows'
    >>> count([[{"k": "a"}]], new, sink)
    >>> sink.rows
    [{'k': 'a', 'n': 3}]

    :param checkpoint: the folder of the job.
    :param savepoint: the name of a savepoint in it.
    :param new: the new folder; missing or empty.
    """
    source = Checkpoint.of_any_flow(checkpoint)
    found = source.savepoints.get(savepoint)
    if missing := source.lacks(found.manifest, found.digests()):
        raise CheckpointError(
            f"the savepoint {savepoint!r} in {checkpoint!r} is not whole: {missing[0]!r} is gone. Restore it from a "
            f"copy, or use another savepoint"
        )
    target = Checkpoint(new, _identity(source, found, new))
    target.lock()
    try:
        _copy(source, found, target)
    finally:
        target.release()
    return found


def _identity(source: Checkpoint, savepoint: Savepoint, new: str) -> Identity:
    """The identity of the fork: a new one, or that of a fork from the same savepoint that was not finished."""
    fs, root = filesystem_of(new)
    info = fs.get_file_info(root)
    if info.type == pafs.FileType.File:
        raise CheckpointError(f"{new!r} is a file; a fork needs a folder that is missing or empty")
    if f"{root}/".startswith(f"{source.root}/"):
        raise CheckpointError(f"{new!r} lies in the checkpoint that is forked; use a folder elsewhere")
    identity = Identity(
        __version__,
        uuid.uuid4().hex,
        source.identity.flow,
        tuple(sorted(configuration_of(savepoint.manifest, source.blobs).graph.sources)),
        source.identity.bins,
        forked_from=f"{savepoint.name} of job {source.identity.job}, after epoch {savepoint.epoch}",
    )
    names = [] if info.type == pafs.FileType.NotFound else fs.get_file_info(pafs.FileSelector(root))
    held = sorted(posixpath.basename(each.path) for each in names)
    if UNFINISHED in held and IDENTITY not in held:
        with fs.open_input_stream(posixpath.join(root, UNFINISHED)) as stream:
            begun = read_struct(stream.read(), ForkRecord, f"{UNFINISHED} in {new!r}")
        if (begun.job, begun.savepoint, begun.epoch) == (source.identity.job, savepoint.name, savepoint.epoch):
            return begun.identity
        raise CheckpointError(
            f"{new!r} holds a fork from {begun.savepoint!r} (epoch {begun.epoch}) that was not finished. Run that one "
            f"again, or remove the folder"
        )
    if held := [name for name in held if name != "lock" and not name.startswith(f"{UNFINISHED}.")]:
        raise CheckpointError(
            f"the folder {new!r} is not empty ({', '.join(held[:5])}{', …' if len(held) > 5 else ''}); a fork needs a "
            f"folder that is missing or empty"
        )
    return identity


def _copy(source: Checkpoint, savepoint: Savepoint, target: Checkpoint) -> None:
    """Each step may be repeated after a crash. The identity comes last: without it the folder is no checkpoint."""
    fs, root = filesystem_of(target.location)
    record = ForkRecord(source.identity.job, savepoint.name, savepoint.epoch, target.identity)
    unfinished = posixpath.join(root, UNFINISHED)
    write_atomically(fs, unfinished, write_struct(record))
    manifest = msgspec.structs.replace(savepoint.manifest, files={})
    later = rewound(source.changes.records(), manifest.revision, "")
    records = [before for before, after in zip(source.changes.records(), later, strict=False) if before is after]
    for digest in sorted({*savepoint.blobs, *(each for each in blobs_on_record(records) if source.blobs.has(each))}):
        source.blobs.copy(digest, target.blobs)
    for data in manifest.lineages.values():
        for entry in Lineage.decode(data).entries:
            source.states.copy(entry.file, target.states)
    known = {each.number for each in target.changes.records()}
    for change in records:
        if change.number not in known:
            target.changes.keep(change)
    target.spark_files.write({name: source.blobs.get(digest) for name, digest in savepoint.spark.items()})
    if savepoint.spark:
        target.spark_files.number(target.identity.job)
    target.commit(manifest)
    target.sync()
    target.identify(target.identity)
    remove_file(fs, unfinished)
