"""A batch made ready to run: events in the order of their timestamps, keys as dense numbers, values at hand.

All arrays below are in *order*: position i is the i-th transaction by (timestamp, arrival). A transaction's key slots
lie next to each other in ``keys``, from ``bases[i]`` on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.errors import SchemaError
from midstream.txn.batches import DTYPES, Batch, TableSource, filled
from midstream.txn.columns import evaluate
from midstream.txn.expressions import Node, TransactionType
from midstream.txn.kernels import compiled, sorted_by
from midstream.txn.keys import IntKeys, Keys, keys_for, spread
from midstream.txn.program import Program

__all__ = ["Log", "Prepared", "prepare"]

Array = npt.NDArray[Any]

NOT_RUN = -1
"""In ``reasons``: nothing has been decided about the transaction yet."""


@dataclass
class Log:
    """Per key of a table, what was written to it, newest first, as linked lists; the history of earlier batches first.

    Transaction i has the ``stride`` entries from ``base + i * stride`` on to itself, so threads never compete for one.
    """

    base: int
    stride: int
    head: Array  # by key: its newest entry, or -1
    older: Array  # by entry: the one before it, or -1
    times: Array
    newest: Array  # by entry: the largest time in it and all that are older
    columns: list[Array]


@dataclass
class Prepared:
    """A batch in order, and everything that running it reads and changes."""

    program: Program
    order: Array | None  # arrival of the i-th transaction; None if they came in order
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


def prepare(program: Program, batch: Batch, source: TableSource) -> Prepared:
    """Sort, number the keys, load the values."""
    size = len(batch)
    _check_kinds(program, batch)
    order = _order(batch.timestamps)
    kinds = _in_order(batch.kinds, order)
    timestamps = _in_order(batch.timestamps, order)
    slots = np.array([len(kind.slots) for kind in program.types], np.int64)
    widths = slots[kinds]
    bases = np.cumsum(widths) - widths
    rows = _rows_by_kind(program, kinds)
    texts = _key_texts(program)
    events = {
        name: _column(program, batch, name, kind, order) for name, kind in program.columns.items() if name not in texts
    }
    columns = {name: _text_column(program, batch, name, order) for name in texts}
    prepared = Prepared(
        program=program,
        order=order,
        kinds=kinds,
        timestamps=timestamps,
        events=events,
        bases=bases,
        keys=np.full(int(widths.sum()), -1, np.int64),
        known=[],
        tables=[],
        changed=[],
        logs={},
        outputs={name: _output(kind, size) for name, kind in program.returns.items()},
        reasons=np.full(size, NOT_RUN, np.int16),
    )
    for number in range(len(program.tables)):
        _map_keys(prepared, source, number, rows, columns)
        _load(prepared, source, number)
    if program.interpreted:  # Python functions may ask for the strings as well
        events.update({name: _objects(column) for name, column in columns.items()})
    return prepared


def _check_kinds(program: Program, batch: Batch) -> None:
    if len(batch) and not (batch.kinds.min() >= 0 and batch.kinds.max() < len(program.types)):
        raise SchemaError(
            f"events trigger transactions 0 to {len(program.types) - 1}; found {batch.kinds.min()} to "
            f"{batch.kinds.max()}"
        )
    missing = sorted(set(program.columns) - set(batch.columns))
    if missing:
        raise SchemaError(f"events lack the columns {', '.join(missing)}; they have: {', '.join(batch.columns)}")


def _order(timestamps: Array) -> Array | None:
    if len(timestamps) < 2 or bool((timestamps[1:] >= timestamps[:-1]).all()):
        return None
    low, high = int(timestamps.min()), int(timestamps.max())
    if high - low < 4 * len(timestamps):
        found: Array = sorted_by(timestamps - low, high - low + 1)[1]
        return found
    return np.argsort(timestamps, kind="stable")  # stable: arrival breaks ties


def _in_order(array: Array, order: Array | None) -> Array:
    return np.ascontiguousarray(array if order is None else array[order])


def _rows_by_kind(program: Program, kinds: Array) -> list[Array]:
    if len(program.types) == 1:
        return [np.arange(len(kinds))]
    return [np.flatnonzero(kinds == number) for number in range(len(program.types))]


def _output(kind: str, size: int) -> Array:
    return np.zeros(size, DTYPES[kind]) if kind != "object" else np.full(size, None, object)


# ── columns ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _key_texts(program: Program) -> set[str]:
    """Columns of strings."""
    return {name for name, kind in program.columns.items() if kind == "string"}


def _users(program: Program, name: str) -> list[int]:
    return [number for number, kind in enumerate(program.types) if name in kind.columns]


def _column(program: Program, batch: Batch, name: str, kind: str, order: Array | None) -> Array:
    column = batch.columns[name]
    if kind == "object":
        return _in_order(_objects(column), order)
    if isinstance(column, pa.Array | pa.ChunkedArray):
        column = _without_nulls(program, batch, name, column)
        column = column.to_numpy(zero_copy_only=False) if len(column) else np.empty(0, DTYPES[kind])
    found = np.asarray(column)
    allowed = {"double": "f", "bigint": "iu", "boolean": "b"}[kind]
    if found.dtype.kind not in allowed:
        raise SchemaError(f"column {name!r} was traced as {kind}; the batch has {found.dtype}", column=name)
    return _in_order(found.astype(DTYPES[kind], copy=False), order)


def _without_nulls(program: Program, batch: Batch, name: str, column: Any) -> Any:
    """The column, with anything in place of nulls where no transaction looks; elsewhere a null is an error."""
    if not column.null_count:
        return column
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(nulls & np.isin(batch.kinds, _users(program, name)))
    if len(wrong):
        names = ", ".join(repr(program.types[number].name) for number in _users(program, name))
        raise SchemaError(
            f"column {name!r} is null in {len(wrong)} events that trigger {names} (the first is event {wrong[0]} of "
            "the batch); a transaction works on values. Filter such events out before, or fill them in",
            column=name,
        )
    kind = column.type
    return column.fill_null(
        "" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else pa.scalar(0).cast(kind)
    )


def _text_column(program: Program, batch: Batch, name: str, order: Array | None) -> Any:
    column = batch.columns[name]
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        column = pa.array(column, pa.string())
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    column = _without_nulls(program, batch, name, column)
    return column if order is None else column.take(pa.array(order))


def _objects(column: Any) -> Array:
    values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
    result = np.empty(len(values), object)
    result[:] = values
    return result


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _map_keys(prepared: Prepared, source: TableSource, number: int, rows: list[Array], texts: dict[str, Any]) -> None:
    """Number the keys of one table, and put the numbers into the transactions' key slots."""
    program = prepared.program
    table = program.tables[number]
    places = [
        (kind, position)
        for kind, one in enumerate(program.types)
        for position, slot in enumerate(one.slots)
        if program.table_numbers[kind][position] == number
    ]
    known = keys_for(table.key)
    if number in program.late_tables:
        known.add(source.known(table))
    for kind, position in places:
        slot = program.types[kind].slots[position]
        if slot.late or not len(rows[kind]):
            continue
        node = program.types[kind].nodes[slot.key]
        if isinstance(known, IntKeys) and node.op == "column":  # by far the most frequent kind of key
            known.add_into(prepared.events[node.param], rows[kind], prepared.bases, position, prepared.keys)
        else:
            values = _key_values(program.types[kind], slot.key, prepared.events, texts, rows[kind])
            if table.key == "string":
                values = values if isinstance(values, pa.Array) else pa.array(values, pa.string())
            spread(known.add(values), rows[kind], prepared.bases, position, prepared.keys)
    prepared.known.append(known)


