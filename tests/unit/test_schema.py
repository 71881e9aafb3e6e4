from __future__ import annotations

import timeit
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from midstream.data.schema import check_key_columns, conform, parse_ddl, require_columns, to_ddl, type_name
from midstream.errors import SchemaError

# --- reading DDL


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("boolean", pa.bool_()),
        ("tinyint", pa.int8()),
        ("BYTE", pa.int8()),
        ("smallint", pa.int16()),
        ("short", pa.int16()),
        ("int", pa.int32()),
        ("Integer", pa.int32()),
        ("bigint", pa.int64()),
        ("LONG", pa.int64()),
        ("float", pa.float32()),
        ("real", pa.float32()),
        ("double", pa.float64()),
        ("decimal", pa.decimal128(10, 0)),
        ("dec(5)", pa.decimal128(5, 0)),
        ("numeric(38, 18)", pa.decimal128(38, 18)),
        ("string", pa.string()),
        ("varchar(10)", pa.string()),
        ("char(3)", pa.string()),
        ("character(3)", pa.string()),
        ("binary", pa.binary()),
        ("date", pa.date32()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestamp_ltz", pa.timestamp("us", "UTC")),
        ("timestamp_ntz", pa.timestamp("us")),
        ("array<int>", pa.list_(pa.int32())),
        ("map<string,array<double>>", pa.map_(pa.string(), pa.list_(pa.float64()))),
        ("struct<>", pa.struct([])),
        ("struct<a: int, `b c` string NOT NULL>", pa.struct([("a", pa.int32()), pa.field("b c", pa.string(), False)])),
        ("array<array<struct<x:map<int,date>>>>",
         pa.list_(pa.list_(pa.struct([("x", pa.map_(pa.int32(), pa.date32()))])))),
    ],
)  # fmt: skip
def test_every_spark_type_has_its_arrow_type(written, kind):
    assert parse_ddl(f"c {written}").field("c").type == kind


@pytest.mark.parametrize(
    "ddl",
    [
        "a int, b string not null",
        "a: int, b: string NOT NULL",
        " a  INT ,\n\tb\u00a0String  Not\nNull ",
        "a int COMMENT 'it''s \\' , b int', b string NOT NULL COMMENT \"x\" 'y'",
        "a int -- the first\n, /* the second */ b string not null",
        "`a` int, `b` string not null",
        "struct<a:int,b:string not null>",
    ],
)
def test_all_ways_to_write_a_schema_mean_the_same(ddl):
    assert parse_ddl(ddl) == pa.schema([pa.field("a", pa.int32()), pa.field("b", pa.string(), nullable=False)])


def test_names_in_backticks_may_contain_anything():
    assert parse_ddl("`a``b` int, `c, d` int, `größe` int, 1a int, comment string, not int").names == [
        "a`b", "c, d", "größe", "1a", "comment", "not",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ddl", "position", "says"),
    [
        ("", 0, "empty"),
        ("  ", 2, "empty"),
        ("struct<>", 0, "empty"),
        ("a", 1, "expected the type of column 'a', found the end"),
        ("a int,", 6, "expected a column name, found the end"),
        ("a int, , b int", 7, "expected a column name, found ','"),
        ("a int b int", 6, "expected ',', NOT NULL, COMMENT or the end of the schema after column 'a', found 'b'"),
        ("a int not nul", 10, "expected NULL after NOT, found 'nul'"),
        ("a int comment x", 14, "expected a quoted comment"),
        ("a strin", 2, "unknown type 'strin'; did you mean 'string'?"),
        ("a text", 2, "allowed: boolean, tinyint"),
        ("a array<int", 11, "expected '>'"),
        ("a array int", 8, "expected '<' after 'array', as in array<int>"),
        ("a map<string>", 12, "expected ',' after the type of the map's keys"),
        ("a struct<x: int, x: int>", 17, "column 'x' is declared twice"),
        ("a struct<x: int y: int>", 16, "expected ',', NOT NULL, COMMENT or '>'"),
        ("user int, User int", 10, "to Spark it is the same as 'user'"),
        ("a decimal(39,2)", 2, "1 <= precision <= 38"),
        ("a decimal(3,5)", 2, "scale <= precision"),
        ("a decimal(x)", 10, "expected a precision (a whole number), found 'x'"),
        ("a varchar", 9, "expected '(' and a length after 'varchar'"),
        ("12 int", 0, "in `backticks`"),
        ("a-b int", 1, "in `backticks`"),
        ("größe int", 2, "in `backticks`"),
        ("`a int", 0, "never closed"),
        ("a int comment 'x", 14, "never closed"),
        ("`` int", 0, "must not be empty"),
        ("a interval day", 2, "Spark has the type 'interval', midstream does not"),
        ("a variant", 2, "use a string of JSON"),
        ("a void", 2, "midstream does not"),
        ("a time(3)", 2, "midstream does not"),
        ("a string collate UNICODE", 9, "Spark has collations, midstream does not"),
        ("struct<a:int> x", 14, "expected ',' or the end"),
    ],
)
def test_an_error_shows_the_position_and_what_was_expected(ddl, position, says):
    with pytest.raises(SchemaError) as caught:
        parse_ddl(ddl)
    assert says in caught.value.message
    assert caught.value.position == position


