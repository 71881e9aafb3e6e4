"""The addresses of workers behind a relay, and the packets to and from it. Pure.

A relay stands between the coordinator and the workers of one executor. What the coordinator tells many of them travels
to the relay as one :class:`ToWorkers`, and what many of them answer comes back as one :class:`FromRelay`, in which
equal reports are written once. The relay knows each of its workers by a number of its own; a number and the relay's
name on the channel make an address, which the coordinator uses like that of any peer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec

from midstream.control.messages import (
    Exhausted,
    FromRelay,
    Handle,
    Handled,
    Prefetch,
    Prefetched,
    Reached,
    Release,
    Said,
    Send,
    Switch,
    TaskId,
    TaskNumbers,
    ToTask,
    ToWorkers,
    WorkerJoined,
    WorkerReleased,
)
from midstream.engine.control_order import ControlReport
from midstream.ids import Epoch, Run

__all__ = ["HOLD_S", "PAUSE_S", "JointReports", "Message", "Told", "behind", "by_relay", "relay_of", "unfold"]

Told = Handle | Switch | Release | Prefetch
"""What workers are told through a relay: nothing that they have asked for."""
Message = WorkerJoined | WorkerReleased | Prefetched | Reached | Exhausted | Handled
"""What workers say through a relay."""

PAUSE_S, HOLD_S = 0.002, 0.010
"""A relay keeps an answer until all tasks that were told have answered, or for so long no other has come, or so long at
most. Tasks that compute answer between two slices, so within about 5 ms of each other."""

MOST_AWAITED = 16
"""Operations whose answers a relay waits for; of older ones it does not know who has answered."""

_ADDRESS = struct.Struct(">cI")
_MARK = b"\1"  # no client's own name begins with it


def behind(relay: bytes, number: int) -> bytes:
    """The address of a worker that a relay knows by this number.

    >>> relay_of(behind(b"relay", 7)), relay_of(b"worker")
    (b'relay', None)
    """
    return _ADDRESS.pack(_MARK, number) + relay


def relay_of(peer: bytes) -> bytes | None:
    """The relay in an address; None if there is none."""
    return peer[_ADDRESS.size :] if peer[:1] == _MARK else None


def by_relay(sends: Iterable[Send]) -> Iterator[tuple[bytes, ToTask]]:
    """The packets for these messages: as they are for peers of the channel, joined for workers behind relays.

    Each worker gets its messages in the order in which they are here.
    """
    open_: dict[bytes, _Joined] = {}
    for send in sends:
        peer, message = send.peer, send.message
        if peer[:1] != _MARK:
            yield peer, message
            continue
        relay = peer[_ADDRESS.size :]
        joined = open_.get(relay)
        if joined is None or not joined.takes(message):
            if joined is not None:
                yield relay, joined.packet()
            assert isinstance(message, Told), "relays hand on what nobody has asked for"
            open_[relay] = joined = _Joined(message)
        joined.add(peer, message)
    for relay, joined in open_.items():
        yield relay, joined.packet()


class _Joined:
    """Messages for workers behind one relay that differ in their task only."""

    def __init__(self, first: Told) -> None:
        self._first = first
        self._content = _content(first)
        self._workers: list[int] = []
        self._tasks: list[TaskNumbers] = []

    def takes(self, message: ToTask) -> bool:
        return _content(message) is self._content

    def add(self, peer: bytes, message: ToTask) -> None:
        self._workers.append(_ADDRESS.unpack_from(peer)[1])
        if isinstance(message, Handle | Switch):
            task = message.task
            self._tasks.append((task.stage, task.partition, task.attempt))

    def packet(self) -> ToWorkers:
        return ToWorkers(self._first, tuple(self._workers), tuple(self._tasks))


def _content(message: ToTask) -> object:
    """What is the same object in all messages that an operation sends; the message itself if there are no others."""
    if isinstance(message, Handle):
        return message.order
    if isinstance(message, Switch):
        return message.change
    return Release if isinstance(message, Release) else message


def unfold(packet: ToWorkers) -> Iterator[tuple[int, Told]]:
    """The messages in a packet, with the numbers of the workers that they are for, in order."""
    message = packet.message
    if not isinstance(message, Handle | Switch):
        for number in packet.workers:
            yield number, message
        return
    first = message.task
    for number, each in zip(packet.workers, packet.tasks, strict=True):
        yield number, msgspec.structs.replace(message, task=TaskId(first.epoch, first.run, *each))


class JointReports:
    """What a relay has heard from its workers and not sent on yet, and when it is to be sent. Takes events and a
    clock's time, gives packets; nothing is dropped, and each task's messages keep their order.

    >>> from midstream.ids import PartitionId, StageIndex
    >>> reports, same = JointReports(), ControlReport(1, ("score",))
    >>> tasks = [TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(each), each) for each in range(2)]
    >>> for number, task in enumerate(tasks):
    ...     reports.heard(number, Handled(task, same), now=5.0)
    >>> [(len(said.tasks), said.message.report.number) for said in reports.take(now=5.0 + PAUSE_S).said]
    [(2, 1)]
    """

    def __init__(self) -> None:
        self._said: list[tuple[int, Message, dict[TaskNumbers, None]]] = []
        self._joint: dict[tuple[Epoch, Run, ControlReport], int] = {}
        """Where equal reports are gathered."""
        self._last: dict[TaskNumbers, int] = {}
        """Where the newest message of a task is."""
        self._due: float | None = None
        self._latest = 0.0
        """When what is held must go, whatever comes."""
        self._awaited: dict[int, set[TaskNumbers]] = {}
        """By operation: the tasks that have been told and have not answered."""

    def told(self, packet: ToWorkers) -> None:
        """A packet has come for workers, which will answer."""
        if isinstance(packet.message, Handle):
            self._awaited.setdefault(packet.message.order.number, set()).update(packet.tasks)
            if len(self._awaited) > MOST_AWAITED:
                del self._awaited[next(iter(self._awaited))]

    def heard(self, worker: int, message: Message, now: float) -> None:
        """A worker has said something."""
        if isinstance(message, Handled):
            task = message.task
            numbers = (task.stage, task.partition, task.attempt)
            key = (task.epoch, task.run, message.report)
            at = self._joint.get(key)
            if at is None or self._last.get(numbers, -1) > at:
                at = self._joint[key] = len(self._said)
                self._said.append((worker, message, {}))
            self._said[at][2][numbers] = None
            self._last[numbers] = at
            due = now if self._is_last(message.report.number, numbers) else now + PAUSE_S
        else:
            if isinstance(message, Reached | Exhausted):
                task = message.task
                self._last[task.stage, task.partition, task.attempt] = len(self._said)
            self._said.append((worker, message, {}))
            due = now
        if self._due is None:
            self._latest = now + HOLD_S
        # What is due already stays so.
        self._due = due if self._due is None or self._due > now else self._due
        self._due = min(self._due, self._latest)

    def _is_last(self, operation: int, task: TaskNumbers) -> bool:
        """Whether all tasks that were told of an operation have answered, now that this one has."""
        if (awaited := self._awaited.get(operation)) is None:
            return False
        awaited.discard(task)
        if not awaited:
            del self._awaited[operation]
        return not awaited

    def wait(self, now: float) -> float | None:
        """Seconds until :meth:`take` has something; None if there is nothing."""
        return None if self._due is None else max(0.0, self._due - now)

    def take(self, now: float) -> FromRelay | None:
        """The packet to send now, if it is time."""
        if self._due is None or now < self._due:
            return None
        # A single one goes as it was: to list its task would only cost.
        packet = FromRelay(
            tuple(
                Said(worker, message, tuple(tasks) if len(tasks) > 1 else ()) for worker, message, tasks in self._said
            )
        )
        self._said.clear()
        self._joint.clear()
        self._last.clear()
        self._due = None
        return packet
