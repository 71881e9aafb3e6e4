"""The switch lock: a task can be switched at any moment but within a slice, by whichever thread gets to it first.

Between slices a task waits: for Spark to give it more rows, and to take what it has. Waiting for a source's next batch
can take a hundred milliseconds, in which the task's own thread sees nothing. So it lets go of a lock whenever it waits,
and the thread that hears of a change switches the task if it can have that lock; else the task does so itself, when it
has finished its slice.

Both runtimes use it. On Spark the lock is a real one, between the task's thread and the one that listens. On the local
runtime there is one thread, which plays the listener wherever a real one could get in between, within slices included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import pyarrow as pa

from midstream.control.messages import Accepted, Exhausted, FromTask, StageChange, ToTask
from midstream.runtime.task import TaskRun

__all__ = ["Lock", "SwitchLock"]


class Lock(Protocol):
    """What is needed of a :class:`threading.Lock`."""

    def acquire(self, blocking: bool = True) -> bool:
        """Take it; whether that could be done."""

    def release(self) -> None:
        """Let go of it."""


class SwitchLock:
    """The lock around the slices of one task. A context manager: inside, the task's thread holds it.

    ``ask`` raises what keeps the task from going on; ``post`` expects no answer.
    """

    def __init__(
        self, work: TaskRun, ask: Callable[[FromTask], ToTask], post: Callable[[FromTask], None], lock: Lock
    ) -> None:
        self._work = work
        self._ask = ask
        self._post = post
        self._lock = lock
        self._told: StageChange | None = None
        self._failure: Exception | None = None
        self._is_over = False

    def __enter__(self) -> SwitchLock:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._lock.release()

    def tell(self, change: StageChange, post: Callable[[FromTask], None]) -> None:
        """The task is to switch. Called by another thread than the task's, which has a way of its own to ``post``."""
        # Noted first: if the task is at work now, it looks before it lets go of the lock.
        self._told = change
        if self._lock.acquire(blocking=False):
            try:
                self._switch()
            except Exception as error:  # the task's own thread has to fail, not this one
                self._failure = error
            finally:
                self._lock.release()
        elif (exhausted := self._work.exhausted(change)) is not None:
            # It is busy with nothing but writing what it knows, which can take as long as hundreds of slices.
            post(exhausted)

    def attend(self) -> None:
        """Between slices, by the task's thread: switch if told so, and tell what the new revision has reached."""
        if self._failure is not None:
            raise self._failure
        self._switch()
        if (reached := self._work.reached()) is not None:
            self._post(reached)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the task's thread waits for somebody, and others may switch the task."""
        self.attend()
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def taking(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same batches; the task can be switched while it waits for one."""
        while True:
            with self.waiting():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _switch(self) -> None:
        change, self._told = self._told, None
        if change is None or self._is_over:
            return
        asked = self._work.offer(change)
        if isinstance(asked, Exhausted):
            self._post(asked)
        elif asked is not None:
            if isinstance(self._ask(asked), Accepted):
                self._work.switch()
            else:
                self._work.stay()
