"""The lock of a checkpoint: one driver at a time uses it, on file systems that have locks."""

from __future__ import annotations

import fcntl
import os
import posixpath
import socket
from typing import IO

import pyarrow.fs as pafs

from midstream.errors import CheckpointError
from midstream.storage import disk
from midstream.storage.blobs import is_local
from midstream.storage.ownership import warn_if_others_can_write

__all__ = ["lock_location"]


def lock_location(fs: pafs.FileSystem, path: str, location: str, durable: bool) -> IO[bytes] | None:
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
