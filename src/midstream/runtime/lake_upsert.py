"""How sinks of lakes let rows take the place of those with the same key, and undo that when an epoch runs again.

The version of the table before the newest epoch is noted in the commit of that epoch. So an epoch is undone by what two
versions hold: the keys of its rows are in the newest one, and what those keys had before is in the noted one. The rows
of the next run and what is undone go into one commit. A job goes back by at most one epoch, unless it was rewound.

An epoch's rows wait in a file until the last of each key is known; keys alone are in memory.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.errors import CheckpointError, SchemaError, first_line
from midstream.ids import Epoch

__all__ = [
    "KeyedTable",
    "Upserted",
    "completed",
    "lost_before",
    "positions",
    "ranges",
    "require_unique_keys",
    "unmatched",
    "upsert",
    "with_columns",
]

ROW, OTHER = "midstream_row", "midstream_other"
"""Columns with the numbers of rows, beside columns of keys."""


@dataclass(frozen=True)
class Upserted:
    """What an epoch puts into a table, and what of its last run goes."""

    columns: pa.Schema | None
    """The columns of the rows in the table; None if there are no rows."""
    keys: pa.Table
    """The keys of the rows, each once."""
    rows: Callable[[], Iterator[pa.RecordBatch]]
    """The rows, one for each key."""
    old: pa.Table
    """The keys that the last run of the epoch wrote, if there was one."""
    before: pa.Table
    """The rows that had those keys before, with all columns of the table."""


class KeyedTable(ABC):
    """What an upsert needs of a table."""

    shown: str
    """The name of the table in errors."""
    key: tuple[str, ...]
    """The columns by which rows replace others; empty if they are added."""

    @abstractmethod
    def newest_epoch(self) -> int | None:
        """The newest epoch in the table."""

    @abstractmethod
    def columns_of_table(self) -> pa.Schema:
        """All columns of the table."""

    @abstractmethod
    def scan(self, columns: Sequence[str], epoch: Epoch | None = None) -> Iterator[pa.RecordBatch]:
        """The table's rows; those of this epoch only, and of later ones, if it is given."""

    @abstractmethod
    def scan_before(self) -> Iterator[pa.RecordBatch]:
        """The rows that the table had before its newest epoch, with all columns; none if no upsert was in it."""

    @abstractmethod
    def upsert(self, change: Upserted, epoch: Epoch) -> str | None:
        """Make one commit of a change; return the conflict if another commit got ahead of it."""


def upsert(
    table: KeyedTable, rows: Iterator[pa.RecordBatch], columns: pa.Schema | None, newest: int | None, epoch: Epoch
) -> str | None:
    """Replace what an epoch wrote before by these rows; return the conflict if another commit got ahead."""
    if newest is not None and newest > epoch:
        raise CheckpointError(
            f"the table {table.shown!r} holds upserts up to epoch {newest}, and the job has gone back to epoch "
            f"{epoch}; what those epochs overwrote is not known any more. Give the job another table"
        )
    repeated = newest == epoch
    if columns is None:
        if not repeated:
            return None  # nothing was written, nothing is to be
        old, before = _undone(table, epoch)
        return table.upsert(Upserted(None, old.slice(0, 0), lambda: iter(()), old, before), epoch)
    with _staged(rows, columns, table.key, table.shown) as (keys, last):
        nothing = keys.slice(0, 0), table.columns_of_table().empty_table()
        old, before = _undone(table, epoch) if repeated else nothing
        return table.upsert(Upserted(columns, keys, last, old, before), epoch)


def _undone(table: KeyedTable, epoch: Epoch) -> tuple[pa.Table, pa.Table]:
    """The keys that an epoch wrote, and the rows that had them before."""
    columns, key = table.columns_of_table(), list(table.key)
    kinds = pa.schema([columns.field(name) for name in key])
    old = pa.Table.from_batches((with_columns(batch, kinds) for batch in table.scan(key, epoch)), kinds)
    if not old.num_rows:
        return old, columns.empty_table()
    found = (with_columns(batch, columns) for batch in table.scan_before())
    before = pa.Table.from_batches((_of_keys(batch, old) for batch in found), columns)
    return old, before.take(_last_rows(before.select(key)))


def _of_keys(batch: pa.RecordBatch, keys: pa.Table) -> pa.RecordBatch:
    """The rows with these keys."""
    return batch.filter(pc.is_valid(positions(pa.table(batch.select(keys.column_names)), keys)))


def lost_before(shown: str, version: str, error: BaseException) -> CheckpointError:
    """The error for what the newest epoch overwrote, if it cannot be read."""
    return CheckpointError(
        f"what the newest epoch has overwritten in the table {shown!r} is in its {version}, which cannot be read any "
        f"more ({first_line(error)}), so the epoch cannot be undone. Give the job another table, and keep versions "
        f"longer than a job may be down"
    )


