from __future__ import annotations

import re
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from midstream.data.rows import from_rows, to_rows
from midstream.data.schema import parse_ddl
from midstream.errors import SchemaError

ALL_TYPES = parse_ddl(
    """b boolean, i8 tinyint, i16 smallint, i32 int, i64 bigint, f float, d double, n decimal(12,2), s string, x binary,
       day date, t timestamp, wall timestamp_ntz, tags array<string>, counts map<string,bigint>,
       place struct<lat: double, seen: array<timestamp>>, odd map<struct<k: int>,int>"""
)
FULL = {
    "b": True,
    "i8": -128,
    "i16": 32767,
    "i32": -(2**31),
    "i64": 2**63 - 1,
    "f": 0.5,
    "d": -1e300,
    "n": Decimal("-1234567890.12"),
    "s": "grüße \x00 🙂",
    "x": b"\x00\xff",
    "day": date(1, 1, 1),
    "t": datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
    "wall": datetime(1, 1, 1, 0, 0, 0, 1),
    "tags": ["a", None, ""],
    "counts": {"a": 1, "b": None},
    "place": {"lat": 1.5, "seen": [datetime(2020, 1, 1, tzinfo=UTC)]},
    "odd": [({"k": 1}, 2)],
}
EMPTY = dict.fromkeys(FULL)


@pytest.mark.parametrize("rows", [[], [FULL], [EMPTY], [FULL, EMPTY, FULL], [EMPTY, EMPTY]])
def test_rows_of_every_type_survive_the_round_trip(rows):
    batch = from_rows(rows, ALL_TYPES, "f")
    batch.validate(full=True)
    assert batch.schema == ALL_TYPES
    assert to_rows(batch) == rows


def test_a_sliced_batch_yields_only_its_own_rows():
    batch = from_rows([FULL, EMPTY, FULL, EMPTY], ALL_TYPES, "f")
    assert to_rows(batch[1:3]) == [EMPTY, FULL]


def test_values_are_native_python_values():
    [row] = to_rows(from_rows([FULL], ALL_TYPES, "f"))
    assert {name: type(value) for name, value in row.items()} == {name: type(value) for name, value in FULL.items()}
    assert row["t"].tzinfo is UTC
    assert row["wall"].tzinfo is None
    assert str(row["n"]) == "-1234567890.12"


def test_every_row_is_a_separate_dict():
    first, second = to_rows(pa.record_batch({"a": [[1], [1]]}))
    first["a"].append(2)
    assert second == {"a": [1]}
    first, second = to_rows(pa.record_batch({"a": [1, 2]}).select([]))
    assert (first, second) == ({}, {})
    assert first is not second


def test_odd_column_names_are_not_executed():
    name = "'] = x} import os # \n \\ {"
    assert to_rows(pa.record_batch({name: [1]})) == [{name: 1}]


def test_representations_that_conform_converts_can_be_read():
    batch = pa.record_batch(
        {
            "s": pa.array(["x", None], pa.large_string()),
            "v": pa.array(["x", None], pa.string_view()),
            "c": pa.array(["x", None]).dictionary_encode(),
            "t": pa.array([1000, None], pa.timestamp("ms", "Asia/Tokyo")),
        }
    )
    assert to_rows(batch) == [
        {"s": "x", "v": "x", "c": "x", "t": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)},
        {"s": None, "v": None, "c": None, "t": None},
    ]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([2**62], pa.timestamp("us", "UTC")),
        pa.array([-(2**62)], pa.timestamp("us")),
        pa.array([10**9], pa.int32()).cast(pa.date32()),
    ],
)
def test_a_year_outside_pythons_range_is_an_error(array):
    with pytest.raises(SchemaError, match="outside the years 1 to 9999"):
        to_rows(pa.record_batch({"t": array}))


@pytest.mark.parametrize(
    ("ddl", "given", "stored"),
    [
        ("double", 3, 3.0),
        ("float", 3, 3.0),
        ("double", np.float32(0.5), 0.5),
        ("bigint", np.int8(3), 3),
        ("boolean", np.bool_(True), True),
        ("string", np.str_("x"), "x"),
        ("decimal(5,2)", 3, Decimal("3.00")),
        ("decimal(5,2)", Decimal("3.5"), Decimal("3.50")),
        ("binary", bytearray(b"x"), b"x"),
        ("binary", memoryview(b"x"), b"x"),
        ("timestamp", datetime(2020, 1, 1, 9, tzinfo=timezone(timedelta(hours=9))), datetime(2020, 1, 1, tzinfo=UTC)),
        ("array<double>", (1, 2.5), [1.0, 2.5]),
        ("array<double>", np.array([1, 2]), [1.0, 2.0]),
        ("array<bigint>", [np.int64(1)], [1]),
        ("struct<a: int not null>", None, None),
    ],
)
def test_values_that_fit_without_loss_are_accepted(ddl, given, stored):
    schema = parse_ddl(f"c {ddl}")
    assert to_rows(from_rows([{"c": None}, {"c": given}], schema, "f")) == [{"c": None}, {"c": stored}]


