"""A batch that is ready to run: its transactions ordered, its keys numbered, its values loaded.

Arrays by transaction are in order of arrival, so nothing has to be moved. ``order`` lists the transactions by
(timestamp, arrival); all planning and running goes through (a part of) that list. A transaction's key slots are
contiguous in ``keys``, starting at ``bases[i]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.errors import SchemaError
from midstream.txn.batches import DTYPES, Batch, TableSource, filled
from midstream.txn.kernels import compiled
from midstream.txn.key_numbers import Events, Numbering, RowsByKind, map_keys, objects_of
from midstream.txn.keys import IntKeys, Keys, NearKeys, TextKeys, keys_for, places
from midstream.txn.program import Program
from midstream.txn.sort import order_of

__all__ = ["Log", "PreparedBatch", "Room", "prepare"]

Array = npt.NDArray[Any]

NOT_RUN = -1
"""In ``reasons``: the transaction has not been decided yet."""


@dataclass
class Log:
    """The writes to each key of a table, newest first, as linked lists; entries of earlier batches come first.

    Transaction i owns the ``stride`` entries from ``base + i * stride`` on, so threads never compete for one.
    """

    base: int
    stride: int
    head: Array  # by key: newest entry, or -1
    older: Array  # by entry: previous entry, or -1
    times: Array
    newest: Array  # by entry: the largest time in it and all older ones
    columns: list[Array]


@dataclass
class PreparedBatch:
    """A batch, and everything that running it reads and changes."""

    program: Program
    order: Array  # the transactions by (timestamp, arrival)
    kinds: Array
    timestamps: Array
    events: dict[str, Array]
    bases: Array
    keys: Array
    known: list[Keys]
    tables: list[list[Array]]
    changed: list[Array]
    logs: dict[int, Log]
    outputs: dict[str, Array]
    reasons: Array

    def __len__(self) -> int:
        return len(self.kinds)

    def growing_keys(self, table: int) -> IntKeys | TextKeys:
        """The keys of a table that has late keys, which are added while transactions run."""
        known = self.known[table]
        assert not isinstance(known, NearKeys)  # see map_keys
        return known


class Room:
    """Buffers that batches use one after the other: allocating new memory takes longer than filling it."""

    def __init__(self, program: Program) -> None:
        self.width = max(1, *(len(kind.slots) for kind in program.types), 1)
        self.numbering = [Numbering(keys_for(table.key)) for table in program.tables]
        self._late = bool(program.late_tables)
        self._bases = np.empty(0, np.int64)
        self._keys = np.empty(0, np.int64)

    def enter(self, size: int) -> tuple[Array, Array]:
        """Buffers for a batch of that size: the offset of each transaction's key slots, and the key slots."""
        if size > len(self._bases):
            self._bases = np.arange(size * 5 // 4) * self.width
            self._keys = np.full(len(self._bases) * self.width, -1, np.int64)
        keys = self._keys[: size * self.width]
        if self._late:  # -1: the key is not known yet
            keys.fill(-1)
        return self._bases[:size], keys


def prepare(program: Program, batch: Batch, source: TableSource, room: Room | None = None) -> PreparedBatch:
    """Sort, number the keys, load the values. The result is valid until ``room`` is used for another batch."""
    size = len(batch)
    _check_kinds(program, batch)
    room = room or Room(program)
    bases, keys = room.enter(size)
    texts = _key_texts(program)
    events = {name: _column(program, batch, name, kind) for name, kind in program.columns.items() if name not in texts}
    columns = {name: _text_column(program, batch, name) for name in texts}
    prepared = PreparedBatch(
        program=program,
        order=_order(batch.timestamps),
        kinds=np.ascontiguousarray(batch.kinds),
        timestamps=np.ascontiguousarray(batch.timestamps),
        events=events,
        bases=bases,
        keys=keys,
        known=[],
        tables=[],
        changed=[],
        logs={},
        outputs={name: _output(kind, size) for name, kind in program.returns.items()},
        reasons=np.full(size, NOT_RUN, np.int16),
    )
    found = Events(program, RowsByKind(program, prepared.kinds), events, columns)
    for number, numbering in enumerate(room.numbering):
        prepared.known.append(map_keys(found, number, numbering, source, room.width, keys))
        _load(prepared, source, number)
    if program.interpreted:  # Python functions may use the strings, too
        events.update({name: objects_of(column) for name, column in columns.items()})
    return prepared


def _check_kinds(program: Program, batch: Batch) -> None:
    if len(batch) and not (batch.kinds.min() >= 0 and batch.kinds.max() < len(program.types)):
        raise SchemaError(
            f"events may trigger transactions 0 to {len(program.types) - 1}; found {batch.kinds.min()} to "
            f"{batch.kinds.max()}"
        )
    missing = sorted(set(program.columns) - set(batch.columns))
    if missing:
        raise SchemaError(f"events lack the columns {', '.join(missing)}; they have: {', '.join(batch.columns)}")


def _order(timestamps: Array) -> Array:
    found: Array = order_of(timestamps) if len(timestamps) else timestamps
    return found if len(found) else places(len(timestamps))


def _output(kind: str, size: int) -> Array:
    return np.zeros(size, DTYPES[kind]) if kind != "object" else np.full(size, None, object)


# ── columns ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _key_texts(program: Program) -> set[str]:
    """The columns with strings."""
    return {name for name, kind in program.columns.items() if kind == "string"}


def _users(program: Program, name: str) -> list[int]:
    return [number for number, kind in enumerate(program.types) if name in kind.columns]


def _column(program: Program, batch: Batch, name: str, kind: str) -> Array:
    column = batch.columns[name]
    if kind == "object":
        return objects_of(column)
    if isinstance(column, pa.Array | pa.ChunkedArray):
        column = _without_nulls(program, batch, name, column)
        column = column.to_numpy(zero_copy_only=False) if len(column) else np.empty(0, DTYPES[kind])
    found = np.asarray(column)
    allowed = {"double": "f", "bigint": "iu", "boolean": "b"}[kind]
    if found.dtype.kind not in allowed:
        raise SchemaError(f"column {name!r} was traced as {kind}, but in the batch it is {found.dtype}", column=name)
    return np.ascontiguousarray(found, DTYPES[kind])


def _without_nulls(program: Program, batch: Batch, name: str, column: Any) -> Any:
    """The column with nulls replaced where no transaction uses them; any other null is an error."""
    if not column.null_count:
        return column
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(nulls & np.isin(batch.kinds, _users(program, name)))
    if len(wrong):
        names = ", ".join(repr(program.types[number].name) for number in _users(program, name))
        raise SchemaError(
            f"column {name!r} is null in {len(wrong)} events that trigger {names} (the first is event {wrong[0]} of "
            "the batch); a transaction needs values. Filter out such events, or fill in the nulls",
            column=name,
        )
    kind = column.type
    return column.fill_null(
        "" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else pa.scalar(0).cast(kind)
    )


def _text_column(program: Program, batch: Batch, name: str) -> Any:
    column = batch.columns[name]
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        column = pa.array(column, pa.string())
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return _without_nulls(program, batch, name, column)


# ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _load(prepared: PreparedBatch, source: TableSource, number: int) -> None:
    """The values of one table's keys, with room for keys that are added at run time."""
    program = prepared.program
    table = program.tables[number]
    known = prepared.known[number]
    keys, used = known.values(), known.used()
    loaded = source.load(table, keys)
    spare = 0
    if number in program.late_tables:
        late = np.array(
            [
                sum(slot.late and program.table_numbers[kind][p] == number for p, slot in enumerate(one.slots))
                for kind, one in enumerate(program.types)
            ]
        )
        spare = int(late[prepared.kinds].sum())
        prepared.growing_keys(number).reserve(spare)
    columns = []
    for column, values in zip(table.columns, loaded, strict=True):
        values = np.ascontiguousarray(values, DTYPES[column.kind])
        if len(values) != len(keys):
            raise SchemaError(f"table {table.name!r}: asked for {len(keys)} values, got {len(values)}")
        if len(used) < len(known):  # numbers without a key need no value
            values_of = np.empty(len(known), values.dtype)
            values_of[used] = values
            values = values_of
        columns.append(np.concatenate([values, filled(column.kind, column.default, spare)]) if spare else values)
    prepared.tables.append(columns)
    size = len(known) + spare
    prepared.changed.append(np.zeros(size, np.bool_))
    if number in program.windowed_tables:
        prepared.logs[number] = _log(prepared, source, number, size)


def _log(prepared: PreparedBatch, source: TableSource, number: int, room: int) -> Log:
    table = prepared.program.tables[number]
    known = prepared.known[number]
    history = source.history(table, known.values())
    base, stride = len(history.rows), max(1, prepared.program.stride[number])
    size = base + len(prepared) * stride
    log = Log(
        base=base,
        stride=stride,
        head=np.full(room, -1, np.int64),
        older=np.full(size, -1, np.int64),
        times=np.zeros(size, np.int64),
        newest=np.zeros(size, np.int64),
        columns=[np.zeros(size, DTYPES[column.kind]) for column in table.columns],
    )
    log.times[:base] = history.timestamps
    for mine, past in zip(log.columns, history.columns, strict=True):
        mine[:base] = past
    _link(known.used()[history.rows], history.timestamps, log.head, log.older, log.newest)
    return log


@compiled
def _link(rows: Any, times: Any, head: Any, older: Any, newest: Any) -> None:
    for entry in range(len(rows)):
        last = head[rows[entry]]
        older[entry] = last
        newest[entry] = max(times[entry], newest[last]) if last >= 0 else times[entry]
        head[rows[entry]] = entry
