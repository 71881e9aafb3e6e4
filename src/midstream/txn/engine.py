"""The engine runs a batch of events on tables with a strategy, and returns the outcomes and the changes."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.errors import SchemaError
from midstream.txn.batches import Batch, Result, TableChange, TableSource, Versions
from midstream.txn.compiler import machine_for
from midstream.txn.decision import Calibration, Decision, Shape, decide, repeat
from midstream.txn.dependencies import BatchLayout
from midstream.txn.kernels import compiled
from midstream.txn.prepared_batch import PreparedBatch, Room, prepare
from midstream.txn.program import Program
from midstream.txn.strategies import Strategy
from midstream.txn.strategies.execution import run, run_serial

__all__ = ["Engine"]

Array = npt.NDArray[Any]

PILOT = 64
"""Pilot size: 1/64 of the batch (1/256 once a decision is known), at least 64 transactions; run serially."""

REPEATS = 16
"""Number of batches that may repeat the previous strategies before they are evaluated again."""


class Engine:
    """Runs batches of one program; the result equals running the transactions one by one in timestamp order.

    ``threads`` defaults to the number of cores. Between batches the engine keeps only the cost of transactions, their
    abort ratio and the last decision. Tables come from a :class:`TableSource`, and the changes are in the result.

    >>> import pyarrow as pa
    >>> from midstream.txn import MemoryTables, Table, transaction
    >>> accounts = Table("accounts", key="string", value="double", default=0.0)
    >>> @transaction
    ... def add(t, e):
    ...     balance = t.read(accounts, e.who) + e.amount
    ...     t.require(balance >= 0, "not enough")
    ...     t.write(accounts, e.who, balance)
    ...     return {"balance": balance}
    >>> engine = Engine(Program.of(add.trace({"who": "string", "amount": "double"})), threads=1)
    >>> events = {"ts": [2, 1, 3], "who": ["ann", "ann", "bob"], "amount": [-6.0, 7.0, -1.0]}
    >>> result = engine.execute(Batch.of(pa.table(events), order_by="ts"), MemoryTables())
    >>> result.committed.tolist(), result.returned["balance"].tolist()[:2], result.reason(2)
    ([True, True, False], [1.0, 7.0], 'not enough')
    >>> result.changes["accounts"].keys.to_pylist(), result.changes["accounts"].columns[0].tolist()
    (['ann'], [1.0])
    """

    def __init__(self, program: Program, *, threads: int | None = None, calibration: Calibration | None = None) -> None:
        if threads is not None and threads < 1:
            raise SchemaError(f"an engine needs at least one thread; found {threads}")
        self.program = program
        self.threads = threads or os.cpu_count() or 1
        self.calibration = calibration or Calibration()
        self.machine = machine_for(program)
        self.layout = BatchLayout.of(program)
        self._fewest_slots = int(self.layout.slots.min())
        self._rooms: list[Room] = []
        self._last: tuple[Shape, tuple[Strategy, ...]] | None = None
        self._repeated = 0
        self._abort_ratio: float | None = None  # of the previous batch
        self._cost: float | None = None  # of a transaction, as last measured
        self._call = float("inf")  # overhead of calling a kernel

    def execute(self, batch: Batch, source: TableSource, strategy: Strategy | None = None) -> Result:
        """Run a batch with a strategy, or with the one estimated to be fastest; the result explains which and why."""
        try:  # concurrent batches need buffers of their own
            room = self._rooms.pop()
        except IndexError:
            room = Room(self.program)
        ready = prepare(self.program, batch, source, room)
        if strategy is None:
            explanation = self._run_adaptively(ready, ready.order)
        else:
            run(ready, self.machine, self.layout, ready.order, strategy, self.threads)
            explanation = f"{strategy}, as requested"
        result = finish(ready, explanation)
        self._rooms.append(room)
        return result

    def _run_adaptively(self, ready: PreparedBatch, members: Array) -> str:
        """Run a pilot serially, choose a strategy by its cost, run the rest."""
        if not len(members):
            return "nothing to run"
        if self._is_known_to_be_cheap(members):
            self._cost = self._timed(ready, members) / len(members)
            self._note_aborts(ready)
            return f"serial for {len(members):,} transactions: {self._cost * 1e9:,.0f} ns each, too cheap to plan"
        size = max(PILOT, len(members) // (PILOT if self._last is None else 4 * PILOT))
        pilot, second = members[:size], members[size : 2 * size]
        if self._call == float("inf"):  # the first call compiles, so its time means nothing
            self._timed(ready, pilot[:0])
        self._call = min(self._call, self._timed(ready, pilot[:0]))
        self._cost = max(self._timed(ready, pilot) - self._call, 0.0) / len(pilot)
        if len(second):  # the smaller of two, as one may have been interrupted
            self._cost = min(self._cost, max(self._timed(ready, second) - self._call, 0.0) / len(second))
        aborted = float(np.count_nonzero(ready.reasons[members[: 2 * size]])) / min(2 * size, len(members))
        if self._abort_ratio is not None:  # a pilot is small, and the previous batch may have been different
            aborted = (aborted + self._abort_ratio) / 2
        decision = self._decide(ready, members[2 * size :], self._cost, aborted)
        for group in decision.groups:
            run(ready, self.machine, self.layout, group.members, group.strategy, self.threads, group.units)
        self._note_aborts(ready)
        return decision.text

    def _is_known_to_be_cheap(self, members: Array) -> bool:
        """Whether, judging by the previous batch, planning is far from paying off; then a pilot does not pay either."""
        if self._cost is None or self.program.interpreted:
            return False
        price = self.calibration
        slots = len(members) * self._fewest_slots
        return len(members) * self._cost <= price.start + slots * (price.plan + price.join)

    def _timed(self, ready: PreparedBatch, members: Array) -> float:
        """CPU seconds of this thread for these transactions; time in which others had the core does not count."""
        began = time.thread_time()
        run_serial(ready, self.machine, members)
        return time.thread_time() - began

    def _note_aborts(self, ready: PreparedBatch) -> None:
        self._abort_ratio = float(np.count_nonzero(ready.reasons)) / len(ready)

    def _decide(self, ready: PreparedBatch, members: Array, cost: float, abort_ratio: float) -> Decision:
        shape = Shape.of(ready, cost, abort_ratio)
        if self._last is not None and self._repeated < REPEATS and shape.is_like(self._last[0]):
            self._repeated += 1
            return repeat(ready, self.layout, members, self._last[1], "similar to the previous batch")
        decision = decide(
            ready,
            self.layout,
            members,
            cost=cost,
            abort_ratio=abort_ratio,
            threads=self.threads,
            calibration=self.calibration,
        )
        self._last, self._repeated = (shape, decision.strategies), 0
        return decision


def finish(ready: PreparedBatch, explanation: str = "") -> Result:
    """The result of a batch that has run; it shares no memory with the buffers that the next batch uses."""
    program = ready.program
    return Result(
        committed=ready.reasons == 0,
        reasons=ready.reasons,
        texts=tuple(tuple(require.reason for require in kind.requires) for kind in program.types),
        kinds=ready.kinds,
        returned=ready.outputs,
        changes=_changes(ready),
        versions=_versions(ready),
        explanation=explanation,
    )


def _changes(ready: PreparedBatch) -> dict[str, TableChange]:
    changes = {}
    for number, table in enumerate(ready.program.tables):
        ids = np.flatnonzero(ready.changed[number])
        if len(ids):
            columns = tuple(column[ids] for column in ready.tables[number])
            changes[table.name] = TableChange(ready.known[number].named(ids), columns)
    return changes


def _versions(ready: PreparedBatch) -> dict[str, Versions]:
    """The log entries of this batch: those that are linked to a key, in order."""
    versions = {}
    for number, log in ready.logs.items():
        key_of = _linked(log.head, log.older, log.base)
        entries = (log.base + ready.order[:, None] * log.stride + np.arange(log.stride)).ravel()
        entries = entries[key_of[entries] >= 0]
        versions[ready.program.tables[number].name] = Versions(
            ready.known[number].named(key_of[entries]),
            log.times[entries],
            tuple(column[entries] for column in log.columns),
        )
    return versions


@compiled
def _linked(head: Any, older: Any, base: int) -> Any:
    """For each log entry: the key whose list it is on, if it was added since ``base``, else -1."""
    key_of = np.full(len(older), -1, np.int64)
    for key in range(len(head)):
        entry = head[key]
        while entry >= base:
            key_of[entry] = key
            entry = older[entry]
    return key_of
