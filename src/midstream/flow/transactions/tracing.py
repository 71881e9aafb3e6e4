"""`@transaction`: runs a function once on symbols, and records what it does.

The function gets ``t``, which records accesses to tables, and ``e``, whose attributes are the event's columns. It works
on whole columns, never on one event. So it cannot branch on values, which do not exist yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast, get_args

import pyarrow as pa

from midstream.data.durations import duration
from midstream.errors import FunctionError, SchemaError
from midstream.flow.transactions.expressions import (
    AGGREGATES,
    ExpressionNode,
    Function,
    KeySlot,
    ReadOf,
    Require,
    TransactionType,
    WindowOf,
    Write,
)
from midstream.flow.transactions.symbols import Event, Record, Symbol
from midstream.flow.transactions.tables import Kind, Table, checked_value, kind_of
from midstream.flow.transactions.wording import HOW, a_kind, user_line

__all__ = ["Access", "Transaction", "transaction"]

_NUMBERS = ("double", "bigint")


class Transaction:
    """A function that describes a transaction; :meth:`trace` turns it into a :class:`TransactionType`."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __reduce__(self) -> tuple[Any, ...]:
        # It is stored in checkpoints, so it is rebuilt by public names.
        return transaction, (self.function,)

    def trace(self, schema: pa.Schema | Mapping[str, str]) -> TransactionType:
        """The traced transaction, for events with these columns: an Arrow schema, or names and kinds.

        >>> accounts = Table("accounts", key="string", value="double", default=0.0)
        >>> @transaction
        ... def deposit(t, e):
        ...     t.write(accounts, e.who, t.read(accounts, e.who) + e.amount)
        >>> deposit.trace({"who": "string", "amount": "double"}).writes
        (Write(slot=0, values=(3,)),)
        """
        trace = Access(self.name, _kinds(schema))
        returned = self.function(trace, Event(trace))
        return trace.finish(returned)


def transaction(function: Callable[[Any, Any], Any]) -> Transaction:
    """Declare a transaction: a function of ``t`` (:class:`Access`) and ``e``, the event's columns.

    >>> from midstream import Flow, transaction
    >>> accounts = Flow("bank").table("accounts", key="string", value="double", default=0.0)
    >>> @transaction
    ... def deposit(t, e):
    ...     t.write(accounts, e.who, t.read(accounts, e.who) + e.amount)
    >>> deposit.name
    'deposit'
    """
    if not callable(function):
        raise FunctionError(f"@transaction must decorate a function of (t, e); found {function!r}")
    return Transaction(function)


def _kinds(schema: pa.Schema | Mapping[str, str]) -> dict[str, Kind]:
    if isinstance(schema, pa.Schema):
        return {entry.name: kind_of(entry.type) for entry in schema}
    for name, kind in schema.items():
        if kind not in get_args(Kind):
            raise SchemaError(f"column {name!r}: a kind must be one of {', '.join(get_args(Kind))}; found {kind!r}")
    return cast("dict[str, Kind]", dict(schema))


