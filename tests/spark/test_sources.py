"""DataFrames on Spark: any streaming one is a source, a batch one is a lookup's table."""

from __future__ import annotations

import datetime as dt
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from midstream import FileSink, Flow, ListSource, MemorySink, NoopSink
from midstream.errors import FlowError, FunctionError, JobFailed, SchemaError, SourceError
from midstream.runtime.spark.job import JobStatus
from midstream.testing import run_spark

Row = dict[str, Any]
WAIT_S = 180.0
ODD = (
    "`a b` bigint, `c.d` string, `ü``x` double, "
    "`select` struct<`x y`: array<struct<`d.e`: int>>, `q``r`: map<string, int>>"
)
ODD_ROW = {"a b": 1, "c.d": "two", "ü`x": 3.0, "select": {"x y": [{"d.e": 4}], "q`r": {"five": 6}}}


def same(row: Row) -> Row:
    return row


# ── streaming DataFrames ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("format", ["json", "parquet"])
def test_files_are_read_once_each_also_across_restarts(spark: Any, tmp_path: Path, format: str) -> None:
    schema = "n bigint, at timestamp"
    at = dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC)
    folder, checkpoint = tmp_path / "in", str(tmp_path / "c")
    flow, out = Flow("files"), MemorySink()
    folder.mkdir()
    rows = flow.source("files", spark.readStream.schema(schema).format(format).load(str(folder)), event_time="at")
    rows.key_by("by_n", "n").map("same", same).sink("out", out)

    def write(numbers: range) -> None:
        data = [(n, at) for n in numbers]
        spark.createDataFrame(data, schema).coalesce(1).write.mode("append").format(format).save(str(folder))

    write(range(5))
    run_spark(flow, spark, checkpoint=checkpoint)
    write(range(5, 8))
    job = run_spark(flow, spark, checkpoint=checkpoint)

    assert out.rows[:5] != out.rows[5:]
    assert sorted((row["n"], row["at"]) for row in out.rows) == [(n, at) for n in range(8)]
    assert {epoch: table.num_rows for epoch, table in out.tables.items()} == {0: 5, 1: 3}
    ages = {stats.operator: stats.latency_ms.count for stats in job.metrics.operators}
    assert ages["same"] == 3, "latency counts from the event time that was named"


def test_the_rate_source_continues_without_gaps(spark: Any, tmp_path: Path) -> None:
    out = MemorySink()
    for _ in range(2):
        flow = Flow("rate")
        stream = spark.readStream.format("rate").option("rowsPerSecond", 200).option("numPartitions", 2).load()
        flow.source("rate", stream).map("same", same).sink("out", out)
        with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
            assert job.await_epoch(3, WAIT_S)
    values = sorted(row["value"] for row in out.rows)
    assert len(values) > 0
    assert values == list(range(len(values)))


def test_names_that_need_backticks_pass_through_everything(spark: Any, tmp_path: Path) -> None:
    """Spaces, dots, backticks, keywords, other alphabets, at the top and inside; two sources, a transform, frames."""
    folder = tmp_path / "in"
    spark.createDataFrame([tuple(ODD_ROW.values())], ODD).write.json(str(folder))
    stream = spark.readStream.schema(ODD).json(str(folder))
    lone, files, plain = Flow("lone"), FileSink(tmp_path / "out"), MemorySink()
    lone_rows = lone.source("source", stream).map("work", same)
    lone_rows.sink("plain", plain)
    lone_rows.sink("files", files)
    run_spark(lone, spark, checkpoint=str(tmp_path / "lone"))
    assert plain.rows == [ODD_ROW]
    assert spark.read.parquet(files.path).drop("epoch").first().asDict(recursive=True) == ODD_ROW

    flow, out, raw = Flow("odd"), MemorySink(), MemorySink()
    first, second = flow.source("first", stream), flow.source("second", stream)
    first.sink("raw", raw)
    both = first.union("both", second).key_by("by_odd", "c.d", "a b").map("same", same)
    backwards = [f"`{name.replace('`', '``')}`" for name in reversed(ODD_ROW)]
    reordered = both.transform("reorder", lambda df: df.select(*backwards))
    reordered.map("after", same).sink("out", out)

    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))

    assert raw.rows == [ODD_ROW]
    assert out.rows == [ODD_ROW, ODD_ROW]


