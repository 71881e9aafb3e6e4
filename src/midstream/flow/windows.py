"""Windows over event time, which group the rows of a key.

Windows begin at multiples of their length (or of ``every``) since 1970 in UTC; a row exactly at the end of a window
belongs to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from midstream.data.durations import duration
from midstream.errors import FlowError

__all__ = ["Session", "Sliding", "Tumbling", "Window", "sessions", "sliding", "tumbling"]

MAX_OVERLAP = 1000
"""Most sliding windows one row may belong to."""


@dataclass(frozen=True)
class Tumbling:
    """Adjacent windows of one length: each row is in exactly one."""

    size_us: int


@dataclass(frozen=True)
class Sliding:
    """Windows of one length that begin at regular intervals: a row is in ``size / every`` of them."""

    size_us: int
    every_us: int


@dataclass(frozen=True)
class Session:
    """Rows of a key that follow each other within ``gap``; a session ends ``gap`` after its last row."""

    gap_us: int


Window = Tumbling | Sliding | Session


def tumbling(size: str) -> Tumbling:
    """Adjacent windows of one length.

    >>> tumbling("10 seconds")
    Tumbling(size_us=10000000)
    """
    return Tumbling(duration(size, "tumbling window: size"))


def sliding(size: str, *, every: str) -> Sliding:
    """Windows that overlap; ``size`` must be a multiple of ``every``.

    >>> sliding("1 minute", every="10 seconds")
    Sliding(size_us=60000000, every_us=10000000)
    """
    size_us, every_us = duration(size, "sliding window: size"), duration(every, "sliding window: every")
    if size_us % every_us or size_us // every_us > MAX_OVERLAP:
        raise FlowError(
            f"sliding window: size={size!r} must be a multiple of every={every!r}, at most {MAX_OVERLAP} times as long"
        )
    return Sliding(size_us, every_us)


def sessions(gap: str) -> Session:
    """Sessions of rows that follow each other within ``gap``.

    >>> sessions(gap="5 minutes")
    Session(gap_us=300000000)
    """
    return Session(duration(gap, "session window: gap"))
