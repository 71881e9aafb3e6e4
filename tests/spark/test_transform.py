"""Transforms: any DataFrame → DataFrame function in a flow, run by Catalyst, checked against its declared schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from midstream import Flow, ListSource, MemorySink, NoopSink
from midstream.errors import FlowError, SchemaError
from midstream.testing import run_spark

Row = dict[str, Any]
ROWS: list[Row] = [{"n": n, "user": f"u{n % 4}"} for n in range(24)]


def source(flow: Flow) -> Any:
    return flow.source("rows", ListSource.of(ROWS, schema="n bigint, user string", epoch_rows=12, partitions=2))


def by_n(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["n"])


@pytest.mark.slow
def test_sql_joins_and_windows_see_the_rows_of_one_epoch(spark: Any, tmp_path: Path) -> None:
    prices = spark.createDataFrame([(f"u{i}", 1.5 * i) for i in range(4)], "user string, price double")

    def enrich(df: Any) -> Any:
        df.join(prices, "user").createOrReplaceTempView("enriched")
        return df.sparkSession.sql(
            "SELECT n, user, price, sum(price) OVER (PARTITION BY user) AS total FROM enriched WHERE user <> 'u0'"
        )

    flow, out = Flow("sql"), MemorySink()
    keyed = source(flow).key_by("by_user", "user").map("same", lambda row: row)
    enriched = keyed.transform("enrich", enrich, returns="n bigint, user string, price double, total double")
    enriched.map("round", lambda row: {**row, "total": round(row["total"], 1)}).sink("out", out)

    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))

    wanted = [row for row in ROWS if row["user"] != "u0"]
    price = {f"u{i}": 1.5 * i for i in range(4)}
    assert by_n(out.rows) == [{**row, "price": price[row["user"]], "total": 3 * price[row["user"]]} for row in wanted]


def test_a_transform_read_by_several_consumers_runs_once(spark: Any, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for n in batch["n"].to_pylist():
                open(f"{calls}/{n}", "x").close()  # fails if it sees a row again
            yield batch

    flow, sinks = Flow("once"), [MemorySink() for _ in range(3)]
    counted = source(flow).transform("count", lambda df: df.mapInArrow(count, df.schema))
    counted.sink("direct", sinks[0])
    counted.map("same", lambda row: row).sink("mapped", sinks[1])
    counted.transform("again", lambda df: df.where("n >= 0")).sink("transformed", sinks[2])

    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))

    assert len(list(calls.iterdir())) == 24
    for sink in sinks:
        assert by_n(sink.rows) == ROWS


@pytest.mark.slow
def test_stages_run_once_however_many_transforms_and_sinks_read_them(spark: Any, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()

    def count(row: Row) -> Row:
        open(f"{calls}/{row['n']}", "x").close()  # fails if it is called again
        return row

    flow, kept, totals = Flow("lazy"), MemorySink(), MemorySink()
    counted = source(flow).map("count", count)
    counted.transform("some", lambda df: df.limit(1)).sink("some_out", kept)
    aggregate = counted.transform("totals", lambda df: df.groupBy("user").agg(F.sum("n").alias("n")))
    aggregate.key_by("by_user", "user").map("end", lambda row: row).sink("totals_out", totals)
    counted.sink("raw", NoopSink())

    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))

    assert len(list(calls.iterdir())) == 24
    assert len(kept.rows) == 2
    expected: Counter[tuple[int, str]] = Counter()
    for row in ROWS:
        expected[row["n"] // 12, row["user"]] += row["n"]
    found = {(epoch, row["user"]): row["n"] for epoch, table in totals.tables.items() for row in table.to_pylist()}
    assert found == expected


def test_a_transform_that_drops_everything_does_not_affect_the_rest(spark: Any, tmp_path: Path) -> None:
    """Catalyst need not even run what is before it; rows that bypass it, or are read elsewhere, are complete."""
    flow, rest, nothing = Flow("dropping"), MemorySink(), MemorySink()
    rows = source(flow).key_by("by_user", "user").map("same", lambda row: row)
    dropped = rows.transform("drop", lambda df: df.where("1 = 0"))
    met = dropped.map("dropped", lambda row: row).union("met", rows.map("pass", lambda row: row))
    end = met.key_by("by_n", "n").map("end", lambda row: row)
    end.transform("drop_too", lambda df: df.limit(0)).sink("nothing", nothing)
    met.sink("rest", rest)

    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))

    assert nothing.rows == []
    assert by_n(rest.rows) == ROWS


def test_a_flow_whose_output_is_not_read_still_commits_its_epochs(spark: Any, tmp_path: Path) -> None:
    flow, out = Flow("nothing"), MemorySink()
    rows = source(flow).key_by("by_user", "user").map("same", lambda row: row)
    later = rows.transform("drop", lambda df: df.where("1 = 0")).map("dropped", lambda row: row)
    later.union("met", rows).transform("drop_too", lambda df: df.limit(0)).sink("out", out)
    assert run_spark(flow, spark, checkpoint=str(tmp_path / "c")).metrics.epochs == 2
    assert out.rows == []


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (lambda df: df.select("n"), SchemaError, r"returned the columns n; declared are n, user.*returns='n bigint'"),
        (lambda df: df.withColumn("x", F.lit(1)), SchemaError, "returned the columns n, user, x; declared are n, user"),
        (lambda df: df.withColumn("n", F.lit("1")), SchemaError, "column 'n' is string, declared is bigint; cast it"),
        (lambda df: df.select("n", "user", "user"), SchemaError, "user"),
        (lambda df: df.count(), SchemaError, "must return a DataFrame, found int"),
        (lambda df: None, SchemaError, "must return a DataFrame, found NoneType"),
        (lambda df: df.sparkSession.readStream.format("rate").load(), SchemaError, "returned a streaming DataFrame"),
        (lambda df: df.select("nothing"), FlowError, "fails on an empty DataFrame.*nothing"),
        (lambda df: 1 // 0, FlowError, "fails on an empty DataFrame.*ZeroDivisionError"),
    ],
    ids=["missing", "more", "type", "twice", "number", "none", "streaming", "unknown", "raises"],
)
def test_a_transform_that_cannot_work_is_refused_before_anything_is_created(
    spark: Any, tmp_path: Path, function: Callable[[Any], Any], error: type[FlowError], says: str
) -> None:
    flow = Flow("wrong")
    source(flow).transform("wrong", function).sink("out", NoopSink())
    with pytest.raises(error, match=says) as caught:
        flow.start(spark, checkpoint=str(tmp_path / "c"))
    assert "transform 'wrong'" in str(caught.value)
    assert len(str(caught.value)) < 600
    assert list(tmp_path.iterdir()) == []


def test_columns_in_another_order_are_put_in_order(spark: Any, tmp_path: Path) -> None:
    flow, out = Flow("order"), MemorySink()
    source(flow).transform("swap", lambda df: df.select("user", "n")).sink("out", out)
    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))
    assert by_n(out.rows) == ROWS
    assert out.tables[0].column_names == ["n", "user"]
