"""The switch lock: a task can be switched at any moment except within a slice, by whichever thread is first.

Between slices a task waits for Spark to deliver more rows and to take its output. Waiting for a source's next batch can
take a hundred milliseconds, during which the task's own thread is blocked. So it releases a lock whenever it waits, and
the thread that listens for changes switches the task if it can take that lock; otherwise the task does so itself, when
it has finished its slice.

Both runtimes use it. On Spark it is a real lock between the task's thread and the listener. On the local runtime there
is one thread, which plays the listener wherever a real one could run, also within slices.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import pyarrow as pa

from midstream.control.messages import Accepted, Exhausted, FromTask, StageChange, ToTask
from midstream.engine.control_order import ControlOrder
from midstream.runtime.task import TaskRun

__all__ = ["Lock", "SwitchLock"]


class Lock(Protocol):
    """The methods of a :class:`threading.Lock` that are needed here."""

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; return whether that succeeded."""

    def release(self) -> None:
        """Release the lock."""


class SwitchLock:
    """The lock around the slices of one task. A context manager: within its block, the task's thread holds it.

    ``ask`` raises if the task cannot continue; ``post`` expects no answer.
    """

    def __init__(
        self, work: TaskRun, ask: Callable[[FromTask], ToTask], post: Callable[[FromTask], None], lock: Lock
    ) -> None:
        self._work = work
        self._ask = ask
        self._post = post
        self._lock = lock
        self._told: StageChange | None = None
        self._orders: deque[ControlOrder] = deque()
        self._handled: set[int] = set()
        self._failure: Exception | None = None
        self._is_over = False

    def __enter__(self) -> SwitchLock:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._lock.release()

    def tell(self, change: StageChange, post: Callable[[FromTask], None]) -> None:
        """Tell the task to switch. Called by another thread than the task's, with its own way to ``post``."""
        # Noted first: if the task is within a slice now, it checks before it releases the lock.
        self._told = change
        if self._lock.acquire(blocking=False):
            try:
                self._switch()
            except Exception as error:  # the task's own thread must fail, not this one
                self._failure = error
            finally:
                self._lock.release()
        elif (exhausted := self._work.exhausted(change)) is not None:
            # The task is only writing its state, which can take as long as hundreds of slices.
            post(exhausted)

    def handle(self, order: ControlOrder, post: Callable[[FromTask], None]) -> None:
        """Have the handlers of a fast control operation run, between two slices. Called by another thread than the
        task's, with its own way to ``post``. A task that only writes its state never gets to it."""
        self._orders.append(order)  # first, as in tell()
        if self._lock.acquire(blocking=False):
            try:
                self._handle(post)
            except Exception as error:
                self._failure = error
            finally:
                self._lock.release()

    def handle_here(self, orders: Iterable[ControlOrder]) -> None:
        """The same, called by the task's own thread."""
        self._orders.extend(orders)
        self._handle(self._post)

    def attend(self) -> None:
        """Called by the task's thread between slices: switch if told to, and report what the revision has reached."""
        if self._failure is not None:
            raise self._failure
        if self._orders:
            self._handle(self._post)
        self._switch()
        if (reached := self._work.reached()) is not None:
            self._post(reached)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this block, the task's thread waits, and others may switch the task."""
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

    def _handle(self, post: Callable[[FromTask], None]) -> None:
        while self._orders and not self._is_over:
            order = self._orders.popleft()
            if order.number not in self._handled:  # messages may come twice
                self._handled.add(order.number)
                post(self._work.handle(order))

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
