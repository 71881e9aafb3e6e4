"""What ``aggregate`` can compute, as descriptions; users know this module as ``midstream.agg``.

Rows in which the column is null are left out, as in SQL; over no rows ``count`` and ``approx_distinct`` are 0, ``last``
and ``collect`` are empty, and the others are null. A NaN makes sums, means and deviations NaN; ``max`` has it above all
numbers, as Spark has, so ``min`` is NaN only if there is nothing else. Sums of integers and decimals are kept wider
than their type, so only the final sum has to fit.

>>> from midstream import Flow, ListSource, MemorySink, agg
>>> from midstream.testing import run_local
>>> flow, out = Flow("payments"), MemorySink()
>>> rows = [{"user": "ann", "eur": 3}, {"user": "ann", "eur": 4}]
>>> payments = flow.source("in", ListSource([rows], "user string, eur int"))
>>> by_user = payments.key_by("by user", "user")
>>> by_user.aggregate("totals", n=agg.count(), largest=agg.max("eur")).sink("out", out)
>>> _ = run_local(flow)
>>> out.rows
[{'user': 'ann', 'n': 2, 'largest': 4}]
"""

from __future__ import annotations

import base64
import enum
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from midstream.data.ddl import spark_type
from midstream.data.schema import check_key_columns, parse_ddl, require_columns, type_name
from midstream.errors import FlowError, FunctionError, SchemaError
from midstream.flow.functions import pack

__all__ = [
    "Aggregation",
    "AggregationKind",
    "Aggregator",
    "approx_distinct",
    "approx_quantile",
    "collect",
    "collect_set",
    "count",
    "custom",
    "first_by",
    "last",
    "last_by",
    "max",
    "mean",
    "min",
    "stddev",
    "stddev_pop",
    "sum",
    "variance",
    "variance_pop",
]

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
    STDDEV = "stddev"
    STDDEV_POP = "stddev_pop"
    VARIANCE = "variance"
    VARIANCE_POP = "variance_pop"
    COLLECT = "collect"
    COLLECT_SET = "collect_set"
    FIRST_BY = "first_by"
    LAST_BY = "last_by"
    APPROX_QUANTILE = "approx_quantile"
    CUSTOM = "custom"

    @property
    def depends_on_order(self) -> bool:
        """Whether the order of arrival matters, which senders that pre-aggregate do not know."""
        kinds = (AggregationKind.LAST, AggregationKind.COLLECT, AggregationKind.COLLECT_SET)
        return self in (*kinds, AggregationKind.FIRST_BY, AggregationKind.LAST_BY)


@runtime_checkable
class Aggregator(Protocol):
    """An aggregation of your own, for :func:`custom`.

    A total is what is kept for each key: numbers, texts, bytes, and lists, tuples, sets and dicts of them. Rows of a
    key may be added in any portions and totals merged in any order, so results must not depend on either.

    >>> class Product:
    ...     def zero(self):
    ...         return 1.0
    ...     def add(self, total, rows):
    ...         for factor in rows["factor"].drop_null().to_pylist():
    ...             total *= factor
    ...         return total
    ...     def merge(self, one, other):
    ...         return one * other
    ...     def result(self, total):
    ...         return total
    >>> custom(Product(), "factor", returns="double").kind
    <AggregationKind.CUSTOM: 'custom'>
    """

    def zero(self) -> Any:
        """The total of no rows."""

    def add(self, total: Any, rows: pa.RecordBatch) -> Any:
        """The total with more rows of the key; they have the columns that were named."""

    def merge(self, one: Any, other: Any) -> Any:
        """The total of all rows of both."""

    def result(self, total: Any) -> Any:
        """The result that users see."""


