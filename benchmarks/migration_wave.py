"""Scaling out while a wave of rows comes in: does a budget that follows the load stabilise sooner than fixed steps?

Megaphone's third experiment (its Figure 2c), whose question the paper leaves open: batched migration had lower
latencies there, "but did not stabilise sooner". All state lies with one of two executors. Rows come in a square wave
that is above what this executor can take, and below what it can take, in turn; both together can take all of it. After
one period half of the bins are given to the other executor: by sudden, batched and budgeted steps, loaded ahead or not;
or not at all. Then a calm follows, in which all bins go back.

Rows are late by the commit of their epoch minus the time they were due. It is *stable again* when the last bucket of
250 ms whose p99 is above 1.2 times that of the last two periods has passed; the *mean* is over all rows from the
request to the end of the wave, so it is the area under the latency.

    python -m benchmarks.migration_wave [--quick] [--keys KEYS] [--plot FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.due_times import Latencies, Timeline, first_due
from benchmarks.migration import FULL as FULL_LOAD
from benchmarks.migration import PARTITIONS, MovingLoad, Size, Way, placed
from benchmarks.migration import QUICK as QUICK_LOAD
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import cluster
from benchmarks.word_load import STAGE, STRIDE, fill, filling, flow, source, state_errors
from midstream import Flow, Move, Step

LOW, HIGH, CALM = 0.25, 0.75, 0.15
"""Rates as shares of what both executors can take."""
NOTHING = "no migration"
BATCHED, BUDGETED = Way("batched", prewarm=False), Way("budgeted", prewarm=False)
WAYS = (None, Way("sudden", prewarm=False), BATCHED, BUDGETED, Way("budgeted", prewarm=True))
QUICK_WAYS = (BATCHED, BUDGETED)
SETTLED_PERIODS = 2
CALM_RATIO = 1.2


@dataclass(frozen=True)
class Wave:
    """A period is half high, half low; there is one before the request. ``lead_s`` is for the start of the job."""

    period_s: float
    periods: int
    calm_s: float
    lead_s: float

    @property
    def slot_s(self) -> float:
        """How long a way takes, with the calm before it."""
        return self.calm_s + self.period_s * self.periods


FULL = Wave(period_s=8.0, periods=10, calm_s=40.0, lead_s=60.0)
QUICK = Wave(period_s=4.0, periods=5, calm_s=10.0, lead_s=30.0)


@dataclass(frozen=True)
class Ridden:
    """What a wave did to rows: all of its periods, from the calm's end."""

    rows: Latencies
    requested: float
    settled_from: float
    steps: int
    duration_s: float | None

    @property
    def after(self) -> Latencies:
        """The rows that were due from the request on."""
        first = int(np.searchsorted(self.rows.due, self.requested))
        return Latencies(self.rows.due[first:], self.rows.waited[first:])

    @property
    def stable_s(self) -> float | None:
        """When latencies were those of the last periods, and stayed there; None: only in the last periods."""
        settled = self.rows.waited[np.searchsorted(self.rows.due, self.settled_from) :]
        limit = CALM_RATIO * float(np.quantile(settled, 0.99))
        late = [at for at, p99 in self.after.buckets() if p99 > limit]
        found = max(0.0, (late[-1] if late else self.requested) - self.requested)
        return None if self.requested + found >= self.settled_from else found

    def figures(self) -> dict[str, Any]:
        """For programs."""
        stable = self.stable_s
        return {
            "before_p99_ms": round(1000 * self.rows.before(self.requested).quantile(0.99), 1),
            "mean_ms": round(1000 * float(self.after.waited.mean()), 1),
            "p99_ms": round(1000 * self.after.quantile(0.99), 1),
            "max_ms": round(1000 * self.after.max(), 1),
            "stable_again_s": None if stable is None else round(stable, 2),
            "duration_s": None if self.duration_s is None else round(self.duration_s, 2),
            "steps": self.steps,
        }


def schedule_of(filled: Sequence[tuple[float, float]], begin_s: float, rate: float, wave: Wave, ways: int) -> Step:
    """Calm and wave in turn, from a moment on, after what was due before."""
    steps = list(filled)
    for number in range(ways):
        start = begin_s + number * wave.slot_s
        steps.append((start, CALM * rate))
        for period in range(wave.periods):
            at = start + wave.calm_s + period * wave.period_s
            steps += [(at, HIGH * rate), (at + wave.period_s / 2, LOW * rate)]
    steps.append((begin_s + ways * wave.slot_s, CALM * rate))
    return Step(tuple((at, round(per_s)) for at, per_s in steps))


def gathered(load: MovingLoad) -> tuple[dict[int, int], dict[int, int]]:
    """Moves that bring every bin to the first executor, and those by which half of them go to the other one."""
    places = load.places()
    if places is None:
        raise RuntimeError("partitions are not spread evenly over two executors, so nothing is measured")
    mine, theirs = places
    [shares] = load.job.assignment()
    near = dict(zip(theirs, mine, strict=True))
    there = {number: near[owner] for number, owner in enumerate(shares.owners) if owner in near}
    return there, {number: shares.owners[number] for number in there}


