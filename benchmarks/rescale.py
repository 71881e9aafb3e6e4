"""A job gets more partitions and executors, and fewer, under load; and an executor is drained.

Words are counted on a cluster of executors on this machine, each a process with state of its own, while rows are due at
a constant rate.

- 2 → 4 → 1 partitions and executors, live; and Spark's own way in the same run, with as many keys and at the same rate:
  stop, rewrite the state offline, start (:mod:`benchmarks.spark_words`).
- One of five executors, with a fifth of the state, is drained, at two sizes; and half of its bins at the larger size.
  That shows whether time follows the bytes that move, or the state. It tells what executors need of memory and disk.

A row's latency is the commit of its epoch minus the time it was due. At the end every key's count is compared with what
the rows that were committed make by arithmetic.

    python -m benchmarks.rescale [--quick] [--keys KEYS] [--plot FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.draining import Drained, drained
from benchmarks.due_times import Latencies, Timeline, first_due
from benchmarks.executors import ExecutorFigures, figures_of, resize
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import cluster
from benchmarks.spark_words import SparkWords
from benchmarks.word_load import (
    STAGE,
    Load,
    Patience,
    checked_keys,
    fill,
    filling,
    flow,
    loading,
    source,
    state_errors,
)
from midstream import Flow, Move, Step
from midstream.runtime.spark.live_executors import live_executors

EXECUTORS = 5
SHAPES = (2, 4, 1)
"""Partitions and executors, one after the other."""
LOAD = 0.3
"""The share of the capacity of the first shape that is due."""
WARM_UP = 8
"""Epochs after a start that do not count."""
SETTLED = 8
"""Epochs after which an executor has freed what it no longer owns."""


@dataclass(frozen=True)
class Size:
    """Keys, bins, rows of an epoch while keys are loaded, how many such epochs tell the capacity; how often an executor
    is drained at once."""

    keys: int
    bins: int
    chunk: int
    chunks: int
    repeat: int
    patience: Patience


FULL = Size(4_000_000, 256, 500_000, 5, 3, Patience(25, 10.0, 10, 90.0))
QUICK = Size(40_000, 32, 20_000, 3, 1, Patience(8, 1.0, 2, 5.0))


@dataclass(frozen=True)
class Event:
    """A change of shape under load. Seconds."""

    steady: Latencies
    during: Latencies
    requested: float
    stable_s: float | None
    steady_gap_s: float
    """The median time from commit to commit, before."""
    longest_gap_s: float
    """The longest one from the request until rows were served as before."""
    parts: dict[str, float]
    """What its duration is made of."""
    executors_s: float
    """How long Spark needed to start or end executors, besides."""
    moved_bytes: int | None = None

    @property
    def pause_s(self) -> float:
        """How much longer than usual there was no commit."""
        return max(1e-3, self.longest_gap_s - self.steady_gap_s)

    def figures(self) -> dict[str, Any]:
        """For programs."""
        return {
            **{f"steady_p{share}_ms": _ms(self.steady.quantile(share / 100)) for share in (50, 99)},
            **{f"p{share}_ms": _ms(self.during.quantile(share / 100)) for share in (50, 99)},
            "steady_max_ms": _ms(self.steady.max()),
            "max_ms": _ms(self.during.max()),
            "steady_gap_ms": _ms(self.steady_gap_s),
            "longest_gap_ms": _ms(self.longest_gap_s),
            "pause_ms": _ms(self.pause_s),
            "stable_again_s": None if self.stable_s is None else round(self.stable_s, 2),
            "duration_s": round(sum(self.parts.values()), 3),
            "parts_s": self.parts,
            "executors_s": round(self.executors_s, 2),
            "bytes": self.moved_bytes,
        }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


@dataclass(frozen=True)
class Side:
    """What one of the two did."""

    events: dict[str, Event]
    rows: int
    lost: int
    doubled: int
    shapes: dict[str, dict[str, ExecutorFigures]]
    """By number of executors: what each needs."""


# ── live ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def ours(spark: SparkSession, size: Size, tell: Callable[[str], None]) -> tuple[Side, float]:
    """All shapes on one checkpoint, without a stop; also the rate that was due."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        timeline, rows = Timeline(), size.keys + size.chunk * size.chunks

        def words(load: Step, limit: int | None = None) -> Flow:
            return flow(source(size.keys, load, limit=limit, chunk=limit and size.chunk), "rescale")

        fill(spark, folder, words(filling(rows), rows), timeline, partitions=SHAPES[0], bins=size.bins)
        ends = [at for _, at in timeline.ends.values()][-size.chunks :]
        start_us, rate = first_due(folder), round(LOAD * size.chunk / statistics.median(np.diff(ends)))
        tell(f"{size.keys:,} keys are loaded; {rate:,} rows/s are due")
        schedule = loading(rows, start_us, rate)
        events, shapes = dict[str, Event](), dict[str, dict[str, ExecutorFigures]]()
        with words(schedule).start(spark, checkpoint=folder, partitions=SHAPES[0]) as job:
            load = Load(job, timeline, schedule, start_us)
            load.follow(lambda: timeline.rows > rows)
            load.epochs(WARM_UP)
            shapes[str(SHAPES[0])] = _figures(load)
            for before, after in pairwise(SHAPES):
                name = f"{before} → {after}"
                events[name] = _rescaled(spark, load, after, size.patience)
                load.epochs(SETTLED)
                shapes[str(after)] = _figures(load)
                tell(f"{name}: {events[name].figures()}")
        timeline.add(job.progress)
        lost, doubled = state_errors(folder, size.keys, timeline.rows)
    return Side(events, timeline.rows, lost, doubled, shapes), rate


