"""An aggregation of the user's: zero, add, merge, result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from midstream.engine.aggregation.base import Columns, LooseAccumulator
from midstream.engine.aggregation.runs import Integers, Runs
from midstream.errors import StateError
from midstream.flow.aggregations import Aggregator

__all__ = ["Custom"]

_PLAIN = (type(None), bool, int, float, str, bytes)


class Custom(LooseAccumulator):
    """Calls the user's object: once for each key of a block of rows, not for each row. Column: the totals."""

    def __init__(self, aggregator: Aggregator, names: Sequence[str], returns: pa.DataType) -> None:
        self._aggregator = aggregator
        self._names = list(names)
        self._returns = returns

    def of_rows(self, values: tuple[pa.Array, ...], numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`; ``values`` are those of all columns that the user named."""
        rows = pa.RecordBatch.from_arrays(list(values), names=self._names).take(pa.array(runs.order))
        sizes = runs.sizes.tolist()
        return (
            _objects(
                self._aggregator.add(self._aggregator.zero(), rows.slice(start, size))
                for start, size in zip(runs.starts.tolist(), sizes, strict=True)
            ),
        )

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        ordered = columns[0][runs.order]
        found = []
        for start, size in zip(runs.starts.tolist(), runs.sizes.tolist(), strict=True):
            total = ordered[start]
            for other in ordered[start + 1 : start + size]:
                total = self._aggregator.merge(total, other)
            found.append(total)
        return (_objects(found),)

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        return pa.array([self._aggregator.result(total) for total in columns[0]], self._returns)

    def to_values(self, columns: Columns) -> list[Any]:
        """See :class:`LooseAccumulator`."""
        for total in columns[0]:
            _require_plain(total)
        return list(columns[0])

    def of_values(self, values: Sequence[Any]) -> Columns:
        """See :class:`LooseAccumulator`."""
        return (_objects(values),)


def _objects(values: Any) -> Any:
    listed = list(values)
    found = np.empty(len(listed), object)
    for index, value in enumerate(listed):  # numpy would make columns of lists
        found[index] = value
    return found


def _require_plain(total: Any) -> None:
    """Refuse what could not be read where the user's classes are unknown."""
    if type(total) in _PLAIN:
        return
    if type(total) in (list, tuple, set, frozenset):
        for one in total:
            _require_plain(one)
    elif type(total) is dict:
        for key, value in total.items():
            _require_plain(key)
            _require_plain(value)
    else:
        raise StateError(
            f"a total of a custom aggregation is a {type(total).__name__}; it is stored, so it must be made of "
            f"numbers, texts, bytes, booleans, None, and lists, tuples, sets and dicts of them"
        )
