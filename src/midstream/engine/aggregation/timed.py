"""first_by and last_by: the value at the earliest or the latest time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.aggregation.base import Columns, LooseAccumulator, integers, valid
from midstream.engine.aggregation.runs import Integers, Runs

__all__ = ["AtTime"]


class AtTime(LooseAccumulator):
    """The value of the row with the earliest or latest time, of those in which both are there.

    Of several rows at that time the first to arrive counts for the earliest, the last for the latest. Columns: the
    values, their times, their numbers (in order of arrival), and whether there are any.
    """

    def __init__(self, kind: pa.DataType, *, latest: bool) -> None:
        self._kind = kind
        self._kept = integers(pa.array([], kind)).type  # some times cannot be represented as Python objects
        self._latest = latest

    def of_rows(self, values: tuple[pa.Array, pa.Array], numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`; ``values`` are those of the column and their times."""
        column, by = values
        times = integers(by).cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        return self.combined((integers(column), times, numbers, valid(column) & valid(by)), runs)

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        values, times, numbers, seen = columns
        # The best of each run comes last.
        order = np.lexsort((numbers, times, seen) if self._latest else (-numbers, -times, seen))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        best = order[np.maximum.reduceat(rank[runs.order], runs.starts)]
        return values.take(pa.array(best)), times[best], numbers[best], seen[best]

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        values, _, _, seen = columns
        found = pc.if_else(pa.array(seen), values, pa.scalar(None, values.type))
        return found if found.type.equals(self._kind) else found.view(self._kind)

    def to_values(self, columns: Columns) -> list[Any]:
        """See :class:`LooseAccumulator`."""
        values, times, _, seen = columns
        return [
            (value, time) if is_there else None
            for value, time, is_there in zip(values.to_pylist(), times.tolist(), seen.tolist(), strict=True)
        ]

    def of_values(self, values: Sequence[Any]) -> Columns:
        """See :class:`LooseAccumulator`."""
        found = [(None, 0) if one is None else one for one in values]
        seen = np.fromiter((one is not None for one in values), np.bool_, len(values))
        times = np.fromiter((time for _, time in found), np.int64, len(found))
        return pa.array([value for value, _ in found], self._kept), times, np.full(len(found), -1), seen
