"""A job with a partition that has too much to do, before and after it is relieved: once with as many rows as it can
take, and once with a constant load.

Under a constant load rows come whether or not the job is ready, so what an epoch takes has a share in how many rows the
next one has: near the most that a job can do, rows wait for far longer than throughput alone says.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.due_times import Latencies, Timeline, started_at
from benchmarks.word_load import PATIENCE_S, Load
from midstream import Flow, Job, Step

__all__ = ["Full", "Relieved", "Size", "Trial", "relieved", "under_full_load"]

LOAD = 0.9
"""The constant load, as a share of the most that the job does before it is relieved."""
BACKLOG = 20.0
"""As many times as many rows are due as a job could take, where it is to take as many as it can."""
SETTLES = 3
"""Epochs after a change that do not count."""


@dataclass(frozen=True)
class Size:
    """Rows of an epoch under full load, the epochs that count then and those before; seconds with a tenth of the
    constant load, until that has settled, and that count."""

    rows: int
    epochs: int
    warm_up: int
    calm_s: float
    settle_s: float
    measured_s: float


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    flow: Callable[[Step, int | None], Flow]
    """The flow, by when rows are due and how many rows an epoch may have."""
    relieve: Callable[[Job], object]
    """Relieves the job, and returns when it is."""
    errors: Callable[[Job, str, Step], int]
    """By how much a job that has stopped is wrong, by its checkpoint and the schedule."""
    partitions: int
    rows_per_s: float
    """About as many rows as the job can take; only for the backlog."""
    share: float = 1.0
    """All rows of an epoch, as a multiple of those that the schedule is about."""


@dataclass(frozen=True)
class Full:
    """What was seen under full load."""

    imbalance: float
    """Rows of the busiest partition over the mean of all."""
    epoch_ms: float
    stage_ms: float
    """The last stage, of the first task's beginning to the last one's end."""
    rows_per_s: float


@dataclass(frozen=True)
class Relieved:
    """A job before and after it was relieved."""

    full: tuple[Full, Full]
    load_rows_per_s: float
    constant: tuple[Latencies, Latencies]
    wrong: int

    @property
    def throughput_gain(self) -> float:
        """By which share of the throughput before more rows are taken under full load."""
        before, after = self.full
        return after.rows_per_s / before.rows_per_s - 1

    def latency_change(self, quantile: float | None = None) -> float:
        """By which share of what it was the latency has changed under the constant load: the mean, or a quantile."""
        before, after = (self.latency(each, quantile) for each in self.constant)
        return after / before - 1

    @staticmethod
    def latency(seen: Latencies, quantile: float | None = None) -> float:
        """The mean latency, or a quantile; seconds."""
        return float(np.mean(seen.waited)) if quantile is None else seen.quantile(quantile)


def relieved(spark: SparkSession, trial: Trial, size: Size, tell: Callable[[str], object]) -> Relieved:
    """Both: under full load, and under a constant load that follows from it."""
    before, after, wrong = _full(spark, trial, size)
    tell(f"full load: {before.rows_per_s:,.0f} rows/s, then {after.rows_per_s:,.0f}")
    rate = LOAD * before.rows_per_s
    earlier, later, more = _constant(spark, trial, size, rate)
    tell(f"{rate:,.0f} rows/s: {Relieved.latency(earlier):.2f} s, then {Relieved.latency(later):.2f}")
    return Relieved((before, after), rate, (earlier, later), wrong + more)


def under_full_load(spark: SparkSession, trial: Trial, size: Size) -> Full:
    """Only that, without a relief."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        _started(spark, trial, size, folder) as job,
    ):
        return _seen(job, size)


def _started(spark: SparkSession, trial: Trial, size: Size, folder: str) -> Job:
    job = trial.flow(_backlog(trial), size.rows).start(spark, checkpoint=folder, partitions=trial.partitions)
    job.await_epoch(size.warm_up, PATIENCE_S)
    return job


def _backlog(trial: Trial) -> Step:
    return Step(((0.0, BACKLOG * trial.rows_per_s),))


def _seen(job: Job, size: Size) -> Full:
    """What is seen under full load from now on."""
    job.await_epoch(job.progress[-1].epoch + SETTLES, PATIENCE_S)
    began = job.progress[-1].epoch
    job.await_epoch(began + size.epochs, PATIENCE_S)
    seen = [each for each in job.progress if each.epoch >= began]
    stages = [[phase for phase in each.phases if phase.name.startswith("stage")][-1] for each in seen[1:]]
    [shares] = job.assignment()
    rows = [share.rows_per_s for share in shares.partitions]
    return Full(
        round(max(rows) * len(rows) / sum(rows), 2),
        statistics.median(each.duration_ms for each in seen[1:]),
        statistics.median(stage.ms for stage in stages),
        size.rows / float(np.median(np.diff([each.committed_at for each in seen]))),
    )


def _full(spark: SparkSession, trial: Trial, size: Size) -> tuple[Full, Full, int]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with _started(spark, trial, size, folder) as job:
            before = _seen(job, size)
            trial.relieve(job)
            after = _seen(job, size)
        return before, after, trial.errors(job, folder, _backlog(trial))


def _constant(spark: SparkSession, trial: Trial, size: Size, rate: float) -> tuple[Latencies, Latencies, int]:
    schedule = Step(((0.0, rate / 10), (size.calm_s, rate)))
    all_rows = Step(tuple((at, trial.share * each) for at, each in schedule.steps))
    timeline = Timeline()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with trial.flow(schedule, None).start(spark, checkpoint=folder, partitions=trial.partitions) as job:
            job.await_epoch(1, PATIENCE_S)
            start_us = started_at(folder)[0]
            load = Load(job, timeline, all_rows, start_us)

            def seen(seconds: float) -> Latencies:
                """The rows of the next seconds."""
                first, end = len(timeline.ends), time.time() + seconds
                load.follow(lambda: time.time() >= end)
                return load.since(first)

            load.follow(lambda: time.time() >= start_us / 1e6 + size.calm_s + size.settle_s)
            before = seen(size.measured_s)
            trial.relieve(job)
            seen(size.settle_s)
            after = seen(size.measured_s)
        return before, after, trial.errors(job, folder, schedule)
