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

    python -m benchmarks.migration [--quick] [--keys KEYS] [--load SHARE] [--few] [--plot FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.due_times import Latencies, Timeline, first_due
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import cluster
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

PARTITIONS = 4
RESTARTED_PARTITIONS = 2
LOAD = 0.4
"""The share of the measured capacity that is due, unless asked otherwise. With fewer rows epochs are shorter, and
spikes say more about moves: a row that is due when an epoch begins waits for two, one at its end for one, so the
longest steady wait is half an epoch above the median even where all epochs take the same time."""
STARTS = 10
NAME = "migration"
RESTART, RESTART_COLD = "stop and start", "stop and start, local state lost"


@dataclass(frozen=True)
class Size:
    """Keys, bins, rows of an epoch when keys are loaded and capacity is measured, how many of these epochs, and what
    share of the capacity is due."""

    keys: int
    bins: int
    chunk: int
    chunks: int
    patience: Patience
    warm_up_s: float
    """Seconds after a start that do not count: the JVM compiles what runs often, for the better part of a minute."""
    load: float = LOAD


FULL = Size(10_000_000, 256, 500_000, 6, Patience(25, 10.0, 10, 90.0), 45.0)
QUICK = Size(100_000, 32, 25_000, 4, Patience(20, 3.0, 5, 6.0), 3.0)
BETWEEN = 6
"""Epochs between the way back and the next steady ones: more than an executor keeps what it no longer owns."""


@dataclass(frozen=True)
class Way:
    """A way to move bins."""

    strategy: str
    prewarm: bool

    def __str__(self) -> str:
        return f"{self.strategy}, pre-warmed" if self.prewarm else self.strategy


PREWARMED = Way("budgeted", prewarm=True)
"""How bins are moved unless asked otherwise."""
SUDDEN, FLUID = Way("sudden", prewarm=False), Way("fluid", prewarm=False)
FEW_WAYS = (SUDDEN, FLUID, Way("sudden", prewarm=True), PREWARMED)
WAYS = tuple(Way(name, warm) for warm in (False, True) for name in ("sudden", "fluid", "batched", "budgeted"))


@dataclass(frozen=True)
class Measured:
    """One event under load. Seconds; ``stable_s`` is None if rows were not served as before while that was awaited."""

    steady: Latencies
    during: Latencies
    requested: float
    ended: float
    stable_s: float | None
    steps: int = 0
    moved_bytes: int = 0
    read_bytes: int | None = None
    bins: int = 0
    steady_read: float = 0.0
    """Bytes that a steady epoch reads: what the epoch before has changed."""
    step_ms: float | None = None
    """The median of the epochs with a step."""
    epoch_ms: float | None = None
    """How long epochs took without one, as the job saw it."""
    phases: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By phase of an epoch: the median of steady epochs, and of those with a step; milliseconds."""

    @property
    def spike_s(self) -> float:
        """How much longer than usual a row has waited at worst."""
        return self.during.max() - self.steady.quantile(0.5)

    def figures(self) -> dict[str, Any]:
        """For programs."""
        return {
            "steady_p99_ms": round(1000 * self.steady.quantile(0.99), 1),
            "steady_max_ms": round(1000 * self.steady.max(), 1),
            "p99_ms": round(1000 * self.during.quantile(0.99), 1),
            "max_ms": round(1000 * self.during.max(), 1),
            "spike_ms": round(1000 * self.spike_s, 1),
            "max_over_steady": round(self.during.max() / self.steady.max(), 3),
            "stable_again_s": None if self.stable_s is None else round(self.stable_s, 2),
            "duration_s": round(self.ended - self.requested, 2),
            "bytes": self.moved_bytes,
            "read_bytes": self.read_bytes,
            "bins": self.bins,
            "steps": self.steps,
            "steady_read_bytes": round(self.steady_read),
            "step_epoch_ms": self.step_ms,
            "steady_epoch_ms": self.epoch_ms,
            "phases_ms": {name: [round(steady, 1), round(step, 1)] for name, (steady, step) in self.phases.items()},
        }


# ── a job under load ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class MovingLoad(Load):
    """A load under which bins move from one executor to the other, and back."""

    def move(self, way: Way, size: Size, bins: dict[int, int]) -> Measured:
        """Wait for steady epochs, and move."""
        steady, steady_read = self.steady(size.patience), self.steady_read(size.patience)
        first, requested = len(self.timeline.ends), time.time()
        migration = self.job.migrate(Move(bins, STAGE), strategy=way.strategy, prewarm=way.prewarm)
        ended = self.end_of(migration)
        rows, stable = self.settle(size.patience, first, requested, steady)
        read = [step.read for step in migration.steps]
        return Measured(
            steady,
            rows,
            requested,
            ended,
            stable,
            steps=len(migration.steps),
            moved_bytes=migration.progress.bytes_done,
            read_bytes=None if None in read else sum(each or 0 for each in read),
            bins=migration.progress.bins_done,
            steady_read=steady_read,
            step_ms=round(statistics.median(step.epoch_ms for step in migration.steps), 1),
            epoch_ms=round(statistics.median(step.steady_ms for step in migration.steps), 1),
            phases=self._phases(range(first - size.patience.steady, first), [step.epoch for step in migration.steps]),
        )

    def _phases(self, steady: Sequence[int], steps: Sequence[int]) -> dict[str, tuple[float, float]]:
        """What steps add, and where."""
        found = self.timeline.phases

        def median(name: str, epochs: Sequence[int]) -> float:
            return statistics.median(found[epoch].get(name, 0.0) for epoch in epochs)

        return {name: (median(name, steady), median(name, steps)) for name in found[steps[0]]}

    def seconds(self, seconds: float) -> None:
        """Wait for the epochs of some time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.epochs(1)

    def go_back(self, bins: dict[int, int]) -> None:
        """Move, unmeasured."""
        self.end_of(self.job.migrate(Move(bins, STAGE), strategy="sudden", prewarm=True))
        self.epochs(BETWEEN)

    def places(self) -> tuple[list[int], list[int]] | None:
        """The partitions of each executor, if there are two with as many."""
        [shares] = self.job.assignment()
        found: dict[str | None, list[int]] = {}
        for share in shares.partitions:
            found.setdefault(share.executor, []).append(share.partition)
        match [*found.values()]:
            case [one, other] if None not in found and len(one) == len(other):
                return one, other
        return None

    def swap(self) -> tuple[dict[int, int], dict[int, int]]:
        """Moves by which each executor gives every other bin to the other one, and the moves back."""
        mine = self.places()
        if mine is None:
            raise RuntimeError("partitions are not spread evenly over two executors, so nothing is measured")
        partner = dict(zip((*mine[0], *mine[1]), (*mine[1], *mine[0]), strict=True))
        [shares] = self.job.assignment()
        there, seen = dict[int, int](), dict.fromkeys(partner, 0)
        for number, owner in enumerate(shares.owners):
            seen[owner] += 1
            if seen[owner] % 2:
                there[number] = partner[owner]
        return there, {number: shares.owners[number] for number in there}


# ── the experiment ────────────────────────────────────────────────────────────────────────────────────────────────


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

        def words(load: Step, limit: int | None = None) -> Flow:
            return flow(source(size.keys, load, limit=limit, chunk=limit and size.chunk), NAME)

        rows = size.keys + size.chunk * size.chunks
        began = time.perf_counter()
        fill(spark, folder, words(filling(rows), limit=size.keys), timeline, partitions=PARTITIONS, bins=size.bins)
        tell(f"{size.keys:,} keys are loaded after {time.perf_counter() - began:.0f} s")
        fill(spark, folder, words(filling(rows), limit=rows), timeline, partitions=PARTITIONS, bins=size.bins)
        ends = [at for _, at in timeline.ends.values()][-size.chunks + 1 :]
        capacity = size.chunk / statistics.median(np.diff(ends))
        start_us, rate = first_due(folder), round(size.load * capacity)
        tell(f"capacity {capacity:,.0f} rows/s; {rate:,} are due")
        schedule = loading(rows, start_us, rate)
        events = dict[str, Measured]()
        load = placed(lambda: MovingLoad(words(schedule).start(spark, checkpoint=folder), timeline, schedule, start_us))
        job = load.job
        try:
            load.follow(lambda: timeline.rows > rows)
            load.seconds(size.warm_up_s)
            there, back = load.swap()
            for way in ways:
                events[str(way)] = load.move(way, size, there)
                tell(f"{way}: {events[str(way)].figures()}")
                load.go_back(back)
            for name, partitions, local in (
                (RESTART, RESTARTED_PARTITIONS, None),
                (RESTART_COLD, PARTITIONS, f"{folder}/local"),
            ):
                steady, first = load.steady(size.patience), len(timeline.ends)
                requested = time.time()
                job.stop()
                timeline.add(job.progress)
                job = words(schedule).start(spark, checkpoint=folder, partitions=partitions, local_state=local)
                load = MovingLoad(job, timeline, schedule, start_us)
                load.epochs(1)
                ended = next(reversed(timeline.ends.values()))[1]
                during, stable = load.settle(size.patience, first, requested, steady)
                events[name] = Measured(steady, during, requested, ended, stable)
                tell(f"{name}: {events[name].figures()}")
        finally:
            job.stop()
        timeline.add(job.progress)
        lost, doubled = state_errors(folder, size.keys, timeline.rows)
    return Result(rate, events, timeline.rows, lost, doubled)


def placed(start: Callable[[], MovingLoad]) -> MovingLoad:
    """A job whose partitions are spread evenly: Spark places them when a job starts, as tasks happen to end."""
    for _ in range(STARTS):
        load = start()
        try:
            load.epochs(4)
            if load.places() is not None:
                return load
        except BaseException:
            load.job.stop()
            raise
        load.job.stop()
        load.timeline.add(load.job.progress)
    raise RuntimeError(f"in {STARTS} starts, partitions were never spread evenly over two executors")


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
    parser.add_argument(
        "--load", type=float, default=LOAD, metavar="SHARE", help="of the capacity, as rows that are due"
    )
    parser.add_argument("--few", action="store_true", help=f"only {'; '.join(map(str, FEW_WAYS))}")
    options = parser.parse_args()
    size, began = (QUICK if options.quick else FULL), time.perf_counter()
    if not 0 < options.load < 1:
        parser.error(f"--load {options.load}: give a share of the capacity, more than 0 and less than 1")
    size = replace(size, keys=checked_keys(parser, options.keys or size.keys, size.bins), load=options.load)
    before = os.getloadavg()
    print(f"load average {before}", flush=True)
    with cluster() as spark:
        result = run(
            spark, size, FEW_WAYS if options.quick or options.few else WAYS, lambda line: print(line, flush=True)
        )
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
    names = sorted({name for run in runs.values() for name in run["phases_ms"]})
    table(
        "where the time of an epoch goes: median ms of steady ones → of those with a step",
        ("", *names),
        [
            (way, *("{} → {}".format(*run["phases_ms"].get(name, (0.0, 0.0))) for name in names))
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
        "load": size.load,
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
