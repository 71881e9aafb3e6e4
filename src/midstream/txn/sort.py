"""Sorts labels that are small numbers, and timestamps that may be almost in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from midstream.txn.kernels import compiled

__all__ = ["order_of", "sorted_by"]


@compiled
def sorted_by(labels: Any, count: int) -> Any:
    """Positions by label (0 to count - 1), stable: the start of each label, and the positions."""
    starts = np.zeros(count + 1, np.int64)
    for x in range(len(labels)):
        starts[labels[x] + 1] += 1
    starts = np.cumsum(starts)
    fill = starts.copy()
    order = np.empty(len(labels), np.int64)
    for x in range(len(labels)):
        order[fill[labels[x]]] = x
        fill[labels[x]] += 1
    return starts, order


DIGIT = 11
"""Bits that :func:`order_of` sorts by at a time if the span is large: the counters fit in the L1 cache."""


@compiled
def order_of(times: Any) -> Any:
    """Positions by (time, position); empty if the times are already in order."""
    low = high = times[0]
    last = times[0]
    sorted_already = True
    for x in range(len(times)):
        now = times[x]
        sorted_already = sorted_already and now >= last
        last = now
        low = min(low, now)
        high = max(high, now)
    if sorted_already:
        return np.empty(0, np.int64)
    span = np.uint64(high) - np.uint64(low)
    order, other = np.arange(len(times)), np.empty(len(times), np.int64)
    bits = np.uint64(DIGIT)
    if span < np.uint64(4 * len(times)):  # in one pass
        while span >> bits:
            bits += np.uint64(1)
    fill = np.empty(1 << bits, np.int64)
    mask = np.uint64(len(fill) - 1)
    shift = np.uint64(0)
    while shift < 64 and span >> shift:
        fill[:] = 0
        for x in range(len(times)):
            fill[((np.uint64(times[x]) - np.uint64(low)) >> shift) & mask] += 1
        total = 0
        for digit in range(len(fill)):
            total, fill[digit] = total + fill[digit], total
        for x in range(len(times)):
            place = ((np.uint64(times[order[x]]) - np.uint64(low)) >> shift) & mask
            other[fill[place]] = order[x]
            fill[place] += 1
        order, other = other, order
        shift += bits
    return order
