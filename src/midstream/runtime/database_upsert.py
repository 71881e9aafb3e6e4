"""How a database sink replaces rows by others with the same key, and undoes that when an epoch runs again.

A second table holds the rows that the newest epoch has overwritten, as they were. So an epoch is undone in two steps:
the rows that it wrote, as the column of the epoch tells, are deleted, and those that it overwrote are restored. A job
goes back by at most one epoch, unless it was rewound; undoing a rewind would need copies from more epochs, so that is
refused.

All of it happens in the transaction that writes the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from midstream.errors import CheckpointError, SchemaError, SetupError, first_line
from midstream.flow.sinks import DatabaseSink
from midstream.ids import Epoch

__all__ = ["Statements", "Upsert", "upsert"]

STAGED = ("midstream_staged",)
"""The temporary table for the rows of an epoch, which the database compares with its own rows all at once."""

ROW = "midstream_row"
"""The column in it that keeps the order of the rows."""


class Statements(Protocol):
    """The methods of a connection that an upsert needs."""

    def run(self, text: str, *values: Any) -> None:
        """Run a statement."""

    def name(self, parts: Sequence[str]) -> str:
        """A name as it stands in statements."""

    def columns(self, table: tuple[str, ...]) -> list[str]:
        """The columns of a table."""

    def insert(self, batch: pa.RecordBatch, epoch: Epoch, table: tuple[str, ...] = ()) -> None:
        """Insert rows."""


def upsert(
    database: Statements, sink: DatabaseSink, batches: Iterable[pa.RecordBatch], newest: int | None, epoch: Epoch
) -> None:
    """Replace what an epoch wrote before by these rows. ``newest`` is the newest epoch in the table."""
    if newest is not None and newest > epoch:
        raise CheckpointError(
            f"the table {'.'.join(sink.table)!r} holds upserts up to epoch {newest}, and the job has gone back to "
            f"epoch {epoch}; what those epochs overwrote is not known any more. Restore the table as it was after "
            f"epoch {epoch - 1}, with {'.'.join(sink.epochs_table)!r}, or give the job another table"
        )
    work: Upsert | None = None
    rows = 0
    for batch in batches:
        if work is None:
            work = _begun(database, sink, batch.schema.names, newest, epoch)
        for name in sink.key:
            if batch.column(name).null_count:
                raise SchemaError(
                    f"a row has a null in the column {name!r}, which is in the key of the upsert into "
                    f"{'.'.join(sink.table)!r}; leave such rows out before the sink, with a where",
                    column=name,
                )
        if batch.num_rows:
            numbers = pa.array(range(rows, rows + batch.num_rows), pa.int64())
            database.insert(batch.append_column(ROW, numbers), epoch, STAGED)
            rows += batch.num_rows
    if work is None:
        _begun(database, sink, [], newest, epoch).drop_staged()
    else:
        work.apply()


def _begun(database: Statements, sink: DatabaseSink, names: Sequence[str], newest: int | None, epoch: Epoch) -> Upsert:
    work = Upsert(database, sink, names)
    if newest == epoch:
        work.undo(epoch)
    work.forget()
    work.create_staged()
    return work


class Upsert:
    """The statements of an upsert of rows with some columns."""

    def __init__(self, database: Statements, sink: DatabaseSink, names: Sequence[str]) -> None:
        self._database = database
        self._sink = sink
        self._written = [sink.epoch_column, *names]
        self._table = database.name(sink.table)
        self._undo = database.name(sink.undo_table)
        self._staged = database.name(STAGED)

    # ── before the job starts ─────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Refuse a table without a unique index on the key, and an undo table that does not fit. Changes nothing."""
        shown = ".".join(self._sink.table)
        try:
            self._database.run(self._upsert(f"SELECT {self._list(self._written)} FROM {self._table} WHERE 1 = 0"))
        except Exception as error:
            raise SetupError(
                f"rows cannot be upserted into {shown!r} by {', '.join(self._sink.key)}: {first_line(error)}. The "
                f"table needs a unique index on exactly these columns, and the database INSERT … ON CONFLICT"
            ) from error
        found, wanted = self._columns_of_undo(), self._database.columns(self._sink.table)
        if found is not None and found != wanted:
            raise SetupError(
                f"the table {'.'.join(self._sink.undo_table)!r} has the columns {', '.join(found)}, and "
                f"{'.'.join(self._sink.table)!r} has {', '.join(wanted)}; give it the same columns, in the same order"
            )

    def create_undo_table(self) -> None:
        """Create the second table, if it is missing."""
        if self._columns_of_undo() is None:
            self._database.run(f"CREATE TABLE {self._undo} AS SELECT * FROM {self._table} WHERE 1 = 0")

    def _columns_of_undo(self) -> list[str] | None:
        self._database.run("SAVEPOINT midstream_probe")
        try:
            return self._database.columns(self._sink.undo_table)
        except Exception:
            self._database.run("ROLLBACK TO SAVEPOINT midstream_probe")
            return None

    # ── an epoch ──────────────────────────────────────────────────────────────────────────────────────────────────

    def undo(self, epoch: Epoch) -> None:
        """Make the table what it was before the newest epoch."""
        column = self._database.name((self._sink.epoch_column,))
        self._database.run(f"DELETE FROM {self._table} WHERE {column} >= {int(epoch)}")
        columns = self._list(self._database.columns(self._sink.table))
        self._database.run(f"INSERT INTO {self._table} ({columns}) SELECT {columns} FROM {self._undo}")

    def forget(self) -> None:
        """Forget what an earlier epoch overwrote."""
        self._database.run(f"DELETE FROM {self._undo}")

    def create_staged(self) -> None:
        """Create the temporary table."""
        number = self._database.name((ROW,))
        self._database.run(
            f"CREATE TEMPORARY TABLE {self._staged} AS SELECT {self._list(self._written)}, CAST(0 AS BIGINT) AS "
            f"{number} FROM {self._table} WHERE 1 = 0"
        )

    def apply(self) -> None:
        """Save what the staged rows will overwrite, and put them in place: the last one of each key."""
        number = self._database.name((ROW,))
        self._database.run(
            f"DELETE FROM {self._staged} WHERE EXISTS (SELECT 1 FROM {self._staged} AS later WHERE "
            f"{self._same('later', self._staged)} AND later.{number} > {self._staged}.{number})"
        )
        columns = self._list(self._database.columns(self._sink.table))
        self._database.run(
            f"INSERT INTO {self._undo} ({columns}) SELECT {columns} FROM {self._table} WHERE EXISTS "
            f"(SELECT 1 FROM {self._staged} WHERE {self._same(self._staged, self._table)})"
        )
        # Without a WHERE, SQLite takes ON for the beginning of a join's condition.
        self._database.run(self._upsert(f"SELECT {self._list(self._written)} FROM {self._staged} WHERE 1 = 1"))
        self.drop_staged()

    def drop_staged(self) -> None:
        """Drop the temporary table: a connection of a pool goes on."""
        self._database.run(f"DROP TABLE {self._staged}")

    # ── SQL ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _upsert(self, select: str) -> str:
        values = [self._database.name((name,)) for name in self._written if name not in self._sink.key]
        sets = ", ".join(f"{name} = excluded.{name}" for name in values)
        return (
            f"INSERT INTO {self._table} ({self._list(self._written)}) {select} "
            f"ON CONFLICT ({self._list(self._sink.key)}) DO UPDATE SET {sets}"
        )

    def _list(self, names: Iterable[str]) -> str:
        return ", ".join(self._database.name((name,)) for name in names)

    def _same(self, left: str, right: str) -> str:
        keys = [self._database.name((name,)) for name in self._sink.key]
        return " AND ".join(f"{left}.{key} = {right}.{key}" for key in keys)
