"""The operators on numbers and times, as in Spark's ANSI mode: overflow and zero divisors are errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.schema import type_name
from midstream.expressions.kernels import (
    INTEGERS,
    Computed,
    Fail,
    adjusted,
    common,
    computed,
    converted,
    decimal_of,
    is_number,
    widened,
)

__all__ = ["ARITHMETIC", "arithmetic", "negative", "remainder"]

_EXACT = {"+": pc.add_checked, "-": pc.subtract_checked, "*": pc.multiply_checked}
_DAY_US = 86_400_000_000


def arithmetic(sign: str, left: Computed, right: Computed, fail: Fail) -> Computed:
    """``+``, ``-``, ``*``, ``/``, ``%`` or ``div``."""
    moment = _moments(sign, left, right, fail)
    if moment is not None:
        return moment
    left, right = _typed(left, right), _typed(right, left)
    for part in (left, right):
        if not is_number(part.kind):
            fail(f"{sign} takes numbers, found {type_name(part.kind)}; use cast(… AS …)")
    if sign == "/":
        return _division(left, right, fail)
    if sign == "div":
        if not {left.kind, right.kind} <= set(INTEGERS):
            fail(f"div takes integers, found {type_name(left.kind)} and {type_name(right.kind)}")
        whole = [converted(part, pa.int64()) for part in (left, right)]
        return computed(pa.int64(), lambda a, b: pc.divide_checked(a, _checked(a, b)), whole, raises=True)
    kind = common(left, right)
    if pa.types.is_decimal(kind):
        return _decimals(sign, left, right, fail)
    parts = [converted(left, kind), converted(right, kind)]
    if sign == "%":
        return computed(kind, remainder, parts, raises=True)
    # An overflow of floats is infinity.
    return computed(kind, _EXACT[sign], parts, raises=kind in INTEGERS)


def _typed(part: Computed, other: Computed) -> Computed:
    """NULL as a value of the other side's type."""
    if not pa.types.is_null(part.kind):
        return part
    return converted(part, pa.int32() if pa.types.is_null(other.kind) else other.kind)


def _division(left: Computed, right: Computed, fail: Fail) -> Computed:
    if any(pa.types.is_decimal(part.kind) for part in (left, right)) and not any(
        pa.types.is_floating(part.kind) for part in (left, right)
    ):
        fail("/ of decimals is not supported, because its digits are rounded; write cast(… AS double) / …")
    parts = [converted(part, pa.float64()) for part in (left, right)]
    return computed(pa.float64(), lambda a, b: pc.divide(a, _checked(a, b)), parts, raises=True)


def _checked(dividend: Any, divisor: Any) -> Any:
    """The divisor. Refuses zeros, also those of floats, where there is something to divide."""
    is_zero = pc.fill_null(pc.and_(pc.equal(divisor, pa.scalar(0, divisor.type)), pc.is_valid(dividend)), False)
    if is_zero.as_py() if isinstance(is_zero, pa.Scalar) else pc.any(is_zero).as_py():
        raise ZeroDivisionError("division by zero; nullif(divisor, 0) gives null instead")
    return divisor


def remainder(a: Any, b: Any) -> Any:
    """The remainder of a division, with the sign of the dividend."""
    if pa.types.is_floating(a.type):
        _checked(a, b)
        both = [x if isinstance(x, pa.Array) else pa.array([x.as_py()], x.type) for x in (a, b)]
        numbers = [x.to_numpy(zero_copy_only=False) for x in both]
        nulls = [pc.is_null(x).to_numpy(zero_copy_only=False) for x in both]
        with np.errstate(invalid="ignore"):
            array = pa.array(np.fmod(*numbers), a.type, mask=nulls[0] | nulls[1])
        return array[0] if isinstance(a, pa.Scalar) and isinstance(b, pa.Scalar) else array
    # The quotient of the smallest number and -1 does not fit; the remainder of both is 0.
    unsafe = pc.or_(pc.equal(_checked(a, b), pa.scalar(-1, b.type)), pc.is_null(a))
    b = pc.if_else(unsafe, pa.scalar(1, b.type), b)
    return pc.subtract(a, pc.multiply(pc.divide(a, b), b))


def negative(part: Computed, fail: Fail) -> Computed:
    """``-x``."""
    if not is_number(part.kind):
        fail(f"- takes a number, found {type_name(part.kind)}")
    if pa.types.is_decimal(part.kind):
        return computed(part.kind, lambda a: pc.negate(a).cast(part.kind), [part])
    return computed(part.kind, pc.negate_checked, [part], raises=part.kind in INTEGERS)


def _decimals(sign: str, left: Computed, right: Computed, fail: Fail) -> Computed:
    a, b = decimal_of(left), decimal_of(right)
    if sign == "%":
        fail("% of decimals is not supported; cast both sides to bigint or double")
    if sign == "*":
        kind, digits, scale = adjusted(a.precision + b.precision + 1, a.scale + b.scale), 76, a.scale + b.scale
        wide = [pa.decimal256(a.precision, a.scale), pa.decimal256(b.precision, b.scale)]
        digits = a.precision + b.precision + 1
    else:
        scale = max(a.scale, b.scale)
        digits = max(a.precision - a.scale, b.precision - b.scale) + scale + 1
        kind = adjusted(digits, scale)
        wide = [pa.decimal256(min(digits, 76) - 1, scale)] * 2
    if digits > 76:
        fail(f"{sign} of {type_name(a)} and {type_name(b)} has too many digits; cast one of them to fewer")
    kernel = _EXACT[sign]

    def run(x: Any, y: Any) -> Any:
        exact = kernel(widened(x, a).cast(wide[0]), widened(y, b).cast(wide[1]))
        return pc.round(exact, kind.scale, round_mode="half_towards_infinity").cast(kind)

    return computed(kind, run, [left, right], raises=True)


def _moments(sign: str, left: Computed, right: Computed, fail: Fail) -> Computed | None:
    """Sums of times and intervals; None if these are not times."""
    if not any(pa.types.is_temporal(part.kind) for part in (left, right)):
        return None
    if sign == "+" and pa.types.is_duration(left.kind):
        left, right = right, left
    if sign in ("+", "-") and pa.types.is_duration(right.kind):
        kernel = _EXACT[sign]
        if pa.types.is_timestamp(left.kind):
            return computed(left.kind, kernel, [left, right], raises=True)
        if pa.types.is_date(left.kind) and right.is_constant and right.constant % _DAY_US == 0:
            days = pa.scalar(right.constant // _DAY_US, pa.int32())
            return computed(
                left.kind, lambda a: kernel(a.cast(pa.int32()), days).cast(pa.date32()), [left], raises=True
            )
    advice = "INTERVAL 5 MINUTES can be added to a timestamp, INTERVAL 1 DAY also to a date"
    if sign == "-" and not pa.types.is_duration(right.kind):
        advice = "for the time between two timestamps write unix_micros(a) - unix_micros(b); for dates datediff(a, b)"
    return fail(f"{type_name(left.kind)} {sign} {type_name(right.kind)} is not possible; {advice}")  # type: ignore[no-any-return]


ARITHMETIC = ("+", "-", "*", "/", "%", "div")
