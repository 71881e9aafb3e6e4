"""Rows in a database agree with state: with two sinks and a change on trial, and if the driver dies in the sink."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from midstream import DatabaseSink, Flow, Insert, ListSource, NoopSink, State, Update
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.inspection import read_state
from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError, SetupError
from midstream.runtime.edge import ProcessEnded
from midstream.testing import ChangeAt, Faults, ManualClock, run_local
from tests.databases import Database
from tests.ledger import DDL, Add, Ledger

Row = dict[str, Any]
EPOCHS = [[{"k": "ab"[i % 2], "n": 1} for i in range(6)] for _ in range(4)]
Sink = Callable[[Any, int], None] | DatabaseSink


def add(key: str, row: Row, state: State) -> Row:
    """Keep a running total; emit what a row adds to it."""
    state.set(state.get(0) + row["n"])
    return row


def add_ten_times(key: str, row: Row, state: State) -> Row:
    return add(key, {**row, "n": 10 * row["n"]}, state)


def fails_on_tens(rows: Any, epoch: int) -> None:
    """The second sink: it fails on rows of the change."""
    if any(row["n"] == 10 for row in rows.to_pylist()):
        raise OSError("disk full")


def flow_to(sink: Sink) -> Flow:
    flow = Flow("totals")
    rows = flow.source("in", ListSource(EPOCHS, "k string, n bigint", partitions=2))
    added = rows.key_by("by k", "k").process("add", add)
    added.sink("a", sink)
    added.sink("b", fails_on_tens)
    return flow


def skipping(database: Database) -> Callable[[Any, int], None]:
    """A sink function as they used to be written: it skips an epoch that is in the database."""
    database.run("CREATE TABLE done (epoch BIGINT PRIMARY KEY)")

    def save(rows: Any, epoch: int) -> None:
        with closing(database.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(f"SELECT 1 FROM done WHERE epoch = {epoch}")
            if cursor.fetchall():
                return
            cursor.execute(f"INSERT INTO done VALUES ({epoch})")
            for row in rows.to_pylist():
                cursor.execute(f"INSERT INTO out VALUES ('{row['k']}', {row['n']}, {epoch})")
            connection.commit()

    return save


def in_database(database: Database) -> dict[str, int]:
    return {k: int(n) for k, n in database.run("SELECT k, SUM(n) FROM out GROUP BY k")}


def in_state(checkpoint: Path) -> dict[str, int]:
    return {row["k"]: int(row["value"]) for row in read_state(str(checkpoint), "add").to_pylist()}


@pytest.fixture
def out(database: Database) -> Database:
    database.run("CREATE TABLE out (k TEXT, n BIGINT, epoch BIGINT)")
    return database


def try_a_change(sink: Sink, checkpoint: Path) -> None:
    """Make a change: sink a writes its rows, sink b fails; the change is rolled back, and its epoch run again."""
    change = ChangeAt.of(1, Update("add", add_ten_times), scheduler="epoch")
    run = run_local(flow_to(sink), checkpoint=str(checkpoint), changes=[change], clock=ManualClock())
    assert [str(record.outcome) for record in run.history] == ["rolled back"]
    assert len(run.progress) == len(EPOCHS)


def test_after_a_change_was_rolled_back_the_database_agrees_with_state(out: Database, tmp_path: Path) -> None:
    try_a_change(out.sink(), tmp_path / "c")
    assert in_database(out) == in_state(tmp_path / "c") == {"a": 12, "b": 12}


def test_a_sink_that_skips_written_epochs_keeps_rows_that_were_rolled_back(out: Database, tmp_path: Path) -> None:
    """This is why a sink must replace."""
    try_a_change(skipping(out), tmp_path / "c")
    assert in_state(tmp_path / "c") == {"a": 12, "b": 12}
    assert in_database(out) == {"a": 39, "b": 39}


# ── a driver that dies ────────────────────────────────────────────────────────────────────────────────────────────


class Died(ProcessEnded):
    """The end of a driver. Nothing in it can handle that."""


class Steps:
    """Counts steps, and kills the driver at some of them."""

    def __init__(self, *ends: int) -> None:
        self.ends = ends
        self.taken = 0

    def take(self) -> None:
        self.taken += 1
        if self.taken in self.ends:
            raise Died

    def connection(self, path: Path) -> sqlite3.Connection:
        """A real connection with a step before each statement, and before and after each commit."""
        take = self.take

        class Cursor(sqlite3.Cursor):
            def execute(self, *args: Any) -> Any:
                take()
                return super().execute(*args)

            def executemany(self, *args: Any) -> Any:
                take()
                return super().executemany(*args)

        class Connection(sqlite3.Connection):
            def cursor(self, factory: Any = Cursor) -> Any:
                return super().cursor(factory)

            def commit(self) -> None:
                take()
                super().commit()
                take()

        return sqlite3.connect(path, factory=Connection)


def live(folder: Path, steps: Steps, pause_s: int) -> int:
    """Run a job with a ledger until it ends, restarting it; return the number of starts. After each, both agree."""
    ledger, checkpoint = Ledger(folder / "ledger.db"), str(folder / "c")
    ledger.create()
    clock = ManualClock(start_us=0)
    lives = 0
    while (done := committed(checkpoint)) < len(EPOCHS):
        lives += 1
        flow = Flow("lives")
        rows = flow.source("in", ListSource(EPOCHS[done:], "k string, n bigint"))
        added = rows.key_by("by k", "k").process("ledger", Add("n"), returns=DDL)
        added.sink("rows", DatabaseSink(lambda: steps.connection(ledger.path), "ledger"))
        with contextlib.suppress(Died):
            run_local(flow, partitions=1, checkpoint=checkpoint, clock=clock)
        clock.advance(seconds=pause_s)
        assert ledger.problems(checkpoint) == []
    assert {epoch: len(rows) for epoch, rows in ledger.by_epoch().items()} == dict.fromkeys(range(len(EPOCHS)), 6)
    return lives


def committed(checkpoint: str) -> int:
    """The number of committed epochs."""
    if not (Path(checkpoint) / "midstream.json").exists():
        return 0
    newest = Checkpoint.of_any_flow(checkpoint).newest_manifest()
    return 0 if newest is None else newest.epoch + 1


@pytest.mark.long
def test_the_driver_may_die_at_every_single_step_of_the_sink(tmp_path: Path) -> None:
    calm = Steps()
    assert live(tmp_path / "calm", calm, 1) == 1
    assert calm.taken > 30, "the start counts, too"
    for end in range(1, calm.taken + 1):
        assert live(tmp_path / str(end), Steps(end), pause_s=1) == 2


def counted_flow(epochs: int = 5) -> Flow:
    flow = Flow("inserted")
    rows = [[{"k": "a", "n": 10 * epoch + i} for i in range(3)] for epoch in range(epochs)]
    flow.source("in", ListSource(rows, "k string, n bigint")).sink("rest", NoopSink())
    return flow


def into(sink: DatabaseSink) -> Insert:
    return Insert(lambda rows: rows.sink("db", sink), after="in")


def test_a_sink_that_is_inserted_while_the_job_runs_owns_its_table_and_writes_each_epoch_once(
    out: Database, tmp_path: Path
) -> None:
    at, sink = str(tmp_path / "job"), out.sink("out")
    changes = [ChangeAt.of(1, into(sink), scheduler="epoch")]
    run = run_local(
        counted_flow(), seed=3, faults=Faults(crash_driver=0.02, crash=0.05), checkpoint=at, changes=changes
    )
    assert [record.outcome for record in run.history] == [Outcome.APPLIED]
    found = sorted(int(n) for (n,) in out.run("SELECT n FROM out"))
    assert found == [n for n in range(50) if n % 10 < 3 and n >= found[0]]
    assert found[0] in (10, 20)
    run_local(counted_flow(2), checkpoint=at)  # a restart of the script without it
    assert len(out.run("SELECT n FROM out")) == len(found) + 6


def test_a_table_of_another_job_is_refused_before_anything_changes(out: Database, tmp_path: Path) -> None:
    changes = [ChangeAt.of(1, into(out.sink("out")), scheduler="epoch")]
    run_local(counted_flow(), checkpoint=str(tmp_path / "first"), changes=changes)
    with pytest.raises(CheckpointError, match="belongs to sink 'db' of flow 'inserted'"):
        run_local(counted_flow(), checkpoint=str(tmp_path / "second"), changes=changes)
    with pytest.raises(SetupError, match="cannot be read"):
        run_local(counted_flow(), changes=[ChangeAt.of(1, into(out.sink("missing")))])
