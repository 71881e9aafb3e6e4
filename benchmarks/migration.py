"""Half of a job's state moves to another executor under load: strategies, and the honest rivals, two restarts.

Megaphone's experiment (its Figure 2) on epochs. Words are counted by a `process`, on a cluster of two executors on this
machine, with partitions that stick to them and local state of their own. Keys are preloaded; then rows are due at a
constant rate, whether or not the job is ready. Each executor gives half of its bins to the other one, so all state that
moves is read by an executor that did not have it, and the load is as even afterwards as it was before. In between, the
bins go back. At the end the job is stopped and started with other partitions in the same driver, twice: with what
executors keep on their disks, and without it. The second time all executors share one new folder, which helps: what one
has read no other one needs to read.

A row's latency is the commit of its epoch minus the time it was due. At the end every key's count is compared with what
the rows that were committed make by arithmetic.

    python -m benchmarks.migration [--quick] [--keys KEYS] [--plot FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.due_times import Timeline, first_due
from benchmarks.migration_load import (
    FLUID,
    FULL,
    LEAD_S,
    PARTITIONS,
    PREWARMED,
    QUICK,
    STRIDE,
    SUDDEN,
    WARM_UP,
    Load,
    Measured,
    Size,
    Way,
    errors,
    fill,
    flow,
    placed,
)
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import cluster
from midstream import Step

RESTARTED_PARTITIONS = 2
LOAD = 0.4
"""The share of the measured capacity that is due."""
RESTART, RESTART_COLD = "stop and start", "stop and start, local state lost"
QUICK_WAYS = (SUDDEN, FLUID, Way("sudden", prewarm=True), PREWARMED)
WAYS = tuple(Way(name, warm) for warm in (False, True) for name in ("sudden", "fluid", "batched", "budgeted"))


@dataclass(frozen=True)
class Result:
    """All events, and whether each row was counted once."""

    rate: float
    events: dict[str, Measured]
    rows: int
    lost: int
    doubled: int


def run(spark: SparkSession, size: Size, ways: Sequence[Way], tell: Callable[[str], None]) -> Result:
    """Everything, on one checkpoint."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        timeline = Timeline()
        rows = size.keys + size.chunk * size.chunks
        filled = ((0.0, float(rows)), (1.0, 0.0))
        began = time.perf_counter()
        fill(spark, folder, flow(size.keys, Step(filled), limit=size.keys, chunk=size.chunk), timeline, size)
        tell(f"{size.keys:,} keys are loaded after {time.perf_counter() - began:.0f} s")
        fill(spark, folder, flow(size.keys, Step(filled), limit=rows, chunk=size.chunk), timeline, size)
        ends = [at for _, at in timeline.ends.values()][-size.chunks + 1 :]
        capacity = size.chunk / statistics.median(np.diff(ends))
        start_us, rate = first_due(folder), round(LOAD * capacity)
        tell(f"capacity {capacity:,.0f} rows/s; {rate:,} are due")
        schedule = Step((*filled, (time.time() + LEAD_S - start_us / 1e6, rate)))
        events = dict[str, Measured]()
        load = placed(
            lambda: Load(flow(size.keys, schedule).start(spark, checkpoint=folder), timeline, schedule, start_us)
        )
        job = load.job
        try:
            load.follow(lambda: timeline.rows > rows)
            load.epochs(WARM_UP)
            there, back = load.swap()
            for way in ways:
                events[str(way)] = load.move(way, size, there)
                tell(f"{way}: {events[str(way)].figures()}")
                load.go_back(back)
            for name, partitions, local in (
                (RESTART, RESTARTED_PARTITIONS, None),
                (RESTART_COLD, PARTITIONS, f"{folder}/local"),
            ):
                steady, first = load.steady(size), len(timeline.ends)
                requested = time.time()
                job.stop()
                timeline.add(job.progress)
                restarted = flow(size.keys, schedule)
                job = restarted.start(spark, checkpoint=folder, partitions=partitions, local_state=local)
                load = Load(job, timeline, schedule, start_us)
                load.epochs(1)
                ended = next(reversed(timeline.ends.values()))[1]
                during, stable = load.settle(size, first, requested, steady)
                events[name] = Measured(steady, during, requested, ended, stable)
                tell(f"{name}: {events[name].figures()}")
        finally:
            job.stop()
        timeline.add(job.progress)
        lost, doubled = errors(folder, size.keys, timeline.rows)
    return Result(rate, events, timeline.rows, lost, doubled)


