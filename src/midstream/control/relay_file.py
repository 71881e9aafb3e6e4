"""The file by which the workers of an executor agree on a relay: whoever locks it is the relay, and writes where it
listens.

The kernel unlocks it when that process ends, however that happens. It holds no secret: workers have the clients' keys
from the job itself. Its name has the host, in case the folder is one that several hosts see, and the job's server key,
which is another one at each start.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import socket
from dataclasses import replace

import msgspec

from midstream.control.channel import Address

__all__ = ["RelayFile"]


class _Listens(msgspec.Struct):
    endpoint: str
    server_key: str


class RelayFile:
    """The file for one job and host, in a folder that only this user can write to. Any number of processes use it."""

    def __init__(self, folder: str, upstream: Address) -> None:
        self._upstream = upstream
        self._host = socket.gethostname()
        start = hashlib.sha256(upstream.server_key).hexdigest()[:16]
        self.path = os.path.join(folder, f"relay-{self._host}-{start}.json")
        self._held: int | None = None

    def claim(self) -> bool:
        """Whether this process is to be the relay, because no other is. Raises :class:`OSError` if files cannot be
        locked here."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            os.close(fd)
            raise
        os.ftruncate(fd, 0)  # the relay before has ended
        self._held = fd
        self._remove_others()
        return True

    def publish(self, address: Address) -> None:
        """The relay listens there. Only after :meth:`claim`."""
        assert self._held is not None, "only the relay says where it listens"
        data = msgspec.json.encode(_Listens(address.endpoint, address.server_key.decode()))
        os.pwrite(self._held, data, 0)

    def release(self) -> None:
        """It does not listen any more: another one may."""
        if self._held is not None:
            os.ftruncate(self._held, 0)
            os.close(self._held)
            self._held = None

    def address(self) -> Address | None:
        """Where the relay listens; None if there is none yet."""
        try:
            with open(self.path, "rb") as file:
                found = msgspec.json.decode(file.read(), type=_Listens)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return replace(self._upstream, endpoint=found.endpoint, server_key=found.server_key.encode())

    def _remove_others(self) -> None:
        """The files of earlier starts of the job on this host."""
        for path in glob.glob(os.path.join(glob.escape(os.path.dirname(self.path)), f"relay-{self._host}-*.json")):
            if path != self.path:
                with contextlib.suppress(OSError):
                    os.remove(path)