def _key_values(kind: TransactionType, index: int, events: dict[str, Array], texts: dict[str, Any], rows: Array) -> Any:
    node = kind.nodes[index]
    if node.op == "key":
        return _key_values(kind, node.args[0], events, texts, rows)
    if node.kind == "string":
        if node.op == "column":
            return texts[node.param].take(pa.array(rows))
        if node.op == "constant":
            return pa.array([node.param] * len(rows), pa.string())

    def leaf(node: Node) -> Array:
        if node.op == "column":
            column = _objects(texts[node.param]) if node.param in texts else events[node.param]
            return column if len(rows) == len(column) else column[rows]
        if node.op == "constant":
            return filled(node.kind if node.kind != "string" else "object", node.param, len(rows))
        return called(kind, node, known, leaf)

    known: dict[int, Array] = {}
    return evaluate(kind, index, known, leaf)


def called(kind: TransactionType, node: Node, known: dict[int, Array], leaf: Any) -> Array:
    """A function's results for many events: called for each, with Python values."""
    function = kind.functions[node.param]
    columns = [evaluate(kind, arg, known, leaf).tolist() for arg in node.args]
    result = np.empty(len(columns[0]), DTYPES.get(function.kind, object))
    for i, values in enumerate(zip(*columns, strict=True)):
        result[i] = function.call(*values)
    return result


# ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _load(prepared: Prepared, source: TableSource, number: int) -> None:
    """The values of one table's keys, with room for keys that turn up while running."""
    program = prepared.program
    table = program.tables[number]
    known = prepared.known[number]
    keys = known.values()
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
        known.reserve(spare)
    columns = []
    for column, values in zip(table.columns, loaded, strict=True):
        values = np.ascontiguousarray(values, DTYPES[column.kind])
        if len(values) != len(keys):
            raise SchemaError(f"table {table.name!r}: asked for {len(keys)} values, got {len(values)}")
        columns.append(np.concatenate([values, filled(column.kind, column.default, spare)]) if spare else values)
    prepared.tables.append(columns)
    prepared.changed.append(np.zeros(len(keys) + spare, np.bool_))
    if number in program.windowed_tables:
        prepared.logs[number] = _log(prepared, source, number, len(keys) + spare)


def _log(prepared: Prepared, source: TableSource, number: int, room: int) -> Log:
    table = prepared.program.tables[number]
    history = source.history(table, prepared.known[number].values())
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
    _link(history.rows, history.timestamps, log.head, log.older, log.newest)
    return log


@compiled
def _link(rows: Any, times: Any, head: Any, older: Any, newest: Any) -> None:
    for entry in range(len(rows)):
        last = head[rows[entry]]
        older[entry] = last
        newest[entry] = max(times[entry], newest[last]) if last >= 0 else times[entry]
        head[rows[entry]] = entry


def late_keys(known: Keys) -> tuple[Array, ...]:
    """What compiled code looks keys up in, and adds them to."""
    assert isinstance(known, IntKeys)  # strings make a program interpreted
    return known.parts
