"""The checkpoint location: the identity of its flow, and the manifests of committed epochs.

Layout::

    midstream.json        identity: which flow, which sources, which job; written once
    blobs/ab/ab12…        functions, tables and stage programs, by digest
    epochs/0000000007     manifest of epoch 7, written before Spark commits the batch
    changes/0000000001.json  an entry of the log of changes that were made while the job ran
    audit/…               in audit mode: which operator processed which row under which revision
    state/FC/…            deltas and snapshots of an operator's state
    lock                  held by the driver that uses this checkpoint, on file systems that have locks
    journal/0000000008.0  journal of a run of epoch 8 that failed; the newest few are kept
    spark/                Spark's own checkpoint: offsets and commits

On a local disk, unless that is turned off, everything that a manifest names is on disk before the manifest is, and the
manifest is on disk before anything that it supersedes is removed (:mod:`midstream.storage.disk`). So after a loss of
power the newest manifest is whole, and the job can continue from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import posixpath
import re
import socket
import uuid
from typing import IO

import msgspec
import pyarrow.fs as pafs

from midstream.checkpoint.change_log import ChangeLog
from midstream.data.key_space import KeySpace, check_bins
from midstream.errors import CheckpointError, FlowError
from midstream.flow.model import Graph, Source
from midstream.ids import BINS, Digest, Epoch, Revision, Run
from midstream.state.files import StateFiles
from midstream.state.lineage import Lineage
from midstream.storage import disk
from midstream.storage.blobs import (
    ASIDE,
    BlobStore,
    below,
    filesystem_of,
    is_local,
    remove_file,
    set_aside,
    spark_path,
    write_atomically,
)
from midstream.storage.checksums import with_checksum, without_checksum
from midstream.storage.documents import read_struct, unreadable, write_struct
from midstream.storage.ownership import warn_if_others_can_write
from midstream.storage.table_files import SinkFile
from midstream.version import __version__

_log = logging.getLogger("midstream")

KEPT_MANIFESTS = 100
KEPT_JOURNALS = 20
FOLDERS = ("blobs", "changes", "epochs", "state")

_UNFINISHED_IDENTITY = re.compile(r"midstream\.json\.\d+\.tmp")


class Identity(msgspec.Struct, frozen=True):
    """The flow that owns a checkpoint, and the version of midstream that made it."""

    version: str
    job: str
    flow: str
    sources: tuple[str, ...]
    bins: int = BINS
    """Number of bins of the job's key spaces."""


class Manifest(msgspec.Struct, frozen=True):
    """The record of a committed epoch: enough for a restart to continue from it."""

    epoch: Epoch
    revision: Revision
    programs: tuple[Digest, ...]
    configuration: Digest
    """The document of the job's configuration: graph, functions, and the owner of each bin of each stage."""
    committed_at: float
    rows: dict[str, tuple[int, int]]
    """Per operator: rows in, rows out."""
    lineages: dict[str, bytes] = {}
    """Per operator that keeps state: its encoded lineage."""
    event_times: dict[str, int] = {}
    """Per source: the latest event time seen, in microseconds."""
    offsets: str = ""
    """Identifies the rows of the epoch: a digest of their entry in Spark's log."""
    heard: dict[str, int] = {}
    """Per source: the clock of the last epoch in which it had rows, in microseconds."""
    watermark: int | None = None
    """The watermark after this epoch."""
    files: dict[str, tuple[SinkFile, ...]] = {}
    """Per file sink that got rows: its files, staged or in place already."""
    closing: bool = False
    """Whether this epoch closed all windows, so that no other epoch can follow."""


