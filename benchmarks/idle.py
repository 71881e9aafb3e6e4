"""What it costs to be ready for a change that does not come: the tasks of W1 in one process, without Spark.

Two loops over the same payments: one listens between slices, as a worker does, and keeps samples of rows for the trial
of later changes; the other one does neither. CPU time, best of several rounds, in turn.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from benchmarks.workloads import fries_w1
from examples.fraud.payments import Bank
from midstream import NoopSink
from midstream.change.configuration import Configuration, first_configuration
from midstream.control.messages import TaskId, TaskOrder
from midstream.engine.clock import SystemClock
from midstream.engine.slices import SliceSizer
from midstream.ids import BINS, Epoch, PartitionId, Run, StageIndex
from midstream.planner.assignment import Assignment
from midstream.planner.stages import compile_plan
from midstream.runtime.spark.control_plane import ControlPlane
from midstream.runtime.spark.worker import Whereabouts, _Worker
from midstream.runtime.task import TaskRun
from midstream.state.lineage import Lineage
from midstream.storage.blobs import BlobStore

__all__ = ["idle_overhead_ratio"]

SLICE_ROWS = 64
"""About what fits into a slice if a payment costs 80 µs. Fixed: with slices of other lengths, work would differ."""


class _Fixed(SliceSizer):
    def observe(self, *, rows: int, elapsed_ns: int) -> None:
        """Stay as it is."""


@dataclass
class _Stage:
    """The stage of FD, and what a task of it is given."""

    worker: _Worker
    configurations: tuple[Configuration, Configuration]
    """By partition: the one in which it owns all bins."""
    attempts: int = 0

    def task(self, stage: int, partition: int) -> tuple[TaskId, TaskRun]:
        """A task; only that of partition 0 keeps samples. It owns all bins, and begins without state."""
        self.attempts += 1
        task = TaskId(Epoch(0), Run(0), StageIndex(stage), PartitionId(partition), self.attempts)
        lineages = {"FD": Lineage.start("FD").encode()} if stage else {}
        configuration = self.configurations[partition]
        order = TaskOrder(configuration.revision, configuration.programs[stage], lineages=lineages)
        owners, worker, sizer = configuration.assignments, self.worker, _Fixed(SLICE_ROWS)
        return task, TaskRun(task, order, owners, worker.resources, worker.state, clock=SystemClock(), sizer=sizer)

    def cpu_ns(self, batches: list[pa.RecordBatch], *, is_ready: bool) -> int:
        """CPU time of one task."""
        task, work = self.task(1, 0 if is_ready else 1)
        gc.collect()
        with contextlib.closing(work):
            began = time.thread_time_ns()
            if is_ready:
                with self.worker.attending(task, work) as attention:
                    for _ in work.run(attention.taking(iter(batches))):
                        with attention.waiting():
                            pass
            else:
                for _ in work.run(batches):
                    pass
            return time.thread_time_ns() - began


def idle_overhead_ratio(rows: int, rounds: int) -> float:
    """CPU time of a task that is ready for changes, over that of one that is not."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _stage(folder) as stage:
        source = Bank().payments(1_000_000)
        _, work = stage.task(0, 0)
        with contextlib.closing(work):
            sent = [batch for ready in work.run(source.rows(0, rows, start_us=0)) for batch in ready]
        best = {True: stage.cpu_ns(sent, is_ready=True), False: stage.cpu_ns(sent, is_ready=False)}
        for number in range(rounds):
            for is_ready in (True, False) if number % 2 else (False, True):
                best[is_ready] = min(best[is_ready], stage.cpu_ns(sent, is_ready=is_ready))
    return best[True] / best[False]


@contextlib.contextmanager
def _stage(folder: str) -> Iterator[_Stage]:
    graph = fries_w1.flow(Bank().payments(1_000_000), NoopSink()).graph
    assert len(compile_plan(graph).stages) == 2, "FD stands alone behind the exchange"
    blobs = os.path.join(folder, "blobs")
    first, second = (
        first_configuration(graph, BlobStore(blobs), 2, recorded={StageIndex(1): Assignment(2, (partition,) * BINS)})
        for partition in range(2)
    )
    control = ControlPlane("127.0.0.1")
    try:
        at = Whereabouts(control.address, "idle", blobs, os.path.join(folder, "state"), os.path.join(folder, "local"))
        yield _Stage(_Worker(at), (first, second))
    finally:
        control.close()