# ── rows on disk ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _staged(
    rows: Iterator[pa.RecordBatch], columns: pa.Schema, key: Sequence[str], shown: str
) -> Iterator[tuple[pa.Table, Callable[[], Iterator[pa.RecordBatch]]]]:
    """The keys of rows, each once, and what gives the last row of each key: the rows are in a file meanwhile."""
    names = list(key)
    with tempfile.TemporaryDirectory(prefix="midstream-") as folder:
        place = os.path.join(folder, "rows.arrow")
        found = []
        with pa.OSFile(place, "wb") as file, pa.ipc.new_file(file, columns) as writer:
            for batch in rows:
                _require_keys(batch, names, shown)
                found.append(batch.select(names))
                writer.write_batch(batch)
        keys = pa.Table.from_batches(found)
        numbers = _last_rows(keys)
        is_last = pc.is_in(pa.array(np.arange(keys.num_rows)), numbers)

        def last() -> Iterator[pa.RecordBatch]:
            first = 0
            with pa.OSFile(place) as file, pa.ipc.open_file(file) as reader:
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    part = batch.filter(is_last.slice(first, batch.num_rows))
                    first += batch.num_rows
                    if part.num_rows:
                        yield part

        yield keys.take(numbers), last


def _require_keys(batch: pa.RecordBatch, key: Sequence[str], shown: str) -> None:
    for name in key:
        if batch.column(name).null_count:
            raise SchemaError(
                f"a row has a null in the column {name!r}, which is in the key of the upsert into {shown!r}; leave "
                f"such rows out before the sink, with a where",
                column=name,
            )


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _last_rows(keys: pa.Table) -> pa.Array:
    """The numbers of the last row of each key, in order.

    >>> _last_rows(pa.table({"k": ["a", "b", "a"]})).to_pylist()
    [1, 2]
    """
    numbered = keys.append_column(ROW, pa.array(np.arange(keys.num_rows)))
    found = numbered.group_by(keys.column_names, use_threads=False).aggregate([(ROW, "max")])
    last = found.column(f"{ROW}_max").combine_chunks()
    return last.take(pc.sort_indices(last))


def positions(keys: pa.Table, others: pa.Table) -> pa.Array:
    """For each of these keys its row among others, of which none is there twice; null where it is not among them.

    >>> positions(pa.table({"k": ["a", "b", "a"]}), pa.table({"k": ["c", "a"]})).to_pylist()
    [1, None, 1]
    """
    left = keys.append_column(ROW, pa.array(np.arange(keys.num_rows)))
    right = others.cast(keys.schema).append_column(OTHER, pa.array(np.arange(others.num_rows)))
    joined = left.join(right, keys.column_names, join_type="left outer", use_threads=False)
    return joined.sort_by(ROW).column(OTHER).combine_chunks()


def unmatched(rows: pa.Table, keys: Sequence[str], others: pa.Table) -> pa.Table:
    """The rows whose key is not among others."""
    return rows.filter(pc.is_null(positions(rows.select(list(keys)), others)))


def ranges(keys: pa.Table) -> Iterator[tuple[str, Any, Any]]:
    """The least and the greatest value of columns of whole numbers and text, by which files can be left out.

    >>> list(ranges(pa.table({"k": [3, 1, 2], "yes": [True, False, True]})))
    [('k', 1, 3)]
    """
    for name, values in zip(keys.column_names, keys.columns, strict=True):
        if keys.num_rows and (pa.types.is_integer(values.type) or pa.types.is_string(values.type)):
            low, high = pc.min_max(values).as_py().values()
            yield name, low, high


def completed(batch: pa.RecordBatch, columns: pa.Schema, base: pa.Table, key: Sequence[str]) -> pa.RecordBatch:
    """Rows with all these columns; those that they lack are as in the row with the same key.

    >>> base = pa.table({"k": ["a"], "note": ["x"]})
    >>> rows = pa.record_batch({"k": ["b", "a"]})
    >>> completed(rows, base.schema, base, ["k"]).to_pylist()
    [{'k': 'b', 'note': None}, {'k': 'a', 'note': 'x'}]
    """
    if base.num_rows and not set(columns.names) <= set(batch.schema.names):
        found = base.take(positions(pa.table(batch.select(list(key))), base.select(list(key))))
        for name in columns.names:
            if name not in batch.schema.names and name in found.column_names:
                batch = batch.append_column(name, found.column(name).combine_chunks())
    return with_columns(batch, columns)


def with_columns(batch: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    """The rows with these columns in this order; those that they lack are null."""
    there = batch.schema.names
    arrays = [
        batch.column(each.name).cast(each.type) if each.name in there else pa.nulls(batch.num_rows, each.type)
        for each in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def require_unique_keys(batches: Iterable[pa.RecordBatch], key: Sequence[str], what: str, shown: str) -> None:
    """Refuse a table in which two rows have the same key."""
    parts = list(batches)
    if not parts:
        return
    keys = pa.Table.from_batches(parts).select(list(key))
    counts = keys.group_by(list(key), use_threads=False).aggregate([([], "count_all")])
    twice = counts.filter(pc.greater(counts.column("count_all"), 1)).drop_columns("count_all").slice(0, 1).to_pylist()
    if twice:
        raise CheckpointError(
            f"{what}: several rows of the table {shown!r} have the key {twice[0]}, so the place of which one a row "
            f"takes is not known; remove all but one, or use another table"
        )