def _rescaled(spark: SparkSession, load: Load, partitions: int, patience: Patience) -> Event:
    """More executors come before their partitions; those that are too many go when they own nothing.

    A single partition sticks to no executor, so it is made when there is only one left.
    """
    started_s = resize(spark, partitions) if partitions > len(live_executors(spark)) else 0.0
    steady, timeline = load.steady(patience), load.timeline
    first, steady_gap = len(timeline.ends), float(np.median(timeline.gaps(len(timeline.ends) - patience.steady)))
    requested, ended_s = time.time(), 0.0
    migration = load.job.migrate(_gathered(load)) if partitions == 1 else load.job.rescale(partitions)
    accepted = time.time()
    ended = load.end_of(migration)
    if partitions == 1:
        load.epochs(SETTLED)
        ended_s = resize(spark, 1, {_owner_place(load)})
        began_anew = time.time()
        ended += load.end_of(load.job.rescale(1, strategy="sudden")) - began_anew
    began = timeline.ends[migration.steps[0].epoch][1] - migration.steps[0].epoch_ms / 1000
    during, stable = load.settle(patience, first, requested, steady)
    gaps = timeline.gaps(first)
    parts = {
        "submit": round(accepted - requested, 3),
        "wait": round(max(0.0, began - accepted), 3),
        "transfer": round(ended - max(began, accepted), 3),
    }
    return Event(
        steady,
        during,
        requested,
        stable,
        steady_gap,
        float(gaps.max()),
        parts,
        started_s + ended_s,
        migration.progress.bytes_done,
    )


def _gathered(load: Load) -> Move:
    """All bins come to the partition that has most of them already."""
    [stage] = load.job.assignment()
    taker = max(stage.partitions, key=lambda each: each.bins).partition
    return Move({number: taker for number, owner in enumerate(stage.owners) if owner != taker}, STAGE)


def _owner_place(load: Load) -> str:
    """The executor of the partition that has all bins."""
    [stage] = load.job.assignment()
    place = max(stage.partitions, key=lambda each: each.bins).executor
    if place is None:
        raise RuntimeError("it is not known where partitions run")
    return place


def _figures(load: Load) -> dict[str, ExecutorFigures]:
    return figures_of(load.job.id, {each.name: sum(each.bins.values()) for each in load.job.executors})


# ── Spark's own way ───────────────────────────────────────────────────────────────────────────────────────────────


