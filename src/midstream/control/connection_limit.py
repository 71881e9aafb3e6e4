"""A limit on connections to the control channel that have not shown the job's key.

libzmq accepts every connection, without a limit, and waits ``ZMQ_HANDSHAKE_IVL`` for the handshake. So anyone who can
reach the port could use up the driver's descriptors. A :class:`ConnectionLimit` listens to libzmq's events and closes
the oldest strangers as soon as there are too many. A task's handshake takes milliseconds, so it is never among the
oldest for long; if it is closed nevertheless, libzmq reconnects by itself. Connections that have shown it are never
closed, however many there are.

How far libzmq can run ahead: its I/O thread waits when :data:`LEAD` events have not been read, however long Python
takes. So there are never more than :data:`STRANGERS` + ``LEAD`` strangers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator

import zmq

__all__ = ["STRANGERS", "ConnectionLimit"]

_log = logging.getLogger("midstream")

STRANGERS = 1_024
"""Connections that may be in their handshake at the same time, or an eighth of all descriptors if that is less."""

LEAD = 1_000
"""libzmq's high-water mark of the socket on which it sends events; it cannot be set."""

HANDSHAKE_MS = 10_000
"""How long a handshake may take. It needs the driver's Python, which may be busy for seconds."""

BACKLOG = 1_024
"""Connections that may wait in the kernel, where they cost no descriptors; the system may allow fewer."""

_ROUND = 500  # events to note before any connection is closed, so that none is closed after its handshake is over
_EVENT = struct.Struct("=Hi")
_ENDED = zmq.Event.DISCONNECTED | zmq.Event.CLOSED
_WATCHED = zmq.Event.ACCEPTED | zmq.Event.MONITOR_STOPPED | _ENDED


class Strangers:
    """The connections that have sent nothing but a handshake, by descriptor, oldest first. Decides which ones to close.

    libzmq reports that a handshake is over, but not on which connection; a message through the router tells both. So a
    connection is known once it has sent a message, as all clients do at once. The router's thread may be ahead of the
    one that notes connections, or behind it.

    >>> strangers = Strangers(limit=2)
    >>> for fd in (7, 8, 9, 10):
    ...     strangers.note(zmq.Event.ACCEPTED, fd)
    >>> strangers.spoke(8)
    >>> list(strangers.surplus())
    [7]
    >>> len(strangers)
    2
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[int, None] = {}
        self._known: set[int] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, event: zmq.Event, fd: int) -> None:
        """Note an event of a connection."""
        with self._lock:
            if event is not zmq.Event.ACCEPTED:
                self._waiting.pop(fd, None)
                self._known.discard(fd)
            elif fd not in self._known:
                self._waiting[fd] = None

    def spoke(self, fd: int) -> None:
        """A message has come, so the connection has shown the key. Called by the router's thread."""
        if fd not in self._known:
            with self._lock:
                self._known.add(fd)
                self._waiting.pop(fd, None)

    def surplus(self) -> Iterator[int]:
        """Remove and return the connections to close, oldest first."""
        while (fd := self._oldest()) is not None:
            yield fd

    def _oldest(self) -> int | None:
        with self._lock:
            if len(self._waiting) <= self._limit:
                return None
            fd = next(iter(self._waiting))
            del self._waiting[fd]
            return fd


class ConnectionLimit:
    """Watches a router, which must not be bound yet; call :meth:`start`, which starts a thread, once it is.

    ``closed`` counts the connections that it closed. ``descriptors`` is this process's limit.
    """

    def __init__(self, router: zmq.Socket[bytes], descriptors: int) -> None:
        self.closed = 0
        self.allowed = allowed(descriptors)
        router.handshake_ivl = HANDSHAKE_MS
        router.backlog = BACKLOG
        self._strangers = Strangers(self.allowed)
        self._monitor = router.get_monitor_socket(_WATCHED)
        self._monitor.rcvhwm = 1  # otherwise libzmq may run ahead twice as far

    def start(self, endpoint: str) -> None:
        """Start to watch, now that the router listens."""
        self._endpoint = endpoint
        # Opened here, so that the thread needs no descriptor when none is left.
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._handle = os.dup(self._nothing)
        self._thread = threading.Thread(target=self._watch, name="midstream-connections", daemon=True)
        self._thread.start()

    def stop(self, router: zmq.Socket[bytes]) -> None:
        """Stop watching. The router's thread calls this before it closes the router."""
        router.disable_monitor()
        self._thread.join()

    def spoke(self, message: zmq.Frame) -> None:
        """A message has come through the router, whose thread calls this."""
        with contextlib.suppress(zmq.ZMQError):  # it came over no connection of its own
            self._strangers.spoke(int(message.get(zmq.SRCFD)))

    def _watch(self) -> None:
        going_on = True
        while going_on:
            going_on = self._note(self._monitor.recv_multipart())
            with contextlib.suppress(zmq.Again):
                for _ in range(_ROUND):
                    going_on = going_on and self._note(self._monitor.recv_multipart(zmq.NOBLOCK))
            for fd in self._strangers.surplus():
                self._close(fd)
        self._monitor.close(linger=0)
        os.close(self._handle)
        os.close(self._nothing)

    def _note(self, frames: list[bytes]) -> bool:
        number, fd = _EVENT.unpack(frames[0])
        event = zmq.Event(number)
        if event is zmq.Event.MONITOR_STOPPED:
            return False
        self._strangers.note(event, fd)
        return True

    def _close(self, fd: int) -> None:
        """End a connection that libzmq holds; libzmq then sees its end, and closes the descriptor itself.

        libzmq may have closed it already, and the number may be in use for something else. So the descriptor is copied,
        and only a copy that is a connection to this endpoint is shut down.
        """
        try:
            os.dup2(fd, self._handle, inheritable=False)
        except OSError:
            return
        connection = None
        try:
            connection = socket.socket(fileno=self._handle)
            if _is_peer_of(connection, self._endpoint):
                connection.shutdown(socket.SHUT_RDWR)
                self._tell()
        except OSError:
            pass  # no socket, or no longer connected
        finally:
            if connection is not None:
                connection.detach()
            os.dup2(self._nothing, self._handle, inheritable=False)

    def _tell(self) -> None:
        self.closed += 1
        if self.closed == 1:
            _log.warning(
                "more than %d connections to %s have not shown the job's key; the oldest are closed. Find out who "
                "connects there: only this job's tasks should. This warning appears once",
                self.allowed,
                self._endpoint,
            )


def allowed(descriptors: int) -> int:
    """Most strangers for a process with this limit of descriptors (negative: unlimited).

    >>> allowed(1_024), allowed(4_096), allowed(65_536), allowed(-1)
    (128, 512, 1024, 1024)
    """
    return STRANGERS if descriptors < 0 else min(STRANGERS, max(1, descriptors // 8))


def _is_peer_of(connection: socket.socket, endpoint: str) -> bool:
    """Whether this connection was accepted at an endpoint such as ``tcp://[::1]:5000``, or ``tcp://0.0.0.0:5000``."""
    connection.getpeername()  # raises if there is none
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    found = connection.getsockname()
    if not isinstance(found, tuple) or found[1] != int(port):
        return False
    return str(found[0]) == host.strip("[]") or ipaddress.ip_address(host.strip("[]")).is_unspecified
