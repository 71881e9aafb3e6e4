"""A batch made ready to run: the order of its transactions, keys as dense numbers, values at hand.

Arrays by transaction are in the order of arrival, so that nothing has to be moved; ``order`` lists the transactions by
(timestamp, arrival), and whatever runs or plans them goes through (a part of) that list. A transaction's key slots lie
next to each other in ``keys``, from ``bases[i]`` on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.errors import SchemaError
from midstream.flow.transactions.expressions import Node, TransactionType
from midstream.txn.batches import DTYPES, Batch, TableSource, filled
from midstream.txn.columns import evaluate
from midstream.txn.kernels import compiled, rows_of
from midstream.txn.keys import IntKeys, Keys, keys_for, places, spread
from midstream.txn.program import Program
from midstream.txn.sorting import order_of

__all__ = ["Log", "Prepared", "Room", "prepare"]

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


class Room:
    """Memory that batches use one after the other: to get it from the system anew takes longer than to fill it."""

    def __init__(self, program: Program) -> None:
        self.width = max(1, *(len(kind.slots) for kind in program.types), 1)
        self.known = [keys_for(table.key) for table in program.tables]
        self._late = bool(program.late_tables)
        self._bases = np.empty(0, np.int64)
        self._keys = np.empty(0, np.int64)

    def enter(self, size: int) -> tuple[Array, Array]:
        """For a batch of that size: where each transaction's key slots begin, and these."""
        for known in self.known:
            known.clear()
        if size > len(self._bases):
            self._bases = np.arange(size * 5 // 4) * self.width
            self._keys = np.full(len(self._bases) * self.width, -1, np.int64)
        keys = self._keys[: size * self.width]
        if self._late:  # -1 says that a key is not known yet
            keys.fill(-1)
        return self._bases[:size], keys


def prepare(program: Program, batch: Batch, source: TableSource, room: Room | None = None) -> Prepared:
    """Sort, number the keys, load the values. What comes out is good until the room is used for another batch."""
    size = len(batch)
    _check_kinds(program, batch)
    room = room or Room(program)
    bases, keys = room.enter(size)
    texts = _key_texts(program)
    events = {name: _column(program, batch, name, kind) for name, kind in program.columns.items() if name not in texts}
    columns = {name: _text_column(program, batch, name) for name in texts}
    prepared = Prepared(
        program=program,
        order=_order(batch.timestamps),
        kinds=np.ascontiguousarray(batch.kinds),
        timestamps=np.ascontiguousarray(batch.timestamps),
        events=events,
        bases=bases,
        keys=keys,
        known=room.known,
        tables=[],
        changed=[],
        logs={},
        outputs={name: _output(kind, size) for name, kind in program.returns.items()},
        reasons=np.full(size, NOT_RUN, np.int16),
    )
    rows = _Rows(program, prepared.kinds)
    for number in range(len(program.tables)):
        _map_keys(prepared, source, number, room.width, rows, columns)
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


def _order(timestamps: Array) -> Array:
    found: Array = order_of(timestamps) if len(timestamps) else timestamps
    return found if len(found) else places(len(timestamps))


def _output(kind: str, size: int) -> Array:
    return np.zeros(size, DTYPES[kind]) if kind != "object" else np.full(size, None, object)


# ── columns ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _key_texts(program: Program) -> set[str]:
    """Columns of strings."""
    return {name for name, kind in program.columns.items() if kind == "string"}


def _users(program: Program, name: str) -> list[int]:
    return [number for number, kind in enumerate(program.types) if name in kind.columns]


def _column(program: Program, batch: Batch, name: str, kind: str) -> Array:
    column = batch.columns[name]
    if kind == "object":
        return _objects(column)
    if isinstance(column, pa.Array | pa.ChunkedArray):
        column = _without_nulls(program, batch, name, column)
        column = column.to_numpy(zero_copy_only=False) if len(column) else np.empty(0, DTYPES[kind])
    found = np.asarray(column)
    allowed = {"double": "f", "bigint": "iu", "boolean": "b"}[kind]
    if found.dtype.kind not in allowed:
        raise SchemaError(f"column {name!r} was traced as {kind}; the batch has {found.dtype}", column=name)
    return np.ascontiguousarray(found, DTYPES[kind])


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


def _text_column(program: Program, batch: Batch, name: str) -> Any:
    column = batch.columns[name]
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        column = pa.array(column, pa.string())
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return _without_nulls(program, batch, name, column)


def _objects(column: Any) -> Array:
    values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
    result = np.empty(len(values), object)
    result[:] = values
    return result


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Rows:
    """Where the events of some kinds are, found once."""

    def __init__(self, program: Program, kinds: Array) -> None:
        self.kinds, self.every = kinds, len(program.types)
        self.found: dict[int, Array] = {}

    def of(self, kinds: tuple[int, ...]) -> list[Array]:
        if len(kinds) == self.every:
            return [places(len(self.kinds))]
        for kind in kinds:
            if kind not in self.found:
                self.found[kind] = rows_of(self.kinds, kind)
        return [self.found[kind] for kind in kinds]


def _map_keys(
    prepared: Prepared, source: TableSource, number: int, width: int, rows: _Rows, texts: dict[str, Any]
) -> None:
    """Number the keys of one table, and put the numbers into the transactions' key slots."""
    program = prepared.program
    table = program.tables[number]
    known = prepared.known[number]
    if number in program.late_tables:
        known.add(source.known(table))
    strings: list[tuple[Any, Array, int]] = []
    for position, index, kinds in program.places[number]:
        one = program.types[kinds[0]]
        node = one.nodes[index]
        for part in rows.of(kinds):
            if not len(part):
                continue
            if isinstance(known, IntKeys) and node.op == "column":  # by far the most frequent kind of key
                known.add_into(prepared.events[node.param], part, width, position, prepared.keys)
                continue
            values = _key_values(one, index, prepared.events, texts, part)
            if isinstance(known, IntKeys):
                spread(known.add(values), part, width, position, prepared.keys)
            else:
                strings.append(
                    (values if isinstance(values, pa.Array) else pa.array(values, pa.string()), part, position)
                )
    if strings:
        _map_strings(known, strings, width, prepared.keys)


def _map_strings(known: Keys, strings: list[tuple[Any, Array, int]], width: int, keys: Array) -> None:
    """All strings that are keys of one table, at once: Arrow numbers distinct strings much faster than Python."""
    found = known.add(pa.concat_arrays([values.cast(pa.string()) for values, _, _ in strings]))
    begin = 0
    for _, rows, position in strings:
        spread(found[begin : begin + len(rows)], rows, width, position, keys)
        begin += len(rows)


def _key_values(kind: TransactionType, index: int, events: dict[str, Array], texts: dict[str, Any], rows: Array) -> Any:
    node = kind.nodes[index]
    if node.op == "key":
        return _key_values(kind, node.args[0], events, texts, rows)
    if node.kind == "string":
        if node.op == "column":
            column = texts[node.param]
            return column if len(rows) == len(column) else column.take(pa.array(rows))
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
