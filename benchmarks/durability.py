"""The cost for an epoch of surviving a loss of power: small epochs, with syncing and without, in turns.

The flow keeps state in two operators, so that an epoch writes a manifest and, with each task, two files of state. Its
epochs are small: what syncing adds does not depend on the rows, so this is where it weighs most. The checkpoint lies in
``--folder``, on the disk that is to be measured.

    python -m benchmarks.durability [--quick] [--folder DIR]
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.progress import Progress

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, session
from midstream import Flow, NoopSink, agg

ROWS, KEYS = 1_000, 500


@dataclass(frozen=True)
class Size:
    """How many times both ways are run, and how many epochs are measured; the first ones are warm-up."""

    rounds: int
    epochs: int
    warm_up: int


FULL = Size(rounds=6, epochs=24, warm_up=4)
QUICK = Size(rounds=2, epochs=6, warm_up=2)


def counting(spark: SparkSession) -> Flow:
    """Two operators with state behind one exchange."""
    numbers = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", ROWS)
        .option("numPartitions", CORES)
        .load()
        .select(F.expr(f"value * 7919 % {KEYS}").alias("user"), F.col("value").alias("n"))
    )
    flow = Flow("durability")
    keyed = flow.source("events", numbers).key_by("by user", "user")
    keyed.aggregate("count", n=agg.count()).sink("counts", NoopSink())
    keyed.aggregate("total", n=agg.sum("n")).sink("totals", NoopSink())
    return flow


def measure(spark: SparkSession, size: Size, folder: str | None, durable: bool) -> float:
    """The median of an epoch, in milliseconds."""
    with (
        tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as checkpoint,
        counting(spark).start(spark, checkpoint=f"{checkpoint}/c", partitions=CORES, durable=durable) as job,
    ):
        job.await_epoch(size.epochs)
        return statistics.median(progress.duration_ms for progress in job.progress[size.warm_up : size.epochs])


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--folder", help="where checkpoints are made (default: the system's folder for such things)")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    found: dict[bool, list[float]] = {True: [], False: []}
    with session() as spark, Progress() as progress:
        steps = progress.add_task("losing no power", total=1 + 2 * size.rounds)
        measure(spark, size, options.folder, durable=True)  # imports, first connections, the JVM's own warm-up
        progress.advance(steps)
        for turn in range(size.rounds):
            for durable in (True, False) if turn % 2 else (False, True):
                found[durable].append(measure(spark, size, options.folder, durable))
                progress.advance(steps)
    added = [on - off for on, off in zip(found[True], found[False], strict=True)]
    table(
        f"epochs of {ROWS:,} rows, {CORES} cores (medians of {size.rounds} rounds)",
        ("", "epoch, ms"),
        [
            ("durable", f"{statistics.median(found[True]):.1f}"),
            ("not durable", f"{statistics.median(found[False]):.1f}"),
            ("added", f"{statistics.median(added):.1f}"),
        ],
    )
    figures = {
        "durable_ms": round(statistics.median(found[True]), 1),
        "not_durable_ms": round(statistics.median(found[False]), 1),
        "added_ms": round(statistics.median(added), 1),
        "added_ms_by_round": [round(each, 1) for each in added],
    }
    closing_line("durability", figures, quick=options.quick)


if __name__ == "__main__":
    main()
