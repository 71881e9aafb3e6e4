"""When two rows of a join are near each other, and what a watermark means for them.

A window is a special case of nearness. Each row has an *instant*: its event time, or in a join by window the start of
its window. Two rows are a pair when their instants are at most ``reach`` apart: ``within``, or nothing for a window.

When a row is late, when it is over (gets no more partners) and when it is forgotten hangs together. With a watermark W:

================================= ======================================= ==================
a row at time t                   by window                               within
================================= ======================================= ==================
is late if, as the epoch begins,  its window has ended: end <= W          t < W
is over if, as the epoch ends,    its window has ended: end <= W          t + within < W
================================= ======================================= ==================

The second line follows from the first: partners that are not late have windows that end behind W, or times from W on.
So no pair of rows that are not late is missed, and a row of a left join that has got nulls for a partner never gets a
real one. A row is forgotten with the pane it is in, when all rows that the pane could have are over.
"""

from __future__ import annotations

from dataclasses import dataclass

from midstream.flow.windows import Tumbling, Window

__all__ = ["NEVER", "Limits", "Nearness"]

NEVER = -(1 << 63)
"""Below this there is no time."""


@dataclass(frozen=True)
class Nearness:
    """What near means in a join, in microseconds: when instants match, and what a watermark makes of them.

    >>> near = Nearness(reach=0, width=10, grid=10)  # windows of 10 microseconds
    >>> near.late_below(25), near.over_below(25), near.forgotten_below(25)
    (20, 20, 20)
    >>> near = Nearness(reach=10, width=10, grid=1)  # within 10 microseconds
    >>> near.late_below(25), near.over_below(25), near.forgotten_below(25)
    (25, 15, 10)
    """

    reach: int
    """Instants of a pair are at most so far apart."""
    width: int
    """Panes of state are so wide; at least ``reach``, so that partners are in the same pane or a neighbour."""
    grid: int
    """Instants are multiples of this: the size of a window, or 1."""

    @classmethod
    def of(cls, window: Window | None, within_us: int | None) -> Nearness:
        """The nearness that a join asks for."""
        if within_us is not None:
            return cls(within_us, max(within_us, 1), 1)
        assert isinstance(window, Tumbling)
        return cls(0, window.size_us, window.size_us)

    def late_below(self, watermark: int) -> int:
        """Rows with instants below this are late."""
        return watermark // self.grid * self.grid

    def over_below(self, watermark: int) -> int:
        """Rows with instants below this get no more partners."""
        return self.late_below(watermark) - self.reach

    def forgotten_below(self, watermark: int) -> int:
        """Panes that begin below this hold nothing but such rows."""
        return self.over_below(watermark) // self.width * self.width


@dataclass(frozen=True)
class Limits:
    """Instants that matter in an epoch; :data:`NEVER` as long as there is no watermark."""

    late: int
    over: int
    forgotten: int

    @classmethod
    def of(cls, near: Nearness, late_before: int | None, watermark: int | None) -> Limits:
        """From the watermarks with which an epoch begins and ends."""
        return cls(
            NEVER if late_before is None else near.late_below(late_before),
            NEVER if watermark is None else near.over_below(watermark),
            NEVER if watermark is None else near.forgotten_below(watermark),
        )
