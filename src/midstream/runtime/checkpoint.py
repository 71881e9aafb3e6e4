"""The checkpoint location: whose it is, and what each committed epoch was.

Layout::

    midstream.json        identity: which flow, which sources, which job; written once
    blobs/ab/ab12…        functions, tables and stage programs, by digest
    epochs/0000000007     manifest of epoch 7, written before Spark commits the batch
    changes/0000000001.json  a change that was made while the job ran
    audit/…               which rows met which operator under which revision, if that was wanted
    state/FC/…            what tasks changed of an operator's state, and snapshots of it
    lock                  held by the driver that uses this checkpoint, on file systems that have locks
    journal/0000000008.0  journal of a run of epoch 8 that failed; the newest few are kept
    spark/                Spark's own checkpoint: offsets and commits
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import posixpath
import socket
import uuid
from typing import IO

import msgspec
import pyarrow.fs as pafs

from midstream.change.log import ChangeLog
from midstream.data.blobs import BlobStore, below, filesystem_of, spark_path, write_atomically
from midstream.data.ownership import make_private, warn_if_others_can_write
from midstream.errors import CheckpointError
from midstream.flow.model import Graph, Source
from midstream.ids import Digest, Epoch, Revision, Run
from midstream.state.files import StateFiles
from midstream.version import __version__

FORMAT = 2
KEPT_MANIFESTS = 100
KEPT_JOURNALS = 20


class Identity(msgspec.Struct, frozen=True):
    """Whose checkpoint this is."""

    format: int
    version: str
    job: str
    flow: str
    sources: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What a committed epoch was: enough to say from where a restart goes on."""

    epoch: Epoch
    revision: Revision
    programs: tuple[Digest, ...]
    bins: tuple[int, ...]
    committed_at: float
    rows: dict[str, tuple[int, int]]
    """Per operator: rows in, rows out."""
    lineages: dict[str, bytes] = {}
    """Per operator that keeps state: its encoded lineage."""
    event_times: dict[str, int] = {}
    """Per source: the latest event time seen, in microseconds."""


