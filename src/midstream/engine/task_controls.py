"""The control operations that a task takes part in from its start: blocking ones, and those in band.

Their messages travel from task to task in frames. Each task sends one frame for all operations of a mode to each
partition of the next stage, and waits for one frame from each task of the stage before. Frames of a sender keep their
order, so a message comes behind the rows that were sent before it, and before those that were sent after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec
import pyarrow as pa

from midstream.engine.control_handlers import HandlersInTask, Surroundings
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.engine.intake import ControlArrival
from midstream.errors import ProtocolError
from midstream.ids import PartitionId, WireId
from midstream.planner.stages import Leaves

__all__ = ["TaskControls"]


class _Message(msgspec.Struct, frozen=True):
    """The message of one operation: a value for each wire on which one was sent, or why the operation has failed."""

    number: int
    values: dict[WireId, bytes] = {}
    error: str | None = None


class _Messages(msgspec.Struct, frozen=True):
    """The content of a frame."""

    mode: ControlMode
    messages: tuple[_Message, ...]


_decoder = msgspec.msgpack.Decoder(_Messages)


class TaskControls:
    """Used by the stage runner, which knows when rows have been taken."""

    def __init__(self, orders: Iterable[ControlOrder], senders: int, around: Surroundings) -> None:
        stage = around.program.stage
        self._sends = stage.leaves is Leaves.EXCHANGE
        self._waiting: dict[ControlMode, int] = {}
        """By mode: the number of senders whose messages have not come yet; none where messages enter by themselves."""
        self._heard: set[tuple[ControlMode, PartitionId]] = set()
        self._handlers: dict[ControlMode, list[HandlersInTask]] = defaultdict(list)
        for order in orders:
            self._handlers[order.mode].append(HandlersInTask(order, around))
            self._waiting[order.mode] = 0 if stage.index in order.entries else senders

    def enters(self, mode: ControlMode) -> bool:
        """Whether messages of this mode enter here, so that none will come."""
        return self._waiting.get(mode) == 0 and not any(each is mode for each, _ in self._heard)

    def arrive(self, arrival: ControlArrival) -> ControlMode | None:
        """Messages of a sender have come; returns their mode if those of all senders have come now."""
        found = _decoder.decode(arrival.payload)
        handlers = {each.order.number: each for each in self._handlers[found.mode]}
        if (found.mode, arrival.sender) in self._heard or {each.number for each in found.messages} != handlers.keys():
            raise ProtocolError(f"partition {arrival.sender} of the stage before has sent other messages than expected")
        self._heard.add((found.mode, arrival.sender))
        for message in found.messages:
            handlers[message.number].arrive(arrival.sender, message.values, message.error)
        self._waiting[found.mode] -= 1
        return found.mode if self._waiting[found.mode] == 0 else None

    def sweep(self, mode: ControlMode) -> pa.Buffer | None:
        """Run the handlers of all operators; returns what to send to each partition of the next stage, if there is
        one behind an exchange."""
        for each in self._handlers[mode]:
            each.sweep(reaches_state=mode is ControlMode.BLOCKING)
        if not self._sends or not self._handlers[mode]:
            return None
        messages = tuple(_Message(each.order.number, each.outgoing(), each.error) for each in self._handlers[mode])
        return pa.py_buffer(msgspec.msgpack.encode(_Messages(mode, messages)))

    def require_all(self) -> None:
        """All input is taken, so the messages of all senders must have come."""
        for mode, missing in self._waiting.items():
            if missing:
                raise ProtocolError(f"{mode} messages of {missing} task(s) of the stage before have not come")

    def reports(self) -> tuple[ControlReport, ...]:
        """The result of each operation."""
        return tuple(each.report() for handlers in self._handlers.values() for each in handlers)
