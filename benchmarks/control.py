"""The cost of control operations for a job, and how long they take: Chi's figure 8.

The jobs are the Yahoo streaming benchmark and a join of two streams of kilobyte events, which stands in for IPQ1. An
epoch begins every half second, and is at work for a share of that: the load. What a row costs, and what an epoch costs
without rows, is measured first, at two rates. In stretches that take turns, operations without handlers of their own
(every operator takes part) come at a rate, by each mode, or none do. Compared are the epochs: how long they took, and
the CPU time of the driver and its workers for each row, which depends less on what else the machine does. An operation
is complete when the handlers of all tasks have returned.

    python -m benchmarks.control [--quick] [--plot FILE] [--rates 1,10,100] [--loads 50,75,90] [--seconds 6] [--turns 4]
        [--only ysb,impressions]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession
from rich.progress import Progress

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import session
from benchmarks.workloads import impressions, ysb
from midstream import ControlHandle, ControlOperation, Flow, Job, NoopSink

MODES = ("fast", "in-band", "blocking")
PROBES = (5_000, 20_000)
"""Rows per second at which a job is measured first."""
PROBE_EPOCHS = 12
PACE_MS = 500
CLOSE, TRIES = 0.04, 4
"""How close to a load a job must be, and how often another rate is tried."""
SETTLE_S = 2.0
WORKLOADS: dict[str, Callable[[float], Flow]] = {
    "ysb": lambda rate: ysb.flow(ysb.LARGE.events(rate), NoopSink()),
    "impressions": lambda rate: impressions.flow(impressions.LARGE.streams(rate), NoopSink()),
}
PATIENCE_S = 60.0


class NoOp(ControlOperation):
    """All operators take part, and do nothing."""

    def __init__(self, mode: str) -> None:
        self.mode = mode


@dataclass
class Stretch:
    """What was seen in stretches of one kind."""

    epochs_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    rows: int = 0
    took_ms: list[float] = field(default_factory=list)
    """How long each operation took."""
    failed: int = 0

    @property
    def epoch_ms(self) -> float:
        """The median duration of an epoch."""
        return statistics.median(self.epochs_ms) if self.epochs_ms else 0.0

    @property
    def cpu_us_per_row(self) -> float:
        """CPU time of all processes for a row, in microseconds."""
        return 1e6 * self.cpu_s / self.rows if self.rows else 0.0

    def quantile_ms(self, share: float) -> float:
        """How long this share of the operations took at most."""
        ordered = sorted(self.took_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def cpu_seconds() -> float:
    """CPU time of this process and all that it has started, as long as they live."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def operations(job: Job, mode: str, rate: float, until: float, into: Stretch) -> None:
    """Request operations at a rate until a moment, and wait for them; both in one thread, as that takes part, too."""
    begun: list[tuple[float, ControlHandle]] = []
    due = time.perf_counter()
    while due < until:
        time.sleep(max(0.0, due - time.perf_counter()))
        begun.append((time.time(), job.control(NoOp(mode))))
        due += 1 / rate
    for called_at, handle in begun:
        if handle.wait(PATIENCE_S) and handle.error is None and handle.record.ended_at is not None:
            into.took_ms.append(1000 * (handle.record.ended_at - called_at))
        else:
            into.failed += 1


def stretch(job: Job, seconds: float, mode: str | None, rate: float, into: Stretch) -> None:
    """Run for some seconds, with operations at a rate or, without a mode, with none; what is seen is added."""
    began, cpu = job.metrics, cpu_seconds()
    known = {progress.epoch for progress in job.progress}
    until = time.perf_counter() + seconds
    if mode is not None:
        operations(job, mode, rate, until, into)
    time.sleep(max(0.0, until - time.perf_counter()))
    into.cpu_s += cpu_seconds() - cpu
    into.rows += job.metrics.rows_in - began.rows_in
    into.epochs_ms += [progress.duration_ms for progress in job.progress if progress.epoch not in known][1:]


