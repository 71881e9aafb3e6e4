"""Placeholders for values while a transaction is traced: operations on them are recorded, nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from midstream.flow.transactions.tables import Table

if TYPE_CHECKING:
    from midstream.flow.transactions.tracing import Access

__all__ = ["Event", "Record", "Symbol"]


class Symbol:
    """A value of every event at once. Arithmetic and comparisons create new symbols."""

    __slots__ = ("_index", "_trace")
    __hash__ = object.__hash__

    def __init__(self, trace: Access, index: int) -> None:
        self._trace = trace
        self._index = index

    def __repr__(self) -> str:
        return f"<{self._trace.name}: {self._trace.nodes[self._index].kind} #{self._index}>"

    def __add__(self, other: Any) -> Symbol:
        return self._trace.arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Symbol:
        return self._trace.arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Symbol:
        return self._trace.arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return self._trace.arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Symbol:
        return self._trace.arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Symbol:
        return self._trace.arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Symbol:
        return self._trace.divide(self, other)

    def __rtruediv__(self, other: Any) -> Symbol:
        return self._trace.divide(other, self)

    def __floordiv__(self, other: Any) -> Symbol:
        return self._trace.whole("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Symbol:
        return self._trace.whole("floordiv", other, self)

    def __mod__(self, other: Any) -> Symbol:
        return self._trace.whole("mod", self, other)

    def __rmod__(self, other: Any) -> Symbol:
        return self._trace.whole("mod", other, self)

    def __neg__(self) -> Symbol:
        return self._trace.unary("neg", self)

    def __abs__(self) -> Symbol:
        return self._trace.unary("abs", self)

    def __eq__(self, other: object) -> Symbol:  # type: ignore[override]  # a column of truths, as in numpy
        return self._trace.compare("eq", self, other)

    def __ne__(self, other: object) -> Symbol:  # type: ignore[override]  # a column of booleans, as in numpy
        return self._trace.compare("ne", self, other)

    def __lt__(self, other: Any) -> Symbol:
        return self._trace.compare("lt", self, other)

    def __le__(self, other: Any) -> Symbol:
        return self._trace.compare("le", self, other)

    def __gt__(self, other: Any) -> Symbol:
        return self._trace.compare("gt", self, other)

    def __ge__(self, other: Any) -> Symbol:
        return self._trace.compare("ge", self, other)

    def __and__(self, other: Any) -> Symbol:
        return self._trace.logic("and", self, other)

    def __rand__(self, other: Any) -> Symbol:
        return self._trace.logic("and", other, self)

    def __or__(self, other: Any) -> Symbol:
        return self._trace.logic("or", self, other)

    def __ror__(self, other: Any) -> Symbol:
        return self._trace.logic("or", other, self)

    def __invert__(self) -> Symbol:
        return self._trace.logic("not", self)

    def __bool__(self) -> bool:
        self._trace.fail("branches on a value")

    def __iter__(self) -> NoReturn:
        self._trace.fail("loops over a value")

    def __len__(self) -> int:
        self._trace.fail("takes the length of a value")

    def __index__(self) -> int:
        self._trace.fail("uses a value as a Python index")

    def __int__(self) -> int:
        self._trace.fail("converts a value to a Python number")

    def __float__(self) -> float:
        self._trace.fail("converts a value to a Python number")

    def __array_ufunc__(self, *args: Any, **options: Any) -> NoReturn:
        self._trace.fail("passes a value to a numpy function")


class Record:
    """A value with several columns: ``record.speed`` or ``record["speed"]``."""

    def __init__(self, table: Table, columns: Mapping[str, Symbol]) -> None:
        self._table = table
        self._columns = columns

    def __getitem__(self, name: str) -> Symbol:
        self._table.column(name)
        return self._columns[name]

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]


class Event:
    """The event's columns, as attributes or by name: ``e.amount``, ``e["amount"]``."""

    def __init__(self, trace: Access) -> None:
        self._trace = trace

    def __getitem__(self, name: str) -> Symbol:
        return self._trace.column(name)

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._trace.column(name)
