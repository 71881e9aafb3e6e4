"""The machine time of a control operation where it takes some: in a task, and on the coordinator.

CPU time, so that other work on the machine hardly shows. A task is the first stage of a small flow: rows with a key,
sent to eight partitions. It takes part in no operation, in one, and in a hundred at once; the difference is what an
operation costs there. The coordinator hears of one fast operation from all of its tasks.

    python -m benchmarks.control_cost [--quick] [--plot FILE]
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.report import arguments, closing_line, table
from midstream import ControlOperation, Flow, ListSource, NoopSink, agg
from midstream.change.configuration import FIRST_REVISION, Configuration, first_configuration
from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    ControlBegun,
    EpochOpened,
    Handled,
    Received,
    TaskId,
    TaskOrder,
    TaskStarted,
    WorkerId,
    WorkerJoined,
)
from midstream.engine.clock import SystemClock
from midstream.engine.control_operations import ControlMode, prepared
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.ids import Digest, Epoch, PartitionId, Run, StageIndex
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess
from midstream.storage.blobs import BlobStore

PARTITIONS, ROWS, KEYS = 8, 1_000, 100
AT_ONCE = 100
TASKS = (8, 64, 512, 4_096, 8_192)


class NoOp(ControlOperation):
    """All operators take part, and do nothing."""


class Bench:
    """Tasks of the first stage of a flow, on a store of their own."""

    def __init__(self, folder: str) -> None:
        flow = Flow("costs")
        rows = flow.source("in", ListSource([[]], "k long, n long"))
        keyed = rows.with_columns("twice", n="2 * n").key_by("by", "k")
        keyed.aggregate("sum", n=agg.sum("n")).sink("out", NoopSink())
        store = BlobStore(os.path.join(folder, "blobs"), durable=False)
        self.configuration: Configuration = first_configuration(flow.graph, store, PARTITIONS)
        self._resources = Resources(store)
        self._state = StateAccess("costs", os.path.join(folder, "state"), os.path.join(folder, "local"))
        program = prepared(NoOp(), flow.graph)
        store.put(program.blob)
        self._program, self._operators = program.blob.digest, program.operators
        rng = np.random.default_rng(1)
        self._batches = [pa.record_batch({"k": rng.integers(0, KEYS, ROWS), "n": rng.integers(0, 9, ROWS)})]
        self._attempts = 0

    def orders(self, mode: ControlMode, count: int) -> tuple[ControlOrder, ...]:
        """As many operations."""
        return tuple(
            ControlOrder(number, "NoOp", mode, self._program, self._operators, (StageIndex(0),), "")
            for number in range(count)
        )

    def cpu_us(self, orders: Sequence[ControlOrder]) -> float:
        """CPU time of one task that takes part in these operations."""
        self._attempts += 1
        task = TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(0), self._attempts)
        fast = [order for order in orders if order.mode is ControlMode.FAST]
        order = TaskOrder(FIRST_REVISION, self.configuration.programs[0], controls=tuple(orders))
        owners = self.configuration.assignments
        work = TaskRun(task, order, owners, self._resources, self._state, clock=SystemClock(), sizer=SliceSizer())
        gc.collect()
        with contextlib.closing(work):
            began = time.thread_time_ns()
            for each in fast:
                work.handle(each)
            for _ in work.run(iter(self._batches)):
                pass
            work.finish()
            return (time.thread_time_ns() - began) / 1000


def task_costs(rounds: int) -> dict[str, float]:
    """CPU time of an operation in a task, in microseconds: alone, and among a hundred. Medians of differences."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bench, found = Bench(folder), {}
        for mode in ControlMode:
            for count in (1, AT_ONCE):
                orders, differences = bench.orders(mode, count), []
                bench.cpu_us(orders)
                for number in range(rounds):
                    both = {each: bench.cpu_us(each) for each in ((), orders)[:: 1 if number % 2 else -1]}
                    differences.append((both[orders] - both[()]) / count)
                name = f"{str(mode).replace('-', '_')}_{'alone' if count == 1 else f'of_{count}'}_us"
                found[name] = round(statistics.median(differences), 1)
        return found


def coordinator_us(tasks: int, rounds: int) -> float:
    """CPU time of the coordinator for each task of a fast operation, in microseconds: to tell it, and to hear of it."""
    taken = []
    order = ControlOrder(1, "NoOp", ControlMode.FAST, Digest("ab"), ("a",), (StageIndex(0),), "")
    for _ in range(rounds):
        coordinator = Coordinator()
        coordinator.handle(EpochOpened(Epoch(0), Run(0), FIRST_REVISION, (Digest("p"),)))
        names = [TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(each), each) for each in range(tasks)]
        for task in names:
            worker = WorkerId("host", task.attempt)
            coordinator.handle(Received(b"%d" % task.attempt, WorkerJoined(worker)))
            coordinator.handle(Received(b"task", TaskStarted(task, worker)))
        gc.collect()
        began = time.thread_time_ns()
        told = coordinator.handle(ControlBegun(order))
        for task in names:
            ended = coordinator.handle(Received(b"lifeline", Handled(task, ControlReport(1, ("a",)))))
        taken.append((time.thread_time_ns() - began) / 1000 / tasks)
        assert (len(told), len(ended)) == (tasks, 1)
    return round(statistics.median(taken), 2)


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    options = arguments(__doc__ or "").parse_args()
    quick = options.quick
    costs = task_costs(15 if quick else 101)
    tasks = TASKS[:2] if quick else TASKS
    growth = {count: coordinator_us(count, 1 if quick else 3) for count in tasks}
    rows = [(name.removesuffix("_us").replace("_", " "), f"{value} µs") for name, value in costs.items()]
    rows += [(f"coordinator, {count:,} tasks", f"{value} µs a task") for count, value in growth.items()]
    table("CPU time of a control operation that does nothing", ("where", "costs"), rows)
    if options.plot:
        _plot(options.plot, growth)
    figures = {**costs, "coordinator_us": growth, "growth": round(growth[tasks[-1]] / growth[tasks[0]], 2)}
    closing_line("control_cost", figures, quick=quick)


def _plot(path: Path, growth: dict[int, float]) -> None:
    """Work for each task by the number of tasks: flat if nothing grows with it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(list(growth), list(growth.values()), "o-")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.5 * max(growth.values()))
    axes.set_xlabel("tasks at work")
    axes.set_ylabel("coordinator's CPU time for each, µs")
    axes.set_title("a fast control operation: tell all tasks, hear from all")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
