"""CAST and TRY_CAST: which types convert into which, as Spark's ANSI mode does it; times are taken in UTC."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.schema import type_name
from midstream.expressions.kernels import INTEGERS, Computed, Fail, computed, each, is_number

__all__ = ["cast"]

_BOOLEANS = {
    **dict.fromkeys(("t", "true", "y", "yes", "1"), True),
    **dict.fromkeys(("f", "false", "n", "no", "0"), False),
}
_EXACT = Context(prec=100)
_BLANKS = " \t\n\r\f\v"


def cast(part: Computed, kind: pa.DataType, lenient: bool, fail: Fail) -> Computed:
    """A part in another type; ``lenient`` gives null for what cannot be converted."""
    if part.kind.equals(kind):
        return part
    if pa.types.is_null(part.kind):
        return computed(kind, lambda a: pa.scalar(None, kind), [part])
    kernel = _kernel(part.kind, kind)
    if kernel is None:
        fail(
            f"a {type_name(part.kind)} cannot be cast to {type_name(kind)} here; do that in a map"
            + ("" if not pa.types.is_string(kind) else ", which decides how it is written")
        )
    assert kernel is not None
    if lenient:
        return computed(kind, lambda a: _lenient(kernel, kind, a), [part])
    return computed(kind, kernel, [part], raises=True)


def _lenient(kernel: Callable[[Any], Any], kind: pa.DataType, found: Any) -> Any:
    """Apply the kernel; where it fails, apply it to halves, until the values that cannot be converted are found."""
    try:
        return kernel(found)
    except (ArithmeticError, ValueError, pa.ArrowException):
        if isinstance(found, pa.Scalar):
            return pa.scalar(None, kind)
        if len(found) == 1:
            return pa.nulls(1, kind)
        middle = len(found) // 2
        return pa.concat_arrays([_lenient(kernel, kind, found[:middle]), _lenient(kernel, kind, found[middle:])])


def _kernel(found: pa.DataType, wanted: pa.DataType) -> Callable[[Any], Any] | None:
    """The function that converts values of one type into another; None if there is none."""
    if pa.types.is_string(found):
        return _from_text(wanted)
    if pa.types.is_boolean(found):
        if pa.types.is_string(wanted) or is_number(wanted):
            return lambda a: a.cast(pa.int8()).cast(wanted) if is_number(wanted) else a.cast(wanted)
        return None
    if is_number(found):
        return _from_number(found, wanted)
    if pa.types.is_date(found):
        if pa.types.is_string(wanted) or pa.types.is_timestamp(wanted):
            return lambda a: a.cast(wanted)
        return None
    if pa.types.is_timestamp(found):
        if pa.types.is_date(wanted):
            return lambda a: pc.floor_temporal(a, unit="day").cast(wanted)
        if pa.types.is_timestamp(wanted):
            return lambda a: a.cast(wanted)
    if pa.types.is_binary(found) and pa.types.is_string(wanted):
        return lambda a: a.cast(wanted)
    return None


def _from_number(found: pa.DataType, wanted: pa.DataType) -> Callable[[Any], Any] | None:
    if pa.types.is_boolean(wanted):
        return lambda a: pc.not_equal(a, pa.scalar(0, pa.int8()).cast(a.type))
    if wanted in INTEGERS:
        if found in INTEGERS:
            return lambda a: a.cast(wanted)
        if pa.types.is_floating(found):
            return lambda a: pc.trunc(a).cast(wanted)
        return lambda a: pc.round(a, 0, round_mode="towards_zero").cast(pa.decimal128(38, 0)).cast(wanted)
    if pa.types.is_floating(wanted):
        return lambda a: pc.cast(a, wanted, safe=False)
    if pa.types.is_decimal(wanted):
        if pa.types.is_floating(found):
            return lambda a: each(wanted, lambda value: _decimal(repr(value), wanted), a)
        wide = pa.decimal256(76, wanted.scale + 1 if found in INTEGERS else max(found.scale, wanted.scale))

        def round_to(a: Any) -> Any:
            exact = a.cast(pa.decimal128(20, 0)) if found in INTEGERS else a
            return pc.round(exact.cast(wide), wanted.scale, round_mode="half_towards_infinity").cast(wanted)

        return round_to
    if pa.types.is_string(wanted) and not pa.types.is_floating(found):
        return lambda a: a.cast(wanted)
    return None


def _from_text(wanted: pa.DataType) -> Callable[[Any], Any] | None:
    def trimmed(a: Any) -> Any:
        return pc.utf8_trim(a, characters=_BLANKS)

    if wanted in INTEGERS or pa.types.is_floating(wanted):
        return lambda a: trimmed(a).cast(wanted)
    if pa.types.is_decimal(wanted):
        return lambda a: each(wanted, lambda value: _decimal(value, wanted), a)
    if pa.types.is_boolean(wanted):
        return lambda a: each(wanted, _boolean, a)
    if pa.types.is_binary(wanted):
        return lambda a: a.cast(wanted)
    if pa.types.is_date(wanted):
        return lambda a: each(wanted, lambda value: dt.date.fromisoformat(value.strip()[:10]), a)
    if pa.types.is_timestamp(wanted):
        return lambda a: each(wanted, lambda value: _moment(value, wanted), a)
    return None


def _boolean(text: str) -> bool:
    found = _BOOLEANS.get(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r:.80} is not a boolean")
    return found


def _decimal(text: str, kind: pa.DataType) -> Decimal:
    value = Decimal(text.strip())
    if not value.is_finite():
        raise ValueError(f"{text:.80} is not a decimal")
    rounded = value.quantize(Decimal(1).scaleb(-kind.scale), ROUND_HALF_UP, _EXACT)
    if rounded and rounded.adjusted() >= kind.precision - kind.scale:
        raise ValueError(f"{text:.80} does not fit into {type_name(kind)}")
    return rounded


def _moment(text: str, kind: pa.DataType) -> dt.datetime:
    moment = dt.datetime.fromisoformat(text.strip())
    if kind.tz is None:
        return moment.replace(tzinfo=None)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
