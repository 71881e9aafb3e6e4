"""Skew: what hot keys cost, and what a job can do about them while it runs (Chi's figure 11c to e).

*Hot key*: rows are counted by key, of which all are equally frequent, or one has most of the rows: by `aggregate`,
which adds up before the exchange, and by `process`, which calls a function for each row, all of them in the partition
that owns the key. Epochs are compared with those of even keys.

*Hot bins*: of two partitions one owns the bins of nine rows in ten: one key has 30% of all rows, ten others 50%. The
job is rebalanced while it runs.

*Hot key of a join*: nine rows in ten of the left stream have one key, as all rows of the right stream do, and a
function is called for each pair. The key is divided while the job runs: both partitions share its rows.

Both are measured twice. With as many rows as the job can take, all epochs are of one size: so many rows, of so much
work, that a partition's work is several times what an epoch takes without rows, as in a job that is worth relieving.
Then with a constant load of 0.9 of that, where a row's latency is the commit of its epoch minus the time it was due.
At the end the counts of all keys, or the number of pairs, are compared with arithmetic. How much two partitions do at
the same time on this machine is measured in the same run: rows with even keys, in one partition and in two.

    python -m benchmarks.skew [--quick] [--only key,bins,join] [--plot FILE]
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.due_times import started_at
from benchmarks.relief import LOAD, Relieved, Size, Trial, relieved, under_full_load
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, midstream_durations, session
from benchmarks.word_load import work
from midstream import Divide, Flow, GeneratorSource, Job, NoopSink, State, Step, agg, tumbling
from midstream.checkpoint.inspection import read_state
from midstream.data.hashing import bins_of, hash_columns

EVEN = -1
"""In a pattern: the row has one of the keys that are equally frequent."""
HOT_KEY = {share: tuple([0] * share + [EVEN] * (10 - share)) for share in (0, 3, 9)}
"""By tenths of the rows: patterns with one hot key."""
PATIENCE_S = 180.0
STRIDE = 7_919
BINS_WORK, PAIR_WORK = 600, 120
"""Rounds of arithmetic for a row, and for a pair of rows: some 30 and 6 µs."""
RIGHT = 1_000
"""One row of the right stream for so many of the left one."""
PARTNERS = 10
"""Rows of the right stream in a window."""


@dataclass(frozen=True)
class Sizes:
    """Rows and keys of an epoch of cheap rows, seconds before epochs count, and how many count; and those of rows with
    work."""

    rows: int
    keys: int
    warm_up_s: int
    epochs: int
    bins: Size
    join: Size


FULL = Sizes(
    rows=100_000,
    keys=10_000,
    warm_up_s=5,
    epochs=15,
    bins=Size(rows=20_000, epochs=8, warm_up=4, calm_s=6, settle_s=7, measured_s=10),
    join=Size(rows=10_000, epochs=8, warm_up=4, calm_s=6, settle_s=7, measured_s=10),
)
_TINY = Size(rows=2_000, epochs=3, warm_up=1, calm_s=3, settle_s=1, measured_s=2)
QUICK = Sizes(rows=10_000, keys=1_000, warm_up_s=1, epochs=3, bins=_TINY, join=_TINY)


def users_of(index: npt.NDArray[np.int64], keys: int, pattern: Sequence[int]) -> npt.NDArray[np.int64]:
    """The keys of rows."""
    turn = np.array(pattern)[index % len(pattern)]
    return np.where(turn == EVEN, index * STRIDE % keys, turn)


def source(schedule: Step, column: str, keys: int, pattern: Sequence[int], limit: int | None) -> GeneratorSource:
    """Rows whose keys follow a pattern over and over."""

    def rows(index: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
        return {column: users_of(index, keys, pattern)}

    made, due = f"{column} bigint", f"{column}_at"
    return GeneratorSource(rows, made, schedule, time_column=due, partitions=CORES, max_rows_per_epoch=limit)


def stream(spark: SparkSession, sizes: Sizes, pattern: Sequence[int]) -> DataFrame:
    """As many rows in every epoch, made inside the JVM, whose keys follow a pattern over and over."""
    rate = spark.readStream.format("rate-micro-batch")
    rows = rate.option("rowsPerBatch", sizes.rows).option("numPartitions", CORES).load()
    value = F.col("value")
    turn = F.element_at(F.array(*(F.lit(key).cast("long") for key in pattern)), (value % len(pattern) + 1).cast("int"))
    return rows.select(F.when(turn == EVEN, value * STRIDE % sizes.keys).otherwise(turn).alias("user"))


def hot_bins(keys: int) -> tuple[int, ...]:
    """A pattern whose hot keys all have bins of the first of two partitions: one with 30% of the rows, ten with 5%."""
    users = pa.record_batch({"user": pa.array(range(keys), pa.int64())})
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


def hot_key(spark: SparkSession, sizes: Sizes) -> dict[str, dict[int, float]]:
    """By way of counting and tenths of rows with the hot key: the median epoch, in milliseconds."""

    def durations(how: str, pattern: Sequence[int]) -> list[float]:
        flow = counting(stream(spark, sizes, pattern), how)
        return midstream_durations(spark, flow, sizes.epochs, sizes.warm_up_s)

    durations("aggregate", HOT_KEY[0])  # the first job of a session warms up Spark
    return {
        how: {share: statistics.median(durations(how, pattern)) for share, pattern in HOT_KEY.items()}
        for how in ("aggregate", "process")
    }


# ── hot bins ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def worked(key: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    """A row more, and some work."""
    state.set(state.get(0) + 1)
    return {"user": key, "n": work(key, BINS_WORK)}


def working(keys: int, pattern: Sequence[int], schedule: Step, limit: int | None) -> Flow:
    """Rows counted by key, with some work for each."""
    flow = Flow("skew bins")
    rows = flow.source("rows", source(schedule, "user", keys, pattern, limit))
    counts = rows.key_by("by user", "user").process("count", worked, returns="user bigint, n bigint")
    counts.sink("out", NoopSink())
    return flow


def miscounted(keys: int, pattern: Sequence[int], job: Job, folder: str, schedule: Step) -> int:
    """By how much counts are not what arithmetic gives, in all."""
    state = read_state(folder, "count")
    found = dict(zip(state.column("user").to_pylist(), state.columns[-1].cast(pa.int64()).to_pylist(), strict=True))
    users, counts = np.unique(
        users_of(np.arange(job.metrics.rows_in, dtype=np.int64), keys, pattern), return_counts=True
    )
    wanted = dict(zip(users.tolist(), counts.tolist(), strict=True))
    return sum(abs(found.get(key, 0) - wanted.get(key, 0)) for key in found.keys() | wanted.keys())


def bins_trial(sizes: Sizes, pattern: Sequence[int], partitions: int = CORES) -> Trial:
    """Rows counted by key, whose bins are given other owners."""
    keys = sizes.keys
    return Trial(
        flow=lambda schedule, limit: working(keys, pattern, schedule, limit),
        relieve=lambda job: job.rebalance(measure="rows").require(PATIENCE_S),
        errors=partial(miscounted, keys, pattern),
        partitions=partitions,
        rows_per_s=20_000,
    )


# ── a hot key of a join ───────────────────────────────────────────────────────────────────────────────────────────────


def rated(row: dict[str, Any]) -> dict[str, Any]:
    """What a pair is worth."""
    return {"viewer": row["viewer"], "value": work(row["viewer"], PAIR_WORK)}


def slower(schedule: Step) -> Step:
    """The schedule of the right stream."""
    return Step(tuple((at, rate / RIGHT) for at, rate in schedule.steps))


def window_us(schedule: Step) -> int:
    """The length of a window in which so many rows of the right stream come."""
    return max(1, round(PARTNERS * RIGHT / schedule.steps[-1][1] * 1000)) * 1000


def joining(keys: int, schedule: Step, limit: int | None) -> Flow:
    """Pairs of rows in windows, and a function for each."""
    flow, more = Flow("skew join"), None if limit is None else limit // RIGHT
    left = source(schedule, "viewer", keys, HOT_KEY[9], limit)
    right = source(slower(schedule), "payer", keys, (0,), more)
    viewers = flow.source("views", left).key_by("by viewer", "viewer")
    payers = flow.source("payments", right).key_by("by payer", "payer")
    pairs = viewers.join("both", payers, window=tumbling(f"{window_us(schedule) // 1000} ms"))
    pairs.map("rate", rated, returns="viewer bigint, value bigint").sink("out", NoopSink())
    return flow


def mispaired(keys: int, job: Job, folder: str, schedule: Step) -> int:
    """By how many pairs a job has given others than arithmetic does."""
    stats = {each.operator: each for each in job.metrics.operators}
    sides = []
    for name, times, pattern, start in zip(
        ("views", "payments"), (schedule, slower(schedule)), (HOT_KEY[9], (0,)), started_at(folder), strict=True
    ):
        index = np.arange(stats[name].rows_out, dtype=np.int64)
        windows = (start + times.time_of(index)) // window_us(schedule)
        sides.append(Counter(windows[users_of(index, keys, pattern) == 0].tolist()))
    views, payments = sides
    return abs(stats["both"].rows_out - sum(count * views[window] for window, count in payments.items()))


def join_trial(sizes: Sizes) -> Trial:
    """A join whose hot key is divided."""
    return Trial(
        flow=lambda schedule, limit: joining(sizes.keys, schedule, limit),
        relieve=lambda job: job.migrate(Divide("both", {"viewer": 0}, into=CORES), strategy="sudden").require(
            PATIENCE_S
        ),
        errors=partial(mispaired, sizes.keys),
        partitions=CORES,
        rows_per_s=10_000,
        share=1 + 1 / RIGHT,
    )


# ── the report ────────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="key,bins,join", help="the parts")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - {"key", "bins", "join"}:
        parser.error(f"--only: there is no part {', '.join(sorted(unknown))}; allowed: key, bins, join")
    sizes = QUICK if options.quick else FULL

    def tell(line: str) -> None:
        print(line, flush=True)

    figures: dict[str, Any] = {}
    hot: dict[str, dict[int, float]] = {}
    jobs: dict[str, Relieved] = {}
    with session() as spark:
        if "key" in parts:
            hot = hot_key(spark, sizes)
            figures |= {f"{how}_hot_ratio": round(found[9] / found[0], 2) for how, found in hot.items()}
        if "bins" in parts:
            figures |= parallel(spark, sizes)
            tell(f"two partitions against one: {figures}")
            jobs["rebalanced"] = relieved(spark, bins_trial(sizes, hot_bins(sizes.keys)), sizes.bins, tell)
            figures |= _figures(jobs["rebalanced"], "")
        if "join" in parts:
            jobs["divided"] = relieved(spark, join_trial(sizes), sizes.join, tell)
            figures |= _figures(jobs["divided"], "join_")
    if hot:
        table(
            f"{sizes.rows:,} cheap rows an epoch, {CORES} partitions: median epoch by the share of one key",
            ("", *(f"{10 * share}%" for share in HOT_KEY), "90% against none"),
            [
                (how, *(f"{ms:,.0f} ms" for ms in found.values()), f"{found[9] / found[0]:.2f}")
                for how, found in hot.items()
            ],
        )
    _tables(jobs)
    if options.plot:
        _plot(options.plot, hot, jobs)
    figures |= {"wrong": sum(each.wrong for each in jobs.values()), "epoch_ms": hot}
    closing_line("skew", figures, quick=options.quick)


def parallel(spark: SparkSession, sizes: Sizes) -> dict[str, float]:
    """How much shorter epochs with work are, and the stage that does it, with two partitions instead of one."""
    one, two = (under_full_load(spark, bins_trial(sizes, (EVEN,), partitions), sizes.bins) for partitions in (1, CORES))
    return {
        "two_over_one": round(two.rows_per_s / one.rows_per_s, 2),
        "two_over_one_stage": round(one.stage_ms / two.stage_ms, 2),
    }


def _figures(job: Relieved, prefix: str) -> dict[str, float]:
    before, after = job.full
    return {
        f"{prefix}imbalance_before": before.imbalance,
        f"{prefix}imbalance_after": after.imbalance,
        f"{prefix}epoch_ms_before": round(before.epoch_ms),
        f"{prefix}epoch_ms_after": round(after.epoch_ms),
        f"{prefix}stage_ms_before": round(before.stage_ms),
        f"{prefix}stage_ms_after": round(after.stage_ms),
        f"{prefix}throughput_gain": round(job.throughput_gain, 2),
        f"{prefix}load_rows_per_s": round(job.load_rows_per_s),
        f"{prefix}latency_change": round(job.latency_change(), 2),
        f"{prefix}latency_change_p99": round(job.latency_change(0.99), 2),
    }


def _tables(jobs: dict[str, Relieved]) -> None:
    for name, job in jobs.items():
        table(
            f"{name}: full load, and {job.load_rows_per_s:,.0f} rows/s ({LOAD:g} of what was taken before)",
            ("", "busier partition / mean", "epoch", "of which stage", "rows/s", "mean latency", "p99"),
            [
                (
                    when,
                    f"{each.imbalance}",
                    f"{each.epoch_ms:,.0f} ms",
                    f"{each.stage_ms:,.0f} ms",
                    f"{each.rows_per_s:,.0f}",
                    f"{1000 * job.latency(seen):,.0f} ms",
                    f"{1000 * job.latency(seen, 0.99):,.0f} ms",
                )
                for when, each, seen in zip(("before", name), job.full, job.constant, strict=True)
            ],
        )


def _plot(path: Path, hot: dict[str, dict[int, float]], jobs: dict[str, Relieved]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    count = bool(hot) + 2 * bool(jobs)
    figure, grid = plt.subplots(1, count, figsize=(4.7 * count, 4), squeeze=False)
    right, last = grid[0][-2:] if jobs else (None, None)
    if hot:
        left = grid[0][0]
        for how, found in hot.items():
            left.plot([10 * share for share in found], [ms / found[0] for ms in found.values()], "o-", label=how)
        left.set(xlabel="% of rows with one key", ylabel="median epoch, against even keys", ylim=(0, None))
        left.grid(alpha=0.3)
        left.legend()
    titles = {"rebalanced": "hot bins, rebalanced", "divided": "hot key of a join, divided"}
    panels: tuple[tuple[Any, str, Callable[[Relieved], list[float]]], ...] = (
        (right, "thousand rows/s, full load", lambda job: [each.rows_per_s / 1000 for each in job.full]),
        (
            last,
            f"mean latency at {LOAD:g} of the load before, s",
            lambda job: [job.latency(each) for each in job.constant],
        ),
    )
    for axes, label, values in panels if jobs else ():
        for place, job in enumerate(jobs.values()):
            before, after = values(job)
            axes.bar([place - 0.2], [before], 0.36, color="#999999")
            bars = axes.bar([place + 0.2], [after], 0.36, color="#2255aa")
            axes.bar_label(bars, [f"{after / before - 1:+.0%}"], padding=3)
        axes.set_xticks(range(len(jobs)), [titles[name] for name in jobs])
        axes.set_ylabel(label)
        axes.margins(y=0.15)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
