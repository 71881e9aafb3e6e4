"""All aggregations of an operator together, and their encoding in state."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.data.schema import type_name
from midstream.engine.aggregation.base import Accumulator, Columns, DoesNotFit, LooseAccumulator
from midstream.engine.aggregation.collected import Collected
from midstream.engine.aggregation.custom import Custom
from midstream.engine.aggregation.extremes import ArrowExtreme, NumberExtreme
from midstream.engine.aggregation.moments import Moments
from midstream.engine.aggregation.quantiles import Quantiles
from midstream.engine.aggregation.recent import Last
from midstream.engine.aggregation.runs import Integers, Runs, runs_of
from midstream.engine.aggregation.sketches import ApproxDistinct
from midstream.engine.aggregation.sums import Count, ExactSum, FloatSum
from midstream.engine.aggregation.timed import AtTime
from midstream.errors import StateError
from midstream.flow.aggregations import Aggregation, AggregationKind, aggregator_of, type_of
from midstream.state.values import PackedCodec

__all__ = ["Totals", "TotalsOf", "accumulator_of"]

_LOOSE_WIDTH = 128

Totals = tuple[Columns, ...]
"""The columns of each aggregation, in the order of the operator's results; all of equal length."""


def accumulator_of(aggregation: Aggregation, takes: pa.Schema) -> Accumulator:
    """The accumulator for an aggregation over rows of a schema, which the flow has already checked."""
    kind = takes.field(aggregation.column).type if aggregation.column is not None else pa.null()
    is_mean, is_max = aggregation.kind is AggregationKind.MEAN, aggregation.kind is AggregationKind.MAX
    match aggregation.kind:
        case AggregationKind.COUNT:
            return Count()
        case AggregationKind.SUM | AggregationKind.MEAN if pa.types.is_floating(kind):
            return FloatSum(mean=is_mean)
        case AggregationKind.SUM | AggregationKind.MEAN:
            return ExactSum(kind, mean=is_mean)
        case AggregationKind.MIN | AggregationKind.MAX if NumberExtreme.takes(kind):
            return NumberExtreme(kind, largest=is_max)
        case AggregationKind.MIN | AggregationKind.MAX:
            return ArrowExtreme(kind, largest=is_max)
        case AggregationKind.APPROX_DISTINCT:
            return ApproxDistinct()
        case AggregationKind.LAST:
            return Last(kind, aggregation.limit)
        case AggregationKind.COLLECT | AggregationKind.COLLECT_SET:
            is_set = aggregation.kind is AggregationKind.COLLECT_SET
            return Collected(kind, aggregation.limit, distinct=is_set)
        case AggregationKind.FIRST_BY | AggregationKind.LAST_BY:
            return AtTime(kind, latest=aggregation.kind is AggregationKind.LAST_BY)
        case AggregationKind.APPROX_QUANTILE:
            return Quantiles(aggregation.fractions, many=aggregation.many)
        case AggregationKind.CUSTOM:
            return Custom(aggregator_of(aggregation), aggregation.inputs, type_of(aggregation.returns))
        case AggregationKind.VARIANCE | AggregationKind.VARIANCE_POP:
            return Moments(sample=aggregation.kind is AggregationKind.VARIANCE, root=False)
        case AggregationKind.STDDEV | AggregationKind.STDDEV_POP:
            return Moments(sample=aggregation.kind is AggregationKind.STDDEV, root=True)


