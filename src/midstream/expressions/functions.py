"""The named functions of expressions: Spark's names, Spark's results.

Each entry turns the compiled arguments into a compiled part, and refuses arguments that it cannot take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import partial, reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.schema import type_name
from midstream.expressions.arithmetic import arithmetic, remainder
from midstream.expressions.conversions import cast
from midstream.expressions.kernels import (
    INTEGERS,
    Computed,
    Fail,
    chosen,
    common,
    compared,
    computed,
    converted,
    each,
    is_number,
    is_text,
)

__all__ = ["FUNCTIONS", "NOT_HERE", "NamedFunction", "mixed"]

Build = Callable[[Sequence[Computed], Fail], Computed]


@dataclass(frozen=True)
class NamedFunction:
    """A function of expressions, and how many arguments it takes."""

    build: Build
    least: int
    most: int | None


_known: dict[str, NamedFunction] = {}

FUNCTIONS: Mapping[str, NamedFunction] = _known
"""All functions, by their names in lower case."""

NOT_HERE = {
    **dict.fromkeys(
        ("sum", "count", "avg", "mean", "min", "max", "first", "last", "collect_list", "collect_set", "stddev"),
        "it adds up rows; use key_by and aggregate",
    ),
    **dict.fromkeys(
        ("rand", "random", "randn", "uuid", "shuffle"),
        "its result differs each time, so an epoch that runs again would give other rows; compute it from columns",
    ),
    **dict.fromkeys(
        ("now", "current_timestamp", "current_date", "curdate", "localtimestamp"),
        "its result differs each time, so an epoch that runs again would give other rows; use the event time",
    ),
    **dict.fromkeys(
        ("row_number", "rank", "dense_rank", "lag", "lead", "ntile"),
        "it looks at other rows; use key_by and process",
    ),
    "explode": "it gives several rows for one; use flat_map",
}
"""Functions that Spark has and that cannot be here, with the reason."""


def _function(*names: str, least: int = 1, most: int | None = -1) -> Callable[[Build], Build]:
    def note(build: Build) -> Build:
        for name in names:
            _known[name] = NamedFunction(build, least, least if most == -1 else most)
        return build

    return note


def mixed(parts: Sequence[Computed], fail: Fail, what: str) -> tuple[list[Computed], pa.DataType]:
    """Parts in the type that they have in common."""
    whole = parts[0]
    for part in parts[1:]:
        kind = common(whole, part)
        if kind is None:
            fail(f"{what} mixes {type_name(whole.kind)} and {type_name(part.kind)}; cast one of them")
        if kind != whole.kind:
            whole = Computed(kind, whole.run)
        elif whole.is_constant and not part.is_constant:
            whole = part
    return [_to_kind(part, whole.kind, fail) for part in parts], whole.kind


def _to_kind(part: Computed, kind: pa.DataType, fail: Fail) -> Computed:
    if pa.types.is_string(part.kind) and not pa.types.is_string(kind):
        return cast(part, kind, False, fail)
    return converted(part, kind)


# ── nulls and choices ─────────────────────────────────────────────────────────────────────────────────────────────


@_function("isnull")
def _isnull(parts: Sequence[Computed], fail: Fail) -> Computed:
    return computed(pa.bool_(), pc.is_null, parts)


@_function("isnotnull")
def _isnotnull(parts: Sequence[Computed], fail: Fail) -> Computed:
    return computed(pa.bool_(), pc.is_valid, parts)


@_function("coalesce", "nvl", "ifnull", most=None)
def _coalesce(parts: Sequence[Computed], fail: Fail) -> Computed:
    values, kind = mixed(parts, fail, "coalesce")
    cases = [(computed(pa.bool_(), pc.is_valid, [part]), part) for part in values[:-1]]
    return chosen(cases, values[-1], kind) if cases else values[0]


@_function("nullif", least=2)
def _nullif(parts: Sequence[Computed], fail: Fail) -> Computed:
    both, _ = mixed(parts, fail, "nullif")
    nothing = Computed(parts[0].kind, lambda batch: pa.scalar(None, parts[0].kind))
    return chosen([(compared("=", *both), nothing)], parts[0], parts[0].kind)


@_function("if", least=3)
def _if(parts: Sequence[Computed], fail: Fail) -> Computed:
    if not pa.types.is_boolean(parts[0].kind):
        fail(f"the first argument of if must be a boolean, found {type_name(parts[0].kind)}")
    values, kind = mixed(parts[1:], fail, "if")
    return chosen([(parts[0], values[0])], values[1], kind)


def _largest(parts: Sequence[Computed], fail: Fail) -> Computed:
    values, kind = _ordered(parts, fail, "greatest")

    def kernel(*found: Any) -> Any:
        highest = pc.max_element_wise(*found, skip_nulls=True)
        if pa.types.is_floating(kind):  # Arrow leaves NaN out, Spark has it above all numbers
            any_nan = reduce(pc.or_, [pc.fill_null(pc.is_nan(one), False) for one in found])
            highest = pc.if_else(any_nan, pa.scalar(float("nan"), kind), highest)
        return highest

    return computed(kind, kernel, values)


def _smallest(parts: Sequence[Computed], fail: Fail) -> Computed:
    values, kind = _ordered(parts, fail, "least")
    return computed(kind, lambda *found: pc.min_element_wise(*found, skip_nulls=True), values)


def _ordered(parts: Sequence[Computed], fail: Fail, what: str) -> tuple[list[Computed], pa.DataType]:
    values, kind = mixed(parts, fail, what)
    if not (is_number(kind) or is_text(kind) or pa.types.is_temporal(kind)):
        fail(f"{what} takes numbers, strings, dates and timestamps, found {type_name(kind)}")
    return values, kind


_known["greatest"] = NamedFunction(_largest, 2, None)
_known["least"] = NamedFunction(_smallest, 2, None)


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _number(part: Computed, fail: Fail, what: str) -> Computed:
    if pa.types.is_null(part.kind):
        return converted(part, pa.float64())
    if not is_number(part.kind):
        fail(f"{what} takes numbers, found {type_name(part.kind)}")
    return part


def _double(part: Computed, fail: Fail, what: str) -> Computed:
    return converted(_number(part, fail, what), pa.float64())


@_function("abs")
def _abs(parts: Sequence[Computed], fail: Fail) -> Computed:
    part = _number(parts[0], fail, "abs")
    return computed(part.kind, lambda a: pc.abs_checked(a).cast(part.kind), [part], raises=part.kind in INTEGERS)


def _whole(kernel: Callable[..., Any], what: str, parts: Sequence[Computed], fail: Fail) -> Computed:
    part = _number(parts[0], fail, what)
    if part.kind in INTEGERS:
        return converted(part, pa.int64())
    if pa.types.is_decimal(part.kind):
        digits, scale = part.kind.precision, part.kind.scale
        kind, wide = pa.decimal128(max(digits - scale + 1, 1), 0), pa.decimal256(digits + 1, scale)
        return computed(kind, lambda a: kernel(a.cast(wide)).cast(kind), [part])
    return computed(pa.int64(), lambda a: kernel(a).cast(pa.int64()), [part], raises=True)


_known["ceil"] = _known["ceiling"] = NamedFunction(partial(_whole, pc.ceil, "ceil"), 1, 1)
_known["floor"] = NamedFunction(partial(_whole, pc.floor, "floor"), 1, 1)


@_function("round", most=2)
def _round(parts: Sequence[Computed], fail: Fail) -> Computed:
    part = _number(parts[0], fail, "round")
    digits = _constant(parts, 1, 0, int, fail, "the digits of round")
    if part.kind in INTEGERS and digits >= 0:
        return part
    if pa.types.is_decimal(part.kind):
        scale = min(max(digits, 0), part.kind.scale)
        whole = part.kind.precision - part.kind.scale
        kind = pa.decimal128(min(max(whole + 1, 1 - digits) + scale, 38), scale)
        wide, mode = pa.decimal256(part.kind.precision + 1, part.kind.scale), "half_towards_infinity"
        return computed(kind, lambda a: pc.round(a.cast(wide), digits, round_mode=mode).cast(kind), [part], raises=True)
    if part.kind in INTEGERS:
        fail("round of integers with negative digits is not supported; write n div 100 * 100")
    unit = Decimal(1).scaleb(-digits)

    def rounded(value: float) -> float:
        # Of the digits that people see, as Spark does; the exact value of 2.675 is a little less.
        exact = Decimal(repr(value))
        return float(exact.quantize(unit, ROUND_HALF_UP)) if abs(exact) < 10**15 else value  # also NaN and infinity

    def careful(value: float) -> float:
        return value if value != value or value in (float("inf"), float("-inf")) else rounded(value)

    return computed(part.kind, lambda a: each(part.kind, careful, a), [part])


def _logarithm(kernel: Callable[..., Any], what: str, parts: Sequence[Computed], fail: Fail) -> Computed:
    def run(a: Any) -> Any:  # Spark gives null where a logarithm does not exist
        return pc.if_else(pc.less_equal(a, 0.0), pa.scalar(None, pa.float64()), kernel(a))

    return computed(pa.float64(), run, [_double(parts[0], fail, what)])


def _plain(kernel: Callable[..., Any], what: str, parts: Sequence[Computed], fail: Fail) -> Computed:
    return computed(pa.float64(), kernel, [_double(part, fail, what) for part in parts])


for _name, _kernel in (("ln", pc.ln), ("log10", pc.log10), ("log2", pc.log2)):
    _known[_name] = NamedFunction(partial(_logarithm, _kernel, _name), 1, 1)
for _name, _kernel in (("sqrt", pc.sqrt), ("exp", pc.exp), ("sin", pc.sin), ("cos", pc.cos), ("sign", pc.sign)):
    _known[_name] = NamedFunction(partial(_plain, _kernel, _name), 1, 1)
_known["signum"] = _known["sign"]
_known["pow"] = _known["power"] = NamedFunction(partial(_plain, pc.power, "pow"), 2, 2)


@_function("mod", least=2)
def _mod(parts: Sequence[Computed], fail: Fail) -> Computed:
    return arithmetic("%", parts[0], parts[1], fail)


@_function("pmod", least=2)
def _pmod(parts: Sequence[Computed], fail: Fail) -> Computed:
    both, kind = mixed(parts, fail, "pmod")
    if not is_number(kind) or pa.types.is_decimal(kind):
        fail(f"pmod takes integers and floats, found {type_name(kind)}")

    def kernel(a: Any, b: Any) -> Any:
        rest = remainder(a, b)
        return pc.if_else(pc.less(rest, pa.scalar(0, kind)), remainder(pc.add(rest, b), b), rest)

    return computed(kind, kernel, both, raises=True)


@_function("isnan")
def _isnan(parts: Sequence[Computed], fail: Fail) -> Computed:
    part = _double(parts[0], fail, "isnan")
    return computed(pa.bool_(), lambda a: pc.fill_null(pc.is_nan(a), False), [part])


@_function("nanvl", least=2)
def _nanvl(parts: Sequence[Computed], fail: Fail) -> Computed:
    first, second = (_double(part, fail, "nanvl") for part in parts)
    return chosen([(computed(pa.bool_(), pc.is_nan, [first]), second)], first, pa.float64())


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _text(part: Computed, fail: Fail, what: str) -> Computed:
    if not is_text(part.kind):
        fail(f"{what} takes strings, found {type_name(part.kind)}; use cast(… AS string)")
    return converted(part, pa.string())


def _constant(parts: Sequence[Computed], index: int, default: Any, kind: type, fail: Fail, what: str) -> Any:
    if index >= len(parts):
        return default
    if not parts[index].is_constant or type(parts[index].constant) is not kind:
        fail(f"{what} must be a constant {'text' if kind is str else 'whole number'}")
    return parts[index].constant


def _cased(
    kernel: Callable[..., Any], function: Callable[[str], str], parts: Sequence[Computed], fail: Fail
) -> Computed:
    def run(a: Any) -> Any:  # Arrow has no mapping of one letter to two, such as that of ß
        if isinstance(a, pa.Scalar) or pc.all(pc.string_is_ascii(a)).as_py() not in (True, None):
            return each(pa.string(), function, a)
        return kernel(a)

    return computed(pa.string(), run, [_text(parts[0], fail, function.__name__)])


_known["upper"] = _known["ucase"] = NamedFunction(partial(_cased, pc.ascii_upper, str.upper), 1, 1)
_known["lower"] = _known["lcase"] = NamedFunction(partial(_cased, pc.ascii_lower, str.lower), 1, 1)


@_function("length", "char_length", "character_length", "len")
def _length(parts: Sequence[Computed], fail: Fail) -> Computed:
    return computed(pa.int32(), pc.utf8_length, [_text(parts[0], fail, "length")])


@_function("concat", most=None)
def _concat(parts: Sequence[Computed], fail: Fail) -> Computed:
    texts = [_text(part, fail, "concat") for part in parts]
    return computed(
        pa.string(),
        lambda *found: pc.binary_join_element_wise(*found, pa.scalar("", pa.string()), null_handling="emit_null"),
        texts,
    )


def _trim(kernel: Callable[..., Any], what: str, parts: Sequence[Computed], fail: Fail) -> Computed:
    return computed(pa.string(), lambda a: kernel(a, characters=" "), [_text(parts[0], fail, what)])


for _name, _kernel in (("trim", pc.utf8_trim), ("ltrim", pc.utf8_ltrim), ("rtrim", pc.utf8_rtrim)):
    _known[_name] = NamedFunction(partial(_trim, _kernel, _name), 1, 1)


@_function("substring", "substr", least=2, most=3)
def _substring(parts: Sequence[Computed], fail: Fail) -> Computed:
    start = _constant(parts, 1, None, int, fail, "where substring begins")
    count = _constant(parts, 2, None, int, fail, "the length of substring")
    first = start - 1 if start > 0 else start
    last = None if count is None else first + max(count, 0)
    if first < 0 and last is not None and last >= 0:
        last = None
    return computed(
        pa.string(), lambda a: pc.utf8_slice_codeunits(a, first, last), [_text(parts[0], fail, "substring")]
    )


def _match(kernel: Callable[..., Any], what: str, parts: Sequence[Computed], fail: Fail) -> Computed:
    pattern = _constant(parts, 1, None, str, fail, f"the pattern of {what}")
    try:
        kernel(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        fail(f"{what} cannot read the pattern {pattern!r}: {error}")
    return computed(pa.bool_(), lambda a: kernel(a, pattern), [_text(parts[0], fail, what)])


for _name, _kernel in (
    ("like", pc.match_like),
    ("ilike", partial(pc.match_like, ignore_case=True)),
    ("rlike", pc.match_substring_regex),
    ("contains", pc.match_substring),
    ("startswith", pc.starts_with),
    ("endswith", pc.ends_with),
):
    _known[_name] = NamedFunction(partial(_match, _kernel, _name), 2, 2)
_known["regexp_like"] = _known["regexp"] = _known["rlike"]


@_function("replace", least=2, most=3)
def _replace(parts: Sequence[Computed], fail: Fail) -> Computed:
    found = _constant(parts, 1, None, str, fail, "what replace looks for")
    other = _constant(parts, 2, "", str, fail, "what replace writes instead")
    if not found:
        return _text(parts[0], fail, "replace")
    return computed(pa.string(), lambda a: pc.replace_substring(a, found, other), [_text(parts[0], fail, "replace")])


@_function("instr", least=2)
def _instr(parts: Sequence[Computed], fail: Fail) -> Computed:
    wanted = _constant(parts, 1, None, str, fail, "what instr looks for")
    return computed(
        pa.int32(),
        lambda a: each(pa.int32(), lambda text: text.find(wanted) + 1, a),
        [_text(parts[0], fail, "instr")],
    )


# ── times ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _moment(part: Computed, fail: Fail, what: str) -> Computed:
    if not (pa.types.is_timestamp(part.kind) or pa.types.is_date(part.kind)):
        fail(f"{what} takes a timestamp or a date, found {type_name(part.kind)}; use cast(… AS timestamp)")
    return part if pa.types.is_timestamp(part.kind) else converted(part, pa.timestamp("us"))


def _part_of(kernel: Callable[..., Any], what: str, parts: Sequence[Computed], fail: Fail) -> Computed:
    return computed(pa.int32(), lambda a: kernel(a).cast(pa.int32()), [_moment(parts[0], fail, what)])


for _name, _kernel in (
    ("year", pc.year),
    ("quarter", pc.quarter),
    ("month", pc.month),
    ("day", pc.day),
    ("dayofmonth", pc.day),
    ("dayofyear", pc.day_of_year),
    ("dayofweek", partial(pc.day_of_week, count_from_zero=False, week_start=7)),
    ("weekday", pc.day_of_week),
    ("weekofyear", pc.iso_week),
    ("hour", pc.hour),
    ("minute", pc.minute),
    ("second", pc.second),
):
    _known[_name] = NamedFunction(partial(_part_of, _kernel, _name), 1, 1)

_UNITS = ("year", "quarter", "month", "week", "day", "hour", "minute", "second", "millisecond", "microsecond")


@_function("date_trunc", least=2)
def _date_trunc(parts: Sequence[Computed], fail: Fail) -> Computed:
    unit = _constant(parts, 0, None, str, fail, "the unit of date_trunc").lower()
    if unit not in _UNITS:
        fail(f"date_trunc knows no unit {unit!r}; allowed: {', '.join(_UNITS)}")
    part = _moment(parts[1], fail, "date_trunc")
    return computed(part.kind, lambda a: pc.floor_temporal(a, unit=unit).cast(part.kind), [part])


@_function("to_date", "date")
def _to_date(parts: Sequence[Computed], fail: Fail) -> Computed:
    return cast(parts[0], pa.date32(), False, fail)


@_function("datediff", "date_diff", least=2)
def _datediff(parts: Sequence[Computed], fail: Fail) -> Computed:
    days = [converted(cast(part, pa.date32(), False, fail), pa.int32()) for part in parts]
    return computed(pa.int32(), pc.subtract_checked, days, raises=True)


def _shifted(sign: str, parts: Sequence[Computed], fail: Fail) -> Computed:
    if parts[1].kind not in (pa.int8(), pa.int16(), pa.int32()):
        fail(f"the number of days must be an int, found {type_name(parts[1].kind)}")
    date = cast(parts[0], pa.date32(), False, fail)
    kernel = pc.add_checked if sign == "+" else pc.subtract_checked
    return computed(
        pa.date32(),
        lambda a, n: kernel(a.cast(pa.int32()), n.cast(pa.int32())).cast(pa.date32()),
        [date, parts[1]],
        raises=True,
    )


_known["date_add"] = _known["dateadd"] = NamedFunction(partial(_shifted, "+"), 2, 2)
_known["date_sub"] = NamedFunction(partial(_shifted, "-"), 2, 2)


def _since_1970(us: int, what: str, parts: Sequence[Computed], fail: Fail) -> Computed:
    if not pa.types.is_timestamp(parts[0].kind) or parts[0].kind.tz is None:
        fail(f"{what} takes a timestamp, found {type_name(parts[0].kind)}")

    def kernel(a: Any) -> Any:
        found = a.cast(pa.int64())
        rest = pc.subtract(found, pc.multiply(pc.divide(found, us), us))
        return pc.divide(pc.subtract(found, pc.if_else(pc.less(rest, 0), pc.add(rest, us), rest)), us)

    return computed(pa.int64(), kernel, parts)


def _from_1970(us: int, what: str, parts: Sequence[Computed], fail: Fail) -> Computed:
    if parts[0].kind not in INTEGERS:
        fail(f"{what} takes a whole number, found {type_name(parts[0].kind)}")
    kind = pa.timestamp("us", "UTC")
    return computed(
        kind,
        lambda a: pc.multiply_checked(a.cast(pa.int64()), pa.scalar(us, pa.int64())).cast(kind),
        parts,
        raises=True,
    )


for _name, _us in (("micros", 1), ("millis", 1_000), ("seconds", 1_000_000)):
    _known[f"unix_{_name}"] = NamedFunction(partial(_since_1970, _us, f"unix_{_name}"), 1, 1)
    _known[f"timestamp_{_name}"] = NamedFunction(partial(_from_1970, _us, f"timestamp_{_name}"), 1, 1)


# ── nested values ─────────────────────────────────────────────────────────────────────────────────────────────────


@_function("size", "cardinality", "array_size")
def _size(parts: Sequence[Computed], fail: Fail) -> Computed:
    if not (pa.types.is_list(parts[0].kind) or pa.types.is_map(parts[0].kind)):
        fail(f"size takes an array or a map, found {type_name(parts[0].kind)}")

    def kernel(a: Any) -> Any:
        if pa.types.is_map(a.type):
            a = a.cast(pa.list_(pa.struct([a.type.key_field, a.type.item_field])))
        return pc.list_value_length(a).cast(pa.int32())

    return computed(pa.int32(), kernel, parts)
