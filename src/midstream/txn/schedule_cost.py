"""Estimates how long a strategy would take by simulating its schedule: clocks instead of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.txn.dependencies import Units
from midstream.txn.kernels import compiled

__all__ = ["depth_seconds", "queue_seconds", "strata_seconds", "work_of"]

Array = npt.NDArray[Any]


def work_of(units: Units, work: Array) -> Array:
    """Seconds per unit, given the seconds of each member by its number."""
    found: Array = _summed(units.starts, units.members, work)
    return found


def strata_seconds(units: Units, work: Array, threads: int, meeting: float) -> float:
    """All threads meet after every stratum; each runs an equal part of it."""
    strata, order = units.strata
    return float(_strata(strata, order, work, threads)) + units.depth * meeting


def depth_seconds(units: Units, work: Array, threads: int, wait: float) -> float:
    """Each thread has its own list, and waits only for the units that a unit needs."""
    return float(_depth(units.strata[1], units.before, units.needed, work + wait, threads))


def queue_seconds(units: Units, work: Array, threads: int, queue: float) -> float:
    """Any free thread takes the unit that has been ready longest."""
    after, dependents, missing = units.dependents
    return float(_queue(after, dependents, missing.copy(), work + queue, threads))


@compiled
def _summed(starts: Any, members: Any, work: Any) -> Any:
    total = np.zeros(len(starts) - 1)
    for unit in range(len(total)):
        for x in range(starts[unit], starts[unit + 1]):
            total[unit] += work[members[x]]
    return total


@compiled
def _strata(strata: Any, order: Any, work: Any, threads: int) -> float:
    total = 0.0
    for level in range(len(strata) - 1):
        low, width = strata[level], strata[level + 1] - strata[level]
        longest = 0.0
        for thread in range(threads):
            mine = 0.0
            for x in range(low + width * thread // threads, low + width * (thread + 1) // threads):
                mine += work[order[x]]
            longest = max(longest, mine)
        total += longest
    return total


@compiled
def _depth(order: Any, before: Any, needed: Any, work: Any, threads: int) -> float:
    clock = np.zeros(threads)
    done = np.zeros(len(order))
    for x in range(len(order)):
        unit = order[x]
        now = clock[x % threads]
        for y in range(before[unit], before[unit + 1]):
            now = max(now, done[needed[y]])
        done[unit] = clock[x % threads] = now + work[unit]
    return float(clock.max())


@compiled
def _queue(after: Any, dependents: Any, missing: Any, work: Any, threads: int) -> float:
    """Units leave the queue in the order in which they became ready; one that became ready later starts no earlier."""
    count = len(work)
    queue = np.empty(count, np.int64)
    ready = np.zeros(count)  # by unit: when its last dependency was done
    filled = 0
    for unit in range(count):
        if missing[unit] == 0:
            queue[filled] = unit
            filled += 1
    clock = np.zeros(threads)
    running = np.full(threads, -1, np.int64)  # by thread: the unit that it is running
    taken = 0
    finished = 0
    while finished < count:
        # Idle threads take the units that are ready; then time advances to the next end of a unit.
        for thread in range(threads):
            if running[thread] < 0 and taken < filled:
                unit = queue[taken]
                taken += 1
                running[thread] = unit
                clock[thread] = max(clock[thread], ready[unit]) + work[unit]
        first = -1
        for thread in range(threads):
            if running[thread] >= 0 and (first < 0 or clock[thread] < clock[first]):
                first = thread
        unit = running[first]
        running[first] = -1
        finished += 1
        for y in range(after[unit], after[unit + 1]):
            other = dependents[y]
            missing[other] -= 1
            if missing[other] == 0:
                ready[other] = clock[first]
                queue[filled] = other
                filled += 1
    return float(clock.max())
