"""Watches over handlers of control operations in a worker process: one that does not return in time is reported.

The thread that runs a handler cannot do that itself, and cannot be stopped either. So the run is given up, and Spark
ends a worker process that does not end its cancelled task.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from midstream.control.messages import TaskFailed, TaskFailure, TaskId
from midstream.engine.control_order import ControlOrder

__all__ = ["HandlerWatch"]


class HandlerWatch:
    """The watch of one process. Its thread starts with the first handler.

    ``report`` is called by that thread, at most once for each call of a handler.
    """

    def __init__(self, report: Callable[[TaskFailed], None]) -> None:
        self._report = report
        self._changed = threading.Condition()
        self._calls: dict[int, tuple[float, TaskFailed]] = {}
        """The calls in progress, by number: when each must have returned, and the report if it has not."""
        self._next = 0
        self._thread: threading.Thread | None = None
        self._is_over = False

    @contextlib.contextmanager
    def watching(self, task: TaskId, order: ControlOrder, operator: str, handler: str) -> Iterator[None]:
        """Within this block, a handler runs."""
        text = (
            f"operator {operator!r}, epoch {task.epoch}, partition {task.partition}: {handler} has not returned after "
            f"{order.time_limit_s:g} s"
        )
        failure = TaskFailure(operator, text, None, "")
        report = TaskFailed(task, failure, operation=order.number)
        with self._changed:
            number, self._next = self._next, self._next + 1
            self._calls[number] = (time.monotonic() + order.time_limit_s, report)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="midstream-handler-watch", daemon=True)
                self._thread.start()
            elif len(self._calls) == 1:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._calls.pop(number, None)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_over:
                    return
                now = time.monotonic()
                late = sorted(number for number, (deadline, _) in self._calls.items() if deadline <= now)
                if not late:
                    deadlines = [deadline for deadline, _ in self._calls.values()]
                    self._changed.wait(min(deadlines) - now if deadlines else None)
                    continue
                reports = [self._calls.pop(number)[1] for number in late]
            for report in reports:
                self._report(report)
