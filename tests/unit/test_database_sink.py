"""A sink that replaces by epoch, on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import DatabaseSink, Flow, ListSource
from midstream.errors import CheckpointError, FlowError, MidstreamError, SchemaError, SetupError
from midstream.ids import Epoch
from midstream.runtime import database_sink as writing
from midstream.runtime.database_sink import replace_epoch
from midstream.runtime.table_claims import check_tables, claim_tables
from midstream.testing import run_local
from tests.databases import Database, Postgres, Sqlite
from tests.sink_flows import flow_to

JOB = "job one"


def claimed(sink: DatabaseSink, job: str = JOB) -> DatabaseSink:
    """The sink of a started job."""
    graph = flow_to(sink).graph
    check_tables(graph, job)
    found = claim_tables(graph, job).payloads["out0"]
    assert isinstance(found, DatabaseSink)
    return found


def batches(*numbers: int, portion: int = 2) -> list[pa.RecordBatch]:
    table = pa.table({"n": pa.array(numbers, pa.int64()), "name": pa.array([f"no. {n}" for n in numbers], pa.string())})
    return list(table.to_batches(max_chunksize=portion))


def found(database: Database) -> dict[int, list[int]]:
    """The numbers in the table, by epoch."""
    rows: dict[int, list[int]] = {}
    for epoch, n, name in database.run("SELECT epoch, n, name FROM out ORDER BY epoch, n"):
        assert name == f"no. {n}"
        rows.setdefault(epoch, []).append(n)
    return rows


def noted(database: Database) -> Any:
    [(epoch,)] = database.run("SELECT epoch FROM midstream_epochs WHERE table_name = 'out'")
    return epoch


@pytest.fixture
def out(database: Database) -> Database:
    database.run("CREATE TABLE out (n BIGINT, name TEXT, epoch BIGINT)")
    return database


# ── what is written ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_epoch_replaces_what_it_wrote_before(out: Database) -> None:
    sink = claimed(out.sink())
    assert noted(out) is None
    for epoch, numbers in [(0, (1, 2, 3)), (1, (4,)), (1, (5, 6, 7, 8, 9))]:
        replace_epoch(sink, batches(*numbers), Epoch(epoch))
    assert found(out) == {0: [1, 2, 3], 1: [5, 6, 7, 8, 9]}
    replace_epoch(sink, [], Epoch(1))
    assert found(out) == {0: [1, 2, 3]}
    assert noted(out) == 1, "an epoch without rows is known"


def test_the_table_holds_the_last_version_of_every_epoch(out: Database) -> None:
    """A job may go back some epochs, if a checkpoint is restored from a copy: later epochs are then deleted."""
    rng = random.Random(1)
    sink, wanted = claimed(out.sink()), dict[int, list[int]]()
    for _ in range(40):
        epoch = rng.randint(max(0, len(wanted) - 3), len(wanted))
        numbers = [rng.randrange(1000) for _ in range(rng.choice((0, 1, 5)))]
        replace_epoch(sink, batches(*numbers), Epoch(epoch))
        wanted = {before: rows for before, rows in wanted.items() if before < epoch} | {epoch: sorted(numbers)}
        assert found(out) == {each: rows for each, rows in wanted.items() if rows}
        assert noted(out) == epoch


def test_rows_without_an_epoch_belong_to_the_user_and_stay(out: Database) -> None:
    out.run("INSERT INTO out VALUES (-1, 'no. -1', NULL)")
    sink = claimed(out.sink())
    for numbers in ((1,), (2,)):
        replace_epoch(sink, batches(*numbers), Epoch(0))
    assert found(out) == {0: [2], None: [-1]}


class Broken(Exception):
    pass


@pytest.mark.parametrize("portions", [0, 1, 2])
def test_a_failure_while_writing_changes_nothing(out: Database, portions: int) -> None:
    sink = claimed(out.sink())
    replace_epoch(sink, batches(1, 2), Epoch(0))
    replace_epoch(sink, batches(3), Epoch(1))

    def rows() -> Iterator[pa.RecordBatch]:
        yield from batches(7, 8, 9, 10)[:portions]
        raise Broken

    for epoch in (1, 2):
        with pytest.raises(Broken):
            replace_epoch(sink, rows(), Epoch(epoch))
        assert (found(out), noted(out)) == ({0: [1, 2], 1: [3]}, 1)


TYPES: dict[str, tuple[str, list[Any]]] = {
    "yes": ("boolean", [True, False]),
    "tiny": ("tinyint", [-128, 127]),
    "large": ("bigint", [-(2**63), 2**63 - 1]),
    "real": ("double", [0.1, -1e-300]),
    "text": ("string", ["", 'a "quoted"\n, \\N \\. line', "日本 🙂"]),
    "bytes": ("binary", [b"", b"\x00\xff\\x"]),
    "day": ("date", [date(1, 1, 1), date(2026, 2, 28)]),
    "moment": ("timestamp", [datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), datetime(1969, 12, 31, tzinfo=UTC)]),
    "clock": ("timestamp_ntz", [datetime(2026, 1, 2, 3, 4, 5), datetime(9999, 12, 31, 23, 59, 59, 999999)]),
    "price": ("decimal(12, 2)", [Decimal("-0.10"), Decimal("9999999999.99")]),
}
POSTGRES_TYPES = {"boolean": "boolean", "tinyint": "smallint", "bigint": "bigint", "double": "double precision"} | {
    "string": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "decimal(12, 2)": "numeric",
}


@pytest.mark.parametrize("column", TYPES)
def test_every_type_is_read_as_it_was_written(database: Database, column: str) -> None:
    ddl, values = TYPES[column]
    kind = POSTGRES_TYPES[ddl] if isinstance(database, Postgres) else ""
    database.run(f"CREATE TABLE out (id BIGINT, {column} {kind}, epoch BIGINT)")
    rows = [{"id": number, column: value} for number, value in enumerate([*values, None])]
    run_local(flow_to(database.sink(), ddl=f"id bigint, {column} {ddl}", rows=rows))
    got = [row[0] for row in database.run(f"SELECT {column} FROM out ORDER BY id")]
    if isinstance(database, Sqlite):  # it has no such types; text that sorts as the values do
        texts = {"day": date.fromisoformat, "moment": datetime.fromisoformat, "clock": datetime.fromisoformat}
        convert: Any = texts.get(column, Decimal if column == "price" else lambda value: value)
        got = [None if value is None else convert(value) for value in got]
    assert got == [*values, None]


def test_names_are_quoted(database: Database) -> None:
    database.run('CREATE TABLE "a.b ""c"" %s ?" ("50 %" BIGINT, "Ünder""line" TEXT, "no. of epoch" BIGINT)')
    sink = database.sink(('a.b "c" %s ?',), epoch_column="no. of epoch", epochs_table="Midstream's")
    flow = Flow("odd")
    rows = [{"50 %": 7, 'Ünder"line': "x"}]
    flow.source("in", ListSource([rows], '`50 %` bigint, `Ünder"line` string')).sink("out", sink)
    run_local(flow)
    assert database.run('SELECT "50 %", "Ünder""line", "no. of epoch" FROM "a.b ""c"" %s ?"') == [(7, "x", 0)]
    assert database.run("""SELECT table_name, epoch FROM "Midstream's" """) == [('a.b "c" %s ?', 0)]


def test_a_dot_separates_schema_and_table(postgres: Postgres) -> None:
    postgres.run("CREATE SCHEMA sales", "CREATE TABLE sales.out (n BIGINT, name TEXT, epoch BIGINT)")
    sink = claimed(postgres.sink("sales.out", epochs_table="sales.epochs"))
    replace_epoch(sink, batches(1), Epoch(0))
    assert postgres.run("SELECT * FROM sales.out") == [(1, "no. 1", 0)]
    assert postgres.run("SELECT table_name, job, sink, epoch FROM sales.epochs") == [("sales.out", JOB, "out0", 0)]


def test_many_rows_go_in_portions(out: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PORTION_ROWS", 7)
    replace_epoch(claimed(out.sink()), batches(*range(100), portion=100), Epoch(0))
    assert found(out) == {0: list(range(100))}


# ── drivers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_parameters_are_written_in_the_drivers_style(out: Database) -> None:
    """PostgreSQL's driver says pyformat, and takes format as well; SQLite's says qmark, and takes named."""
    other = "format" if isinstance(out, Postgres) else "named"
    for style in (None, other):
        sink = claimed(out.sink(paramstyle=style))
        replace_epoch(sink, batches(1, 2, 3), Epoch(0))
        assert found(out) == {0: [1, 2, 3]}


@pytest.mark.parametrize(
    ("style", "text", "values"),
    [
        ("qmark", "a% ? b ?", (1, 2)),
        ("numeric", "a% :1 b :2", (1, 2)),
        ("named", "a% :p0 b :p1", {"p0": 1, "p1": 2}),
        ("format", "a%% %s b %s", (1, 2)),
        ("pyformat", "a%% %(p0)s b %(p1)s", {"p0": 1, "p1": 2}),
    ],
)
def test_each_style_of_parameters(style: str, text: str, values: Any, tmp_path: Path) -> None:
    sink = Sqlite(tmp_path / "d").sink(paramstyle=style)
    with writing._connection(sink) as database:
        assert database._statement("a% \0 b \0") == text
        assert database._parameters((1, 2)) == values


def test_another_quote_character(tmp_path: Path) -> None:
    database = Sqlite(tmp_path / "d")
    database.run("CREATE TABLE `o``ut` (n BIGINT, name TEXT, epoch BIGINT)")
    replace_epoch(claimed(database.sink("o`ut", quote="`")), batches(1), Epoch(0))
    assert database.run("SELECT n, epoch FROM `o``ut`") == [(1, 0)]


class Handed:
    """A connection from a pool: the pool's own class around the driver's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_driver_without_a_parameter_style_is_reported(tmp_path: Path) -> None:
    database = Sqlite(tmp_path / "d")
    database.run("CREATE TABLE out (n BIGINT, name TEXT, epoch BIGINT)")
    with pytest.raises(SetupError, match=r"sink 'out0': a connection of type .*Handed does not show .* paramstyle="):
        claimed(DatabaseSink(lambda: Handed(database.connect()), "out"))
    replace_epoch(
        claimed(DatabaseSink(lambda: Handed(database.connect()), "out", paramstyle="qmark")), batches(1), Epoch(0)
    )
    assert found(database) == {0: [1]}


