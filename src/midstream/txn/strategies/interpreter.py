"""Runs strata of transactions that call Python functions: all but the calls is done for a whole stratum at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.flow.transactions.expressions import ExpressionNode
from midstream.txn.batches import DTYPES, filled
from midstream.txn.columns import evaluate
from midstream.txn.dependencies import Units
from midstream.txn.kernels import log_entry, window_best, window_total
from midstream.txn.key_numbers import call_per_event
from midstream.txn.prepared_batch import Log, PreparedBatch

__all__ = ["run_columns"]

Array = npt.NDArray[Any]


def run_columns(batch: PreparedBatch, units: Units) -> None:
    """Run whole transactions, stratum by stratum."""
    strata, order = units.strata
    for level in range(len(strata) - 1):
        rows = units.members[order[strata[level] : strata[level + 1]]]
        kinds = batch.kinds[rows]
        for number in range(len(batch.program.types)):
            chosen = rows[kinds == number]
            if len(chosen):
                _Stratum(batch, number, chosen).run()


class _Stratum:
    """Transactions of one type that do not touch each other's keys.

    After each condition only those that pass continue: functions never see values that a condition rules out.
    """

    def __init__(self, batch: PreparedBatch, number: int, rows: Array) -> None:
        self.batch, self.number, self.rows = batch, number, rows
        self.kind = batch.program.types[number]
        self.known: dict[int, Array] = {}
        self.keys: dict[int, Array] = {}

    def run(self) -> None:
        for position, require in enumerate(self.kind.requires):
            holds = self.value(require.condition).astype(np.bool_)
            self.batch.reasons[self.rows[~holds]] = position + 1
            if not holds.all():
                self.keep(holds)
        for write in self.kind.writes:
            self.key(write.slot)
            for value in write.values:
                self.value(value)
        for name, node in self.kind.returns.items():
            self.batch.outputs[name][self.rows] = self.value(node)
        for operation in self.batch.program.operations[self.number]:
            if operation.slot >= 0:
                self.store(operation.slot, operation.nodes)
        self.batch.reasons[self.rows] = 0

    def keep(self, holds: Array) -> None:
        self.rows = self.rows[holds]
        self.known = {index: values[holds] for index, values in self.known.items()}
        self.keys = {slot: keys[holds] for slot, keys in self.keys.items()}

    def value(self, index: int) -> Array:
        return evaluate(self.kind, index, self.known, self.leaf)

    def leaf(self, node: ExpressionNode) -> Array:
        match node.op:
            case "column":
                return self.batch.events[node.param][self.rows]
            case "constant":
                return filled(node.kind if node.kind in DTYPES else "object", node.param, len(self.rows))
            case "read":
                return self.read(node)
            case "window":
                return self.window(node)
        return call_per_event(self.kind, node, self.known, self.leaf)

    def table(self, slot: int) -> int:
        return self.batch.program.table_numbers[self.number][slot]

    def key(self, slot: int) -> Array:
        if slot not in self.keys:
            if self.kind.slots[slot].late:
                add = self.batch.growing_keys(self.table(slot)).add_one
                values = self.value(self.kind.slots[slot].key).tolist()
                self.keys[slot] = np.array([add(value) for value in values], np.int64)
            else:
                self.keys[slot] = self.batch.keys[self.batch.bases[self.rows] + slot]
        return self.keys[slot]

    def read(self, node: ExpressionNode) -> Array:
        slot, column = node.param.slot, node.param.column
        result: Array = self.batch.tables[self.table(slot)][column][self.key(slot)]
        for write in self.kind.writes[: node.param.after]:
            if self.table(write.slot) == self.table(slot):
                own = self.value(write.values[column])
                result = np.where(self.key(write.slot) == self.key(slot), own, result)
        return result

    def window(self, node: ExpressionNode) -> Array:
        of = node.param
        table = self.table(of.slot)
        log = self.batch.logs[table]
        column = self.batch.program.tables[table].columns[of.column]
        times = self.batch.timestamps[self.rows].tolist()
        heads = log.head[self.key(of.slot)].tolist()
        found = [_window(log, head, time, of, column.default) for head, time in zip(heads, times, strict=True)]
        result = np.empty(len(found), DTYPES[node.kind])
        result[:] = found
        return result

    def store(self, slot: int, nodes: tuple[int, ...]) -> None:
        table, keys = self.table(slot), self.key(slot)
        self.batch.changed[table][keys] = True
        for column, node in enumerate(nodes):
            self.batch.tables[table][column][keys] = self.value(node)
        if table in self.batch.logs:
            self.note(self.batch.logs[table], table, slot, nodes)

    def note(self, log: Log, table: int, slot: int, nodes: tuple[int, ...]) -> None:
        mine = [op.slot for op in self.batch.program.operations[self.number] if op.slot >= 0]
        place = [other for other in mine if self.table(other) == table].index(slot)
        for x, (row, key) in enumerate(zip(self.rows.tolist(), self.key(slot).tolist(), strict=True)):
            at = log.base + row * log.stride + place
            time = self.batch.timestamps[row]
            entry = log_entry(key, row, at, log.base, log.stride, time, log.head, log.older, log.times, log.newest)
            for column, node in enumerate(nodes):
                log.columns[column][entry] = self.value(node)[x]


def _window(log: Log, head: int, time: int, of: Any, default: Any) -> Any:
    chain = (head, time - of.size, time, log.older, log.times, log.newest, log.columns[of.column])
    if of.aggregate in ("min", "max"):
        return window_best(*chain, of.aggregate == "max", log.columns[of.column].dtype.type(default))
    total: Any
    if log.columns[of.column].dtype == np.int64:  # unsigned sums wrap around, see codegen.WRAPPING
        total, count = window_total(*chain[:-1], chain[-1].view(np.uint64), np.uint64(0))
        total = np.uint64(total).astype(np.int64)
    else:
        total, count = window_total(*chain, 0.0)
    if of.aggregate == "mean":
        return float(total) / count if count else float(default)
    return count if of.aggregate == "count" else total
