"""A load that rises and falls while a job is scaled out to a second executor, and in again: which steps serve it best.

Megaphone's third experiment (its Figure 2c) on epochs; it left open what would stabilise sooner than batched steps.
Words are counted on a cluster of two executors on this machine, as in :mod:`benchmarks.migration`. All bins are owned
by the partitions of one executor, whose capacity is measured first. Then the load is a square wave: more than that
executor can do for half of a period, less for the other half, and over a whole period less. At the beginning of a
period half of the bins go to the other executor; some periods later they come back. So it goes with sudden,
batched and budgeted steps without loading ahead, and with budgeted ones that load ahead.

Rows are served as before from the moment on after which no quarter of a second has a p99 that is above 1.2 times what
comes with the wave where the bins now are; that is measured in the last period before the next migration. The area is
what rows waited above that, summed over quarters of a second. Both are taken over the same number of periods for all.

    python -m benchmarks.square_wave [--quick] [--keys KEYS] [--plot FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.due_times import BUCKET_S, Latencies, Timeline, first_due
from benchmarks.migration import PARTITIONS, PREWARMED, MovingLoad, Way, placed
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import cluster
from benchmarks.word_load import STAGE, checked_keys, fill, filling, flow, source, state_errors
from midstream import Flow, Move, Step

NAME = "square-wave"
LOW, HIGH = 0.5, 1.2
"""Rates, as shares of what one executor can do: 0.85 of it over a whole period."""
MOST_OF_TWO = 0.9
"""The high rate is at most this share of what both can do."""
LEAD_S = 8.0
"""The load begins so long after a job is started."""
BATCHED, BUDGETED = Way("batched", prewarm=False), Way("budgeted", prewarm=False)
WAYS = (Way("sudden", prewarm=False), BATCHED, BUDGETED, PREWARMED)
QUICK_WAYS = (BATCHED, BUDGETED, PREWARMED)
DIRECTIONS = ("out", "in")
WARM_UP = 4
"""Epochs after a start that do not count."""
WORTH = 1.2
"""Where two executors can do less than this multiple of one, a second one is worth nothing, and the report says so."""


@dataclass(frozen=True)
class Size:
    """Keys, bins, rows of an epoch while keys are loaded and capacity is measured, and how many such epochs; the length
    of a period, how many of them follow a request, and for how long there is a wave."""

    keys: int
    bins: int
    chunk: int
    chunks: int
    period_s: float
    periods: int
    hours: float = 2.0


FULL = Size(1_000_000, 64, 200_000, 4, 8.0, 2)
QUICK = Size(100_000, 16, 25_000, 4, 4.0, 2)


@dataclass(frozen=True)
class Moved:
    """One migration under the wave. Seconds."""

    during: Latencies
    usual: Latencies
    """A whole period with all bins where they now are."""
    requested: float
    ended: float
    steps: int
    bytes: int

    @property
    def usual_s(self) -> float:
        """The p99 of the worst quarter of a second of the wave, without moves."""
        return max(p99 for _, p99 in self.usual.buckets())

    def stable_s(self, usual_s: float) -> float | None:
        """When rows were served as they are where the bins now are; None: not in this time."""
        since = self.during.calm_since(usual_s)
        return None if since is None else max(0.0, since - self.requested)

    def area_s2(self, usual_s: float) -> float:
        """What rows waited longer than usual, over time."""
        return BUCKET_S * sum(max(0.0, p99 - usual_s) for _, p99 in self.during.buckets())

    def figures(self, usual_s: float) -> dict[str, Any]:
        """For programs."""
        stable = self.stable_s(usual_s)
        return {
            "usual_p99_ms": round(1000 * usual_s, 1),
            "p50_ms": round(1000 * self.during.quantile(0.5), 1),
            "p99_ms": round(1000 * self.during.quantile(0.99), 1),
            "max_ms": round(1000 * self.during.max(), 1),
            "stable_again_s": None if stable is None else round(stable, 2),
            "area_s2": round(self.area_s2(usual_s), 3),
            "duration_s": round(self.ended - self.requested, 2),
            "steps": self.steps,
            "bytes": self.bytes,
        }


def wave(rows: int, start_us: int, low: float, high: float, size: Size) -> tuple[Step, float]:
    """What was due before, then the wave, high first; and the moment at which it begins, since the schedule's start.

    An epoch that was planned but not committed before a stop runs again as it was planned, so it is among ``rows``."""
    begin = time.time() + LEAD_S - start_us / 1e6
    half = size.period_s / 2
    halves = int(3600 * size.hours / half)
    steps = [(begin + half * number, high if number % 2 == 0 else low) for number in range(halves)]
    return Step((*filling(rows).steps, *steps)), begin


@dataclass
class WaveLoad:
    """A job under the wave, whose bins are on one executor or on both."""

    load: MovingLoad
    size: Size
    origin: float
    """When the wave began, in seconds since 1970."""
    moves: Mapping[str, dict[int, int]]

    def next_period(self) -> float:
        """Go on until a period begins; return when that is."""
        passed = (time.time() - self.origin) // self.size.period_s
        at = self.origin + (max(0, passed) + 1) * self.size.period_s
        self.until(at)
        return at

    def until(self, moment: float) -> None:
        """Go on until all that was due before a moment is committed."""
        load = self.load
        load.follow(lambda: load.schedule.count_until(round(1e6 * moment) - load.start_us) <= load.timeline.rows)

    def between(self, since: float, until: float) -> Latencies:
        """The rows that were due between two moments."""
        found = self.load.since(0).before(until)
        first = int(np.searchsorted(found.due, since))
        return Latencies(found.due[first:], found.waited[first:])

    def move(self, way: Way, direction: str) -> Moved:
        """Move at the beginning of a period, and go on for some."""
        self.next_period()
        requested, period = time.time(), self.size.period_s
        migration = self.load.job.migrate(
            Move(self.moves[direction], STAGE), strategy=way.strategy, prewarm=way.prewarm
        )
        end = requested + self.size.periods * period
        self.until(end)
        ended = self.load.end_of(migration)
        usual_from = max(end, self.next_period())
        self.until(usual_from + period)
        return Moved(
            self.between(requested, end),
            self.between(usual_from, usual_from + period),
            requested,
            ended,
            len(migration.steps),
            migration.progress.bytes_done,
        )


@dataclass(frozen=True)
class Result:
    """Everything, and whether each row was counted once."""

    capacity: tuple[float, float]
    """Rows a second that one executor can do, and both."""
    rates: tuple[float, float]
    moved: dict[tuple[Way, str], Moved]
    rows: int
    lost: int
    doubled: int


def gathering(load: MovingLoad) -> dict[str, dict[int, int]]:
    """Moves by which the second executor gets half of the bins, and those by which the first one has all."""
    mine = load.places()
    if mine is None:
        raise RuntimeError("partitions are not spread evenly over two executors, so nothing is measured")
    stays, partner = mine[0], dict(zip(mine[0], mine[1], strict=True))
    [shares] = load.job.assignment()
    home = {number: stays[number % len(stays)] for number in range(len(shares.owners))}
    there = {number: partner[owner] for number, owner in home.items() if number // len(stays) % 2}
    return {"home": home, "out": there, "in": {number: home[number] for number in there}}


def run(spark: SparkSession, size: Size, ways: tuple[Way, ...], tell: Callable[[str], None]) -> Result:
    """Everything, on one checkpoint."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        timeline = Timeline()

        def words(load: Step, *, limit: int | None = None, is_capped: bool = False) -> Flow:
            chunk = size.chunk if is_capped else None
            return flow(source(size.keys, load, limit=limit, chunk=chunk), NAME)

        filled = words(filling(size.keys), limit=size.keys, is_capped=True)
        fill(spark, folder, filled, timeline, partitions=PARTITIONS, bins=size.bins)
        start_us = first_due(folder)
        one, two = _capacities(spark, folder, words, timeline, size)
        high = min(HIGH * one, MOST_OF_TWO * two)
        low = LOW / HIGH * high
        tell(f"one executor can do {one:,.0f} rows/s, both {two:,.0f}; {high:,.0f} and {low:,.0f} are due in turn")
        schedule, begin = wave(timeline.rows + size.chunk, start_us, low, high, size)
        load = placed(lambda: MovingLoad(words(schedule).start(spark, checkpoint=folder), timeline, schedule, start_us))
        moved = dict[tuple[Way, str], Moved]()
        try:
            under = WaveLoad(load, size, start_us / 1e6 + begin, gathering(load))
            _gather(load, under.moves["home"])
            under.until(under.next_period() + size.period_s)
            for way in ways:
                for direction in DIRECTIONS:
                    found = moved[way, direction] = under.move(way, direction)
                    tell(f"{way}, {direction}: {found.figures(found.usual_s)}")
        finally:
            load.job.stop()
        timeline.add(load.job.progress)
        lost, doubled = state_errors(folder, size.keys, timeline.rows)
    return Result((one, two), (low, high), moved, timeline.rows, lost, doubled)