def test_a_connection_derived_from_the_drivers_own_is_known(tmp_path: Path) -> None:
    class Mine(sqlite3.Connection):
        pass

    database = Sqlite(tmp_path / "d")
    database.run("CREATE TABLE out (n BIGINT, name TEXT, epoch BIGINT)")
    sink = claimed(DatabaseSink(lambda: sqlite3.connect(database.path, factory=Mine), "out"))
    replace_epoch(sink, batches(1), Epoch(0))
    assert found(database) == {0: [1]}


# ── what is refused before the job starts ─────────────────────────────────────────────────────────────────────────


def tables(database: Database) -> list[Any]:
    catalogue = (
        "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"
        if isinstance(database, Postgres)
        else "SELECT name FROM sqlite_master ORDER BY 1"
    )
    return database.run(catalogue)


def assert_refused(database: Database, error: type[MidstreamError], says: str, sink: DatabaseSink, *more: Any) -> None:
    before = tables(database)
    with pytest.raises(error, match=says):
        run_local(flow_to(sink, *more, rows=[{"n": 1, "name": "no. 1"}]))
    assert tables(database) == before


def test_a_connection_that_fails_is_reported(tmp_path: Path) -> None:
    database = Sqlite(tmp_path / "d")
    sink = DatabaseSink(lambda: sqlite3.connect(tmp_path / "none" / "d"), "out")
    assert_refused(
        database, SetupError, "sink 'out0': the database cannot be used: OperationalError: unable to open", sink
    )


