"""The network between the coordinator on the driver and tasks in Python workers: ZeroMQ, encrypted with CURVE.

The :class:`Server` holds a ROUTER, each :class:`Client` a DEALER. A job makes one key pair for the server and one for
all its clients; the :class:`Address` carries what a client needs and travels in Spark's task closure. A peer without
the clients' key is refused in the handshake, before any of its bytes are decoded. The number of peers that do not
finish the handshake is limited: see :mod:`midstream.control.connection_limit`.

A packet is a request number (eight bytes; 0 if it neither wants an answer nor is one) and a message in msgpack. An
answer carries the number of its request, so a late answer is never taken for the answer to the next request.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket as sockets
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import zmq
from zmq.utils import z85

from midstream.control.connection_limit import ConnectionLimit
from midstream.control.descriptors import make_room
from midstream.control.messages import Accepted, FromTask, Refused, Stay, TaskOrder, ToTask
from midstream.errors import ChannelError

M = TypeVar("M")
Handler = Callable[[bytes, FromTask], Iterable[tuple[bytes, ToTask]]]

_NUMBER = struct.Struct(">Q")
_UNASKED = 0
_EVENT = struct.Struct("=H")  # pyzmq's own reader would import asyncio into every worker
# The messages that can answer a request. All other messages of the coordinator are unsolicited.
_ANSWERS = (TaskOrder, Accepted, Refused, Stay)
_from_task: msgspec.msgpack.Decoder[FromTask] = msgspec.msgpack.Decoder(FromTask)
_to_task: msgspec.msgpack.Decoder[ToTask] = msgspec.msgpack.Decoder(ToTask)

# Milliseconds after which a peer that vanished (power, network) is noticed. libzmq's own threads answer heartbeats, so
# a process that only computes for long is never mistaken for a dead one.
_HEARTBEAT_EVERY, _HEARTBEAT_LIMIT = 1_000, 5_000
# Milliseconds a close waits for the last packets to leave; a peer that has stopped reading costs no more than this.
_LINGER = 500

NEXT_PORTS = 16
"""How many more ports a server tries if the one that it is to have is taken, as Spark does: each job needs its own."""

_REFUSALS = 20
_OTHER_KEY = "the process there presents a different server key: has the driver been restarted?"
# What a client knows about its connection, by the last event from libzmq; the first entry is the initial one.
_KNOWN = {
    zmq.Event.CLOSED: "nobody answers there: is the driver alive, and can this host reach its address?",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: _OTHER_KEY,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: _OTHER_KEY,
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the coordinator refused this client's key: use the address of the running job",
    zmq.Event.HANDSHAKE_SUCCEEDED: "the connection is up: is the driver stuck, or is its midstream another version?",
    zmq.Event.DISCONNECTED: "the connection was lost: the driver has closed it or died",
}


@dataclass(frozen=True)
class Address:
    """The coordinator's endpoint and the keys to connect to it. Hashable and picklable; its repr hides the secret.

    >>> Address("tcp://127.0.0.1:5000", b"server", b"public", b"secret")
    Address(endpoint='tcp://127.0.0.1:5000', server_key=b'server')
    """

    endpoint: str
    server_key: bytes
    client_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)


_TERM_PATIENCE_S = 5.0


class Server(contextlib.AbstractContextManager["Server"]):
    """The coordinator's end. A daemon thread calls ``handle(peer, message)`` and sends the messages that it returns.

    The first `TaskOrder`, `Accepted` or `Refused` among them that is for the sender answers the sender's request; the
    rest are unsolicited. ``handle`` runs in the server's thread only. If it raises, ``error`` keeps the first
    exception, the sender is refused, and the server continues. ``dropped`` counts packets that could not be decoded,
    ``undelivered`` messages for peers that are gone or have stopped reading, ``crowded_out`` connections that were
    closed because too many had not shown the clients' key.

    It listens on ``host``, which clients connect to. Where they must use another address or name than the one that this
    host has (behind NAT, in a container), it listens on ``bind``, and ``host`` is only what clients are told. ``port``
    0 means any free port; another one, or if that is taken one of the :data:`NEXT_PORTS` after it. The thread calls
    ``gone(peer)`` when a message is for a peer that is not connected. ``clients_of`` is the address of another server
    whose clients are admitted here; its own key pair is new all the same.

    >>> from midstream.control.messages import WorkerId, WorkerJoined
    >>> with Server(lambda peer, message: [(peer, Accepted())]) as server, Client(server.address) as client:
    ...     client.request(WorkerJoined(WorkerId("host", 7)))
    Accepted()
    """

    def __init__(
        self,
        handle: Handler,
        host: str = "127.0.0.1",
        *,
        bind: str | None = None,
        port: int = 0,
        gone: Callable[[bytes], None] = lambda peer: None,
        clients_of: Address | None = None,
    ) -> None:
        self.error: Exception | None = None
        self.dropped = 0
        self.undelivered = 0
        self._handle = handle
        self._gone = gone
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards `_inlet`, the one socket that several threads use
        # The check of keys (ZAP) is per context: a private one keeps the jobs of one driver apart.
        self._context = zmq.Context()
        try:
            self.address = self._open(host, bind, port, clients_of)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._serve, name="midstream-channel", daemon=True)
        self._thread.start()

    def _open(self, host: str, bind: str | None, port: int, clients_of: Address | None) -> Address:
        server_key, server_secret = zmq.curve_keypair()
        if clients_of is None:
            client_public, client_secret = zmq.curve_keypair()
        else:
            client_public, client_secret = clients_of.client_public, clients_of.client_secret
        self._admitted = z85.decode(client_public)
        self._zap, self._router = self._context.socket(zmq.REP), self._context.socket(zmq.ROUTER)
        self._outlet, self._inlet = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for end in (self._outlet, self._inlet):
            end.set_hwm(0)  # send() never blocks its caller
        self._outlet.bind("inproc://outgoing")
        self._inlet.connect("inproc://outgoing")
        # Bound before any peer can connect: libzmq admits every peer until something checks the keys.
        self._zap.bind("inproc://zeromq.zap.01")
        _keep_alive(self._router)
        self._router.curve_server = True
        self._router.curve_publickey, self._router.curve_secretkey = server_key, server_secret
        self._router.zap_domain = b"midstream"
        self._router.router_mandatory = True
        # A client that reconnects keeps its identity, even before its old connection is known to be dead.
        self._router.router_handover = True
        self._limit = ConnectionLimit(self._router, make_room())
        endpoint = _bind(self._router, bind or host, port, any_address=bind is not None)
        self._limit.start(endpoint)
        if bind is not None:
            endpoint = f"tcp://{_bracketed(host)}:{endpoint.rpartition(':')[2]}"
        return Address(endpoint, server_key, client_public, client_secret)

    @property
    def crowded_out(self) -> int:
        """Connections without the clients' key that were closed because there were too many."""
        return self._limit.closed

    def send(self, peer: bytes, message: ToTask) -> None:
        """Send a peer an unsolicited message. Any thread may call this; it returns at once."""
        self._tell_thread([peer, _pack(_UNASKED, message)])

    def close(self) -> None:
        """Send what is queued, stop the thread and free the port. Harmless when repeated or in a forked child."""
        if os.getpid() == self._pid:
            with contextlib.suppress(ChannelError):
                self._tell_thread([b"close"])
            self._thread.join()
            # Under heavy load libzmq was seen to wait forever here, for the connection of a client that had left with
            # requests unanswered. All sockets are closed by now, so a job need not wait for it.
            ending = threading.Thread(target=self._context.term, name="midstream-channel-end", daemon=True)
            ending.start()
            ending.join(_TERM_PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell_thread(self, frames: list[bytes]) -> None:
        with self._lock:
            if self._inlet.closed or os.getpid() != self._pid:
                at = f"{self.address.endpoint} of process {self._pid}"
                raise ChannelError(f"the server at {at} is closed, or this is a fork of that process; open a new one")
            self._inlet.send_multipart(frames)
            if len(frames) == 1:
                self._inlet.close()

    # ── the server's thread ───────────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._router, self._outlet, self._zap):
            poller.register(socket, zmq.POLLIN)
        serving = True
        while serving:
            # One packet from each socket per round, so that a flood on one does not delay the others.
            for socket, _ in poller.poll():
                if socket is self._router:
                    frames = socket.recv_multipart(copy=False)
                    self._limit.spoke(frames[-1])
                    self._take(frames[0].bytes, [frame.bytes for frame in frames[1:]])
                    continue
                first, *rest = socket.recv_multipart()
                if socket is self._zap:
                    self._admit(first, *rest)
                elif rest:
                    self._deliver(first, rest[0])
                else:
                    serving = False
        self._limit.stop(self._router)
        for socket in (self._router, self._outlet, self._zap):
            socket.close(linger=_LINGER)

    def _take(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            number, message = _unpack(_from_task, frames)
        except ChannelError:
            self.dropped += 1
            return
        try:
            packets = list(self._replies(peer, number, message))
        except Exception as error:
            self.error = self.error or error
            why = f"the coordinator failed on {type(message).__name__}: {type(error).__name__}: {error}"
            packets = [(peer, _pack(number, Refused(why)))] if number != _UNASKED else []
        for to, packet in packets:
            self._deliver(to, packet)

    def _replies(self, peer: bytes, number: int, message: FromTask) -> Iterator[tuple[bytes, bytes]]:
        answered = False
        for to, reply in self._handle(peer, message):
            if not answered and to == peer and isinstance(reply, _ANSWERS):
                answered = True
                if number != _UNASKED:  # no client waits for the answer to a post
                    yield peer, _pack(number, reply)
            else:
                yield to, _pack(_UNASKED, reply)
        if not answered and number != _UNASKED:
            yield peer, _pack(number, Refused(f"the coordinator has no answer to {type(message).__name__}; post it"))

    def _deliver(self, peer: bytes, packet: bytes) -> None:
        try:
            self._router.send_multipart((peer, packet), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.undelivered += 1
            if error.errno == zmq.EHOSTUNREACH:
                self._gone(peer)

    def _admit(self, version: bytes, request: bytes, *about: bytes) -> None:
        """Answer libzmq's question (ZAP, RFC 27) whether a peer in its handshake holds the clients' key."""
        known = about[3:] == (b"CURVE", self._admitted)  # before these: domain, address, identity
        verdict = (b"200", b"OK", b"task") if known else (b"400", b"unknown key", b"")
        self._zap.send_multipart((version, request, *verdict, b""))


class Client(contextlib.AbstractContextManager["Client"]):
    """A worker's end. Connects in the background; opening one never blocks.

    Keep one per process and address: each costs two threads and a handshake. It serves one thread at a time; a thread
    that waits for unsolicited messages while another makes requests needs its own client. :meth:`request` waits
    ``timeout`` seconds. Where a process has very many, they share a ``context``, which somebody else ends. The server
    is taken to be gone when ``refusals`` attempts to connect, 100 ms apart, have found no listener. A client that is
    ``wakeable`` has a :meth:`wake` for other threads.
    """

    def __init__(
        self,
        address: Address,
        timeout: float = 10.0,
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        refusals: int = _REFUSALS,
        wakeable: bool = False,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._number = _UNASKED
        self._inbox: deque[ToTask] = deque()
        self._known = zmq.Event.CLOSED
        self._refusals, self._most_refusals = 0, refusals
        self._broken: zmq.Event | None = None  # how the connection broke, until an error has reported it
        self._linger = _LINGER
        self._owns_context = context is None
        self._context = context or zmq.Context()
        socket = self._socket = self._context.socket(zmq.DEALER)
        _keep_alive(socket)
        socket.set_hwm(0)  # a request waits for its answer, never for room to be sent
        socket.linger = _LINGER  # a client that was never closed must not block the garbage collector forever
        # A name may have addresses of either kind, and libzmq then finds those of both.
        socket.ipv6 = not _is_ipv4(address.endpoint)
        socket.routing_id = uuid.uuid4().hex.encode()
        socket.curve_serverkey = address.server_key
        socket.curve_publickey, socket.curve_secretkey = address.client_public, address.client_secret
        self._monitor = socket.get_monitor_socket(sum(_KNOWN))
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._receiving = zmq.Poller()
        for each in (socket, self._monitor):
            self._receiving.register(each, zmq.POLLIN)
        self._alarm_lock = threading.Lock()
        self._alarm = os.pipe() if wakeable else None
        if self._alarm is not None:
            os.set_blocking(self._alarm[1], False)
            self._receiving.register(self._alarm[0], zmq.POLLIN)
        socket.connect(address.endpoint)

    def request(self, message: FromTask) -> ToTask:
        """Send a message and wait for its answer. Other messages that arrive meanwhile are kept for :meth:`receive`."""
        with self._alone():
            self._watch()
            self._broken = None  # an earlier connection broke; this request goes out on the next one
            self._number += 1
            self._socket.send(_pack(self._number, message))
            deadline = time.monotonic() + self.timeout
            while (arrived := self._next(deadline)) is not None:
                number, answer = arrived
                if number == self._number:
                    self._linger = _LINGER
                    return answer
                if number == _UNASKED:
                    self._inbox.append(answer)
            raise self._error(f"no answer to {type(message).__name__} within {self.timeout:g} s")

    def post(self, message: FromTask) -> None:
        """Send a message that needs no answer. It is lost if the coordinator cannot be reached."""
        with self._alone():
            self._socket.send(_pack(_UNASKED, message))

    def receive(self, timeout: float = 0.0) -> ToTask | None:
        """Return the oldest unsolicited message, or ``None`` if none arrives within ``timeout`` seconds or :meth:`wake`
        was called.

        Raises :class:`~midstream.errors.ChannelError`, once, if the connection is lost and nothing is left to read.
        """
        with self._alone():
            if self._inbox:
                return self._inbox.popleft()
            deadline = time.monotonic() + timeout
            while (arrived := self._next(deadline, self._receiving)) is not None:
                number, message = arrived
                if number == _UNASKED:
                    return message
            return None

    def wake(self) -> None:
        """Have :meth:`receive` return ``None`` at once, now or when it is called next. Any thread may call this."""
        with self._alarm_lock, contextlib.suppress(BlockingIOError):  # it may be full of earlier calls
            if self._alarm is not None:
                os.write(self._alarm[1], b"!")

    def close(self) -> None:
        """Disconnect once all posted messages are sent. Harmless when repeated or in a forked child."""
        if os.getpid() == self._pid:
            with self._lock:
                self._monitor.close(linger=0)
                self._socket.close(linger=self._linger)
                with self._alarm_lock:
                    for end in self._alarm or ():
                        os.close(end)
                    self._alarm = None
                if self._owns_context:
                    self._context.term()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise where libzmq would abort the process: its sockets used after a fork, or by two threads at once."""
        mine = f"this client of {self.address.endpoint}"
        if os.getpid() != self._pid:
            raise ChannelError(f"{mine} belongs to process {self._pid}; its fork {os.getpid()} must open its own")
        if not self._lock.acquire(blocking=False):
            raise ChannelError(f"{mine} is in use by another thread; open one for each thread")
        try:
            if self._socket.closed:
                raise ChannelError(f"{mine} is closed; open a new one")
            yield
        finally:
            self._lock.release()

    def _next(self, deadline: float, poller: zmq.Poller | None = None) -> tuple[int, ToTask] | None:
        """Wait until the deadline for a packet; raise when the connection breaks first."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            ready = dict((poller or self._poller).poll(0 if self._broken else math.ceil(left * 1000)))
            if ready or self._broken:
                # Events are noted before the socket is read: packets that arrived before the break are still delivered.
                self._watch()
                with contextlib.suppress(zmq.Again):
                    return _unpack(_to_task, self._socket.recv_multipart(zmq.NOBLOCK))
                if self._broken:
                    raise self._error("the coordinator cannot be reached")
                if self._alarm is not None and self._alarm[0] in ready:
                    os.read(self._alarm[0], 4096)
                    return None
            elif left == 0.0:
                return None

    def _watch(self) -> None:
        """Note libzmq's events of the connection."""
        while self._monitor.poll(0):
            event = zmq.Event(_EVENT.unpack_from(self._monitor.recv_multipart()[0])[0])
            # After a failed handshake libzmq only reports that the connection ended: less than is known already.
            if event is not zmq.Event.DISCONNECTED or self._known is zmq.Event.HANDSHAKE_SUCCEEDED:
                self._known = event
            # The driver listens before it starts any task: if repeated attempts find no listener, it is gone.
            self._refusals = self._refusals + 1 if event is zmq.Event.CLOSED else 0
            if self._known in (zmq.Event.DISCONNECTED, zmq.Event.HANDSHAKE_FAILED_AUTH) or (
                self._refusals >= self._most_refusals
            ):
                self._broken = self._known

    def _error(self, what: str) -> ChannelError:
        known, self._broken = self._broken or self._known, None
        self._linger = 0  # queued packets are of no use any more
        return ChannelError(f"{what}, at {self.address.endpoint}: {_KNOWN[known]}")


def _pack(number: int, message: FromTask | ToTask) -> bytes:
    return _NUMBER.pack(number) + msgspec.msgpack.encode(message)


def _unpack(decoder: msgspec.msgpack.Decoder[M], frames: list[bytes]) -> tuple[int, M]:
    try:
        (packet,) = frames
        return _NUMBER.unpack_from(packet)[0], decoder.decode(memoryview(packet)[_NUMBER.size :])
    except (ValueError, struct.error, msgspec.MsgspecError) as error:
        hint = "install the same version of midstream on driver and workers"
        raise ChannelError(f"a message was not understood ({error}); {hint}") from error


def _keep_alive(socket: zmq.Socket[bytes]) -> None:
    socket.heartbeat_ivl = _HEARTBEAT_EVERY
    socket.heartbeat_timeout = socket.heartbeat_ttl = _HEARTBEAT_LIMIT


def _bind(router: zmq.Socket[bytes], host: str, port: int, *, any_address: bool) -> str:
    """Bind to a port of this address; return its endpoint. ``any_address``: all addresses of this host are allowed."""
    ports = [str(each) for each in range(port, port + NEXT_PORTS + 1)] if port else ["*"]
    try:
        ip = ipaddress.ip_address(sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0][4][0])
        if ip.is_unspecified and not any_address:
            raise ValueError("it means every address, and clients need a single one")
        router.ipv6 = ip.version == 6
        _bind_to_first(router, str(ip), ports)
    except (OSError, ValueError, zmq.ZMQError) as error:
        at = f"{host!r}" if not port else f"{host!r}, ports {ports[0]} to {ports[-1]}"
        raise ChannelError(f"cannot listen on {at}: {error}; pass an address of the driver's host") from error
    return router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _bind_to_first(router: zmq.Socket[bytes], ip: str, ports: Sequence[str]) -> None:
    """Bind to the first of these ports that is free."""
    for port in ports:
        try:
            router.bind(f"tcp://{_bracketed(ip)}:{port}")
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or port == ports[-1]:
                raise


def _bracketed(host: str) -> str:
    """A host as it is written in an endpoint.

    >>> _bracketed("::1"), _bracketed("10.0.0.1"), _bracketed("driver.example.org")
    ('[::1]', '10.0.0.1', 'driver.example.org')
    """
    return f"[{host}]" if ":" in host else host


def _is_ipv4(endpoint: str) -> bool:
    """Whether an endpoint has the address of a host, and it is one of IPv4.

    >>> _is_ipv4("tcp://10.0.0.1:5000"), _is_ipv4("tcp://[::1]:5000"), _is_ipv4("tcp://driver:5000")
    (True, False, False)
    """
    try:
        ipaddress.IPv4Address(endpoint.removeprefix("tcp://").rpartition(":")[0])
    except ValueError:
        return False
    return True
