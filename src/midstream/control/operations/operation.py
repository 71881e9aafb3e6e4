"""What an operation is to the coordinator."""

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

__all__ = ["Operation"]


class Operation(Protocol):
    """Something that is done to the tasks of a run while they run. Switching to another revision is the first one.

    The coordinator makes an operation when the driver's event for it arrives, calls these methods in the order in which
    things happen, and drops it when the run is sealed or abandoned. What holds for an implementer:

    * It is pure: no clock, no socket, no random choice. Its state follows from the events, which the journal keeps, so
      replaying a journal rebuilds it. It needs no record of its own.
    * It knows the run by the :class:`~midstream.control.run_book.Attempts` that it was made with, which it only reads.
      They are up to date in every call: an attempt that starts or ends is in them before the operation hears of it.
    * It hears only of tasks of its own run; the coordinator fences all others. Within the run anything may happen:
      attempts are killed without a word, started again, run side by side; messages arrive twice and late. A message
      that is repeated gets the same answer.
    * All attempts of a place must do the same, because any of them may be the one that counts. So what one of them was
      told, the others are told, too.
    * Its messages are structs of its own in :mod:`~midstream.control.messages`: the event that begins it, those that
      tasks send (:data:`~midstream.control.messages.OperationMessage`), and those that they are sent. State never
      travels in them; name files.
    * A run that is abandoned takes its operations with it, without a call. Whoever began one decides whether the next
      run gets it again.
    """

    def on_begun(self, listening: Mapping[TaskId, bytes]) -> Sequence[Instruction]:
        """The operation begins. ``listening`` has the peers of the attempts that can be told of it now."""

    def excludes(self, event: Event) -> str | None:
        """Why an event of the driver makes no sense while this operation lasts, or None."""

    def on_task_started(self, task: TaskId, assignment: TaskOrder) -> TaskOrder:
        """An attempt has started; gives the assignment with what it must know of this operation."""

    def on_message(self, peer: bytes, message: OperationMessage) -> Sequence[Instruction] | None:
        """A task has sent a message; gives the answer and what follows from it, or None if it is for another one."""

    def on_task_ended(self, report: TaskFinished | TaskFailed) -> Sequence[Instruction]:
        """An attempt has finished or failed. The coordinator answers it."""

    def on_run_over(self, commit: Commit) -> Commit:
        """The epoch is whole; gives the commit with what came of this operation."""
