"""Files on a local disk, written so that a crash of the process or the machine leaves a complete file or none.

All files of a checkpoint on a local disk are written, renamed and removed here. With ``durable=True``, the effect of a
function survives a power loss once the function returns. Without it, the effect survives only a crash of the process;
the kernel writes to the disk at any time, in any order.

A file is on disk when its content is (``fsync`` of the file) *and* its name is (``fsync`` of its folder); the same
holds for the folder itself, in its parent. ``tests/simulation/test_power_loss.py`` replays the system calls made here
and drops what was not synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa

__all__ = [
    "Unsynced",
    "at_once",
    "link_file",
    "make_folder",
    "remove_file",
    "rename_file",
    "sync_file",
    "sync_filesystem",
    "sync_remaining",
    "write_file",
]

# Some user-space and network file systems refuse to sync a folder: there it is not needed, or not possible.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
# Another file system, one without links, or a file of another user's.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync leaves data in the drive's cache

_on_disk: set[str] = set()
"""Folders whose names this process has synced."""

THREADS = 8


class Unsynced:
    """What was written but is not on disk yet, gathered so that it can be synced all at once.

    A file system with a journal serves simultaneous syncs with one write of its journal. Three files and their
    folders took 16 to 18 ms one after the other, and 1 to 4 ms at once (ext4, a busy machine).

    >>> import tempfile
    >>> unsynced = Unsynced()
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     unsynced.add_file(file.name)
    ...     unsynced.sync()
    """

    def __init__(self) -> None:
        # Dicts for their order.
        self._files: dict[str, None] = {}
        self._folders: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._files or self._folders)

    def add_file(self, path: str) -> None:
        """A file that was written and closed: its content, and its name."""
        self._files[path] = None
        self.add_names(os.path.dirname(path))

    def add_names(self, folder: str) -> None:
        """The names in a folder: something was created there, or renamed to it.

        The folder's own name is synced as well, once: it may be new, too. Its parent's name must be on disk already.
        """
        self._folders[folder] = None

    def sync(self) -> None:
        """Sync everything that was added; it survives a power loss once this returns."""
        files, folders = self._files, self._folders
        self._files, self._folders = {}, {}
        new = [folder for folder in folders if folder not in _on_disk]
        folders |= dict.fromkeys(map(os.path.dirname, new))
        # The first folder's sync usually covers the others, so they need no threads.
        at_once([*(partial(_sync_path, path) for path in files), partial(_sync_folders, folders)])
        _on_disk.update(new)


def write_file(path: str, data: bytes | pa.Buffer, *, durable: bool, checked: bool = False) -> None:
    """Write or replace a file; readers see all of it or nothing. Creates the folder if needed.

    ``checked`` is for a new file whose readers check its content against a digest: then its name may reach the disk
    before its content, and both are synced at once. A power loss during the call may leave it torn, though not after.

    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "new", "file")
    >>> write_file(path, b"data", durable=True)
    >>> os.listdir(os.path.dirname(path))
    ['file']
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    folder = os.path.dirname(path)
    try:
        file = _create_in(folder, temporary, durable)
        try:
            _write_all(file, memoryview(data))
            if durable and not checked:
                _sync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable and checked:
        sync_file(path)
    elif durable:
        _sync_folder(folder)


def make_folder(path: str, *, durable: bool, mode: int = 0o777) -> None:
    """Create a folder and its missing parents; ``mode`` applies to the folder itself, if it is created.

    A folder that another process has just created is synced as well, once: that process may not have synced it yet.
    """
    if path in _on_disk and os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    except FileNotFoundError:
        make_folder(parent, durable=durable)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode)
    if durable:
        _sync_folder(parent)
        _on_disk.add(path)


def rename_file(path: str, other: str, *, durable: bool) -> None:
    """Rename a file, within its folder or into another one."""
    os.replace(path, other)
    if durable:  # the new name first: after a crash the file may have both names, but never none
        for folder in dict.fromkeys([os.path.dirname(other), os.path.dirname(path)]):
            _sync_folder(folder)


def link_file(path: str, other: str, *, durable: bool) -> bool:
    """Give a file a second name, in a folder that exists; False if that is not possible between these two places.

    For files that are never changed once they are written: removing or replacing one name leaves the other.
    """
    try:
        os.link(path, other)
    except FileExistsError:
        os.unlink(other)
        os.link(path, other)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    if durable:
        _sync_folder(os.path.dirname(other))
    return True


def remove_file(path: str) -> None:
    """Remove a file. A crash may bring it back, which must never matter."""
    os.unlink(path)


def sync_file(path: str) -> None:
    """Sync a file that someone else wrote to disk.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     sync_file(file.name)
    """
    unsynced = Unsynced()
    unsynced.add_file(path)
    unsynced.sync()


def at_once(steps: Collection[Callable[[], None]]) -> None:
    """Take all steps, in any order, in threads and this one; raise the first error when all are done."""
    if not steps:
        return
    *others, last = steps
    if not others:
        last()
        return
    # Threads of its own, so that a job leaves none behind when it ends.
    with ThreadPoolExecutor(min(len(others), THREADS), "midstream-disk") as pool:
        taken = [pool.submit(step) for step in others]
        last()
    for each in taken:
        each.result()


def sync_remaining(paths: Collection[str]) -> None:
    """Sync files of which some may be gone, or go meanwhile: somebody else compacts the table that they are part of.

    >>> sync_remaining(["/no/such/file"])
    """
    while True:
        unsynced = Unsynced()
        for path in filter(os.path.exists, paths):
            unsynced.add_file(path)
        with contextlib.suppress(FileNotFoundError):
            unsynced.sync()
            return


def sync_filesystem(path: str) -> None:
    """Sync everything ever written to the file system of ``path``, by anyone, to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        if _syncfs(folder) != 0:
            os.sync()
    finally:
        os.close(folder)


def _syncfs(file: int) -> int:
    """Call Linux's ``syncfs``; Python only has ``sync``, which covers all file systems."""
    try:
        return int(ctypes.CDLL(None).syncfs(file))
    except (AttributeError, OSError):
        return -1


def _create_in(folder: str, path: str, durable: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if not durable or folder in _on_disk:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags, 0o666)
        _on_disk.discard(folder)
    make_folder(folder, durable=durable)
    return os.open(path, flags, 0o666)


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _sync(file: int) -> None:
    if _FULL_SYNC is None:
        os.fsync(file)
    else:
        fcntl.fcntl(file, _FULL_SYNC)


def _sync_path(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        _sync(file)
    finally:
        os.close(file)


def _sync_folders(paths: Iterable[str]) -> None:
    for path in paths:
        _sync_folder(path)


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(folder)