@pytest.mark.parametrize(
    ("ddl", "value", "says"),
    [
        ("bigint", "1", "column 'c': expected bigint, found str '1'"),
        ("bigint", 1.0, "expected bigint, found float 1.0"),
        ("bigint", 1.5, "expected bigint, found float 1.5"),
        ("bigint", True, "expected bigint, found bool True"),
        ("bigint", np.bool_(True), "expected bigint, found bool"),
        ("bigint", np.float64(2), "expected bigint, found float64"),
        ("bigint", 2**63, "expected bigint, found int 9223372036854775808 ("),
        ("tinyint", 128, "expected tinyint, found int 128 ("),
        ("double", "1", "expected double, found str '1'"),
        ("double", True, "expected double, found bool True"),
        ("double", 2**53 + 1, "expected double, found int"),
        ("float", 1e300, "expected float, found float 1e+300 (too large"),
        ("boolean", 1, "expected boolean, found int 1"),
        ("string", b"x", "expected string, found bytes"),
        ("string", 1, "expected string, found int 1"),
        ("string", "\ud800", "expected string, found str"),
        ("string", "x" * 500 + "\ud800", "xxx..."),
        ("binary", "x", "expected binary, found str 'x'"),
        ("date", datetime(2020, 1, 1), "its time of day would be lost"),
        ("date", 5, "expected date, found int 5"),
        ("timestamp", datetime(2020, 1, 1), "it has no time zone; set one"),
        ("timestamp", date(2020, 1, 1), "expected timestamp, found date"),
        ("timestamp", 5, "expected timestamp, found int 5"),
        ("timestamp_ntz", datetime(2020, 1, 1, tzinfo=UTC), "it has a time zone; declare the column timestamp"),
        ("decimal(5,2)", Decimal("1.234"), "expected decimal(5,2), found Decimal"),
        ("decimal(5,2)", Decimal("1234.5"), "expected decimal(5,2), found Decimal"),
        ("decimal(5,2)", Decimal("NaN"), "expected decimal(5,2), found Decimal"),
        ("decimal(5,2)", 1.5, "expected decimal(5,2), found float 1.5"),
        ("bigint not null", None, "expected bigint NOT NULL, found None"),
        ("array<bigint>", "abc", "expected array<bigint>, found str 'abc' (use a list)"),
        ("array<bigint>", [1, "x"], "column 'c[1]': expected bigint, found str 'x'"),
        ("array<tinyint>", [1, 300], "expected array<tinyint>, found list [1, 300]"),
        ("array<timestamp>", [datetime(2020, 1, 1)], "column 'c[0]': expected timestamp"),
        ("map<string,bigint>", [1], "(use a dict)"),
        ("map<string,bigint>", {"a": "x"}, "column \"c['a']\": expected bigint, found str 'x'"),
        ("map<string,bigint>", {None: 1}, "column 'c.key': expected string NOT NULL, found None"),
        ("struct<a: int>", 1, "(use a dict)"),
        ("struct<a: int>", {}, "the keys must be a"),
        ("struct<a: int>", {"a": 1, "b": 2}, "the keys must be a"),
        ("struct<a: int not null>", {"a": None}, "column 'c.a': expected int NOT NULL, found None"),
    ],
)
def test_a_value_that_does_not_fit_names_row_column_type_and_value(ddl, value, says):
    schema = parse_ddl(f"a int, c {ddl}")
    good = {"a": 1, "c": GOOD[re.split(r"\W", ddl)[0]]}
    with pytest.raises(SchemaError) as caught:
        from_rows([good, good, {"a": 1, "c": value}, good], schema, "map 'f'")
    assert caught.value.message.startswith("map 'f': row 2, column ")
    assert says in caught.value.message
    assert (caught.value.row_index, caught.value.column) == (2, "c")


GOOD = {
    "bigint": 1, "tinyint": 1, "double": 1.0, "float": 1.0, "boolean": True, "string": "x", "binary": b"x",
    "date": date(2020, 1, 1), "timestamp": datetime(2020, 1, 1, tzinfo=UTC), "timestamp_ntz": datetime(2020, 1, 1),
    "decimal": Decimal("1.5"), "array": [], "map": {}, "struct": {"a": 1},
}  # fmt: skip


def test_infinity_and_nan_are_ordinary_floats():
    rows = from_rows([{"f": float("inf"), "d": float("nan")}], parse_ddl("f float, d double"), "f").to_pylist()
    assert rows[0]["f"] == float("inf")
    assert rows[0]["d"] != rows[0]["d"]


@pytest.mark.parametrize(
    ("row", "column", "says"),
    [
        ({"a": 1}, "b", "column 'b': the key is missing; found a. Use None for a null"),
        ({"a": 1, "B": 2}, "b", "column 'b': the key is missing"),
        ({"a": 1, "b": 2, "c": 3}, "c", "column 'c': not declared; the declared columns are a, b"),
        (None, None, "expected a dict with the keys a, b, found None"),
        ([1, 2], None, "expected a dict with the keys a, b, found list [1, 2]"),
        (7, None, "found int 7"),
        ("ab", None, "found str 'ab'"),
        (defaultdict(int, a=1), "b", "column 'b': the key is missing"),
    ],
)
def test_a_row_with_other_keys_is_refused(row, column, says):
    good = {"a": 1, "b": 2}
    with pytest.raises(SchemaError) as caught:
        from_rows([good, row, good], parse_ddl("a int, b int"), "map 'f'")
    assert says in caught.value.message
    assert (caught.value.row_index, caught.value.column) == (1, column)


def test_subclasses_of_dict_are_rows():
    assert from_rows([defaultdict(int, a=1)], parse_ddl("a int"), "f").to_pylist() == [{"a": 1}]
