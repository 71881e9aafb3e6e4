"""Numbers the keys of a batch: finds them in the events' columns, and writes their numbers to the key slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.flow.transactions.expressions import ExpressionNode, TransactionType
from midstream.txn.batches import DTYPES, TableSource, filled
from midstream.txn.columns import evaluate
from midstream.txn.kernels import rows_of
from midstream.txn.keys import DENSE, IntKeys, Keys, NearKeys, TextKeys, places, spread
from midstream.txn.program import Program

__all__ = ["Events", "Numbering", "RowsByKind", "call_per_event", "map_keys", "objects_of"]

Array = npt.NDArray[Any]


class RowsByKind:
    """The rows of the events of some kinds, computed once."""

    def __init__(self, program: Program, kinds: Array) -> None:
        self.kinds, self.every = kinds, len(program.types)
        self.found: dict[int, Array] = {}

    def of(self, kinds: tuple[int, ...]) -> list[Array]:
        """The rows of each kind; a single array if these are all kinds."""
        if len(kinds) == self.every:
            return [places(len(self.kinds))]
        for kind in kinds:
            if kind not in self.found:
                self.found[kind] = rows_of(self.kinds, kind)
        return [self.found[kind] for kind in kinds]


@dataclass(frozen=True)
class Events:
    """The columns of a batch, ready for use: strings as Arrow arrays, all others as numpy arrays."""

    program: Program
    rows: RowsByKind
    columns: dict[str, Array]
    texts: dict[str, Any]


@dataclass(frozen=True)
class _Slot:
    """The source of some keys: rows of a column, or values computed for those rows; and their key slot."""

    slot: int
    rows: Array
    column: Any = None
    values: Any = None


class Numbering:
    """Numbers the keys of a table, based on the keys of previous batches."""

    def __init__(self, anywhere: IntKeys | TextKeys) -> None:
        self._anywhere = anywhere
        self._near: NearKeys | None = None
        self._misses = 0  # in a row
        self._wait = 0  # batches to skip before trying the expected range again

    def near(self, where: Sequence[_Slot], width: int, found: Array) -> NearKeys | None:
        """If the keys in the events' columns are close together: their map, with the numbers in ``found``."""
        uses = sum(len(place.rows) for place in where)
        if self._wait > 0 or self._near is None or len(self._near) > DENSE * uses:
            self._wait = max(0, self._wait - 1)
            return None
        self._near.clear()
        if all(self._near.add_into(place.column, place.rows, width, place.slot, found) for place in where):
            self._misses = 0
            return self._near
        self._near = None
        self._misses += 1
        self._wait = self._misses
        return None

    def anywhere(self) -> IntKeys | TextKeys:
        """An empty map for any keys."""
        self._anywhere.clear()
        return self._anywhere

    def learn(self, uses: int) -> None:
        """Remember the range of this batch's keys, if none is known yet: the next batch's are expected there, too."""
        if self._near is None and self._wait == 0 and isinstance(self._anywhere, IntKeys):
            self._near = NearKeys.around(self._anywhere.values(), DENSE * uses)


def map_keys(events: Events, table: int, numbering: Numbering, source: TableSource, width: int, slots: Array) -> Keys:
    """Number the keys of one table, and write the numbers to the transactions' key slots, ``width`` for each."""
    where = _places_of(events, table)
    is_late = table in events.program.late_tables
    in_columns = not is_late and all(place.column is not None for place in where)
    near = numbering.near(where, width, slots) if in_columns else None
    if near is not None:
        return near
    known = numbering.anywhere()
    if is_late:
        known.add(source.known(events.program.tables[table]))
    if isinstance(known, TextKeys):
        _map_strings(known, where, width, slots)
        return known
    for place in where:
        if place.column is not None:
            known.add_into(place.column, place.rows, width, place.slot, slots)
        else:
            spread(known.add(place.values), place.rows, width, place.slot, slots)
    if in_columns:
        numbering.learn(sum(len(place.rows) for place in where))
    return known


def _places_of(events: Events, table: int) -> list[_Slot]:
    """The sources of one table's keys."""
    program = events.program
    found = []
    for slot, index, kinds in program.places[table]:
        one = program.types[kinds[0]]
        node = one.nodes[index]
        in_column = node.op == "column" and program.tables[table].key == "bigint"  # by far the most common case
        for rows in events.rows.of(kinds):
            if not len(rows):
                continue
            if in_column:
                found.append(_Slot(slot, rows, column=events.columns[node.param]))
            else:
                found.append(_Slot(slot, rows, values=_key_values(one, index, events.columns, events.texts, rows)))
    return found


def _map_strings(known: TextKeys, where: Sequence[_Slot], width: int, slots: Array) -> None:
    """Map all strings that are keys of one table at once: Arrow numbers distinct strings much faster than Python."""
    if not where:
        return
    strings = [
        place.values if isinstance(place.values, pa.Array) else pa.array(place.values, pa.string()) for place in where
    ]
    found = known.add(pa.concat_arrays([values.cast(pa.string()) for values in strings]))
    begin = 0
    for place in where:
        spread(found[begin : begin + len(place.rows)], place.rows, width, place.slot, slots)
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

    def leaf(node: ExpressionNode) -> Array:
        if node.op == "column":
            column = objects_of(texts[node.param]) if node.param in texts else events[node.param]
            return column if len(rows) == len(column) else column[rows]
        if node.op == "constant":
            return filled(node.kind if node.kind != "string" else "object", node.param, len(rows))
        return call_per_event(kind, node, known, leaf)

    known: dict[int, Array] = {}
    return evaluate(kind, index, known, leaf)


def call_per_event(kind: TransactionType, node: ExpressionNode, known: dict[int, Array], leaf: Any) -> Array:
    """A function's results for many events; it is called for each, with Python values."""
    function = kind.functions[node.param]
    columns = [evaluate(kind, arg, known, leaf).tolist() for arg in node.args]
    result = np.empty(len(columns[0]), DTYPES.get(function.kind, object))
    for i, values in enumerate(zip(*columns, strict=True)):
        result[i] = function.call(*values)
    return result


def objects_of(column: Any) -> Array:
    """A column as an array of Python objects."""
    values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
    result = np.empty(len(values), object)
    result[:] = values
    return result