class Access:
    """The ``t`` of a transaction's function: accesses to tables, and functions for which Python has no syntax.

    >>> from midstream import Flow, transaction
    >>> accounts = Flow("bank").table("accounts", key="string", value="double", default=0.0)
    >>> @transaction
    ... def withdraw(t, e):
    ...     left = t.read(accounts, e.who) - e.amount
    ...     t.require(left >= 0, "not enough money")
    ...     t.write(accounts, e.who, left)
    ...     return {"left": left}
    >>> len(withdraw.trace({"who": "string", "amount": "double"}).requires)
    1
    """

    def __init__(self, name: str, columns: Mapping[str, Kind]) -> None:
        self.name = name
        self.nodes: list[ExpressionNode] = []
        self._known: dict[ExpressionNode, int] = {}
        self._columns = columns
        self._tables: list[Table] = []
        self._slots: list[KeySlot] = []
        self._requires: list[Require] = []
        self._writes: list[Write] = []
        self._functions: list[Function] = []
        self._late: set[int] = set()  # nodes that need a value from a table

    # ── accesses ──────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, table: Table, key: Any) -> Any:
        """The value of a key: the one that earlier transactions left, or this transaction's own last write.

        A :class:`Symbol`, or a :class:`Record` if the table has named columns.
        """
        slot = self._slot(table, key)
        read = {
            column.name: self._symbol(
                ExpressionNode("read", column.kind, (), ReadOf(slot, position, len(self._writes)))
            )
            for position, column in enumerate(table.columns)
        }
        return read["value"] if table.single else Record(table, read)

    def write(self, table: Table, key: Any, value: Any) -> None:
        """Set the value of a key if the transaction commits; ``value`` is a mapping if the table has named columns.

        If a transaction writes a key twice, the last value wins.
        """
        slot = self._slot(table, key)
        given = {"value": value} if table.single else value
        names = [column.name for column in table.columns]
        if isinstance(given, Record):
            given = given._columns
        if not isinstance(given, Mapping) or set(given) != set(names):
            found = sorted(given) if isinstance(given, Mapping) else type(given).__name__
            self.fail(f"writes {found} to table {table.name!r}, which needs all of its columns: {names}", hint=False)
        values = tuple(
            self._as(given[column.name], column.kind, f"column {column.name!r} of table {table.name!r}")
            for column in table.columns
        )
        self._writes.append(Write(slot, values))

    def require(self, condition: Any, reason: str | None = None) -> None:
        """Abort unless the condition holds: the transaction's writes have no effect, and its event is marked as
        aborted.

        ``reason`` is recorded with the aborted event; it defaults to the condition as text.
        """
        index = self._as(condition, "boolean", "a condition")
        self._requires.append(Require(index, reason or self._snapshot().text(index), len(self._writes)))

    def window(self, table: Table, key: Any, size: int | str, aggregate: str, column: str | None = None) -> Symbol:
        """An aggregate of earlier transactions' writes to a key in the time range ``(timestamp - size, timestamp]``.

        ``aggregate`` is sum, count, min, max or mean. It covers the last value written by each committed transaction,
        without this transaction's own writes. If there is none, sum and count are 0, and the others are the table's
        default. ``size`` is in units of the timestamp, or a duration like ``"10 seconds"`` if events are ordered by a
        timestamp column.
        """
        if aggregate not in AGGREGATES:
            self.fail(f"asks for {aggregate!r} over a window; allowed are {', '.join(AGGREGATES)}", hint=False)
        if isinstance(size, str):
            size = duration(size, f"transaction {self.name!r}: the size of a window")
        if type(size) is not int or size <= 0:
            self.fail(
                f"has a window of size {size!r}; a size must be a whole number in units of the timestamp, or a "
                f"duration like '10 seconds'",
                hint=False,
            )
        slot = self._slot(table, key)
        if column is None and not table.single:
            self.fail(f"has a window over table {table.name!r} without naming the column", hint=False)
        position = table.column(column) if column is not None else 0
        kind = table.columns[position].kind
        if kind not in _NUMBERS:
            self.fail(f"has a window over {kind} values; a window needs numbers", hint=False)
        result: Kind = "double" if aggregate == "mean" else "bigint" if aggregate == "count" else kind
        return self._symbol(ExpressionNode("window", result, (), WindowOf(slot, position, size, aggregate)))

    def call(self, function: Callable[..., Any], *values: Any, returns: str = "double") -> Symbol:
        """The result of a function of plain values, called once per event.

        A function compiled with ``numba.njit`` runs at full speed. Any other Python function works, too, but runs at
        Python's speed. It must return the same result for the same values, and have no side effects.
        """
        return self._call(function, values, returns)

    def key(self, function: Any, *values: Any, returns: str = "bigint") -> Symbol:
        """A key that is computed at run time: a function of values that were read, or such a value itself.

        This costs parallelism: everything that the transaction might touch has to wait for it.
        """
        if isinstance(function, Symbol):
            return self._symbol(ExpressionNode("key", self.nodes[function._index].kind, (function._index,)))
        called = self._call(function, values, returns)
        return self._symbol(ExpressionNode("key", self.nodes[called._index].kind, (called._index,)))

    # ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def where(self, condition: Any, yes: Any, no: Any) -> Symbol:
        """``yes`` where the condition holds, else ``no``."""
        test = self._as(condition, "boolean", "a condition")
        left, right, kind = self._alike(yes, no, ("double", "bigint", "boolean", "object"), "where")
        return self._symbol(ExpressionNode("where", kind, (test, left, right)))

    def min(self, first: Any, *others: Any) -> Symbol:
        """The smallest of some numbers."""
        return self._fold("min", first, others)

    def max(self, first: Any, *others: Any) -> Symbol:
        """The largest of some numbers."""
        return self._fold("max", first, others)

    def floor(self, value: Any) -> Symbol:
        """The whole number at or below a double."""
        index = self._node(value)
        if self.nodes[index].kind == "bigint":
            return Symbol(self, index)
        return self._symbol(ExpressionNode("floor", "bigint", (self._as(value, "double", "floor"),)))

    # ── called by symbols ─────────────────────────────────────────────────────────────────────────────────────────────

    def column(self, name: str) -> Symbol:
        """A column of the event."""
        if name not in self._columns:
            self.fail(f"uses column {name!r}; the events have: {', '.join(sorted(self._columns))}", hint=False)
        return self._symbol(ExpressionNode("column", self._columns[name], (), name))

    def arithmetic(self, op: str, left: Any, right: Any) -> Symbol:
        """``+ - *``: a whole number if both operands are."""
        first, second, kind = self._alike(left, right, _NUMBERS, op)
        return self._symbol(ExpressionNode(op, kind, (first, second)))

    def divide(self, left: Any, right: Any) -> Symbol:
        """``/``: always a double."""
        args = (self._as(left, "double", "a division"), self._as(right, "double", "a division"))
        return self._symbol(ExpressionNode("div", "double", args))

    def whole(self, op: str, left: Any, right: Any) -> Symbol:
        """``//`` and ``%``: of whole numbers."""
        first, second = self._node(left), self._node(right)
        if {self.nodes[first].kind, self.nodes[second].kind} != {"bigint"}:
            self.fail("uses // or % on doubles; they need whole numbers. Use t.floor(a / b)", hint=False)
        return self._symbol(ExpressionNode(op, "bigint", (first, second)))

    def unary(self, op: str, value: Any) -> Symbol:
        """``-x`` and ``abs(x)``."""
        index = self._node(value)
        kind = self.nodes[index].kind
        if kind not in _NUMBERS:
            self.fail(f"uses {op} on {a_kind(kind)}; it needs a number", hint=False)
        return self._symbol(ExpressionNode(op, kind, (index,)))

    def compare(self, op: str, left: Any, right: Any) -> Symbol:
        """Comparisons of numbers; booleans can be compared for equality."""
        allowed = (*_NUMBERS, "boolean") if op in ("eq", "ne") else _NUMBERS
        first, second, _ = self._alike(left, right, allowed, op)
        return self._symbol(ExpressionNode(op, "boolean", (first, second)))

    def logic(self, op: str, *values: Any) -> Symbol:
        """``& | ~`` on booleans."""
        return self._symbol(
            ExpressionNode(op, "boolean", tuple(self._as(value, "boolean", "& | ~") for value in values))
        )

    def fail(self, problem: str, *, hint: bool = True) -> NoReturn:
        """Raise an error that shows the user's line."""
        where = user_line()
        raise FunctionError(
            f"transaction {self.name!r} {problem}" + (f" ({where})" if where else "") + (f". {HOW}" if hint else ""),
            transaction=self.name,
        )

    def finish(self, returned: Any) -> TransactionType:
        """The traced transaction, with the columns that the function returned."""
        if returned is None:
            returned = {}
        if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
            raise FunctionError(
                f"transaction {self.name!r} returns {type(returned).__name__}; it must return a dictionary of columns "
                f"to add to the event, or nothing",
                transaction=self.name,
            )
        if not self._slots:
            raise FunctionError(
                f"transaction {self.name!r} accesses no table; for a function of the event alone, use map",
                transaction=self.name,
            )
        returns = {name: self._node(value) for name, value in returned.items()}
        for name, index in returns.items():
            if self.nodes[index].kind == "string":
                raise FunctionError(
                    f"transaction {self.name!r} returns {name!r}, a string; strings can only be keys, and the event "
                    f"has the string already",
                    transaction=self.name,
                )
        return self._snapshot(returns)

    # ── internals ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _snapshot(self, returns: Mapping[str, int] | None = None) -> TransactionType:
        return TransactionType(
            self.name,
            tuple(self._tables),
            tuple(self.nodes),
            tuple(self._slots),
            tuple(self._requires),
            tuple(self._writes),
            tuple(self._functions),
            returns or {},
        )

    def _symbol(self, node: ExpressionNode) -> Symbol:
        # Constants are compared by their text, because True == 1 == 1.0, and NaN != NaN.
        known = ExpressionNode("constant", node.kind, (), repr(node.param)) if node.op == "constant" else node
        index = self._known.get(known)
        if index is None:
            index = len(self.nodes)
            self.nodes.append(node)
            if node.op != "call":  # calls are never merged
                self._known[known] = index
            if node.op in ("read", "window") or any(arg in self._late for arg in node.args):
                self._late.add(index)
        return Symbol(self, index)

    def _node(self, value: Any) -> int:
        """The node of a symbol or a literal."""
        if isinstance(value, Symbol):
            if value._trace is not self:
                self.fail("uses a value of another transaction", hint=False)
            return value._index
        if isinstance(value, bool):
            return self._constant(value, "boolean")
        if isinstance(value, int):
            return self._constant(checked_value(value, "bigint", f"transaction {self.name!r}"), "bigint")
        if isinstance(value, float):
            return self._constant(value, "double")
        if isinstance(value, Record):
            self.fail("uses a value with several columns like a single one; name the column: record.column", hint=False)
        self.fail(f"uses {value!r}; a value must be a column, the result of a read, or a number", hint=False)

    def _constant(self, value: Any, kind: Kind) -> int:
        return self._symbol(ExpressionNode("constant", kind, (), value))._index

    def _as(self, value: Any, kind: Kind, what: str) -> int:
        """A node of a kind. Whole numbers are converted to doubles if needed; nothing else is converted."""
        if kind == "object" and not isinstance(value, Symbol):
            return self._constant(value, "object")
        index = self._node(value)
        found = self.nodes[index].kind
        if found == kind:
            return index
        if (found, kind) == ("bigint", "double"):
            if self.nodes[index].op == "constant":
                return self._constant(float(self.nodes[index].param), "double")
            return self._symbol(ExpressionNode("to_double", "double", (index,)))._index
        hint = "; t.floor(x) rounds a double down" if (found, kind) == ("double", "bigint") else ""
        self.fail(f"gives {a_kind(found)} where {what} needs {a_kind(kind)}{hint}", hint=False)

    def _alike(self, left: Any, right: Any, allowed: tuple[str, ...], what: str) -> tuple[int, int, Kind]:
        first, second = self._node(left), self._node(right)
        kinds = (self.nodes[first].kind, self.nodes[second].kind)
        for kind in kinds:
            if kind not in allowed:
                self.fail(f"uses {what} on {a_kind(kind)}; it needs {', '.join(allowed)}", hint=False)
        if kinds[0] == kinds[1]:
            return first, second, kinds[0]
        return self._as(left, "double", what), self._as(right, "double", what), "double"

    def _fold(self, op: str, first: Any, others: tuple[Any, ...]) -> Symbol:
        result = Symbol(self, self._node(first))
        for other in others:
            left, right, kind = self._alike(result, other, _NUMBERS, op)
            result = self._symbol(ExpressionNode(op, kind, (left, right)))
        return result

    def _slot(self, table: Table, key: Any) -> int:
        if not isinstance(table, Table):
            self.fail(
                f"accesses {table!r}, which is not a table; make one with Table(name, key=…, value=…)", hint=False
            )
        index = self._constant(key, "string") if isinstance(key, str) else self._node(key)
        if self.nodes[index].kind != table.key:
            self.fail(
                f"uses {a_kind(self.nodes[index].kind)} as a key of table {table.name!r}, whose keys must be "
                f"{table.key}",
                hint=False,
            )
        late = index in self._late
        if late and self.nodes[index].op != "key":
            self.fail(
                f"computes a key of table {table.name!r} from a value that was read; use t.key(value)",
                hint=False,
            )
        slot = KeySlot(self._table(table), index, late)
        if slot not in self._slots:
            self._slots.append(slot)
        return self._slots.index(slot)

    def _table(self, table: Table) -> int:
        for position, known in enumerate(self._tables):
            if known == table or (known.name == table.name and repr(known) == repr(table)):
                return position
            if known.name == table.name:
                self.fail(f"uses two tables named {table.name!r}", hint=False)
        self._tables.append(table)
        return len(self._tables) - 1

    def _call(self, function: Any, values: tuple[Any, ...], returns: str) -> Symbol:
        if not callable(function):
            self.fail(f"calls {function!r}, which is not a function", hint=False)
        if not values:
            self.fail("calls a function without values; compute constants outside the transaction", hint=False)
        if returns not in get_args(Kind):
            self.fail(
                f"calls a function that returns {returns!r}; it must be one of {', '.join(get_args(Kind))}", hint=False
            )
        args = tuple(self._node(value) for value in values)
        kind = cast("Kind", returns)
        plain = all(self.nodes[arg].kind in ("double", "bigint", "boolean") for arg in args)
        compiled = hasattr(function, "py_func") and plain and kind in ("double", "bigint", "boolean")
        self._functions.append(Function(function, kind, compiled))
        return self._symbol(ExpressionNode("call", kind, args, len(self._functions) - 1))
