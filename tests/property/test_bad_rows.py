"""Good and bad rows together are all rows, in order, however they are cut into slices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from midstream.data.row_check import RowCheck
from midstream.data.rows import from_rows
from midstream.data.schema import parse_ddl
from midstream.engine.bad_rows import by_halves
from midstream.errors import SchemaError
from midstream.flow.model import Operator, Port
from midstream.flow.spec import ERRORS, Form, OnError, Spec
from midstream.operators.filter import Filter, filter_step
from midstream.operators.flat_map import FlatMap, flat_map_step
from midstream.operators.map import Map, map_step
from midstream.operators.route import Route, route_step

Row = dict[str, Any]
Step = Callable[[pa.RecordBatch], Mapping[str, pa.RecordBatch]]
SCHEMA = parse_ddl("id int, n int")
BRANCHES = ("low", "high")


def refuse(n: int) -> None:
    if n < 0:
        raise ValueError(f"{n} is negative")


def mapped(row: Row) -> Row:
    refuse(row["n"])
    return {**row, "n": "ten" if row["n"] == 10 else row["n"] + 1}


def repeated(row: Row) -> Iterable[Row]:
    yield row
    refuse(row["n"])
    if row["n"] == 10:
        yield {**row, "n": "ten"}


def chosen(row: Row) -> Any:
    refuse(row["n"])
    return 10 if row["n"] == 10 else BRANCHES[row["n"] % 2]


def kept(row: Row) -> bool:
    refuse(row["n"])
    if row["n"] == 10:
        raise SchemaError("ten")
    return bool(row["n"] % 2)


def on_batches(function: Callable[[Row], Any], of_rows: Callable[[list[Any], pa.Schema], Any]) -> Any:
    """The same function for batches; it fails if it fails on any row."""
    return lambda batch: of_rows([function(row) for row in batch.to_pylist()], batch.schema)


def arrow_rows(rows: list[Any], schema: pa.Schema) -> pa.RecordBatch:
    return from_rows(rows, schema, "test")


def flat(answers: list[Any], schema: pa.Schema) -> pa.RecordBatch:
    return arrow_rows([row for answer in answers for row in answer], schema)


def texts(answers: list[Any], schema: pa.Schema) -> pa.Array:
    return pa.array(answers, pa.string())


def truths(answers: list[Any], schema: pa.Schema) -> pa.Array:
    return pa.array(answers, pa.bool_())


def op(spec: Spec) -> Operator:
    return Operator("op", spec, (Port("in"),), SCHEMA, OnError.BRANCH)


def steps() -> dict[str, Step]:
    rows, batches = Form.ROWS, Form.BATCHES
    return {
        "map": map_step(op(Map(rows)), Map(rows), mapped),
        "map_batches": map_step(op(Map(batches)), Map(batches), on_batches(mapped, arrow_rows)),
        "flat_map": flat_map_step(op(FlatMap(rows)), FlatMap(rows), repeated),
        "flat_map_batches": flat_map_step(
            op(FlatMap(batches)), FlatMap(batches), on_batches(lambda row: list(repeated(row)), flat)
        ),
        "filter": filter_step(op(Filter(rows)), Filter(rows), kept),
        "filter_batches": filter_step(op(Filter(batches)), Filter(batches), on_batches(kept, truths)),
        "route": route_step(op(Route(rows, BRANCHES)), Route(rows, BRANCHES), chosen),
        "route_batches": route_step(op(Route(batches, BRANCHES)), Route(batches, BRANCHES), on_batches(chosen, texts)),
    }


def expected(kind: str, rows: list[Row]) -> dict[str, list[Row]]:
    """The expected results by the definitions above, row by row."""
    found: dict[str, list[Row]] = {"": [], "low": [], "high": [], ERRORS: []}
    for row in rows:
        if row["n"] < 0 or row["n"] == 10:
            found[ERRORS].append(row)
        elif kind.startswith("route"):
            found[BRANCHES[row["n"] % 2]].append(row)
        elif not kind.startswith("filter") or row["n"] % 2:
            found[""].append({**row, "n": row["n"] + 1} if kind.startswith("map") else row)
    return found


@given(
    numbers=st.lists(st.integers(-2, 11), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    kind=st.sampled_from(sorted(steps())),
)
def test_good_and_bad_rows_are_all_rows_however_they_are_cut(numbers: list[int], cuts: list[int], kind: str) -> None:
    rows = [{"id": number, "n": n} for number, n in enumerate(numbers)]
    step, found = steps()[kind], expected(kind, [])
    reasons: dict[int, str] = {}
    ends = sorted({0, *(min(cut, len(rows)) for cut in cuts), len(rows)})
    for start, end in itertools.pairwise(ends):
        results = step(pa.RecordBatch.from_pylist(rows[start:end], schema=SCHEMA))
        for branch, batch in results.items():
            told = batch.to_pylist()
            if branch == ERRORS:
                reasons.update({row["id"]: row.pop("error") for row in told})
            found[branch] += told
    assert found == expected(kind, rows)
    for row in found[ERRORS]:
        if row["n"] < 0:
            assert reasons[row["id"]] == f"ValueError: {row['n']} is negative"
        else:
            assert "Error: " in reasons[row["id"]]


@given(bad=st.sets(st.integers(0, 63)), count=st.integers(0, 64))
def test_halving_leaves_out_exactly_the_failing_rows_and_keeps_the_order(bad: set[int], count: int) -> None:
    applied: list[int] = []

    def attempt(start: int, stop: int) -> list[int]:
        if bad & set(range(start, stop)):
            raise ValueError((start, stop))
        applied.extend(range(start, stop))
        return list(range(start, stop))

    parts, errors = by_halves(count, attempt)
    assert applied == [n for part in parts for n in part] == [n for n in range(count) if n not in bad]
    assert set(errors) == bad & set(range(count))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.text(st.characters(categories=["Cs", "Lu"]), max_size=3),
    st.binary(max_size=3),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=st.timezones()),
)
DDL = "a boolean, b tinyint, c bigint NOT NULL, d float, e double, f string, g binary, h date, i timestamp"


@given(values=st.lists(VALUES, min_size=8, max_size=10))
def test_a_single_row_fits_exactly_if_a_batch_can_be_built_from_it(values: list[Any]) -> None:
    schema = parse_ddl(DDL)
    row = dict(zip("abcdefghij", values, strict=False))
    try:
        from_rows([row], schema, "test")
        fits = True
    except SchemaError:
        fits = False
    try:
        RowCheck(schema, "test")(row)
        found = True
    except SchemaError:
        found = False
    assert found == fits


@given(value=VALUES, name=st.sampled_from("abcdefghi"))
def test_values_that_surely_fit_do_fit(value: Any, name: str) -> None:
    schema = pa.schema([parse_ddl(DDL).field(name)])
    check = RowCheck(schema, "test")
    if check._surely_fits({name: value}):
        assert from_rows([{name: value}], schema, "test").num_rows == 1
