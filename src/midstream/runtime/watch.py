"""Readers of a job's observations: each has a queue of its own, so that none can hold up the job or another one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from midstream.observation import Observation

__all__ = ["Watch", "Watches"]

KEPT = 100
"""Observations that wait for a slow reader; older ones are dropped."""


class Watch(Iterator[Observation]):
    """An iterator of observations, one for each epoch that is committed from now on. Ends with the job.

    For one reader. A reader that falls behind by more than 100 epochs loses the oldest, which :attr:`dropped` counts.
    """

    def __init__(self, complete: Callable[[Observation], Observation], leave: Callable[[Watch], None]) -> None:
        self._complete = complete
        self._leave = leave
        self._waiting: deque[Observation] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """Number of observations that came too fast for the reader."""
        return self._dropped

    def __next__(self) -> Observation:
        """The next observation; waits for it, or for the end of the job."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            if not self._waiting:
                raise StopIteration
            found = self._waiting.popleft()
        return self._complete(found)

    def newest(self) -> Observation | None:
        """The newest observation that waits, without those before it; waits for one. None at the end of the job."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            if self._is_over or not self._waiting:
                return None
            found = self._waiting.pop()
            self._dropped += len(self._waiting)
            self._waiting.clear()
        return self._complete(found)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching. What waits can still be read. Harmless when repeated."""
        self._leave(self)
        self.end()

    def put(self, observation: Observation) -> None:
        """Hand over an observation, without waiting for the reader."""
        with self._changed:
            if len(self._waiting) >= KEPT:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(observation)
            self._changed.notify()

    def end(self) -> None:
        """No observation follows."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Watches:
    """All readers of a job, and the last observation."""

    def __init__(self, complete: Callable[[Observation], Observation] = lambda found: found) -> None:
        self._complete = complete
        self._lock = threading.Lock()
        self._open: list[Watch] = []
        self._is_over = False
        self._last: Observation | None = None

    @property
    def last(self) -> Observation | None:
        """The last observation; None before the first epoch."""
        return None if self._last is None else self._complete(self._last)

    def watch(self) -> Watch:
        """A new reader."""
        watch = Watch(self._complete, self._leave)
        with self._lock:
            if not self._is_over:
                self._open.append(watch)
                return watch
        watch.end()
        return watch

    def put(self, observation: Observation) -> None:
        """Hand an observation to all readers."""
        self._last = observation
        with self._lock:
            for watch in self._open:
                watch.put(observation)

    def end(self) -> None:
        """The job is over."""
        with self._lock:
            self._is_over = True
            ended, self._open = self._open, []
        for watch in ended:
            watch.end()

    def _leave(self, watch: Watch) -> None:
        with self._lock:
            if watch in self._open:
                self._open.remove(watch)
