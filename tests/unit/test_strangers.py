"""Strangers at the job's ports: many idle connections must not use up the descriptors that the job needs.

The job's side runs in a separate process with a low limit of open files, so that few connections are enough.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from midstream.control import connection_limit
from midstream.control.channel import Client, Server
from midstream.control.descriptors import make_room
from midstream.control.messages import Accepted, WorkerId, WorkerJoined
from midstream.server import connection_limit as server_limit
from midstream.server import serve
from midstream.server.client import JobClient
from tests.served import StandInJob, served

LONG = 60.0  # seconds; only a failing test waits this long
SOFT, HARD = 256, 1_400
STRANGERS = 1_500

# Opens files all the time, like a job, and answers each line of its input with its observations.
PREAMBLE = f"""
import json, logging, os, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, ({SOFT}, {HARD}))
logging.basicConfig(stream=sys.stderr, format="%(message)s")
failures, opened, over = [], 0, threading.Event()

def work():
    global opened
    while not over.wait(0.0002):
        try:
            with open(os.devnull):
                opened += 1
        except OSError as error:
            failures.append(str(error))

def report(**more):
    for _ in sys.stdin:
        print(json.dumps(dict(open=len(os.listdir("/proc/self/fd")), failures=failures[:3], opened=opened, **{{
            name: value() for name, value in more.items()
        }})), flush=True)
    over.set()

threading.Thread(target=work, daemon=True).start()
"""

CHANNEL = """
import base64, pickle
from midstream.control.channel import Server
from midstream.control.messages import Accepted

with Server(lambda peer, message: [(peer, Accepted())]) as server:
    print(base64.b64encode(pickle.dumps(server.address)).decode(), flush=True)
    report(closed=lambda: server.crowded_out)
"""

SERVER = """
from pathlib import Path
from midstream.server.serve import JobServer
from tests.served import StandInJob

