"""The channel between coordinator and tasks: real sockets, and real second processes where they matter."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from examples.kafka.ports import free_ports
from midstream.control import channel
from midstream.control.channel import Address, Client, Server
from midstream.control.messages import (
    Accepted,
    FromTask,
    Refused,
    Release,
    TaskId,
    TaskOrder,
    TaskStarted,
    ToTask,
    WorkerId,
    WorkerJoined,
    WorkerReleased,
)
from midstream.errors import ChannelError
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex

LONG = 60.0  # seconds; only a failing test waits this long
LONG_MS = 60_000


def started(attempt: int = 0) -> TaskStarted:
    return TaskStarted(TaskId(Epoch(7), Run(0), StageIndex(0), PartitionId(0), attempt))


def echo(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
    """Answer with an order whose revision is the task's attempt, so that answers can be distinguished."""
    attempt = message.task.attempt if isinstance(message, TaskStarted) else 0
    return [(peer, TaskOrder(Revision(attempt), Digest("ab")))]


def revision(answer: ToTask) -> int:
    assert isinstance(answer, TaskOrder)
    return answer.revision


@contextlib.contextmanager
def python(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a separate Python process, which never outlives the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def packed(address: Address) -> str:
    return base64.b64encode(pickle.dumps(address)).decode()


@contextlib.contextmanager
def raw_dealer(address: Address, keys: bool = True, identity: bytes | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A socket that can send anything."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if identity is not None:
            dealer.routing_id = identity
        if keys:
            dealer.curve_serverkey = address.server_key
            dealer.curve_publickey, dealer.curve_secretkey = address.client_public, address.client_secret
        dealer.connect(address.endpoint)
        yield dealer


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_gets_its_answer():
    with Server(echo) as server, Client(server.address) as client:
        assert [revision(client.request(started(n))) for n in range(3)] == [0, 1, 2]


ONE_REQUEST = """
import base64, pickle, sys
from midstream.control.channel import Client
from midstream.control.messages import WorkerId, WorkerJoined

address = pickle.loads(base64.b64decode(sys.stdin.readline()))
with Client(address) as client:
    print(client.request(WorkerJoined(WorkerId("elsewhere", 7))))
"""


def test_a_client_in_another_process_needs_nothing_but_the_pickled_address():
    heard = []

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        heard.append(message)
        return [(peer, Accepted())]

    with Server(handle) as server, python(ONE_REQUEST) as process:
        out, err = process.communicate(packed(server.address), timeout=LONG)
    assert (out, err) == ("Accepted()\n", "")
    assert heard == [WorkerJoined(WorkerId("elsewhere", 7))]


def test_many_clients_at_once_each_get_their_own_answers():
    wrong: list[tuple[int, int]] = []

    def ask(who: int, address: Address) -> None:
        with Client(address) as client:
            for n in range(who * 1000, who * 1000 + 40):
                if (got := revision(client.request(started(n)))) != n:
                    wrong.append((n, got))

    with Server(echo) as server:
        threads = [threading.Thread(target=ask, args=(who, server.address)) for who in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert not any(thread.is_alive() for thread in threads)
        assert (wrong, server.error, server.dropped) == ([], None, 0)


def test_a_post_is_handled_and_its_answer_is_not_sent():
    heard = []

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        heard.append(type(message).__name__)
        return [(peer, Accepted())]

    with Server(handle) as server, Client(server.address) as client:
        client.post(WorkerReleased(WorkerId("host", 7)))
        assert client.request(started()) == Accepted()
        assert heard == ["WorkerReleased", "TaskStarted"]
        assert client.receive() is None


def test_a_request_that_the_coordinator_does_not_answer_is_refused_at_once():
    with Server(lambda peer, message: []) as server, Client(server.address) as client:
        assert client.request(WorkerReleased(WorkerId("host", 7))) == Refused(
            "the coordinator has no answer to WorkerReleased; post it"
        )


# ── unsolicited messages ──────────────────────────────────────────────────────────────────────────────────────────


def test_unsolicited_messages_do_not_disturb_a_request_and_are_kept():
    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        return [(peer, Release()), (peer, Accepted()), (peer, Refused("second thoughts"))]

    with Server(handle) as server, Client(server.address) as client:
        assert client.request(started(1)) == Accepted()
        assert client.request(started(2)) == Accepted()
        told = [client.receive(LONG) for _ in range(4)]
        assert told == [Release(), Refused("second thoughts")] * 2
        assert client.receive() is None


def test_a_message_from_one_task_can_trigger_a_message_to_another():
    peers = []

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        peers.append(peer)
        return [(peer, Accepted()), (peers[0], Release())]

    with Server(handle) as server, Client(server.address) as first, Client(server.address) as second:
        assert first.request(started(1)) == Accepted()
        assert first.receive(LONG) == Release()
        assert second.request(started(2)) == Accepted()
        assert first.receive(LONG) == Release()
        assert second.receive() is None


def test_send_does_not_wait_for_a_handler_at_work():
    entered, go_on, peers = threading.Event(), threading.Event(), []

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        peers.append(peer)
        entered.set()
        assert go_on.wait(LONG)
        return [(peer, Accepted())]

    with Server(handle) as server, Client(server.address) as client:
        answers: list[ToTask] = []
        asking = threading.Thread(target=lambda: answers.append(client.request(started())))
        asking.start()
        assert entered.wait(LONG)
        server.send(peers[0], Release())  # returns although the server's thread is inside the handler
        go_on.set()
        asking.join(LONG)
        assert answers == [Accepted()]
        assert client.receive(LONG) == Release()


def test_send_from_many_threads_loses_nothing_and_keeps_each_threads_order():
    peers: list[bytes] = []

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        peers.append(peer)
        return [(peer, Accepted())]

    with Server(handle) as server, Client(server.address) as client:
        client.request(started())

        def talk(who: int) -> None:
            for n in range(50):
                server.send(peers[0], Refused(f"{who} {n}"))

        threads = [threading.Thread(target=talk, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        told: dict[str, list[int]] = {}
        for _ in range(200):
            message = client.receive(LONG)
            assert isinstance(message, Refused)
            who, n = message.reason.split()
            told.setdefault(who, []).append(int(n))
        for thread in threads:
            thread.join(LONG)
        assert told == {str(who): list(range(50)) for who in range(4)}


def test_a_message_for_an_unknown_peer_is_counted_not_raised():
    with Server(echo) as server, Client(server.address) as client:
        server.send(b"nobody", Release())
        assert revision(client.request(started(3))) == 3
        assert server.undelivered == 1


def test_a_peer_that_connects_again_takes_over_its_identity():
    """Its old connection may look alive for a while; messages must reach the new one."""
    packet = channel._pack(1, started(5))
    with Server(echo) as server, raw_dealer(server.address, identity=b"me") as old:
        old.send(packet)
        assert old.poll(LONG_MS)
        with raw_dealer(server.address, identity=b"me") as new:
            new.send(packet)
            assert new.poll(LONG_MS)
            assert new.recv()
            server.send(b"me", Release())
            assert new.poll(LONG_MS)
            assert channel._unpack(channel._to_task, new.recv_multipart()) == (0, Release())


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_address_can_be_pickled_and_its_repr_hides_the_secret():
    with Server(echo) as server:
        address = server.address
        assert pickle.loads(pickle.dumps(address)) == address
        assert {address: 1}[pickle.loads(pickle.dumps(address))] == 1
        assert address.client_secret.decode() not in repr(address)
        with pytest.raises(AttributeError):
            address.endpoint = "tcp://elsewhere:1"  # type: ignore[misc]


def test_a_client_with_another_key_learns_of_its_refusal_before_the_timeout():
    heard = []
    public, secret = zmq.curve_keypair()

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        heard.append(message)
        return [(peer, Accepted())]

    with Server(handle) as server:
        forged = replace(server.address, client_public=public, client_secret=secret)
        with Client(forged, timeout=60) as client, pytest.raises(ChannelError, match="refused this client's key"):
            client.request(started())
        assert heard == []


def told_in_the_end(client: Client, what: str) -> str:
    """The error of a client with a short timeout; on a busy machine its handshake may outlast one request."""
    give_up = time.monotonic() + LONG
    while True:
        with pytest.raises(ChannelError) as caught:
            client.request(started())
        if what in str(caught.value) or time.monotonic() > give_up:
            assert what in str(caught.value)
            return str(caught.value)


def test_an_address_with_another_server_key_fails_and_says_what_is_wrong():
    with Server(echo) as server:
        stale = replace(server.address, server_key=zmq.curve_keypair()[0])
        with Client(stale, timeout=0.15) as client:
            told = told_in_the_end(client, "server key")
        assert told.startswith("no answer to TaskStarted within 0.15 s, at tcp://")


def test_the_keys_of_one_job_are_refused_by_another():
    with Server(echo) as one, Server(echo) as other:
        mixed = replace(one.address, endpoint=other.address.endpoint, server_key=other.address.server_key)
        with Client(mixed, timeout=60) as client, pytest.raises(ChannelError, match="refused this client's key"):
            client.request(started())
        with Client(other.address) as client:
            assert revision(client.request(started(1))) == 1


def test_messages_of_a_peer_without_keys_are_never_handled():
    heard = []

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        heard.append(message)
        return [(peer, Accepted())]

    failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    with Server(handle) as server, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        with dealer.get_monitor_socket(failed) as monitor:
            dealer.connect(server.address.endpoint)
            dealer.send(channel._pack(1, started()))
            assert monitor.poll(LONG_MS)
            assert recv_monitor_message(monitor)["event"] & failed
        assert not dealer.poll(0)
        assert (heard, server.dropped) == ([], 0)


def test_bytes_that_are_not_even_zeromq_do_no_harm():
    with Server(echo) as server:
        host, port = server.address.endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=LONG) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n" * 10)
            with Client(server.address) as client:
                assert revision(client.request(started(4))) == 4


GARBAGE = {
    "nothing": [b""],
    "half a number": [b"\0" * 7],
    "a number alone": [b"\0" * 8],
    "not msgpack": [b"\0" * 8 + b"\xc1"],
    "msgpack of no message": [b"\0" * 8 + b"\x07"],
    "an unknown message": [b"\0" * 8 + b"\x81\xa4type\xa5Bogus"],
    "a message without its fields": [b"\0" * 8 + b"\x81\xa4type\xabTaskStarted"],
    "bytes after a message": [channel._pack(0, started()) + b"\0"],
    "a message for a task": [channel._pack(0, Release())],
    "too many frames": [channel._pack(0, started()), b""],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE)
def test_garbage_from_a_peer_with_the_right_key_is_dropped_and_counted(frames):
    with Server(echo) as server, raw_dealer(server.address) as dealer:
        dealer.send_multipart(frames)
        dealer.send(channel._pack(1, started(9)))
        assert dealer.poll(LONG_MS)
        assert channel._unpack(channel._to_task, dealer.recv_multipart())[0] == 1
        assert (server.dropped, server.error) == (1, None)


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_when_a_handler_raises_the_sender_is_refused_and_the_server_continues():
    def handle(peer: bytes, message: FromTask) -> Iterator[tuple[bytes, ToTask]]:
        attempt = message.task.attempt if isinstance(message, TaskStarted) else 0
        yield peer, Release()
        if attempt:
            raise LookupError(f"attempt {attempt}")
        yield peer, Accepted()

    with Server(handle) as server, Client(server.address) as client:
        for n in (1, 2):
            refusal = Refused(f"the coordinator failed on TaskStarted: LookupError: attempt {n}")
            assert client.request(started(n)) == refusal
            assert client.receive() is None  # a handler that raised sends nothing
        client.post(started(3))
        assert client.request(started(0)) == Accepted()
        assert (type(server.error), str(server.error)) == (LookupError, "attempt 1")


def test_a_handler_that_returns_something_unsendable_counts_as_failed():
    with Server(lambda peer, message: [(peer, object())]) as server, Client(server.address) as client:  # type: ignore[list-item]
        assert isinstance(client.request(started()), Refused)
        assert isinstance(server.error, TypeError)


def test_a_late_answer_is_never_taken_for_the_answer_to_a_later_request():
    entered, go_on = threading.Event(), threading.Event()

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        if message == started(1):
            entered.set()
            assert go_on.wait(LONG)
        return echo(peer, message)

    with Server(handle) as server, Client(server.address, timeout=0.1) as client:
        with pytest.raises(ChannelError, match=r"no answer to TaskStarted within 0.1 s, at tcp://127.0.0.1:\d+: "):
            client.request(started(1))
        assert entered.wait(LONG)
        go_on.set()
        client.timeout = LONG
        assert revision(client.request(started(2))) == 2
        assert client.receive() is None


def test_a_timeout_distinguishes_a_stuck_driver_from_a_missing_one():
    go_on = threading.Event()

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        if message == started(1):
            return echo(peer, message)
        assert go_on.wait(LONG)
        return []

    with Server(handle) as server:
        with Client(server.address, timeout=LONG) as client:
            assert revision(client.request(started(1))) == 1, "there is a connection, however long that took"
            client.timeout = 0.1
            with pytest.raises(ChannelError, match="the connection is up"):
                client.request(started(2))
        go_on.set()
    with Client(server.address, timeout=0.1) as client, pytest.raises(ChannelError, match="nobody answers there"):
        client.request(started())


def test_receive_waits_no_longer_than_its_timeout():
    with Server(echo) as server, Client(server.address) as client:
        assert client.receive(0.02) is None
        assert client.receive() is None


def test_the_last_messages_of_a_closing_server_arrive_and_the_loss_is_reported_once():
    words: list[ToTask] = [*[Refused("so much to say " * 1000)] * 300, Release()]

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        return [(peer, Accepted()), *((peer, word) for word in words)]

    with Server(handle) as server, Client(server.address) as client:
        assert client.request(started()) == Accepted()
        server.close()
        assert [client.receive(LONG) for _ in words] == words
        with pytest.raises(ChannelError, match="the connection was lost"):
            client.receive(LONG)
        assert client.receive(0.01) is None


def test_a_client_that_waits_notices_that_the_server_closes():
    raised: list[str] = []

    def wait(client: Client) -> None:
        try:
            client.receive(LONG)
        except ChannelError as error:
            raised.append(error.message)

    with Server(echo) as server, Client(server.address) as client:
        client.request(started())
        waiting = threading.Thread(target=wait, args=(client,))
        waiting.start()
        server.close()
        waiting.join(LONG)
        assert not waiting.is_alive()
        assert len(raised) == 1
        assert "the connection was lost" in raised[0]


MUTE_SERVER = """
import base64, pickle, sys, threading
from midstream.control.channel import Server
from midstream.control.messages import Accepted, WorkerJoined

def handle(peer, message):
    if isinstance(message, WorkerJoined):
        return [(peer, Accepted())]
    print("asked", flush=True)
    threading.Event().wait()

server = Server(handle)
print(base64.b64encode(pickle.dumps(server.address)).decode(), flush=True)
sys.stdin.read()
"""


def test_a_driver_that_is_killed_ends_the_wait_for_its_answer_at_once():
    raised: list[str] = []

    def ask(client: Client) -> None:
        try:
            client.request(started())
        except ChannelError as error:
            raised.append(error.message)

    with python(MUTE_SERVER) as driver:
        assert driver.stdout is not None
        with Client(pickle.loads(base64.b64decode(driver.stdout.readline())), timeout=60) as client:
            asking = threading.Thread(target=ask, args=(client,))
            asking.start()
            assert driver.stdout.readline() == "asked\n"
            driver.kill()
            asking.join(LONG)
    assert len(raised) == 1
    assert "the connection was lost: the driver has closed it or died" in raised[0]


def test_a_driver_that_falls_silent_is_noticed_by_heartbeat(monkeypatch):
    """A stopped process keeps its connections open, like a machine without power: only heartbeats reveal it."""
    monkeypatch.setattr(channel, "_HEARTBEAT_EVERY", 20)
    monkeypatch.setattr(channel, "_HEARTBEAT_LIMIT", 100)
    with python(MUTE_SERVER) as driver:
        assert driver.stdout is not None
        with Client(pickle.loads(base64.b64decode(driver.stdout.readline()))) as client:
            assert client.request(WorkerJoined(WorkerId("host", 7))) == Accepted()
            driver.send_signal(signal.SIGSTOP)
            with pytest.raises(ChannelError, match="the connection was lost"):
                client.receive(LONG)


# ── processes and threads ─────────────────────────────────────────────────────────────────────────────────────────

FORK = """
import gc, os, warnings
from midstream.control.channel import Client, Server
from midstream.control.messages import Accepted, Release, WorkerId, WorkerJoined, WorkerReleased
from midstream.errors import ChannelError

warnings.simplefilter("ignore")

def refused(call):
    try:
        call()
    except ChannelError as error:
        return "fork" in error.message
    return False

server = Server(lambda peer, message: [(peer, Accepted())])
client = Client(server.address)
client.request(WorkerJoined(WorkerId("host", 1)))
child = os.fork()
if not child:
    wrong = 1
    try:
        inherited = [
            refused(lambda: client.request(WorkerJoined(WorkerId("host", 2)))),
            refused(lambda: client.post(WorkerReleased(WorkerId("host", 2)))),
            refused(lambda: client.receive()),
            refused(lambda: server.send(b"peer", Release())),
        ]
        address = server.address
        client.close()
        server.close()
        del client
        gc.collect()
        with Client(address) as own:
            wrong = 0 if all(inherited) and own.request(WorkerJoined(WorkerId("host", 2))) == Accepted() else 2
    finally:
        os._exit(wrong)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("parent", client.request(WorkerJoined(WorkerId("host", 3))))
"""


def test_a_fork_cannot_use_inherited_sockets_but_can_open_its_own():
    with python(FORK) as process:
        out, err = process.communicate(timeout=LONG)
        # The parent closes nothing: an open channel does not keep a process from ending.
        assert (process.returncode, out, err) == (0, "child 0\nparent Accepted()\n", "")


def test_two_threads_on_one_client_get_an_error_instead_of_a_crash():
    entered, go_on = threading.Event(), threading.Event()

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        entered.set()
        assert go_on.wait(LONG)
        return [(peer, Accepted())]

    with Server(handle) as server, Client(server.address) as client:
        asking = threading.Thread(target=client.request, args=(started(),))
        asking.start()
        assert entered.wait(LONG)
        with pytest.raises(ChannelError, match="open one for each thread"):
            client.receive()
        go_on.set()
        asking.join(LONG)


# ── opening and closing ───────────────────────────────────────────────────────────────────────────────────────────


def test_close_can_be_repeated_frees_the_port_and_ends_the_thread():
    before = threading.active_count()
    server = Server(echo)
    host, port = server.address.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=LONG):
        pass
    server.close()
    server.close()
    assert threading.active_count() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=LONG)
    with pytest.raises(ChannelError, match="is closed"):
        server.send(b"peer", Release())


def test_a_closed_client_raises():
    with Server(echo) as server:
        client = Client(server.address)
        client.close()
        client.close()
        with pytest.raises(ChannelError, match="is closed; open a new one"):
            client.request(started())


def test_messages_posted_before_a_close_still_arrive():
    arrived = threading.Event()

    def handle(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        arrived.set()
        return []

    with Server(handle) as server:
        with Client(server.address) as client:
            client.post(WorkerReleased(WorkerId("host", 7)))
        assert arrived.wait(LONG)


def test_the_server_listens_on_the_given_name_or_address_only():
    with Server(echo, host="localhost") as server, Client(server.address) as client:
        assert revision(client.request(started(6))) == 6


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_a_host_that_is_no_address_of_the_driver_is_refused(host):
    with pytest.raises(ChannelError, match=f"cannot listen on '{host}'.*pass an address of the driver"):
        Server(echo, host=host)


def test_clients_may_know_the_server_by_another_name_than_its_own_address():
    with Server(echo, host="localhost", bind="0.0.0.0") as server, Client(server.address) as client:
        assert server.address.endpoint.startswith("tcp://localhost:")
        assert revision(client.request(started(6))) == 6


def test_a_server_takes_the_given_port_or_one_of_the_next(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel, "NEXT_PORTS", 1)
    free, _ = free_ports(2)
    with Server(echo, port=free) as one, Server(echo, port=free) as two:
        ports = [int(server.address.endpoint.rpartition(":")[2]) for server in (one, two)]
        assert ports == [free, free + 1]
        with pytest.raises(ChannelError, match=f"cannot listen on '127.0.0.1', ports {free} to {free + 1}: .*in use"):
            Server(echo, port=free)
