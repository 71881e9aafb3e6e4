"""One LMDB environment that the processes of a host share, grow, and discard when in doubt.

It is a cache, so it is never flushed to disk explicitly, and anything that cannot be trusted is replaced with an empty
environment. The folder contains::

        guard          locked while a process opens, grows, writes or replaces the environment; released if it dies
        current        the environment in use: owner, boot id of the machine, and required size
    <generation>/  the environment itself

- A killed process does no harm: LMDB never changes pages in place, and the kernel keeps what was written.
- A machine crash does, without flushing. The boot id in ``current`` reveals it, and the environment is replaced.
- Pages are written through the memory map, which is two to three times as fast here as system calls. A full disk
  would then cause a SIGBUS. So space is allocated before it is mapped, which turns a full disk into an ordinary error.
- Mapping a file for writing also truncates it to the size the process believes in; so ``guard`` covers opening, too.
- Replacing creates a new folder and removes the old one; processes that still map it keep it until they notice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import lmdb
import msgspec

from midstream.errors import StateError

__all__ = ["Mapped", "boot_id"]

FORMAT = 1
FIRST_SIZE = 16 << 20
MAX_READERS = 1024
ROOM_BESIDE = 64 << 20
"""Free space that a copy leaves on the disk for others."""
_PAGE = 1 << 20  # map sizes are multiples of this
_T = TypeVar("_T")

# LMDB's errors for a damaged environment; any other error is a problem of the machine or of our code.
DAMAGED = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.PanicError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
)


class _Current(msgspec.Struct, frozen=True):
    format: int
    owner: str
    boot: str
    generation: str
    inode: int
    size: int


def boot_id() -> str | None:
    """An id that changes with every boot of the machine, or None if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


