"""What the compiled parts of an expression share: their form, the types that they agree on, laziness, order with NaN.

Arrow's kernels compute whole columns. SQL is lazy where it matters: ``CASE WHEN n <> 0 THEN 1 / n END`` must not divide
by zero. So a part knows whether it can fail; only for parts that can, the rows that need them are picked out first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "INTEGERS",
    "Computed",
    "Fail",
    "adjusted",
    "as_column",
    "chosen",
    "common",
    "compared",
    "computed",
    "converted",
    "decimal_of",
    "each",
    "either",
    "is_number",
    "is_text",
    "some_rows",
    "widened",
]

INTEGERS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 20}
"""Spark's integers, and the digits of the decimals that hold them."""

_RANK = list(INTEGERS)
_MOST_DIGITS = 38
_LEAST_SCALE = 6
_Value = Any
"""An array, or a scalar that stands for all rows."""


class Fail(Protocol):
    """Refuses an expression, at the place that is being compiled."""

    def __call__(self, message: str, /) -> Any:
        """Raise a :class:`~midstream.errors.SchemaError`."""


@dataclass(frozen=True)
class Computed:
    """A part of an expression that is ready to run. ``run`` returns a column, or a scalar that stands for all rows."""

    kind: pa.DataType
    run: Callable[[pa.RecordBatch], _Value]
    columns: frozenset[str] = frozenset()
    """The columns that it reads."""
    raises: bool = False
    """Whether it may fail because of a value."""
    constant: Any = None
    """The value of a literal."""
    is_constant: bool = False
    shown: str = ""
    """The column that it is a copy of, if it is one."""


def computed(
    kind: pa.DataType, kernel: Callable[..., _Value], arguments: Sequence[Computed], *, raises: bool = False
) -> Computed:
    """A kernel over other parts."""
    runs = [argument.run for argument in arguments]
    columns = frozenset[str]().union(*(argument.columns for argument in arguments))
    raises = raises or any(argument.raises for argument in arguments)

    def run(batch: pa.RecordBatch) -> _Value:
        if raises and not columns and not batch.num_rows:
            return pa.nulls(0, kind)  # constants fail only where there is a row
        return kernel(*[run(batch) for run in runs])

    return Computed(kind, run, columns, raises)


def as_column(part: Computed, batch: pa.RecordBatch) -> pa.Array:
    """The values of a part, one for each row."""
    found = part.run(batch)
    if isinstance(found, pa.ChunkedArray):
        found = found.combine_chunks()
    if isinstance(found, pa.Scalar):
        found = pa.nulls(batch.num_rows, found.type) if not found.is_valid else pa.repeat(found, batch.num_rows)
    return found if found.type.equals(part.kind) else found.cast(part.kind)


def each(kind: pa.DataType, function: Callable[..., Any], *arguments: _Value) -> _Value:
    """A Python function of values, called for each row in which none of them is null."""
    columns = [argument for argument in arguments if not isinstance(argument, pa.Scalar)]
    if not columns:
        values = [argument.as_py() for argument in arguments]
        return pa.scalar(None if None in values else function(*values), kind)
    rows = [
        [argument.as_py()] * len(columns[0]) if isinstance(argument, pa.Scalar) else argument.to_pylist()
        for argument in arguments
    ]
    return pa.array([None if None in row else function(*row) for row in zip(*rows, strict=True)], kind)


# ── types ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_number(kind: pa.DataType) -> bool:
    """Integers, floats, decimals."""
    return kind in INTEGERS or bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def is_text(kind: pa.DataType) -> bool:
    """A string, or NULL."""
    return bool(pa.types.is_string(kind) or pa.types.is_null(kind))


def decimal_of(part: Computed) -> pa.DataType:
    """The decimal that holds an integer or a decimal; a literal takes only the digits that it has."""
    if pa.types.is_decimal(part.kind):
        return part.kind
    if part.is_constant and part.constant is not None:
        return pa.decimal128(len(str(abs(part.constant))), 0)
    return pa.decimal128(INTEGERS[part.kind], 0)


def adjusted(precision: int, scale: int) -> pa.DataType:
    """Spark's rule for decimals that would need more than 38 digits: fewer behind the point, but at least 6 of them."""
    if precision <= _MOST_DIGITS:
        return pa.decimal128(precision, scale)
    whole = precision - scale
    return pa.decimal128(_MOST_DIGITS, max(_MOST_DIGITS - whole, min(scale, _LEAST_SCALE)))


def common(left: Computed, right: Computed) -> pa.DataType | None:
    """The type that Spark compares and mixes two values in; None if they do not mix.

    Unlike Spark, a text mixes with other types only as a literal that is a date or a time.
    """
    one, other = left.kind, right.kind
    if one.equals(other) or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if is_number(one) and is_number(other):
        return _common_number(left, right)
    if pa.types.is_temporal(one) and pa.types.is_temporal(other):
        kinds = {one, other}
        durations = [kind for kind in kinds if pa.types.is_duration(kind)]
        stamps = [kind for kind in kinds if pa.types.is_timestamp(kind)]
        return stamps[0] if len(stamps) == 1 and not durations else None
    for text, moment in ((left, right), (right, left)):
        if text.is_constant and pa.types.is_string(text.kind) and pa.types.is_temporal(moment.kind):
            return moment.kind
    return None


def _common_number(left: Computed, right: Computed) -> pa.DataType:
    one, other = left.kind, right.kind
    if one in INTEGERS and other in INTEGERS:
        return max(one, other, key=_RANK.index)
    if pa.types.is_floating(one) or pa.types.is_floating(other):
        both = {one, other}
        return pa.float32() if both == {pa.float32()} else pa.float64()
    a, b = decimal_of(left), decimal_of(right)
    scale = max(a.scale, b.scale)
    return adjusted(max(a.precision - a.scale, b.precision - b.scale) + scale, scale)


