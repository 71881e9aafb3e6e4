"""Aggregates give what Spark SQL gives: nulls, NaN, deviations and the rest, compared in one query."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, MemorySink, agg
from midstream.data.schema import parse_ddl
from midstream.testing import run_local

DDL = "k string, d double, f float, n int, s string, b boolean, x binary, at timestamp"
NAN = math.nan


def row(k: str, d: Any, n: Any, s: Any, second: int) -> dict[str, Any]:
    at = dt.datetime(2026, 1, 1, 0, 0, second, tzinfo=dt.UTC)
    others = {"b": None if n is None else n > 5, "x": None if s is None else bytes([255 - ord(s)])}
    return {"k": k, "d": d, "f": d, "n": n, "s": s, "at": at} | others


ROWS = [
    *(row("nan", NAN, 1, "b", 5), row("nan", 1.0, 2, "a", 4), row("nan", math.inf, 3, None, 6)),
    row("one", 2.5, 7, "x", 1),
    *(row("null", None, None, None, 2), row("null", None, None, None, 3)),
    *(row("only", NAN, 4, "y", 1), row("only", None, None, "z", 2)),
    *(row("many", -1.0, 5, "c", 9), row("many", 0.5, 6, "d", 7), row("many", 1e8, 8, "e", 8)),
    row("many", 1e8 + 1, -3, "c", 3),
]

CASES = {
    "max(d)": agg.max("d"),
    "min(d)": agg.min("d"),
    "max(f)": agg.max("f"),
    "min(f)": agg.min("f"),
    "avg(n)": agg.mean("n"),
    "sum(n)": agg.sum("n"),
    "count(d)": agg.count("d"),
    "max(s)": agg.max("s"),
    "max(at)": agg.max("at"),
    "min(b)": agg.min("b"),
    "max(b)": agg.max("b"),
    "min(x)": agg.min("x"),
    "max(x)": agg.max("x"),
    "stddev(n)": agg.stddev("n"),
    "stddev_pop(n)": agg.stddev_pop("n"),
    "var_samp(n)": agg.variance("n"),
    "var_pop(n)": agg.variance_pop("n"),
    "stddev_samp(d)": agg.stddev("d"),
    "var_pop(d)": agg.variance_pop("d"),
    "array_sort(collect_list(n))": agg.collect("n"),
    "array_sort(collect_set(s))": agg.collect_set("s"),
    "min_by(n, at) filter (where n is not null)": agg.first_by("n", "at"),
    "max_by(s, at) filter (where s is not null)": agg.last_by("s", "at"),
    "percentile_approx(n, 0.5, 10000)": agg.approx_quantile("n", 0.5),
    "percentile_approx(n, array(0.0, 0.75, 1.0), 10000)": agg.approx_quantile("n", [0, 0.75, 1]),
}


def same(case: str, one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(case, a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, int | float):
        near = 0.01 if "percentile" in case else 1e-9
        return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=near)
    return bool(one == other)


def test_aggregates_equal_those_of_spark(spark) -> None:
    flow, out = Flow("f"), MemorySink()
    rows = flow.source("in", ListSource([ROWS], DDL))
    columns: dict[str, Any] = {f"c{i}": aggregation for i, aggregation in enumerate(CASES.values())}
    rows.key_by("by_k", "k").aggregate("a", **columns).sink("out", out)
    run_local(flow)
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    frame = spark.createDataFrame(pa.Table.from_pylist(ROWS, parse_ddl(DDL)))
    frame.createOrReplaceTempView("compared")
    wanted = ", ".join(f"{case} as c{i}" for i, case in enumerate(CASES))
    expected = {
        row["k"]: row for row in spark.sql(f"select k, {wanted} from compared group by k").toArrow().to_pylist()
    }
    spark.catalog.dropTempView("compared")
    wrong = [
        f"{case} of {row['k']}: {row[f'c{i}']} instead of {expected[row['k']][f'c{i}']}"
        for row in out.rows
        for i, case in enumerate(CASES)
        if not same(case, sorted(row[f"c{i}"]) if "collect" in case else row[f"c{i}"], expected[row["k"]][f"c{i}"])
    ]
    assert len(out.rows) == len(expected)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("partitions", [1, 3])
def test_an_aggregate_of_all_rows_equals_that_of_spark(spark, partitions: int) -> None:
    flow, out = Flow("f"), MemorySink()
    rows = flow.source("in", ListSource([ROWS], DDL, partitions=partitions))
    rows.aggregate_all("a", n=agg.count(), total=agg.sum("n"), top=agg.max("d")).sink("out", out)
    run_local(flow, partitions=partitions)
    frame = spark.createDataFrame(pa.Table.from_pylist(ROWS, parse_ddl(DDL)))
    [expected] = frame.selectExpr("count(*) as n", "sum(n) as total", "max(d) as top").toArrow().to_pylist()
    [found] = out.rows
    assert (found["n"], found["total"]) == (expected["n"], expected["total"])
    assert math.isnan(found["top"])
    assert math.isnan(expected["top"])