class TotalsOf:
    """The aggregations of one operator.

    ``purpose`` describes what else must match for old state to be usable (the windows); ``times`` names integers that
    are stored beside the totals.

    >>> from midstream.flow import aggregations as agg
    >>> totals = TotalsOf([("n", agg.count()), ("sum", agg.sum("x"))], pa.schema({"x": pa.int64()}), "aggregate 'a'")
    >>> rows = pa.record_batch({"x": [5, 7, None]})
    >>> both = totals.of_rows(rows, np.arange(3), Runs(np.array([0, 2, 1]), np.array([0, 2])))
    >>> [column.to_pylist() for column in totals.results(both)]
    [[2, 1], [5, 7]]
    >>> again, _ = totals.unpack(totals.pack(both))
    >>> [column.to_pylist() for column in totals.results(again)]
    [[2, 1], [5, 7]]
    """

    def __init__(
        self,
        columns: Sequence[tuple[str, Aggregation]],
        takes: pa.Schema,
        what: str,
        purpose: str = "",
        times: Sequence[str] = (),
    ) -> None:
        self._what = what
        self._names = [name for name, _ in columns]
        self._inputs = [aggregation.inputs for _, aggregation in columns]
        self._takes_several = [aggregation.takes_several for _, aggregation in columns]
        self._all = [accumulator_of(aggregation, takes) for _, aggregation in columns]
        self._times = list(times)
        self._layout = _layout([aggregation for _, aggregation in columns], takes, purpose)
        self._loose = [one for one in self._all if isinstance(one, LooseAccumulator)]
        fields: list[Any] = [("layout", "<u4"), *((name, "<i8") for name in times)]
        fields += [(f"{i}_{field[0]}", *field[1:]) for i, one in enumerate(self._all) for field in one.fields]
        self._codec = PackedCodec(np.dtype(fields), what)

    @property
    def inputs(self) -> list[str]:
        """The columns of rows that are used."""
        return list(dict.fromkeys(name for names in self._inputs for name in names))

    @property
    def width(self) -> int:
        """The approximate size of one element in bytes."""
        return self._codec.dtype.itemsize + _LOOSE_WIDTH * len(self._loose)

    def of_rows(self, rows: pa.RecordBatch, numbers: Integers, runs: Runs) -> Totals:
        """The totals of each run of rows; ``numbers`` grow in order of arrival."""
        inputs: list[Any] = [
            tuple(map(rows.column, names)) if several else rows.column(names[0]) if names else None
            for names, several in zip(self._inputs, self._takes_several, strict=True)
        ]
        return tuple(one.of_rows(values, numbers, runs) for one, values in zip(self._all, inputs, strict=True))

    def combined(self, totals: Totals, runs: Runs) -> Totals:
        """The totals of each run of elements."""
        return tuple(one.combined(columns, runs) for one, columns in zip(self._all, totals, strict=True))

    def joined(self, parts: Sequence[Totals]) -> Totals:
        """The elements of all parts, concatenated. There must be at least one part."""
        if len(parts) == 1:
            return parts[0]
        return tuple(
            tuple(_concatenated(arrays) for arrays in zip(*of_one, strict=True)) for of_one in zip(*parts, strict=True)
        )

    def results(self, totals: Totals, show_key: Callable[[int], object] = repr) -> list[pa.Array]:
        """The results, one column per aggregation; ``show_key`` formats the key of an element for errors."""
        found = []
        for name, one, columns in zip(self._names, self._all, totals, strict=True):
            try:
                found.append(one.results(columns))
            except DoesNotFit as error:
                raise StateError(
                    f"{self._what}: column {name!r} of the key {show_key(error.index)}: {error}. Sum smaller numbers, "
                    f"or decimals: cast the column in an earlier map"
                ) from error
        return found

    def pack(self, totals: Totals, times: Sequence[Integers] = ()) -> list[bytes]:
        """The bytes of each element."""
        count = len(totals[0][0]) if totals else len(times[0])
        structs = np.zeros(count, self._codec.dtype)
        structs["layout"] = self._layout
        for name, values in zip(self._times, times, strict=True):
            structs[name] = values
        for index, one, columns in self._fixed(totals):
            for (field, *_), values in zip(one.fields, columns, strict=True):
                structs[f"{index}_{field}"] = values
        packed = self._codec.split(structs)
        if not self._loose:
            return packed
        loose = [
            one.to_values(columns)
            for one, columns in zip(self._all, totals, strict=True)
            if isinstance(one, LooseAccumulator)
        ]
        return [head + pickle.dumps(tail, 5) for head, tail in zip(packed, zip(*loose, strict=True), strict=True)]

    def with_stored(self, stored: Sequence[bytes | None], totals: Totals) -> Totals:
        """The elements combined with their stored totals, if any."""
        known = np.flatnonzero(np.fromiter((one is not None for one in stored), np.bool_, len(stored)))
        if not len(known):
            return totals
        older, _ = self.unpack([one for one in stored if one is not None])
        codes = np.concatenate([known, np.arange(len(stored))])  # older elements come first
        return self.combined(self.joined([older, totals]), runs_of(codes, len(stored)))

    def unpack(self, data: Sequence[bytes]) -> tuple[Totals, list[Integers]]:
        """The elements that :meth:`pack` was given, and their times."""
        width = self._codec.dtype.itemsize
        structs, _ = self._codec.join([one[:width] for one in data] if self._loose else data)
        if (structs["layout"] != self._layout).any():
            raise StateError(
                f"{self._what}: the stored totals were written with other aggregations or windows than these. Give the "
                f"operator another name, or restore the old aggregations"
            )
        tails = iter(self._tails(data, width))
        totals = []
        for index, one in enumerate(self._all):
            if isinstance(one, LooseAccumulator):
                totals.append(one.of_values(next(tails)))
            else:
                totals.append(tuple(structs[f"{index}_{field[0]}"] for field in one.fields))
        return tuple(totals), [np.ascontiguousarray(structs[name]) for name in self._times]

    def _tails(self, data: Sequence[bytes], width: int) -> list[list[Any]]:
        tails = [pickle.loads(memoryview(one)[width:]) for one in data] if self._loose else []
        return [[tail[index] for tail in tails] for index in range(len(self._loose))]

    def _fixed(self, totals: Totals) -> list[tuple[int, Accumulator, Columns]]:
        both = zip(self._all, totals, strict=True)
        return [
            (index, one, columns) for index, (one, columns) in enumerate(both) if not isinstance(one, LooseAccumulator)
        ]


def _more(one: Aggregation, takes: pa.Schema) -> str:
    """What else decides the stored bytes, of the kinds that have more; their text on disk must not change either."""
    columns = "".join(f", {name} {type_name(takes.field(name).type)}" for name in one.also)
    return columns + (f", returns {one.returns}" if one.returns else "")


def _concatenated(arrays: Sequence[npt.NDArray[Any] | pa.Array]) -> npt.NDArray[Any] | pa.Array:
    return np.concatenate(arrays) if isinstance(arrays[0], np.ndarray) else pa.concat_arrays(arrays)


def _layout(aggregations: Sequence[Aggregation], takes: pa.Schema, purpose: str) -> int:
    """A digest that differs if the meaning of the state differs."""
    texts = [
        f"{one.kind}({one.column} {'' if one.column is None else type_name(takes.field(one.column).type)}, {one.limit}"
        f"{_more(one, takes)})"
        for one in aggregations
    ]
    return zlib.crc32("; ".join([purpose, *texts]).encode())
