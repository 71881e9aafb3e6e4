"""Measure on this machine what the choice of a strategy rests on: what threads, strata, queues and planning cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from midstream.txn import planning
from midstream.txn.batches import Batch, MemoryTables
from midstream.txn.compiling import machine_for
from midstream.txn.deciding import Calibration
from midstream.txn.operations import chains, operations
from midstream.txn.planning import Layout
from midstream.txn.preparing import Prepared, prepare
from midstream.txn.program import Program
from midstream.txn.strategies import SERIAL, Strategy
from midstream.txn.strategies.running import run
from midstream.txn.tables import Table
from midstream.txn.tracing import transaction

__all__ = ["calibrate"]

SIZE = 4096
REPEATS = 30

_counters = Table("counters", key="bigint", value="bigint", default=0)


@transaction
def _bump(t: Any, e: Any) -> None:
    count = t.read(_counters, e.key)
    t.require(count >= 0)
    t.write(_counters, e.key, count + 1)


@transaction
def _bump_in_python(t: Any, e: Any) -> None:
    count = t.call(int, t.read(_counters, e.key), returns="bigint")
    t.require(count >= 0)
    t.write(_counters, e.key, count + 1)


def calibrate(threads: int | None = None) -> Calibration:
    """The machine's prices, from the best of a few runs each; takes some seconds, most of them for compiling."""
    bench = _Bench(Program.of(_bump.trace({"key": "bigint"})), threads or os.cpu_count() or 1)
    python = _Bench(Program.of(_bump_in_python.trace({"key": "bigint"})), 1)
    one, scattered, chained = bench.ready(1), bench.ready(SIZE), bench.ready(SIZE, keys=1)
    slots, steps = SIZE, 2 * SIZE
    start = bench.time(one, Strategy("strata"))
    plan = _best(lambda: planning.transactions(scattered, bench.layout, bench.members))
    bare = bench.time(scattered, SERIAL)

    def per_unit(exploration: Any) -> float:
        spent = bench.time(scattered, Strategy(exploration)) - start - plan - bare / bench.threads
        return max(spent, 0.0) / SIZE * bench.threads

    eager = bench.time(scattered, Strategy("strata", "operation", "eager"))
    lazy = bench.time(scattered, Strategy("strata", "operation", "lazy"))
    found = operations(scattered, bench.layout, bench.members, waiting=True)
    nodes = len(python.program.types[0].nodes)
    return Calibration(
        start=start,
        meeting=max(bench.time(chained, Strategy("strata")) - start - plan, 0.0) / SIZE,
        wait=per_unit("depth"),
        queue=per_unit("queue"),
        plan=plan / slots,
        join=_best(lambda: planning.components(scattered, bench.layout, bench.members)) / slots,
        operation=max(eager - start, 0.0) / steps,
        chain=_best(lambda: chains(found)) / steps,
        repair=max(lazy - eager, 0.0) / steps,
        node=python.time(python.ready(SIZE), SERIAL) / SIZE / nodes,
        column=python.time(python.ready(64, keys=1), Strategy("strata")) / 64 / nodes,
    )


class _Bench:
    """A program, ready to be timed."""

    def __init__(self, program: Program, threads: int) -> None:
        self.program, self.threads = program, threads
        self.machine, self.layout = machine_for(program), Layout.of(program)
        self.members = np.arange(SIZE)

    def ready(self, size: int, keys: int = SIZE) -> Prepared:
        columns = {"key": np.arange(size) % keys, "time": np.arange(size)}
        return prepare(self.program, Batch.of(columns, order_by="time"), MemoryTables())

    def time(self, batch: Prepared, strategy: Strategy) -> float:
        members = np.arange(len(batch))
        return _best(lambda: run(batch, self.machine, self.layout, members, strategy, self.threads))


def _best(action: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs; the first one compiles."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - began)
    return best