def test_the_caret_points_at_the_position_in_its_line():
    with pytest.raises(SchemaError) as caught:
        parse_ddl("a int,\n  b strng")
    assert caught.value.message.splitlines()[1:] == ["    b strng", "      ^"]


def test_a_schema_that_is_not_a_string_is_refused():
    with pytest.raises(SchemaError, match="found list"):
        parse_ddl(["a int"])  # type: ignore[arg-type]


# --- writing DDL


def test_ddl_quotes_only_names_that_need_it():
    ddl = (
        "a int NOT NULL, `b c` array<struct<`x-y`: decimal(5,2) NOT NULL>>, `1a` timestamp_ntz, `d``` map<string,date>"
    )
    assert to_ddl(parse_ddl(ddl)) == ddl


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.large_string(), "string"),
        (pa.string_view(), "string"),
        (pa.dictionary(pa.int8(), pa.large_string()), "string"),
        (pa.binary(4), "binary"),
        (pa.large_list(pa.int8()), "array<tinyint>"),
        (pa.list_(pa.int8(), 3), "array<tinyint>"),
        (pa.timestamp("ns", "Europe/Berlin"), "timestamp"),
        (pa.timestamp("s"), "timestamp_ntz"),
        (pa.date64(), "date"),
        (pa.decimal256(40, 2), "decimal(40,2)"),
        (pa.null(), "void"),
        (pa.uint16(), "uint16"),
    ],
)
def test_type_names_are_sparks(kind, name):
    assert type_name(kind) == name


# --- holding batches to a schema


def test_a_batch_with_the_declared_schema_is_returned_unchanged_and_fast():
    schema = parse_ddl("a int, b string, c double not null, d timestamp")
    batch = pa.RecordBatch.from_pylist([{"a": 1, "b": "x", "c": 1.0, "d": None}], schema=schema)
    assert conform(batch, schema, "map 'f'") is batch
    runs = 200
    # A generous bound: it is about 4 µs, and a conversion would be about 100.
    assert min(timeit.repeat(lambda: conform(batch, schema, "f"), number=runs, repeat=5)) / runs < 50e-6


def test_the_order_of_columns_does_not_matter():
    schema = parse_ddl("a int, b string")
    batch = pa.record_batch({"b": ["x"], "a": pa.array([1], pa.int32())})
    assert conform(batch, schema, "f").schema == schema