def test_a_missing_server_is_reported(postgres: Postgres) -> None:
    gone = replace(postgres, name="nobody's")
    says = """sink 'out0': the database cannot be used: OperationalError: .*database "nobody's" does not exist"""
    assert_refused(postgres, SetupError, says, gone.sink())


def test_a_missing_table_is_reported(out: Database) -> None:
    says = r"sink 'out0': the table 'Out2' cannot be read: .*Out2.*Create it with the columns n, name, epoch;"
    assert_refused(out, SetupError, says, out.sink("Out2"))


def test_a_missing_column_is_reported(database: Database) -> None:
    database.run("CREATE TABLE out (n BIGINT, nam TEXT, epoch BIGINT)")
    says = r"sink 'out0': the table 'out' has no column 'name'; it has n, nam, epoch. Did you mean 'nam'\?"
    assert_refused(database, SchemaError, says, database.sink())


def test_a_missing_epoch_column_is_reported(out: Database) -> None:
    says = r"the table 'out' has no column 'batch' \(for the number of the epoch\); it has n, name, epoch"
    assert_refused(out, SchemaError, says, out.sink(epoch_column="batch"))


def test_a_connection_in_autocommit_mode_is_refused(out: Database) -> None:
    sink = DatabaseSink(out.connect_with_autocommit, "out")
    assert_refused(out, SetupError, r"sink 'out0': connect returns a connection of \w+ in autocommit mode", sink)


