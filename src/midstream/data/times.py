"""The times of an epoch. Fixed for all of its tasks and attempts, so that running it again gives the same."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

END_OF_TIME = (1 << 62) + (1 << 61)
"""The watermark of an epoch that closes all windows: behind every time that a row can have, with room to add to."""


class EpochTimes(msgspec.Struct, frozen=True):
    """What time it is in an epoch, in microseconds since 1970.

    A watermark promises that rows of earlier event times have arrived: see :class:`Watermarks`. None as long as there
    is none, and in flows without event times.
    """

    clock: int
    """The driver's clock when the epoch began."""
    late_before: int | None = None
    """The watermark when the epoch began. What belongs before it is late: it may have been closed already."""
    watermark: int | None = None
    """The watermark with this epoch's rows. What ends at or before it is closed at the end of this epoch."""

    @property
    def is_closing(self) -> bool:
        """Whether this epoch closes what is open, because no rows will follow."""
        return self.watermark == END_OF_TIME


class Watermarks(msgspec.Struct, frozen=True):
    """How far each source with event times is, and the watermark that follows; part of the manifest.

    The watermark is the smallest, over the sources that are not idle, of the largest event time seen minus the delay
    allowed. There is none as long as one of these has given no row. It never goes back: not when an idle source wakes
    up, nor when a script says other delays.

    >>> marks = Watermarks(delays={"bids": 5, "asks": 0}, idle={"asks": 30})
    >>> marks = marks.after({"bids": 100}, clock=1000)
    >>> marks.watermark is None
    True
    >>> marks.after({"bids": 101, "asks": 97}, clock=1010).watermark
    96
    >>> marks.after({"bids": 120}, clock=1030).watermark  # no asks for 30 microseconds
    115
    """

    delays: dict[str, int]
    """Microseconds that rows of each source may be late."""
    idle: dict[str, int] = {}
    """Microseconds without rows after which each source is idle, for those that can be."""
    latest: dict[str, int] = {}
    """The latest event time of each source that has given rows."""
    heard: dict[str, int] = {}
    """The clock of the last epoch in which each source gave rows, or of the job's first epoch."""
    watermark: int | None = None

    def after(self, event_times: Mapping[str, int], clock: int) -> Watermarks:
        """After an epoch of which these are the latest event times, by source."""
        latest, heard = dict(self.latest), dict(self.heard)
        for source, time in event_times.items():
            latest[source] = max(time, latest.get(source, time))
        for source in self.delays:
            if source in event_times or source not in heard:
                heard[source] = clock
        awake = [source for source in self.delays if not self._is_idle(source, clock - heard[source])]
        watermark = self.watermark
        if awake and all(source in latest for source in awake):
            reached = min(latest[source] - self.delays[source] for source in awake)
            watermark = reached if watermark is None else max(watermark, reached)
        return Watermarks(self.delays, self.idle, latest, heard, watermark)

    def _is_idle(self, source: str, silent: int) -> bool:
        return source in self.idle and silent >= self.idle[source]
