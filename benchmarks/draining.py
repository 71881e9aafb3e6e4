"""One of five executors gives away what it has, under load; a part of :mod:`benchmarks.rescale`.

Twice: as users do it, step by step with state that is loaded ahead; and all at once without that, so that one epoch
reads all the bytes that move. How much longer that epoch takes than usual is the price of the bytes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from benchmarks.due_times import Timeline, first_due
from benchmarks.executors import ExecutorFigures, figures_of
from benchmarks.word_load import STAGE, Load, Patience, fill, filling, flow, loading, source, state_errors
from midstream import Flow, Move, Step

__all__ = ["Drained", "drained"]

PARTITIONS = 5
RATE = 500
"""Rows that are due in a second: few, so that epochs are short and what is added to one can be seen."""
WARM_UP = 6
BETWEEN = 8
"""Epochs between two migrations: more than an executor keeps what it no longer owns."""


@dataclass(frozen=True)
class Drained:
    """An executor gave a share of the state to others."""

    name: str
    keys: int
    share: float
    moved_bytes: int
    extra_ms: float
    """What reading them at once has added to an epoch; the median of several times."""
    drain_s: float | None = None
    """How long ``job.drain`` took, step by step."""
    steps: int | None = None
    before: ExecutorFigures | None = None
    after: ExecutorFigures | None = None


def drained(
    spark: SparkSession,
    keys: int,
    bins: int,
    chunk: int,
    repeat: int,
    patience: Patience,
    *,
    half: bool,
    tell: Callable[[str], None],
) -> tuple[list[Drained], int, int]:
    """Drain one of five executors; with ``half``, have it give away half of its bins as well. Also returns the numbers
    of rows that were lost and doubled."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        timeline = Timeline()

        def words(load: Step, limit: int | None = None) -> Flow:
            return flow(source(keys, load, limit=limit, chunk=limit and chunk), "drain")

        fill(spark, folder, words(filling(keys), keys), timeline, partitions=PARTITIONS, bins=bins)
        start_us = first_due(folder)
        schedule = loading(keys, start_us, RATE)
        with words(schedule).start(spark, checkpoint=folder) as job:
            load = Load(job, timeline, schedule, start_us)
            load.follow(lambda: timeline.rows > keys)
            load.epochs(WARM_UP)
            runs = list(_all(load, keys, repeat, patience, half=half, tell=tell))
        timeline.add(job.progress)
        lost, doubled = state_errors(folder, keys, timeline.rows)
    return runs, lost, doubled


def _all(
    load: Load, keys: int, repeat: int, patience: Patience, *, half: bool, tell: Callable[[str], None]
) -> list[Drained]:
    job = load.job
    load.epochs(patience.steady)
    executor = sorted(each.name for each in job.executors if sum(each.bins.values()))[0]
    owned = _owned(load, executor)
    [stage] = job.assignment()
    share = len(owned) / len(stage.owners)
    before = _figures(load, executor)
    migration = job.drain(executor)
    ended = load.end_of(migration)
    requested = migration.record.requested_at
    load.epochs(BETWEEN)
    after = _figures(load, executor)
    there = {number: job.assignment()[0].owners[number] for number in owned}
    whole = [_at_once(load, owned, there) for _ in range(repeat)]
    moved, extra = statistics.median(bytes_ for bytes_, _ in whole), statistics.median(ms for _, ms in whole)
    name = "large" if half else "small"
    runs = [Drained(name, keys, share, int(moved), extra, ended - requested, len(migration.steps), before, after)]
    if half:
        some = dict(sorted(there.items())[::2])
        parts = [_at_once(load, {number: owned[number] for number in some}, some) for _ in range(repeat)]
        moved, extra = statistics.median(bytes_ for bytes_, _ in parts), statistics.median(ms for _, ms in parts)
        runs.append(Drained("tenth", keys, len(some) / len(stage.owners), int(moved), extra))
    for run in runs:
        tell(f"drain: {run}")
    return runs


def _at_once(load: Load, back: dict[int, int], there: dict[int, int]) -> tuple[int, float]:
    """Bring bins back, then move them in one epoch that reads all of them: bytes, and milliseconds above the usual."""
    load.end_of(load.job.migrate(Move(back, STAGE), strategy="sudden"))
    load.epochs(BETWEEN)
    migration = load.job.migrate(Move(there, STAGE), strategy="sudden", prewarm=False)
    load.end_of(migration)
    [step] = migration.steps
    load.epochs(BETWEEN)
    return step.read or step.bytes, step.epoch_ms - step.steady_ms


def _owned(load: Load, executor: str) -> dict[int, int]:
    """The bins of an executor, each with its partition."""
    [stage] = load.job.assignment()
    own = {each.partition for each in stage.partitions if each.executor == executor}
    return {number: owner for number, owner in enumerate(stage.owners) if owner in own}


def _figures(load: Load, executor: str) -> ExecutorFigures:
    bins = {each.name: sum(each.bins.values()) for each in load.job.executors}
    return figures_of(load.job.id, bins)[executor]
