"""The user's handle on a control operation: its record, its outcome and its result."""

from __future__ import annotations

import threading
from typing import Any

from midstream.checkpoint.control_log import ControlOutcome, ControlRecord
from midstream.errors import ControlFailed

__all__ = ["ControlHandle"]


class ControlHandle:
    """A control operation in progress, or ended. Made by :meth:`midstream.Job.control`; may be used by any thread.

    >>> from midstream import ControlOperation, Flow, ListSource, NoopSink
    >>> from midstream.testing import ControlAt, run_local
    >>> class Count(ControlOperation):
    ...     mode = "blocking"
    ...
    ...     def complete(self, ctx):
    ...         return 1
    ...
    ...     def merge(self, one, other):
    ...         return one + other
    >>> flow = Flow("numbers")
    >>> flow.source("in", ListSource([[{"n": 1}]] * 4, "n int")).map("m", lambda row: row).sink("out", NoopSink())
    >>> count = ControlAt(0, Count())
    >>> _ = run_local(flow, changes=[count])
    >>> count.handle
    ControlHandle(1, Count, complete)
    >>> count.handle.result(timeout=10)
    2
    """

    def __init__(self, record: ControlRecord) -> None:
        self.record = record
        """Who, when, what, and how it ended."""
        self._result: Any = None
        self._error: str | None = None
        self._ended = threading.Event()
        self._guard = threading.Lock()

    @property
    def number(self) -> int:
        """Its number, which handlers see, too."""
        return self.record.number

    @property
    def outcome(self) -> ControlOutcome:
        """How it ended, or that it is pending."""
        return self.record.outcome

    @property
    def is_over(self) -> bool:
        """Whether it has ended here. A blocking one that was cut short by the job's end is pending, and continues when
        the job starts again."""
        return self._ended.is_set()

    @property
    def error(self) -> str | None:
        """Why it failed, if it did."""
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; False if the time, in seconds, runs out first."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for its end, and return its result: what ``finish`` returned.

        Raises :class:`~midstream.errors.ControlFailed` if it failed, and ``TimeoutError`` if the time runs out.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"control operation {self.number} ({self.record.name}) has not ended in {timeout:g} s")
        if self._error is not None:
            raise ControlFailed(
                f"control operation {self.number} ({self.record.name}): {self._error}", number=self.number
            )
        return self._result

    def end(self, record: ControlRecord, result: Any = None, error: str | None = None) -> bool:
        """End it; only the first call counts, and returns True."""
        with self._guard:
            if self._ended.is_set():
                return False
            self.record, self._result, self._error = record, result, error
            self._ended.set()
            return True

    def __repr__(self) -> str:
        return f"ControlHandle({self.number}, {self.record.name}, {self.outcome})"
