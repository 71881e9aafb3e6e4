"""State as people want to see it: one table per operator, with its keys as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from midstream.data.schema import columns_of
from midstream.engine.aggregation.totals import TotalsOf
from midstream.engine.operators.aggregate import totals_of
from midstream.engine.operators.sessions import split_sessions
from midstream.engine.table_layout import rows_of
from midstream.errors import StateError
from midstream.flow.model import Aggregate, Distinct, Join, Operator, Process, Transact
from midstream.flow.transactions import Table
from midstream.flow.windows import Session
from midstream.state.contents import in_namespace
from midstream.state.key_arrays import decode_keys, split_timers
from midstream.state.keys import Namespace, split_item
from midstream.state.values import ObjectCodec

__all__ = ["shown_state", "shown_table"]

_ARROW = {"double": pa.float64(), "bigint": pa.int64(), "boolean": pa.bool_(), "object": pa.string()}
_VIEWS = pa.schema([("view", pa.string()), ("item", pa.string()), ("time", pa.timestamp("us", "UTC"))])


def shown_state(operator: Operator, takes: tuple[pa.Schema, ...], rows: pa.Table) -> pa.Table:
    """What stored keys and values mean.

    An aggregate shows the totals of each key, or of each open window, in the columns that it emits. A distinct shows
    its keys, a join how many bytes of rows it keeps of each key and time. A process shows a row for everything that
    its function remembers: which view, which item or time in it, and the value as text. A transact shows the rows of
    all its tables, keys and values as text.
    """
    match operator.spec:
        case Aggregate() as spec:
            return _aggregated(operator, spec, takes[0], rows)
        case Distinct() as spec:
            schema = columns_of(takes[0], spec.keys)
            keys = _keys(in_namespace(rows, Namespace.VALUE))
            return pa.Table.from_arrays(decode_keys(keys, schema), schema=schema)
        case Join() as spec:
            return _joined(columns_of(takes[0], spec.left_keys), rows)
        case Process() as spec:
            return _processed(operator, columns_of(takes[0], spec.keys), rows)
        case Transact() as spec:
            return _transacted(operator, spec, takes[0], rows)
    raise StateError(f"{operator.kind} {operator.name!r} keeps no state")


def shown_table(operator: Operator, table: Table, takes: pa.Schema, rows: pa.Table) -> pa.Table:
    """A table of a transact: the domain's column if there is one, ``key``, and the columns of its value."""
    assert isinstance(operator.spec, Transact)
    found = rows_of(table, rows, f"transact {operator.name!r}")
    schema = columns_of(takes, operator.spec.keys)
    domains = decode_keys(pa.array(found.domains, pa.binary()), schema)
    key = pa.array(found.keys, pa.int64() if table.key == "bigint" else pa.string())
    values = [pa.array(column, _ARROW[each.kind]) for column, each in zip(found.columns, table.columns, strict=True)]
    names = [*schema.names, "key", *(column.name for column in table.columns)]
    return pa.Table.from_arrays([*domains, key, *values], names)


def _transacted(operator: Operator, spec: Transact, takes: pa.Schema, rows: pa.Table) -> pa.Table:
    parts = []
    for table in spec.tables:
        shown = shown_table(operator, table, takes, rows)
        values = shown.select([column.name for column in table.columns]).to_pylist()
        columns = {
            "table": pa.array([table.name] * len(shown), pa.string()),
            "key": shown["key"].cast(pa.string()),
            "value": pa.array([str(row["value"] if table.single else row) for row in values], pa.string()),
        }
        domain = {name: shown[name] for name in spec.keys}
        parts.append(pa.table({**domain, **columns}))
    return pa.concat_tables(parts)


def _aggregated(operator: Operator, spec: Aggregate, takes: pa.Schema, rows: pa.Table) -> pa.Table:
    totals = totals_of(operator, spec, takes)
    bounds: list[Any] = []
    if spec.window is None:
        found = in_namespace(rows, Namespace.VALUE)
        keys, values = _keys(found), found["value"].to_pylist()
    elif isinstance(spec.window, Session):
        keys, values, bounds = _sessions(totals, spec.window, in_namespace(rows, Namespace.VALUE))
    else:
        found = in_namespace(rows, Namespace.WINDOW)
        ends, keys = split_timers(_keys(found))
        values, bounds = found["value"].to_pylist(), [ends - spec.window.size_us, ends]
    moments = [pa.array(bound).view(takes.field(spec.time).type) for bound in bounds]
    results = totals.results(totals.unpack(values)[0]) if values else [[] for _ in spec.columns]
    columns = [*decode_keys(keys, columns_of(takes, spec.keys)), *moments]
    results = [pa.array(r, f.type) for r, f in zip(results, list(operator.schema)[len(columns) :], strict=True)]
    return pa.Table.from_arrays([*columns, *results], schema=operator.schema)


