"""How busy other processes kept the machine while a benchmark ran: its figures mean little if they did."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

__all__ = ["QUIET", "Company"]

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
        self._began, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores(self) -> float | None:
        """On average since the beginning; None where the system does not tell."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = busy - self._busy - (_own_seconds() - self._own)
        return round(max(others, 0.0) / max(1e-3, time.perf_counter() - self._began), 2)


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
