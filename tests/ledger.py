"""A ledger: a total for each key, kept as state, and the amount of every row, written to a database.

Whatever is killed, at any time: over the committed epochs, the rows in the database must add up to the state.
Simulations and chaos tests add a ledger to their flows, and compare after every kill.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from midstream import DatabaseSink, KeyedStream, State
from midstream.checkpoint.inspection import StateReader

Row = dict[str, Any]
DDL = "k string, amount bigint"


REFUSED = 1_000_000
"""The amount from which on :func:`refuse` refuses a row."""


@dataclass(frozen=True)
class Add:
    """Adds a number of a row to the total of its key. The amount depends on its version and on the epoch's clock."""

    column: str
    version: int = 0
    is_refused: bool = False
    """Whether its rows make another sink, after the database, fail."""

    def __call__(self, key: Any, row: Row, state: State) -> Row:
        amount = 1 + (row[self.column] or 0) + 100 * self.version + 1000 * state.now.second
        amount += REFUSED if self.is_refused else 0
        state.set(state.get(0) + amount)
        return {"k": str(key), "amount": amount}


def refuse(rows: Any, epoch: int) -> None:
    """A sink that fails on rows of a bad function version."""
    table = rows if isinstance(rows, pa.Table) else rows.toArrow()
    if any(amount >= REFUSED for amount in table["amount"].to_pylist()):
        raise ValueError(f"the ledger of epoch {epoch} has an amount that nobody pays")


@dataclass(frozen=True)
class Ledger:
    """The database file of a ledger, and the operator that keeps the totals."""

    path: Path
    operator: str = "ledger"

    def create(self) -> None:
        """Create the table, unless it exists."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(self.connect()) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS ledger (k TEXT, amount INTEGER, epoch INTEGER)")
            connection.commit()

    def connect(self) -> sqlite3.Connection:
        """A connection that does not sync: processes are killed in these tests, but machines do not crash."""
        connection = sqlite3.connect(self.path)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    def keep(self, stream: KeyedStream, column: str, connect: Callable[[], Any] | None = None) -> None:
        """Add a ledger of a stream's rows to a flow, for a column of numbers."""
        added = stream.process(self.operator, Add(column), returns=DDL)
        added.sink(self.rows_sink, DatabaseSink(connect or self.connect, "ledger"))
        added.sink(f"{self.operator} check", refuse)

    @property
    def rows_sink(self) -> str:
        """The name of the sink."""
        return f"{self.operator} rows"

    def rows(self) -> list[tuple[str, int, int]]:
        """Key, amount and epoch of all rows."""
        with contextlib.closing(self.connect()) as connection:
            return connection.execute("SELECT k, amount, epoch FROM ledger").fetchall()

    def by_epoch(self) -> dict[int, list[Row]]:
        """The rows of every epoch recorded in the database, including epochs without rows."""
        with contextlib.closing(self.connect()) as connection:
            [(newest,)] = connection.execute("SELECT epoch FROM midstream_epochs").fetchall()
        found: dict[int, list[Row]] = {epoch: [] for epoch in range(newest + 1)}
        for key, amount, epoch in self.rows():
            found[epoch].append({"k": key, "amount": amount})
        return found

    def problems(self, checkpoint: str) -> list[str]:
        """Differences between state and database. Call this while no driver runs: between two starts, or after the last
        one.
        """
        if not (Path(checkpoint) / "midstream.json").exists():
            return []  # killed before it began
        reader = StateReader.at(checkpoint)
        if reader.epoch is None:
            return []
        [key_column] = reader.key_schema(self.operator).names
        state = {str(row[key_column]): int(row["value"]) for row in reader.table(self.operator).to_pylist()}
        totals: dict[str, int] = {}
        for key, amount, epoch in self.rows():
            if epoch <= reader.epoch:
                totals[key] = totals.get(key, 0) + amount
        return [
            f"after epoch {reader.epoch}, key {key!r}: state says {state.get(key)}, the database {totals.get(key)}"
            for key in sorted({*state, *totals})
            if state.get(key) != totals.get(key)
        ]
