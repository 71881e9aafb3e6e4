"""Removes files from the checkpoint that no restart can need any more: state files, blobs, old manifests and journals.

Sweeping never fails an epoch or a job. A failure is logged once per cause, counted, and tried again.

What must stay is decided when an epoch is committed (:meth:`Sweeper.after`), and only files that this epoch's manifest
has superseded are removed. So they may be removed at any later time (:meth:`Sweeper.sweep`): on Spark during the next
epochs, by a :class:`SweepThread`; on the local runtime immediately, so that a seed replays exactly. The folders of file
sinks are tidied at the same time.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import msgspec

from midstream.checkpoint.committed_state import CommittedState
from midstream.checkpoint.location import KEPT_MANIFESTS, Checkpoint
from midstream.checkpoint.retention import blobs_on_record
from midstream.checkpoint.savepoints import Savepoint
from midstream.checkpoint.sink_files import SinkFolders
from midstream.ids import Digest, Epoch
from midstream.metrics import SweepStats
from midstream.state.garbage import garbage
from midstream.storage.holds import Mark

__all__ = ["SweepThread", "Sweeper"]

FULL_SWEEP_EVERY = 100
RETRY_EVERY = 10
"""Number of sweeps between retries of files that could not be removed."""

MAX_OVERDUE = 10_000
"""Most files to remember among those that could not be removed; full sweeps find any others again."""

_log = logging.getLogger("midstream")


class _Folder(StrEnum):
    STATE = "state"
    MANIFESTS = "epochs"
    JOURNALS = "journal"
    BLOBS = "blobs"


@dataclass(frozen=True)
class _Leftover:
    """A file that is no longer needed."""

    folder: _Folder
    name: str


class Sweeper:
    """Follows a job's committed states, epoch by epoch.

    A crash goes back at most one epoch: to the manifest before the newest, whose batch Spark may not have committed. So
    the files of the last two committed states stay. Files of failed attempts are in no committed state; listing all
    files finds them, at the start and now and then. The files of the newest samples and held files stay as well:
    functions are tried on them.

    :meth:`after` and :meth:`holding` may be called by other threads while :meth:`sweep` runs.
    """

    def __init__(self, checkpoint: Checkpoint, folders: SinkFolders | None = None) -> None:
        self._checkpoint = checkpoint
        self._folders = folders
        self._lock = threading.Lock()
        self._kept: tuple[CommittedState, ...] = ()
        self._samples: frozenset[str] = frozenset()
        self._held: Counter[str] = Counter()
        self._pinned: dict[str, frozenset[str]] | None = None
        """The files of state of each savepoint; None until the first sweep has read them."""
        self._pins = 0
        """How often savepoints were taken or deleted through this object."""
        self._live: frozenset[Digest] = frozenset()
        self._mark = Mark(0)
        self._looks: set[_Folder] = set()
        """Folders to list for files that are no longer needed."""
        self._due: dict[_Leftover, None] = {}
        self._overdue: dict[_Leftover, None] = {}
        self._sweeps = 0
        self._causes: set[str] = set()
        self._blobs_removed = 0
        self._stats = SweepStats()

    @property
    def stats(self) -> SweepStats:
        """Statistics on what has been removed so far, and what could not be."""
        with self._lock:
            return self._stats

    # ── decisions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def after(self, committed: CommittedState, *, live: frozenset[Digest], samples: Iterable[str] = ()) -> None:
        """Note a committed state, after its manifest was written.

        ``live`` are the blobs of everything that can run without another request, ``samples`` the state files on which
        new functions are tried. Call this while no change can be requested; :meth:`sweep` then removes what it
        superseded.
        """
        with self._lock:
            dropped, self._kept = self._kept[:-1], (*self._kept[-1:], committed)
            self._samples = frozenset(samples)
            if not dropped or committed.epoch % FULL_SWEEP_EVERY == 0:
                self._looks |= set(_Folder)
            else:
                needed = {name for kept in self._kept for name in kept.files()}
                unneeded = {name for old in dropped for name in old.files()} - needed
                self._due |= {_Leftover(_Folder.STATE, name): None for name in sorted(unneeded)}
            if committed.epoch >= KEPT_MANIFESTS:
                self._due[_Leftover(_Folder.MANIFESTS, str(committed.epoch - KEPT_MANIFESTS))] = None
            if live != self._live:
                self._looks.add(_Folder.BLOBS)
            self._live, self._mark = live, self._checkpoint.blobs.holds.mark()

    def after_failure(self) -> None:
        """Note that the journal of a run was kept, so that there may be too many."""
        with self._lock:
            self._looks.add(_Folder.JOURNALS)

    @contextlib.contextmanager
    def holding(self, names: Iterable[str]) -> Iterator[None]:
        """Keep these state files while in this context. They must be needed anyway when it is entered."""
        names = tuple(names)
        with self._lock:
            self._held.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(names)
                self._held += Counter()

    def pin(self, savepoint: Savepoint) -> None:
        """Keep what a savepoint needs, for as long as it exists. Call this when it is written, while it is held."""
        with self._lock:
            self._pins += 1
            if self._pinned is not None:
                self._pinned[savepoint.name] = savepoint.state_files()

    def unpin(self, name: str) -> None:
        """Remove what only a deleted savepoint needed."""
        with self._lock:
            self._pins += 1
            if self._pinned is not None:
                self._pinned.pop(name, None)
            self._looks |= {_Folder.STATE, _Folder.BLOBS}

    # ── actions ───────────────────────────────────────────────────────────────────────────────────────────────────

    def sweep(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Remove what is due, as far as possible; stops early if ``is_wanted`` returns False. Never raises.

        Returns whether blobs were removed; those are mostly functions that the job no longer runs. Must not be called
        by two threads at once.
        """
        blobs_before = self._blobs_removed
        with self._lock:
            self._sweeps += 1
            if self._sweeps % RETRY_EVERY == 0:
                self._retry()
            looks, self._looks = sorted(self._looks), set()
        for folder in looks:
            self._attempt(_Leftover(folder, ""), partial(self._sweep_folder, folder, is_wanted))
        with self._lock:
            due = [leftover for leftover in self._due if not self._is_needed(leftover)]
        for leftover in due:
            if not is_wanted():
                break
            self._attempt(leftover, partial(self._remove, leftover))
        if self._folders is not None and is_wanted():
            self._folders.tidy()
        return self._blobs_removed > blobs_before

    def _retry(self) -> None:
        """Try again. A blob may be needed again by now, so that is checked; other files are never needed again."""
        for leftover in self._overdue:
            if leftover.folder is _Folder.BLOBS or not leftover.name:
                self._looks.add(leftover.folder)
            else:
                self._due[leftover] = None

    def _is_needed(self, leftover: _Leftover) -> bool:
        """Whether a savepoint has it, or functions are tried on it. Once neither holds, it never will again."""
        if leftover.folder is not _Folder.STATE:
            return False
        if self._pinned is None or leftover.name in self._samples or leftover.name in self._held:
            return True
        return any(leftover.name in names for names in self._pinned.values())

    def _read_savepoints(self) -> None:
        """Learn of savepoints from before this start, and of those that another process has deleted."""
        while True:
            with self._lock:
                pins = self._pins
            found = {each.name: each.state_files() for each in self._checkpoint.savepoints.all()}
            with self._lock:
                if pins == self._pins:
                    self._pinned = found
                    return

    def _attempt(self, leftover: _Leftover, do: Callable[[], bool]) -> None:
        """Do something about a file, or (without a name) about a folder; record whether a file is gone as a result."""
        try:
            is_removed = do()
        except Exception as error:  # a store's client may raise anything, and the job must not fail
            self._failed(leftover, error)
            return
        with self._lock:
            self._due.pop(leftover, None)
            self._blobs_removed += is_removed and leftover.folder is _Folder.BLOBS
            was_overdue = leftover in self._overdue
            self._overdue.pop(leftover, None)
            self._stats = msgspec.structs.replace(
                self._stats, removed=self._stats.removed + is_removed, overdue=len(self._overdue)
            )
            if was_overdue and not self._overdue:
                self._causes.clear()
                _log.info("the files that could not be removed from %r are now removed", self._checkpoint.location)

    def _failed(self, leftover: _Leftover, error: Exception) -> None:
        cause = error.__cause__ or error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        with self._lock:
            self._due.pop(leftover, None)
            if len(self._overdue) < MAX_OVERDUE:
                self._overdue[leftover] = None
            self._stats = msgspec.structs.replace(
                self._stats, failed=self._stats.failed + 1, overdue=len(self._overdue), error=reason
            )
            kind = f"{leftover.folder} {type(cause).__name__} {getattr(cause, 'errno', None)}"
            is_new = kind not in self._causes
            self._causes.add(kind)
        if is_new:
            _log.warning(
                "%s/%s in %r could not be %s: %s. The job continues and tries again; further failures with the same "
                "cause are only counted (job.metrics.sweep)",
                leftover.folder,
                leftover.name,
                self._checkpoint.location,
                "removed" if leftover.name else "looked through",
                reason,
            )

    def _remove(self, leftover: _Leftover) -> bool:
        match leftover.folder:
            case _Folder.STATE:
                self._checkpoint.states.remove([leftover.name])
            case _Folder.MANIFESTS:
                self._checkpoint.remove_manifest(Epoch(int(leftover.name)))
            case _Folder.JOURNALS:
                self._checkpoint.journals.remove(leftover.name)
            case _Folder.BLOBS:
                raise AssertionError("blobs are removed as soon as they are found")
        return True

    def _sweep_folder(self, folder: _Folder, is_wanted: Callable[[], bool]) -> bool:
        """Find files that are not needed; blobs are removed at once. Returns False, as no single file is gone."""
        with self._lock:
            kept = self._kept
        found: Collection[str]
        match folder:
            case _Folder.STATE:
                self._read_savepoints()
                lineages = [lineage for committed in kept for lineage in committed.lineages.values()]
                # Until Spark has moved on, the newest epoch may run again, and its attempts may still be writing.
                settled = Epoch(kept[0].epoch)
                found = garbage(self._checkpoint.states.names(), lineages, settled)
            case _Folder.MANIFESTS:
                found = [str(epoch) for epoch in self._checkpoint.stale_manifests(kept[-1].epoch)]
            case _Folder.JOURNALS:
                found = self._checkpoint.journals.stale()
            case _Folder.BLOBS:
                self._sweep_blobs(kept, is_wanted)
                found = ()
        with self._lock:
            leftovers = (_Leftover(folder, name) for name in found)
            self._due |= {leftover: None for leftover in leftovers if leftover not in self._overdue}
        return False

    def _sweep_blobs(self, kept: Sequence[CommittedState], is_wanted: Callable[[], bool]) -> None:
        """Remove blobs that nothing refers to.

        The mark is taken before the records are read. Anything recorded later was touched after the mark, or by a
        preparation that was in progress at that time, so it is safe.
        """
        store = self._checkpoint.blobs
        with self._lock:
            live, mark = self._live, self._mark
            for leftover in [each for each in self._overdue if each.folder is _Folder.BLOBS]:
                del self._overdue[leftover]
        manifests = [self._checkpoint.manifest(committed.epoch) for committed in kept]
        run = {digest for each in manifests if each is not None for digest in each.digests()}
        saved = {digest for savepoint in self._checkpoint.savepoints.all() for digest in savepoint.digests()}
        needed = {*live, *run, *saved, *blobs_on_record(self._checkpoint.changes.records())}
        for name in store.garbage(needed):
            if not is_wanted():
                return
            self._attempt(_Leftover(_Folder.BLOBS, name), partial(store.remove, name, mark))
        store.holds.forget_before(mark)


class SweepThread:
    """Sweeps while the epochs of a job run. The thread starts when it is first woken."""

    def __init__(self, sweeper: Sweeper) -> None:
        self._sweeper = sweeper
        self._thread: threading.Thread | None = None
        self._is_woken = threading.Event()
        self._is_closing = False

    def wake(self) -> None:
        """Sweep soon."""
        self._is_woken.set()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="midstream-sweeper", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the machine is out of threads; the next epoch tries again
                _log.warning("the checkpoint is not swept for now: %s", error)
            else:
                self._thread = thread

    def close(self) -> None:
        """Stop after the current file. The next start finds what is left."""
        self._is_closing = True
        self._is_woken.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._is_woken.wait()
            self._is_woken.clear()
            if self._is_closing:
                return
            if self._sweeper.sweep(lambda: not self._is_closing):
                # Python collects cycles after many new objects; a model is few objects, but may be large.
                gc.collect()
