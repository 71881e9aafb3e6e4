"""Tables of transactions in state: a source for the transaction engine, and a store for its changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.aggregation.runs import order_by
from midstream.engine.table_layout import HEAD, TableLayout, keys_of, stored_keys, table_prefix
from midstream.flow.transactions import Table
from midstream.ids import Revision
from midstream.state.keys import Namespace
from midstream.state.task import TaskState
from midstream.state.values import ObjectCodec
from midstream.txn.batches import History, Result, filled

__all__ = ["StoredTables"]

Array = npt.NDArray[Any]


@dataclass
class StoredTables:
    """The tables of one domain, as a source for the engine and a store for its changes.

    ``what`` names the operator in errors. Histories that were loaded are kept until the batch is applied.
    """

    state: TaskState
    domain: bytes
    revision: Revision
    what: str
    _past: dict[str, dict[bytes, bytes]] = field(default_factory=dict)

    def load(self, table: Table, keys: Any) -> Sequence[Array]:
        """The value of each key: one array per column, with the default for unknown keys."""
        # Ascending, because the base reads fastest in that order.
        order = np.argsort(keys) if isinstance(keys, np.ndarray) else pc.sort_indices(keys).to_numpy()
        ascending = keys[order] if isinstance(keys, np.ndarray) else keys.take(pa.array(order))
        values = self.state.get_many(stored_keys(self._prefix(table), ascending, table))
        layout = TableLayout(table)
        if not layout.is_packed:
            return [self._objects(table, keys, values, order)]
        known = np.fromiter((value is not None for value in values), np.bool_, len(values))
        found = [value for value in values if value is not None]
        struct = layout.struct(with_time=False)
        layout.require(found, struct.itemsize, self.what)
        rows = np.frombuffer(b"".join([value[HEAD:] for value in found]), struct)
        at = order[known]
        loaded = []
        for column, stored in zip(table.columns, layout.columns(rows), strict=True):
            values_of = filled(column.kind, column.default, len(values))
            values_of[at] = stored
            loaded.append(values_of)
        return loaded

    def known(self, table: Table) -> Any:
        """All keys that have a value."""
        prefix = self._prefix(table)
        stored = pa.array([key for key, _ in self.state.scan_prefix(prefix)], pa.binary())
        return keys_of(stored, len(prefix), table)

    def history(self, table: Table, keys: Any) -> History:
        """Recent writes to these keys."""
        stored = stored_keys(self._prefix(table, Namespace.TABLE_PAST), keys, table)
        values = self.state.get_many(stored)
        layout = TableLayout(table)
        struct = layout.struct(with_time=True)
        found = [value for value in values if value is not None]
        layout.require(found, struct.itemsize, self.what)
        self._past[table.name] = {key: value for key, value in zip(stored, values, strict=True) if value is not None}
        counts = [0 if value is None else (len(value) - HEAD) // struct.itemsize for value in values]
        rows = np.frombuffer(b"".join([value[HEAD:] for value in found]), struct)
        return History(np.repeat(np.arange(len(values)), counts), rows["time"].astype(np.int64), layout.columns(rows))

    def apply(self, result: Result, tables: Sequence[Table], *, forget: Mapping[str, int | None]) -> None:
        """Store the changes of a batch. ``forget`` has the time up to which a table's history is dropped."""
        for table in tables:
            if table.name in result.changes:
                change = result.changes[table.name]
                keys = stored_keys(self._prefix(table), change.keys, table)
                self.state.put_many(keys, self._encoded(table, change.columns, keys))
            if table.name in result.versions:
                versions = result.versions[table.name]
                rows = TableLayout(table).structs(versions.columns, versions.timestamps)
                self._remember(table, versions.keys, rows, forget.get(table.name))
        self._past.clear()

    def _prefix(self, table: Table, namespace: Namespace = Namespace.TABLE) -> bytes:
        return table_prefix(self.domain, table.name, namespace, self.state.space)

    def _objects(self, table: Table, keys: Any, values: Sequence[bytes | None], order: Array) -> Array:
        codec = self._codec(table)
        [column] = table.columns
        found = filled("object", column.default, len(values))
        for position, value in zip(order.tolist(), values, strict=True):
            if value is not None:
                found[position] = codec.decode(value, str(keys[position]).encode()).value
        return found

    def _encoded(self, table: Table, columns: Sequence[Array], keys: Sequence[bytes]) -> list[bytes]:
        layout = TableLayout(table)
        if not layout.is_packed:
            return self._codec(table).encode_many(list(columns[0]), self.revision, keys)
        return layout.encoded(columns)

    def _codec(self, table: Table) -> ObjectCodec:
        return ObjectCodec(f"{self.what}, table {table.name!r}", lambda key: key.decode(errors="replace"))

    def _remember(self, table: Table, keys: Any, rows: Array, forget: int | None) -> None:
        """Append the writes to the history of each key, and drop those that no window can need any more."""
        past = self._past.get(table.name, {})
        head, width, struct = TableLayout(table).digest, rows.dtype.itemsize, rows.dtype
        # Only distinct keys are encoded: a key may have hundreds of writes in a batch. After a stable sort the writes
        # to one key are contiguous, in execution order.
        codes = (pa.array(keys) if isinstance(keys, np.ndarray) else keys).dictionary_encode()
        numbers = codes.indices.to_numpy().astype(np.int64)
        distinct = codes.dictionary.to_numpy() if isinstance(keys, np.ndarray) else codes.dictionary
        stored = stored_keys(self._prefix(table, Namespace.TABLE_PAST), distinct, table)
        order = order_by(numbers, len(stored))
        counts = np.bincount(numbers, minlength=len(stored))
        data, end = rows[order].tobytes(), 0
        new = {}
        for key, count in zip(stored, counts.tolist(), strict=True):
            start, end = end, end + count * width
            new[key] = past.get(key, head) + data[start:end]
        touched = {**past, **new}
        if forget is not None:
            touched = {key: head + _since(value, struct, forget) for key, value in touched.items()}
        gone = [key for key, value in touched.items() if len(value) == HEAD]
        left = [key for key, value in touched.items() if len(value) > HEAD and value != past.get(key)]
        self.state.put_many(left, [touched[key] for key in left])
        self.state.delete_many(gone)


def _since(value: bytes, struct: np.dtype[Any], forget: int) -> bytes:
    """The writes of a key that are later than a time."""
    rows = np.frombuffer(value, struct, offset=HEAD)
    kept = rows["time"] > forget
    return value[HEAD:] if kept.all() else rows[kept].tobytes()
