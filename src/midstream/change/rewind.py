"""Rewinds a job that is not running to an earlier epoch: its state, its sources, its changes, and its file sinks.

The plan is written down first (``rewind.json``): no step is taken without it, and no job starts while it is there.
Every step may be repeated. So whatever interrupts a rewind, the next one finishes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from midstream.change.configuration import blobs_of, configuration_of
from midstream.change.offline import claimed
from midstream.change.timeline import rewound
from midstream.checkpoint.change_records import whoami
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.checkpoint.rewind_record import Rewind
from midstream.checkpoint.savepoints import Savepoint
from midstream.checkpoint.sink_files import SinkFolder
from midstream.checkpoint.sink_marker import owner_of
from midstream.checkpoint.spark_files import LOGS
from midstream.errors import CheckpointError
from midstream.flow.model import Sink
from midstream.flow.spec import SinkTable
from midstream.ids import Epoch
from midstream.storage.table_format import FileFormat, TableFormat

__all__ = ["rewind"]


def rewind(checkpoint: str, to: int | str, *, by: str | None = None) -> Rewind:
    """Let a stopped job go on from an earlier epoch, as if it had stopped there.

    The next start runs the epochs after it again, with the rows that the sources give then. Changes that took effect
    later no longer count. Folders of file sinks lose the rows of later epochs at once; a database sink deletes
    them in the transaction of the first epoch that it writes again. A function that is a sink is called with those
    epochs once more, and must replace what it wrote for them and for later ones.

    >>> import tempfile
    >>> from midstream import FileSink, Flow, ListSource, committed_files, take_savepoint
    >>> from midstream.testing import run_local
    >>> def run(epochs, folder):
    ...     flow = Flow("numbers")
    ...     flow.source("in", ListSource(epochs, "n int")).sink("out", FileSink(folder + "-out"))
    ...     _ = run_local(flow, checkpoint=folder)
    >>> folder = tempfile.mkdtemp() + "/job"
    >>> run([[{"n": 1}]], folder)
    >>> _ = take_savepoint(folder, "one row")
    >>> run([[{"n": 2}], [{"n": 3}]], folder)
    >>> rewind(folder, "one row").epoch
    0
    >>> len(committed_files(folder + "-out"))
    1

    :param checkpoint: the folder of the job.
    :param to: the number of an epoch that is still there, or the name of a savepoint.
    :param by: who asked for it, for the history; default: the user of this process.
    """
    with claimed(checkpoint, "Stop it before it is rewound", mid_rewind=True) as location:
        begun = location.rewind_under_way()
        if begun is not None:
            _carry_out(location, begun)
            if to in (begun.epoch, begun.savepoint):
                return begun
        planned = _planned(location, to, by or whoami())
        location.note_rewind(planned)
        _carry_out(location, planned)
        return planned


# ── what to do ────────────────────────────────────────────────────────────────────────────────────────────────────


def _planned(checkpoint: Checkpoint, to: int | str, by: str) -> Rewind:
    """Decide; nothing is changed."""
    newest = checkpoint.newest_manifest()
    if newest is None:
        raise CheckpointError(f"no epoch has been committed in {checkpoint.location!r} yet; there is nothing to rewind")
    savepoint = _savepoint(checkpoint, to)
    if savepoint is None:
        manifest = _whole_manifest(checkpoint, Epoch(int(to)))
        if manifest is None:
            why = "was never committed" if int(to) > newest.epoch or int(to) < 0 else "was swept: it is no longer whole"
            found = checkpoint.manifest(Epoch(int(to))) if Epoch(int(to)) in checkpoint.epochs() else None
            if found is not None and not _has_its_sources(checkpoint, found):
                why = "had other sources, and Spark's log is for the current ones"
            raise CheckpointError(
                f"epoch {to} in {checkpoint.location!r} {why}. {_choices(checkpoint, newest.epoch)}. A savepoint keeps "
                f"an epoch"
            )
    else:
        manifest = _manifest_of(checkpoint, savepoint)
    if manifest.epoch >= newest.epoch:
        raise CheckpointError(
            f"the job in {checkpoint.location!r} stands after epoch {newest.epoch}, so it cannot be rewound to epoch "
            f"{manifest.epoch}. {_choices(checkpoint, newest.epoch)}"
        )
    return Rewind(
        manifest=manifest,
        timeline=checkpoint.identity.timeline + 1,
        folders=tuple(sorted(_folders(checkpoint, manifest, newest))),
        by=by,
        begun_at=time.time(),
        spark={} if savepoint is None else savepoint.spark,
        savepoint=None if savepoint is None else savepoint.name,
    )


def _savepoint(checkpoint: Checkpoint, to: int | str) -> Savepoint | None:
    """The savepoint that is meant: by its name, or by an epoch of which nothing else is left."""
    if isinstance(to, str):
        return checkpoint.savepoints.get(to)
    if _whole_manifest(checkpoint, Epoch(to)) is not None:
        return None
    found = [each for each in checkpoint.savepoints.all() if each.epoch == to and not each.is_abandoned]
    return found[0] if found else None


def _manifest_of(checkpoint: Checkpoint, savepoint: Savepoint) -> Manifest:
    if savepoint.is_abandoned:
        raise CheckpointError(
            f"the job was rewound to an epoch before the savepoint {savepoint.name!r} (epoch {savepoint.epoch}) was "
            f"taken, and what its sinks had written up to there was taken back, so it cannot come back. A fork can "
            f"begin there: midstream fork {checkpoint.location}@{savepoint.name} NEW"
        )
    if not _has_its_log(checkpoint, savepoint):
        raise CheckpointError(
            f"the sources of the job have changed since the savepoint {savepoint.name!r} (epoch {savepoint.epoch}) was "
            f"taken, and Spark's log is for those of now. A fork can begin there: midstream fork "
            f"{checkpoint.location}@{savepoint.name} NEW"
        )
    if missing := checkpoint.lacks(savepoint.manifest, savepoint.digests()):
        raise CheckpointError(
            f"the savepoint {savepoint.name!r} in {checkpoint.location!r} is not whole: {missing[0]!r} is gone. "
            f"Restore it from a copy, or use another one"
        )
    return savepoint.manifest


def _whole_manifest(checkpoint: Checkpoint, epoch: Epoch) -> Manifest | None:
    """The manifest of an epoch from which the job can continue: all that it names, and Spark's log of it, are still
    there."""
    manifest = checkpoint.manifest(epoch) if epoch in checkpoint.epochs() else None
    if manifest is None or not checkpoint.spark_files.leads_after(epoch):
        return None
    if checkpoint.lacks(manifest, manifest.digests()):
        return None
    if checkpoint.lacks(manifest, blobs_of(manifest, checkpoint.blobs)):
        return None
    return manifest if _has_its_sources(checkpoint, manifest) else None


def _has_its_sources(checkpoint: Checkpoint, manifest: Manifest) -> bool:
    """Whether the job read its current sources in the epoch of a manifest."""
    return tuple(sorted(configuration_of(manifest, checkpoint.blobs).graph.sources)) == checkpoint.identity.sources


def _has_its_log(checkpoint: Checkpoint, savepoint: Savepoint) -> bool:
    """Whether sources have not changed since a savepoint. That they are the same again is not enough: how far others
    were read meanwhile is still on record, so rows that are taken back would not be read again."""
    return savepoint.log == checkpoint.identity.log and _has_its_sources(checkpoint, savepoint.manifest)


def _choices(checkpoint: Checkpoint, newest: Epoch) -> str:
    """The epochs and savepoints that the job can be rewound to, for a message."""
    epochs = [str(each) for each in checkpoint.epochs() if each < newest and _whole_manifest(checkpoint, each)]
    named = [
        f"{each.name!r} (epoch {each.epoch})"
        for each in checkpoint.savepoints.all()
        if each.epoch < newest and not each.is_abandoned and _has_its_log(checkpoint, each)
    ]
    if not (epochs or named):
        return "There is no epoch that it could be rewound to"
    parts = [f"{what} {', '.join(each)}" for what, each in (("epochs", epochs), ("savepoints", named)) if each]
    return f"It can be rewound to {' and '.join(parts)}"


def _folders(checkpoint: Checkpoint, target: Manifest, newest: Manifest) -> Iterator[str]:
    """The folders of file sinks that may have rows of later epochs, as far as they are this job's."""
    found = dict.fromkeys(table.location for each in (target, newest) for table in _tables(checkpoint, each))
    for epoch in checkpoint.epochs():
        if target.epoch < epoch < newest.epoch and (manifest := checkpoint.manifest(epoch)) is not None:
            found.update(dict.fromkeys(manifest.files))
    for folder in dict.fromkeys([*found, *newest.files]):
        owner = owner_of(folder)
        if owner is not None and owner.job == checkpoint.identity.job:
            yield folder


