"""The traced form of a transaction: a flat list of nodes, each made from earlier ones.

Every evaluator of :mod:`midstream.txn` (``serial`` event by event, ``codegen`` compiled, ``columns`` by whole columns)
gives a node the same meaning:

- Numbers are 64 bits wide. Whole numbers wrap around when they overflow; doubles follow IEEE 754, so ``x / 0.0`` is an
  infinity or NaN, and a comparison with NaN is false (a ``require`` on it aborts).
- ``/`` always gives a double. ``//`` and ``%`` are for whole numbers and round down, as in Python; by zero they give 0.
- ``min(a, b)`` is ``b`` where ``b < a``, else ``a``; ``max(a, b)`` is ``b`` where ``b > a``, else ``a``.
- ``floor`` gives the whole number at or below a double: 0 for NaN, and the nearest end of 64 bits beyond them.
- Both sides of a ``where`` are computed.
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
"""Operations of two values and how they are written."""


@dataclass(frozen=True, slots=True)
class ExpressionNode:
    """One value of a transaction: an operation on earlier nodes."""

    op: str
    kind: Kind
    args: tuple[int, ...] = ()
    param: Any = (
        None  # of column: its name; constant: its value; read: ReadOf; window: WindowOf; call: a Function's number
    )


@dataclass(frozen=True, slots=True)
class ReadOf:
    """A column of the value under a key, after the first ``after`` writes of the transaction itself."""

    slot: int
    column: int
    after: int


@dataclass(frozen=True, slots=True)
class WindowOf:
    """What earlier transactions wrote to a key within ``size`` before the event's timestamp, summed up."""

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
    """A condition: when it does not hold, the transaction has no effect."""

    condition: int
    reason: str
    after: int  # writes before it


@dataclass(frozen=True, slots=True)
class Write:
    """New values of all columns under a key."""

    slot: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function given to ``t.call`` or ``t.key``. ``compiled`` ones are numba's, and run inside the kernels."""

    call: Callable[..., Any]
    kind: Kind
    compiled: bool

    @property
    def name(self) -> str:
        """How people know it."""
        return str(getattr(self.call, "__name__", type(self.call).__name__))


@dataclass(frozen=True)
class TransactionType:
    """A traced transaction: what it reads, decides and writes, for any event.

    Nodes are in the order in which the function made them, so a node's arguments come before it.
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
        """Whether a Python function or a Python object takes part, so that it cannot be compiled."""
        return any(not function.compiled for function in self.functions) or any(
            node.kind == "object" for node in self.nodes
        )

    @property
    def late(self) -> bool:
        """Whether some key is only known while running."""
        return any(slot.late for slot in self.slots)

    @property
    def windows(self) -> tuple[WindowOf, ...]:
        """The windows that it reads."""
        return tuple(node.param for node in self.nodes if node.op == "window")

    def slots_read_by(self, nodes: tuple[int, ...]) -> set[int]:
        """Slots whose values some nodes need, their own writes before included."""
        return {node.param.slot for node in map(self.nodes.__getitem__, self.needed_by(nodes)) if is_access(node)}

    def needed_by(self, nodes: tuple[int, ...]) -> set[int]:
        """All nodes that some nodes are made from, themselves included, and through own writes that a read may see."""
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
        """A node as people would write it.

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
    """Whether a node takes its value from a table."""
    return node.op in ("read", "window")
