"""approx_quantile: DDSketch (Masson, Rim and Lee, VLDB 2019).

Values fall into buckets whose bounds grow by a constant factor, so that any quantile is known to within 1% of its
value. Buckets are counted. So a sketch depends neither on the order of rows nor on how they were cut, and an epoch that
runs again gives the same result. T-digests, and KLL with its random choices, do not promise that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.aggregation.base import Columns, LooseAccumulator, valid
from midstream.engine.aggregation.runs import Integers, Runs

__all__ = ["ACCURACY", "Quantiles"]

ACCURACY = 0.01
"""Largest relative error of a result."""

MOST_BUCKETS = 2048
"""Most buckets of one sketch; beyond that, the buckets of the smallest values become one. 17 powers of ten take
1,957."""

_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
_LOG = math.log(_GAMMA)
_MIDDLE = 1 << 16
"""The bucket of 1; negative values have negative buckets, zero has bucket 0."""
_INFINITE, _NAN = 1 << 18, 1 << 19


class Quantiles(LooseAccumulator):
    """Approximate quantiles. Columns: lists of buckets, ascending, and lists of their counts.

    State holds both as little-endian bytes, so the meaning of a bucket must never change; a unit test pins it.
    """

    def __init__(self, fractions: tuple[float, ...], *, many: bool) -> None:
        self._fractions = fractions
        self._many = many

    def of_rows(self, values: pa.Array, numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        there = valid(values)[runs.order]
        floats = values.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False)
        buckets = _bucket(floats[runs.order][there])
        return _counted(runs.run_of[there], buckets, np.ones(len(buckets), np.int64), len(runs))

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        starts, sizes, buckets = _flat(columns[0])
        counts = _flat(columns[1])[2]
        sizes = sizes[runs.order]
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        source = np.repeat(starts[runs.order], sizes) + inside
        return _counted(np.repeat(runs.run_of, sizes), buckets[source], counts[source], len(runs))

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        starts, sizes, buckets = _flat(columns[0])
        counts = _flat(columns[1])[2]
        found = np.zeros((len(sizes), len(self._fractions)))
        for index, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            if size:
                reached = np.cumsum(counts[start : start + size])
                ranks = [max(math.ceil(fraction * int(reached[-1])), 1) for fraction in self._fractions]
                found[index] = _value(buckets[start + np.searchsorted(reached, ranks)])
        if not self._many:
            return pa.array(found[:, 0], pa.float64(), mask=sizes == 0)
        lists = [None if size == 0 else row for size, row in zip(sizes.tolist(), found.tolist(), strict=True)]
        return pa.array(lists, pa.list_(pa.float64()))

    def to_values(self, columns: Columns) -> list[Any]:
        """See :class:`LooseAccumulator`."""
        starts, sizes, buckets = _flat(columns[0])
        counts = _flat(columns[1])[2]
        return [
            (
                buckets[start : start + size].astype("<i4").tobytes(),
                counts[start : start + size].astype("<i8").tobytes(),
            )
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]

    def of_values(self, values: Sequence[Any]) -> Columns:
        """See :class:`LooseAccumulator`."""
        sizes = np.fromiter((len(buckets) // 4 for buckets, _ in values), np.int64, len(values))
        buckets = np.frombuffer(b"".join(one for one, _ in values), "<i4").astype(np.int64)
        counts = np.frombuffer(b"".join(one for _, one in values), "<i8").astype(np.int64)
        return _lists(sizes, buckets), _lists(sizes, counts)


def _bucket(values: npt.NDArray[np.float64]) -> Integers:
    """The bucket of each value; buckets are ordered as values are, NaN last."""
    with np.errstate(all="ignore"):
        size = np.where(values == 0, 1.0, np.abs(values))
        index = np.where(np.isfinite(size), np.ceil(np.log(size) / _LOG) + _MIDDLE, _INFINITE)
    signed = np.where(values < 0, -index, index)
    signed = np.where(values == 0, 0, signed)
    found: Integers = np.where(np.isnan(values), _NAN, signed).astype(np.int64)
    return found


def _value(buckets: Integers) -> npt.NDArray[np.float64]:
    """The value that a bucket stands for: within 1% of all that it may hold."""
    size = np.abs(buckets)
    with np.errstate(all="ignore"):
        found = np.exp((size - _MIDDLE) * _LOG) * (2 / (1 + _GAMMA))
    found = np.where(size == _INFINITE, np.inf, found) * np.sign(buckets)
    found = np.where(buckets == 0, 0.0, found)
    return np.where(buckets == _NAN, np.nan, found)


def _counted(run: Integers, buckets: Integers, counts: Integers, total: int) -> Columns:
    """The counts of each bucket of each run; in a large sketch the lowest buckets become one."""
    order = np.lexsort((buckets, run))
    run, buckets, counts = run[order], buckets[order], counts[order]
    is_new = np.ones(len(run), np.bool_)
    is_new[1:] = (run[1:] != run[:-1]) | (buckets[1:] != buckets[:-1])
    starts = np.flatnonzero(is_new)
    run, buckets = run[starts], buckets[starts]
    counts = np.add.reduceat(counts, starts) if len(starts) else counts[:0]
    sizes = np.bincount(run, minlength=total)
    if len(sizes) and sizes.max() > MOST_BUCKETS:
        # The lowest bucket to keep only rises as rows come, so it does not matter when buckets are put together.
        ends = np.cumsum(sizes)
        kept_from = buckets[np.maximum(ends - MOST_BUCKETS, ends - sizes)[run]]
        return _counted(run, np.maximum(buckets, kept_from), counts, total)
    return _lists(sizes, buckets), _lists(sizes, counts)


def _lists(sizes: Integers, values: Integers) -> pa.Array:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values, pa.int64()))


def _flat(lists: pa.Array) -> tuple[Integers, Integers, Integers]:
    """The start and length of each list, and all values."""
    offsets = lists.offsets.to_numpy()
    return offsets[:-1], np.diff(offsets), lists.values.to_numpy()
