"""last: the most recent values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from midstream.engine.aggregation.base import Columns, LooseAccumulator, integers, valid
from midstream.engine.aggregation.runs import Integers, Runs

__all__ = ["Last", "flattened", "numbered_lists"]


class Last(LooseAccumulator):
    """The last ``limit`` values in order of arrival. Columns: lists of the values, lists of their numbers.

    The numbers decide what is last, not the positions: elements may be combined in any order.
    """

    def __init__(self, kind: pa.DataType, limit: int) -> None:
        self._kind = kind
        self._kept = integers(pa.array([], kind)).type  # some times cannot be represented as Python objects
        self._limit = limit

    def of_rows(self, values: pa.Array, numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        there = valid(values)
        ends = np.cumsum(there)
        offsets = np.concatenate([np.zeros(1, np.int64), ends])
        found = integers(values)
        return self.combined(_lists(offsets, found.drop_null() if found.null_count else found, numbers[there]), runs)

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        run, number, source, values = flattened(columns, runs)
        order = np.lexsort((number, run))
        counts = np.bincount(run, minlength=len(runs))
        # How many of the same run come after each element, in that order.
        behind = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(order))
        kept = order[behind < self._limit]
        return numbered_lists(np.minimum(counts, self._limit), values.take(pa.array(source[kept])), number[kept])

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        values = columns[0]
        flat = values.flatten()
        offsets = (values.offsets.to_numpy() - values.offsets[0].as_py()).astype(np.int32) if len(values) else [0]
        if flat.type != self._kind:
            flat = flat.view(self._kind)
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)

    def to_values(self, columns: Columns) -> list[Any]:
        """See :class:`LooseAccumulator`."""
        values: list[Any] = columns[0].to_pylist()
        return values

    def of_values(self, values: Sequence[Any]) -> Columns:
        """See :class:`LooseAccumulator`."""
        lists = pa.array(values, pa.large_list(self._kept))
        offsets = lists.offsets.to_numpy() if len(lists) else np.zeros(1, np.int64)
        # Row numbers are not negative, so these come before all of them.
        return _lists(offsets, lists.flatten(), np.arange(-int(offsets[-1]), 0))


def flattened(columns: Columns, runs: Runs) -> tuple[Integers, Integers, Integers, pa.Array]:
    """For each value in lists, run by run: its run, its number, its place; and all values."""
    values, numbers = columns
    offsets = values.offsets.to_numpy()
    number_offsets = numbers.offsets.to_numpy()
    sizes = np.diff(offsets)[runs.order]
    inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    number = numbers.values.to_numpy()[np.repeat(number_offsets[:-1][runs.order], sizes) + inside]
    return np.repeat(runs.run_of, sizes), number, np.repeat(offsets[:-1][runs.order], sizes) + inside, values.values


def numbered_lists(sizes: Integers, values: pa.Array, numbers: Integers) -> Columns:
    """Lists of these lengths, of values and of their numbers."""
    return _lists(np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]), values, numbers)


def _lists(offsets: Integers, values: pa.Array, numbers: Integers) -> Columns:
    starts = pa.array(offsets, pa.int64())
    return (
        pa.LargeListArray.from_arrays(starts, values),
        pa.LargeListArray.from_arrays(starts, pa.array(numbers, pa.int64())),
    )