def _gather(load: MovingLoad, home: dict[int, int]) -> None:
    """Have one executor own all bins."""
    [shares] = load.job.assignment()
    away = {number: owner for number, owner in home.items() if shares.owners[number] != owner}
    if away:
        load.end_of(load.job.migrate(Move(away, STAGE), strategy="sudden", prewarm=False))


def _capacity(timeline: Timeline, size: Size) -> float:
    """Rows a second in the newest epochs, each of which had as many as it may."""
    ends = [at for _, at in timeline.ends.values()][-size.chunks :]
    return size.chunk / statistics.median(np.diff(ends))


def _capacities(
    spark: SparkSession, folder: str, words: Callable[..., Flow], timeline: Timeline, size: Size
) -> tuple[float, float]:
    """Rows a second while there is always more to do and one executor owns all bins, and while both own some."""
    endless = filling(timeline.rows + 1000 * size.chunk)
    start_us = first_due(folder)
    load = placed(
        lambda: MovingLoad(words(endless, is_capped=True).start(spark, checkpoint=folder), timeline, endless, start_us)
    )
    try:
        load.epochs(WARM_UP + size.chunks)
        two = _capacity(timeline, size)
        _gather(load, gathering(load)["home"])
        load.epochs(size.chunks + 1)
        one = _capacity(timeline, size)
    finally:
        load.job.stop()
    timeline.add(load.job.progress)
    return one, two


