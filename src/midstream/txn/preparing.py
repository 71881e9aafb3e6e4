"""A batch made ready to run: the order of its transactions, keys as dense numbers, values at hand.

Arrays by transaction are in the order of arrival, so that nothing has to be moved; ``order`` lists the transactions by
(timestamp, arrival), and whatever runs or plans them goes through (a part of) that list. A transaction's key slots lie
next to each other in ``keys``, from ``bases[i]`` on.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from midstream.txn.keys import DENSE, IntKeys, Keys, NearKeys, TextKeys, keys_for, places, spread
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

    def growing(self, table: int) -> IntKeys | TextKeys:
        """The keys of a table that has late ones: they are added while transactions run."""
        known = self.known[table]
        assert not isinstance(known, NearKeys)  # see _map_keys
        return known


class Room:
    """Memory that batches use one after the other: to get it from the system anew takes longer than to fill it."""

    def __init__(self, program: Program) -> None:
        self.width = max(1, *(len(kind.slots) for kind in program.types), 1)
        self.numbering = [_Numbering(keys_for(table.key)) for table in program.tables]
        self._late = bool(program.late_tables)
        self._bases = np.empty(0, np.int64)
        self._keys = np.empty(0, np.int64)

    def enter(self, size: int) -> tuple[Array, Array]:
        """For a batch of that size: where each transaction's key slots begin, and these."""
        if size > len(self._bases):
            self._bases = np.arange(size * 5 // 4) * self.width
            self._keys = np.full(len(self._bases) * self.width, -1, np.int64)
        keys = self._keys[: size * self.width]
        if self._late:  # -1 says that a key is not known yet
            keys.fill(-1)
        return self._bases[:size], keys


class _Numbering:
    """How the keys of a table get their numbers, going by what they were like in the batches before."""

    def __init__(self, anywhere: IntKeys | TextKeys) -> None:
        self._anywhere = anywhere
        self._near: NearKeys | None = None
        self._misses = 0  # in a row
        self._wait = 0  # batches until keys may be expected where they were

    def near(self, places: Sequence[_Place], width: int, found: Array) -> NearKeys | None:
        """If the keys in the events' columns are close together: their numbers, which are in ``found`` then."""
        uses = sum(len(place.rows) for place in places)
        if self._wait > 0 or self._near is None or len(self._near) > DENSE * uses:
            self._wait = max(0, self._wait - 1)
            return None
        self._near.clear()
        if all(self._near.add_into(place.column, place.rows, width, place.slot, found) for place in places):
            self._misses = 0
            return self._near
        self._near = None
        self._misses += 1
        self._wait = self._misses
        return None

    def anywhere(self) -> IntKeys | TextKeys:
        """For any keys."""
        self._anywhere.clear()
        return self._anywhere

    def learn(self, uses: int) -> None:
        """See where the keys of this batch were, if nothing is known of that: the next one's may be expected there."""
        if self._near is None and self._wait == 0 and isinstance(self._anywhere, IntKeys):
            self._near = NearKeys.around(self._anywhere.values(), DENSE * uses)


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
        known=[],
        tables=[],
        changed=[],
        logs={},
        outputs={name: _output(kind, size) for name, kind in program.returns.items()},
        reasons=np.full(size, NOT_RUN, np.int16),
    )
    rows = _Rows(program, prepared.kinds)
    for number in range(len(program.tables)):
        prepared.known.append(_map_keys(prepared, source, number, room, rows, columns))
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


@dataclass(frozen=True)
class _Place:
    """Where keys are: some rows of a column, or values that were computed for these rows; and their key slot."""

    slot: int
    rows: Array
    column: Any = None
    values: Any = None


def _places_of(prepared: Prepared, number: int, rows: _Rows, texts: dict[str, Any]) -> list[_Place]:
    """Where the keys of one table are."""
    program = prepared.program
    found = []
    for slot, index, kinds in program.places[number]:
        one = program.types[kinds[0]]
        node = one.nodes[index]
        in_column = node.op == "column" and program.tables[number].key == "bigint"  # by far the most frequent
        for part in rows.of(kinds):
            if not len(part):
                continue
            if in_column:
                found.append(_Place(slot, part, column=prepared.events[node.param]))
            else:
                found.append(_Place(slot, part, values=_key_values(one, index, prepared.events, texts, part)))
    return found


def _map_keys(
    prepared: Prepared, source: TableSource, number: int, room: Room, rows: _Rows, texts: dict[str, Any]
) -> Keys:
    """Number the keys of one table, and put the numbers into the transactions' key slots."""
    program, keys, width = prepared.program, prepared.keys, room.width
    places_of, numbering = _places_of(prepared, number, rows, texts), room.numbering[number]
    is_late = number in program.late_tables
    in_columns = not is_late and all(place.column is not None for place in places_of)
    near = numbering.near(places_of, width, keys) if in_columns else None
    if near is not None:
        return near
    known = numbering.anywhere()
    if is_late:
        known.add(source.known(program.tables[number]))
    if isinstance(known, TextKeys):
        _map_strings(known, places_of, width, keys)
        return known
    for place in places_of:
        if place.column is not None:
            known.add_into(place.column, place.rows, width, place.slot, keys)
        else:
            spread(known.add(place.values), place.rows, width, place.slot, keys)
    if in_columns:
        numbering.learn(sum(len(place.rows) for place in places_of))
    return known


def _map_strings(known: TextKeys, places_of: Sequence[_Place], width: int, keys: Array) -> None:
    """All strings that are keys of one table, at once: Arrow numbers distinct strings much faster than Python."""
    if not places_of:
        return
    strings = [
        place.values if isinstance(place.values, pa.Array) else pa.array(place.values, pa.string())
        for place in places_of
    ]
    found = known.add(pa.concat_arrays([values.cast(pa.string()) for values in strings]))
    begin = 0
    for place in places_of:
        spread(found[begin : begin + len(place.rows)], place.rows, width, place.slot, keys)
        begin += len(place.rows)


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
        prepared.growing(number).reserve(spare)
    columns = []
    for column, values in zip(table.columns, loaded, strict=True):
        values = np.ascontiguousarray(values, DTYPES[column.kind])
        if len(values) != len(keys):
            raise SchemaError(f"table {table.name!r}: asked for {len(keys)} values, got {len(values)}")
        if len(used) < len(known):  # of numbers that no key has, nobody asks for the value
            values_of = np.empty(len(known), values.dtype)
            values_of[used] = values
            values = values_of
        columns.append(np.concatenate([values, filled(column.kind, column.default, spare)]) if spare else values)
    prepared.tables.append(columns)
    size = len(known) + spare
    prepared.changed.append(np.zeros(size, np.bool_))
    if number in program.windowed_tables:
        prepared.logs[number] = _log(prepared, source, number, size)


def _log(prepared: Prepared, source: TableSource, number: int, room: int) -> Log:
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
