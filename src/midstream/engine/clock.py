"""Injected clocks, so that tests control time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: wall-clock time and a stopwatch."""

    def wall_us(self) -> int:
        """Microseconds since 1970, UTC."""

    def stopwatch_ns(self) -> int:
        """Nanoseconds since some fixed moment; never goes back."""


class SystemClock:
    """The machine's clocks."""

    def wall_us(self) -> int:
        """Microseconds since 1970, UTC."""
        return time.time_ns() // 1000

    def stopwatch_ns(self) -> int:
        """Nanoseconds since some fixed moment; never goes back."""
        return time.perf_counter_ns()


class ManualClock:
    """A clock that moves only by :meth:`advance`; both readings move together.

    >>> clock = ManualClock(start_us=1_000)
    >>> clock.advance(seconds=1.5)
    >>> clock.wall_us()
    1501000
    """

    def __init__(self, start_us: int = 0) -> None:
        self._us = start_us

    def advance(self, *, seconds: float) -> None:
        """Move the clock forward."""
        if seconds < 0:
            raise ValueError(f"a clock never goes back: seconds={seconds}; give 0 or more")
        self._us += round(seconds * 1_000_000)

    def wall_us(self) -> int:
        """Microseconds since 1970, UTC."""
        return self._us

    def stopwatch_ns(self) -> int:
        """Nanoseconds since the clock's zero."""
        return self._us * 1000