def _sessions(totals: TotalsOf, window: Session, rows: pa.Table) -> tuple[pa.Array, list[bytes], list[Any]]:
    each = [split_sessions(value) for value in rows["value"].to_pylist()]
    keys = _keys(rows).take(pa.array(np.repeat(np.arange(len(each)), [len(one) for one in each])))
    values = [session for sessions in each for session in sessions]
    nothing = np.empty(0, np.int64)
    first, last = totals.unpack(values)[1] if values else (nothing, nothing)
    return keys, values, [first, last + window.gap_us]


def _joined(schema: pa.Schema, rows: pa.Table) -> pa.Table:
    sides = {Namespace.JOIN_LEFT: "left", Namespace.JOIN_RIGHT: "right"}
    parts = []
    for namespace, side in sides.items():
        found = in_namespace(rows, namespace)
        times, keys = split_timers(_keys(found))
        sizes = [len(value) for value in found["value"].to_pylist()]
        columns = [
            *decode_keys(keys, schema),
            pa.array([side] * len(keys), pa.string()),
            pa.array(times).view(pa.timestamp("us", "UTC")),
            pa.array(sizes, pa.int64()),
        ]
        added = [("side", pa.string()), ("time", pa.timestamp("us", "UTC")), ("bytes", pa.int64())]
        parts.append(pa.Table.from_arrays(columns, schema=pa.schema([*schema, *(pa.field(*f) for f in added)])))
    return pa.concat_tables(parts)


def _processed(operator: Operator, schema: pa.Schema, rows: pa.Table) -> pa.Table:
    shown = list(_remembered(ObjectCodec(f"process {operator.name!r}"), rows))
    keys = pa.array([key for key, *_ in shown], pa.binary())
    columns = [
        *decode_keys(keys, schema),
        *(pa.array([one[1 + i] for one in shown], field.type) for i, field in enumerate(_VIEWS)),
        pa.array([one[4] for one in shown], pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema([*schema, *_VIEWS, pa.field("value", pa.string())]))


def _remembered(codec: ObjectCodec, rows: pa.Table) -> Iterator[tuple[bytes, str, str | None, int | None, str | None]]:
    """Key, view, item, time and value of everything."""

    def show(stored: bytes, data: bytes) -> str:
        try:
            return repr(codec.decode(data, stored).value)
        except StateError as error:  # a class that is not here is no reason not to show the rest
            return f"<{error}>"

    views: dict[Namespace, Callable[[bytes, bytes], tuple[bytes, str, str | None, int | None, str | None]]] = {
        Namespace.VALUE: lambda key, data: (key, "value", None, None, show(key, data)),
        Namespace.LIST: lambda key, data: (*_item(key, "list"), None, show(key, data)),
        Namespace.MAP: lambda key, data: (*_map_item(key), None, show(key, data)),
        Namespace.EVENT_TIMER: lambda key, _: _timer(key, "event timer"),
        Namespace.CLOCK_TIMER: lambda key, _: _timer(key, "clock timer"),
        Namespace.EXPIRY: lambda key, _: _timer(key, "expires"),
    }
    for key, data in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
        if (view := views.get(Namespace(key[1]))) is not None:
            yield view(key, data)


def _item(stored: bytes, view: str) -> tuple[bytes, str, str]:
    key, item = split_item(stored)
    return key, view, item.decode()


def _map_item(stored: bytes) -> tuple[bytes, str, str]:
    key, item = split_item(stored)
    name, within = item[1 : 1 + item[0]], item[1 + item[0] :]
    return key, "map", f"{name.decode()}[{msgspec.msgpack.decode(within)!r}]"


def _timer(stored: bytes, view: str) -> tuple[bytes, str, None, int, None]:
    times, keys = split_timers(pa.array([stored], pa.binary()))
    return keys[0].as_py(), view, None, int(times[0]), None


def _keys(rows: pa.Table) -> pa.Array:
    return rows["key"].combine_chunks().cast(pa.binary())
