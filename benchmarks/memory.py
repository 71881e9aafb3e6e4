"""Memory of a Python worker while an epoch grows: it must follow the slices, not the epoch.

Runs the pipeline of :mod:`benchmarks.pipeline` with ever larger epochs and watches the resident memory of all Python
workers of Spark, without what is mapped from files, which the kernel takes back when it needs it. Then three epochs
that are unlike those before: ``process`` touches a million keys, a backlog brings 100 times the usual rows, rows of
1 MB follow narrow ones.

    python -m benchmarks.memory [--quick] [--plot FILE]
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.pipeline import batch_flow
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, payments_stream, session
from midstream import Flow, NoopSink

FULL, QUICK = (1_000_000, 5_000_000, 20_000_000), (100_000, 400_000)
SAMPLE_S = 0.05
MB = 1 << 20
USUAL_EPOCHS = 3
WIDE = 1 << 20


def worker_memory() -> list[int]:
    """Resident bytes of every Python worker below this process, without those that are mapped from files."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("pyspark.daemon" in word for word in process.cmdline()):
                memory = process.memory_info()
                found.append(memory.rss - getattr(memory, "shared", 0))
        except psutil.Error:  # it ended while we looked
            continue
    return found


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Watch while the block runs; the list then holds the most memory of its own that any worker had."""
    over, peak = threading.Event(), [0]

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            peak[0] = max([peak[0], *worker_memory()])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def epoch_of(spark: SparkSession, rows: int) -> tuple[float, int]:
    """Run one epoch; returns its seconds, and the peak of a worker's memory in bytes."""
    flow = batch_flow(payments_stream(spark, rows), NoopSink())
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint,
        peak_memory() as peak,
        flow.start(spark, checkpoint=checkpoint, partitions=CORES) as job,
    ):
        job.await_epoch(1)
        seconds = job.progress[0].duration_ms / 1000
    return seconds, peak[0]


def count(key, row, state):  # type: ignore[no-untyped-def]
    """Count the rows of a key."""
    seen = state.get(0) + 1
    state.set(seen)
    return {"user": key, "seen": seen}


def keyed_flow(stream: DataFrame) -> Flow:
    """Touches as many keys as there are rows, up to 1,000,003."""
    flow = Flow("keys")
    keyed = flow.source("payments", stream).key_by("by user", "user")
    keyed.process("count", count, returns="user bigint, seen bigint").sink("out", NoopSink())
    return flow


def text_flow(stream: DataFrame) -> Flow:
    """Hands every row through an exchange, which copies it most often."""
    flow = Flow("texts")
    flow.source("texts", stream).key_by("by n", "n").filter("all", lambda row: True).sink("out", NoopSink())
    return flow


def changing_stream(spark: SparkSession, rows: int, *, copies: int = 1, width: int = 10) -> DataFrame:
    """``rows`` narrow rows in each usual epoch; then epochs of ``copies`` times as many, ``width`` bytes each."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", CORES)
    is_usual = F.col("value") < rows * USUAL_EPOCHS
    many = F.sequence(F.lit(1), F.when(is_usual, 1).otherwise(copies))
    text = F.repeat(F.lit("x"), F.when(is_usual, 10).otherwise(width)).alias("text")
    rows_of = source.load().select("value", text, F.explode(many).alias("copy"))
    return rows_of.select((F.col("value") * copies + F.col("copy")).alias("n"), "text")


def peak_of(spark: SparkSession, flow: Flow, epochs: int) -> int:
    """The peak of a worker's memory in bytes over some epochs."""
    with (
        tempfile.TemporaryDirectory() as checkpoint,
        peak_memory() as peak,
        flow.start(spark, checkpoint=checkpoint, partitions=CORES) as job,
    ):
        job.await_epoch(epochs)
    return peak[0]


def unusual_epochs(spark: SparkSession, *, quick: bool) -> dict[str, int]:
    """The peaks in MB of the three unusual epochs."""
    keys, usual, wide = (50_000, 1_000, 50) if quick else (1_000_000, 20_000, 500)
    flows = {
        "million_keys_mb": (keyed_flow(payments_stream(spark, keys)), 1),
        "backlog_mb": (text_flow(changing_stream(spark, usual, copies=100)), USUAL_EPOCHS + 1),
        "wide_rows_mb": (text_flow(changing_stream(spark, wide, width=WIDE)), USUAL_EPOCHS + 1),
    }
    return {name: round(peak_of(spark, flow, epochs) / MB) for name, (flow, epochs) in flows.items()}


def main() -> None:
    """Run the benchmark."""
    options = arguments(__doc__ or "").parse_args()
    sizes = QUICK if options.quick else FULL
    with session() as spark:
        epoch_of(spark, sizes[0])  # imports and first connections
        found = {rows: epoch_of(spark, rows) for rows in sizes}
    with session() as spark:  # with new workers: a process keeps what it once had
        unusual = unusual_epochs(spark, quick=options.quick)
    table(
        f"memory of a Python worker by rows in one epoch, {CORES} cores",
        ("rows in the epoch", "seconds", "peak of a worker, MB"),
        [(f"{rows:,}", f"{seconds:.1f}", f"{peak / MB:.0f}") for rows, (seconds, peak) in found.items()],
    )
    table(
        "peak of a worker in an unusual epoch, MB",
        ("epoch", "MB"),
        [
            ("process touches a million keys", str(unusual["million_keys_mb"])),
            ("100 times the usual rows", str(unusual["backlog_mb"])),
            ("rows of 1 MB after narrow ones", str(unusual["wide_rows_mb"])),
        ],
    )
    if options.plot:
        plot(options.plot, {rows: peak / MB for rows, (_, peak) in found.items()})
    peaks = [peak for _, peak in found.values()]
    closing_line(
        "memory",
        {
            "rows": list(sizes),
            "peak_mb": [round(peak / MB) for peak in peaks],
            "growth": round(peaks[-1] / peaks[0], 2),
            "seconds": [round(seconds, 2) for seconds, _ in found.values()],
            **unusual,
        },
        quick=options.quick,
    )


def plot(path: Path, peaks: dict[int, float]) -> None:
    """Peak memory by size of the epoch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot([rows / 1e6 for rows in peaks], list(peaks.values()), marker="o")
    axes.set(xlabel="million rows in one epoch", ylabel="peak memory of a worker, MB")
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
