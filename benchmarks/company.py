"""How busy other processes kept the machine while a benchmark ran: its figures mean little if they did."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

__all__ = ["QUIET", "Company", "company"]

QUIET = 0.1
"""Cores that other processes may use without spoiling the figures."""


class Company:
    """Cores used by processes other than this one and those that it started.

    >>> company = Company()
    >>> used = company.cores()
    >>> used is None or used >= 0
    True
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._others = 0.0
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def look(self) -> None:
        """Add what others used since the last look.

        Look before processes of ours end: nobody may have waited for them, and then their time looks like that of
        others.
        """
        busy, own = _busy_seconds(), _own_seconds()
        if busy is not None and self._busy is not None:
            self._others += max(busy - self._busy - (own - self._own), 0.0)
        self._busy, self._own = busy, own

    def leave_out(self) -> None:
        """Go on from here: what was used since the last look is nobody's."""
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def cores(self) -> float | None:
        """On average since the beginning; None where the system does not tell."""
        self.look()
        if self._busy is None:
            return None
        return round(self._others / max(1e-3, time.perf_counter() - self._began), 2)


def _busy_seconds() -> float | None:
    """Of all cores, in which they were not idle, since the system started."""
    try:
        ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return None
    return (sum(ticks) - ticks[3] - ticks[4]) / float(os.sysconf("SC_CLK_TCK"))


def _own_seconds() -> float:
    """Of this process and all below it; those that have ended count with whoever waited for them."""
    this, total = psutil.Process(), 0.0
    for process in [this, *this.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended while we looked
            continue
        total += times.user + times.system + getattr(times, "children_user", 0) + getattr(times, "children_system", 0)
    return total


company = Company()
"""Since the benchmark's start."""
