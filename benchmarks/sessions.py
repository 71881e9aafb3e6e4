"""Spark for benchmarks: a local session with two cores or a small cluster, and streams that cost little to read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.company import company
from midstream import Flow, local_session
from midstream.runtime.spark.offset_log import start_query

CORES = 2
COUNTS = pa.schema([("dest", pa.int32()), ("n", pa.int64())])


@contextlib.contextmanager
def session(**conf: str) -> Iterator[SparkSession]:
    """A session that is stopped at the end."""
    spark = local_session(f"local[{CORES}]", conf)
    try:
        yield spark
    finally:
        _stop(spark)


@contextlib.contextmanager
def cluster(executors: int = CORES, **conf: str) -> Iterator[SparkSession]:
    """A session with executors that are processes of their own, with one core each."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Path(folder, "spark")
        home.mkdir()
        for entry in Path(pyspark.__file__).parent.iterdir():
            (home / entry.name).symlink_to(entry)
        os.environ["SPARK_HOME"] = str(home)  # such a cluster writes into it
        spark = local_session(f"local-cluster[{executors},1,1024]", conf)
        try:
            yield spark
        finally:
            _stop(spark)


def _stop(spark: SparkSession) -> None:
    """End a session, whose processes are not taken for somebody else's."""
    company.look()
    spark.stop()
    company.leave_out()


def payments_stream(spark: SparkSession, rows_per_epoch: int) -> DataFrame:
    """As many rows in every epoch, made inside the JVM: reading costs next to nothing, for both sides alike."""
    numbers = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", rows_per_epoch)
        .option("numPartitions", CORES)
        .load()
    )
    return numbers.select(
        (F.col("value") % 1_000_003).alias("user"),
        (F.col("value") % 5_000).cast("string").alias("merchant"),
        (F.col("value") % 100_000 / 100).alias("amount"),
        F.col("timestamp").alias("due"),
    )


def query_durations(
    rows: DataFrame, epochs: int, mode: str = "append", warm_up_s: int = 0, parted_by: Sequence[str] = ()
) -> list[float]:
    """Epochs of a plain Spark query to the noop sink that had rows, timed by Spark.

    ``warm_up_s``: seconds that it runs before the epochs that count. ``parted_by``: it writes Parquet files instead,
    parted by these columns.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _durations(plain_writer(rows, folder, mode, parted_by).start(), epochs, warm_up_s)


def plain_writer(rows: DataFrame, folder: str, mode: str, parted_by: Sequence[str]) -> DataStreamWriter:
    """What :func:`query_durations` starts."""
    writer = rows.writeStream.outputMode(mode).option("checkpointLocation", f"{folder}/checkpoint")
    if not parted_by:
        return writer.format("noop")
    return writer.format("parquet").partitionBy(*parted_by).option("path", f"{folder}/files")


def floor_durations(rows: DataFrame, epochs: int, warm_up_s: int = 0) -> list[float]:
    """The least that an epoch of two stages with Python in them takes in plain Spark, timed by Spark.

    `foreachBatch`, two `mapInArrow` and an exchange of one row a task between them; the functions read their input and
    do nothing with it. Spark's log is written as midstream has it written, and adaptive execution is off.
    """

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        n = sum(batch.num_rows for batch in batches)
        yield pa.RecordBatch.from_pydict({"dest": list(range(CORES)), "n": [n] * CORES}, COUNTS)

    def drop(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        return iter(())

    def epoch(frame: DataFrame, _: int) -> None:
        counted = frame.mapInArrow(count, "dest int, n bigint").repartitionById(CORES, F.col("dest"))
        counted.sortWithinPartitions("n").mapInArrow(drop, "n bigint").write.format("noop").mode("append").save()

    spark = rows.sparkSession
    spark.conf.set("spark.sql.adaptive.enabled", "false")
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint:
            location = f"file://{checkpoint}"
            writer = rows.writeStream.foreachBatch(epoch).option("checkpointLocation", location)
            return _durations(start_query(spark, writer, location), epochs, warm_up_s)
    finally:
        spark.conf.unset("spark.sql.adaptive.enabled")


def _durations(query: StreamingQuery, epochs: int, warm_up_s: int) -> list[float]:
    done: list[float] = []
    try:
        if warm_up_s:
            query.awaitTermination(warm_up_s)
        first = query.lastProgress["batchId"] + 1 if warm_up_s and query.lastProgress else 0
        while query.isActive and len(done := _finished(query, first)) < epochs:
            query.awaitTermination(1)
        if query.exception() is not None:
            raise RuntimeError(str(query.exception()))
    finally:
        query.stop()
    return done[:epochs]


def _finished(query: StreamingQuery, first: int) -> list[float]:
    return [
        p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"] and p["batchId"] >= first
    ]


def midstream_durations(spark: SparkSession, flow: Flow, epochs: int, warm_up_s: int = 0) -> list[float]:
    """A flow's epochs, timed by Spark like the other side's."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint,
        flow.start(spark, checkpoint=checkpoint, partitions=CORES) as job,
    ):
        [query] = [query for query in spark.streams.active if job.id in str(query.name)]
        if warm_up_s:
            query.awaitTermination(warm_up_s)
            job.await_epoch(1)  # on a busy machine the first one may take longer than that
        first = job.progress[-1].epoch + 1 if warm_up_s else 0
        job.await_epoch(first + epochs + 1)
        return [p["durationMs"]["triggerExecution"] for p in query.recentProgress if 0 <= p["batchId"] - first < epochs]
