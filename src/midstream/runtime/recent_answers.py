"""The answers of this process to fast control operations that may not have arrived at the coordinator. Pure.

Answers go through a relay, which may be lost with them, and what a task reports at its end goes straight to the
coordinator, which then takes a task that has not answered for one that never will.
"""

from __future__ import annotations

import threading

from midstream.control.messages import Handle, Handled, TaskId

__all__ = ["RecentAnswers"]

MOST = 100
"""Most answers that are kept, the newest ones."""

ON_THE_WAY_S = 0.05
"""Older answers have arrived, or are asked for again when their loss is noticed; relays keep them for 10 ms at most."""


class RecentAnswers:
    """Any thread may call these methods."""

    def __init__(self) -> None:
        self._answers: dict[tuple[TaskId, int], tuple[float, Handled]] = {}
        self._lock = threading.Lock()

    def keep(self, answer: Handled, now: float) -> None:
        """A task has answered."""
        with self._lock:
            self._answers[answer.task, answer.report.number] = now, answer
            if len(self._answers) > MOST:
                del self._answers[next(iter(self._answers))]

    def to(self, told: Handle) -> Handled | None:
        """The answer to this message, if the task has given it: handlers run once in a task."""
        with self._lock:
            return self._answers.get((told.task, told.order.number), (0.0, None))[1]

    def on_the_way(self, task: TaskId, now: float) -> list[Handled]:
        """The answers of a task that what it says next may overtake."""
        with self._lock:
            return [
                answer for since, answer in self._answers.values() if answer.task == task and now - since < ON_THE_WAY_S
            ]
