"""Files on a local disk, written so that a crash of the process or of the machine leaves all of a file or nothing.

Everything that a checkpoint on a local disk consists of is written, renamed and removed here, and nowhere else. What
``durable=True`` promises: when a function returns, its effect survives a loss of power. Without it, only a crash of the
process is survived; the kernel writes to the disk when it sees fit, in any order.

A file is on disk when its content is (``fsync`` of the file) *and* its name is (``fsync`` of its folder), and the same
holds for the folder itself, in its parent. A test replays the system calls made here and loses what was not synced:
``tests/simulation/test_power_loss.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os

import pyarrow as pa

__all__ = ["make_folder", "remove_file", "rename_file", "sync_file", "sync_filesystem", "write_file"]

# Some file systems in user space and on the network cannot sync a folder, and say so: there it is not needed, or not
# to be had.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: its fsync leaves data in the cache of the drive

_on_disk: set[str] = set()
"""Folders whose own name this process has synced."""


def write_file(path: str, data: bytes | pa.Buffer, *, durable: bool) -> None:
    """Write a file, in place of one that may be there; a reader sees all of it or nothing. Its folder is made.

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
            if durable:
                _sync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        _sync_folder(folder)


def make_folder(path: str, *, durable: bool, mode: int = 0o777) -> None:
    """Have a folder, and those above it that are missing; ``mode`` is for the folder itself, if it is made.

    A folder that another process has just made is synced as well, once: it may not have come to that yet.
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
    """Give a file another name in its folder."""
    os.replace(path, other)
    if durable:
        _sync_folder(os.path.dirname(path))


def remove_file(path: str) -> None:
    """Remove a file. After a crash it may be there again, which must never matter."""
    os.unlink(path)


def sync_file(path: str) -> None:
    """Have a file that somebody else wrote, as it is now, on disk.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     sync_file(file.name)
    """
    file = os.open(path, os.O_RDONLY)
    try:
        _sync(file)
    finally:
        os.close(file)
    _sync_folder(os.path.dirname(path))


def sync_filesystem(path: str) -> None:
    """Have all that was ever written to the file system of ``path``, by anybody, on disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        if _syncfs(folder) != 0:
            os.sync()
    finally:
        os.close(folder)


def _syncfs(file: int) -> int:
    """Linux has a call for one file system, Python only the one for all of them."""
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


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(folder)
