"""The cost of partitions that stick to executors: an exchange that is joined with an anchor, against a plain one.

In turn, on a cluster of two executors on one machine: rows are exchanged, sorted as frames are, and read by Python.
Small exchanges show the cost of planning, large ones that of the join.

    python -m benchmarks.anchors [--quick]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, cluster
from midstream.runtime.spark.anchors import Anchors
from midstream.runtime.spark.stage_columns import PreparedColumns

PARTITIONS = 4
WARM_UP = 3


def main() -> None:
    """Run it."""
    quick = arguments(__doc__ or "").parse_args().quick
    conf = {"spark.sql.adaptive.enabled": "false"}  # as in the session of a job's query
    with cluster(CORES, **conf) as spark:
        found = {rows: _both(spark, rows, 5 if quick else 15) for rows in (400, 200_000 if quick else 2_000_000)}
    table(
        "An exchange and what it costs, medians",
        ("rows", "plain", "anchored"),
        [(f"{rows:,}", f"{plain:.0f} ms", f"{anchored:.0f} ms") for rows, (plain, anchored) in found.items()],
    )
    (small, large) = found.values()
    figures = {
        "small_plain_ms": small[0],
        "small_anchored_ms": small[1],
        "large_plain_ms": large[0],
        "large_anchored_ms": large[1],
        "small_ratio": round(small[1] / small[0], 3),
        "large_ratio": round(large[1] / large[0], 3),
    }
    closing_line("anchors", figures, quick=quick)


def _both(spark: SparkSession, rows: int, rounds: int) -> tuple[float, float]:
    """Median milliseconds: without an anchor, and with one."""
    number = F.col("id")
    frames = spark.range(0, rows, 1, 2).select(
        (number % PARTITIONS).cast("int").alias("dest"),
        F.lit(1).alias("revision"),
        (number % 2).alias("src"),
        number.alias("seq"),
        F.lit("a payload of some bytes").alias("payload"),
    )
    steps, anchors = PreparedColumns(), Anchors(spark)
    anchor = anchors.of(spark, PARTITIONS)
    assert anchor is not None, "local_session makes sessions in which partitions stick"
    times: dict[bool, list[float]] = {False: [], True: []}
    for index in range(WARM_UP + rounds):
        for anchored in (False, True) if index % 2 else (True, False):
            began = time.perf_counter()
            _drain(steps.exchange(frames, PARTITIONS, anchor if anchored else None))
            if index >= WARM_UP:
                times[anchored].append(1000 * (time.perf_counter() - began))
    anchors.close()
    return round(statistics.median(times[False]), 1), round(statistics.median(times[True]), 1)


def _drain(exchanged: DataFrame) -> None:
    counted = exchanged.mapInArrow(_count, "n bigint").collect()
    assert len(counted) == PARTITIONS


def _count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch({"n": pa.array([sum(batch.num_rows for batch in batches)], pa.int64())})


if __name__ == "__main__":
    main()