def ride(load: MovingLoad, way: Way | None, moves: dict[int, int], wave: Wave, begins: float) -> Ridden:
    """One wave, which begins at a moment of the wall clock."""
    load.follow(lambda: time.time() >= begins)
    first = len(load.timeline.ends)
    requested, ends = begins + wave.period_s, begins + wave.periods * wave.period_s
    load.follow(lambda: time.time() >= requested)
    migration = None
    if way is not None:
        migration = load.job.migrate(Move(moves, STAGE), strategy=way.strategy, prewarm=way.prewarm)
    ended = requested
    while time.time() < ends:
        load.epochs(1)
        if migration is not None and not migration.is_over:
            ended = time.time()
    if migration is not None:
        load.follow(lambda: migration.is_over)
        migration.require(0)
    found = load.since(first)
    inside = (found.due >= begins) & (found.due < ends)
    rows = Latencies(found.due[inside], found.waited[inside])
    steps = 0 if migration is None else len(migration.steps)
    return Ridden(
        rows, requested, ends - SETTLED_PERIODS * wave.period_s, steps, None if way is None else ended - requested
    )


@dataclass(frozen=True)
class Result:
    """All waves, and whether each row was counted once."""

    rate: float
    waves: dict[str, Ridden]
    lost: int
    doubled: int


def run(
    spark: SparkSession, size: Size, wave: Wave, ways: tuple[Way | None, ...], tell: Callable[[str], None]
) -> Result:
    """Everything, on one checkpoint."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        timeline, rows = Timeline(), size.keys + size.chunk * size.chunks

        def words(load: Step, limit: int | None = None) -> Flow:
            return flow(source(size.keys, load, limit=limit, chunk=limit and size.chunk), "migration_wave")

        for limit in (size.keys, rows):
            fill(spark, folder, words(filling(rows), limit), timeline, partitions=PARTITIONS, bins=size.bins)
        took = np.diff([at for _, at in timeline.ends.values()][-size.chunks + 1 :])
        start_us, rate = first_due(folder), size.chunk / statistics.median(took)
        tell(f"{size.keys:,} keys are loaded; both executors can take {rate:,.0f} rows/s")
        calm = (time.time() + 1.0 - start_us / 1e6, round(CALM * rate))
        begins_s = [0.0]

        def start() -> MovingLoad:
            """The waves begin so long after the newest start."""
            begins_s[0] = time.time() + wave.lead_s - start_us / 1e6
            schedule = schedule_of((*filling(rows).steps, calm), begins_s[0], rate, wave, len(ways))
            return MovingLoad(words(schedule).start(spark, checkpoint=folder), timeline, schedule, start_us)

        load = placed(start)
        waves = dict[str, Ridden]()
        try:
            near, far = gathered(load)
            for number, way in enumerate(ways):
                [shares] = load.job.assignment()
                if any(shares.owners[number] != owner for number, owner in near.items()):
                    load.go_back(near)
                begins = start_us / 1e6 + begins_s[0] + number * wave.slot_s + wave.calm_s
                if time.time() > begins:
                    raise RuntimeError("the machine is too slow for this wave; give fewer keys")
                name = NOTHING if way is None else str(way)
                waves[name] = ride(load, way, far, wave, begins)
                tell(f"{name}: {waves[name].figures()}")
        finally:
            load.job.stop()
        timeline.add(load.job.progress)
        lost, doubled = state_errors(folder, size.keys, timeline.rows)
    return Result(rate, waves, lost, doubled)


def plot(path: Path, waves: dict[str, Ridden]) -> None:
    """Latency by due time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4))
    for name, wave in waves.items():
        found = wave.rows.buckets()
        times, p99 = [at - wave.requested for at, _ in found], [late for _, late in found]
        axes.plot(times, p99, "--" if "pre-warmed" in name else "-", linewidth=1.2, label=name)
    axes.axvline(0, color="#cccccc", linewidth=1)
    axes.set(xlabel="seconds since the request, by when rows were due", ylabel="latency, s (p99 of 250 ms)")
    axes.set_yscale("log")
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
    size, wave = (QUICK_LOAD, QUICK) if options.quick else (FULL_LOAD, FULL)
    if options.keys:
        if options.keys < size.bins or options.keys % STRIDE == 0:
            parser.error(f"--keys {options.keys}: give at least {size.bins}, and no multiple of {STRIDE}")
        size = replace(size, keys=options.keys)
    began, before = time.perf_counter(), os.getloadavg()
    with cluster() as spark:
        ways = QUICK_WAYS if options.quick else WAYS
        result = run(spark, size, wave, ways, lambda line: print(line, flush=True))
    runs = {name: ridden.figures() for name, ridden in result.waves.items()}
    columns = ("before_p99_ms", "mean_ms", "p99_ms", "max_ms", "stable_again_s", "duration_s", "steps")
    table(
        f"half of {size.keys:,} keys move under a square wave; {result.rate:,.0f} rows/s can be taken",
        ("", *(name.replace("_", " ") for name in columns)),
        [
            (name, *(f"{run[column]:,}" if run[column] is not None else "never" for column in columns))
            for name, run in runs.items()
        ],
    )
    if options.plot:
        plot(options.plot, result.waves)
    batched, budgeted = runs[str(BATCHED)], runs[str(BUDGETED)]
    figures = {
        "keys": size.keys,
        "rate": round(result.rate),
        "budgeted_stable_s": budgeted["stable_again_s"],
        "batched_stable_s": batched["stable_again_s"],
        "batched_over_budgeted_mean": round(batched["mean_ms"] / budgeted["mean_ms"], 3),
        "lost": result.lost,
        "doubled": result.doubled,
        "runs": runs,
        "load_average": [before, os.getloadavg()],
        "took_s": round(time.perf_counter() - began),
    }
    closing_line("migration_wave", figures, quick=options.quick)


if __name__ == "__main__":
    main()
