"""Memory of a Python worker while an epoch grows: it must follow the slices, not the epoch.

Runs the pipeline of :mod:`benchmarks.pipeline` with ever larger epochs and watches the resident memory of all Python
workers of Spark.

    python -m benchmarks.memory [--quick] [--plot FILE]
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

from benchmarks.pipeline import batch_flow
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, payments_stream, session

FULL, QUICK = (1_000_000, 5_000_000, 20_000_000), (100_000, 400_000)
SAMPLE_S = 0.05
MB = 1 << 20


def worker_memory() -> list[int]:
    """Resident bytes of every Python worker below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("pyspark.daemon" in word for word in process.cmdline()):
                found.append(process.memory_info().rss)
        except psutil.Error:  # it ended while we looked
            continue
    return found


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Watch while the block runs; the list then holds the highest resident memory that any worker had."""
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
    """Run one epoch of so many rows; its seconds, and the peak of a worker's memory in bytes."""
    flow = batch_flow(payments_stream(spark, rows))
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint,
        peak_memory() as peak,
        flow.start(spark, checkpoint=checkpoint, partitions=CORES) as job,
    ):
        job.await_epoch(1)
        seconds = job.progress[0].duration_ms / 1000
    return seconds, peak[0]


def main() -> None:
    """Run the benchmark."""
    options = arguments(__doc__ or "").parse_args()
    sizes = QUICK if options.quick else FULL
    with session() as spark:
        epoch_of(spark, sizes[0])  # imports and first connections
        found = {rows: epoch_of(spark, rows) for rows in sizes}
    table(
        f"memory of a Python worker by rows in one epoch, {CORES} cores",
        ("rows in the epoch", "seconds", "peak of a worker, MB"),
        [(f"{rows:,}", f"{seconds:.1f}", f"{peak / MB:.0f}") for rows, (seconds, peak) in found.items()],
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