def plot(path: Path, events: dict[str, Measured]) -> None:
    """Latency by due time, from a few seconds before the event on."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4))
    for name, event in events.items():
        buckets = [*event.steady.buckets(), *event.during.buckets()]
        times = [at - event.requested for at, _ in buckets]
        style = "--" if "pre-warmed" in name else "-"
        axes.plot(times, [p99 for _, p99 in buckets], style, linewidth=1.2, label=name)
    axes.axvline(0, color="#cccccc", linewidth=1)
    axes.set(xlabel="seconds since the request, by when rows were due", ylabel="latency, s (p99 of 250 ms)")
    axes.set_yscale("log")
    axes.set_xlim(left=-5)
    axes.grid(axis="y", color="#eeeeee", which="both")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--keys", type=int, metavar="KEYS", help="how many are preloaded")
    options = parser.parse_args()
    size, began = (QUICK if options.quick else FULL), time.perf_counter()
    if options.keys:
        if options.keys < size.bins or options.keys % STRIDE == 0:
            parser.error(f"--keys {options.keys}: give at least {size.bins}, and no multiple of {STRIDE}")
        size = replace(size, keys=options.keys)
    before = os.getloadavg()
    print(f"load average {before}", flush=True)
    with cluster() as spark:
        result = run(spark, size, QUICK_WAYS if options.quick else WAYS, lambda line: print(line, flush=True))
    after = os.getloadavg()
    runs = {name: event.figures() for name, event in result.events.items()}
    columns = ("steady_p99_ms", "steady_max_ms", "max_ms", "spike_ms", "stable_again_s", "duration_s", "bytes", "steps")
    table(
        f"half of {size.keys:,} keys move between two executors; {result.rate:,.0f} rows/s are due",
        ("", *(name.replace("_", " ") for name in columns)),
        [
            (name, *(f"{run[column]:,}" if run[column] is not None else "never" for column in columns))
            for name, run in runs.items()
        ],
    )
    table(
        "where the time of an epoch goes: median ms of steady ones → of those with a step",
        ("", *(names := sorted({name for run in runs.values() for name in run["phases_ms"]}))),
        [
            (way, *("{} → {}".format(*run["phases_ms"][name]) for name in names))
            for way, run in runs.items()
            if run["phases_ms"]
        ],
    )
    print(f"load average {after}; {result.rows:,} rows, {result.lost} lost, {result.doubled} doubled")
    if options.plot:
        plot(options.plot, result.events)
    prewarmed, sudden = result.events[str(PREWARMED)], result.events[str(SUDDEN)]
    figures = {
        "keys": size.keys,
        "rate": result.rate,
        "prewarmed_over_steady": runs[str(PREWARMED)]["max_over_steady"],
        "fluid_over_steady": runs[str(FLUID)]["max_over_steady"],
        "sudden_over_prewarmed": ratio(sudden, prewarmed),
        "restart_over_prewarmed": ratio(result.events[RESTART], prewarmed),
        "cold_restart_over_prewarmed": ratio(result.events[RESTART_COLD], prewarmed),
        "lost": result.lost,
        "doubled": result.doubled,
        "runs": runs,
        "load_average": [before, after],
        "took_s": round(time.perf_counter() - began),
    }
    closing_line("migration", figures, quick=options.quick)


def ratio(one: Measured, other: Measured) -> float:
    """Of their spikes."""
    return round(one.spike_s / other.spike_s, 2)


if __name__ == "__main__":
    main()