def plot(path: Path, moved: Mapping[tuple[Way, str], Moved]) -> None:
    """Latency by due time, from the request on."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4), sharey=True)
    for axis, direction, title in zip(axes, DIRECTIONS, ("to two executors", "to one executor"), strict=True):
        for way in dict.fromkeys(way for way, _ in moved):
            found = moved[way, direction]
            buckets = found.during.buckets()
            style = "--" if way.prewarm else "-"
            axis.plot(
                [at - found.requested for at, _ in buckets],
                [p99 for _, p99 in buckets],
                style,
                linewidth=1.2,
                label=way,
            )
        axis.set(title=title, xlabel="seconds since the request, by when rows were due")
        axis.set_yscale("log")
        axis.grid(axis="y", color="#eeeeee", which="both")
    axes[0].set_ylabel("latency, s (p99 of 250 ms)")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def usual_of(moved: Mapping[tuple[Way, str], Moved], direction: str) -> float:
    """What the wave makes of latency where the bins are after it: the same for all ways, so that they are compared."""
    return statistics.median(
        found.usual_s for (_, found_direction), found in moved.items() if found_direction == direction
    )


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--keys", type=int, metavar="KEYS", help="how many are preloaded")
    options = parser.parse_args()
    size, began = (QUICK if options.quick else FULL), time.perf_counter()
    size = replace(size, keys=checked_keys(parser, options.keys or size.keys, size.bins))
    before = os.getloadavg()
    print(f"load average {before}", flush=True)
    with cluster() as spark:
        result = run(spark, size, QUICK_WAYS if options.quick else WAYS, lambda line: print(line, flush=True))
    after = os.getloadavg()
    usual = {direction: usual_of(result.moved, direction) for direction in DIRECTIONS}
    runs = {
        direction: {
            str(way): found.figures(usual[direction])
            for (way, found_direction), found in result.moved.items()
            if found_direction == direction
        }
        for direction in DIRECTIONS
    }
    columns = ("p50_ms", "p99_ms", "max_ms", "stable_again_s", "area_s2", "duration_s", "steps", "bytes")
    low, high = result.rates
    for direction, found in runs.items():
        table(
            f"{direction}: half of {size.keys:,} keys; {high:,.0f} and {low:,.0f} rows/s in turn, {size.period_s:g} s",
            ("", *(name.replace("_", " ") for name in columns)),
            [
                (way, *(f"{run[name]:,}" if run[name] is not None else "never" for name in columns))
                for way, run in found.items()
            ],
        )
    print(f"load average {after}; {result.rows:,} rows, {result.lost} lost, {result.doubled} doubled")
    if options.plot:
        plot(options.plot, result.moved)
    one, two = result.capacity
    if two < WORTH * one:
        print(f"both executors can do {two / one:.2f} times what one can: the wave shows what steps cost, and no gain")
    figures = {
        "keys": size.keys,
        "capacity_of_one": round(one),
        "capacity_of_two": round(two),
        "two_over_one": round(two / one, 2),
        "low": round(low),
        "high": round(high),
        "adaptive_over_batched": over_batched(runs["out"], BUDGETED, size)["stable_again"],
        "over_batched": {
            direction: {str(way): over_batched(found, way, size) for way in (BUDGETED, PREWARMED)}
            for direction, found in runs.items()
        },
        "lost": result.lost,
        "doubled": result.doubled,
        "runs": runs,
        "load_average": [before, after],
        "took_s": round(time.perf_counter() - began),
    }
    closing_line("square_wave", figures, quick=options.quick)


def over_batched(runs: Mapping[str, Mapping[str, Any]], way: Way, size: Size) -> dict[str, float]:
    """When rows are served as usual, how much longer they wait until then, and how long at most, against batched steps:
    below 1 is better. What was not stable in the time that counts is taken for all of it."""
    whole_s = size.periods * size.period_s
    one, other = runs[str(way)], runs[str(BATCHED)]
    stable, batched = (whole_s if run["stable_again_s"] is None else run["stable_again_s"] for run in (one, other))
    return {
        "stable_again": round((stable + BUCKET_S) / (batched + BUCKET_S), 3),
        "area": round((one["area_s2"] + BUCKET_S) / (other["area_s2"] + BUCKET_S), 3),
        "max": round(one["max_ms"] / other["max_ms"], 3),
    }


if __name__ == "__main__":
    main()