class Counter(DataSourceStreamReader):
    """Fails on the driver when it is asked for new offsets, after the first epoch."""

    def initialOffset(self) -> dict[str, int]:
        return {"n": 0}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked > 1:
            raise OSError("the broker is away")
        return {"n": 1}

    def partitions(self, start: Any, end: Any) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Any:
        yield (1,)


class CounterSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "counter_that_fails"

    def schema(self) -> str:
        return "n bigint"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return Counter()


def test_a_source_that_fails_between_epochs_fails_the_job(spark: Any, tmp_path: Path) -> None:
    spark.dataSource.register(CounterSource)
    flow, out = Flow("broken"), MemorySink()
    flow.source("counter", spark.readStream.format("counter_that_fails").load()).map("same", same).sink("out", out)
    job = flow.start(spark, checkpoint=str(tmp_path / "c"))

    with pytest.raises(JobFailed, match="the broker is away") as caught:
        job.await_epoch(2, WAIT_S)

    assert job.status is JobStatus.FAILED
    assert len(str(caught.value)) < 3_000
    assert out.rows == [{"n": 1}]


def test_only_streams_are_accepted_as_sources(spark: Any) -> None:
    flow = Flow("sources")
    with pytest.raises(SourceError, match=r"this DataFrame is a batch.*spark\.readStream"):
        flow.source("batch", spark.range(3))
    with pytest.raises(SourceError, match="found list"):
        flow.source("list", [1, 2])
    rate = spark.readStream.format("rate").load()
    with pytest.raises(SchemaError, match="event_time 'value' must be a timestamp, found bigint"):
        flow.source("rate", rate, event_time="value")
    with pytest.raises(SchemaError, match="interval"):
        flow.source("interval", rate.selectExpr("timestamp - timestamp AS gap"))


# ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_function_that_cannot_be_shipped_is_refused_and_nothing_is_created(spark: Any, tmp_path: Path) -> None:
    lock = threading.Lock()

    def keep(row: Row) -> Row:
        with lock:
            return row

    flow = Flow("unpicklable")
    flow.source("rows", ListSource([[{"n": 1}]], "n bigint")).map("keep", keep).sink("out", NoopSink())
    with pytest.raises(FunctionError, match=r"operator 'keep'.*closure variable 'lock'"):
        flow.start(spark, checkpoint=str(tmp_path / "c"))
    assert list(tmp_path.iterdir()) == []


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lookup_uses_a_batch_dataframe_as_of_the_start_of_the_job(spark: Any, tmp_path: Path) -> None:
    at = dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC)
    table = spark.createDataFrame([(1, "one", at), (2, "two", None)], "n int, `the name` string, at timestamp")
    flow, out = Flow("joined"), MemorySink()
    rows = flow.source("rows", ListSource([[{"n": 1}, {"n": 2}], [{"n": 3}]], "n bigint"))
    rows.lookup("names", table, on="n", how="left").key_by("by_n", "n").map("same", same).sink("out", out)

    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))

    assert sorted(out.rows, key=lambda row: row["n"]) == [
        {"n": 1, "the name": "one", "at": at},
        {"n": 2, "the name": "two", "at": None},
        {"n": 3, "the name": None, "at": None},
    ]


def test_an_invalid_table_is_refused_and_nothing_is_created(spark: Any, tmp_path: Path) -> None:
    table = spark.createDataFrame([(1, "one"), (1, "uno")], "n bigint, name string")
    flow = Flow("joined")
    rows = flow.source("rows", ListSource([[{"n": 1}]], "n bigint"))
    rows.lookup("names", table, on="n").sink("out", NoopSink())
    with pytest.raises(FlowError, match=r"lookup 'names': the table has more than one row for \{'n': 1\}"):
        flow.start(spark, checkpoint=str(tmp_path / "c"))
    with pytest.raises(FlowError, match="the table is a stream"):
        rows.lookup("stream", spark.readStream.format("rate").load(), on={"n": "value"})
    assert list(tmp_path.iterdir()) == []
