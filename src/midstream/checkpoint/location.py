"""The checkpoint location: the identity of its flow, and the manifests of committed epochs.

Layout::

    midstream.json        identity: which flow, which sources, which job, which of Spark's logs
    blobs/ab/ab12…        functions, tables and stage programs, by digest
    epochs/0000000007     manifest of epoch 7, written before Spark commits the batch
    savepoints/NAME.json  a committed epoch that has a name, and is kept
    rewind.json           a rewind that is under way; without it no job starts
    changes/0000000001.json  an entry of the log of changes that were made while the job ran
    audit/…               in audit mode: which operator processed which row under which revision
    state/FC/…            deltas and snapshots of an operator's state
    lock                  held by the driver that uses this checkpoint, on file systems that have locks
    journal/0000000008.0  journal of a run of epoch 8 that failed; the newest few are kept
    spark/                Spark's own checkpoint: offsets and commits; spark-1/ and so on after sources have changed

On a local disk, unless that is turned off, everything that a manifest names is on disk before the manifest is, and the
manifest is on disk before anything that it supersedes is removed (:mod:`midstream.storage.disk`). So after a loss of
power the newest manifest is whole, and the job can continue from it.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import IO

import msgspec
import pyarrow.fs as pafs

from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.control_log import ControlLog
from midstream.checkpoint.forgotten import without_forgotten
from midstream.checkpoint.identity import (
    IDENTITY,
    REWIND,
    read_identity,
    require_empty,
    require_same,
    require_settled,
)
from midstream.checkpoint.journals import Journals
from midstream.checkpoint.location_lock import lock_location
from midstream.checkpoint.manifest import Identity, Manifest
from midstream.checkpoint.rewind_record import Rewind
from midstream.checkpoint.savepoints import Savepoints
from midstream.checkpoint.source_positions import log_with_sources
from midstream.checkpoint.spark_files import SparkFiles
from midstream.data.key_space import KeySpace, check_bins
from midstream.errors import CheckpointError
from midstream.flow.model import Graph, Source
from midstream.ids import BINS, Digest, Epoch
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
from midstream.storage.documents import read_struct, write_struct
from midstream.version import __version__

_log = logging.getLogger("midstream")

KEPT_MANIFESTS = 100
FOLDERS = ("blobs", "changes", "epochs", "state")


class Checkpoint:
    """The checkpoint location of one flow. :meth:`look` only reads, and may refuse; :meth:`claim` writes first.

    A start with other sources is refused, as is a flow with another name: a source that was only renamed would be read
    again from its beginning. Sources change while a job runs, by :meth:`change_sources`. Everything else about a flow
    may change from one start to the next.

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
        self.controls = ControlLog(below(self._shared, "controls"), durable=durable)
        self.control_values = below(self._shared, "control-values")
        self.savepoints = Savepoints(below(self._shared, "savepoints"), durable=durable)
        self.audit_location = below(self._shared, "audit")
        self.journals = Journals(below(self._shared, "journal"))
        self._lock: IO[bytes] | None = None
        self._exchanging = threading.Lock()
        """Held while Spark's log is exchanged for another one."""
        self._newest_log = identity.log
        """The highest number of a log that was given away."""

    @property
    def spark_location(self) -> str:
        """Where Spark keeps its own checkpoint.

        Always next to ours, because its offsets and our manifests are useless without each other.
        """
        return self.log_location(self.identity.log)

    def log_location(self, number: int) -> str:
        """Where the log with this number is, for Spark."""
        return below(spark_path(self._shared), msgspec.structs.replace(self.identity, log=number).spark)

    @property
    def spark_files(self) -> SparkFiles:
        """The files of Spark's log."""
        return self._spark_files(self.identity)

    def _spark_files(self, identity: Identity) -> SparkFiles:
        return SparkFiles(below(self._shared, identity.spark), durable=self.durable)

    @classmethod
    def look(cls, location: str, graph: Graph, *, bins: int | None = None, durable: bool = True) -> Checkpoint:
        """The checkpoint of a flow: the existing one, or a new one for an empty or missing folder.

        ``bins`` is the number of bins that the job must have, or None for the number that it has, or for the usual one
        if it is new.
        """
        if bins is not None:
            check_bins(bins)
        fs, root = filesystem_of(location)
        sources = tuple(sorted(op.name for op in graph.of(Source)))
        path = posixpath.join(root, IDENTITY)
        try:
            found = read_identity(fs, path, location)
            if found is None:
                require_empty(fs, root, location)
                found = Identity(__version__, uuid.uuid4().hex, graph.name, sources, BINS if bins is None else bins)
            require_settled(fs, root, location)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {location!r} cannot be used: {error}") from error
        if (found.flow, found.sources) != (graph.name, sources):
            records = cls(location, found).changes.records()
            exchanged = {edit.operator for record in records for edit in record.plan_edits}
            require_same(found, graph.name, sources, location, exchanged)
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
            found = read_identity(fs, posixpath.join(root, IDENTITY), location)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {location!r} cannot be read: {error}") from error
        if found is None:
            raise CheckpointError(f"{location!r} is not the checkpoint of a job: it has no midstream.json")
        return cls(location, found)

    def claim(self, *, mid_rewind: bool = False) -> None:
        """Make the location this flow's own, and keep other drivers out until :meth:`release`.

        Also syncs to disk what an earlier process left in the kernel's cache: it may have been killed between two
        steps, or have run without durability. ``mid_rewind``: only to finish a rewind that is under way; else that is
        refused.
        """
        self.lock()
        try:
            if not mid_rewind:
                require_settled(self._fs, self._root, self.location)
            self._settle()
        except BaseException:
            self.release()
            raise
        self._is_claimed = True

    def _settle(self) -> None:
        path = self._path(IDENTITY)
        is_new = self._fs.get_file_info(path).type == pafs.FileType.NotFound
        if is_new:
            write_atomically(self._fs, path, write_struct(self.identity), durable=self.durable)
        if is_local(self._fs):
            self.spark_files.set_torn_aside()
        if is_local(self._fs) and self.durable:
            if not is_new:
                disk.sync_filesystem(self._root)
            for name in FOLDERS:  # so that they exist, on disk, before workers use them
                disk.make_folder(posixpath.join(self._root, name), durable=True)

    def lock(self) -> None:
        """Keep other drivers out until :meth:`release`, and change nothing else."""
        self._lock = lock_location(self._fs, posixpath.join(self._root, "lock"), self.location, self.durable)

    def identify(self, identity: Identity) -> None:
        """Write another identity: of a fork, or after a rewind."""
        write_atomically(self._fs, self._path(IDENTITY), write_struct(identity), durable=self.durable)
        self.identity = identity

    def new_log(self, sources: Iterable[str]) -> int:
        """Make a log for other sources that continues after the last epoch, and that nobody uses yet; its number.

        A query may be held on it until :meth:`change_sources`. It has a number of its own, so Spark can run it as well.
        """
        epoch, new = self._newest_epoch(), self._next_log(sources)
        log = self._spark_files(new)
        with self._exchanging:
            log.write(log_with_sources(self.spark_files.needed_after(epoch), epoch, self.identity.sources, new.sources))
        log.number(uuid.uuid4().hex)
        return new.log

    def remove_log(self, number: int) -> None:
        """Remove a log that is not needed after all."""
        if number != self.identity.log:
            self._spark_files(msgspec.structs.replace(self.identity, log=number)).remove()

    def change_sources(
        self, sources: Iterable[str], at: Callable[[str], None] = lambda step: None, *, log: int | None = None
    ) -> None:
        """Have the job read other sources from now on: Spark gets a log for them, which continues after the last epoch.

        1. The new log is written, whole, into a folder of its own, which nobody uses yet.
        2. The identity names it. Before that all is as it was, and afterwards nothing reads the old log.
        3. The old log is removed.

        ``sources`` is by name, in any order; queries have them sorted. ``log`` is the number of a :meth:`new_log` for
        them, which is written anew. Must not be called while Spark runs, but a query may be held on the new log.
        """
        epoch, before = self._newest_epoch(), self.identity
        if log is None:
            after = self._next_log(sources)
        else:
            after = msgspec.structs.replace(before, sources=tuple(sorted(sources)), log=log)
        with self._exchanging:
            # 1.
            new, files = self._spark_files(after), self.spark_files.needed_after(epoch)
            if log is not None:
                new.clear()
            else:
                files |= self.spark_files.metadata()
            new.write(log_with_sources(files, epoch, before.sources, after.sources))
            at("log written")
            # 2.
            self.identify(after)
            at("log in use")
            # 3.
            self._spark_files(before).remove()

    def _next_log(self, sources: Iterable[str]) -> Identity:
        """The identity with other sources, and an empty log that was never used."""
        with self._exchanging:
            self._newest_log = number = max(self._newest_log, self.identity.log) + 1
        found = msgspec.structs.replace(self.identity, sources=tuple(sorted(sources)), log=number)
        self._spark_files(found).remove()  # a driver that died may have left one
        return found

    def _newest_epoch(self) -> Epoch:
        newest = self.newest_manifest()
        return Epoch(-1) if newest is None else newest.epoch

    def log_after(self, epoch: Epoch, sources: Iterable[str]) -> tuple[int, dict[str, bytes]]:
        """The number of Spark's log, and the files from which a query with these sources goes on after an epoch.

        They are those of the epoch. The log may be for others already: a hand-over comes before its first epoch.
        """
        names = tuple(sorted(sources))
        with self._exchanging:
            files, mine = self.spark_files.needed_after(epoch), self.identity
        if files and names != mine.sources:
            files = log_with_sources(files, epoch, mine.sources, names)
        return mine.log, files

    def note_rewind(self, rewind: Rewind | None) -> None:
        """Note a rewind before its first step; None when it is done. Meanwhile no job starts here."""
        if rewind is not None:
            data = with_checksum(write_struct(rewind))
            write_atomically(self._fs, self._path(REWIND), data, durable=self.durable)
        else:
            self.sync()  # nothing that was removed may come back once the note is gone
            self._remove(self._path(REWIND))
            self.sync()

    def rewind_under_way(self) -> Rewind | None:
        """The rewind that was begun here and not finished."""
        data = _content(self._fs, self._path(REWIND))
        if data is None:
            return None
        content = without_checksum(data)
        if content is None:
            raise CheckpointError(f"{REWIND} in {self.location!r} is damaged: its checksum does not match")
        return read_struct(content, Rewind, f"{REWIND} in {self.location!r}")

    def sync(self) -> None:
        """On a local disk, sync all that was written or removed here by anybody."""
        if is_local(self._fs) and self.durable:
            disk.sync_filesystem(self._root)

    def release(self) -> None:
        """Release the lock for other drivers. The system does so, too, when this process dies."""
        self._is_claimed = False
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def commit(self, manifest: Manifest) -> None:
        """Write an epoch's manifest; from then on the epoch's results count."""
        data = with_checksum(write_struct(manifest))
        write_atomically(self._fs, self._manifest_path(manifest.epoch), data, durable=self.durable, checked=True)

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
        return self.without_forgotten(found)

    def newest_manifest(self) -> Manifest | None:
        """The manifest of the last committed epoch; after a crash, Spark may still run that epoch again.

        Like :meth:`manifest_before` it is what a job continues from: :meth:`without_forgotten` state.
        """
        epochs = self.epochs()
        found = self.manifest(epochs[-1]) if epochs else None
        if found is None and len(epochs) > 1:  # the newest was torn; the previous one must not be
            found = self.manifest(epochs[-2])
        return None if found is None else self.without_forgotten(found)

    def without_forgotten(self, manifest: Manifest) -> Manifest:
        """A manifest without the state of removed operators that was dropped after its epoch.

        A log of changes that is damaged forgets nothing here. Those who cannot do without the log refuse it themselves.
        """
        try:
            records = self.changes.records()
        except CheckpointError:
            return manifest
        return without_forgotten(manifest, records)

    def _may_run_again(self, epoch: Epoch) -> bool:
        """Whether an epoch without a manifest can simply run again: it is the newest, and Spark has not committed it.

        A manifest is on disk before the next epoch begins, so a crash can tear at most one. If the next one was set
        aside, this would be the second, so the cause must be another one.
        """
        later = self._manifest_path(Epoch(epoch + 1))
        found = self._fs.get_file_info([later, f"{later}{ASIDE}"])
        return all(info.type == pafs.FileType.NotFound for info in found) and not self.spark_files.has_committed(epoch)

    def _way_back(self, epoch: Epoch) -> str:
        """For an epoch whose manifest is lost: from which epoch the job could continue, and what to do."""
        for earlier in reversed([each for each in self.epochs() if each < epoch]):
            content = without_checksum(_content(self._fs, self._manifest_path(earlier)) or b"")
            if content is None:
                continue
            manifest = self._decoded(earlier, content)
            if not self.lacks(manifest, ()):
                return (
                    f"; or go back to epoch {earlier}, the last one that is whole: remove from epochs/ and "
                    f"{self.identity.spark}/commits/ what has a higher number, and from {self.identity.spark}/offsets/ "
                    f"what is above {earlier + 1}. "
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

    @property
    def root(self) -> str:
        """The path on its file system."""
        return self._root

    def lacks(self, manifest: Manifest, digests: Iterable[Digest]) -> list[str]:
        """The names of missing files: of state files that a manifest names, and of these blobs."""
        lineages = [Lineage.decode(data) for data in manifest.lineages.values()]
        missing = self.states.lacks(entry.file for lineage in lineages for entry in lineage.entries)
        return [*missing, *(digest for digest in digests if not self.blobs.has(digest))]

    def epochs(self) -> list[Epoch]:
        """The epochs that have a manifest, whole or not, ascending."""
        return _numbered(self._fs, self._path("epochs"))

    # ── removal ───────────────────────────────────────────────────────────────────────────────────────────────────

    def stale_manifests(self, newest: Epoch) -> list[Epoch]:
        """The epochs whose manifests are too old to keep."""
        return [epoch for epoch in self.epochs() if epoch <= newest - KEPT_MANIFESTS]

    def remove_manifest(self, epoch: Epoch) -> None:
        """Remove a manifest, if it exists."""
        self._remove(self._manifest_path(epoch))

    def remove_after(self, epoch: Epoch) -> None:
        """Remove the manifests of later epochs, newest first, and what the auditor would read of them."""
        for folder, suffix in (("epochs", ""), ("epochs", ASIDE), ("audit", ".json")):
            for later in reversed(_numbered(self._fs, self._path(folder), suffix)):
                if later > epoch:
                    self._remove(posixpath.join(self._path(folder), f"{later:010d}{suffix}"))

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            remove_file(self._fs, path)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def _manifest_path(self, epoch: Epoch) -> str:
        return posixpath.join(self._root, "epochs", f"{epoch:010d}")


def _content(fs: pafs.FileSystem, path: str) -> bytes | None:
    """The content of a file; None if there is no file."""
    try:
        with fs.open_input_stream(path) as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        return None


def _numbered(fs: pafs.FileSystem, folder: str, suffix: str = "") -> list[Epoch]:
    """The epochs that name files in a folder, ascending."""
    found = fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    names = (posixpath.basename(info.path) for info in found)
    numbers = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
    return sorted(Epoch(int(number)) for number in numbers if number.isdigit())