@pytest.mark.parametrize(
    ("array", "ddl", "values"),
    [
        (pa.array(["x", None], pa.large_string()), "string", ["x", None]),
        (pa.array(["x", None], pa.string_view()), "string", ["x", None]),
        (pa.array(["x", None, "x"]).dictionary_encode(), "string", ["x", None, "x"]),
        (pa.array([1, 1, 2], pa.int64()).dictionary_encode(), "bigint", [1, 1, 2]),
        (pa.array([b"ab"], pa.binary(2)), "binary", [b"ab"]),
        (pa.array([[1], None], pa.large_list(pa.int8())), "array<int>", [[1], None]),
        (pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), "array<int>", [[1, 2], None]),
        (pa.array([[1], None, [], [2, 3]], pa.list_view(pa.int32()))[1:], "array<bigint>", [None, [], [2, 3]]),
        (pa.array([[(1, "x")], None, [(2, None)]], pa.map_(pa.int8(), pa.large_string()))[1:], "map<int,string>",
         [None, [(2, None)]]),
        (pa.array([{"b": "x", "a": 1}, None]), "struct<a: bigint NOT NULL, b: string>", [{"a": 1, "b": "x"}, None]),
        (pa.array([None, None], pa.null()), "array<int>", [None, None]),
        (pa.array([{"a": None}]), "struct<a: int>", [{"a": None}]),
        (pa.array([[None]]), "array<date>", [[None]]),
        (pa.array([1], pa.int8()), "bigint", [1]),
        (pa.array([1], pa.uint32()), "bigint", [1]),
        (pa.array([1], pa.int16()), "float", [1.0]),
        (pa.array([1], pa.int32()), "double", [1.0]),
        (pa.array([0.5], pa.float32()), "double", [0.5]),
        (pa.array([7], pa.int32()), "decimal(12,2)", [Decimal("7.00")]),
        (pa.array([Decimal("1.5")]), "decimal(12,2)", [Decimal("1.50")]),
        (pa.array([1000], pa.timestamp("ms")), "timestamp_ntz", [datetime(1970, 1, 1, 0, 0, 1)]),
        (pa.array([1000], pa.timestamp("ns", "Asia/Tokyo")), "timestamp", [datetime(1970, 1, 1, 0, 0, 0, 1, UTC)]),
    ],
)  # fmt: skip
def test_other_representations_and_lossless_widening_are_converted(array, ddl, values):
    schema = parse_ddl(f"c {ddl}")
    result = conform(pa.record_batch({"c": array}), schema, "f")
    result.validate(full=True)
    assert result.schema == schema
    assert result.column("c").to_pylist() == values


@pytest.mark.parametrize(
    ("array", "ddl", "says"),
    [
        (pa.array([1]), "int", "'c' is declared int, but the result is bigint"),
        (pa.array([1]), "double", "declared double, but the result is bigint"),
        (pa.array([1], pa.int32()), "float", "declared float, but the result is int"),
        (pa.array([1], pa.int32()), "decimal(5,0)", "declared decimal(5,0), but the result is int"),
        (pa.array([1], pa.uint64()), "bigint", "but the result is uint64"),
        (pa.array([1.0]), "bigint", "but the result is double"),
        (pa.array(["1"]), "bigint", "but the result is string"),
        (pa.array([b"x"]), "string", "but the result is binary"),
        (pa.array(["x"]), "array<string>", "but the result is string"),
        (pa.array([Decimal("1.25")]), "decimal(12,1)", "declared decimal(12,1), but the result is decimal(3,2)"),
        (pa.array([1], pa.timestamp("us")), "timestamp", "declared timestamp, but the result is timestamp_ntz"),
        (pa.array([1], pa.timestamp("ns", "UTC")), "timestamp", "a value would change"),
        (pa.array([[{"x": "y"}]]), "array<struct<x: int>>", "column 'c[].x' is declared int"),
        (pa.array([{"x": 1}]), "struct<y: bigint>", "struct 'c': the columns differ from the declared ones"),
        (pa.array([{"x": 1}, {"x": None}, None]), "struct<x: bigint NOT NULL>", "column 'c.x' is NOT NULL"),
        (pa.array([1, None]), "bigint NOT NULL", "column 'c' is NOT NULL"),
        (pa.array([None]), "bigint NOT NULL", "column 'c' is NOT NULL"),
    ],
)
def test_everything_else_is_an_error_that_names_column_and_types(array, ddl, says):
    with pytest.raises(SchemaError) as caught:
        conform(pa.record_batch({"c": array}), parse_ddl(f"c {ddl}"), "map 'f'")
    assert caught.value.message.startswith("map 'f'")
    assert says in caught.value.message