class Checkpoint:
    """The checkpoint location of one flow. :meth:`look` reads and refuses; :meth:`claim` is what first writes.

    Spark numbers a query's sources by position, so a flow whose sources changed cannot go on from old offsets: it is
    refused, as is a flow of another name. Everything else about a flow may change between two lives of a job.
    """

    def __init__(self, location: str, identity: Identity) -> None:
        self.location = location
        self.identity = identity
        self._fs, self._root = filesystem_of(location)
        # Workers have a working directory of their own, so a relative path must not reach them.
        self._shared = self._root if isinstance(self._fs, pafs.LocalFileSystem) else location
        self.blobs = BlobStore(below(self._shared, "blobs"))
        self.states = StateFiles(below(self._shared, "state"))
        self.changes = ChangeLog(below(self._shared, "changes"))
        self.audit_location = below(self._shared, "audit")
        self._lock: IO[bytes] | None = None

    @property
    def spark_location(self) -> str:
        """Where Spark keeps its own checkpoint.

        Always beside ours, because its offsets and our manifests are worth nothing without each other.
        """
        return below(spark_path(self._shared), "spark")

    @classmethod
    def look(cls, location: str, graph: Graph) -> Checkpoint:
        """The checkpoint of a flow: the one that is there, or a new one for an empty or missing folder."""
        fs, root = filesystem_of(location)
        sources = tuple(sorted(op.name for op in graph.of(Source)))
        path = posixpath.join(root, "midstream.json")
        try:
            found = _read_identity(fs, path, location)
            if found is None:
                _require_empty(fs, root, location)
                found = Identity(FORMAT, __version__, uuid.uuid4().hex, graph.name, sources)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {location!r} cannot be used: {error}") from error
        _require_same(found, graph.name, sources, location)
        return cls(location, found)

    @classmethod
    def of_any_flow(cls, location: str) -> Checkpoint:
        """A checkpoint that is there, to be looked at."""
        fs, root = filesystem_of(location)
        try:
            found = _read_identity(fs, posixpath.join(root, "midstream.json"), location)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {location!r} cannot be read: {error}") from error
        if found is None:
            raise CheckpointError(f"{location!r} is not the checkpoint of a job: it has no midstream.json")
        _require_format(found, location)
        return cls(location, found)

    def claim(self) -> None:
        """Make the location this flow's own, and keep other drivers out until :meth:`release`."""
        self._lock = _lock(self._fs, posixpath.join(self._root, "lock"), self.location)
        path = posixpath.join(self._root, "midstream.json")
        if self._fs.get_file_info(path).type == pafs.FileType.NotFound:
            write_atomically(self._fs, path, msgspec.json.encode(self.identity))

    def release(self) -> None:
        """Let other drivers use it. The system does so, too, when this process dies."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def commit(self, manifest: Manifest) -> None:
        """Write an epoch's manifest; from here on the epoch's results count. Old manifests are removed."""
        data = msgspec.json.encode(manifest)
        write_atomically(self._fs, self._manifest_path(manifest.epoch), data + b"\n" + _checksum(data))
        stale = self._manifest_path(Epoch(manifest.epoch - KEPT_MANIFESTS))
        if manifest.epoch >= KEPT_MANIFESTS and self._fs.get_file_info(stale).type != pafs.FileType.NotFound:
            self._fs.delete_file(stale)

    def manifest(self, epoch: Epoch) -> Manifest | None:
        """The manifest of an epoch, if it was committed and not yet removed."""
        path = self._manifest_path(epoch)
        if self._fs.get_file_info(path).type == pafs.FileType.NotFound:
            return None
        with self._fs.open_input_stream(path) as stream:
            data, _, checksum = stream.read().rpartition(b"\n")
        if checksum != _checksum(data):
            raise CheckpointError(
                f"the manifest of epoch {epoch} in {self.location!r} is damaged: its checksum is {_checksum(data)!r}, "
                f"recorded is {checksum[:64]!r}. Restore the file {posixpath.basename(path)!r} from a copy"
            )
        return msgspec.json.decode(data, type=Manifest)

    def manifest_before(self, epoch: Epoch) -> Manifest | None:
        """What an epoch goes on from: the manifest of the one before; None before the first."""
        if epoch == 0:
            return None
        found = self.manifest(Epoch(epoch - 1))
        if found is None:
            raise CheckpointError(
                f"the checkpoint {self.location!r} has no manifest of epoch {epoch - 1}, from which epoch {epoch} goes "
                f"on; restore epochs/{epoch - 1:010d} from a copy"
            )
        return found

    def newest_manifest(self) -> Manifest | None:
        """The manifest of the last epoch that was committed here; of a crash, Spark may still run that epoch again."""
        selector = pafs.FileSelector(posixpath.join(self._root, "epochs"), allow_not_found=True)
        names = [posixpath.basename(info.path) for info in self._fs.get_file_info(selector)]
        epochs = [int(name) for name in names if name.isdigit()]
        return self.manifest(Epoch(max(epochs))) if epochs else None

    def keep_journal(self, epoch: Epoch, run: Run, data: bytes) -> str:
        """Keep the journal of a run that failed; returns where. Old ones are removed."""
        folder = posixpath.join(self._root, "journal")
        path = posixpath.join(folder, f"{epoch:010d}.{run}")
        write_atomically(self._fs, path, data)
        kept = sorted(self._fs.get_file_info(pafs.FileSelector(folder)), key=lambda info: info.mtime_ns or 0)
        for stale in kept[:-KEPT_JOURNALS]:
            self._fs.delete_file(stale.path)
        return path

    def _manifest_path(self, epoch: Epoch) -> str:
        return posixpath.join(self._root, "epochs", f"{epoch:010d}")


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _lock(fs: pafs.FileSystem, path: str, location: str) -> IO[bytes] | None:
    """Lock a file for as long as it is open. File systems other than local ones have no such thing."""
    if not isinstance(fs, pafs.LocalFileSystem):
        return None
    try:
        make_private(posixpath.dirname(path))
        warn_if_others_can_write(posixpath.dirname(path))
        file = open(path, "a+b")  # noqa: SIM115 (held open as long as the job lives)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {location!r} cannot be used: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read(100).decode(errors="replace").strip()
        file.close()
        raise CheckpointError(
            f"the checkpoint {location!r} is in use by {holder or 'another process'}; stop that job first, or give "
            f"this one a checkpoint of its own"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()
    return file


def _read_identity(fs: pafs.FileSystem, path: str, location: str) -> Identity | None:
    if fs.get_file_info(path).type == pafs.FileType.NotFound:
        return None
    with fs.open_input_stream(path) as stream:
        data = stream.read()
    try:
        return msgspec.json.decode(data, type=Identity)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the checkpoint {location!r} is damaged, or was written by another version: midstream.json says {error}"
        ) from error


def _require_empty(fs: pafs.FileSystem, root: str, location: str) -> None:
    info = fs.get_file_info(root)
    if info.type == pafs.FileType.File:
        raise CheckpointError(f"the checkpoint {location!r} is a file; give a folder")
    if info.type == pafs.FileType.NotFound:
        return
    held = sorted({posixpath.basename(entry.path) for entry in fs.get_file_info(pafs.FileSelector(root))} - {"lock"})
    if held:
        raise CheckpointError(
            f"the checkpoint {location!r} holds other things ({', '.join(held[:5])}{', …' if len(held) > 5 else ''}) "
            f"and no midstream.json; give an empty folder, or the checkpoint of this flow"
        )


def _require_format(found: Identity, location: str) -> None:
    if found.format != FORMAT:
        raise CheckpointError(
            f"the checkpoint {location!r} has format {found.format} (midstream {found.version}); this midstream "
            f"{__version__} reads format {FORMAT}"
        )


def _require_same(found: Identity, flow: str, sources: tuple[str, ...], location: str) -> None:
    _require_format(found, location)
    if found.flow != flow:
        raise CheckpointError(
            f"the checkpoint {location!r} belongs to the flow {found.flow!r}, not to {flow!r}; give each flow a "
            f"checkpoint of its own"
        )
    if found.sources != sources:
        raise CheckpointError(
            f"the checkpoint {location!r} was made with the sources {', '.join(found.sources)}; the flow now has "
            f"{', '.join(sources)}. Offsets cannot be matched to other sources: use a new checkpoint, or the "
            f"old sources"
        )
