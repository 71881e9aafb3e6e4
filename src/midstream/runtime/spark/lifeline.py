"""A worker's lifeline: the connection on which it is told what it has not asked for, and which tells it that the job
ends, or that the driver is gone.

It goes straight to the driver, or through a relay in one of the workers beside it (:mod:`midstream.control.relay`).
When a relay is gone, the worker joins again: at the next one, or at the driver. What was lost with the relay, the
coordinator tells it again. Only a driver that is gone ends the lifeline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from midstream.control.channel import Address, Client
from midstream.control.messages import FromTask, Release, ToTask, WorkerId, WorkerJoined
from midstream.control.relay import Relay
from midstream.control.relay_file import RelayFile
from midstream.errors import ChannelError

__all__ = ["Lifeline"]

_log = logging.getLogger("midstream")

LISTEN_S = 3600.0
RELAY_S = 3.0
"""How long a worker looks for a relay before it goes straight to the driver."""
ANSWER_S = 1.0
"""How long a relay may take to answer; it is on the same host."""
RETRY_S = 0.01


class Lifeline:
    """The lifeline of one worker. One thread reads :meth:`messages`; any thread may :meth:`post`.

    ``relays`` is the folder in which workers of this executor agree on a relay; None: straight to the driver.
    """

    def __init__(self, address: Address, name: WorkerId, timeout: float, relays: str | None = None) -> None:
        self._address = address
        self._name = name
        self._timeout = timeout
        self._file = None if relays is None else RelayFile(relays, address)
        self._relay: Relay | None = None
        self._client: Client | None = None
        self._outbox: deque[FromTask] = deque()
        self._guard = threading.Lock()
        self._reader: int | None = None

    def messages(self, joined: Callable[[], None]) -> Iterator[ToTask]:
        """What the coordinator tells this worker, until the job ends. Calls ``joined`` when it listens.

        Raises :class:`ChannelError` when the driver is gone.
        """
        self._reader = threading.get_ident()
        while True:
            client, is_direct = self._join()
            joined()
            try:
                while not isinstance(message := self._receive(client), Release):
                    if message is not None:
                        yield message
                return
            except ChannelError as error:
                if is_direct:
                    raise
                _log.info("joining again: %s", error)
                client.close()

    def _receive(self, client: Client) -> ToTask | None:
        while self._outbox:
            client.post(self._outbox.popleft())
        return client.receive(LISTEN_S)

    def post(self, message: FromTask) -> None:
        """Send a message that needs no answer. It is lost if a relay is."""
        with self._guard:
            client = self._client
        if client is not None and threading.get_ident() == self._reader:
            client.post(message)
            return
        self._outbox.append(message)
        if client is not None:
            client.wake()

    def close(self) -> None:
        """Send what was posted, and disconnect. Only by the thread that has read the messages.

        A relay in this process stays for the other workers, until the driver is gone.
        """
        with self._guard:
            client, self._client = self._client, None
        if client is not None:
            while self._outbox:
                client.post(self._outbox.popleft())
            client.close()

    def _join(self) -> tuple[Client, bool]:
        """A connection to the driver or to a relay, and which of the two."""
        client = self._join_a_relay()
        is_direct = client is None
        if client is None:
            client = Client(self._address, self._timeout, wakeable=True)
            with self._guard:
                self._client = client  # so that it is closed, whatever the answer
            client.request(WorkerJoined(self._name))
        with self._guard:
            self._client = client
        return client, is_direct

    def _join_a_relay(self) -> Client | None:
        """A connection to the relay, which this worker becomes if there is none; None if it takes too long."""
        file, until = self._file, time.monotonic() + RELAY_S
        try:
            while file is not None and time.monotonic() < until:
                if self._relay is None and file.claim():
                    self._relay = self._open_relay(file)
                address = file.address()
                client = None if address is None else self._joined_at(address)
                if client is not None:
                    return client
                time.sleep(RETRY_S)
        except (OSError, ChannelError) as error:
            _log.warning("this worker is told of changes by the driver itself, because there is no relay: %s", error)
            self._file = None
        return None

    def _open_relay(self, file: RelayFile) -> Relay:
        def ended() -> None:
            self._relay = None
            file.release()

        try:
            relay = Relay(self._address, self._name, self._timeout, ended)
        except BaseException:
            file.release()
            raise
        try:
            file.publish(relay.address)
        except BaseException:
            relay.close()
            raise
        return relay

    def _joined_at(self, address: Address) -> Client | None:
        client = Client(address, ANSWER_S, refusals=1, wakeable=True)
        try:
            client.request(WorkerJoined(self._name))
        except ChannelError:
            client.close()
            return None
        return client
