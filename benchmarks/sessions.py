"""Spark for benchmarks: a local session with two cores or a small cluster, and streams that cost little to read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from midstream import Flow, local_session

CORES = 2


@contextlib.contextmanager
def session(**conf: str) -> Iterator[SparkSession]:
    """A session that is stopped at the end."""
    spark = local_session(f"local[{CORES}]", conf)
    try:
        yield spark
    finally:
        spark.stop()


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
            spark.stop()


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


def query_durations(rows: DataFrame, epochs: int, mode: str = "append") -> list[float]:
    """Epochs of a plain Spark query to the noop sink that had rows, timed by Spark."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint:
        writer = rows.writeStream.format("noop").outputMode(mode).option("checkpointLocation", checkpoint)
        query = writer.start()
        try:
            while query.isActive and len(done := _finished(query)) < epochs:
                query.awaitTermination(1)
            if query.exception() is not None:
                raise RuntimeError(str(query.exception()))
        finally:
            query.stop()
    return done[:epochs]


def _finished(query: StreamingQuery) -> list[float]:
    return [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"]]


def midstream_durations(spark: SparkSession, flow: Flow, epochs: int) -> list[float]:
    """A flow's epochs, timed by Spark like the other side's."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint,
        flow.start(spark, checkpoint=checkpoint, partitions=CORES) as job,
    ):
        job.await_epoch(epochs + 1)
        [query] = [query for query in spark.streams.active if job.id in str(query.name)]
        return [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["batchId"] < epochs]
