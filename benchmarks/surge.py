"""Latency through a surge, with the model swapped twice: Figure 13 of the Fries paper, on W1.

FD runs an expensive model and takes the load well, until the load doubles. A little later the model is replaced by a
cheaper one, and later by a decision tree (scikit-learn): never, with the next epoch, or by Fries. Latency is the time
from when a payment was due until the epoch that scored it was committed. All times of the paper are divided by five;
the rates have the ratio that they have there to what FD can take (1,000 and 2,000 of 1,600 payments/s).

    python -m benchmarks.surge [--quick] [--plot FILE]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession
from rich.progress import Progress, TaskID

from benchmarks.changing import FULL_LOAD, costly, running
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, session
from benchmarks.workloads import fries_w1
from examples.fraud.models import train
from examples.fraud.payments import Bank
from midstream import Flow, MemorySink, NoopSink, Step, Update
from midstream.change.change import Change
from midstream.flow.schedules import Schedule
from midstream.flow.sinks import SinkTarget
from midstream.runtime.spark.job import Job

MODES = ("no change", "epoch", "fries")
CALM, SURGE = 1000 / 1600, 2000 / 1600
"""Rates before and in the surge, as shares of what FD can take."""


@dataclass(frozen=True)
class Size:
    """When things happen, in seconds since the stream began, and what models cost."""

    surge_s: float
    cheaper_s: float
    tree_s: float
    end_s: float
    probe: int
    """Payments of the epochs by which it is found out what FD can take."""
    cost_us: float = 4000.0
    cheaper_us: float = 1600.0


FULL = Size(surge_s=20, cheaper_s=24, tree_s=44, end_s=60, probe=1_200)
QUICK = Size(surge_s=3, cheaper_s=4.5, tree_s=7, end_s=9, probe=200, cost_us=2000.0, cheaper_us=800.0)


@dataclass(frozen=True)
class Course:
    """How a run went: of each epoch, when it was committed, and the mean and the highest latency of its payments."""

    mode: str
    at_s: tuple[float, ...]
    mean_s: tuple[float, ...]
    max_s: tuple[float, ...]
    delays_ms: tuple[float, ...]

    def before(self, moment: float) -> float:
        """The typical latency until then."""
        return statistics.median(
            [mean for at, mean in zip(self.at_s, self.mean_s, strict=True) if at < moment] or self.mean_s[:1]
        )

    def peak(self) -> float:
        """The highest mean of an epoch."""
        return max(self.mean_s)

    def calm_again(self, since: float, calm: float) -> float | None:
        """From when on all epochs are as they were before the surge, or nearly; None if they never are."""
        after = [(at, mean) for at, mean in zip(self.at_s, self.mean_s, strict=True) if at >= since]
        late = [at for at, mean in after if mean > 1.5 * calm]
        if after and late and late[-1] == after[-1][0]:
            return None
        return round(max(late, default=since) - since, 1)


def w1(schedule: Schedule | float, sink: SinkTarget, model: fries_w1.Model, rows: int | None = None) -> Flow:
    """W1 with this load and model."""
    return fries_w1.flow(Bank().payments(schedule, max_rows_per_epoch=rows), sink, model)


def capacity(spark: SparkSession, size: Size) -> float:
    """Payments per second that FD can take with its expensive model, epochs and all."""
    flow = w1(FULL_LOAD, NoopSink(), costly(0, size.cost_us), size.probe)
    with running(spark, flow, warm_up=4) as job:
        return 1000 * size.probe / statistics.median(progress.duration_ms for progress in job.progress[-2:])


def course(
    spark: SparkSession,
    mode: str,
    size: Size,
    most: float,
    tree: fries_w1.Model,
    tick: Callable[[float], object],
) -> Course:
    """One run."""
    load = Step(((0, CALM * most), (size.surge_s, SURGE * most)))
    sink, requested = MemorySink(), list[Change]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flow = w1(load, sink, costly(0, size.cost_us))
        with flow.start(spark, checkpoint=folder, partitions=CORES) as job:
            job.await_epoch(1)
            start = _first_due(sink)
            swaps = ((size.cheaper_s, costly(1, size.cheaper_us)), (size.tree_s, tree))
            for at, model in swaps:
                _sleep_until(start + at, start, tick)
                if mode != "no change":
                    requested.append(job.update(Update("FD", detector(model)), scheduler=mode))
            _sleep_until(start + size.end_s, start, tick)
            made = _course(job, sink, start)
    return Course(mode, *made, tuple(round(each.delay_ms or 0.0, 2) for each in requested))


def detector(model: fries_w1.Model) -> Any:
    """FD with another model."""
    return w1(1, NoopSink(), model).graph.payloads["FD"]


def _sleep_until(moment: float, start: float, tick: Callable[[float], object]) -> None:
    while (left := moment - time.time()) > 0:
        time.sleep(min(left, 0.5))
        tick(time.time() - start)


def _first_due(sink: MemorySink) -> float:
    """When the stream began: the first payment was due then."""
    times = sink.tables[0]["event_time"].cast("int64").to_numpy()
    return float(times.min()) / 1e6


def _course(job: Job, sink: MemorySink, start: float) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    tables = sink.tables
    at, mean, highest = [], [], []
    for progress in job.progress:
        due = tables[progress.epoch]["event_time"].cast("int64").to_numpy() / 1e6
        if len(due):
            ages = progress.committed_at - np.asarray(due)
            at.append(round(progress.committed_at - start, 2))
            mean.append(round(float(ages.mean()), 3))
            highest.append(round(float(ages.max()), 3))
    return tuple(at), tuple(mean), tuple(highest)


def _show(progress: Progress, steps: TaskID, at: float) -> None:
    progress.update(steps, completed=at)


def plot(path: Path, courses: Sequence[Course], size: Size) -> None:
    """Latency over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.6))
    for each, colour in zip(courses, ("#bb5566", "#999999", "#2255aa"), strict=True):
        axes.plot(each.at_s, each.mean_s, marker="o", markersize=3, color=colour, label=each.mode)
    top = max(each.peak() for each in courses)
    marks = ((size.surge_s, "load doubles ", "right"), (size.cheaper_s, " cheaper model", "left"))
    for at, what, side in (*marks, (size.tree_s, " decision tree", "left")):
        axes.axvline(at, color="#cccccc", linewidth=1, linestyle="--")
        axes.text(at, 1.09 * top, what, color="#666666", fontsize=8, ha=side)
    axes.set(xlabel="seconds", ylabel="latency, s (mean of an epoch)", ylim=(0, 1.18 * top), xlim=(0, size.end_s))
    axes.grid(axis="y", color="#eeeeee")
    axes.legend(frameon=False, loc="center left")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run the benchmark."""
    options = arguments(__doc__ or "").parse_args()
    size, began = (QUICK if options.quick else FULL), time.perf_counter()
    tree = fries_w1.TrainedModel(train().customer)
    with session() as spark, Progress() as progress:
        most = capacity(spark, size)
        courses = []
        for mode in MODES:
            shown = partial(_show, progress, progress.add_task(mode, total=size.end_s))
            courses.append(course(spark, mode, size, most, tree, shown))
    calm = statistics.median(each.before(size.surge_s) for each in courses)
    runs = {
        each.mode: {
            "peak_s": round(each.peak(), 2),
            "peak_after_swap_s": round(
                max(m for a, m in zip(each.at_s, each.mean_s, strict=True) if a >= size.cheaper_s), 2
            ),
            "last_s": each.mean_s[-1],
            "calm_again_after_s": each.calm_again(size.cheaper_s, calm),
            "delays_ms": each.delays_ms,
        }
        for each in courses
    }
    table(
        f"latency through a surge, {CORES} cores; {CALM * most:,.0f} payments/s, then twice as many",
        ("", "highest, s", "at the end, s", "calm again, s after the swap", "delays of the swaps, ms"),
        [
            (mode, *(f"{run[name]}" for name in ("peak_s", "last_s", "calm_again_after_s", "delays_ms")))
            for mode, run in runs.items()
        ],
    )
    if options.plot:
        plot(options.plot, courses, size)
    figures = {
        "capacity_rows_per_s": round(most),
        "calm_s": round(calm, 2),
        "runs": runs,
        "courses": {each.mode: [*zip(each.at_s, each.mean_s, strict=True)] for each in courses},
        "took_s": round(time.perf_counter() - began),
    }
    closing_line("surge", figures, quick=options.quick)


if __name__ == "__main__":
    main()
