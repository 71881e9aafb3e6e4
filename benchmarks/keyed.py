"""Counting by key: Spark's own stateful operators, and midstream's, in one run.

All read the same stream of rows with 10,000 keys and keep a count for each. Spark's sides, on RocksDB with a changelog
and in update mode, are transformWithStateInPandas and `groupBy().count()`, which never leaves the JVM. midstream's are
`aggregate` (vectorised) and `process` (a Python function called per row). Times are Spark's own, from each query's
progress.

The JVM compiles what runs often, so a query's epochs get shorter for the better part of a minute: those of `aggregate`
took 139 ms in the first 10 s, 106 after 30 and 90 after 50. Each side therefore runs for the same time before its
epochs count.

Also: the floor, an epoch of plain Spark with the same rows, two Python stages and an exchange in which nothing is done;
and what keeping state adds to an epoch that touches 1,000 keys.

    python -m benchmarks.keyed [--quick] [--rows ROWS] [--plot FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from rich.progress import Progress

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, floor_durations, midstream_durations, query_durations, session
from midstream import Flow, NoopSink, State, agg

COUNTED = "user bigint, n bigint"
STATE_STORE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # Otherwise every epoch uploads RocksDB's own files.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


@dataclass(frozen=True)
class Size:
    """Rows and keys of an epoch, the seconds that each side runs before its epochs count, and how many count."""

    rows: int
    keys: int
    warm_up_s: int
    spark_epochs: int  # its epochs take seconds
    epochs: int
    small_epochs: int
    small_warm_up: int


FULL = Size(rows=200_000, keys=10_000, warm_up_s=30, spark_epochs=4, epochs=30, small_epochs=30, small_warm_up=3)
QUICK = Size(rows=20_000, keys=1_000, warm_up_s=3, spark_epochs=1, epochs=3, small_epochs=4, small_warm_up=1)


def events(spark: SparkSession, rows: int, keys: int) -> DataFrame:
    """As many rows in every epoch, made inside the JVM, each key equally often."""
    numbers = (
        spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", CORES).load()
    )
    return numbers.select((F.col("value") * 7919 % keys).alias("user"), (F.col("value") % 100).alias("amount"))


# ── the sides ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Counter(StatefulProcessor):
    """Spark's way: one value state per key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state."""
        self.count = handle.getValueState("count", "n bigint")

    def handleInputRows(
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,
    ) -> Iterator[pd.DataFrame]:
        """Count the rows of one key."""
        (before,) = self.count.get() or (0,)
        after = before + sum(len(chunk) for chunk in rows)
        self.count.update((after,))
        yield pd.DataFrame({"user": [key[0]], "n": [after]})

    def close(self) -> None:
        """Nothing is held open."""


def spark_durations(stream: DataFrame, size: Size) -> list[float]:
    """transformWithStateInPandas, to Spark's noop sink."""
    counted = stream.groupBy("user").transformWithStateInPandas(
        statefulProcessor=Counter(), outputStructType=COUNTED, outputMode="Update", timeMode="None"
    )
    return query_durations(counted, size.spark_epochs, "update", size.warm_up_s)


def builtin_durations(stream: DataFrame, size: Size) -> list[float]:
    """`groupBy().count()`, compiled code of the JVM, to Spark's noop sink."""
    return query_durations(stream.groupBy("user").count(), size.epochs, "update", size.warm_up_s)


def empty_durations(stream: DataFrame, size: Size) -> list[float]:
    """The same rows through two stages of plain Spark that do nothing with them."""
    return floor_durations(stream, size.epochs, size.warm_up_s)


