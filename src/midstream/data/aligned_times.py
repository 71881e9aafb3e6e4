"""Times on an axis where windows begin at multiples of their distance, whatever their offset and time zone."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cached_property
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

__all__ = ["Alignment"]

Integers = npt.NDArray[np.int64]

_EPOCH = datetime(1970, 1, 1)
_DAY_US = 86_400_000_000
# What `datetime` can represent, less the two days by which a candidate may be off. Zones have no rules beyond it.
_FIRST_US = (datetime.min - _EPOCH) // timedelta(microseconds=1) + 3 * _DAY_US
_LAST_US = (datetime.max - _EPOCH) // timedelta(microseconds=1) - 3 * _DAY_US
_SMALLEST, _LARGEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class Alignment:
    """Maps times to an axis on which windows begin at multiples of ``every``, and their bounds back.

    All are in microseconds since 1970. Without a zone, aligned times are ``offset`` less. With one, windows begin at
    times of the clock on the wall, so that a day may have 23 or 25 hours: an aligned time is then the beginning of the
    last window to begin: the number of windows since 1970 times ``every``, which must be whole days.

    >>> from datetime import UTC
    >>> berlin = Alignment(_DAY_US, 0, "Europe/Berlin")
    >>> noon = 1_774_778_400_000_000  # 2026-03-29 12:00 in Berlin; that day has 23 hours
    >>> day = berlin.aligned_one(noon)
    >>> bounds = berlin.moments(np.array([day, day + _DAY_US])).tolist()
    >>> [str(datetime.fromtimestamp(bound / 1e6, UTC)) for bound in bounds]
    ['2026-03-28 23:00:00+00:00', '2026-03-29 22:00:00+00:00']
    """

    def __init__(self, every: int, offset: int = 0, zone: str | None = None) -> None:
        self._every = every
        self._offset = offset
        self._zone = zone
        self._known: dict[int, int] = {}

    @cached_property
    def _rules(self) -> ZoneInfo:
        assert self._zone is not None
        return ZoneInfo(self._zone)

    def aligned(self, times: Integers) -> Integers:
        """These times on the axis. Their order and their windows stay the same."""
        if self._zone is None:
            return times - self._offset if self._offset else times
        if not len(times):
            return times
        # Clocks differ from UTC by a day at most, and the offset is less than `every`: a day or more.
        rough = np.unique(times // self._every)
        numbers = np.unique((rough[:, None] + np.arange(-2, 3)).ravel())
        begins = np.array([self._begin(number) for number in numbers.tolist()], np.int64)
        numbers_of: Integers = numbers[np.searchsorted(begins, times, side="right") - 1]
        return numbers_of * self._every

    def aligned_one(self, time: int) -> int:
        """One time on the axis."""
        return int(self.aligned(np.array([time], np.int64))[0])

    def moments(self, bounds: Integers) -> Integers:
        """The times of these bounds of windows, which are multiples of ``every`` on the axis."""
        if self._zone is None:
            return bounds + self._offset if self._offset else bounds
        numbers, places = np.unique(bounds // self._every, return_inverse=True)
        return np.array([self._begin(number) for number in numbers.tolist()], np.int64)[places]

    def _begin(self, number: int) -> int:
        """When the window with this number begins. If clocks skip that time, the window begins when they do."""
        found = self._known.get(number)
        if found is None:
            on_the_wall = number * self._every + self._offset
            in_range = min(max(on_the_wall, _FIRST_US), _LAST_US)
            ahead = (_EPOCH + timedelta(microseconds=in_range)).replace(tzinfo=self._rules).utcoffset()
            assert ahead is not None
            found = min(max(on_the_wall - ahead // timedelta(microseconds=1), _SMALLEST), _LARGEST)
            self._known[number] = found
        return found
