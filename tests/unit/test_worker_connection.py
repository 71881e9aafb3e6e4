"""A worker that has lost the coordinator, and has it again a moment later."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from midstream.control.channel import Server
from midstream.control.messages import Accepted, FromTask, TaskFailed, TaskFailure, TaskId, ToTask
from midstream.errors import ChannelError
from midstream.ids import Epoch, PartitionId, Revision, Run, StageIndex
from midstream.runtime.spark.worker import Whereabouts, _Worker

LONG = 60.0  # seconds; only a failing test waits this long


class Relay:
    """Hands on what clients and a server send each other, until it is cut; then it begins anew."""

    def __init__(self, endpoint: str) -> None:
        self._server = int(endpoint.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._sockets += [client, server]
                self._start(self._hand_on, client, server)
                self._start(self._hand_on, server, client)

    def _hand_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        _shut(target)

    def cut(self) -> None:
        """End all connections."""
        for each in tuple(self._sockets):
            _shut(each)

    def close(self) -> None:
        """End all connections, and hand on nothing more."""
        _shut(self._listener)
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def heard() -> list[FromTask]:
    return []


@pytest.fixture
def relay(heard: list[FromTask]) -> Iterator[tuple[Relay, Server]]:
    def answer(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        heard.append(message)
        return [(peer, Accepted())]

    with Server(answer) as server, contextlib.closing(Relay(server.address.endpoint)) as relay:
        yield relay, server


def test_a_function_that_fails_because_it_was_closed_is_not_reported(
    relay: tuple[Relay, Server], heard: list[FromTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker closes its functions when it loses the coordinator, perhaps while a task calls one of them."""
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    between, server = relay
    address = replace(server.address, endpoint=between.endpoint)
    worker = _Worker(Whereabouts(address, "job", str(tmp_path), str(tmp_path), str(tmp_path / "local")))
    closes, may_end = threading.Event(), threading.Event()

    def close() -> None:
        closes.set()
        may_end.wait(LONG)

    monkeypatch.setattr(worker.resources, "close", close)
    between.cut()
    assert closes.wait(LONG)
    task = TaskId(Epoch(7), Run(0), StageIndex(0), PartitionId(0), attempt=1)
    failure = TaskFailure("call", "ValueError: the connection is closed", None, "")
    with pytest.raises(ChannelError, match="connection was lost"):
        worker.ask(TaskFailed(task, failure, Revision(1)))
    assert [message for message in heard if isinstance(message, TaskFailed)] == []
    may_end.set()
