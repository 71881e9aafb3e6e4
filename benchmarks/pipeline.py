"""The same pipeline in idiomatic typed PySpark and in midstream: two batch functions with an exchange between them.

Both read the same stream, run the same functions on the same Arrow batches, and write to Spark's noop sink; times are
Spark's own, from each query's progress. "tuned" is the typed side with the limit of Arrow batches that midstream sets
(see midstream/runtime/spark/batch_size.py), which anyone could set. The same once more with Parquet files: `FileSink`
in midstream, `write.parquet` in `foreachBatch` of the tuned side; what both wrote is read back and must be equal. Sides
keep their defaults: midstream syncs files to disk before it commits an epoch, Spark leaves them to the system. Also:
what an epoch costs before any data, and how fast a row function is.

    python -m benchmarks.pipeline [--quick] [--plot FILE]
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession
from rich.progress import track

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, midstream_durations, payments_stream, session
from midstream import FileSink, Flow, NoopSink
from midstream.runtime.spark.batch_size import BatchLimit

INPUT = "user bigint, merchant string, amount double, due timestamp"
SCORED = f"{INPUT}, score double"
RISK = f"{SCORED}, risk double"
TYPICAL_ROW = 40
"""Bytes of a row of the input."""


@dataclass(frozen=True)
class Size:
    """How much is measured: epochs per query, of which the first ones warm up; rounds alternate the sides.

    One more round goes before and is not counted: the JVM takes that long to compile what is hot.
    """

    rows: int
    epochs: int
    warm_up: int
    rounds: int


FULL, QUICK = Size(2_000_000, 6, 1, 3), Size(200_000, 4, 1, 1)
FULL_FILES, QUICK_FILES = Size(2_000_000, 4, 1, 3), Size(200_000, 3, 1, 1)


def score(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A first model: cheap, vectorised."""
    amount = batch.column("amount")
    return batch.append_column("score", pc.divide(amount, pc.add(amount, 250.0)))