def converted(part: Computed, kind: pa.DataType) -> Computed:
    """A part in a type that :func:`common` gave for it."""
    if part.kind.equals(kind):
        return part
    return Computed(kind, lambda batch: widened(part.run(batch), kind), part.columns, part.raises)


def widened(values: _Value, kind: pa.DataType) -> _Value:
    """Values in a type that holds them. Arrow wants room for ten digits in the decimal of any int."""
    if pa.types.is_decimal(kind) and values.type in INTEGERS:
        values = values.cast(pa.decimal128(INTEGERS[values.type], 0))
    return values.cast(kind)


# ── comparisons ───────────────────────────────────────────────────────────────────────────────────────────────────


def compared(sign: str, left: Computed, right: Computed) -> Computed:
    """A comparison of two parts of one type. NaN equals NaN and is larger than all other numbers, as in Spark."""
    plain = {"=": pc.equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
    if sign == "<>":
        return computed(pa.bool_(), pc.invert, [compared("=", left, right)])
    if sign == "<=>":
        return computed(pa.bool_(), _same, [left, right, compared("=", left, right)])
    if pa.types.is_boolean(left.kind):
        left, right = converted(left, pa.int8()), converted(right, pa.int8())
    if not pa.types.is_floating(left.kind):
        return computed(pa.bool_(), plain[sign], [left, right])

    def kernel(a: _Value, b: _Value) -> _Value:
        found = plain[sign](a, b)
        if sign in ("=", "<=", ">="):
            found = pc.or_(found, pc.and_(pc.is_nan(a), pc.is_nan(b)))
        if sign in (">", ">="):
            found = pc.or_(found, pc.and_(pc.is_nan(a), pc.invert(pc.is_nan(b))))
        if sign in ("<", "<="):
            found = pc.or_(found, pc.and_(pc.is_nan(b), pc.invert(pc.is_nan(a))))
        return found

    return computed(pa.bool_(), kernel, [left, right])


def _same(a: _Value, b: _Value, equal: _Value) -> _Value:
    nothing_a, nothing_b = pc.is_null(a), pc.is_null(b)
    return pc.or_(pc.and_(nothing_a, nothing_b), pc.fill_null(equal, False))


# ── laziness ──────────────────────────────────────────────────────────────────────────────────────────────────────


def chosen(cases: Sequence[tuple[Computed, Computed]], otherwise: Computed, kind: pa.DataType) -> Computed:
    """The value behind the first condition that is true. No part is computed for rows that do not need it."""
    parts = [part for case in cases for part in case] + [otherwise]
    columns = frozenset[str]().union(*(part.columns for part in parts))
    if not any(part.raises for part in parts[1:]):
        return Computed(kind, lambda batch: _all_at_once(cases, otherwise, kind, batch), columns, parts[0].raises)
    return Computed(kind, lambda batch: _row_by_row(cases, otherwise, kind, batch), columns, raises=True)


def _all_at_once(
    cases: Sequence[tuple[Computed, Computed]], otherwise: Computed, kind: pa.DataType, batch: pa.RecordBatch
) -> _Value:
    found = _of_kind(otherwise.run(batch), kind)
    for condition, value in reversed(cases):
        is_true = condition.run(batch)
        found = pc.if_else(pc.fill_null(is_true, False), _of_kind(value.run(batch), kind), found)
    return found


def _of_kind(found: _Value, kind: pa.DataType) -> _Value:
    return found if found.type.equals(kind) else found.cast(kind)


def _row_by_row(
    cases: Sequence[tuple[Computed, Computed]], otherwise: Computed, kind: pa.DataType, batch: pa.RecordBatch
) -> pa.Array:
    rest = np.arange(batch.num_rows)
    places, values = [], []
    for condition, value in cases:
        hit = _is_true(as_column(condition, some_rows(batch, rest, condition.columns)))
        places.append(rest[hit])
        values.append(_of_kind(as_column(value, some_rows(batch, rest[hit], value.columns)), kind))
        rest = rest[~hit]
    places.append(rest)
    values.append(_of_kind(as_column(otherwise, some_rows(batch, rest, otherwise.columns)), kind))
    return pa.concat_arrays(values).take(pa.array(np.argsort(np.concatenate(places))))


def either(is_or: bool, left: Computed, right: Computed) -> Computed:
    """AND, or OR, of Kleene's logic. The right side is not computed for rows that the left side has decided."""
    kernel = pc.or_kleene if is_or else pc.and_kleene
    if not right.raises:
        return computed(pa.bool_(), kernel, [left, right])

    def run(batch: pa.RecordBatch) -> pa.Array:
        first = as_column(left, batch)
        decided = _is_true(first if is_or else pc.invert(first))
        rest = np.flatnonzero(~decided)
        second = as_column(right, some_rows(batch, rest, right.columns))
        places = np.full(batch.num_rows, len(rest))
        places[rest] = np.arange(len(rest))
        filled = pa.concat_arrays([second, pa.array([is_or])]).take(pa.array(places))
        return kernel(first, filled)

    return Computed(pa.bool_(), run, left.columns | right.columns, raises=True)


def some_rows(batch: pa.RecordBatch, places: npt.NDArray[np.int64], columns: Iterable[str]) -> pa.RecordBatch:
    """Some rows of a batch, with the columns that are needed; one at least, as they hold the number of rows."""
    if len(places) == batch.num_rows:
        return batch
    wanted = sorted(columns) or batch.schema.names[:1]
    return batch.select(wanted).take(pa.array(places))


def _is_true(found: pa.Array) -> npt.NDArray[np.bool_]:
    """Null counts as false."""
    mask: npt.NDArray[np.bool_] = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
    return mask