@dataclass(frozen=True)
class Aggregation:
    """One column of an aggregate's result: the computation, and the column it reads (``None``: whole rows)."""

    kind: AggregationKind
    column: str | None = None
    limit: int = 0
    """For ``last`` and ``collect``: the number of values to keep."""
    also: tuple[str, ...] = ()
    """More columns that it reads: the time of ``first_by`` and ``last_by``, further ones of ``custom``."""
    fractions: tuple[float, ...] = ()
    """The quantiles."""
    many: bool = False
    """Whether they were given as a list, so that the result is an array."""
    returns: str = ""
    """The type of a custom result, in Spark's DDL."""
    packed: str = field(default="", repr=False, compare=False)
    """The user's object, pickled like functions, in base64. Another pickle of it means the same."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """All columns that it reads."""
        return (() if self.column is None else (self.column,)) + self.also

    @property
    def takes_several(self) -> bool:
        """Whether it is given a tuple of columns."""
        return self.kind in (AggregationKind.FIRST_BY, AggregationKind.LAST_BY, AggregationKind.CUSTOM)


def count(column: str | None = None) -> Aggregation:
    """The number of rows; with a column, the number of rows in which it is not null."""
    return Aggregation(AggregationKind.COUNT, column)


def sum(column: str) -> Aggregation:
    """The sum: a bigint of integers (an error when it does not fit), a double of floats, a decimal of decimals."""
    return Aggregation(AggregationKind.SUM, column)


def min(column: str) -> Aggregation:
    """The smallest value: numbers, strings (by code points), binaries, booleans (false first), dates and timestamps."""
    return Aggregation(AggregationKind.MIN, column)


def max(column: str) -> Aggregation:
    """The largest value: numbers, strings (by code points), binaries, booleans (true last), dates and timestamps."""
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


def stddev(column: str) -> Aggregation:
    """The standard deviation of a sample, as a double; null for fewer than two values."""
    return Aggregation(AggregationKind.STDDEV, column)


def stddev_pop(column: str) -> Aggregation:
    """The standard deviation of a whole population, as a double."""
    return Aggregation(AggregationKind.STDDEV_POP, column)


def variance(column: str) -> Aggregation:
    """The variance of a sample, as a double; null for fewer than two values."""
    return Aggregation(AggregationKind.VARIANCE, column)


def variance_pop(column: str) -> Aggregation:
    """The variance of a whole population, as a double."""
    return Aggregation(AggregationKind.VARIANCE_POP, column)


def collect(column: str, limit: int = 1000) -> Aggregation:
    """The first values in order of arrival, as an array; no more than ``limit``."""
    return Aggregation(AggregationKind.COLLECT, column, _limit("collect", column, limit))


def collect_set(column: str, limit: int = 1000) -> Aggregation:
    """The first distinct values in order of arrival, as an array; no more than ``limit``."""
    return Aggregation(AggregationKind.COLLECT_SET, column, _limit("collect_set", column, limit))


def first_by(column: str, time: str) -> Aggregation:
    """The value at the earliest time; at equal times, of the row that arrived first."""
    return Aggregation(AggregationKind.FIRST_BY, column, also=(time,))


def last_by(column: str, time: str) -> Aggregation:
    """The value at the latest time; at equal times, of the row that arrived last."""
    return Aggregation(AggregationKind.LAST_BY, column, also=(time,))


def approx_quantile(column: str, q: float | Sequence[float]) -> Aggregation:
    """A quantile of numbers, or an array of several: within 1% of a value with a share ``q`` of all values at or below
    it.

    >>> approx_quantile("ms", 0.99).fractions, approx_quantile("ms", [0.5, 0.99]).fractions
    ((0.99,), (0.5, 0.99))
    """
    many = isinstance(q, list | tuple)
    found = tuple(q) if isinstance(q, list | tuple) else (q,)
    if not found or not all(type(one) in (int, float) and 0 <= one <= 1 for one in found):
        raise FlowError(f"approx_quantile({column!r}, {q!r}): q must be a number from 0 to 1, or a list of them")
    fractions = tuple(float(one) for one in found if not math.isnan(float(one)))
    return Aggregation(AggregationKind.APPROX_QUANTILE, column, fractions=fractions, many=many)


def custom(aggregator: Aggregator, *columns: str, returns: Any) -> Aggregation:
    """An aggregation of your own over one or more columns, see :class:`Aggregator`.

    :param returns: the type of the result in Spark's DDL, e.g. ``"array<double>"``, or as one of pyspark's types.
    """
    what = f"custom({type(aggregator).__name__})"
    if not columns:
        raise FlowError(f"{what}: name at least one column that it reads")
    if isinstance(aggregator, type) or not isinstance(aggregator, Aggregator):
        methods = [name for name in ("zero", "add", "merge", "result") if not hasattr(aggregator, name)]
        found = f"it lacks {', '.join(methods)}" if methods else "found the class; give an instance of it"
        raise FunctionError(f"{what}: an aggregation has the methods zero, add, merge and result; {found}")
    kind = type_name(type_of(returns))
    packed = base64.b64encode(pack(aggregator, what).data).decode()
    return Aggregation(AggregationKind.CUSTOM, columns[0], also=columns[1:], returns=kind, packed=packed)


def type_of(returns: Any) -> pa.DataType:
    """The type of a custom result, of DDL or of one of pyspark's types."""
    return parse_ddl(f"result {returns if isinstance(returns, str) else spark_type(returns)}").field(0).type


@lru_cache(maxsize=256)
def _unpacked(packed: str) -> Any:
    return pickle.loads(base64.b64decode(packed))


def aggregator_of(aggregation: Aggregation) -> Aggregator:
    """The user's object of a custom aggregation."""
    found: Aggregator = _unpacked(aggregation.packed)
    return found


def _limit(kind: str, column: str, limit: int) -> int:
    if type(limit) is not int or not 1 <= limit <= MAX_LAST:
        raise FlowError(f"{kind}({column!r}, limit={limit!r}): limit must be a whole number from 1 to {MAX_LAST}")
    return limit


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
    require_columns(schema, aggregation.also, f"{what}: {kind}")
    number = pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_decimal(found)
    match kind:
        case AggregationKind.COUNT:
            return pa.int64()
        case AggregationKind.APPROX_DISTINCT:
            check_key_columns(schema, [column], f"{what}: {kind}")
            return pa.int64()
        case AggregationKind.LAST | AggregationKind.COLLECT:
            return pa.list_(found)
        case AggregationKind.COLLECT_SET:
            check_key_columns(schema, [column], f"{what}: {kind}")
            return pa.list_(found)
        case AggregationKind.FIRST_BY | AggregationKind.LAST_BY:
            [time] = aggregation.also
            by = schema.field(time).type
            if not (pa.types.is_timestamp(by) or pa.types.is_date(by)):
                raise SchemaError(f"{what}: {kind} needs a timestamp or a date, found {type_name(by)}", column=time)
            return found
        case AggregationKind.APPROX_QUANTILE if number:
            return pa.list_(pa.float64()) if aggregation.many else pa.float64()
        case AggregationKind.CUSTOM:
            return type_of(aggregation.returns)
        case AggregationKind.MEAN if number:
            return pa.float64()
        case (
            AggregationKind.STDDEV
            | AggregationKind.STDDEV_POP
            | AggregationKind.VARIANCE
            | AggregationKind.VARIANCE_POP
        ) if number:
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
    plain = pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_boolean(kind)
    return bool(plain or pa.types.is_date(kind) or pa.types.is_timestamp(kind))
