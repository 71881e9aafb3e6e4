"""The engine's input and output: a batch of events, the tables they touch, and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.errors import SchemaError
from midstream.flow.transactions.tables import Table
from midstream.txn.keys import keys_for

__all__ = ["Batch", "History", "MemoryTables", "Result", "TableChange", "TableSource", "Versions"]

DTYPES: dict[str, Any] = {"double": np.float64, "bigint": np.int64, "boolean": np.bool_, "object": object}
"""The dtype of each kind of value."""


@dataclass(frozen=True)
class Batch:
    """Events in order of arrival: columns of equal length, a timestamp per event, and the transaction it triggers.

    Columns are Arrow or numpy arrays. Values of a column that the event's transaction does not use may be null or
    anything.
    """

    columns: Mapping[str, Any]
    timestamps: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int8]

    @staticmethod
    def of(columns: Any, *, order_by: str, kinds: Any = None) -> Batch:
        """A batch from a record batch, a table or a mapping of columns; without ``kinds`` all trigger transaction 0.

        >>> Batch.of({"ts": np.array([3, 1])}, order_by="ts").timestamps.tolist()
        [3, 1]
        """
        if isinstance(columns, pa.RecordBatch | pa.Table):
            columns = {name: columns[name] for name in columns.schema.names}
        if order_by not in columns:
            raise SchemaError(f"events have no column {order_by!r} to order by; they have: {', '.join(columns)}")
        timestamps = _times(columns[order_by], order_by)
        numbers = np.zeros(len(timestamps), np.int8) if kinds is None else np.asarray(kinds, np.int8)
        lengths = {name: len(column) for name, column in columns.items()} | {"kinds": len(numbers)}
        wrong = {name: length for name, length in lengths.items() if length != len(timestamps)}
        if wrong:
            raise SchemaError(f"columns of a batch must have equal length: {len(timestamps)} timestamps, but {wrong}")
        return Batch(columns, timestamps, numbers)

    def __len__(self) -> int:
        return len(self.timestamps)


def _times(column: Any, name: str) -> npt.NDArray[np.int64]:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        if column.null_count:
            raise SchemaError(f"column {name!r} orders the events and must not be null; {column.null_count} values are")
        column = column.cast(pa.int64()).to_numpy(zero_copy_only=False) if len(column) else np.empty(0, np.int64)
    found = np.asarray(column)
    if found.dtype.kind not in "iuM":
        raise SchemaError(f"column {name!r} orders the events and must be whole numbers or times; found {found.dtype}")
    return np.ascontiguousarray(found.astype(np.int64))


@dataclass(frozen=True)
class History:
    """Earlier committed writes to some keys, in execution order; ``rows`` are indexes into the keys."""

    rows: npt.NDArray[np.int64]
    timestamps: npt.NDArray[np.int64]
    columns: tuple[npt.NDArray[Any], ...]


class TableSource(Protocol):
    """Provides tables to the engine. Keys are a numpy array of whole numbers, or an Arrow array of strings."""

    def load(self, table: Table, keys: Any) -> Sequence[npt.NDArray[Any]]:
        """The value of each key: one array per column, with the default for unknown keys."""

    def known(self, table: Table) -> Any:
        """All keys that have a value. Only called for tables with keys that are computed at run time."""

    def history(self, table: Table, keys: Any) -> History:
        """Earlier writes to these keys. Only called for tables that a window reads."""


@dataclass(frozen=True)
class TableChange:
    """New values of a table; each changed key occurs once."""

    keys: Any
    columns: tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True)
class Versions:
    """All committed writes to a table that a window reads, in execution order."""

    keys: Any
    timestamps: npt.NDArray[np.int64]
    columns: tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True)
class Result:
    """The outcome of a batch; arrays are in order of arrival.

    ``reasons`` has an index per event into the ``texts`` of its transaction; 0 means committed. A returned column is
    undefined where the event was aborted or its transaction does not return it.
    """

    committed: npt.NDArray[np.bool_]
    reasons: npt.NDArray[np.int16]
    texts: tuple[tuple[str, ...], ...]
    kinds: npt.NDArray[np.int8]
    returned: Mapping[str, npt.NDArray[Any]]
    changes: Mapping[str, TableChange]
    versions: Mapping[str, Versions] = field(default_factory=dict)
    explanation: str = ""

    def reason(self, row: int) -> str | None:
        """Why an event was aborted, or None."""
        number = int(self.reasons[row])
        return self.texts[int(self.kinds[row])][number - 1] if number else None


class MemoryTables:
    """Tables in memory: a source for the engine, and a store for its changes.

    >>> accounts = Table("accounts", key="bigint", value="double", default=5.0)
    >>> tables = MemoryTables()
    >>> tables.put(accounts, np.array([7, 9]), [np.array([1.0, 2.0])])
    >>> tables.load(accounts, np.array([9, 8]))[0].tolist(), tables.as_dict(accounts)
    ([2.0, 5.0], {7: (1.0,), 9: (2.0,)})
    """

    def __init__(self) -> None:
        self._held: dict[str, _HeldValues] = {}

    def load(self, table: Table, keys: Any) -> Sequence[npt.NDArray[Any]]:
        """The value of each key."""
        held = self._table(table)
        rows = held.keys.add(keys)
        held.grow()
        return [column[rows] for column in held.columns]

    def known(self, table: Table) -> Any:
        """All keys that were written or loaded."""
        return self._table(table).keys.values()

    def history(self, table: Table, keys: Any) -> History:
        """Earlier writes to these keys."""
        held = self._table(table)
        rows = held.keys.add(keys)
        held.grow()
        position = np.full(len(held.keys), -1, np.int64)
        position[rows] = np.arange(len(rows))
        ids, times, *columns = held.versions()
        wanted = position[ids] >= 0
        return History(position[ids][wanted], times[wanted], tuple(column[wanted] for column in columns))

    def put(self, table: Table, keys: Any, columns: Sequence[npt.NDArray[Any]]) -> None:
        """Set values."""
        held = self._table(table)
        rows = held.keys.add(keys)
        held.grow()
        held.written[rows] = True
        for mine, new in zip(held.columns, columns, strict=True):
            mine[rows] = new

    def apply(self, result: Result, tables: Sequence[Table]) -> None:
        """Apply the changes of a batch."""
        for table in tables:
            if table.name in result.changes:
                change = result.changes[table.name]
                self.put(table, change.keys, change.columns)
            if table.name in result.versions:
                versions = result.versions[table.name]
                held = self._table(table)
                held.log.append((held.keys.add(versions.keys), versions.timestamps, *versions.columns))
                held.grow()

    def forget(self, table: Table, before: int) -> None:
        """Drop writes that are too old for any future window."""
        held = self._table(table)
        versions = held.versions()
        held.log = [tuple(column[versions[1] >= before] for column in versions)]

    def as_dict(self, table: Table) -> dict[Any, tuple[Any, ...]]:
        """Every key that was written, with its value."""
        held = self._table(table)
        keys = held.keys.values()
        names = keys.tolist() if isinstance(keys, np.ndarray) else keys.to_pylist()
        columns = [column[: len(names)].tolist() for column in held.columns]
        values = zip(*columns, strict=True)
        return {name: value for name, value, written in zip(names, values, held.written, strict=False) if written}

    def _table(self, table: Table) -> _HeldValues:
        if table.name not in self._held:
            self._held[table.name] = _HeldValues(table)
        return self._held[table.name]


class _HeldValues:
    """One table: rows by the id of their key, with spare capacity, and the log of its writes."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.keys = keys_for(table.key)
        self.columns = [filled(column.kind, column.default, 0) for column in table.columns]
        self.written = np.zeros(0, np.bool_)
        self.log: list[tuple[npt.NDArray[Any], ...]] = []

    def grow(self) -> None:
        more = len(self.keys) - len(self.written)
        if more > 0:
            more = max(more, len(self.written))
            self.columns = [
                np.concatenate([old, filled(column.kind, column.default, more)])
                for old, column in zip(self.columns, self.table.columns, strict=True)
            ]
            self.written = np.concatenate([self.written, np.zeros(more, np.bool_)])

    def versions(self) -> tuple[npt.NDArray[Any], ...]:
        empty = (np.empty(0, np.int64), np.empty(0, np.int64), *(column[:0] for column in self.columns))
        if len(self.log) > 1:
            self.log = [tuple(np.concatenate(parts) for parts in zip(*self.log, strict=True))]
        return self.log[0] if self.log else empty


def filled(kind: str, value: Any, size: int) -> npt.NDArray[Any]:
    """An array filled with one value."""
    result = np.empty(size, DTYPES[kind])
    if kind == "object":
        for i in range(size):  # numpy would spread an object that is a sequence over the array
            result[i] = value
    else:
        result[:] = value
    return result
