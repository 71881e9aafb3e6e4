"""Runs transactions serially, one event at a time, on dictionaries: the reference for every other way to run them.

It shares nothing with the engine but the traced form of a transaction. It is the oracle of the engine's tests, so a
mistake must not be able to hide in both. It is written for clarity, not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.flow.transactions.expressions import ExpressionNode, TransactionType, WindowOf

__all__ = ["SerialTables", "TransactionOutcome", "run_serially"]

Value = tuple[Any, ...]


@dataclass(frozen=True)
class TransactionOutcome:
    """The outcome of one event: committed with returned columns, or aborted for a reason."""

    committed: bool
    reason: str | None = None
    returned: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class SerialTables:
    """Tables as dictionaries, and for each key all writes ever, with their times."""

    values: dict[str, dict[Hashable, Value]] = field(default_factory=dict)
    written: dict[str, dict[Hashable, list[tuple[int, Value]]]] = field(default_factory=dict)

    def commit(self, table: str, key: Hashable, value: Value, timestamp: int) -> None:
        """Commit one write."""
        self.values.setdefault(table, {})[key] = value
        self.written.setdefault(table, {}).setdefault(key, []).append((timestamp, value))


def run_serially(
    types: Sequence[TransactionType],
    events: Iterable[tuple[int, int, Mapping[str, Any]]],
    tables: SerialTables,
) -> list[TransactionOutcome]:
    """Run a batch of (timestamp, number of the transaction's type, columns); return outcomes in order of arrival.

    >>> from midstream.txn import Table, transaction
    >>> accounts = Table("accounts", key="string", value="double", default=0.0)
    >>> @transaction
    ... def withdraw(t, e):
    ...     balance = t.read(accounts, e.who)
    ...     t.require(balance >= e.amount, "not enough")
    ...     t.write(accounts, e.who, balance - e.amount)
    ...     return {"left": balance - e.amount}
    >>> kind = withdraw.trace({"who": "string", "amount": "double"})
    >>> tables = SerialTables({"accounts": {"ann": (10.0,)}})
    >>> late, early = (2, 0, {"who": "ann", "amount": 7.0}), (1, 0, {"who": "ann", "amount": 6.0})
    >>> [(done.committed, done.reason, done.returned) for done in run_serially([kind], [late, early], tables)]
    [(False, 'not enough', {}), (True, None, {'left': 4.0})]
    """
    arrived = list(events)
    outcomes: dict[int, TransactionOutcome] = {}
    for arrival in sorted(range(len(arrived)), key=lambda i: arrived[i][0]):  # stable: arrival breaks ties
        timestamp, number, row = arrived[arrival]
        outcomes[arrival] = _SerialRun(types[number], timestamp, row, tables).finish()
    return [outcomes[arrival] for arrival in range(len(arrived))]


class _SerialRun:
    """One transaction while it runs."""

    def __init__(self, kind: TransactionType, timestamp: int, row: Mapping[str, Any], tables: SerialTables) -> None:
        self.kind, self.timestamp, self.row, self.tables = kind, timestamp, row, tables
        self.memo: dict[int, Any] = {}

    def finish(self) -> TransactionOutcome:
        for require in self.kind.requires:
            if not self.value(require.condition):
                return TransactionOutcome(False, require.reason)
        writes = {
            self.place(write.slot): tuple(self.value(value) for value in write.values) for write in self.kind.writes
        }
        returned = {name: self.value(node) for name, node in self.kind.returns.items()}
        for (table, key), value in writes.items():
            self.tables.commit(table, key, value, self.timestamp)
        return TransactionOutcome(True, None, returned)

    def value(self, index: int) -> Any:
        if index not in self.memo:
            self.memo[index] = self.compute(self.kind.nodes[index])
        return self.memo[index]

    def compute(self, node: ExpressionNode) -> Any:
        match node.op:
            case "column":
                return self.row[node.param]
            case "constant":
                return node.param
            case "read":
                return self.read(node.param.slot, node.param.after)[node.param.column]
            case "window":
                return self.window(node.param)
            case "call":
                function = self.kind.functions[node.param]
                result = function.call(*(self.value(arg) for arg in node.args))
                return _CAST[function.kind](result)
        return _OPERATIONS[node.op](node, *(self.value(arg) for arg in node.args))

    def place(self, slot: int) -> tuple[str, Hashable]:
        found = self.kind.slots[slot]
        return self.kind.tables[found.table].name, self.value(found.key)

    def read(self, slot: int, after: int) -> Value:
        place = self.place(slot)
        for write in reversed(self.kind.writes[:after]):
            if self.place(write.slot) == place:
                return tuple(self.value(value) for value in write.values)
        table = self.kind.tables[self.kind.slots[slot].table]
        default = tuple(column.default for column in table.columns)
        return self.tables.values.get(place[0], {}).get(place[1], default)

    def window(self, of: WindowOf) -> Any:
        name, key = self.place(of.slot)
        column = self.kind.tables[self.kind.slots[of.slot].table].columns[of.column]
        written = self.tables.written.get(name, {}).get(key, [])
        found = [
            value[of.column]
            for timestamp, value in reversed(written)  # the newest first
            if self.timestamp - of.size < timestamp <= self.timestamp
        ]
        match of.aggregate:
            case "count":
                return len(found)
            case "sum":
                return _total(found, column.kind == "bigint")
            case "mean":
                total = _total(found, column.kind == "bigint")
                return float(total) / len(found) if found else float(column.default)
        if not found:
            return column.default
        best = found[0]
        for value in found[1:]:
            if value < best if of.aggregate == "min" else value > best:
                best = value
        return best


def _total(values: list[Any], whole: bool) -> Any:
    total: Any = 0 if whole else 0.0
    for value in values:
        total = _wrapped(total + value) if whole else total + value
    return total


def _wrapped(value: int) -> int:
    """A whole number reduced to 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


def _exact(node: ExpressionNode, value: Any) -> Any:
    return _wrapped(value) if node.kind == "bigint" else value


def _divided(node: ExpressionNode, a: float, b: float) -> float:
    if b != 0 or math.isnan(b):
        return a / b
    if a == 0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def _floored(node: ExpressionNode, a: float) -> int:
    if math.isnan(a):
        return 0
    if a >= 2.0**63:
        return 2**63 - 1
    return max(math.floor(a), -(2**63)) if a > -math.inf else -(2**63)


_CAST: dict[str, Any] = {
    "double": float,
    "bigint": int,
    "boolean": bool,
    "string": str,
    "object": lambda value: value,
}

_OPERATIONS: dict[str, Any] = {
    "add": lambda node, a, b: _exact(node, a + b),
    "sub": lambda node, a, b: _exact(node, a - b),
    "mul": lambda node, a, b: _exact(node, a * b),
    "div": _divided,
    "floordiv": lambda node, a, b: _wrapped(a // b) if b else 0,
    "mod": lambda node, a, b: a % b if b else 0,
    "neg": lambda node, a: _exact(node, -a),
    "abs": lambda node, a: _exact(node, abs(a)),
    "eq": lambda node, a, b: a == b,
    "ne": lambda node, a, b: a != b,
    "lt": lambda node, a, b: a < b,
    "le": lambda node, a, b: a <= b,
    "gt": lambda node, a, b: a > b,
    "ge": lambda node, a, b: a >= b,
    "and": lambda node, a, b: a and b,
    "or": lambda node, a, b: a or b,
    "not": lambda node, a: not a,
    "where": lambda node, test, a, b: a if test else b,
    "min": lambda node, a, b: b if b < a else a,
    "max": lambda node, a, b: b if b > a else a,
    "floor": _floored,
    "to_double": lambda node, a: float(a),
    "key": lambda node, a: a,
}