def rival(spark: SparkSession, size: Size, rate: float, tell: Callable[[str], None]) -> Side:
    """The same shapes, each after a stop."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = SparkWords(spark, folder, size.keys, size.chunk, SHAPES[0])
        rows = size.keys + size.chunk * size.chunks
        words.fill(filling(rows), rows)
        start_us = first_due(folder)
        tell(f"Spark has loaded {size.keys:,} keys")
        schedule, events = loading(rows, start_us, rate), dict[str, Event]()
        words.start(schedule)
        words.follow(lambda: words.timeline.rows > rows)
        words.epochs(WARM_UP)
        for before, after in pairwise(SHAPES):
            name = f"{before} → {after}"
            events[name] = _repartitioned(words, schedule, start_us, after, size.patience)
            tell(f"Spark, {name}: {events[name].figures()}")
        words.stop()
        lost, doubled = words.errors()
    return Side(events, words.timeline.rows, lost, doubled, {})


def _repartitioned(words: SparkWords, schedule: Step, start_us: int, partitions: int, patience: Patience) -> Event:
    started_s = resize(words.spark, partitions) if partitions > len(live_executors(words.spark)) else 0.0
    timeline = words.timeline
    words.epochs(patience.steady)
    since = len(timeline.ends) - patience.steady
    steady, steady_gap = timeline.latencies(schedule, start_us, since), float(np.median(timeline.gaps(since)))
    first, requested = len(timeline.ends), time.time()
    offline = words.repartition(partitions, schedule)
    p99, deadline = steady.quantile(0.99), time.time() + patience.patience_s

    def calm() -> float | None:
        return patience.is_calm(timeline, timeline.latencies(schedule, start_us, first), requested, p99)

    words.follow(lambda: calm() is not None or time.time() > deadline)
    during, stable, gaps = timeline.latencies(schedule, start_us, first), calm(), timeline.gaps(first)
    ended_s = resize(words.spark, partitions) if partitions < len(live_executors(words.spark)) else 0.0
    parts = {"stop": offline.stop_s, "repartition": offline.repartition_s, "start": offline.start_s}
    stable_s = None if stable is None else max(0.0, stable - requested)
    return Event(steady, during, requested, stable_s, steady_gap, float(gaps.max()), parts, started_s + ended_s)


# ── report ────────────────────────────────────────────────────────────────────────────────────────────────────────


def plot(path: Path, live: Side, offline: Side, found: list[Drained]) -> None:
    """Latency around both changes of shape by either way, and what moving bytes adds to an epoch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8))
    for axis, name in zip(axes, live.events, strict=False):
        for side, label in ((live, "live"), (offline, "Spark: stop, repartition, start")):
            event = side.events[name]
            buckets = [*event.steady.buckets(), *event.during.buckets()]
            axis.plot([at - event.requested for at, _ in buckets], [p99 for _, p99 in buckets], label=label)
        axis.axvline(0, color="#cccccc", linewidth=1)
        axis.set(title=f"{name} partitions", xlabel="seconds since the request, by when rows were due", xlim=(-5, None))
        axis.set_yscale("log")
        axis.grid(axis="y", color="#eeeeee", which="both")
    axes[0].set_ylabel("latency, s (p99 of 250 ms)")
    axes[0].legend(frameon=False, fontsize=8)
    for keys in sorted({each.keys for each in found}):
        own = sorted((each.moved_bytes / 1e6, each.extra_ms) for each in found if each.keys == keys)
        axes[2].plot([mb for mb, _ in own], [ms for _, ms in own], "o", label=f"{keys:,} keys")
    axes[2].set(title="a fifth, and a tenth, of the state moves", xlabel="MB that move", ylabel="ms more in its epoch")
    axes[2].set_xlim(left=0)
    axes[2].set_ylim(bottom=0)
    axes[2].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def report(live: Side, offline: Side, found: list[Drained], size: Size, rate: float) -> None:
    """Tables for people."""
    rows: list[tuple[str, ...]] = []
    for side, way in ((live, "live"), (offline, "Spark, offline")):
        for name, event in side.events.items():
            run = event.figures()
            parts = ", ".join(f"{part} {seconds:,.2f}" for part, seconds in event.parts.items())
            columns = ("steady_p99_ms", "p50_ms", "p99_ms", "max_ms", "pause_ms")
            rows.append((f"{name}, {way}", *(f"{run[column]:,.0f}" for column in columns), parts))
    titles = ("", "steady p99 ms", "p50 ms", "p99 ms", "max ms", "pause ms", "parts, s")
    table(f"other partitions and executors; {size.keys:,} keys, {rate:,.0f} rows/s are due", titles, rows)
    table(
        "what executors need, MB",
        ("executors", "bins", "disk", "memory of Python workers"),
        [
            (
                count,
                ", ".join(str(each.bins) for each in shape.values()),
                ", ".join(f"{each.disk_mb:,.0f}" for each in shape.values()),
                ", ".join(f"{each.memory_mb:,.0f}" for each in shape.values()),
            )
            for count, shape in live.shapes.items()
        ],
    )
    table(
        "one of five executors gives away its bins",
        ("keys", "share of the state", "MB moved", "ms more in its epoch", "drain, s", "its disk, MB, before", "after"),
        [
            (
                f"{each.keys:,}",
                f"{each.share:.2f}",
                f"{each.moved_bytes / 1e6:,.1f}",
                f"{each.extra_ms:,.0f}",
                "" if each.drain_s is None else f"{each.drain_s:,.1f}",
                "" if each.before is None else f"{each.before.disk_mb:,.0f}",
                "" if each.after is None else f"{each.after.disk_mb:,.0f}",
            )
            for each in found
        ],
    )


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--keys", type=int, metavar="KEYS", help="how many are preloaded")
    options = parser.parse_args()
    size, began = (QUICK if options.quick else FULL), time.perf_counter()
    size = replace(size, keys=checked_keys(parser, options.keys or size.keys, size.bins))
    load_average = [os.getloadavg()]
    print(f"load average {load_average[0]}", flush=True)

    def tell(line: str) -> None:
        print(line, flush=True)

    with cluster(EXECUTORS) as spark:
        resize(spark, SHAPES[0])
        live, rate = ours(spark, size, tell)
        resize(spark, SHAPES[0])
        offline = rival(spark, size, rate, tell)
        resize(spark, EXECUTORS)
        found: list[Drained] = []
        errors = [live.lost, live.doubled]
        for keys in (size.keys // 2, size.keys):
            half, patience = keys == size.keys, size.patience
            runs, lost, doubled = drained(
                spark, keys, size.bins, size.chunk, size.repeat, patience, half=half, tell=tell
            )
            found += runs
            errors = [errors[0] + lost, errors[1] + doubled]
    load_average.append(os.getloadavg())
    report(live, offline, found, size, rate)
    print(f"load average {load_average[1]}; {errors[0]} lost, {errors[1]} doubled")
    if options.plot:
        plot(options.plot, live, offline, found)
    small, tenth, large = (next(each for each in found if each.name == name) for name in ("small", "tenth", "large"))
    ratios = {name: round(offline.events[name].pause_s / event.pause_s, 1) for name, event in live.events.items()}
    figures = {
        "keys": size.keys,
        "rate": rate,
        "pause_over_ours": min(ratios.values()),
        "pause_over_ours_by_event": ratios,
        "lost": errors[0],
        "doubled": errors[1],
        "spark_lost": offline.lost,
        "spark_doubled": offline.doubled,
        "same_bytes_of_twice_the_state": round(tenth.extra_ms / small.extra_ms, 2),
        "twice_the_bytes": round(large.extra_ms / small.extra_ms, 2),
        "ms_per_mb": round((large.extra_ms - small.extra_ms) / (large.moved_bytes - small.moved_bytes) * 1e6, 2),
        "ours": {name: event.figures() for name, event in live.events.items()},
        "spark": {name: event.figures() for name, event in offline.events.items()},
        "executors": {name: {one: asdict(each) for one, each in shape.items()} for name, shape in live.shapes.items()},
        "drains": [asdict(each) for each in found],
        "load_average": load_average,
        "took_s": round(time.perf_counter() - began),
    }
    closing_line("rescale", figures, quick=options.quick)


if __name__ == "__main__":
    main()
