"""The traced form of a transaction: a flat list of nodes, each computed from earlier ones.

Every evaluator of :mod:`midstream.txn` (``serial`` event by event, ``codegen`` compiled, ``columns`` by whole columns)
gives a node the same meaning:

- Numbers are 64 bits wide. Whole numbers wrap around when they overflow; doubles follow IEEE 754, so ``x / 0.0`` is an
  infinity or NaN, and a comparison with NaN is false (a ``require`` on it aborts).
- ``/`` always yields a double. ``//`` and ``%`` are for whole numbers and round down, as in Python; by zero they yield
0.
- ``min(a, b)`` is ``b`` where ``b < a``, else ``a``; ``max(a, b)`` is ``b`` where ``b > a``, else ``a``.
- ``floor`` yields the largest whole number not above a double: 0 for NaN; beyond 64 bits, the nearest 64-bit number.
- Both sides of a ``where`` are always computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from midstream.flow.transactions.tables import Kind, Table

__all__ = [
    "AGGREGATES",
    "ExpressionNode",
    "Function",
    "KeySlot",
    "ReadOf",
    "Require",
    "TransactionType",
    "WindowOf",
    "Write",
]

Aggregate = Literal["sum", "count", "min", "max", "mean"]
AGGREGATES: tuple[Aggregate, ...] = ("sum", "count", "min", "max", "mean")

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floordiv": "//",
    "mod": "%",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&",
    "or": "|",
}
"""Binary operations and their notation."""


@dataclass(frozen=True, slots=True)
class ExpressionNode:
    """One value of a transaction: an operation on earlier nodes."""

    op: str
    kind: Kind
    args: tuple[int, ...] = ()
    param: Any = (
        None  # column: its name; constant: its value; read: ReadOf; window: WindowOf; call: number of a Function
    )


@dataclass(frozen=True, slots=True)
class ReadOf:
    """A column of the value of a key, after the first ``after`` writes of the transaction itself."""

    slot: int
    column: int
    after: int


@dataclass(frozen=True, slots=True)
class WindowOf:
    """An aggregate of earlier transactions' writes to a key within ``size`` before the event's timestamp."""

    slot: int
    column: int
    size: int
    aggregate: Aggregate


@dataclass(frozen=True, slots=True)
class KeySlot:
    """A key that the transaction touches. ``late`` keys are computed from values that were read."""

    table: int
    key: int
    late: bool


@dataclass(frozen=True, slots=True)
class Require:
    """A condition; if it is false, the transaction has no effect."""

    condition: int
    reason: str
    after: int  # number of writes before it


@dataclass(frozen=True, slots=True)
class Write:
    """New values of all columns of a key."""

    slot: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function given to ``t.call`` or ``t.key``. A ``compiled`` one is numba's, and runs inside the kernels."""

    call: Callable[..., Any]
    kind: Kind
    compiled: bool

    @property
    def name(self) -> str:
        """The name that users know."""
        return str(getattr(self.call, "__name__", type(self.call).__name__))


@dataclass(frozen=True)
class TransactionType:
    """A traced transaction: its reads, conditions and writes, for any event.

    Nodes are in the order in which the function created them, so a node's arguments come before it.
    """

    name: str
    tables: tuple[Table, ...]
    nodes: tuple[ExpressionNode, ...]
    slots: tuple[KeySlot, ...]
    requires: tuple[Require, ...]
    writes: tuple[Write, ...]
    functions: tuple[Function, ...]
    returns: Mapping[str, int] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, Kind]:
        """The event's columns that it uses."""
        return {node.param: node.kind for node in self.nodes if node.op == "column"}

    @property
    def interpreted(self) -> bool:
        """Whether it uses a Python function or object, and so cannot be compiled."""
        return any(not function.compiled for function in self.functions) or any(
            node.kind == "object" for node in self.nodes
        )

    @property
    def late(self) -> bool:
        """Whether any key is computed at run time."""
        return any(slot.late for slot in self.slots)

    @property
    def windows(self) -> tuple[WindowOf, ...]:
        """The windows that it reads."""
        return tuple(node.param for node in self.nodes if node.op == "window")

    def slots_read_by(self, nodes: tuple[int, ...]) -> set[int]:
        """Key slots whose values some nodes need, including the transaction's own earlier writes."""
        return {node.param.slot for node in map(self.nodes.__getitem__, self.needed_by(nodes)) if is_access(node)}

    def needed_by(self, nodes: tuple[int, ...]) -> set[int]:
        """All nodes that some nodes depend on, including themselves and own writes that a read may see."""
        seen: set[int] = set()
        waiting = list(nodes)
        while waiting:
            index = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            waiting.extend(self.nodes[index].args)
            waiting.extend(self._seen_through(self.nodes[index]))
        return seen

    def _seen_through(self, node: ExpressionNode) -> Iterator[int]:
        if not is_access(node):
            return
        slot = self.slots[node.param.slot]
        yield slot.key
        if node.op == "read":
            for write in self.writes[: node.param.after]:
                if self.slots[write.slot].table == slot.table:
                    yield write.values[node.param.column]
                    yield self.slots[write.slot].key

    def text(self, index: int) -> str:
        """A node in the notation of users.

        >>> from midstream.flow.transactions import Table, transaction
        >>> accounts = Table("accounts", key="string", value="double", default=0.0)
        >>> @transaction
        ... def pay(t, e):
        ...     t.require(t.read(accounts, e.who) - 1 >= e.amount)
        >>> pay.trace({"who": "string", "amount": "double"}).requires[0].reason
        'read(accounts, e.who) - 1.0 >= e.amount'
        """
        node = self.nodes[index]
        parts = [self.text(arg) for arg in node.args]
        if node.op in INFIX:
            wrapped = [
                f"({part})" if self._binds_looser(arg, node.op) else part
                for arg, part in zip(node.args, parts, strict=True)
            ]
            return f" {INFIX[node.op]} ".join(wrapped)
        match node.op:
            case "column":
                return f"e.{node.param}"
            case "constant":
                return repr(node.param)
            case "read" | "window":
                return self._access_text(node)
            case "call":
                return f"{self.functions[node.param].name}({', '.join(parts)})"
            case "to_double" | "key":
                return parts[0]
            case "neg":
                return f"-({parts[0]})"
            case "not":
                return f"~({parts[0]})"
        return f"{node.op}({', '.join(parts)})"

    def _access_text(self, node: ExpressionNode) -> str:
        slot = self.slots[node.param.slot]
        table = self.tables[slot.table]
        column = "" if table.single else f".{table.columns[node.param.column].name}"
        key = self.text(slot.key)
        if node.op == "read":
            return f"read({table.name}, {key}){column}"
        return f"window({table.name}, {key}, {node.param.size}, {node.param.aggregate!r}){column}"

    def _binds_looser(self, arg: int, parent: str) -> bool:
        inner = self.nodes[arg].op
        while inner in ("to_double", "key"):
            (arg,) = self.nodes[arg].args
            inner = self.nodes[arg].op
        return inner in INFIX and (parent not in _COMPARISONS or inner in _COMPARISONS | {"and", "or"})


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def is_access(node: ExpressionNode) -> bool:
    """Whether a node gets its value from a table."""
    return node.op in ("read", "window")
