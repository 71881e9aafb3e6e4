"""When two rows of a join match by time, and what a watermark means for them.

A window is a special case. Each row has an *instant*: its event time or, in a join by window, the start of its window.
Two rows are a pair if their instants are at most ``reach`` apart: ``within``, or zero for a window. Where partners may
come longer before a row of the left than after it, or the other way round, the instants of the left are shifted by half
the difference.

Lateness, the end of matching ("over") and removal from state depend on each other. With a watermark W:

================================= ======================================= ==================
a row at time t                   by window                               within
================================= ======================================= ==================
is late if, as the epoch begins,  its window has ended: end <= W          t < W
is over if, as the epoch ends,    its window has ended: end <= W          t + within < W
================================= ======================================= ==================

The last line is for equal distances: with ``within=(before, after)`` a left row waits for ``after``, a right one for
``before``. It follows from the line above: partners that are not late have windows that end after W, or times from W
on. So no pair of rows that are not late is missed, and a row of an outer join that was emitted with nulls never gets a
real partner. A row is removed together with its pane, when all rows that the pane could contain are over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from midstream.data.aligned_times import Alignment
from midstream.flow.windows import Tumbling, Window

__all__ = ["NEVER", "Limits", "Nearness"]

NEVER = -(1 << 63)
"""Earlier than any time."""


@dataclass(frozen=True)
class Nearness:
    """When instants match in a join, and what a watermark means for them; in microseconds.

    >>> near = Nearness(reach=0, width=10, grid=10)  # windows of 10 microseconds
    >>> near.late_below(25), near.over_below(25), near.forgotten_below(25)
    (20, 20, 20)
    >>> near = Nearness(reach=10, width=10, grid=1)  # within 10 microseconds
    >>> near.late_below(25), near.over_below(25), near.forgotten_below(25)
    (25, 15, 10)
    """

    reach: int
    """The largest distance between the instants of a pair."""
    width: int
    """The width of panes in state; at least ``reach``, so that partners are in the same pane or a neighbouring one."""
    grid: int
    """Instants are multiples of this: the size of a window, or 1."""
    shift: int = 0
    """The distance from the event time of a left row to its instant."""
    alignment: Alignment | None = None
    """The alignment of windows, whose starts are aligned times; None without windows."""

    @classmethod
    def of(cls, window: Window | None, before_us: int | None, after_us: int | None) -> Nearness:
        """The nearness that a join asks for; the sum of both distances is even.

        >>> Nearness.of(None, 2, 10)
        Nearness(reach=6, width=6, grid=1, shift=4, alignment=None)
        """
        if before_us is not None:
            after_us = before_us if after_us is None else after_us
            reach = (before_us + after_us) // 2
            return cls(reach, max(reach, 1), 1, after_us - reach)
        assert isinstance(window, Tumbling)
        return cls(0, window.size_us, window.size_us, alignment=window.alignment)

    def instants(self, times: npt.NDArray[np.int64], shift: int) -> npt.NDArray[np.int64]:
        """The instants of rows with these event times, on a side whose instants are shifted by ``shift``."""
        aligned = times if self.alignment is None else self.alignment.aligned(times)
        return aligned + shift if self.grid == 1 else aligned // self.grid * self.grid

    def moments(self, instants: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The starts of windows with these instants; without windows, the instants."""
        return instants if self.alignment is None else self.alignment.moments(instants)

    def late_below(self, watermark: int, shift: int = 0) -> int:
        """Rows with instants below this are late, on a side whose instants are shifted by ``shift``."""
        if self.alignment is not None:
            watermark = self.alignment.aligned_one(watermark)
        return watermark // self.grid * self.grid + shift

    def over_below(self, watermark: int, others_shift: int = 0) -> int:
        """Rows with instants below this get no more partners from a side whose instants are shifted by this."""
        return self.late_below(watermark, others_shift) - self.reach

    def forgotten_below(self, watermark: int, others_shift: int = 0) -> int:
        """Panes that begin below this contain only such rows."""
        return self.over_below(watermark, others_shift) // self.width * self.width


@dataclass(frozen=True)
class Limits:
    """The instants that matter to one side in an epoch; :data:`NEVER` until there is a watermark."""

    late: int
    over: int
    forgotten: int

    @classmethod
    def of(
        cls, near: Nearness, late_before: int | None, watermark: int | None, *, shift: int = 0, others_shift: int = 0
    ) -> Limits:
        """The limits, given the watermarks at the start and the end of an epoch, and the shift of both sides."""
        return cls(
            NEVER if late_before is None else near.late_below(late_before, shift),
            NEVER if watermark is None else near.over_below(watermark, others_shift),
            NEVER if watermark is None else near.forgotten_below(watermark, others_shift),
        )