class Checkpoint:
    """The checkpoint location of one flow. :meth:`look` only reads, and may refuse; :meth:`claim` writes first.

    Spark numbers a query's sources by position, so a flow whose sources changed cannot continue from old offsets: it is
    refused, as is a flow with another name. Everything else about a flow may change from one start to the next.

    ``durable``: what was committed on a local disk survives a loss of power. Without it, only crashes of processes.
    """

    def __init__(self, location: str, identity: Identity, *, durable: bool = True) -> None:
        self.location = location
        self.identity = identity
        self.durable = durable
        self._fs, self._root = filesystem_of(location)
        self._is_claimed = False
        # Workers have their own working directory, so a relative path must not reach them.
        self._shared = self._root if is_local(self._fs) else location
        self.blobs = BlobStore(below(self._shared, "blobs"), durable=durable)
        self.states = StateFiles(below(self._shared, "state"), durable=durable, space=KeySpace(identity.bins))
        self.changes = ChangeLog(below(self._shared, "changes"), durable=durable)
        self.audit_location = below(self._shared, "audit")
        self._lock: IO[bytes] | None = None

    @property
    def spark_location(self) -> str:
        """Where Spark keeps its own checkpoint.

        Always next to ours, because its offsets and our manifests are useless without each other.
        """
        return below(spark_path(self._shared), "spark")

    @classmethod
    def look(cls, location: str, graph: Graph, *, bins: int | None = None, durable: bool = True) -> Checkpoint:
        """The checkpoint of a flow: the existing one, or a new one for an empty or missing folder.

        ``bins`` is the number of bins that the job must have, or None for what it has, or the usual number.
        """
        if bins is not None:
            check_bins(bins)
        fs, root = filesystem_of(location)
        sources = tuple(sorted(op.name for op in graph.of(Source)))
        path = posixpath.join(root, "midstream.json")
        try:
            found = _read_identity(fs, path, location)
            if found is None:
                _require_empty(fs, root, location)
                found = Identity(__version__, uuid.uuid4().hex, graph.name, sources, BINS if bins is None else bins)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {location!r} cannot be used: {error}") from error
        _require_same(found, graph.name, sources, location)
        if bins is not None and bins != found.bins:
            raise CheckpointError(
                f"the checkpoint {location!r} belongs to a job with {found.bins} bins, not with {bins}. The number of "
                f"bins is chosen when a job is made, and never changes: leave out bins={bins}, or use a new checkpoint"
            )
        return cls(location, found, durable=durable)

    @classmethod
    def of_any_flow(cls, location: str) -> Checkpoint:
        """An existing checkpoint, to be read."""
        fs, root = filesystem_of(location)
        try:
            found = _read_identity(fs, posixpath.join(root, "midstream.json"), location)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {location!r} cannot be read: {error}") from error
        if found is None:
            raise CheckpointError(f"{location!r} is not the checkpoint of a job: it has no midstream.json")
        return cls(location, found)

    def claim(self) -> None:
        """Make the location this flow's own, and keep other drivers out until :meth:`release`.

        Also syncs to disk what an earlier process left in the kernel's cache: it may have been killed between two
        steps, or have run without durability.
        """
        self._lock = _lock(self._fs, posixpath.join(self._root, "lock"), self.location, self.durable)
        try:
            self._settle()
        except BaseException:
            self.release()
            raise
        self._is_claimed = True

    def _settle(self) -> None:
        path = posixpath.join(self._root, "midstream.json")
        is_new = self._fs.get_file_info(path).type == pafs.FileType.NotFound
        if is_new:
            write_atomically(self._fs, path, write_struct(self.identity), durable=self.durable)
        if is_local(self._fs):
            self._mend_spark_log()
        if is_local(self._fs) and self.durable:
            if not is_new:
                disk.sync_filesystem(self._root)
            for name in FOLDERS:  # so that they exist, on disk, before workers use them
                disk.make_folder(posixpath.join(self._root, name), durable=True)

    def release(self) -> None:
        """Release the lock for other drivers. The system does so, too, when this process dies."""
        self._is_claimed = False
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def commit(self, manifest: Manifest) -> None:
        """Write an epoch's manifest; from then on the epoch's results count."""
        data = with_checksum(write_struct(manifest))
        write_atomically(self._fs, self._manifest_path(manifest.epoch), data, durable=self.durable)

    def manifest(self, epoch: Epoch) -> Manifest | None:
        """The manifest of an epoch, if it was committed and has not been removed.

        The newest one may be torn if Spark has not committed its epoch: then this returns None, and the epoch is run
        again. If the checkpoint is claimed, the torn file is set aside.
        """
        data = _content(self._fs, self._manifest_path(epoch))
        if data is None:
            return None
        if (content := without_checksum(data)) is not None:
            return self._decoded(epoch, content)
        if not self._may_run_again(epoch):
            raise CheckpointError(
                f"the manifest of epoch {epoch} in {self.location!r} is damaged: its checksum does not match its "
                f"{len(data)} bytes. Restore epochs/{epoch:010d} from a copy{self._way_back(epoch)}"
            )
        if self._is_claimed:
            aside = set_aside(self._fs, self._manifest_path(epoch), durable=self.durable)
            _log.warning(
                "the manifest of epoch %d in %r was torn by a crash, before Spark committed the epoch. The epoch is "
                "run again; the file is now %r",
                epoch,
                self.location,
                posixpath.basename(aside),
            )
        return None

    def _decoded(self, epoch: Epoch, content: bytes) -> Manifest:
        return read_struct(content, Manifest, f"the manifest of epoch {epoch} in {self.location!r}")

    def manifest_before(self, epoch: Epoch) -> Manifest | None:
        """The manifest of the previous epoch, from which this one continues; None before the first."""
        if epoch == 0:
            return None
        found = self.manifest(Epoch(epoch - 1))
        if found is None:
            raise CheckpointError(
                f"the checkpoint {self.location!r} has no manifest of epoch {epoch - 1}, which epoch {epoch} needs. "
                f"Restore epochs/{epoch - 1:010d} from a copy{self._way_back(Epoch(epoch - 1))}"
            )
        return found

    def newest_manifest(self) -> Manifest | None:
        """The manifest of the last committed epoch; after a crash, Spark may still run that epoch again."""
        epochs = self._epochs()
        found = self.manifest(epochs[-1]) if epochs else None
        if found is None and len(epochs) > 1:  # the newest was torn; the previous one must not be
            return self.manifest(epochs[-2])
        return found

    def _epochs(self) -> list[Epoch]:
        """The epochs that have a manifest, whole or not, ascending."""
        return _numbered(self._fs, posixpath.join(self._root, "epochs"))

    def _may_run_again(self, epoch: Epoch) -> bool:
        """Whether an epoch without a manifest can simply run again: it is the newest, and Spark has not committed it.

        A manifest is on disk before the next epoch begins, so a crash can tear at most one. If the next one was set
        aside, this would be the second, so the cause must be another one.
        """
        later = self._manifest_path(Epoch(epoch + 1))
        found = self._fs.get_file_info([later, f"{later}{ASIDE}"])
        return all(info.type == pafs.FileType.NotFound for info in found) and not self._spark_committed(epoch)

    def _spark_committed(self, epoch: Epoch) -> bool:
        """Whether Spark's log has the commit. Spark does not sync it, so the last entries may be torn: no commit."""
        return _is_whole_entry(_content(self._fs, posixpath.join(self._root, "spark", "commits", str(epoch))))

    def _mend_spark_log(self) -> None:
        """Set aside the newest commit, and the newest offsets, if they are torn: Spark would not start with them.

        Without a commit, Spark requests that epoch again, and we skip it if it has a manifest. Offsets are on disk
        before the manifest of their epoch is; without them the epoch is planned again.
        """
        for log in ("commits", "offsets"):
            folder = posixpath.join(self._root, "spark", log)
            epochs = _numbered(self._fs, folder)
            path = posixpath.join(folder, str(epochs[-1])) if epochs else ""
            if path and not _is_whole_entry(_content(self._fs, path)):
                set_aside(self._fs, path, durable=self.durable)
                _log.warning(
                    "Spark's %s of epoch %d in %r were torn by a crash; they are set aside", log, epochs[-1], folder
                )

    def _way_back(self, epoch: Epoch) -> str:
        """For an epoch whose manifest is lost: from which epoch the job could continue, and what to do."""
        for earlier in reversed([each for each in self._epochs() if each < epoch]):
            content = without_checksum(_content(self._fs, self._manifest_path(earlier)) or b"")
            if content is None:
                continue
            manifest = self._decoded(earlier, content)
            lineages = [Lineage.decode(data) for data in manifest.lineages.values()]
            if not self.states.lacks(entry.file for lineage in lineages for entry in lineage.entries):
                return (
                    f"; or go back to epoch {earlier}, the last one that is whole: remove from epochs/ and "
                    f"spark/commits/ what has a higher number, and from spark/offsets/ what is above {earlier + 1}. "
                    f"Epochs after {earlier} are then run again"
                )
        return (
            "; there is no earlier epoch whose manifest and state files all exist, so without a copy the job "
            "must start from the beginning"
        )

    def require_open(self) -> None:
        """Refuse to continue after an epoch that has closed all windows."""
        newest = self.newest_manifest()
        if newest is not None and newest.closing:
            raise CheckpointError(
                f"the windows of the checkpoint {self.location!r} were closed by its last run (close_windows=True, "
                f"epoch {newest.epoch}); every further row would be late. Use a new checkpoint"
            )

    def keep_journal(self, epoch: Epoch, run: Run, data: bytes) -> str:
        """Keep the journal of a run that failed; return its path."""
        path = posixpath.join(self._root, "journal", f"{epoch:010d}.{run}")
        write_atomically(self._fs, path, data, durable=False)  # for people, not for a restart
        return path

    # ── removal ───────────────────────────────────────────────────────────────────────────────────────────────────

    def stale_manifests(self, newest: Epoch) -> list[Epoch]:
        """The epochs whose manifests are too old to keep."""
        return [epoch for epoch in self._epochs() if epoch <= newest - KEPT_MANIFESTS]

    def remove_manifest(self, epoch: Epoch) -> None:
        """Remove a manifest, if it exists."""
        self._remove(self._manifest_path(epoch))

    def stale_journals(self) -> list[str]:
        """The names of journals that are too old to keep."""
        selector = pafs.FileSelector(posixpath.join(self._root, "journal"), allow_not_found=True)
        # Clocks of file systems are coarse: among several in one tick, the name shows which is the newest.
        kept = sorted(self._fs.get_file_info(selector), key=lambda info: (info.mtime_ns or 0, info.path))
        return [posixpath.basename(info.path) for info in kept[:-KEPT_JOURNALS]]

    def remove_journal(self, name: str) -> None:
        """Remove a journal, if it exists."""
        self._remove(posixpath.join(self._root, "journal", name))

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            remove_file(self._fs, path)

    def _manifest_path(self, epoch: Epoch) -> str:
        return posixpath.join(self._root, "epochs", f"{epoch:010d}")


