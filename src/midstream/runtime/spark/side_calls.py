"""Calls of users' code on the driver that may take as long as they like: nobody waits for them, nor for each other.

A thread of their own for each would cost more than most of them do. So one thread makes them, one after the other, and
another thread watches: a call that is at work for long gets company, and one that is overdue is told so.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["SideCalls"]

_log = logging.getLogger("midstream")

SLOW_S = 0.05
"""Calls that wait get another thread when all threads have been at work on their calls for so long."""
IDLE_S = 10.0
"""A thread without work ends after so long."""
CLOSE_S = 1.0
"""A thread without work ends at once when it is told to; nobody waits longer for it than this."""


@dataclass(eq=False)
class _Call:
    call: Callable[[], object]
    overdue: Callable[[], object]
    deadline: float
    began: float = math.inf


class SideCalls:
    """Makes calls in threads that nobody waits for. Used by any thread.

    >>> done = threading.Event()
    >>> SideCalls().make(done.set, 10.0, lambda: None)
    >>> done.wait(10)
    True
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self._work, self._watch = threading.Condition(lock), threading.Condition(lock)
        self._waiting: deque[_Call] = deque()
        self._open: set[_Call] = set()
        """Calls that have neither returned nor been told that they are overdue."""
        self._at_work: set[_Call] = set()
        self._threads: set[threading.Thread] = set()
        self._busy: set[threading.Thread] = set()
        self._idle = 0
        self._is_closed = False
        self._looks_at: float | None = None
        """When the watching thread looks next; None: there is none."""

    def make(self, call: Callable[[], object], seconds: float, overdue: Callable[[], object]) -> None:
        """Make a call soon. If it has not returned after ``seconds``, call ``overdue``, too, in another thread."""
        with self._work:
            now = time.monotonic()
            made = _Call(call, overdue, now + seconds)
            self._open.add(made)
            self._waiting.append(made)
            if self._idle:
                self._work.notify()
            elif not self._threads:
                self._start_thread()
            if self._looks_at is None:
                self._looks_at = self._next_look(now)
                self._watcher = threading.Thread(target=self._watch_over, name="midstream-aside-watch", daemon=True)
                self._watcher.start()
            elif self._next_look(now) < self._looks_at:
                self._watch.notify()

    def close(self) -> None:
        """Keep no thread for later calls. Those that were made are finished; nobody waits for them."""
        with self._work:
            self._is_closed = True
            self._work.notify_all()
            self._watch.notify_all()
            ending = [] if self._waiting else [*(self._threads - self._busy)]
            if self._looks_at is not None and not self._open:
                ending.append(self._watcher)
        for thread in ending:
            thread.join(CLOSE_S)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._make_calls, name="midstream-aside", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _make_calls(self) -> None:
        mine = threading.current_thread()
        while True:
            with self._work:
                self._busy.discard(mine)
                if not self._waiting and not self._idle and not self._is_closed:  # one idle thread is enough
                    self._idle += 1
                    self._work.wait(IDLE_S)
                    self._idle -= 1
                if not self._waiting:
                    self._threads.discard(mine)
                    return
                self._busy.add(mine)
                made = self._waiting.popleft()
                made.began = time.monotonic()
                self._at_work.add(made)
            try:
                made.call()
            except Exception:
                _log.warning("a call beside the epochs failed", exc_info=True)
            finally:
                with self._work:
                    self._at_work.discard(made)
                    self._open.discard(made)

    def _next_look(self, now: float) -> float:
        """When something has to be done that no call does. With the lock held."""
        first = min((made.deadline for made in self._open), default=math.inf)
        return min(first, now + SLOW_S) if self._waiting else first

    def _watch_over(self) -> None:
        while True:
            with self._watch:
                now = time.monotonic()
                late = [made for made in self._open if made.deadline <= now]
                self._open.difference_update(late)
                if not self._idle and all(now - made.began >= SLOW_S for made in self._at_work):
                    for _ in range(min(len(self._waiting), max(1, len(self._at_work)))):
                        self._start_thread()
                if not late:
                    if not self._open:
                        self._looks_at = None
                        return
                    self._looks_at = self._next_look(now)
                    self._watch.wait(self._looks_at - now)
            for made in late:
                try:
                    made.overdue()
                except Exception:
                    _log.warning("what follows an overdue call failed", exc_info=True)
