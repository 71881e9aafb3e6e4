"""A relay: a server for the lifelines of the workers of one executor, with one connection to the coordinator.

It runs in threads of one of these workers. What it decides is in :mod:`midstream.control.relayed`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable

from midstream.control.channel import Address, Client, Server
from midstream.control.messages import (
    Accepted,
    FromTask,
    RelayJoined,
    ToTask,
    ToWorkers,
    WorkerId,
    WorkerJoined,
    WorkerReleased,
)
from midstream.control.relayed import JointReports, Message, unfold
from midstream.errors import ChannelError

__all__ = ["Relay"]

_log = logging.getLogger("midstream")

IDLE_S = 3600.0
HOST = "127.0.0.1"


class Relay(contextlib.AbstractContextManager["Relay"]):
    """Hands on between the coordinator at ``upstream`` and the workers that connect to :attr:`address`, with the same
    keys of clients.

    It ends when its connection to the coordinator breaks, or when it is closed; then it calls ``ended``. Workers
    notice that, and join elsewhere: a relay does not know whether the coordinator is gone, or it has only been slow.

    Raises :class:`ChannelError` if the coordinator does not answer, or if it cannot listen.
    """

    def __init__(
        self, upstream: Address, worker: WorkerId, timeout: float, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._lock = threading.Lock()
        self._reports = JointReports()
        self._numbers: dict[bytes, int] = {}
        self._peers: dict[int, tuple[bytes, WorkerId]] = {}
        self._newest = 0
        self._is_closing = False
        self._ended = ended
        self._link = Client(upstream, timeout, wakeable=True)
        try:
            self._link.request(RelayJoined(worker))
            self._server = Server(self._from_worker, HOST, gone=self._gone, clients_of=upstream)
        except BaseException:
            self._link.close()
            raise
        self._thread = threading.Thread(target=self._carry, name="midstream-relay", daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        """Where workers join."""
        return self._server.address

    def close(self) -> None:
        """End it; workers join elsewhere."""
        self._is_closing = True
        self._link.wake()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── up: in the server's thread ────────────────────────────────────────────────────────────────────────────────

    def _from_worker(self, peer: bytes, message: FromTask) -> Iterable[tuple[bytes, ToTask]]:
        if not isinstance(message, Message):
            return ()  # requests of tasks go straight to the coordinator; the server refuses this one
        if isinstance(message, WorkerJoined):
            self._newest += 1
            with self._lock:
                self._numbers[peer] = self._newest
                self._peers[self._newest] = peer, message.worker
            self._hear(self._newest, message)
            return [(peer, Accepted())]
        if (number := self._numbers.get(peer)) is not None:
            self._hear(number, message)
        return ()

    def _gone(self, peer: bytes) -> None:
        """A worker was told something, and is not there any more: Spark has ended it."""
        with self._lock:
            number = self._numbers.pop(peer, None)
            worker = None if number is None else self._peers.pop(number)[1]
        if number is not None and worker is not None:
            self._hear(number, WorkerReleased(worker))

    def _hear(self, number: int, message: Message) -> None:
        now = time.monotonic()
        with self._lock:
            before = self._reports.wait(now)
            self._reports.heard(number, message, now)
            is_sooner = before is None or (before > 0 and self._reports.wait(now) == 0)
        if is_sooner:
            self._link.wake()

    # ── down: in a thread of its own, which also sends what has gathered ──────────────────────────────────────────

    def _carry(self) -> None:
        try:
            while not self._is_closing:
                with self._lock:
                    wait = self._reports.wait(time.monotonic())
                told = self._link.receive(IDLE_S if wait is None else wait)
                if isinstance(told, ToWorkers):
                    self._hand_on(told)
                with self._lock:
                    packet = self._reports.take(time.monotonic())
                if packet is not None:
                    self._link.post(packet)
        except ChannelError as error:
            _log.info("the relay at %s ends: %s", self.address.endpoint, error)
        finally:
            self._server.close()
            self._link.close()
            self._ended()

    def _hand_on(self, packet: ToWorkers) -> None:
        with self._lock:
            self._reports.told(packet)
            told = [(self._peers.get(number), message) for number, message in unfold(packet)]
        for at, message in told:
            if at is not None:
                self._server.send(at[0], message)
