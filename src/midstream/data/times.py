"""The times of an epoch: the same for all of its tasks and attempts, so that running it again has the same result."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

END_OF_TIME = (1 << 62) + (1 << 61)
"""The watermark of an epoch that closes all windows: later than any row's time, but far enough from overflow."""


class EpochTimes(msgspec.Struct, frozen=True):
    """The times of an epoch, in microseconds since 1970.

    A watermark promises that rows with earlier event times have arrived; see :class:`Watermarks`. It is None until
    there is one, and in flows without event times.
    """

    clock: int
    """The driver's clock at the start of the epoch."""
    late_before: int | None = None
    """The watermark at the start of the epoch. Rows older than it are late: their windows may already be closed."""
    watermark: int | None = None
    """The watermark including this epoch's rows. Windows that end at or before it close at the end of this epoch."""

    @property
    def is_closing(self) -> bool:
        """Whether this epoch closes everything that is open, because no more rows will come."""
        return self.watermark == END_OF_TIME


class Watermarks(msgspec.Struct, frozen=True):
    """The progress of each source with event times, and the resulting watermark; part of the manifest.

    For each source that is not idle, take the latest event time seen minus the allowed delay; the watermark is the
    minimum. There is none until every such source has produced a row. It never moves backwards: neither when an idle
    source resumes, nor when a script changes the delays.

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
    """Allowed delay of each source, in microseconds."""
    idle: dict[str, int] = {}
    """Microseconds without rows after which a source is idle; only sources that can be idle."""
    latest: dict[str, int] = {}
    """The latest event time of each source that has produced rows."""
    heard: dict[str, int] = {}
    """The clock of the last epoch in which each source produced rows, or of the job's first epoch."""
    watermark: int | None = None

    def after(self, event_times: Mapping[str, int], clock: int) -> Watermarks:
        """The progress after an epoch with these latest event times, by source."""
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
