"""Expressions give what Spark SQL gives: many cases compared in one query, values and types."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from midstream.data.schema import from_spark, parse_ddl, to_ddl, type_name
from midstream.errors import SchemaError
from midstream.expressions.compiler import column_of

DDL = (
    "b boolean, t tinyint, i int, l bigint, f float, d double, m decimal(10,2), s string, day date, at timestamp, "
    "local timestamp_ntz, point struct<x: int, y: string>, tags array<string>, z double"
)
UTC = dt.UTC
NAN, INF = math.nan, math.inf
ROWS: list[tuple[Any, ...]] = list(
    zip(
        [True, False, None, True, False, True],
        [1, -7, None, 100, 0, -100],
        [10, -3, None, 2_000_000_000, 5, 0],
        [100, 7, None, 4_000_000_000_000, -9, 0],
        [1.5, -0.0, None, NAN, 2.0, 3.4e38],
        [2.5, NAN, None, INF, -2.5, 1e300],
        [None if text is None else Decimal(text) for text in ("12.34", "-0.05", None, "99999999.99", "0.00", "1.00")],
        ["Straße", " 42 ", None, "a%b_c\nd", "", "x"],
        [
            dt.date(2026, 3, 29),
            dt.date(1969, 12, 31),
            None,
            dt.date(2024, 2, 29),
            dt.date(2026, 1, 1),
            dt.date(2000, 2, 28),
        ],
        [
            dt.datetime(2026, 3, 29, 1, 30, 15, 123456, UTC),
            dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
            None,
            dt.datetime(2024, 2, 29, 12, 0, tzinfo=UTC),
            dt.datetime(2026, 1, 1, tzinfo=UTC),
            dt.datetime(2000, 2, 28, 23, 59, 59, tzinfo=UTC),
        ],
        [dt.datetime(2026, 3, 29, 1, 30), dt.datetime(1969, 12, 31), None, *[dt.datetime(2024, 12, 30, 12)] * 3],
        [{"x": 1, "y": "p"}, {"x": None, "y": "q"}, None, {"x": 5, "y": None}, {"x": -4, "y": ""}, {"x": 2, "y": "x"}],
        [["a", "b"], [], None, [None], ["x"], ["x", "y", None]],
        [0.0, NAN, None, -1.5, 2.675, 7.0],
        strict=True,
    )
)

CASES = """
i + 1; i - l; t * 2; t + i; i + 1.5; m + i; m * m; m - 1; m + 0.005; f + t; f + i; f * l; f * d; f + 1.5; d - 1; -t; -d; -m; +i
i / 4; l / 2; d / 2; f / 2; l div 7; i div 7; i % 7; t % 3; d % 2; l % -5; -7 % 3; f % 2; m * 3; m * 1.5D; 2 * 3.50
i = 5; i <> 5; i < l; i <= t; i > 1.5; m >= i; m < d; d = d; d > 1; d < 1; d >= 1; d <= 1; d <> d; z < d; z <= d; z > d; f = d
d = 0; f = 0; b = true; b < true; s < 'b'; s = 'x'; s >= ''; day < at; day = DATE '2026-01-01'; at > '2025-01-01'; at <=> null
i <=> null; s <=> 'x'; d <=> d; i is null; i is not null; b is true; b is not false; i is distinct from 5; null is null
i between 0 and 10; i not between 0 and 10; i in (5, 10); i not in (5, 10); i in (5, null); s in ('x', 'y'); i not in (5, null)
b and i > 0; b or i > 0; not b; not (b and null); null or b; null and b; b and b or not b; 1 = 1 and b
s like 'a%'; s like '%\\\\_%'; s like '_'; s not like '%b%'; s ilike 'STR%'; s rlike '^[a-z]'; s like 'a%d'; s rlike 'b.c'
case when i > 4 then 'big' when i < 0 then 'negative' else 'small' end; case i when 5 then 1 when 10 then 2 end
case when i <> 0 then 10 / i else 0 end; case when i > 0 then i else 1.5 end; case when b then t else l end
if(i > 0, i, -1); coalesce(i, l, 0); coalesce(s, 'none'); nvl(i, 7); ifnull(d, 0); nullif(i, 5); nullif(s, 'x')
i <> 0 and 10 / i > 1; i = 0 or 10 div i > 1; if(i = 0, 0, 100 % i); coalesce(t, 1 / z)
greatest(i, l); least(i, t, 3); greatest(d, z); least(d, z); greatest(s, 'b'); greatest(day, DATE '2025-01-01')
abs(t); abs(d); abs(m); ceil(nanvl(z, 0.5)); floor(nanvl(z, 0.5) - 1); ceil(i); floor(m); ceil(m); round(z, 2); round(d); round(m, 1); round(m); round(i); round(z); round(f, 1)
sqrt(l); sqrt(d); exp(t); ln(d); log10(l); log2(z); pow(i, 2); power(2, t); sign(d); signum(i); isnan(d); isnan(i); nanvl(d, 0); pmod(i, 7); pmod(l, -5); mod(i, 4)
upper(s); lower(s); length(s); concat(s, '-', s); s || 'x'; trim(s); ltrim(s); rtrim(s); substring(s, 2); substring(s, 2, 3); substring(s, -3, 2); substr(s, 0, 2)
substring(s, -10, 8); contains(s, 'ra'); startswith(s, 'S'); endswith(s, 'e'); replace(s, 'a', 'ä'); replace(s, 'a'); instr(s, 'a'); char_length(s)
year(at); month(at); day(at); hour(at); minute(at); second(at); quarter(at); dayofweek(at); weekday(day); dayofyear(day); weekofyear(day); year(local); hour(local)
date_trunc('hour', at); date_trunc('day', at); date_trunc('month', at); date_trunc('week', at); date_trunc('minute', at); date_trunc('year', at)
to_date(at); datediff(day, DATE '2026-01-01'); date_add(day, 3); date_sub(day, t); unix_micros(at); unix_millis(at); unix_seconds(at); timestamp_micros(l); timestamp_seconds(i)
at + INTERVAL 5 MINUTES; at - INTERVAL '1' DAY; INTERVAL 2 HOURS + at; local + INTERVAL 1 DAY; at + INTERVAL -3 SECONDS; at + INTERVAL 1 WEEK
point.x; point.y; point.x + 1; size(tags); `point`.`x`
cast(i as bigint); cast(t as string); cast(d > 0 as int); cast(m as int); cast(m as decimal(12,1)); cast(m as decimal(20,4)); cast(i as decimal(12,2)); cast(m as string)
cast(t as double); cast(l as float); cast(day as timestamp); cast(at as date); cast(day as string); cast(b as string); cast(i as boolean); cast(z as boolean); cast(m as double)
try_cast(s as int); try_cast(s as double); try_cast(s as date); try_cast(s as decimal(5,1)); try_cast(l as int); try_cast(d as bigint); try_cast(z as decimal(10,1)); try_cast(l as tinyint)
cast(' 12 ' as int); cast('1.5' as double); cast('true' as boolean); cast('2026-03-29 01:30:00' as timestamp); cast('2026-03-29' as date); cast(1.5 as int); cast(-1.5D as int)
cast(at as timestamp_ntz); cast(local as timestamp); cast(null as int); cast(2.5D as decimal(3,0)); i::string; cast(z as float)
5; 1.5; 1.5D; 1e3; 'it\\\\'s'; 3L; 2Y; true; X'00ff'; DATE '2026-01-02'; TIMESTAMP '2026-01-02 03:04:05'; 1.50BD; -5; 'a\\\\nb'; 3000000000
""".replace("\\\\", "\\")  # noqa: E501  (a line is a topic)

EXPRESSIONS = [case.strip() for line in CASES.strip().splitlines() for case in line.split("; ")]

FAILING = """
i + 2147483647; t * cast(2 as tinyint); l * 9223372036854775807; -cast(-128 as tinyint); 1 / i; 1 div i; i % l; 1.0D / z
cast(s as int); cast(d as int); cast(l as int); cast(m as decimal(4,2)); abs(cast(-128 as tinyint)); cast(s as boolean)
"""


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-15)
    if isinstance(one, dict) and isinstance(other, dict):
        return all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@pytest.fixture(scope="module")
def table() -> pa.RecordBatch:
    schema = parse_ddl(DDL)
    columns = [pa.array(column, field.type) for column, field in zip(zip(*ROWS, strict=True), schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def in_spark(spark: Any, table: pa.RecordBatch) -> Any:
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    return spark.createDataFrame(pa.Table.from_batches([table])).withColumn("local", spark_expr("local::timestamp_ntz"))


def spark_expr(text: str) -> Any:
    from pyspark.sql.functions import expr

    return expr(text)


def test_values_and_types_equal_those_of_spark(spark, table: pa.RecordBatch) -> None:
    frame = in_spark(spark, table)
    answers = frame.selectExpr(*(f"{case} as c{n}" for n, case in enumerate(EXPRESSIONS)))
    kinds = from_spark(answers.schema)
    expected = answers.toArrow()
    wrong = []
    for n, case in enumerate(EXPRESSIONS):
        ours = column_of(case, table.schema, "a test")
        if type_name(ours.kind) != type_name(kinds.field(n).type):
            wrong.append(f"{case}: {type_name(ours.kind)} instead of {type_name(kinds.field(n).type)}")
            continue
        found, wanted = ours(table).to_pylist(), expected.column(n).cast(kinds.field(n).type).to_pylist()
        if not all(map(same, found, wanted)):
            wrong.append(f"{case}: {found} instead of {wanted}")
    assert not wrong, "\n".join(wrong)


def test_expressions_that_fail_in_spark_fail_here(spark, table: pa.RecordBatch) -> None:
    frame = in_spark(spark, table)
    for case in FAILING.strip().replace("\n", "; ").split("; "):
        with pytest.raises((ArithmeticError, ValueError)):
            column_of(case, table.schema, "a test")(table)
        with pytest.raises(Exception, match=r"OVERFLOW|ZERO|CAST|OUT_OF_RANGE"):
            frame.selectExpr(case).collect()


def test_expressions_that_spark_has_and_midstream_lacks_are_refused(table: pa.RecordBatch) -> None:
    assert to_ddl(table.schema)
    for case in ("s + 1", "m / 2", "cast(d as string)", "sum(i)", "rand()", "tags[0]", "at - at", "i = s"):
        with pytest.raises(SchemaError):
            column_of(case, table.schema, "a test")
