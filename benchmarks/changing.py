"""What experiments on live changes share: the five workloads under load, and changes at random moments of epochs.

Each workload is under full load: the source always has a whole epoch ready, so both cores are busy all the time. How
many rows make an epoch of the wanted length is found out beforehand, on the machine at hand.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from benchmarks.sessions import CORES
from benchmarks.workloads import fries_w1, fries_w2, fries_w3, fries_w4, fries_w5
from benchmarks.workloads.costs import CostlyBatches, CostlyModel
from examples.fraud.payments import Bank
from midstream import Flow, GeneratorSource, NoopSink, Update
from midstream.audit import decide
from midstream.change.change import Change
from midstream.checkpoint.audit_files import read_history
from midstream.checkpoint.change_records import Outcome
from midstream.operators.lookup import Lookup
from midstream.runtime.spark.job import Job

__all__ = [
    "COST_US",
    "FULL_LOAD",
    "WORKLOADS",
    "Another",
    "Changer",
    "Made",
    "Workload",
    "audited",
    "costly",
    "median",
    "rows_for",
    "running",
]

COST_US = 200.0
"""What a model costs per payment, unless an experiment says otherwise."""
FULL_LOAD = 1_000_000
"""Rows due per second: more than any flow takes, and every row has a microsecond of its own."""
PATIENCE_S = 180.0
EPOCH_OVERHEAD_S = 0.4
"""About what an epoch takes without rows (see benchmarks.pipeline)."""
GOLDEN = 0.618034


# ── the workloads, in versions that differ in every function ──────────────────────────────────────────────────────


@dataclass(frozen=True)
class Another:
    """The same batch function under another version: a change to it is a change, and costs what it did before."""

    function: Callable[[pa.RecordBatch], Any]
    version: int

    def __call__(self, batch: pa.RecordBatch) -> Any:
        """Call it."""
        return self.function(batch)


@dataclass(frozen=True)
class Workload:
    """A flow by rows per epoch and version; the sets of operators that are changed; what identifies its rows."""

    name: str
    flow: Callable[[int, int], Flow]
    updated: tuple[tuple[str, ...], ...]
    audit: str
    probe: int
    """Rows of a short epoch."""
    longer: float = 1.0
    """How many times as long as others an epoch of it takes: where a change must wait, that shows only in long ones."""

    def updates(self, operators: Sequence[str], version: int) -> list[Update]:
        """These operators as they are in another version."""
        graph = self.flow(1, version).graph
        return [Update(name, _versioned(graph[name].spec, graph.payloads[name], version)) for name in operators]


def _versioned(spec: Any, payload: Any, version: int) -> Any:
    """Models and tables have versions of their own."""
    if isinstance(spec, Lookup) or isinstance(payload, fries_w1.FraudDetector):
        return payload
    return Another(payload, version)


def costly(version: int, cost_us: float = COST_US) -> CostlyModel:
    """A model of some cost; versions weigh differently."""
    return CostlyModel(fries_w1.LinearModel(excess=0.3 + 0.001 * version), cost_us)


@cache
def _bank() -> Bank:
    return Bank()


def _w1(rows: int, version: int) -> Flow:
    return fries_w1.flow(_bank().payments(FULL_LOAD, max_rows_per_epoch=rows), NoopSink(), costly(version))


def _w2(rows: int, version: int) -> Flow:
    source = fries_w2.sales(10 * FULL_LOAD, max_rows_per_epoch=rows)
    return fries_w2.flow(source, NoopSink(), _w2_tables(version % 2), exchanges=True)


@cache
def _w2_tables(version: int) -> dict[str, pa.Table]:
    """All sales go through: with the query's conditions there would be next to nothing left to do for J3 and J4."""
    known = fries_w2.tables(selective=False)
    return {name: fries_w2.revised(name, selective=False) for name in known} if version else known


def _w3(rows: int, version: int) -> Flow:
    streams = fries_w3.sales(10 * FULL_LOAD, max_rows_per_epoch=rows)
    numbered = fries_w3.Sales(*(_numbered(stream, i) for i, stream in enumerate(streams)))
    return fries_w3.flow(numbered, NoopSink(), _w3_tables(version % 2), exchanges=True)


@cache
def _w3_tables(version: int) -> dict[str, pa.Table]:
    known = fries_w3.tables(selective=False)
    return {name: fries_w3.revised(name, selective=False) for name in known} if version else known


def _numbered(stream: GeneratorSource, channel: int) -> GeneratorSource:
    """W3 numbers the sales of each channel; the auditor must tell those of different channels apart."""
    return replace(stream, make=partial(_renumber, stream.make, channel))


def _renumber(make: Callable[..., Any], channel: int, indexes: Any, rng: np.random.Generator) -> Any:
    return {**make(indexes, rng), "sale": indexes * 3 + channel}


def _w4(rows: int, version: int) -> Flow:
    return fries_w4.flow(
        fries_w4.groups(_bank(), FULL_LOAD, max_rows_per_epoch=rows), NoopSink(), costly(version, COST_US / 2)
    )


