"""Connects the coordinator to the channel: passes it events, and executes its instructions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence

from midstream.control.channel import Address, Server
from midstream.control.coordinator import Coordinator
from midstream.control.journal import Journal
from midstream.control.messages import (
    Event,
    FromTask,
    Instruction,
    JobEnding,
    Received,
    Send,
    TaskFailed,
    ToTask,
    WorkerReleased,
)
from midstream.control.relayed import by_relay
from midstream.errors import ChannelError
from midstream.ids import StageIndex

RELEASE_TIMEOUT_S = 3.0


class ControlPlane:
    """One coordinator, one server, one lock: events come from the driver's callback and from the channel's thread."""

    def __init__(self, host: str, *, bind: str | None = None, port: int = 0, relays: bool = False) -> None:
        self.relays = relays
        """Whether workers are to use relays."""
        self._coordinator = Coordinator()
        self._journal = Journal()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._listener: Callable[[Sequence[Instruction]], None] = lambda _: None
        self._is_ending = False
        self._server = Server(self._from_channel, host, bind=bind, port=port, gone=self._gone)

    @property
    def address(self) -> Address:
        """What tasks need to reach the coordinator."""
        return self._server.address

    def listen(self, listener: Callable[[Sequence[Instruction]], None]) -> None:
        """Set the listener for instructions caused by tasks that are not for tasks. The channel's thread calls it."""
        self._listener = listener

    @property
    def failures(self) -> tuple[TaskFailed, ...]:
        """The failures that tasks of the run in progress have reported."""
        with self._lock:
            return self._coordinator.failures

    def finished(self, stage: StageIndex) -> int:
        """How many partitions of a stage have finished in the run in progress."""
        with self._lock:
            return self._coordinator.finished(stage)

    def journal(self) -> bytes:
        """The events of the newest run."""
        with self._lock:
            return self._journal.to_bytes()

    def close(self) -> None:
        """Tell workers to close their functions, wait briefly for them, and close the channel."""
        self._is_ending = True
        with contextlib.suppress(ChannelError):  # the channel is closed already; then workers know that, too
            self.tell(JobEnding())
            with self._changed:
                self._changed.wait_for(lambda: not self._coordinator.workers, timeout=RELEASE_TIMEOUT_S)
        self._server.close()

    def tell(self, event: Event) -> list[Instruction]:
        """Have the coordinator handle an event and send its messages to tasks; return what concerns the driver."""
        with self._lock:
            self._journal.append(event)
            instructions = self._coordinator.handle(event)
        for peer, message in by_relay(each for each in instructions if isinstance(each, Send)):
            self._server.send(peer, message)
        return [instruction for instruction in instructions if not isinstance(instruction, Send)]

    def _gone(self, peer: bytes) -> None:
        """A message is for a peer, perhaps a relay, that is gone. At its end a job does not wait for workers that Spark
        has ended before.

        Not earlier: a worker whose connection was lost may be connected again.
        """
        with self._changed:
            for worker, at in self._coordinator.workers_at(peer) if self._is_ending else ():
                event = Received(at, WorkerReleased(worker))
                self._journal.append(event)
                self._coordinator.handle(event)
                self._changed.notify_all()

    def _from_channel(self, peer: bytes, message: FromTask) -> Iterable[tuple[bytes, ToTask]]:
        with self._changed:
            event = Received(peer, message)
            self._journal.append(event)
            instructions = self._coordinator.handle(event)
            self._changed.notify_all()
        self._listener([each for each in instructions if not isinstance(each, Send)])
        return by_relay(each for each in instructions if isinstance(each, Send))
