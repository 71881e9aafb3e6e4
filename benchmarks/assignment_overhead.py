"""The cost of owners of bins as data. Without Spark.

Tasks that look up owners are compared with tasks that take a remainder. The baseline is what a job could do whose bins
never move: the partition is the remainder of the bin, and nobody counts the rows of bins. The sender alone does next to
nothing: it hashes rows, gives them to four partitions by key, and encodes them. So what owners cost is measured there,
and set against what all tasks of the epoch take, which also count each key. CPU time, best of several rounds, in turn;
so other work on the machine hardly matters.

    python -m benchmarks.assignment_overhead [--quick]
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.report import arguments, closing_line, table
from midstream import Flow, ListSource, NoopSink, State, agg
from midstream.change.configuration import Configuration, first_configuration
from midstream.control.messages import TaskId, TaskOrder
from midstream.data.hashing import bins_of, hash_columns
from midstream.data.key_space import KeySpace
from midstream.engine.clock import SystemClock
from midstream.engine.collector import Collector, _scattered
from midstream.engine.frames import FrameKind
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.flow.model import Graph
from midstream.ids import Epoch, PartitionId, Revision, Run, StageIndex
from midstream.planner.assignment import Assignment, Assignments
from midstream.planner.stages import Leaves, Wire
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess
from midstream.state.lineage import Lineage
from midstream.storage.blobs import BlobStore

PARTITIONS, KEYS = 4, 10_000
TO, FIRST = StageIndex(1), PartitionId(0)


class _Remainders(Collector):
    """A collector for bins that never move."""

    def add(self, wire: Wire, batch: pa.RecordBatch, revision: Revision) -> None:
        """Add rows."""
        assert wire.key is not None
        self.emitted[wire.id] += batch.num_rows
        bins = bins_of(hash_columns(batch, wire.key), len(self._owners[TO]))
        self._hold(wire, revision, FrameKind.ROWS, _scattered((bins % PARTITIONS).astype(np.uint16), batch))

    def add_partials(self, wire: Wire, batch: pa.RecordBatch, revision: Revision) -> None:
        """Add partial totals."""
        self.emitted[wire.id] += pc.sum(batch.column("rows")).as_py()
        bins = KeySpace(len(self._owners[TO])).bins_of_stored(batch.column("key"))
        self._hold(wire, revision, FrameKind.PARTIALS, _scattered((bins % PARTITIONS).astype(np.uint16), batch))


def flow_of(process: bool) -> Graph:
    """Rows by key, counted: by a function that is called for each row, or by an aggregate."""
    flow = Flow("overhead")
    keyed = flow.source("in", ListSource([[]], "k long, n long")).key_by("by", "k")
    if process:
        keyed.process("count", _count, returns="k long, n long").sink("out", NoopSink())
    else:
        keyed.aggregate("count", n=agg.sum("n")).sink("out", NoopSink())
    return flow.graph


def _count(key: int, row: dict[str, int], state: State) -> dict[str, int]:
    n = state.get(0) + 1
    state.set(n)
    return {"k": key, "n": n}


@dataclass
class _Epoch:
    """The tasks of an epoch of one sender, without Spark between them."""

    configuration: Configuration
    resources: Resources
    state: StateAccess
    attempts: int = 0

    def cpu_ns(self, batches: list[pa.RecordBatch], assignments: Assignments, *, is_fixed: bool) -> tuple[int, int]:
        """CPU time of the sender, and of the sender and all receivers; these are the same without owners."""
        work = self._task(0, FIRST, assignments)
        if is_fixed:
            work._runner._collector = _Remainders(Leaves.EXCHANGE, FIRST, TO, assignments)
        sent, took = _timed(work, batches)
        if is_fixed:
            return took, took
        frames = pa.Table.from_batches(sent)
        total = took
        for number in range(PARTITIONS):
            own = frames.filter(pc.equal(frames["dest"], number)).to_batches()
            total += _timed(self._task(1, PartitionId(number), assignments), own)[1]
        return took, total

    def _task(self, stage: int, partition: PartitionId, assignments: Assignments) -> TaskRun:
        self.attempts += 1
        task = TaskId(Epoch(0), Run(0), StageIndex(stage), partition, self.attempts)
        lineages = {"count": Lineage.start("count", assignments[TO].bins).encode()} if stage else {}
        order = TaskOrder(self.configuration.revision, self.configuration.programs[stage], lineages=lineages)
        clock = SystemClock()
        return TaskRun(task, order, assignments, self.resources, self.state, clock=clock, sizer=SliceSizer())


def _timed(work: TaskRun, batches: list[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], int]:
    gc.collect()
    with contextlib.closing(work):
        began = time.thread_time_ns()
        left = [each for ready in work.run(iter(batches)) for each in ready]
        work.finish()
        return left, time.thread_time_ns() - began


def ratios(process: bool, bins: int, rows: int, rounds: int) -> tuple[float, float, float]:
    """CPU time with remainders over that with permuted owners, of the sender and of all tasks; and what owners cost,
    in nanoseconds a row."""
    rng = np.random.default_rng(1)
    batches = [
        pa.record_batch({"k": rng.integers(0, KEYS, 10_000), "n": rng.integers(0, 9, 10_000)})
        for _ in range(rows // 10_000)
    ]
    owners = Assignment(PARTITIONS, tuple(rng.permutation(np.arange(bins) % PARTITIONS).tolist()))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        store = BlobStore(os.path.join(folder, "blobs"))
        state = StateAccess("overhead", os.path.join(folder, "state"), os.path.join(folder, "local"), durable=False)
        epoch = _Epoch(first_configuration(flow_of(process), store, PARTITIONS, bins=bins), Resources(store), state)
        taken: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for number in range(rounds):
            for flag in (True, False) if number % 2 else (False, True):
                taken[flag].append(epoch.cpu_ns(batches, {TO: owners}, is_fixed=flag))
    fixed, looked_up = (np.array(taken[flag]) for flag in (True, False))
    sender = fixed[:, 0].min() / looked_up[:, 0].min()
    extra = looked_up[:, 0].min() - fixed[:, 0].min()
    total = looked_up[:, 1].min()
    return float(sender), float((total - extra) / total), float(extra / rows)


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    quick = arguments(__doc__ or "").parse_args().quick
    rows, rounds = (100_000, 4) if quick else (400_000, 15)
    found = {
        f"{'process' if process else 'aggregate'}, {bins:,} bins": ratios(process, bins, rows, rounds)
        for process in (False, True)
        for bins in (256, 65_536)
    }
    table(
        f"CPU time of {rows:,} rows of {KEYS:,} keys without owners over that with them",
        ("", "sender", "all tasks", "ns a row"),
        [(name, f"{sender:.3f}", f"{total:.4f}", f"{extra:.1f}") for name, (sender, total, extra) in found.items()],
    )
    usual = min(total for name, (_, total, _) in found.items() if " 256 " in name)
    runs = {
        name: {"sender": round(sender, 4), "all_tasks": round(total, 4), "ns_a_row": round(extra, 2)}
        for name, (sender, total, extra) in found.items()
    }
    closing_line("assignment_overhead", {"assignment_overhead_ratio": round(usual, 4), "runs": runs}, quick=quick)


if __name__ == "__main__":
    main()
