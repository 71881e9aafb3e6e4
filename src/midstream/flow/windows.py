"""Windows over event time, which group the rows of a key.

Windows begin at multiples of their length (or of ``every``) since 1970, in UTC or in a time zone, plus an offset; a row
exactly at the end of a window belongs to the next one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from midstream.data.aligned_times import Alignment
from midstream.data.durations import duration
from midstream.errors import FlowError

__all__ = ["Session", "Sliding", "Tumbling", "Window", "sessions", "sliding", "tumbling"]

MAX_OVERLAP = 1000
"""Most sliding windows one row may belong to."""
_DAY_US = 86_400_000_000


@dataclass(frozen=True, repr=False)
class Tumbling:
    """Adjacent windows of one length: each row is in exactly one."""

    size_us: int
    offset_us: int = 0
    zone: str | None = None

    @property
    def every_us(self) -> int:
        """Each begins where the one before ends."""
        return self.size_us

    @property
    def alignment(self) -> Alignment:
        """Where windows begin."""
        return Alignment(self.every_us, self.offset_us, self.zone)

    def __repr__(self) -> str:
        return _shown(self)


@dataclass(frozen=True, repr=False)
class Sliding:
    """Windows of one length that begin at regular intervals: a row is in ``size / every`` of them."""

    size_us: int
    every_us: int
    offset_us: int = 0
    zone: str | None = None

    @property
    def alignment(self) -> Alignment:
        """Where windows begin."""
        return Alignment(self.every_us, self.offset_us, self.zone)

    def __repr__(self) -> str:
        return _shown(self)


@dataclass(frozen=True)
class Session:
    """Rows of a key that follow each other in less than ``gap``; a session ends ``gap`` after its last row."""

    gap_us: int


Window = Tumbling | Sliding | Session


def _shown(window: Tumbling | Sliding) -> str:
    """The fields that are set. Digests of this text are on disk: fields that came later must not appear by default."""
    given = {field.name: getattr(window, field.name) for field in dataclasses.fields(window)}
    shown = (f"{name}={value!r}" for name, value in given.items() if value not in (0, None))
    return f"{type(window).__name__}({', '.join(shown)})"


def tumbling(size: str, *, offset: str = "0 seconds", zone: str | None = None) -> Tumbling:
    """Adjacent windows of one length.

    :param offset: how much later windows begin than at multiples of ``size``; less than ``size``.
    :param zone: a time zone, for windows of whole days: they begin at midnight of its clocks, so that a day has 23 or
        25 hours when clocks change. Without one, days begin at midnight UTC.

    >>> tumbling("10 seconds")
    Tumbling(size_us=10000000)
    >>> tumbling("1 day", offset="6 hours", zone="Europe/Berlin")  # from 6:00 to 6:00
    Tumbling(size_us=86400000000, offset_us=21600000000, zone='Europe/Berlin')
    """
    what = "tumbling window"
    size_us = duration(size, f"{what}: size")
    return Tumbling(size_us, _offset(offset, size_us, f"size={size!r}", what), _zone(zone, size_us, what))


def sliding(size: str, *, every: str, offset: str = "0 seconds", zone: str | None = None) -> Sliding:
    """Windows that overlap; ``size`` must be a multiple of ``every``. For the rest, see :func:`tumbling`.

    >>> sliding("1 minute", every="10 seconds")
    Sliding(size_us=60000000, every_us=10000000)
    """
    what = "sliding window"
    size_us, every_us = duration(size, f"{what}: size"), duration(every, f"{what}: every")
    if size_us % every_us or size_us // every_us > MAX_OVERLAP:
        raise FlowError(
            f"{what}: size={size!r} must be a multiple of every={every!r}, at most {MAX_OVERLAP} times as long"
        )
    return Sliding(size_us, every_us, _offset(offset, every_us, f"every={every!r}", what), _zone(zone, every_us, what))


def sessions(gap: str) -> Session:
    """Sessions of rows that follow each other in less than ``gap``.

    >>> sessions(gap="5 minutes")
    Session(gap_us=300000000)
    """
    return Session(duration(gap, "session window: gap"))


def _offset(offset: str, every_us: int, limit: str, what: str) -> int:
    offset_us = duration(offset, f"{what}: offset", zero=True)
    if offset_us >= every_us:
        raise FlowError(f"{what}: offset={offset!r} must be less than {limit}; windows repeat after that")
    return offset_us


def _zone(zone: str | None, every_us: int, what: str) -> str | None:
    if zone is None:
        return None
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        raise FlowError(
            f"{what}: zone={zone!r} is not a known time zone; use a name like 'Europe/Berlin', or leave it out for UTC"
        ) from None
    if every_us % _DAY_US:
        raise FlowError(
            f"{what}: zone={zone!r} needs windows that begin once in a number of whole days, like '1 day' or '7 days'; "
            f"shorter ones begin at the same moments everywhere: shift them with offset="
        )
    return zone