server = JobServer(StandInJob(Path(sys.argv[1])))
print(json.dumps([server.url, server.token]), flush=True)
report()
server.close()
"""


@dataclass
class Driver:
    """The process that strangers connect to."""

    process: subprocess.Popen[str]
    told: str

    def report(self) -> dict[str, Any]:
        """Its observations so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the driver is gone: {self.process.communicate(timeout=LONG)[1][-400:]}"
        found: dict[str, Any] = json.loads(line)
        return found

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Ask until the condition holds."""
        deadline = time.monotonic() + LONG
        while not holds(found := self.report()):
            assert time.monotonic() < deadline, f"{what}: {found}"
        return found

    def end(self) -> list[str]:
        """Let it end; return what it logged."""
        _, err = self.process.communicate(timeout=LONG)
        assert self.process.returncode == 0, err
        return err.splitlines()


@contextlib.contextmanager
def driver(script: str, *arguments: str) -> Iterator[Driver]:
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + script, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield Driver(process, process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def strangers(host: str, port: int, says: bytes, between: Callable[[], object] | None) -> Iterator[list[socket.socket]]:
    """Connections that send ``says`` and nothing else; ``between`` is called now and then while they connect."""
    make_room()
    with contextlib.ExitStack() as stack:
        opened: list[socket.socket] = []
        for few in batched(range(STRANGERS), 16 if between else STRANGERS):
            opened += connected(stack, host, port, len(few), says)
            if between is not None:
                between()
        yield opened


def connected(stack: contextlib.ExitStack, host: str, port: int, count: int, says: bytes) -> list[socket.socket]:
    """This many connections, opened at the same time; returns when the kernel has connected them."""
    opened = [stack.enter_context(socket.socket()) for _ in range(count)]
    with selectors.DefaultSelector() as selector:
        for each in opened:
            each.setblocking(False)
            each.connect_ex((host, port))
            selector.register(each, selectors.EVENT_WRITE)
        deadline = time.monotonic() + LONG
        while selector.get_map():
            assert time.monotonic() < deadline, f"{len(selector.get_map())} of {count} are not connected"
            for key, _ in selector.select(1):
                selector.unregister(key.fileobj)
                with contextlib.suppress(OSError):  # it may already be closed
                    key.fileobj.send(says)  # type: ignore[union-attr]
    return opened


def batched(numbers: range, size: int) -> list[range]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def closed_ones(connections: list[socket.socket]) -> int:
    """How many of them the other side has closed."""
    closed = 0
    for each in connections:
        try:
            while each.recv(4096):
                pass
            closed += 1
        except BlockingIOError:
            pass
        except OSError:
            closed += 1
    return closed


pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd") or resource.getrlimit(resource.RLIMIT_NOFILE)[1] < STRANGERS + 100,
    reason="needs /proc, and a hard limit of open files that lets the test itself open 1,500 connections",
)


# In a burst the kernel may hold back some connections (SYN cookies), so the number of closed ones is not known.
BURST = (b"", False, 1)


@pytest.mark.parametrize(
    ("says", "paced", "at_least"),
    [BURST, (b"\xff\0\0\0\0\0\0\0\x01\x7f\x03", True, STRANGERS - connection_limit.allowed(HARD))],
    ids=["idle", "half a greeting"],
)
@pytest.mark.long
def test_strangers_at_the_channel_cannot_exhaust_descriptors(says, paced, at_least):
    with driver(CHANNEL) as job:
        address = pickle.loads(base64.b64decode(job.told))
        host, port = address.endpoint.removeprefix("tcp://").split(":")

        def join() -> None:
            with Client(address) as late:
                assert late.request(WorkerJoined(WorkerId("host", 2))) == Accepted()

        with Client(address) as early:
            assert early.request(WorkerJoined(WorkerId("host", 1))) == Accepted()
            before = job.report()["open"]
            # Connections are accepted in order: once a task has joined, the strangers before it are in.
            with strangers(host, int(port), says, join if paced else None) as crowd:
                job.wait_until(lambda found: found["closed"] >= at_least, "the oldest are closed")
                job.wait_until(lambda _: closed_ones(crowd) >= at_least, "strangers know")
                bound = before + connection_limit.allowed(HARD)
                job.wait_until(lambda found: found["open"] <= bound, "their descriptors are free")
                join()
                assert early.request(WorkerJoined(WorkerId("host", 1))) == Accepted()
            job.wait_until(lambda found: found["open"] == before, "all is as before")
        found = job.report()
        assert (found["failures"], found["opened"] > 0) == ([], True)
        assert len([line for line in job.end() if "have not shown the job's key" in line]) == 1


@pytest.mark.parametrize(
    ("says", "paced", "at_least"),
    [BURST, (b"GET /status HTTP/1.1\r\n", True, STRANGERS - server_limit.STRANGERS)],
    ids=["idle", "half a request"],
)
@pytest.mark.long
def test_strangers_at_the_server_cannot_exhaust_descriptors(says, paced, at_least, tmp_path, monkeypatch):
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    with driver(SERVER, str(tmp_path)) as job:
        url, token = json.loads(job.told)
        client = JobClient(url, token)
        assert client.status().status == "running"
        before = job.report()["open"]
        with strangers("127.0.0.1", int(url.rpartition(":")[2]), says, client.status if paced else None) as crowd:
            job.wait_until(lambda _: closed_ones(crowd) >= at_least, "the oldest are closed")
            bound = before + server_limit.STRANGERS
            job.wait_until(lambda found: found["open"] <= bound, "their descriptors are free")
            assert client.status().status == "running"
        job.wait_until(lambda found: found["open"] <= before, "all is as before")
        found = job.report()
        assert (found["failures"], found["opened"] > 0) == ([], True)
        assert len([line for line in job.end() if "have sent no request" in line]) == 1


def test_a_connection_without_a_request_is_closed_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(serve, "limited_protocol", lambda: server_limit.limited_protocol(patience_s=0.05))
    with served(StandInJob(tmp_path)) as server:
        at = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        for says in (b"", b"GET /status HTTP/1.1\r\nHost: localhost\r\n"):
            with socket.create_connection(at, timeout=LONG) as stranger, contextlib.suppress(ConnectionResetError):
                stranger.sendall(says)
                assert stranger.recv(1) == b""
        assert JobClient(server.url, server.token).status().status == "running"


def test_only_a_connection_to_the_channel_is_ever_closed(tmp_path):
    """When a stranger is about to be closed, its descriptor may already belong to something else."""
    with Server(lambda peer, message: [(peer, Accepted())]) as server, Client(server.address) as client:
        one, other = socket.socketpair()
        with socket.create_server(("127.0.0.1", 0)) as listener, one, other, open(tmp_path / "file", "wb") as file:
            outgoing = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
            with outgoing, accepted:
                for each in (one, listener, outgoing, accepted, file):
                    server._limit._close(each.fileno())
                server._limit._close(10_000)  # nothing at all
                for here, there in ((one, other), (accepted, outgoing), (outgoing, accepted)):
                    here.sendall(b"!")
                    assert there.recv(1) == b"!"
                assert file.write(b"!") == 1
        assert client.request(WorkerJoined(WorkerId("host", 1))) == Accepted()
        assert server.crowded_out == 0


def test_no_connection_that_has_shown_the_key_is_closed_however_many_there_are(monkeypatch):
    monkeypatch.setattr(connection_limit, "STRANGERS", 3)
    with Server(lambda peer, message: [(peer, Accepted())]) as server, contextlib.ExitStack() as stack:
        hello, clients = WorkerJoined(WorkerId("host", 7)), []
        for _ in range(12):  # one by one: not even three of them are strangers at a time
            clients.append(stack.enter_context(Client(server.address, timeout=LONG)))
            assert clients[-1].request(hello) == Accepted()
        assert [client.request(hello) for client in clients] == [Accepted()] * 12
        assert server.crowded_out == 0
        host, _, port = server.address.endpoint.removeprefix("tcp://").rpartition(":")
        strangers_ = connected(stack, host, int(port), 9, b"")
        deadline = time.monotonic() + LONG
        while closed_ones(strangers_) < 6:
            assert time.monotonic() < deadline, f"{closed_ones(strangers_)} of 9 strangers were closed"
            time.sleep(0.01)
        assert [client.request(hello) for client in clients] == [Accepted()] * 12


@pytest.mark.parametrize(("host", "is_peer"), [("0.0.0.0", True), ("127.0.0.1", True), ("127.0.0.2", False)])
def test_a_connection_is_known_by_the_endpoint_that_it_came_to(host: str, is_peer: bool) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            with accepted:
                assert connection_limit._is_peer_of(accepted, f"tcp://{host}:{port}") is is_peer
                assert not connection_limit._is_peer_of(accepted, f"tcp://{host}:{port + 1}")
