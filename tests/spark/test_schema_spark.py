"""midstream must parse a DDL as Spark does."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, CharType, DataType, MapType, StringType, StructField, StructType, VarcharType

from midstream import Flow, ListSource, MemorySink, Table, Update
from midstream.data.schema import parse_ddl, to_ddl
from midstream.errors import SchemaError
from midstream.flow.edits import revise
from midstream.testing import run_local

FLAT = [
    "boolean", "tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long", "float", "real", "double",
    "decimal", "dec", "numeric(5)", "decimal(38,18)", "dec(7,7)", "string", "varchar(9)", "char(2)", "character(4)",
    "binary", "date", "timestamp", "timestamp_ltz", "timestamp_ntz",
]  # fmt: skip
NAMES = [
    "a", "B", "_x1", "1a", "int", "not", "comment", "`a b`", "`x``y`", "`größe`", "`a.b`", "`1`", "struct", "array",
]  # fmt: skip


class Writer:
    """Writes random DDL with everything that Spark's grammar allows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def schema(self) -> str:
        return self.fields(depth=3)

    def fields(self, depth: int) -> str:
        names = self.random.sample(NAMES, self.random.randint(1, 5))
        written = [
            f"{name}{self.one_of(' ', ': ', ' : ')}{self.type(depth)}{self.ending()}"
            for name in names
        ]  # fmt: skip
        return self.one_of(",", ", ", " ,\n ", ", /* and */ ").join(written)

    def ending(self) -> str:
        not_null = self.one_of("", "", " NOT NULL", " not  null")
        comment = self.one_of("", "", " COMMENT 'it\\'s, a int'", " comment \"x\" 'y'")
        return not_null + comment

    def type(self, depth: int) -> str:
        shape = self.one_of("flat", "flat", "array", "map", "struct") if depth else "flat"
        if shape == "array":
            return f"{self.one_of('array', 'ARRAY')}<{self.type(depth - 1)}>"
        if shape == "map":
            return f"map< {self.type(depth - 1)} , {self.type(depth - 1)} >"
        if shape == "struct":
            return self.one_of(f"struct<{self.fields(depth - 1)}>", "struct<>")
        flat = self.random.choice(FLAT)
        return self.one_of(flat, flat.upper(), flat.title())

    def one_of(self, *choices: str) -> str:
        return self.random.choice(choices)


def as_dataframes_have_it(kind: DataType) -> DataType:
    """Spark keeps char and varchar in DDL only; columns of a DataFrame are strings."""
    match kind:
        case CharType() | VarcharType():
            return StringType()
        case ArrayType():
            return ArrayType(as_dataframes_have_it(kind.elementType), kind.containsNull)
        case MapType():
            key, value = as_dataframes_have_it(kind.keyType), as_dataframes_have_it(kind.valueType)
            return MapType(key, value, kind.valueContainsNull)
        case StructType():
            return StructType([StructField(f.name, as_dataframes_have_it(f.dataType), f.nullable) for f in kind])
        case _:
            return kind


def arrow_schema_of_spark(ddl: str) -> pa.Schema:
    schema = as_dataframes_have_it(StructType.fromDDL(ddl))
    assert isinstance(schema, StructType)
    return to_arrow_schema(schema, timezone="UTC")


@pytest.mark.parametrize("seed", range(8))
def test_spark_reads_the_same_names_types_and_nullability(spark, seed):
    writer = Writer(seed)
    for _ in range(30):
        ddl = writer.schema()
        ours, theirs = parse_ddl(ddl), arrow_schema_of_spark(ddl)
        assert ours.equals(theirs), ddl
        assert arrow_schema_of_spark(to_ddl(ours)).equals(theirs), to_ddl(ours)


@pytest.mark.parametrize(
    "ddl",
    [
        "a", "a int,", "a int b int", "a int null", "1e5 int", "12 int", "1L int", "größe int", "a-b int", "a.b int",
        "a int not null not null", "a int comment", "a int comment 'x' not null", "a array<int not null>", "a array",
        "a decimal(39,2)", "a decimal(3,5)", "a decimal(5,-1)", "a decimal()", "a varchar", "a int(3)", "a float(3)",
        "a text", "a bytes", "a int default 3", "a int;", "`a int", "a: int: int", "a map<int>", "a struct<x>",
    ],
)  # fmt: skip
def test_ddl_that_spark_refuses_is_refused(spark, ddl):
    with pytest.raises(PySparkException):
        StructType.fromDDL(ddl)
    with pytest.raises(SchemaError):
        parse_ddl(ddl)


def test_batches_that_spark_hands_to_python_have_the_schema_we_read(spark):
    ddl = """a int, b string, c double, d decimal(12,2), e timestamp, f timestamp_ntz, g date, h binary, i boolean,
             j array<string>, k map<string,bigint>, l struct<x: int, y: array<double>>"""

    def write_schema(batches):
        for batch in batches:
            schema = batch.schema.remove_metadata().serialize().to_pybytes()
            yield pa.RecordBatch.from_pylist([{"schema": schema}])

    with_row = spark.createDataFrame([(None,) * 12], ddl)
    [row] = with_row.mapInArrow(write_schema, "schema binary").collect()
    seen = pa.ipc.read_schema(pa.py_buffer(row.schema))
    # Spark marks the time zone of its session on timestamps; the instant is the same.
    zone = spark.conf.get("spark.sql.session.timeZone")
    ours = parse_ddl(ddl)
    expected = ours.set(4, ours.field("e").with_type(pa.timestamp("us", zone)))
    assert seen.equals(expected)


def test_a_struct_type_is_taken_wherever_ddl_is() -> None:
    from pyspark.sql import types as T

    flow, out = Flow("structs"), MemorySink()
    point = T.StructType([T.StructField("x y", T.IntegerType())])
    declared = T.StructType([T.StructField("user id", T.StringType(), nullable=False), T.StructField("point", point)])
    rows = flow.source("in", ListSource([[{"user id": "ann", "point": {"x y": 1}}]], declared))
    assert to_ddl(rows.schema) == "`user id` string NOT NULL, point struct<`x y`: int>"
    added = rows.map("add", lambda row: {**row, "n": 1}, adds=T.StructType([T.StructField("n", T.LongType())]))
    number = T.StructType([T.StructField("n", T.LongType())])
    added.map("same", lambda row: {"n": row["n"]}, returns=number).sink("out", out)
    run_local(flow)
    assert out.rows == [{"n": 1}]
    day = T.StructType([T.StructField("m", T.DateType())])
    wider = revise(flow.graph, [Update("same", lambda row: row, returns=day)])
    assert to_ddl(wider["same"].schema) == "m date"
    tolls = T.StructType([T.StructField("toll paid", T.DoubleType()), T.StructField("cars", T.LongType())])
    default = {"toll paid": 0.0, "cars": 0}
    table = flow.table("tolls", key="bigint", value=tolls, default=default)
    assert table == Table("tolls", key="bigint", value="`toll paid` double, cars bigint", default=default)


@pytest.mark.parametrize("kind", ["VariantType", "DayTimeIntervalType", "YearMonthIntervalType"])
def test_a_type_without_a_place_in_arrow_is_refused_with_what_to_use_instead(kind: str) -> None:
    from pyspark.sql import types as T

    declared = T.StructType([T.StructField("a", getattr(T, kind)())])
    with pytest.raises(SchemaError, match=r"Spark has the type '(variant|interval)', midstream does not; (use|store)"):
        ListSource([], declared)
