"""Epochs that touch 10,000 keys while the state holds ever more: cost must follow what is touched, not what is kept.

For each size, a job first fills the state with that many keys, then another one goes on from its checkpoint and
counts rows of 10,000 of them in each epoch. The second job is also a restart: how long until its first epoch is
committed, with the workers' copies of state gone. Memory of a worker is split into what is its own (anonymous) and
pages of its copy of state that the kernel has in memory and takes back when it needs to (file).

    python -m benchmarks.state_growth [--quick] [--plot FILE]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.progress import Progress

from benchmarks.memory import MB
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, session
from midstream import Flow, NoopSink, agg

TOUCHED = 10_000


@dataclass(frozen=True)
class Size:
    """How many keys the state holds, and how many epochs are measured; the first ones are warm-up."""

    keys: tuple[int, ...]
    filled_at_once: int
    epochs: int
    warm_up: int


FULL = Size((100_000, 1_000_000, 10_000_000), filled_at_once=1_000_000, epochs=25, warm_up=5)
QUICK = Size((20_000, 60_000), filled_at_once=20_000, epochs=4, warm_up=1)


@dataclass(frozen=True)
class Measured:
    """What one size gave."""

    fill_s: float
    restart_s: float
    epoch_ms: float
    anonymous_mb: float
    file_mb: float


def counting(spark: SparkSession, rows: int, key: str) -> Flow:
    """Counts rows by key; ``key`` is an expression over the number of a row."""
    numbers: DataFrame = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", rows)
        .option("numPartitions", CORES)
        .load()
        .select(F.expr(key).alias("user"))
    )
    flow = Flow("growth")
    keyed = flow.source("events", numbers).key_by("by user", "user")
    keyed.aggregate("count", n=agg.count()).sink("out", NoopSink())
    return flow


def worker_pages() -> tuple[float, float]:
    """Megabytes of the largest Python worker below this process: its own, and pages of files."""
    largest = (0.0, 0.0)
    for process in psutil.Process().children(recursive=True):
        try:
            if not any("pyspark.daemon" in word for word in process.cmdline()):
                continue
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except (psutil.Error, OSError):  # it ended while we looked
            continue
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 / MB for line in lines if line.startswith("Rss")}
        largest = max(largest, (found["RssAnon"], found["RssFile"]))
    return largest


def measure(spark: SparkSession, keys: int, size: Size) -> Measured:
    """Fill, restart, measure."""
    at_once = min(size.filled_at_once, keys)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        began = time.perf_counter()
        filling = counting(spark, at_once, "value")
        # Each job has a copy of its own, as if it had been started on another machine.
        with filling.start(spark, checkpoint=f"{folder}/c", partitions=CORES, local_state=f"{folder}/filled") as job:
            job.await_epoch(keys // at_once)
        filled = time.perf_counter()
        flow = counting(spark, TOUCHED, f"value * 7919 % {keys}")
        with flow.start(spark, checkpoint=f"{folder}/c", partitions=CORES, local_state=f"{folder}/measured") as job:
            job.await_epoch(1)
            restarted = time.perf_counter()
            job.await_epoch(size.epochs)
            durations = [progress.duration_ms for progress in job.progress][size.warm_up : size.epochs]
            anonymous, file = worker_pages()
    return Measured(filled - began, restarted - filled, statistics.median(durations), anonymous, file)


def main() -> None:
    """Run the benchmark."""
    options = arguments(__doc__ or "").parse_args()
    size = QUICK if options.quick else FULL
    found: dict[int, Measured] = {}
    with session() as spark, Progress() as progress:
        steps = progress.add_task("growing state", total=1 + len(size.keys))
        measure(spark, size.keys[0], size)  # imports, first connections, the JVM's own warm-up
        progress.advance(steps)
        for keys in size.keys:
            found[keys] = measure(spark, keys, size)
            progress.advance(steps)
    smallest, largest = found[size.keys[0]], found[size.keys[-1]]
    figures = {
        "keys": list(size.keys),
        "touched": TOUCHED,
        "epoch_ms": [each.epoch_ms for each in found.values()],
        "growth_10m_over_100k": round(largest.epoch_ms / smallest.epoch_ms, 2),
        "rss_mb": [round(each.anonymous_mb) for each in found.values()],
        "rss_of_files_mb": [round(each.file_mb) for each in found.values()],
        "restart_s": [round(each.restart_s, 1) for each in found.values()],
        "fill_s": [round(each.fill_s, 1) for each in found.values()],
    }
    table(
        f"epochs that touch {TOUCHED:,} keys, {CORES} cores (medians)",
        ("keys in the state", "epoch, ms", "worker's own memory, MB", "mapped pages, MB", "restart, s"),
        [
            (f"{keys:,}", f"{m.epoch_ms:.0f}", f"{m.anonymous_mb:.0f}", f"{m.file_mb:.0f}", f"{m.restart_s:.1f}")
            for keys, m in found.items()
        ],
    )
    if options.plot:
        plot(options.plot, found)
    closing_line("state_growth", figures, quick=options.quick)


def plot(path: Path, found: dict[int, Measured]) -> None:
    """Epoch and memory by size of the state."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
    left.plot(list(found), [m.epoch_ms for m in found.values()], marker="o")
    left.set(xscale="log", xlabel="keys in the state", ylabel="epoch, ms", title=f"{TOUCHED:,} keys touched")
    right.plot(list(found), [m.anonymous_mb for m in found.values()], marker="o")
    right.set(xscale="log", xlabel="keys in the state", ylabel="MB", title="a worker's own memory")
    for axes in (left, right):
        axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