def _tables(checkpoint: Checkpoint, manifest: Manifest) -> list[SinkTable]:
    graph = configuration_of(manifest, checkpoint.blobs).graph
    return [op.table for op in graph.of(Sink) if op.table is not None]


# ── doing it ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _carry_out(checkpoint: Checkpoint, rewind: Rewind) -> None:
    """Do all that is left of a rewind.

    1. The folders of file sinks lose the rows of later epochs.
    2. Changes that took effect later are on record as rewound; savepoints of later epochs as abandoned.
    3. Manifests: that of the epoch is there, and none of later ones.
    4. Spark's log: what leads on from the epoch is there, and nothing later.
    5. The job is on another timeline, so copies of its state that workers have do not count.
    6. All of this is on disk. The rewind is done.
    """
    # 1.
    for folder in rewind.folders:
        SinkFolder(SinkTable(folder, TableFormat(FileFormat.PARQUET)), durable=checkpoint.durable).rewind(rewind.epoch)
    # 2.
    records = checkpoint.changes.records()
    later = rewound(records, rewind.manifest.revision, f"{rewind.by} rewound the job to {rewind.target}")
    for before, after in zip(records, later, strict=True):
        if before != after:
            checkpoint.changes.keep(after)
    for savepoint in checkpoint.savepoints.all():
        if savepoint.epoch > rewind.epoch and not savepoint.is_abandoned:
            checkpoint.savepoints.keep(msgspec.structs.replace(savepoint, is_abandoned=True))
    # 3.
    checkpoint.commit(rewind.manifest)
    checkpoint.remove_after(rewind.epoch)
    # 4.
    logs = {name: digest for name, digest in rewind.spark.items() if name.startswith(LOGS)}
    checkpoint.spark_files.write({name: checkpoint.blobs.get(digest) for name, digest in logs.items()})
    checkpoint.spark_files.remove_after(rewind.epoch)
    # 5.
    checkpoint.identify(msgspec.structs.replace(checkpoint.identity, timeline=rewind.timeline))
    # 6.
    checkpoint.note_rewind(None)
