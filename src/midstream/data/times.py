"""The times of an epoch. Fixed for all of its tasks and attempts, so that running it again gives the same."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class EpochTimes(msgspec.Struct, frozen=True):
    """What time it is in an epoch, in microseconds since 1970.

    A watermark promises that rows of earlier event times have arrived: it is the smallest, over the sources that have
    event times, of the largest one seen minus the delay allowed. None as long as such a source has given no row, and in
    flows without event times.
    """

    clock: int
    """The driver's clock when the epoch began."""
    late_before: int | None = None
    """The watermark when the epoch began. What belongs before it is late: it may have been closed already."""
    watermark: int | None = None
    """The watermark with this epoch's rows. What ends at or before it is closed at the end of this epoch."""


class Watermarks(msgspec.Struct, frozen=True):
    """How far each source with event times is; part of the manifest.

    >>> marks = Watermarks(delays={"bids": 5, "asks": 0})
    >>> marks.after({"bids": 100}).watermark is None
    True
    >>> marks.after({"bids": 100, "asks": 97}).watermark
    95
    """

    delays: dict[str, int]
    """Microseconds that rows of each source may be late."""
    latest: dict[str, int] = {}
    """The latest event time of each source that has given rows."""

    def after(self, event_times: Mapping[str, int]) -> Watermarks:
        """With the latest event times of some more rows."""
        latest = dict(self.latest)
        for source, time in event_times.items():
            latest[source] = max(time, latest.get(source, time))
        return Watermarks(self.delays, latest)

    @property
    def watermark(self) -> int | None:
        """What all sources have passed; None as long as one of them has given no row, or there is none."""
        if not self.delays or not self.delays.keys() <= self.latest.keys():
            return None
        return min(self.latest[source] - delay for source, delay in self.delays.items())
