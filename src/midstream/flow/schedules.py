"""When the events of a generator are due: rate schedules, exact over any length of time.

All schedules share one piece of arithmetic. Let A(t) be the number of events due by time t as a real number, piecewise
linear in t. Event i is due when A passes i, so ``count_until(t) = ceil(A(t))``, and ``time_of`` is the inverse of A,
rounded down to a microsecond. A is kept as a whole number of units of 10⁻¹² events (its *phase*), and a rate as units
per microsecond, so nothing drifts, however many days a stream runs.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.errors import FlowError

__all__ = ["NEVER_US", "Constant", "Indexes", "Schedule", "SquareWave", "Step"]

NEVER_US = 2**63 - 1
"""The ``time_of`` an event that a schedule never reaches, because its last rate is 0."""

_EVENT = 10**12
_MAX_RATE = 10**9

Indexes = npt.NDArray[np.int64]


class Schedule(ABC):
    """When events are due, in microseconds since the start of the stream. The first one is event 0.

    For every schedule, event i and time t: ``i < count_until(t)`` exactly when ``time_of(i) < t``.

    A schedule of your own is a subclass, such as one event at each full second:

    >>> class EverySecond(Schedule):
    ...     def count_until(self, elapsed_us):
    ...         return -(-max(elapsed_us, 0) // 1_000_000)
    ...
    ...     def time_of(self, indexes):
    ...         return indexes * 1_000_000
    >>> EverySecond().count_until(2_500_000)
    3
    """

    @abstractmethod
    def count_until(self, elapsed_us: int) -> int:
        """How many events are due in [0, elapsed_us)."""

    @abstractmethod
    def time_of(self, indexes: Indexes) -> Indexes:
        """When each of these events is due; :data:`NEVER_US` for an event that is never due."""

    @property
    def total(self) -> int | None:
        """How many events there are in all; ``None`` when they never end."""
        return None


@dataclass(frozen=True)
class Constant(Schedule):
    """``rate`` events per second, evenly spaced.

    >>> Constant(4).count_until(1_000_000)
    4
    >>> Constant(4).time_of(np.array([0, 1, 4])).tolist()
    [0, 250000, 1000000]
    """

    rate: float

    def __post_init__(self) -> None:
        _require_some([self._units], "Constant")

    def count_until(self, elapsed_us: int) -> int:
        """How many events are due in [0, elapsed_us)."""
        return _events(max(elapsed_us, 0) * self._units)

    def time_of(self, indexes: Indexes) -> Indexes:
        """When each of these events is due."""
        return _cross(_checked(indexes), 0, self._units)

    @cached_property
    def _units(self) -> int:
        return _units(self.rate, "Constant")


@dataclass(frozen=True)
class Step(Schedule):
    """A rate that jumps: ``steps`` are pairs (seconds since the start, events per second from then on).

    No event is due before the first step. The last rate holds forever; a last rate of 0 ends the stream.

    >>> ramp = Step(((0, 10), (60, 1000)))
    >>> ramp.count_until(61_000_000)
    1600
    """

    steps: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _pairs(self.steps))
        if any(later <= earlier for earlier, later in pairwise(self._starts)):
            found = ", ".join(str(at) for at, _ in self.steps)
            raise FlowError(
                f"Step: the times {found} do not increase; give each step a later time than the previous one"
            )
        _require_some([rate for _, _, rate in self._segments], "Step")

    def count_until(self, elapsed_us: int) -> int:
        """How many events are due in [0, elapsed_us)."""
        start, phase, rate = max((s for s in self._segments if s[0] <= elapsed_us), default=(0, 0, 0))
        return _events(phase + (elapsed_us - start) * rate)

    def time_of(self, indexes: Indexes) -> Indexes:
        """When each of these events is due; :data:`NEVER_US` after a last rate of 0."""
        indexes = _checked(indexes)
        times = np.full(indexes.shape, NEVER_US, np.int64)
        # The last segment whose first event is not after i, which skips segments without events.
        found = np.searchsorted(self._firsts, indexes, side="right") - 1
        for number in range(int(found.min(initial=0)), int(found.max(initial=0)) + 1):
            start, phase, rate = self._segments[number]
            here = found == number
            if rate and here.any():
                first = int(self._firsts[number])
                times[here] = start + _cross(indexes[here] - first, first * _EVENT - phase, rate)
        return times

    @property
    def total(self) -> int | None:
        """How many events there are in all; ``None`` when they never end."""
        _, phase, rate = self._segments[-1]
        return None if rate else _events(phase)

    @property
    def _starts(self) -> list[int]:
        return [_micros(at, "Step: the time of a step", zero=True) for at, _ in self.steps]

    @cached_property
    def _segments(self) -> list[tuple[int, int, int]]:
        """(start in µs, A at the start, rate), from the start of the stream."""
        segments = [(0, 0, 0)]
        for start, (_, rate) in zip(self._starts, self.steps, strict=True):
            previous, phase, before = segments[-1]
            segments.append((start, phase + (start - previous) * before, _units(rate, "Step")))
        return segments

    @cached_property
    def _firsts(self) -> Indexes:
        return np.array([min(_events(phase), NEVER_US) for _, phase, _ in self._segments], np.int64)


@dataclass(frozen=True)
class SquareWave(Schedule):
    """``high`` events per second for the first ``duty`` of each period, ``low`` for the rest.

    >>> wave = SquareWave(low=0, high=100, period_s=10, duty=0.5)
    >>> wave.count_until(10_000_000), wave.time_of(np.array([499, 500])).tolist()
    (500, [4990000, 10000000])
    """

    low: float
    high: float
    period_s: float
    duty: float = 0.5

    def __post_init__(self) -> None:
        low, high = self._rates
        _require_some([low, high], "SquareWave")
        if low > high:
            raise FlowError(f"SquareWave: low is {self.low} and high is {self.high}; high must not be less than low")
        if not 0 < self._high_us < self._period_us:
            raise FlowError(
                f"SquareWave: duty is {self.duty} of a period of {self.period_s} s; both parts of a period must last "
                "at least a microsecond, so give a duty between 0 and 1"
            )

    def count_until(self, elapsed_us: int) -> int:
        """How many events are due in [0, elapsed_us)."""
        low, high = self._rates
        periods, within = divmod(max(elapsed_us, 0), self._period_us)
        rising = min(within, self._high_us)
        return _events(periods * self._period_phase + rising * high + (within - rising) * low)

    def time_of(self, indexes: Indexes) -> Indexes:
        """When each of these events is due."""
        indexes = _checked(indexes)
        if not indexes.size:
            return indexes
        low, high = self._rates
        # Dividing all units by a common factor changes no floor and no comparison below, and keeps products small.
        factor = math.gcd(_EVENT, low, high)
        low, high, period = low // factor, high // factor, self._period_phase // factor
        base = int(indexes.min())
        passed, rest = divmod(base * _EVENT, self._period_phase)
        phase = _progression(indexes - base, _EVENT // factor, rest // factor, period)
        periods = phase // period
        phase = phase - periods * period
        summit = self._high_us * high
        within = np.where(phase < summit, phase // high, self._high_us + (phase - summit) // max(low, 1))
        return np.asarray((periods + passed) * self._period_us + within, np.int64)

    @cached_property
    def _rates(self) -> tuple[int, int]:
        return _units(self.low, "SquareWave"), _units(self.high, "SquareWave")

    @cached_property
    def _period_us(self) -> int:
        return _micros(self.period_s, "SquareWave: the period")

    @cached_property
    def _high_us(self) -> int:
        return round(self._period_us * Fraction(_finite(self.duty, "SquareWave: duty")))

    @cached_property
    def _period_phase(self) -> int:
        low, high = self._rates
        return self._high_us * high + (self._period_us - self._high_us) * low


def _pairs(steps: Any) -> tuple[tuple[float, float], ...]:
    try:
        return tuple((at, rate) for at, rate in steps)
    except (TypeError, ValueError):
        raise FlowError(f"Step: steps are {steps!r}; give pairs (seconds, events per second)") from None


def _finite(value: Any, what: str) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise FlowError(f"{what} is {value!r}; give a finite number")
    return Fraction(value) if isinstance(value, numbers.Rational) else Fraction(float(value))


def _units(rate: Any, what: str) -> int:
    """A rate in events per second as phase per microsecond."""
    found = _finite(rate, f"{what}: a rate")
    units = round(found * 10**6)
    if found < 0 or found > _MAX_RATE or (found and not units):
        raise FlowError(f"{what}: a rate is {rate!r} events per second; allowed: 0, or from 0.000001 to {_MAX_RATE}")
    return units


def _micros(seconds: Any, what: str, *, zero: bool = False) -> int:
    micros = round(_finite(seconds, what) * 10**6)
    if micros < 0 or (micros == 0 and not zero):
        least = "0" if zero else "a microsecond"
        raise FlowError(f"{what} is {seconds!r} seconds; it must be at least {least}")
    return micros


def _require_some(rates: Iterable[int], what: str) -> None:
    if not any(rates):
        raise FlowError(f"{what}: every rate is 0, so no event would ever be due; give at least one rate above 0")


def _checked(indexes: Indexes) -> Indexes:
    indexes = np.asarray(indexes, np.int64)
    if indexes.size and int(indexes.min()) < 0:
        raise FlowError(f"event indexes start at 0, found {int(indexes.min())}")
    return indexes


def _events(phase: int) -> int:
    """ceil(A): the number of events whose phase is below this one, since event 0 has phase 0."""
    return -(-phase // _EVENT)


def _progression(steps: Indexes, step: int, offset: int, divisor: int) -> npt.NDArray[Any]:
    """``steps * step + offset``, as a dividend for ``divisor``.

    Uses Python integers if dividend or divisor exceeds 64 bits: slower (1 µs per event), but exact. Rates that are
    whole numbers never need that.
    """
    if max(int(steps.max()) * step + offset, divisor) > NEVER_US:
        return steps.astype(object) * step + offset
    return steps * step + offset


def _cross(events: Indexes, lead: int, rate: int) -> Indexes:
    """floor((events · 1 event + lead) / rate): when a line with this slope reaches each event."""
    if not events.size:
        return events
    # Counting from the first event, and in the largest common unit, keeps a chunk's products within 64 bits.
    base = int(events.min())
    passed, rest = divmod(base * _EVENT + lead, rate)
    factor = math.gcd(_EVENT, rate)
    rate //= factor
    phase = _progression(events - base, _EVENT // factor, rest // factor, rate)
    return np.asarray(phase // rate + passed, np.int64)
