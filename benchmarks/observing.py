"""What it costs to observe a job: heavy keys in tasks, and the observation of an epoch on the driver. Without Spark.

Tasks are the first stage of a flow that does next to nothing, so that what a sample of keys costs shows as plainly as
it can: rows of a source that are given to partitions by key, with and without the sampler. CPU time, best of several
rounds, in turn.

    python -m benchmarks.observing [--quick]
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from benchmarks.report import arguments, closing_line, table
from midstream import Flow, ListSource, NoopSink, agg
from midstream.change.configuration import FIRST_REVISION, Configuration, first_configuration
from midstream.checkpoint.committed_state import CommittedState
from midstream.control.messages import Commit, TaskId, TaskOrder
from midstream.engine.clock import SystemClock
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.flow.model import Graph
from midstream.ids import Epoch, PartitionId, Run, StageIndex
from midstream.metrics import EpochProgress, HeavyKeys, Histogram, OperatorStats
from midstream.runtime.observer import Observer
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess
from midstream.storage.blobs import BlobStore

KEYS = 100_000
OPERATORS = 20


def flow_of(process: bool) -> Graph:
    """Rows by key: counted, so that partial totals leave; or sent as they are."""
    flow = Flow("observed")
    keyed = flow.source("in", ListSource([[]], "k long, n long")).key_by("by", "k")
    stream = keyed.process_batches("p", _nothing) if process else keyed.aggregate("n", n=agg.sum("n"))
    stream.sink("out", NoopSink())
    return flow.graph


def _nothing(keys: pa.RecordBatch, batch: pa.RecordBatch, state: object) -> None:
    """The second stage does not run here."""


@dataclass
class _Sender:
    """Tasks of the first stage, which send rows to where their keys belong."""

    configuration: Configuration
    resources: Resources
    state: StateAccess
    attempts: int = 0

    def cpu_ns(self, batches: list[pa.RecordBatch], *, is_sampled: bool) -> int:
        """CPU time of one task."""
        self.attempts += 1
        task = TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(0), self.attempts)
        order = TaskOrder(self.configuration.revision, self.configuration.programs[0])
        owners, clock = self.configuration.assignments, SystemClock()
        work = TaskRun(task, order, owners, self.resources, self.state, clock=clock, sizer=SliceSizer())
        if not is_sampled:
            for node in work._runner._nodes.values():
                node.keys = None
        gc.collect()
        with contextlib.closing(work):
            began = time.thread_time_ns()
            for _ in work.run(iter(batches)):
                pass
            took = time.thread_time_ns() - began
            found = {stats.operator: stats.heavy_keys for stats in work.finish().operators}["by"]
            assert bool(found.rows) is is_sampled
        return took


def sampling_ratio(process: bool, rows: int, rounds: int) -> float:
    """CPU time of tasks that look for heavy keys, over that of tasks that do not."""
    graph, rng = flow_of(process), np.random.default_rng(1)
    batches = [
        pa.record_batch({"k": rng.zipf(1.3, 10_000) % KEYS, "n": rng.integers(0, 9, 10_000)})
        for _ in range(rows // 10_000)
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        store = BlobStore(os.path.join(folder, "blobs"))
        state = StateAccess("observed", os.path.join(folder, "state"), os.path.join(folder, "local"))
        sender = _Sender(first_configuration(graph, store, 2), Resources(store), state)
        best = {flag: sender.cpu_ns(batches, is_sampled=flag) for flag in (True, False)}
        for number in range(rounds):
            for flag in (True, False) if number % 2 else (False, True):
                best[flag] = min(best[flag], sender.cpu_ns(batches, is_sampled=flag))
    return best[True] / best[False]


def observation_ms(epochs: int) -> float:
    """Median time to observe an epoch of a flow with 20 operators, all with latencies and heavy keys."""
    flow = Flow("wide")
    stream = flow.source("in", ListSource([[]], "k long"))
    for number in range(OPERATORS):
        stream = stream.map(f"m{number}", _same)
    stream.sink("out", NoopSink())
    graph = flow.graph
    ages = Histogram.of([(1.1**power, 10) for power in range(80)])
    keys = HeavyKeys.of({f"'key {number}'": 1000 - number for number in range(40)}, 50_000)
    stats = tuple(OperatorStats(op.name, 1000, 1000, 10, 500, 100, ages, heavy_keys=keys) for op in graph)
    commit = Commit(Epoch(0), FIRST_REVISION, stats, 8, {})
    progress = EpochProgress(0, 1, 0.0, 100.0, stats, 1000, 1000)
    observer, committed, taken = Observer("job"), CommittedState.of(graph, None), []
    for _ in range(epochs):
        began = time.perf_counter()
        observer.after(graph, commit, progress, committed, 0)
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def _same(row: dict[str, int]) -> dict[str, int]:
    return row


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    quick = arguments(__doc__ or "").parse_args().quick
    rows, rounds = (200_000, 15) if quick else (1_000_000, 40)
    figures = {
        "sampling_ratio_aggregate": round(sampling_ratio(False, rows, rounds), 4),
        "sampling_ratio_process": round(sampling_ratio(True, rows, rounds), 4),
        "observation_ms": round(observation_ms(200), 3),
    }
    table(
        f"first stage, {rows:,} rows of {KEYS:,} keys; {OPERATORS} operators on the driver",
        ("", "figure"),
        [(name, f"{value}") for name, value in figures.items()],
    )
    closing_line("observing", figures, quick=quick)


if __name__ == "__main__":
    main()
