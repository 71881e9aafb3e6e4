"""The protocol between the coordinator and an operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from midstream.control.messages import (
    Commit,
    Event,
    Instruction,
    OperationMessage,
    TaskFailed,
    TaskFinished,
    TaskId,
    TaskOrder,
)
from midstream.control.run_book import Place
from midstream.engine.control_order import ControlReport

__all__ = ["Operation"]


class Operation(Protocol):
    """Something done to the tasks of a run while they run, such as switching to another revision.

    The coordinator makes an operation when the driver's event for it arrives, calls these methods in the order of
    events, and drops it when the run is sealed or abandoned. Rules for implementers:

    * It is pure: no clock, no socket, no random choice. Its state follows from the events, which the journal keeps, so
      replaying a journal rebuilds it. It needs no record of its own.
    * It sees the run through the :class:`~midstream.control.run_book.Attempts` passed to it, which it only reads.
      They are up to date in every call: an attempt that starts or ends is in them before the operation hears of it.
    * It hears only of tasks of its own run; the coordinator fences all others. Within the run anything may happen:
      attempts are killed without notice, started again, run side by side; messages arrive twice and late. A repeated
      message gets the same answer.
    * All attempts of a place must do the same, because any of them may be the one that counts. So all of them are told
      the same.
    * Its messages are structs of its own in :mod:`~midstream.control.messages`: the event that begins it, those that
      tasks send (:data:`~midstream.control.messages.OperationMessage`), and those that they are sent. State never
      travels in them; name files.
    * When a run is abandoned, its operations are dropped without a call. Whoever began one decides whether the next
      run gets it again.
    * There may be many in one run. One that is over says so, and costs later messages nothing.
    """

    @property
    def is_over(self) -> bool:
        """Whether it has nothing more to do in this run, so that the coordinator drops it."""

    def on_begun(self, listening: Mapping[TaskId, bytes]) -> Sequence[Instruction]:
        """The operation begins. ``listening`` has the peers of the attempts that can be notified now."""

    def excludes(self, event: Event) -> str | None:
        """Why an event of the driver is not allowed during this operation, or None."""

    def on_task_started(self, task: TaskId, assignment: TaskOrder) -> TaskOrder:
        """An attempt has started; returns its order, with what it must know about this operation."""

    def on_message(self, peer: bytes, message: OperationMessage) -> Sequence[Instruction] | None:
        """A task has sent a message; returns the answer and what follows, or None if another operation must answer."""

    def on_handled(self, places: Sequence[Place], report: ControlReport) -> Sequence[Instruction] | None:
        """Tasks of these places have run the handlers of a fast control operation, with equal results; returns what
        follows, or None if it is another operation's."""

    def on_heard_again(self, task: TaskId, peer: bytes) -> Sequence[Instruction]:
        """The worker of a task that runs has joined again: what it was told before may have been lost on the way."""

    def on_task_ended(self, report: TaskFinished | TaskFailed) -> Sequence[Instruction]:
        """An attempt has finished or failed. The coordinator answers it."""

    def on_run_over(self, commit: Commit) -> Commit:
        """The epoch is whole; returns the commit with the results of this operation."""
