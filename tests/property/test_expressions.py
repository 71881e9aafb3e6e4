"""Expressions over columns give what an interpreter in plain Python gives, row by row: values, nulls and failures."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.expressions.compiler import column_of
from tests.examples import examples

Row = dict[str, Any]
Meaning = Callable[[Row], Any]
Pair = tuple[str, Meaning]
"""An expression, and what it means for a row; null is None, a failure is an exception."""

SCHEMA = pa.schema([("a", pa.int32()), ("b", pa.int32()), ("x", pa.float64()), ("y", pa.float64()), ("p", pa.bool_())])
MOST = (1 << 31) - 1


def fits(value: int) -> int:
    if not -MOST - 1 <= value <= MOST:
        raise OverflowError(value)
    return value


def strict(function: Callable[..., Any]) -> Callable[..., Meaning]:
    def of(*parts: Meaning) -> Meaning:
        def value(row: Row) -> Any:
            found = [part(row) for part in parts]
            return None if None in found else function(*found)

        return value

    return of


def divided(a: float, b: float) -> float:
    if b == 0:
        raise ZeroDivisionError
    return float(a) / float(b)


def order(a: float) -> tuple[bool, float]:
    """NaN is equal to itself and the largest number."""
    return (True, 0.0) if math.isnan(a) else (False, a)


def compare(sign: Callable[[Any, Any], bool]) -> Callable[..., Meaning]:
    return strict(lambda a, b: sign(order(a), order(b)))


def both(left: Meaning, right: Meaning) -> Meaning:
    def value(row: Row) -> Any:
        first = left(row)
        if first is False:
            return False
        second = right(row)
        return False if second is False else None if None in (first, second) else True

    return value


def negated(part: Meaning) -> Meaning:
    return strict(operator.not_)(part)


def any_of(left: Meaning, right: Meaning) -> Meaning:
    return negated(both(negated(left), negated(right)))


def case(condition: Meaning, yes: Meaning, no: Meaning) -> Meaning:
    return lambda row: yes(row) if condition(row) else no(row)


def first_there(one: Meaning, other: Meaning) -> Meaning:
    return lambda row: found if (found := one(row)) is not None else other(row)


def remainder(a: int, b: int) -> int:
    if b == 0:
        raise ZeroDivisionError
    return int(math.fmod(a, b))


INT = {
    "({} + {})": strict(lambda a, b: fits(a + b)),
    "({} - {})": strict(lambda a, b: fits(a - b)),
    "({} * {})": strict(lambda a, b: fits(a * b)),
    "({} % {})": strict(remainder),
    "coalesce({}, {})": first_there,
    "nullif({}, {})": lambda a, b: lambda row: None if a(row) is not None and a(row) == b(row) else a(row),
}
FLOAT = {
    "({} + {})": strict(operator.add),
    "({} * {})": strict(operator.mul),
    "({} / {})": strict(divided),
    "coalesce({}, {})": first_there,
}
COMPARED = {
    "({} = {})": operator.eq,
    "({} <> {})": operator.ne,
    "({} < {})": operator.lt,
    "({} <= {})": operator.le,
    "({} > {})": operator.gt,
    "({} >= {})": operator.ge,
}


def column(name: str) -> Pair:
    return name, lambda row: row[name]


def constant(text: str, value: Any) -> Pair:
    return text, lambda row: value


def joined(text: str, meaning: Callable[..., Meaning], *parts: Pair) -> Pair:
    return text.format(*(part for part, _ in parts)), meaning(*(of for _, of in parts))


LEAVES = {
    int: [column("a"), column("b"), constant("0", 0), constant("7", 7), constant(str(MOST), MOST)],
    float: [column("x"), column("y"), constant("0.5D", 0.5), constant("0D", 0.0)],
    bool: [column("p"), constant("TRUE", True), ("(a IS NULL)", lambda row: row["a"] is None)],
}


@st.composite
def expressions(draw: st.DrawFn, kind: type, depth: int) -> Pair:
    """An expression of this depth and type."""
    if not depth:
        leaf: Pair = draw(st.sampled_from(LEAVES[kind]))
        return leaf
    inner = expressions(kind, depth - 1)
    condition = expressions(bool, depth - 1)
    if kind is bool:
        form = draw(st.sampled_from(["and", "or", "not", *COMPARED, *COMPARED]))
        if form in COMPARED:
            side = expressions(draw(st.sampled_from([int, float])), depth - 1)
            return joined(form, compare(COMPARED[form]), draw(side), draw(side))
        if form == "not":
            return joined("(NOT {})", negated, draw(condition))
        text, meaning = ("({} AND {})", both) if form == "and" else ("({} OR {})", any_of)
        return joined(text, meaning, draw(condition), draw(condition))
    form = draw(st.sampled_from(["case", "if", *(INT if kind is int else FLOAT)]))
    if form in ("case", "if"):
        text = "CASE WHEN {} THEN {} ELSE {} END" if form == "case" else "if({}, {}, {})"
        return joined(text, case, draw(condition), draw(inner), draw(inner))
    return joined(form, (INT if kind is int else FLOAT)[form], draw(inner), draw(inner))


kinds_and_depths = st.tuples(st.sampled_from([int, float, bool, bool]), st.integers(1, 3))
some = kinds_and_depths.flatmap(lambda found: expressions(*found))

values = {
    "a": st.none() | st.sampled_from([0, 0, 1, -1, 2, 7, MOST, -MOST - 1]),
    "b": st.none() | st.sampled_from([0, 0, 1, -1, 3, -MOST - 1]),
    "x": st.none() | st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf, -2.0]),
    "y": st.none() | st.sampled_from([0.0, 0.5, math.nan, -math.inf]),
    "p": st.none() | st.booleans(),
}


def shown(value: Any) -> Any:
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


@given(pair=some, rows=st.lists(st.fixed_dictionaries(values), min_size=1, max_size=8))
@examples(600)
def test_columns_are_what_each_row_gives(pair: Pair, rows: list[Row]):
    text, meaning = pair
    compiled = column_of(text, SCHEMA, "a property")
    expected, fails = [], False
    for row in rows:
        try:
            expected.append(shown(meaning(row)))
        except ArithmeticError:
            fails = True
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    if fails:
        with pytest.raises((ArithmeticError, pa.ArrowInvalid)):
            compiled(batch)
    else:
        assert [shown(value) for value in compiled(batch).to_pylist()] == expected
        assert compiled(batch).type == compiled.kind


@given(pair=some, rows=st.lists(st.fixed_dictionaries(values), min_size=2, max_size=8))
@examples(100)
def test_it_does_not_matter_how_rows_are_cut_into_slices(pair: Pair, rows: list[Row]):
    compiled = column_of(pair[0], SCHEMA, "a property")
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    try:
        whole = compiled(batch)
    except (ArithmeticError, pa.ArrowInvalid):
        return
    parts = [compiled(batch.slice(start, 1)) for start in range(len(rows))]
    assert [shown(one) for one in pa.concat_arrays(parts).to_pylist()] == [shown(one) for one in whole.to_pylist()]
