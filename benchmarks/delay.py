"""What the delay of a change depends on: Figures 14, 15 and 16 of the Fries paper, on W1, fries against epoch.

By ingestion rate: payments come at a share of what FD can take, and epochs are as long as it takes to catch up. By
operator cost: as many payments in every epoch, of a model that is cheap or expensive. By workers: the same epoch, cut
into ever more tasks. There are two cores, so at most two tasks run at a time, in waves: those that wait have no delay
of their own, because a task that starts after the request begins with the new function.

    python -m benchmarks.delay [--quick] [--plot FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from rich.progress import Progress

from benchmarks.changing import FULL_LOAD, Changer, Made, Workload, costly, median, running
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, session
from benchmarks.workloads import fries_w1
from examples.fraud.payments import Bank
from midstream import Flow, NoopSink

SCHEDULERS = ("fries", "epoch")
UPDATED = ("FD",)
RATED_COST_US = 500.0
"""What a payment costs in the experiment on rates; 2 cores then take about 3,500 payments/s."""


@dataclass(frozen=True)
class Size:
    """The points of each figure, and how often each is measured by each scheduler."""

    rates: tuple[int, ...]
    costs_us: tuple[int, ...]
    workers: tuple[int, ...]
    changes: int
    rows: int
    """Payments of an epoch in the experiment on costs."""
    epoch_s: float
    """Length of an epoch in the experiment on workers."""


FULL = Size((500, 1500, 2500), (1, 10, 100, 1_000, 10_000), (1, 2, 10, 40), changes=2, rows=800, epoch_s=2.0)
QUICK = Size((300,), (100,), (3,), changes=1, rows=400, epoch_s=1.0)


@dataclass(frozen=True)
class Point:
    """One point of a figure: the changes that were made there."""

    figure: str
    at: int
    epoch_ms: float
    made: tuple[Made, ...]

    def delays(self, scheduler: str, *, running_only: bool = False) -> list[float]:
        """Of one scheduler; those in effect at once may be left out."""
        return [e.delay_ms for e in self.made if e.scheduler == scheduler and not (running_only and e.at_once)]

    def to_json(self) -> dict[str, Any]:
        """For the closing line."""
        found: dict[str, Any] = {"figure": self.figure, "at": self.at, "epoch_length_ms": round(self.epoch_ms)}
        for scheduler in SCHEDULERS:
            found[f"{scheduler}_ms"] = median(self.delays(scheduler))
            found[f"{scheduler}_max_ms"] = round(max(self.delays(scheduler)), 2)
        found["fries_of_others_ms"] = median(self.delays("fries", running_only=True))
        found["changes"] = len(self.delays("fries"))
        found["at_once"] = sum(e.at_once for e in self.made if e.scheduler == "fries")
        return found


def w1(rate: float, rows: int | None, cost_us: float, _: int, version: int) -> Flow:
    """W1 with a model of this cost."""
    return fries_w1.flow(Bank().payments(rate, max_rows_per_epoch=rows), NoopSink(), costly(version, cost_us))


def workload(rate: float, rows: int | None, cost_us: float) -> Workload:
    """W1 as what changes are made of."""
    return Workload("W1", partial(w1, rate, rows, cost_us), (UPDATED,), "event_time", probe=0)


def points(size: Size) -> list[tuple[str, int, Workload, int]]:
    """All points: figure, where, the workload, and tasks of its stage."""
    epoch_rows = round(CORES * size.epoch_s / (RATED_COST_US * 1e-6))
    return [
        *(("rate", rate, workload(rate, None, RATED_COST_US), CORES) for rate in size.rates),
        *(("cost", cost, workload(FULL_LOAD, size.rows, cost), CORES) for cost in size.costs_us),
        *(("workers", n, workload(FULL_LOAD, epoch_rows, RATED_COST_US), n) for n in size.workers),
    ]


def measure(
    spark: SparkSession, figure: str, at: int, of: Workload, tasks: int, changes: int, advance: Callable[[], object]
) -> Point:
    """One point."""
    made = []
    with running(spark, of.flow(0, 0), partitions=tasks, warm_up=5 if figure == "rate" else 2) as job:
        changer = Changer(job, of)
        for _ in range(changes):
            for scheduler in SCHEDULERS:
                made.append(changer.make(UPDATED, scheduler))
                advance()
        epoch_ms = 1000 * changer.epoch_s
    return Point(figure, at, epoch_ms, tuple(made))


def show(found: Sequence[Point]) -> None:
    """One table for each figure."""
    titles = {"rate": "payments/s", "cost": "cost of a payment, µs", "workers": "tasks of FD"}
    for figure, title in titles.items():
        table(
            f"delay by {title}, ms (medians; in brackets without those in effect at once), {CORES} cores",
            (title, "epoch takes", "fries", "fries, worst", "epoch", "epoch, worst"),
            [_line(point) for point in found if point.figure == figure],
        )


def _line(point: Point) -> tuple[str, ...]:
    fries, epoch, others = (
        median(found)
        for found in (point.delays("fries"), point.delays("epoch"), point.delays("fries", running_only=True))
    )
    return (
        f"{point.at:,}",
        f"{point.epoch_ms:,.0f}",
        f"{fries}" if others in (None, fries) else f"{fries} ({others})",
        f"{max(point.delays('fries')):,.1f}",
        f"{epoch:,.0f}",
        f"{max(point.delays('epoch')):,.0f}",
    )


def plot(path: Path, found: Sequence[Point]) -> None:
    """Three panels; every change is a dot, medians are lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), sharey=True)
    titles = {"rate": "payments/s", "cost": "cost of a payment, µs", "workers": "tasks of FD, on two cores"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        here = [point for point in found if point.figure == name]
        for scheduler, colour in (("epoch", "#999999"), ("fries", "#2255aa")):
            dots = [(point.at, delay) for point in here for delay in point.delays(scheduler)]
            axes.scatter([x for x, _ in dots], [y for _, y in dots], s=14, color=colour, alpha=0.5, linewidths=0)
            axes.plot([p.at for p in here], [median(p.delays(scheduler)) for p in here], color=colour, label=scheduler)
        axes.set(yscale="log", xlabel=title, xscale="log" if name == "cost" else "linear")
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
    panels[0].set_ylabel("delay of a change, ms")
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run the benchmark."""
    options = arguments(__doc__ or "").parse_args()
    size, began, found = (QUICK if options.quick else FULL), time.perf_counter(), []
    with session() as spark, Progress() as progress:
        wanted = points(size)
        steps = progress.add_task("changes", total=len(wanted) * size.changes * len(SCHEDULERS))
        for figure, at, of, tasks in wanted:
            found.append(measure(spark, figure, at, of, tasks, size.changes, lambda: progress.advance(steps)))
    show(found)
    if options.plot:
        plot(options.plot, found)
    ratios = [(e, f) for p in found if (e := median(p.delays("epoch"))) and (f := median(p.delays("fries")))]
    figures = {
        "points": [point.to_json() for point in found],
        "fries_max_ms": round(max(max(point.delays("fries")) for point in found), 2),
        "least_epoch_over_fries": round(min(epoch / fries for epoch, fries in ratios), 1),
        "took_s": round(time.perf_counter() - began),
    }
    closing_line("delay", figures, quick=options.quick)


if __name__ == "__main__":
    main()