def test_nulls_in_a_not_null_column_are_found_even_if_the_schema_matches():
    schema = parse_ddl("c int not null")
    batch = pa.RecordBatch.from_arrays([pa.array([1, None], pa.int32())], schema=schema)
    with pytest.raises(SchemaError, match="NOT NULL"):
        conform(batch, schema, "f")


def test_wrong_columns_are_listed_with_suggestions():
    with pytest.raises(SchemaError) as caught:
        conform(pa.record_batch({"User": ["x"], "z": [1]}), parse_ddl("user string, p double"), "map 'f'")
    assert "missing: user, p; not declared: User, z" in caught.value.message
    assert "Did you mean 'user' by 'User'?" in caught.value.message
    assert (caught.value.missing, caught.value.extra) == (["user", "p"], ["User", "z"])


def test_a_duplicate_column_is_refused():
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    with pytest.raises(SchemaError, match="more than once: a"):
        conform(batch, parse_ddl("a bigint"), "f")


def test_a_table_is_combined_to_one_batch():
    schema = parse_ddl("a bigint")
    table = pa.table({"a": pa.chunked_array([[1], [2, 3]])})
    assert conform(table, schema, "f").to_pylist() == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert conform(schema.empty_table(), schema, "f").num_rows == 0


@pytest.mark.parametrize("found", [None, [{"a": 1}], {"a": [1]}])
def test_anything_but_a_batch_or_a_table_is_refused(found):
    with pytest.raises(SchemaError, match=f"returned {type(found).__name__}; allowed: pyarrow.RecordBatch"):
        conform(found, parse_ddl("a bigint"), "f")


# --- columns that operators ask for


def test_unknown_columns_are_refused_with_the_nearest_and_all_names():
    schema = parse_ddl("user string, `p q` double")
    require_columns(schema, ["user", "p q"], "f")
    with pytest.raises(SchemaError, match=r"there is no column 'usre'; did you mean 'user'\? Available: user, `p q`"):
        require_columns(schema, ["user", "usre"], "f")
    with pytest.raises(SchemaError, match=r"there is no column 'zzz'. Available"):
        require_columns(schema, ["zzz"], "f")


@pytest.mark.parametrize(
    "ddl",
    ["boolean", "tinyint", "bigint", "string", "binary", "date", "timestamp", "timestamp_ntz", "decimal(10,2)"],
)
def test_types_with_exact_equality_can_be_keys(ddl):
    schema = parse_ddl(f"k {ddl}, d double")
    check_key_columns(schema, ["k"], "f")
    with pytest.raises(SchemaError, match="column 'd' is double"):  # the other column is the one to blame
        check_key_columns(schema, ["k", "d"], "f")


@pytest.mark.parametrize(
    ("ddl", "says"),
    [
        ("double", "last bit"),
        ("float", "last bit"),
        ("array<int>", "nested"),
        ("struct<a: int>", "nested"),
        ("map<int,int>", "nested"),
    ],
)
def test_floats_and_nested_types_cannot_be_keys(ddl, says):
    with pytest.raises(SchemaError, match=says):
        check_key_columns(parse_ddl(f"k {ddl}"), ["k"], "f")


@pytest.mark.parametrize(("names", "says"), [([], "no key column"), (["j"], "no column 'j'"), (["k", "k"], "twice")])
def test_a_key_must_name_each_column_once(names, says):
    with pytest.raises(SchemaError, match=says):
        check_key_columns(parse_ddl("k int"), names, "f")