def count(key: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    """midstream, a row at a time."""
    n = state.get(0) + 1
    state.set(n)
    return {"user": key, "n": n}


def aggregate_flow(stream: DataFrame) -> Flow:
    """midstream, vectorised."""
    flow = Flow("aggregate")
    keyed = flow.source("events", stream).key_by("by user", "user")
    keyed.aggregate("count", n=agg.count()).sink("out", NoopSink())
    return flow


def process_flow(stream: DataFrame) -> Flow:
    """midstream, a Python function per row."""
    flow = Flow("process")
    keyed = flow.source("events", stream).key_by("by user", "user")
    keyed.process("count", count, returns=COUNTED).sink("out", NoopSink())
    return flow


def stateless_flow(stream: DataFrame) -> Flow:
    """The same exchange and a function per row, but nothing to remember."""
    flow = Flow("stateless")
    keyed = flow.source("events", stream).key_by("by user", "user")
    keyed.map("look", lambda row: {"user": row["user"], "n": 1}, returns=COUNTED).sink("out", NoopSink())
    return flow


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────


def state_overhead_ms(spark: SparkSession, size: Size) -> tuple[float, float]:
    """Median epoch, without and with state, of 1,000 rows of as many keys; in turn, twice each."""
    without: list[float] = []
    having: list[float] = []
    for _ in range(2):
        stream = events(spark, 1_000, 1_000)
        without += midstream_durations(spark, stateless_flow(stream), size.small_epochs)[size.small_warm_up :]
        having += midstream_durations(spark, process_flow(stream), size.small_epochs)[size.small_warm_up :]
    return statistics.median(without), statistics.median(having)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, help="rows of an epoch")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    size = replace(size, rows=options.rows or size.rows)
    conf = {**STATE_STORE, "spark.sql.shuffle.partitions": str(CORES)}
    with session(**conf) as spark, Progress() as progress:
        stream = events(spark, size.rows, size.keys)
        flows = {"process": process_flow(stream), "aggregate": aggregate_flow(stream)}
        steps = progress.add_task("counting by key", total=len(flows) + 4)
        durations = {}
        for name, flow in flows.items():
            durations[name] = midstream_durations(spark, flow, size.epochs, size.warm_up_s)
            progress.advance(steps)
        for name, measure in (("floor", empty_durations), ("builtin", builtin_durations), ("spark", spark_durations)):
            durations[name] = measure(stream, size)
            progress.advance(steps)
        without, having = state_overhead_ms(spark, size)
        progress.advance(steps)
    rate = {name: size.rows / statistics.median(found) * 1000 for name, found in durations.items()}
    figures = {
        "rows_per_epoch": size.rows,
        "keys": size.keys,
        "spark_rows_per_s": round(rate["spark"]),
        "builtin_rows_per_s": round(rate["builtin"]),
        "aggregate_rows_per_s": round(rate["aggregate"]),
        "process_rows_per_s": round(rate["process"]),
        "aggregate_ratio": round(rate["aggregate"] / rate["spark"], 1),
        "process_ratio": round(rate["process"] / rate["spark"], 1),
        "builtin_ratio": round(rate["aggregate"] / rate["builtin"], 2),
        "aggregate_epoch_ms": statistics.median(durations["aggregate"]),
        "floor_epoch_ms": statistics.median(durations["floor"]),
        "floor_ratio": round(rate["floor"] / rate["spark"], 1),
        "stateless_small_epoch_ms": without,
        "stateful_small_epoch_ms": having,
        "state_overhead_ms": having - without,
    }
    table(
        f"counting by key, {size.rows:,} rows of {size.keys:,} keys an epoch, {CORES} cores (medians)",
        ("", "rows/s", "× Spark in Python", "wanted"),
        [
            ("transformWithStateInPandas, RocksDB", f"{rate['spark']:,.0f}", "1", ""),
            ("groupBy().count(), RocksDB", f"{rate['builtin']:,.0f}", f"{rate['builtin'] / rate['spark']:.1f}", ""),
            ("midstream process", f"{rate['process']:,.0f}", f"{figures['process_ratio']}", "≥ 15"),
            ("midstream aggregate", f"{rate['aggregate']:,.0f}", f"{figures['aggregate_ratio']}", "≥ 40"),
            ("plain Spark, two empty Python stages", f"{rate['floor']:,.0f}", f"{figures['floor_ratio']}", ""),
            ("midstream aggregate × groupBy().count()", "", f"{figures['builtin_ratio']}", "≥ 1"),
            ("state of 1,000 keys adds", f"{figures['state_overhead_ms']:.0f} ms", "", "≤ 60 ms"),
        ],
    )
    if options.plot:
        plot(options.plot, rate, size)
    closing_line("keyed", figures, quick=options.quick)


def plot(path: Path, rate: dict[str, float], size: Size) -> None:
    """One bar for each side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3))
    labels = {
        "spark": "transformWithState\nInPandas",
        "builtin": "groupBy().count()\n(JVM)",
        "process": "midstream\nprocess",
        "aggregate": "midstream\naggregate",
    }
    colours = ["#999999", "#999999", "#4c9be8", "#2255aa"]
    bars = axes.barh(list(labels), [rate[name] / 1000 for name in labels], color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=4)
    axes.set_yticks(range(len(labels)), list(labels.values()))
    axes.set(xlabel="thousand rows/s", title=f"counting by key, {size.keys:,} keys, {CORES} cores")
    axes.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
