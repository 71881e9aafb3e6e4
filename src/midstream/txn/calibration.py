"""Measures the costs on which the choice of a strategy is based: threads, strata, queues and planning."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from midstream.errors import SchemaError
from midstream.flow.transactions.tables import Table
from midstream.flow.transactions.tracing import transaction
from midstream.txn import dependencies
from midstream.txn.batches import Batch, MemoryTables
from midstream.txn.compiler import cache_folder, machine_for, write_whole
from midstream.txn.decision import Calibration
from midstream.txn.dependencies import BatchLayout
from midstream.txn.operations import chains, operations
from midstream.txn.prepared_batch import PreparedBatch, prepare
from midstream.txn.program import Program
from midstream.txn.strategies import SERIAL, Strategy
from midstream.txn.strategies.execution import run

__all__ = ["calibrate", "default_path", "load_calibration", "store_calibration"]

SIZE = 4096
REPEATS = 30
ENOUGH = 0.5
"""Seconds to spend on one measurement, not counting compilation."""

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


def default_path() -> Path:
    """The file of this machine's calibration: ``calibration.json`` in the user's cache folder."""
    return cache_folder() / "calibration.json"


def store_calibration(prices: Calibration, path: Path | None = None) -> Path:
    """Store a calibration for :func:`load_calibration`; return the file."""
    path = path or default_path()
    write_whole(path, prices.to_json())
    return path


def load_calibration(path: Path | None = None) -> Calibration:
    """The calibration stored for this machine, or the defaults. A file given by ``path`` must exist.

    >>> load_calibration(Path("nowhere.json"))
    Traceback (most recent call last):
    ...
    midstream.errors.SchemaError: there is no calibration at nowhere.json; create one with: midstream calibrate
    """
    place = path or default_path()
    try:
        text = place.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path is None:
            return Calibration()
        raise SchemaError(f"there is no calibration at {place}; create one with: midstream calibrate") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"the calibration at {place} cannot be read: {error}") from error
    try:
        return Calibration.from_json(text)
    except SchemaError as error:
        raise SchemaError(f"the calibration at {place} is broken: {error}") from error


def calibrate(threads: int | None = None, *, limit: float = 20.0) -> Calibration:
    """Measure this machine's costs, each as the best of a few runs; the first time, most of the time is compilation.

    Costs that have not been measured after ``limit`` seconds keep their defaults.
    """
    bench = _Bench(Program.of(_bump.trace({"key": "bigint"})), threads or os.cpu_count() or 1)
    python = _Bench(Program.of(_bump_in_python.trace({"key": "bigint"})), 1)
    found = _Prices(time.monotonic() + limit)
    for name, measured in (*_schedule_costs(bench, found), *_version_costs(bench, found), *_python_costs(python)):
        found.take(name, measured)
    return Calibration(**found.prices)


@dataclass
class _Prices:
    """The costs measured so far, and the time to stop."""

    until: float
    prices: dict[str, float] = field(default_factory=dict)

    def take(self, name: str, measured: Callable[[], float]) -> None:
        if time.monotonic() < self.until:
            self.prices[name] = max(measured(), 0.0)

    def __getitem__(self, name: str) -> float:
        return self.prices.get(name, float(getattr(Calibration(), name)))


def _schedule_costs(bench: _Bench, found: _Prices) -> list[tuple[str, Callable[[], float]]]:
    """Costs of whole transactions: in one chain, or all independent."""
    one, scattered, chained = bench.ready(1), bench.ready(SIZE), bench.ready(SIZE, keys=1)

    def plan() -> float:
        return _best(lambda: dependencies.transactions(scattered, bench.layout, bench.members)) / SIZE

    def join() -> float:
        return _best(lambda: dependencies.components(scattered, bench.layout, bench.members)) / SIZE

    def meeting() -> float:
        return (bench.time(chained, Strategy("strata")) - found["start"]) / SIZE - found["plan"]

    def per_unit(exploration: Any) -> float:
        bare = bench.time(scattered, SERIAL) / bench.threads
        spent = bench.time(scattered, Strategy(exploration)) - found["start"] - SIZE * found["plan"] - bare
        return spent / SIZE * bench.threads

    return [
        ("start", lambda: bench.time(one, Strategy("strata"))),
        ("plan", plan),
        ("join", join),
        ("meeting", meeting),
        ("queue", partial(per_unit, "queue")),
        ("wait", partial(per_unit, "depth")),
    ]


def _version_costs(bench: _Bench, found: _Prices) -> list[tuple[str, Callable[[], float]]]:
    scattered = bench.ready(SIZE)
    steps = 2 * SIZE

    def versions(aborts: Any) -> float:
        return (bench.time(scattered, Strategy("strata", "operation", aborts)) - found["start"]) / steps

    def chain() -> float:
        ready = operations(scattered, bench.layout, bench.members, waiting=True)
        return _best(lambda: chains(ready)) / steps

    return [
        ("operation", lambda: versions("eager")),
        ("chain", chain),
        ("repair", lambda: versions("lazy") - found["operation"]),
    ]


def _python_costs(python: _Bench) -> list[tuple[str, Callable[[], float]]]:
    nodes = len(python.program.types[0].nodes)
    return [
        ("node", lambda: python.time(python.ready(SIZE), SERIAL) / SIZE / nodes),
        ("column", lambda: python.time(python.ready(64, keys=1), Strategy("strata")) / 64 / nodes),
    ]


class _Bench:
    """A program that is ready to be timed."""

    def __init__(self, program: Program, threads: int) -> None:
        self.program, self.threads = program, threads
        self.machine, self.layout = machine_for(program), BatchLayout.of(program)
        self.members = np.arange(SIZE)

    def ready(self, size: int, keys: int = SIZE) -> PreparedBatch:
        columns = {"key": np.arange(size) % keys, "time": np.arange(size)}
        return prepare(self.program, Batch.of(columns, order_by="time"), MemoryTables())

    def time(self, batch: PreparedBatch, strategy: Strategy) -> float:
        members = np.arange(len(batch))
        return _best(lambda: run(batch, self.machine, self.layout, members, strategy, self.threads))


def _best(action: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs; the first run compiles. Long actions run less often."""
    best, until = float("inf"), float("inf")
    for turn in range(REPEATS):
        began = time.perf_counter()
        action()
        ended = time.perf_counter()
        best = min(best, ended - began)
        if turn == 0:
            until = ended + ENOUGH
        elif ended > until and turn > 2:
            break
    return best
