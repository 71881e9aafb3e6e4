"""Time, injected: so that tests can hold it in their hands."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: what the wall says, and a stopwatch."""

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
    """A clock that moves only when told to; both readings move together.

    >>> clock = ManualClock(start_us=1_000)
    >>> clock.advance(seconds=1.5)
    >>> clock.wall_us()
    1501000
    """

    def __init__(self, start_us: int = 0) -> None:
        self._us = start_us

    def advance(self, *, seconds: float) -> None:
        """Move on."""
        if seconds < 0:
            raise ValueError(f"a clock never goes back; seconds={seconds}")
        self._us += round(seconds * 1_000_000)

    def wall_us(self) -> int:
        """Microseconds since 1970, UTC."""
        return self._us

    def stopwatch_ns(self) -> int:
        """Nanoseconds since the clock's zero."""
        return self._us * 1000
