"""Skew: what hot keys cost, and what a job can do about them while it runs (Chi's figure 11c to e).

*Hot key*: rows are counted by key, of which all are equally frequent, or one has most of the rows: by `aggregate`,
which adds up before the exchange, and by `process`, which calls a function for each row, all of them in the partition
that owns the key. Epochs are compared with those of even keys.

*Hot bins*: of two partitions one owns the bins of nine rows in ten: one key has 30% of all rows, ten others 50%. The
job is rebalanced while it runs, and the rows of its partitions, its epochs and its throughput are compared before and
after. At the end the counts of all keys are compared with arithmetic.

*Hot key of a join*: nine rows in ten of the left stream have one key, as all rows of the right stream do, and a
function is called for each pair. The key is divided while the job runs: both partitions share its rows. Every epoch has
the same rows, so it must give the same number of pairs before and after.

    python -m benchmarks.skew [--quick] [--rows ROWS] [--plot FILE]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, midstream_durations, session
from midstream import Divide, Flow, Job, NoopSink, State, agg, tumbling
from midstream.checkpoint.inspection import read_state
from midstream.data.hashing import bins_of, hash_columns

EVEN = -1
"""In a pattern: the row has one of the keys that are equally frequent."""
HOT_KEY = {share: tuple([0] * share + [EVEN] * (10 - share)) for share in (0, 3, 9)}
"""By tenths of the rows: patterns with one hot key."""
PATIENCE_S = 180.0
RIGHT_ROWS = 10
"""Rows of the right stream in an epoch of the join."""
STRIDE = 7_919


@dataclass(frozen=True)
class Size:
    """Rows and keys of an epoch, seconds before epochs count, and how many count."""

    rows: int
    keys: int
    warm_up_s: int
    epochs: int


FULL = Size(rows=100_000, keys=10_000, warm_up_s=10, epochs=20)
QUICK = Size(rows=10_000, keys=1_000, warm_up_s=1, epochs=3)


def stream(spark: SparkSession, size: Size, pattern: Sequence[int], time: str | None = None) -> DataFrame:
    """As many rows in every epoch, made inside the JVM, whose keys follow a pattern over and over. With ``time``, a
    column of that name has the second of the epoch."""
    source = spark.readStream.format("rate-micro-batch")
    rows = source.option("rowsPerBatch", size.rows).option("numPartitions", CORES).load()
    value = F.col("value")
    turn = F.element_at(F.array(*(F.lit(key).cast("long") for key in pattern)), (value % len(pattern) + 1).cast("int"))
    times = [] if time is None else [F.col("timestamp").alias(time)]
    return rows.select(F.when(turn == EVEN, value * STRIDE % size.keys).otherwise(turn).alias("user"), *times)


def counts_of(total: int, size: Size, pattern: Sequence[int]) -> dict[int, int]:
    """What the first rows make."""
    value = np.arange(total, dtype=np.int64)
    turn = np.array(pattern)[value % len(pattern)]
    users, counts = np.unique(np.where(turn == EVEN, value * STRIDE % size.keys, turn), return_counts=True)
    return dict(zip(users.tolist(), counts.tolist(), strict=True))


def hot_bins(size: Size) -> tuple[int, ...]:
    """A pattern whose hot keys all have bins of the first of two partitions: one with 30% of the rows, ten with 5%."""
    users = pa.record_batch({"user": pa.array(range(size.keys), pa.int64())})
    bins = bins_of(hash_columns(users, ("user",)))
    first, seen = [], set()
    for user, number in enumerate(bins.tolist()):
        if number % CORES == 0 and number not in seen:
            seen.add(number)
            first.append(user)
    hottest, *others = first[:11]
    return (*[hottest] * 6, *others, *[EVEN] * 4)


def count(key: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    """A row more."""
    n = state.get(0) + 1
    state.set(n)
    return {"user": key, "n": n}


def counting(rows: DataFrame, how: str) -> Flow:
    """Rows counted by key."""
    flow = Flow(f"skew {how}")
    keyed = flow.source("rows", rows).key_by("by user", "user")
    counts = (
        keyed.aggregate("count", n=agg.count())
        if how == "aggregate"
        else keyed.process("count", count, returns="user bigint, n bigint")
    )
    counts.sink("out", NoopSink())
    return flow


# ── a hot key ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def hot_key(spark: SparkSession, size: Size) -> dict[str, dict[int, float]]:
    """By way of counting and tenths of rows with the hot key: the median epoch, in milliseconds."""
    cold = counting(stream(spark, size, HOT_KEY[0]), "aggregate")
    midstream_durations(spark, cold, size.epochs, size.warm_up_s)  # the first job of a session warms up Spark
    return {
        how: {
            share: statistics.median(
                midstream_durations(spark, counting(stream(spark, size, pattern), how), size.epochs, size.warm_up_s)
            )
            for share, pattern in HOT_KEY.items()
        }
        for how in ("aggregate", "process")
    }


# ── hot bins ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Phase:
    """What was seen before, or after, bins were moved."""

    imbalance: float
    """Rows of the busier partition over the mean of both."""
    epoch_ms: float
    rows_per_s: float


@dataclass(frozen=True)
class Rebalanced:
    """A job with hot bins, before and after it was rebalanced."""

    before: Phase
    after: Phase
    wrong: int
    """Counts that are not what arithmetic gives, by how much in all."""


def rebalanced(spark: SparkSession, size: Size) -> Rebalanced:
    """Run, rebalance, run on, stop, and count."""
    pattern = hot_bins(size)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flow = counting(stream(spark, size, pattern), "process")
        with flow.start(spark, checkpoint=folder, partitions=CORES) as job:
            before = _phase(job, size)
            job.rebalance(measure="rows").require(PATIENCE_S)
            after = _phase(job, size)
        state = read_state(folder, "count")
        users, found = state.column("user").to_pylist(), state.columns[-1].cast(pa.int64()).to_pylist()
        total = sum(found)
        wanted = counts_of(total, size, pattern)
        counted = dict(zip(users, found, strict=True))
        wrong = sum(abs(counted.get(key, 0) - wanted.get(key, 0)) for key in counted.keys() | wanted.keys())
        wrong += total % size.rows  # epochs are whole
        return Rebalanced(before, after, wrong)


def _phase(job: Job, size: Size) -> Phase:
    job.await_epoch(job.progress[-1].epoch + 2 if job.progress else 2, PATIENCE_S)
    began = job.progress[-1].epoch
    job.await_epoch(began + max(size.epochs, 3 * size.warm_up_s), PATIENCE_S)
    seen = [each for each in job.progress if each.epoch > began][-size.epochs :]
    epoch_ms = statistics.median(each.duration_ms for each in seen)
    [shares] = job.assignment()
    rows = [share.rows_per_s for share in shares.partitions]
    return Phase(round(max(rows) * len(rows) / sum(rows), 2), epoch_ms, size.rows / epoch_ms * 1000)


# ── a hot key of a join ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Divided:
    """A join with a hot key, before and after it was divided."""

    before: Phase
    after: Phase
    wrong: int
    """By how many pairs epochs differ, in all."""


def divided(spark: SparkSession, size: Size) -> Divided:
    """Run, divide, and run on."""
    left = stream(spark, size, HOT_KEY[9], "viewed_at").withColumnRenamed("user", "viewer")
    right = stream(spark, replace(size, rows=RIGHT_ROWS), (0,), "paid_at")
    flow = Flow("skew join")
    viewers = flow.source("views", left, event_time="viewed_at").key_by("by viewer", "viewer")
    payers = flow.source("payments", right, event_time="paid_at").key_by("by payer", "user")
    pairs = viewers.join("both", payers, window=tumbling("1 second"))
    pairs.map("rate", rated, returns="viewer bigint, value bigint").sink("out", NoopSink())
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        flow.start(spark, checkpoint=folder, partitions=CORES) as job,
    ):
        before, counts = _phase(job, size), _pairs(job)
        job.migrate(Divide("both", {"viewer": 0}, into=CORES), strategy="sudden").require(PATIENCE_S)
        after = _phase(job, size)
        counts += _pairs(job)
    usual = statistics.mode(counts)
    return Divided(before, after, sum(abs(count - usual) for count in counts))


def rated(row: dict[str, Any]) -> dict[str, Any]:
    """What a pair is worth."""
    return {"viewer": row["viewer"], "value": row["viewer"] * 31 % 7}


def _pairs(job: Job) -> list[int]:
    """The pairs of the newest epochs."""
    return [each.rows_out for each in job.progress if each.epoch > 0][-10:]


# ── the report ────────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, help="rows of an epoch")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    size = replace(size, rows=options.rows or size.rows)
    with session() as spark:
        hot = hot_key(spark, size)
        moved = rebalanced(spark, size)
        shared = divided(spark, replace(size, rows=size.rows // 10))
    table(
        f"{size.rows:,} rows an epoch, {CORES} partitions: median epoch by the share of one key",
        ("", *(f"{10 * share}%" for share in HOT_KEY), "90% against none"),
        [
            (how, *(f"{ms:,.0f} ms" for ms in found.values()), f"{found[9] / found[0]:.2f}")
            for how, found in hot.items()
        ],
    )
    table(
        "process, nine rows in ten for the bins of one of two partitions; one key has 30%",
        ("", "busier partition / mean", "epoch", "rows/s"),
        [
            (name, f"{each.imbalance}", f"{each.epoch_ms:,.0f} ms", f"{each.rows_per_s:,.0f}")
            for name, each in (("before", moved.before), ("rebalanced", moved.after))
        ],
    )
    table(
        "join, nine rows in ten have one key",
        ("", "busier partition / mean", "epoch", "left rows/s"),
        [
            (name, f"{each.imbalance}", f"{each.epoch_ms:,.0f} ms", f"{each.rows_per_s:,.0f}")
            for name, each in (("before", shared.before), ("divided", shared.after))
        ],
    )
    if options.plot:
        _plot(options.plot, hot, moved, shared)
    figures = {
        "rows_per_epoch": size.rows,
        "aggregate_hot_ratio": round(hot["aggregate"][9] / hot["aggregate"][0], 2),
        "process_hot_ratio": round(hot["process"][9] / hot["process"][0], 2),
        "imbalance_before": moved.before.imbalance,
        "imbalance_after": moved.after.imbalance,
        "throughput_gain": round(moved.after.rows_per_s / moved.before.rows_per_s - 1, 2),
        "latency_change": round(moved.after.epoch_ms / moved.before.epoch_ms - 1, 2),
        "join_throughput_gain": round(shared.after.rows_per_s / shared.before.rows_per_s - 1, 2),
        "join_latency_change": round(shared.after.epoch_ms / shared.before.epoch_ms - 1, 2),
        "wrong": moved.wrong + shared.wrong,
        "divided_keys": 1,
        "epoch_ms": hot,
    }
    closing_line("skew", figures, quick=options.quick)


def _plot(path: Path, hot: dict[str, dict[int, float]], moved: Rebalanced, shared: Divided) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right, last) = plt.subplots(1, 3, figsize=(14, 4))
    for how, found in hot.items():
        left.plot([10 * share for share in found], [ms / found[0] for ms in found.values()], "o-", label=how)
    left.set(xlabel="% of rows with one key", ylabel="median epoch, against even keys", ylim=(0, None))
    left.legend()
    left.grid(alpha=0.3)
    phases = (moved.before, moved.after)
    bars = right.bar(
        ["before", "rebalanced"], [each.rows_per_s / 1000 for each in phases], color=["#999999", "#2255aa"]
    )
    right.bar_label(bars, [f"busier: {each.imbalance} × mean" for each in phases], padding=3)
    right.set(ylabel="thousand rows/s", title="process, hot bins in one of two partitions")
    right.margins(y=0.15)
    joined = (shared.before, shared.after)
    bars = last.bar(["before", "divided"], [each.rows_per_s / 1000 for each in joined], color=["#999999", "#2255aa"])
    last.bar_label(bars, [f"{each.epoch_ms:,.0f} ms an epoch" for each in joined], padding=3)
    last.set(ylabel="thousand left rows/s", title="join, 90% of the left rows have one key")
    last.margins(y=0.15)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