def weigh(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A second model, behind the exchange."""
    return batch.append_column("risk", pc.multiply(batch.column("score"), 0.6))


def score_row(row: dict[str, Any]) -> dict[str, Any]:
    """The first model as a row function."""
    row["score"] = row["amount"] / (row["amount"] + 250.0)
    return row


# ── the two sides ─────────────────────────────────────────────────────────────────────────────────────────────────


def each(function: Callable[[pa.RecordBatch], pa.RecordBatch]) -> Callable[[Iterator[pa.RecordBatch]], Any]:
    """A batch function as mapInArrow wants it."""
    return lambda batches: map(function, batches)


def to_noop(rows: DataFrame, epoch: int) -> None:
    """Compute the rows and drop them."""
    rows.write.format("noop").mode("append").save()


def typed_durations(
    stream: DataFrame,
    epochs: int,
    conf: Mapping[str, str] | None = None,
    write: Callable[[DataFrame, int], None] = to_noop,
) -> list[float]:
    """Idiomatic PySpark: mapInArrow, repartition by key, mapInArrow. ``conf`` is set for this query only."""
    done = threading.Event()

    def on_batch(df: DataFrame, batch_id: int) -> None:
        if batch_id >= epochs:  # stopping a query inside a batch is another experiment
            done.set()
            return
        for key, value in (conf or {}).items():
            df.sparkSession.conf.set(key, value)
        scored = df.mapInArrow(each(score), SCORED)
        write(scored.repartition(CORES, "user").mapInArrow(each(weigh), RISK), batch_id)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint:
        query = stream.writeStream.option("checkpointLocation", checkpoint).foreachBatch(on_batch).start()
        while not done.wait(1):
            if (error := query.exception()) is not None:
                raise RuntimeError(str(error))
        durations = [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["batchId"] < epochs]
        query.stop()
    return durations


def batch_flow(stream: DataFrame, sink: NoopSink | FileSink) -> Flow:
    """The same work in midstream."""
    flow = Flow("pipeline")
    scored = flow.source("payments", stream).map_batches("score", score, returns=SCORED)
    scored.key_by("by user", "user").map_batches("weigh", weigh, returns=RISK).sink("out", sink)
    return flow


def row_flow(stream: DataFrame) -> Flow:
    """A row function on dicts."""
    flow = Flow("rows")
    flow.source("payments", stream).map("score", score_row, returns=SCORED).sink("out", NoopSink())
    return flow


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────


def alternate(spark: SparkSession, rows: int, size: Size, label: str) -> dict[str, list[float]]:
    """Durations (ms) of all sides, measured in turn so that none has the warmer machine."""
    found: dict[str, list[float]] = {"typed": [], "tuned": [], "midstream": []}
    for _ in track(range(1 + size.rounds), description=label):
        stream = payments_stream(spark, rows)
        found["typed"] += typed_durations(stream, size.epochs)[size.warm_up :]
        found["tuned"] += typed_durations(stream, size.epochs, BatchLimit.of(TYPICAL_ROW).conf())[size.warm_up :]
        found["midstream"] += midstream_durations(spark, batch_flow(stream, NoopSink()), size.epochs)[size.warm_up :]
    uncounted = size.epochs - size.warm_up
    return {side: durations[uncounted:] for side, durations in found.items()}


def alternate_files(spark: SparkSession, size: Size) -> dict[str, list[float]]:
    """Durations (ms) of both sides when they write Parquet files, in turn; what they wrote must be equal."""
    found: dict[str, list[float]] = {"tuned": [], "midstream": []}
    stream, conf = payments_stream(spark, size.rows), BatchLimit.of(TYPICAL_ROW).conf()
    for _ in track(range(1 + size.rounds), description="Parquet files"):
        with tempfile.TemporaryDirectory() as name:
            folders = {side: Path(name, side) for side in found}

            def to_files(rows: DataFrame, epoch: int, folder: Path = folders["tuned"]) -> None:
                rows.write.mode("overwrite").parquet(str(folder / f"epoch={epoch}"))

            ours = batch_flow(stream, FileSink(folders["midstream"]))
            found["tuned"] += typed_durations(stream, size.epochs, conf, to_files)[size.warm_up :]
            found["midstream"] += midstream_durations(spark, ours, size.epochs)[size.warm_up :]
            compare(folders["tuned"], folders["midstream"], size)
    uncounted = size.epochs - size.warm_up
    return {side: durations[uncounted:] for side, durations in found.items()}


def compare(theirs: Path, ours: Path, size: Size) -> None:
    """Raise unless both folders hold the same rows in every measured epoch."""
    for epoch in range(size.epochs):
        left, right = (epoch_rows(folder, epoch) for folder in (theirs, ours))
        if left.num_rows != size.rows or not left.equals(right):
            raise RuntimeError(
                f"epoch {epoch}: Spark wrote {left.num_rows} rows, midstream {right.num_rows}; they must be the "
                f"same {size.rows}"
            )


def epoch_rows(folder: Path, epoch: int) -> pa.Table:
    """One epoch's rows as written, in an order of their own; Spark writes timestamps in nanoseconds."""
    files = ds.dataset(folder, partitioning=ds.partitioning(pa.schema([("epoch", pa.int32())]), flavor="hive"))
    rows = files.to_table(filter=ds.field("epoch") == epoch)
    schema = pa.schema(
        [
            ("user", pa.int64()),
            ("merchant", pa.string()),
            ("amount", pa.float64()),
            ("due", pa.timestamp("us", "UTC")),
            ("score", pa.float64()),
            ("risk", pa.float64()),
        ]
    )
    due = rows["due"]
    if due.type.tz is None:
        rows = rows.set_column(rows.schema.get_field_index("due"), "due", due.cast(pa.timestamp("us")).cast(pa.int64()))
    rows = rows.select(schema.names).cast(schema)
    return rows.sort_by([(name, "ascending") for name in ("user", "amount", "merchant", "due", "score", "risk")])


def main() -> None:
    """Run the benchmark."""
    options = arguments(__doc__ or "").parse_args()
    size = QUICK if options.quick else FULL
    small = Size(rows=CORES, epochs=size.epochs * 3, warm_up=size.warm_up * 3, rounds=1)
    with session() as spark:
        sides = alternate(spark, size.rows, size, f"{size.rows:,} rows an epoch")
        empty = {
            side: statistics.median(ms) for side, ms in alternate(spark, small.rows, small, "empty epochs").items()
        }
        files = alternate_files(spark, QUICK_FILES if options.quick else FULL_FILES)
        by_row = midstream_durations(spark, row_flow(payments_stream(spark, size.rows)), size.epochs)[size.warm_up :]
    rate = {side: size.rows / statistics.median(durations) * 1000 for side, durations in sides.items()}
    file_rate = {side: size.rows / statistics.median(durations) * 1000 for side, durations in files.items()}
    figures = {
        "rows_per_epoch": size.rows,
        "typed_rows_per_s": round(rate["typed"]),
        "tuned_rows_per_s": round(rate["tuned"]),
        "midstream_rows_per_s": round(rate["midstream"]),
        "ratio": round(rate["midstream"] / rate["typed"], 2),
        "ratio_over_tuned": round(rate["midstream"] / rate["tuned"], 2),
        "tuned_file_rows_per_s": round(file_rate["tuned"]),
        "midstream_file_rows_per_s": round(file_rate["midstream"]),
        "file_ratio_over_tuned": round(file_rate["midstream"] / file_rate["tuned"], 2),
        "typed_empty_epoch_ms": empty["typed"],
        "midstream_empty_epoch_ms": empty["midstream"],
        "epoch_overhead_ratio": round(empty["midstream"] / empty["typed"], 3),
        "row_fn_rows_per_s": round(size.rows / statistics.median(by_row) * 1000),
    }
    table(
        f"two batch functions and an exchange, {size.rows:,} rows an epoch, {CORES} cores (medians)",
        ("", "typed PySpark", "the same, tuned", "midstream", "× typed", "wanted", "× tuned", "wanted"),
        [
            (
                "rows/s",
                *(f"{rate[side]:,.0f}" for side in ("typed", "tuned", "midstream")),
                f"{figures['ratio']}",
                "≥ 2",
                f"{figures['ratio_over_tuned']}",
                "≥ 1.3",
            ),
            (
                "Parquet files, rows/s",
                "",
                *(f"{file_rate[side]:,.0f}" for side in ("tuned", "midstream")),
                "",
                "",
                f"{figures['file_ratio_over_tuned']}",
                "≥ 1.5",
            ),
            (
                "empty epoch, ms",
                *(f"{empty[side]:.0f}" for side in ("typed", "tuned", "midstream")),
                f"{figures['epoch_overhead_ratio']}",
                "≤ 1.15",
                "",
                "",
            ),
            ("row function, rows/s", "", "", f"{figures['row_fn_rows_per_s']:,}", "", "≥ 300,000", "", ""),
        ],
    )
    if options.plot:
        plot(options.plot, sides, size.rows)
    closing_line("pipeline", figures, quick=options.quick)


def plot(path: Path, sides: Mapping[str, list[float]], rows: int) -> None:
    """Throughput of every epoch, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    for label, durations in sides.items():
        axes.plot([rows / ms / 1000 for ms in durations], marker="o", label=label)
    axes.set(xlabel="epoch", ylabel="million rows/s", title=f"two batch functions and an exchange, {CORES} cores")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
