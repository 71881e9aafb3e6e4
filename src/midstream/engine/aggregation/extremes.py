"""min and max."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.aggregation.base import Accumulator, Columns, LooseAccumulator, filled, integers, valid
from midstream.engine.aggregation.runs import Integers, Runs

__all__ = ["ArrowExtreme", "NumberExtreme"]


class NumberExtreme(Accumulator):
    """The smallest or largest of numbers, dates or timestamps.

    NaN is larger than all other numbers, as in Spark.
    """

    @staticmethod
    def takes(kind: pa.DataType) -> bool:
        """Whether values of a type are numbers here."""
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        return bool(number or pa.types.is_date(kind) or pa.types.is_timestamp(kind))

    def __init__(self, kind: pa.DataType, *, largest: bool) -> None:
        self._kind = kind
        self._is_float = bool(pa.types.is_floating(kind))
        if self._is_float:
            self._better: np.ufunc = np.maximum if largest else np.fmin  # of a number and NaN: NaN; the number
            self._nothing: Any = -np.inf if largest else np.nan
        else:
            self._better = np.maximum if largest else np.minimum
            self._nothing = np.iinfo(np.int64).min if largest else np.iinfo(np.int64).max
        self.fields = (("best", "<f8" if self._is_float else "<i8"), ("seen", "?"))

    def of_rows(self, values: pa.Array, numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        seen = valid(values)
        best = filled(integers(values)).astype(np.float64 if self._is_float else np.int64)
        best[~seen] = self._nothing
        return self.combined((best, seen), runs)

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        best, seen = columns
        if self._is_float:
            best = np.where(seen, best, self._nothing)  # earlier versions stored another value for nothing
        return (
            self._better.reduceat(best[runs.order], runs.starts),
            np.logical_or.reduceat(seen[runs.order], runs.starts),
        )

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        best, seen = columns
        best = np.where(seen, best, 0)
        if pa.types.is_date32(self._kind):
            return pa.array(best.astype(np.int32), mask=~seen).view(self._kind)
        if pa.types.is_timestamp(self._kind):
            return pa.array(best, mask=~seen).view(self._kind)
        return pa.array(best, mask=~seen).cast(self._kind, safe=False)  # the values came from this type, so they fit


class ArrowExtreme(LooseAccumulator):
    """The smallest or largest of values that Arrow can sort: strings, binaries, booleans and decimals."""

    def __init__(self, kind: pa.DataType, *, largest: bool) -> None:
        self._kind = kind
        self._largest = largest

    def of_rows(self, values: pa.Array, numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        return self.combined((values,), runs)

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        (values,) = columns
        # Nulls sort to the losing end.
        placement = "at_start" if self._largest else "at_end"
        by_value = pc.array_sort_indices(values, null_placement=placement).to_numpy().astype(np.int64)
        rank = np.empty(len(by_value), np.int64)
        rank[by_value] = np.arange(len(by_value))
        better = np.maximum if self._largest else np.minimum
        best = better.reduceat(rank[runs.order], runs.starts)
        return (values.take(pa.array(by_value[best])),)

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        found: pa.Array = columns[0]
        return found

    def to_values(self, columns: Columns) -> list[Any]:
        """See :class:`LooseAccumulator`."""
        values: list[Any] = columns[0].to_pylist()
        return values

    def of_values(self, values: Sequence[Any]) -> Columns:
        """See :class:`LooseAccumulator`."""
        return (pa.array(values, self._kind),)