def running(spark: SparkSession, workload: str, rows_per_s: float) -> Iterator[Job]:
    """A job at this rate, once it has settled."""
    flow = WORKLOADS[workload](rows_per_s)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        flow.start(spark, checkpoint=folder, trigger=f"{PACE_MS} ms") as job,
    ):
        job.await_epoch(6, PATIENCE_S)
        time.sleep(SETTLE_S)
        yield job


@dataclass(frozen=True)
class Cost:
    """What an epoch takes: so long, and so long for each row."""

    fixed_ms: float
    row_ms: float

    def rate_at(self, load: float) -> float:
        """The rows per second with which epochs are at work for this share of the time."""
        return max(1.0, load * PACE_MS - self.fixed_ms) / self.row_ms * 1000 / PACE_MS


def cost_of(spark: SparkSession, workload: str) -> Cost:
    """By the median epochs at two rates."""
    one, other = (_found(spark, workload, rate) for rate in PROBES)
    return _line((PROBES[0], one), (PROBES[1], other))


def _found(spark: SparkSession, workload: str, rate: float) -> float:
    for job in running(spark, workload, rate):
        return _median_epoch(job)
    raise AssertionError("a job runs")


def _line(one: tuple[float, float], other: tuple[float, float]) -> Cost:
    """Through two points: rows per second, and how long epochs take."""
    row_ms = max(1e-6, (other[1] - one[1]) / (other[0] - one[0]) * 1000 / PACE_MS)
    return Cost(one[1] - row_ms * one[0] * PACE_MS / 1000, row_ms)


def _median_epoch(job: Job) -> float:
    job.await_epoch(job.metrics.epochs + PROBE_EPOCHS, PATIENCE_S)
    return statistics.median(progress.duration_ms for progress in job.progress[-PROBE_EPOCHS:])


def at_load(spark: SparkSession, workload: str, cost: Cost, load: float) -> Iterator[Job]:
    """A job whose epochs are at work for this share of the time. Rows cost more where there are many, so it is started
    again at another rate until that is so."""
    rate = cost.rate_at(load)
    for attempt in range(TRIES):
        for job in running(spark, workload, rate):
            seen = _median_epoch(job)
            if attempt == TRIES - 1 or abs(seen / PACE_MS - load) <= CLOSE:
                yield job
                return
        rate = _line((PROBES[0], cost.fixed_ms + cost.row_ms * PROBES[0] * PACE_MS / 1000), (rate, seen)).rate_at(load)


def measured(
    spark: SparkSession,
    workload: str,
    cost: Cost,
    load: float,
    rates: Sequence[float],
    seconds: float,
    turns: int,
    advance: Callable[[], object],
) -> dict[tuple[str, float], tuple[Stretch, Stretch]]:
    """By mode and rate: stretches without and with operations, which took turns in one job."""
    found: dict[tuple[str, float], tuple[Stretch, Stretch]] = {}
    for job in at_load(spark, workload, cost, load):
        for rate in rates:
            without = Stretch()
            of_mode = {mode: Stretch() for mode in MODES}
            found.update({(mode, rate): (without, among) for mode, among in of_mode.items()})
            for turn in range(turns):
                order = [None, *MODES]
                for mode in (*order[turn % len(order) :], *order[: turn % len(order)]):
                    stretch(job, seconds, mode, rate, without if mode is None else of_mode[mode])
                    advance()
    return found


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rates", default="1,10,100", help="operations per second")
    parser.add_argument("--loads", default="50,75,90", help="percent of what the job can at most")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a stretch")
    parser.add_argument("--turns", type=int, default=4, help="pairs of stretches")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="the workloads")
    options = parser.parse_args()
    workloads = options.only.split(",")
    if unknown := set(workloads) - WORKLOADS.keys():
        parser.error(f"--only: there is no workload {', '.join(sorted(unknown))}; allowed: {', '.join(WORKLOADS)}")
    rates = [10.0] if options.quick else [float(rate) for rate in options.rates.split(",")]
    loads = [50.0] if options.quick else [float(load) for load in options.loads.split(",")]
    seconds, turns = (2.0, 1) if options.quick else (options.seconds, options.turns)
    rows, figures, of_workload = [], dict[str, Any](), dict[str, Any]()
    with session() as spark, Progress(transient=True) as progress:
        total = len(workloads) * len(loads) * len(rates) * (1 + len(MODES)) * turns
        task = progress.add_task("stretches", total=total)
        for workload in workloads:
            found, cost = {}, cost_of(spark, workload)
            for load in loads:
                share = load / 100
                here = measured(spark, workload, cost, share, rates, seconds, turns, lambda: progress.advance(task))
                for (mode, per_s), (without, among) in here.items():
                    found[load, mode, per_s] = (without, among)
                    rows.append({"workload": workload, **_row(load, mode, per_s, without, among)})
            of_workload[workload] = _figures({mode: found[loads[-1], mode, rates[-1]] for mode in MODES})
    table(
        "control operations that do nothing",
        ("", "load", "seen", "mode", "per s", "epoch", "CPU", "p50 ms", "p99 ms", "epoch ms", "complete", "failed"),
        [tuple(map(str, row.values())) for row in rows],
    )
    for name in of_workload[workloads[0]]:  # the worst of all workloads
        figures[name] = max(each[name] for each in of_workload.values())
    if options.plot:
        _plot(options.plot, rows, rates, loads)
    figures |= {"load": loads[-1], "rate": rates[-1], "workloads": of_workload, "rows": rows}
    closing_line("control", figures, quick=options.quick)