class Mapped:
    """An environment with two tables, ``rows`` and ``marks``, that belongs to ``owner``.

    Several processes may use it at once: readers never wait, everything else takes the guard. Threads of one process
    take turns with ``lock``, because remapping invalidates the map that readers use.
    """

    def __init__(self, folder: str, owner: str) -> None:
        self.folder = Path(folder)
        self.owner = owner
        self.remapped = 0
        """Counts growths and replacements, which end this process's read transactions."""
        self.lock = threading.RLock()
        self._guard: int | None = None
        self._depth = 0
        self._pid = os.getpid()
        self._env: lmdb.Environment | None = None
        self._current: _Current | None = None
        with self.guarded():
            pass

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep other processes and threads from opening, growing, writing or replacing; open the current one."""
        with self.lock:
            self._same_process()
            self._depth += 1
            try:
                if self._depth == 1:
                    self._take_guard()
                    self._open_current()
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._guard is not None:
                    os.close(self._guard)
                    self._guard = None

    def begin(self) -> lmdb.Transaction[bytes]:
        """A read transaction: a snapshot of the environment, unaffected by later writes."""
        for _ in range(5):
            self._same_process()
            if self._env is None:
                raise StateError(f"the base {str(self.folder)!r} is closed")
            try:
                assert self._env is not None
                return self._env.begin(self.rows)
            except lmdb.MapResizedError:
                with self.guarded():
                    pass  # adopts the new size that another process set
            except lmdb.ReadersFullError:
                # Only killed processes can occupy so many slots; free theirs.
                self._env.reader_check()
        raise StateError(
            f"the base {str(self.folder)!r} has too many readers; at most {MAX_READERS} are allowed at a time"
        )

    def write(self, change: Callable[[lmdb.Transaction[bytes]], _T], room: int = 0) -> _T:
        """Run a change in a write transaction, all or nothing; if it does not fit, grow and run it again.

        The caller must hold the guard. ``room`` is an estimate of the bytes that the change adds.
        """
        assert self._env is not None
        assert self._current is not None
        self._env.reader_check()
        used = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if used + room > self._current.size:
            self._grow(used + room)
        while True:
            try:
                with self._env.begin(self.rows, write=True) as transaction:
                    return change(transaction)
            except lmdb.MapFullError:
                self._grow(self._current.size + _PAGE)

    def replace(self) -> None:
        """Discard the environment and start an empty one. The caller must hold the guard."""
        self._close_env()
        generation = uuid.uuid4().hex
        with self._disk_errors(FIRST_SIZE):
            (self.folder / generation).mkdir(parents=True)
            self._current = _Current(FORMAT, self.owner, boot_id() or "", generation, 0, FIRST_SIZE)
            self._open_env()
            self._write_current(msgspec.structs.replace(self._current, inode=self._data_file().stat().st_ino))
        self._remove_all_but(generation)

    @property
    def size(self) -> int:
        """Bytes that the environment takes on disk."""
        with self.guarded():
            assert self._current is not None
            return self._current.size

    def compact(self) -> int:
        """Copy the environment if at most a quarter of it is in use; return the bytes given back to the disk.

        A copy is made beside the original, and takes its place as an empty environment would (:meth:`replace`). If that
        fails, or the disk has no room for it, all stays as it is.
        """
        with self.guarded():
            assert self._env is not None
            assert self._current is not None
            before = self._current
            with self._env.begin() as transaction:
                stats = [transaction.stat(db) for db in (self.rows, self.marks)]
            pages = sum(each["branch_pages"] + each["leaf_pages"] + each["overflow_pages"] for each in stats)
            used = pages * self._env.stat()["psize"]
            size = max(FIRST_SIZE, -(-used * 3 // 2 // _PAGE) * _PAGE)
            if 4 * size > before.size or shutil.disk_usage(self.folder).free < size + ROOM_BESIDE:
                return 0
            generation = uuid.uuid4().hex
            copy = _Current(FORMAT, self.owner, before.boot, generation, 0, size)
            try:
                with self._disk_errors(size):
                    (self.folder / generation).mkdir()
                    self._env.copy(str(self.folder / generation), compact=True)
                    _allocate(self.folder / generation / "data.mdb", size)
                    self._close_env()
                    self._current = copy
                    self._open_env()
                    self._write_current(msgspec.structs.replace(copy, inode=self._data_file().stat().st_ino))
            except BaseException:
                self._close_env()
                self._remove_all_but(before.generation)
                self._open_current()
                raise
            self._remove_all_but(generation)
            return before.size - size

    def close(self) -> None:
        """Close the environment. It stays for other processes and for the next start."""
        with self.lock:
            self._same_process()
            self._close_env()

    def _remove_all_but(self, generation: str) -> None:
        """Remove other environments, also those that a process left behind which was killed. With the guard."""
        for other in self.folder.iterdir():
            if other.is_dir() and other.name != generation:
                shutil.rmtree(other, ignore_errors=True)

    def _take_guard(self) -> None:
        with self._disk_errors(0):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._guard = os.open(self.folder / "guard", os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._guard, fcntl.LOCK_EX)

    def _open_current(self) -> None:
        """Open the environment named in ``current``, or an empty one if it cannot be trusted."""
        found = self._read_current()
        if found is None or not self._trusted(found):
            self.replace()
            return
        if self._env is not None and self._current is not None and self._current.generation == found.generation:
            if self._current.size != found.size:
                self._env.set_mapsize(found.size)
                self.remapped += 1
            self._current = found
            return
        self._close_env()
        self._current = found
        try:
            self._open_env()
        except DAMAGED:
            self.replace()
        except lmdb.Error as error:
            raise StateError(f"the base {str(self.folder)!r} cannot be opened: {error}") from error

    def _trusted(self, found: _Current) -> bool:
        if (found.format, found.owner) != (FORMAT, self.owner):
            return False
        if found.boot != (boot_id() or ""):
            return False
        try:
            info = (self.folder / found.generation / "data.mdb").stat()
        except OSError:
            return False
        return info.st_ino == found.inode and info.st_size >= found.size

    def _open_env(self) -> None:
        assert self._current is not None
        durable = not self._current.boot  # without a boot id a crash goes unnoticed, so writes must survive it
        self._env = lmdb.open(
            str(self.folder / self._current.generation),
            map_size=self._current.size,
            max_dbs=2,
            max_readers=MAX_READERS,
            max_spare_txns=1,
            sync=durable,
            metasync=durable,
            writemap=True,
            map_async=False,
            meminit=False,
            readahead=False,
        )
        self.remapped += 1
        _allocate(self._data_file(), self._current.size)  # before any page is written through the map
        self.rows = self._env.open_db(b"rows")
        self.marks = self._env.open_db(b"marks")

    def _data_file(self) -> Path:
        assert self._current is not None
        return self.folder / self._current.generation / "data.mdb"

    def _close_env(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
            self.remapped += 1

    def _grow(self, wanted: int) -> None:
        assert self._env is not None
        assert self._current is not None
        size = max(wanted, self._current.size * 3 // 2)
        size = -(-size // _PAGE) * _PAGE
        with self._disk_errors(size - self._current.size):
            _allocate(self._data_file(), size)
            self._write_current(msgspec.structs.replace(self._current, size=size))
        self._env.set_mapsize(size)
        self.remapped += 1

    def _read_current(self) -> _Current | None:
        try:
            return msgspec.json.decode((self.folder / "current").read_bytes(), type=_Current)
        except (OSError, msgspec.MsgspecError):
            return None

    def _write_current(self, current: _Current) -> None:
        temporary = self.folder / "current.tmp"
        temporary.write_bytes(msgspec.json.encode(current))
        temporary.replace(self.folder / "current")
        self._current = current

    def _same_process(self) -> None:
        if self._pid != os.getpid():
            raise StateError(
                f"the base {str(self.folder)!r} was opened by process {self._pid} and is now used by its fork "
                f"{os.getpid()}; open it after forking"
            )

    @contextlib.contextmanager
    def _disk_errors(self, wanted: int) -> Iterator[None]:
        try:
            yield
        except (OSError, lmdb.Error) as error:
            code = error.code if isinstance(error, lmdb.Error) else error.errno
            full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            why = f"the disk is full: {wanted >> 20} MB more were needed" if full else str(error)
            raise StateError(
                f"the base {str(self.folder)!r} cannot be written: {why}. Nothing is lost: committed state is in the "
                f"checkpoint location. Free space, or set another local_state=",
                folder=str(self.folder),
            ) from error


def _allocate(path: Path, size: int) -> None:
    """Allocate disk space for a file of ``size`` bytes."""
    handle = os.open(path, os.O_RDWR)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:
            os.ftruncate(handle, max(size, os.fstat(handle).st_size))
    finally:
        os.close(handle)