def _content(fs: pafs.FileSystem, path: str) -> bytes | None:
    """The content of a file; None if there is no file."""
    try:
        with fs.open_input_stream(path) as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        return None


def _is_whole_entry(data: bytes | None) -> bool:
    """Whether this is a whole file of Spark's log: a line with the version, a line of JSON, and perhaps more."""
    lines = (data or b"").split(b"\n")
    try:
        return lines[0].startswith(b"v") and isinstance(msgspec.json.decode(lines[1]), dict)
    except (IndexError, msgspec.MsgspecError):
        return False


def _numbered(fs: pafs.FileSystem, folder: str) -> list[Epoch]:
    """The epochs that name files in a folder, ascending."""
    names = (
        posixpath.basename(info.path) for info in fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    )
    return sorted(Epoch(int(name)) for name in names if name.isdigit())


def _lock(fs: pafs.FileSystem, path: str, location: str, durable: bool) -> IO[bytes] | None:
    """Lock a file for as long as it is open. Only local file systems have locks."""
    if not is_local(fs):
        return None
    try:
        disk.make_folder(posixpath.dirname(path), durable=durable, mode=0o700)
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
            f"the checkpoint {location!r} is in use by {holder or 'another process'}; stop that job first, or use "
            f"another checkpoint for this one",
            holder=holder or "another process",
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
    what = f"the checkpoint {location!r} (midstream.json)"
    identity = read_struct(data, Identity, what)
    try:
        check_bins(identity.bins)
    except FlowError as error:
        raise unreadable(what, str(error)) from error
    return identity


