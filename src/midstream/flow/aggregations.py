"""What ``aggregate`` can compute, as descriptions; users know this module as ``midstream.agg``.

Rows in which the column is null are left out, as in SQL; over no rows ``count`` and ``approx_distinct`` are 0, ``last``
is empty, and the others are null. A NaN makes sums and means NaN; ``min`` and ``max`` leave NaN out unless there is
nothing else. Sums of integers and decimals are kept wider than their type, so only the final sum has to fit.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pyarrow as pa

from midstream.data.schema import check_key_columns, require_columns, type_name
from midstream.errors import FlowError, SchemaError

__all__ = ["Aggregation", "AggregationKind", "approx_distinct", "count", "last", "max", "mean", "min", "sum"]

MAX_LAST = 10_000


class AggregationKind(enum.StrEnum):
    """How rows become one value."""

    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    APPROX_DISTINCT = "approx_distinct"
    LAST = "last"


@dataclass(frozen=True)
class Aggregation:
    """One column of an aggregate's result: the computation, and the column it reads (``None``: whole rows)."""

    kind: AggregationKind
    column: str | None = None
    limit: int = 0
    """For ``last``: the number of values to keep."""


def count(column: str | None = None) -> Aggregation:
    """The number of rows; with a column, the number of rows in which it is not null."""
    return Aggregation(AggregationKind.COUNT, column)


def sum(column: str) -> Aggregation:
    """The sum: a bigint of integers (an error when it does not fit), a double of floats, a decimal of decimals."""
    return Aggregation(AggregationKind.SUM, column)


def min(column: str) -> Aggregation:
    """The smallest value: numbers, strings (by code points), dates and timestamps."""
    return Aggregation(AggregationKind.MIN, column)


def max(column: str) -> Aggregation:
    """The largest value: numbers, strings (by code points), dates and timestamps."""
    return Aggregation(AggregationKind.MAX, column)


def mean(column: str) -> Aggregation:
    """The average of numbers, as a double."""
    return Aggregation(AggregationKind.MEAN, column)


def approx_distinct(column: str) -> Aggregation:
    """The approximate number of distinct values (HyperLogLog with 1,024 registers: a standard error of 3.3%)."""
    return Aggregation(AggregationKind.APPROX_DISTINCT, column)


def last(column: str, n: int) -> Aggregation:
    """The most recent ``n`` values in the order of arrival, the newest last.

    When two sessions of earlier epochs merge, the values of the later session count as newer.
    """
    if type(n) is not int or not 1 <= n <= MAX_LAST:
        raise FlowError(f"last({column!r}, n={n!r}): n must be a whole number from 1 to {MAX_LAST}")
    return Aggregation(AggregationKind.LAST, column, n)


def result_type(aggregation: Aggregation, schema: pa.Schema, what: str) -> pa.DataType:
    """The type of an aggregation's result over rows of a schema; refuses columns it cannot take.

    >>> str(result_type(mean("amount"), pa.schema({"amount": pa.int32()}), "aggregate 'a'"))
    'double'
    """
    kind, column = aggregation.kind, aggregation.column
    if column is None:
        if kind is not AggregationKind.COUNT:
            raise FlowError(f"{what}: {kind} needs a column")
        return pa.int64()
    require_columns(schema, [column], f"{what}: {kind}")
    found = schema.field(column).type
    number = pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_decimal(found)
    match kind:
        case AggregationKind.COUNT:
            return pa.int64()
        case AggregationKind.APPROX_DISTINCT:
            check_key_columns(schema, [column], f"{what}: {kind}")
            return pa.int64()
        case AggregationKind.LAST:
            return pa.list_(found)
        case AggregationKind.MEAN if number:
            return pa.float64()
        case AggregationKind.SUM if pa.types.is_integer(found):
            return pa.int64()
        case AggregationKind.SUM if pa.types.is_decimal(found):
            return pa.decimal128(38, found.scale)
        case AggregationKind.SUM if number:
            return pa.float64()
        case AggregationKind.MIN | AggregationKind.MAX if number or _is_ordered(found):
            return found
    raise SchemaError(f"{what}: {kind}({column!r}) cannot take a column of type {type_name(found)}", column=column)


def _is_ordered(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind))
