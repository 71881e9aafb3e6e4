"""A second source comes and goes while a job runs: what a hand-over costs. A part of ``benchmarks.plan_changes``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.changing import PATIENCE_S
from benchmarks.sessions import CORES
from midstream import Flow, GeneratorSource, Insert, MemorySink, Remove, State
from midstream.change.change import Change
from midstream.runtime.spark.job import Job

__all__ = ["HandOver", "Sources", "hand_overs"]

ADD, REMOVE = "add a source", "remove it"
OTHERS = 1_000_000_000
"""The numbers of the second source begin here."""


@dataclass(frozen=True)
class HandOver:
    """One hand-over: the time between two commits beyond a steady epoch, and what came before it."""

    kind: str
    pause_s: float
    longest_s: float
    """The longest time between two commits beyond a steady epoch, from the call on: sources are made beside epochs."""
    prepared_s: float
    """How long that took."""
    committed_s: float
    """From then on until the first epoch of the new plan is committed."""


@dataclass
class Sources:
    """All hand-overs, and what the rows say."""

    found: list[HandOver] = field(default_factory=list)
    steady_s: float = 0.0
    rows: int = 0
    lost: int = 0
    doubled: int = 0


def _numbers(first: int, rate: int) -> GeneratorSource:
    return GeneratorSource(lambda index, rng: {"n": index + first, "k": index % 80}, "n bigint, k bigint", rate)


def _count(key: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    state.set(state.get(0) + 1)
    return row


def hand_overs(
    spark: SparkSession, folder: Path, rate: int, rounds: int, calm: int, advance: Callable[[], object]
) -> Sources:
    """Add and remove the second source ``rounds`` times, with ``calm`` epochs in between."""
    flow, out, results = Flow("two sources"), MemorySink(), Sources()
    rows = flow.source("first", _numbers(0, rate)).union("all", flow.source("spare", _numbers(2 * OTHERS, 1)))
    rows.key_by("by k", "k").process("count", _count, one_to_one=True).sink("out", out)
    steady: list[float] = []
    with flow.start(spark, checkpoint=str(folder / "checkpoint"), partitions=CORES, trigger="100 ms") as job:
        _calm(job, 2 * calm, steady)
        for _ in range(rounds):
            for kind in (ADD, REMOVE):
                results.found.append(_measured(job, kind, rate))
                _calm(job, calm, steady)
                advance()
    results.steady_s = round(statistics.median(steady), 3)
    _verify(results, out)
    return results


def _calm(job: Job, epochs: int, steady: list[float]) -> None:
    assert job.await_epoch(job.metrics.epochs + epochs, PATIENCE_S), "no further epochs"
    times = [each.committed_at for each in job.progress][-epochs:]
    steady += np.diff(times).tolist()


def _measured(job: Job, kind: str, rate: int) -> HandOver:
    usual, called = statistics.median(np.diff([each.committed_at for each in job.progress][-8:]).tolist()), time.time()
    add = Insert(source=lambda flow: flow.source("second", _numbers(OTHERS, rate)), before="all")
    change: Change = job.update(add if kind == ADD else Remove("second"))
    change.require(PATIENCE_S)
    while not (later := [each for each in job.progress if each.revision >= change.revision]):
        assert job.await_epoch(job.metrics.epochs + 1, PATIENCE_S), "no further epochs"  # the outcome is known first
    before = [each for each in job.progress if each.revision < change.revision]
    times = [each.committed_at for each in (*before, later[0])]
    gaps = [end - begin - usual for begin, end in pairwise(times) if end >= called]
    record = change.record
    found = (gaps[-1], max(gaps), record.preparation_ms / 1000, times[-1] - record.requested_at)
    return HandOver(kind, *[round(each, 3) for each in found])


def _verify(results: Sources, out: MemorySink) -> None:
    """Of each source all numbers up to its last one left the job, once."""
    found = np.concatenate([table["n"].to_numpy() for table in out.tables.values()])
    for first in (0, OTHERS, 2 * OTHERS):
        mine = found[(found >= first) & (found < first + OTHERS)]
        different = len(np.unique(mine))
        results.rows += len(mine)
        results.doubled += len(mine) - different
        results.lost += int(mine.max()) - first + 1 - different if len(mine) else 0
