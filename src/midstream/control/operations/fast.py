"""A fast control operation: the tasks that are at work at one moment run its handlers, wherever they are in their rows.

Those are the tasks with an attempt that can be notified when the operation begins. If there are none, tasks are given
the operation as they start, until the first of them has run its handlers.

For each of these places the first report counts. A place is done, too, when an attempt finishes without having heard of
the operation. Reports after the epoch is sealed no longer count, so the operation ends with its run if any task has
answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from midstream.control.messages import (
    Commit,
    ControlNoted,
    Event,
    Handle,
    Instruction,
    OperationMessage,
    Send,
    TaskFailed,
    TaskFinished,
    TaskId,
    TaskOrder,
)
from midstream.control.run_book import Attempts, Place
from midstream.engine.control_order import ControlOrder, ControlReport

__all__ = ["Fast"]


class Fast:
    """An :class:`~midstream.control.operations.operation.Operation`: a fast control operation."""

    def __init__(self, order: ControlOrder, attempts: Attempts) -> None:
        self._order = order
        self._attempts = attempts
        self._reports: dict[Place, ControlReport] = {}
        self._asked: set[Place] = set()
        self._waiting: set[Place] = set()
        """The attempts that were asked and have neither answered nor ended."""
        self._missed: set[Place] = set()
        self._at_work: frozenset[Place] = frozenset()
        """The places that had started when the operation began."""
        self._is_open = False
        """Whether tasks that start now are asked, because none was at work."""
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether all who were asked have answered or ended."""
        return self._is_over

    def on_begun(self, listening: Mapping[TaskId, bytes]) -> list[Instruction]:
        """Tell the tasks that are at work."""
        self._at_work = frozenset(self._attempts.started)
        told: list[Instruction] = []
        for task, peer in listening.items():
            place = (task.stage, task.partition)
            if place not in self._attempts.finished and task not in self._attempts.over:
                self._asked.add(place)
                self._waiting.add(place)
                told.append(Send(peer, Handle(task, self._order)))
        self._is_open = not told
        return told

    def excludes(self, event: Event) -> str | None:
        """It excludes nothing."""
        return None

    def on_task_started(self, task: TaskId, assignment: TaskOrder) -> TaskOrder:
        """Ask it, if none was at work; or if it is another attempt of a task that was asked, which may be dead."""
        place = (task.stage, task.partition)
        if self._is_over or not (self._is_open or place in self._asked) or self._is_done(place):
            return assignment
        self._asked.add(place)
        self._waiting.add(place)
        return msgspec.structs.replace(assignment, controls=(*assignment.controls, self._order))

    def on_message(self, peer: bytes, message: OperationMessage) -> list[Instruction] | None:
        """Tasks have nothing to ask."""
        return None

    def on_handled(self, places: Sequence[Place], report: ControlReport) -> list[Instruction] | None:
        """Tasks have run the handlers."""
        if report.number != self._order.number:
            return None
        if self._is_over:
            return []
        heard = [place for place in places if place in self._asked and not self._is_done(place)]
        if not heard:
            return []
        self._reports.update(dict.fromkeys(heard, report))
        self._waiting.difference_update(heard)
        self._is_open = False
        return self._ended()

    def on_heard_again(self, task: TaskId, peer: bytes) -> list[Instruction]:
        """Ask it again if it has not answered; or now, if nobody else could be asked, or if it was at work when the
        operation began and only what its worker said through a relay came late."""
        place = (task.stage, task.partition)
        is_late = place in self._at_work and place not in self._asked
        if not (place in self._waiting or self._is_open or is_late) or self._is_over or self._is_done(place):
            return []
        if task in self._attempts.over:
            return []
        self._asked.add(place)
        self._waiting.add(place)
        return [Send(peer, Handle(task, self._order))]

    def on_task_ended(self, report: TaskFinished | TaskFailed) -> list[Instruction]:
        """A task that ends has nothing more to say."""
        place = (report.task.stage, report.task.partition)
        if self._is_over or isinstance(report, TaskFailed) or place not in self._asked or self._is_done(place):
            return []
        self._missed.add(place)
        self._waiting.discard(place)
        if not self._reports and not self._waiting:
            self._is_open = True  # nobody is left who could answer
        return self._ended()

    def on_run_over(self, commit: Commit) -> Commit:
        """End it with the reports that have come; without any, the next run begins with it again."""
        if self._is_over or not self._reports:
            return commit
        return msgspec.structs.replace(commit, controls={**commit.controls, self._order.number: self._found})

    def _ended(self) -> list[Instruction]:
        if self._waiting or not self._reports:
            return []
        self._is_over = True
        return [ControlNoted(self._order.number, self._found, len(self._missed))]

    def _is_done(self, place: Place) -> bool:
        return place in self._reports or place in self._missed

    @property
    def _found(self) -> tuple[ControlReport, ...]:
        return tuple(self._reports[place] for place in sorted(self._reports))
