"""A ledger: a total for each key, kept as state, and what every row adds to it, written to a database.

Whatever is killed and whenever: of the epochs that are committed, the rows in the database must add up to the state.
Simulations and chaos add one to their flows, and compare after every kill.
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
"""From this amount on, :func:`refuse` refuses a row."""


@dataclass(frozen=True)
class Add:
    """Adds a number of a row to the total of its key. What it adds depends on its version and on the epoch's clock."""

    column: str
    version: int = 0
    is_refused: bool = False
    """Whether its rows are such that another sink, behind the database, fails."""

    def __call__(self, key: Any, row: Row, state: State) -> Row:
        amount = 1 + (row[self.column] or 0) + 100 * self.version + 1000 * state.now.second
        amount += REFUSED if self.is_refused else 0
        state.set(state.get(0) + amount)
        return {"k": str(key), "amount": amount}


def refuse(rows: Any, epoch: int) -> None:
    """A sink that fails on rows of a function that should never have been deployed."""
    table = rows if isinstance(rows, pa.Table) else rows.toArrow()
    if any(amount >= REFUSED for amount in table["amount"].to_pylist()):
        raise ValueError(f"the ledger of epoch {epoch} has an amount that nobody pays")


@dataclass(frozen=True)
class Ledger:
    """The database file of a ledger, and the operator that keeps the totals."""

    path: Path
    operator: str = "ledger"

    def create(self) -> None:
        """Make the table, if it is not there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(self.connect()) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS ledger (k TEXT, amount INTEGER, epoch INTEGER)")
            connection.commit()

    def connect(self) -> sqlite3.Connection:
        """Processes are killed here, but machines are not: the system writes what a process has written."""
        connection = sqlite3.connect(self.path)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    def keep(self, stream: KeyedStream, column: str, connect: Callable[[], Any] | None = None) -> None:
        """Add a ledger of a stream's rows to a flow, of a column of numbers."""
        added = stream.process(self.operator, Add(column), returns=DDL)
        added.sink(self.rows_sink, DatabaseSink(connect or self.connect, "ledger"))
        added.sink(f"{self.operator} check", refuse)

    @property
    def rows_sink(self) -> str:
        """The name of the sink."""
        return f"{self.operator} rows"

    def rows(self) -> list[tuple[str, int, int]]:
        """Key, amount and epoch of all that is written."""
        with contextlib.closing(self.connect()) as connection:
            return connection.execute("SELECT k, amount, epoch FROM ledger").fetchall()

    def by_epoch(self) -> dict[int, list[Row]]:
        """The rows of every epoch that is noted in the database; such as have none included."""
        with contextlib.closing(self.connect()) as connection:
            [(newest,)] = connection.execute("SELECT epoch FROM midstream_epochs").fetchall()
        found: dict[int, list[Row]] = {epoch: [] for epoch in range(newest + 1)}
        for key, amount, epoch in self.rows():
            found[epoch].append({"k": key, "amount": amount})
        return found

    def problems(self, checkpoint: str) -> list[str]:
        """What does not agree. To be called when no driver is at work: between two lives, or after the last one."""
        if not (Path(checkpoint) / "midstream.json").exists():
            return []  # killed before it was begun
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