def _figures(highest: dict[str, tuple[Stretch, Stretch]]) -> dict[str, float]:
    """The figures of a workload at the highest load and rate, by mode without and with operations."""
    figures = {}
    for mode, (without, among) in highest.items():
        name = mode.replace("-", "_")
        figures[f"overhead_{name}"] = _ratio(among.epoch_ms, without.epoch_ms)
        figures[f"cpu_{name}"] = _ratio(among.cpu_us_per_row, without.cpu_us_per_row)
    load_seen = round(100 * highest["fast"][0].epoch_ms / PACE_MS)
    return {**figures, "fast_p99_ms": round(highest["fast"][1].quantile_ms(0.99), 1), "load_seen": load_seen}


def _row(load: float, mode: str, rate: float, without: Stretch, among: Stretch) -> dict[str, Any]:
    return {
        "load": load,
        "load_seen": round(100 * without.epoch_ms / PACE_MS),
        "mode": mode,
        "rate": rate,
        "epoch_ratio": _ratio(among.epoch_ms, without.epoch_ms),
        "cpu_ratio": _ratio(among.cpu_us_per_row, without.cpu_us_per_row),
        "p50_ms": round(among.quantile_ms(0.5), 1),
        "p99_ms": round(among.quantile_ms(0.99), 1),
        "epoch_ms": round(without.epoch_ms, 1),
        "complete": len(among.took_ms),
        "failed": among.failed,
    }


def _ratio(one: float, other: float) -> float:
    return round(one / other, 3) if other else 0.0


def _plot(path: Path, rows: Sequence[dict[str, Any]], rates: Sequence[float], loads: Sequence[float]) -> None:
    """What operations cost epochs, and how long they take, by their rate; one line for each mode and load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, grid = plt.subplots(len(workloads), 2, figsize=(10, 4 * len(workloads)), squeeze=False)
    for workload, (left, right) in zip(workloads, grid, strict=True):
        for mode, colour in zip(MODES, ("tab:green", "tab:blue", "tab:red"), strict=True):
            for load, style in zip(loads, ("o:", "s--", "^-"), strict=False):
                wanted = (workload, mode, load)
                here = [row for row in rows if (row["workload"], row["mode"], row["load"]) == wanted]
                label = f"{mode}, {load:g}% load"
                left.plot(rates, [row["epoch_ratio"] for row in here], style, color=colour, label=label)
                right.plot(rates, [row["p50_ms"] for row in here], style, color=colour, label=label)
        for axes, title in ((left, "epoch with operations / without"), (right, "median time to complete, ms")):
            axes.set_xscale("log")
            axes.set_xlabel("operations per second")
            axes.set_title(f"{workload}: {title}")
            axes.grid(alpha=0.3)
        left.axhline(1.0, color="grey", linewidth=0.8)
        right.set_yscale("log")
        left.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
