"""approx_distinct: HyperLogLog over the engine's stable hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.data.hashing import hash_columns
from midstream.engine.aggregation.base import Columns, LooseAccumulator, valid
from midstream.engine.aggregation.runs import Integers, Runs

__all__ = ["REGISTERS", "ApproxDistinct"]

REGISTERS = 1024
"""Their standard error is 1.04 / sqrt(1024) = 3.3%."""

_INDEX_SHIFT, _INDEX_BITS, _HALF = np.uint64(54), np.uint64(10), np.uint64(32)
_LONGEST = 32  # positions distinguished: the 32 bits of the hash after the 10 of the index
_POSITION_BITS = 6
_MARK_BITS = 16


class ApproxDistinct(LooseAccumulator):
    """The approximate number of distinct values.

    The first 10 bits of a value's hash select a register, which keeps the largest position of the first 1 among the
    next 32 bits. Most keys have few values, so only registers in use are stored, as *marks* of 16 bits: 10 for the
    register, 6 for the position. The single column has an ascending list of marks for each element.

    State contains the marks as little-endian bytes, so their meaning must never change; a unit test pins it.
    """

    def of_rows(self, values: pa.Array, numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        hashes = hash_columns(pa.RecordBatch.from_arrays([values], ["value"]), ["value"])
        places = ((hashes << _INDEX_BITS) >> _HALF).astype(np.float64)  # 32 bits: exact
        position = _LONGEST + 1 - np.frexp(places)[1]
        marks = ((hashes >> _INDEX_SHIFT).astype(np.int64) << _POSITION_BITS) | position
        there = valid(values)[runs.order]
        return _highest(runs.run_of[there], marks[runs.order][there], len(runs))

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        starts, sizes, marks = _flat(columns[0])
        sizes = sizes[runs.order]
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        source = np.repeat(starts[runs.order], sizes) + inside
        return _highest(np.repeat(runs.run_of, sizes), marks[source].astype(np.int64), len(runs))

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        _, sizes, marks = _flat(columns[0])
        positions = _LONGEST + 2
        cells = np.repeat(np.arange(len(sizes)), sizes) * positions + (marks & ((1 << _POSITION_BITS) - 1))
        histogram = np.bincount(cells, minlength=len(sizes) * positions).reshape(-1, positions)
        histogram[:, 0] = REGISTERS - sizes
        return pa.array(_estimates(histogram))

    def to_values(self, columns: Columns) -> list[Any]:
        """See :class:`LooseAccumulator`."""
        starts, sizes, marks = _flat(columns[0])
        data = marks.astype("<u2").tobytes()
        return [
            data[2 * start : 2 * (start + size)] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]

    def of_values(self, values: Sequence[Any]) -> Columns:
        """See :class:`LooseAccumulator`."""
        sizes = np.fromiter((len(one) // 2 for one in values), np.int64, len(values))
        return (_lists(sizes, np.frombuffer(b"".join(values), "<u2")),)


def _highest(run: Integers, marks: Integers, count: int) -> Columns:
    """The highest mark of each run for each register."""
    marked = np.sort(run << _MARK_BITS | marks)
    last = np.ones(len(marked), np.bool_)
    last[:-1] = marked[1:] >> _POSITION_BITS != marked[:-1] >> _POSITION_BITS
    kept = marked[last]
    return (_lists(np.bincount(kept >> _MARK_BITS, minlength=count), kept.astype(np.uint16)),)


def _lists(sizes: Integers, marks: npt.NDArray[Any]) -> pa.Array:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(marks, pa.uint16()))


def _flat(lists: pa.Array) -> tuple[Integers, Integers, npt.NDArray[np.uint16]]:
    """The start and length of each list, and all marks."""
    offsets = lists.offsets.to_numpy()
    return offsets[:-1], np.diff(offsets), lists.values.to_numpy()


def _estimates(histogram: Integers) -> Integers:
    """Ertl's estimator ("New cardinality estimation algorithms for HyperLogLog sketches", 2017, algorithm 6).

    ``histogram`` has the number of registers with each value, for each element. Unlike HyperLogLog's first estimator,
    this one has no bias between small and large numbers, and needs no tables.
    """
    z = REGISTERS * _tau(1 - histogram[:, _LONGEST + 1] / REGISTERS)
    for position in range(_LONGEST, 0, -1):
        z = (z + histogram[:, position]) / 2
    z += REGISTERS * _sigma(histogram[:, 0] / REGISTERS)
    found: Integers = np.rint(REGISTERS**2 / (2 * np.log(2)) / z).astype(np.int64)
    return found


def _sigma(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """x + the sum over k > 0 of x**(2**k) * 2**(k - 1); infinite at 1, where no register is in use."""
    total, power, factor = x.copy(), x.copy(), 1.0
    for _ in range(24):  # x is 1 or at most 1023/1024, so the powers vanish
        power = power * power
        total += power * factor
        factor *= 2
    return np.where(x == 1, np.inf, total)


def _tau(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(1 - x - the sum over k > 0 of (1 - x**(2**-k))**2 * 2**-k) / 3; zero at 0 and 1."""
    total, root, factor = 1 - x, x.copy(), 1.0
    for _ in range(40):
        root = np.sqrt(root)
        factor /= 2
        total = total - (1 - root) ** 2 * factor
    return np.where((x == 0) | (x == 1), 0.0, total / 3)