def _require_empty(fs: pafs.FileSystem, root: str, location: str) -> None:
    info = fs.get_file_info(root)
    if info.type == pafs.FileType.File:
        raise CheckpointError(f"the checkpoint {location!r} is a file; it must be a folder")
    if info.type == pafs.FileType.NotFound:
        return
    names = {posixpath.basename(entry.path) for entry in fs.get_file_info(pafs.FileSelector(root))}
    # A first start that was killed immediately leaves the lock, and an identity that was only partly written.
    held = sorted(name for name in names if name != "lock" and not _UNFINISHED_IDENTITY.fullmatch(name))
    if held:
        raise CheckpointError(
            f"the checkpoint {location!r} holds other things ({', '.join(held[:5])}{', …' if len(held) > 5 else ''}) "
            f"and no midstream.json; use an empty folder, or the checkpoint of this flow"
        )


def _require_same(found: Identity, flow: str, sources: tuple[str, ...], location: str) -> None:
    if found.flow != flow:
        raise CheckpointError(
            f"the checkpoint {location!r} belongs to the flow {found.flow!r}, not to {flow!r}; use a "
            f"separate checkpoint for each flow"
        )
    if found.sources != sources:
        raise CheckpointError(
            f"the checkpoint {location!r} was made with the sources {', '.join(found.sources)}; the flow now has "
            f"{', '.join(sources)}. Offsets cannot be matched to other sources: use a new checkpoint, or the "
            f"old sources"
        )
