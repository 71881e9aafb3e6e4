"""collect and collect_set: the first values in order of arrival."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from midstream.engine.aggregation.base import Columns
from midstream.engine.aggregation.recent import Last, flattened, numbered_lists
from midstream.engine.aggregation.runs import Integers, Runs

__all__ = ["Collected"]


class Collected(Last):
    """The first ``limit`` values in order of arrival; with ``distinct``, the first of each value.

    Columns as in :class:`Last`.
    """

    def __init__(self, kind: pa.DataType, limit: int, *, distinct: bool) -> None:
        super().__init__(kind, limit)
        self._distinct = distinct

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        run, number, source, values = flattened(columns, runs)
        order = np.lexsort((number, run))
        if self._distinct:
            order = _first_of_each(values.take(pa.array(source)), run, order)
        counts = np.bincount(run[order], minlength=len(runs))
        before = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        kept = order[before < self._limit]
        return numbered_lists(np.minimum(counts, self._limit), values.take(pa.array(source[kept])), number[kept])


def _first_of_each(values: pa.Array, run: Integers, order: Integers) -> Integers:
    """The places, in this order, at which a value occurs in its run for the first time."""
    encoded = values.dictionary_encode()
    codes = run * max(len(encoded.dictionary), 1) + encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    _, firsts = np.unique(codes[order], return_index=True)
    found: Integers = order[np.sort(firsts)]
    return found