def test_autocommit_mode_is_detected_even_if_the_driver_does_not_report_it(tmp_path: Path) -> None:
    database = Sqlite(tmp_path / "d")
    database.run("CREATE TABLE out (n BIGINT, name TEXT, epoch BIGINT)")
    sink = DatabaseSink(lambda: Handed(database.connect_with_autocommit()), "out", paramstyle="qmark")
    with pytest.raises(SetupError, match="sink 'out0': the database kept what was not committed"):
        run_local(flow_to(sink, rows=[{"n": 1, "name": "no. 1"}]), checkpoint=str(tmp_path / "c"))
    assert found(database) == {}
    run_local(flow_to(database.sink(), rows=[{"n": 1, "name": "no. 1"}]), checkpoint=str(tmp_path / "c"))
    assert found(database) == {0: [1]}, "nothing was lost: the checkpoint is free, and its own"


def test_another_jobs_table_is_refused(out: Database, tmp_path: Path) -> None:
    run_local(flow_to(out.sink(), rows=[{"n": 1, "name": "no. 1"}]), checkpoint=str(tmp_path / "c"))
    says = r"sink 'out0': the table 'out' belongs to sink 'out0' of flow 'shop' \(job \w{8}\), not to this job"
    assert_refused(out, CheckpointError, says, out.sink())
    assert found(out) == {0: [1]}
    run_local(flow_to(out.sink(), rows=[{"n": 2, "name": "no. 2"}]), checkpoint=str(tmp_path / "c"))
    assert found(out) == {0: [1], 1: [2]}, "the owner continues"


def test_rows_of_epochs_without_a_known_writer_are_not_touched(out: Database) -> None:
    out.run("INSERT INTO out VALUES (9, 'no. 9', 4)")
    assert_refused(
        out, CheckpointError, r"'out' holds rows of epochs \(up to 4\), but 'midstream_epochs' does not", out.sink()
    )
    assert found(out) == {4: [9]}


def test_two_sinks_on_one_table_are_refused(out: Database) -> None:
    sink = out.sink()
    assert_refused(out, FlowError, "sink.*'out0' and 'out1' both write to the table 'out'", sink, sink)
    # With different connect functions the duplicate is detected only when the second sink claims the table.
    graph = flow_to(out.sink(), DatabaseSink(lambda: out.connect(), "out")).graph
    check_tables(graph, JOB)
    with pytest.raises(CheckpointError, match="sink 'out1': the table 'out' was just taken by sink 'out0'"):
        claim_tables(graph, JOB)


def test_a_replaced_driver_may_no_longer_write(out: Database) -> None:
    old = claimed(out.sink())
    replace_epoch(old, batches(1), Epoch(0))
    new = claimed(out.sink())
    for epoch in (0, 1):
        with pytest.raises(CheckpointError, match=r"is no longer written by this driver: job .* was restarted"):
            replace_epoch(old, batches(2), Epoch(epoch))
    assert found(out) == {0: [1]}
    replace_epoch(new, batches(3), Epoch(1))
    assert found(out) == {0: [1], 1: [3]}


# ── what is refused when the flow is written ──────────────────────────────────────────────────────────────────────


def anything() -> Any:
    return None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: DatabaseSink("shop.db", "out"),  # type: ignore[arg-type]  # which is the point
            "connect must be a function.*found str; write e.g. lambda",
        ),
        (lambda: DatabaseSink(anything, ""), "table '' is not a name"),
        (lambda: DatabaseSink(anything, "a..b"), r"table 'a\.\.b' is not a name"),
        (lambda: DatabaseSink(anything, "a", epoch_column="e\0"), "epoch_column .* is not a name"),
        (lambda: DatabaseSink(anything, "a", epochs_table=()), r"epochs_table \(\) is not a name"),
        (lambda: DatabaseSink(anything, "a", paramstyle="?"), "paramstyle '\\?' is not known; allowed: qmark"),
        (lambda: DatabaseSink(anything, "a", quote="''"), "quote must be one character"),
    ],
)
def test_invalid_parameters_are_refused(make: Any, says: str) -> None:
    with pytest.raises(FlowError, match=f"DatabaseSink: {says}"):
        make()


def test_columns_that_do_not_fit_a_table_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"sink 'out0': column 'l' is array<int>; .* only plain columns.*json\.dumps"):
        flow_to(DatabaseSink(anything, "out"), ddl="l array<int>")
    with pytest.raises(SchemaError, match=r"a DatabaseSink adds the column 'epoch'.*or give .* another epoch_column"):
        flow_to(DatabaseSink(anything, "out"), ddl="epoch int")
    taken = flow_to(DatabaseSink(anything, "out", epoch_column="batch"), ddl="epoch int").graph
    assert taken["out0"].schema.names == ["epoch"]