def _w5(rows: int, version: int) -> Flow:
    source = fries_w5.payments(_bank(), FULL_LOAD, max_rows_per_epoch=rows)
    # E1 costs something, too, so that changes of it meet tasks at work: it sees two payments of five, behind a join.
    verdict = CostlyBatches(fries_w5.judge, COST_US)
    return fries_w5.flow(source, NoopSink(), costly(version), costly(version, COST_US / 2), verdict=verdict)


WORKLOADS = (
    Workload("W1", _w1, (("FD",),), "event_time", probe=6_000),
    Workload("W2", _w2, (("J1",), ("J2",), ("J1", "J3"), ("J1", "J4"), ("J3", "J4")), "sale", probe=300_000),
    Workload(
        "W3",
        _w3,
        (("J5",), ("J5", "J6"), ("J5", "J6", "J7", "J8"), ("J5", "J6", "J7", "J9"), ("J7", "J8", "J9")),
        "sale",
        probe=100_000,
    ),
    Workload("W4", _w4, (("F1", "U2"), ("FD1",), ("F2",)), "event_time", probe=1_500),
    Workload("W5", _w5, (("FD4",), ("F3",), ("F4",), ("FD3", "FD4"), ("E1",)), "payment", probe=3_000, longer=2.2),
)


# ── running them ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def running(spark: SparkSession, flow: Flow, *, partitions: int = CORES, warm_up: int = 2) -> Iterator[Job]:
    """A flow at work, warmed up."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        flow.start(spark, checkpoint=folder, partitions=partitions) as job,
    ):
        job.await_epoch(warm_up)
        yield job


def rows_for(spark: SparkSession, workload: Workload, epoch_s: float) -> int:
    """How many rows make an epoch of this length, here and now."""
    with running(spark, workload.flow(workload.probe, 0), warm_up=4) as job:
        found = statistics.median(progress.duration_ms for progress in job.progress[-2:]) / 1000
    return round(workload.probe * (epoch_s - EPOCH_OVERHEAD_S) / max(found - EPOCH_OVERHEAD_S, 0.1))


@dataclass(frozen=True)
class Made:
    """A change that was made.

    ``at_once``: it was in effect without waiting for any task, because none was running that hosts an updated operator;
    the rest of them were told their new function when they started. ``is_single``: its components are single operators.
    """

    updated: tuple[str, ...]
    scheduler: str
    delay_ms: float
    preparation_ms: float
    at_once: bool
    is_single: bool

    @classmethod
    def of(cls, change: Change) -> Made:
        """What became of a change that is over."""
        record, plan = change.record, change.plan
        assert record.delay_ms is not None
        return cls(
            record.operators,
            record.scheduler,
            record.delay_ms,
            record.preparation_ms,
            at_once=record.delay_ms == record.events[0].at_ms,
            is_single=all(len(component.operators) == 1 for component in plan.components),
        )


class Changer:
    """Makes changes of a job one after the other, each at another moment of an epoch.

    The moments of each scheduler follow the golden ratio: spread over the epoch however few there are.
    """

    def __init__(self, job: Job, workload: Workload, seed: int = 0) -> None:
        self._job = job
        self._workload = workload
        self._rng = np.random.default_rng(seed)
        self._moments: dict[str, float] = {}
        self._versions: Counter[str] = Counter()

    def make(self, updated: tuple[str, ...], scheduler: str) -> Made:
        """Make a change now, in the middle of the epoch that has just begun, and wait until it is applied."""
        # Tables have two versions, and sets of operators overlap: each operator goes to its own next version.
        updates = [each for name in updated for each in self._workload.updates([name], self._next_version(name))]
        time.sleep(self._moment(scheduler) * self.epoch_s)
        change = self._job.update(*updates, scheduler=scheduler)
        if change.wait(PATIENCE_S) is not Outcome.APPLIED:
            raise RuntimeError(f"{self._workload.name}: {change!r}: {change.error or change.events}")
        return Made.of(change)

    def _next_version(self, operator: str) -> int:
        self._versions[operator] += 1
        return self._versions[operator]

    @property
    def epoch_s(self) -> float:
        """What an epoch takes at the moment."""
        return statistics.median(progress.duration_ms for progress in self._job.progress[-3:]) / 1000

    def _moment(self, scheduler: str) -> float:
        before = self._moments.get(scheduler)
        now = self._rng.random() if before is None else (before + GOLDEN) % 1.0
        self._moments[scheduler] = now
        return float(now)


def audited(
    spark: SparkSession,
    workload: Workload,
    schedulers: Sequence[str],
    rounds: int,
    rows: int,
    advance: Callable[[], object],
) -> tuple[int, int]:
    """Make changes of short epochs in audit mode; gives how many changes, and how many rows met a mixture."""
    made = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flow = workload.flow(rows, 0)
        with flow.start(spark, checkpoint=folder, partitions=CORES, audit=workload.audit) as job:
            job.await_epoch(2)
            changer = Changer(job, workload, seed=1)
            for i in range(rounds):
                for scheduler in schedulers:
                    changer.make(workload.updated[(made + i) % len(workload.updated)], scheduler)
                    made += 1
                    advance()
            history = job.history()
        verdict = decide(read_history(f"{folder}/audit"), {record.revision: record.operators for record in history})
    return made, verdict.violations


def median(values: Sequence[float]) -> float | None:
    """The median to two digits; None of nothing."""
    return round(statistics.median(values), 2) if values else None
