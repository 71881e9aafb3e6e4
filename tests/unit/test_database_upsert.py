"""Upserts replace by key, and an epoch that runs again undoes its own: on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from midstream import DatabaseSink
from midstream.errors import CheckpointError, FlowError, JobFailed, SchemaError, SetupError
from midstream.ids import Epoch
from midstream.runtime.database_sink import replace_epoch
from midstream.runtime.table_claims import check_tables, claim_tables
from midstream.testing import run_local
from tests.databases import Database, Postgres
from tests.sink_flows import flow_to

DDL = "k string, n bigint"
JOB = "job one"


def claimed(sink: DatabaseSink) -> DatabaseSink:
    graph = flow_to(sink, ddl=DDL).graph
    check_tables(graph, JOB)
    found = claim_tables(graph, JOB).payloads["out0"]
    assert isinstance(found, DatabaseSink)
    return found


def batches(*rows: tuple[str | None, int], portion: int = 3) -> list[pa.RecordBatch]:
    keys, numbers = [k for k, _ in rows], [n for _, n in rows]
    table = pa.table({"k": pa.array(keys, pa.string()), "n": pa.array(numbers, pa.int64())})
    return list(table.to_batches(max_chunksize=portion))


def found(database: Database) -> dict[str, int]:
    return dict(database.run("SELECT k, n FROM out ORDER BY k"))


def upserting(database: Database, **options: Any) -> DatabaseSink:
    return database.sink(mode="upsert", key="k", **options)


@pytest.fixture
def out(database: Database) -> Database:
    database.run("CREATE TABLE out (k VARCHAR(20) PRIMARY KEY, n BIGINT, note VARCHAR(20) DEFAULT 'new', epoch BIGINT)")
    return database


# ── what is written ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_takes_the_place_of_the_one_with_its_key(out: Database) -> None:
    out.run("INSERT INTO out VALUES ('a', 0, 'mine', NULL), ('z', 9, 'mine', NULL)")
    sink = claimed(upserting(out))
    replace_epoch(sink, batches(("a", 1), ("b", 1)), Epoch(0))
    replace_epoch(sink, batches(("b", 2), ("c", 2)), Epoch(1))
    rows = out.run("SELECT k, n, note, epoch FROM out ORDER BY k")
    assert rows == [("a", 1, "mine", 0), ("b", 2, "new", 1), ("c", 2, "new", 1), ("z", 9, "mine", None)]


def test_of_several_rows_with_one_key_the_last_counts(out: Database) -> None:
    sink = claimed(upserting(out))
    replace_epoch(sink, batches(*((f"k{n % 3}", n) for n in range(20))), Epoch(0))
    assert found(out) == {"k0": 18, "k1": 19, "k2": 17}


def test_an_epoch_that_runs_again_leaves_nothing_of_its_first_run(out: Database) -> None:
    sink = claimed(upserting(out))
    replace_epoch(sink, batches(("a", 1), ("b", 1)), Epoch(0))
    replace_epoch(sink, batches(("b", -1), ("c", -1)), Epoch(1))  # of a change that is rolled back
    replace_epoch(sink, batches(("a", 2)), Epoch(1))
    assert found(out) == {"a": 2, "b": 1}
    replace_epoch(sink, [], Epoch(1))
    assert found(out) == {"a": 1, "b": 1}
    replace_epoch(sink, batches(("a", 3)), Epoch(2))
    assert found(out) == {"a": 3, "b": 1}


def test_the_table_is_what_the_last_runs_of_epochs_make(out: Database) -> None:
    """Epochs come in order, and the newest one may run again any number of times, with other rows."""
    rng = random.Random(1)
    sink = claimed(upserting(out))
    before: dict[str, int] = {}
    for epoch in range(12):
        for _ in range(rng.randint(1, 3)):
            rows = [(rng.choice("abcdefg"), rng.randrange(100)) for _ in range(rng.choice((0, 1, 4, 9)))]
            replace_epoch(sink, batches(*rows), Epoch(epoch))
            after = {**before, **dict(rows)}
            assert found(out) == dict(sorted(after.items()))
        before = after


class Broken(Exception):
    pass


@pytest.mark.parametrize("portions", [0, 1, 2])
def test_a_failure_while_writing_changes_nothing(out: Database, portions: int) -> None:
    sink = claimed(upserting(out))
    replace_epoch(sink, batches(("a", 1)), Epoch(0))
    replace_epoch(sink, batches(("a", 2)), Epoch(1))

    def rows() -> Iterator[pa.RecordBatch]:
        yield from batches(("a", 7), ("b", 7), ("c", 7), ("d", 7))[:portions]
        raise Broken

    for epoch in (1, 2):
        with pytest.raises(Broken):
            replace_epoch(sink, rows(), Epoch(epoch))
        assert found(out) == {"a": 2}
    replace_epoch(sink, [], Epoch(1))
    assert found(out) == {"a": 1}


def test_a_key_of_several_columns_in_another_schema(postgres: Postgres) -> None:
    postgres.run(
        "CREATE SCHEMA sales", 'CREATE TABLE sales.out (k TEXT, "n %" BIGINT, v FLOAT, epoch BIGINT, UNIQUE (k, "n %"))'
    )
    sink = postgres.sink("sales.out", mode="upsert", key=["n %", "k"])
    rows = [{"k": k, "n %": n, "v": v} for k, n, v in [("a", 1, 0.5), ("a", 2, 1.5), ("a", 1, 2.5)]]
    run_local(flow_to(sink, ddl="k string, `n %` bigint, v double", rows=rows))
    assert postgres.run('SELECT k, "n %", v, epoch FROM sales.out ORDER BY v') == [("a", 2, 1.5, 0), ("a", 1, 2.5, 0)]
    assert postgres.run("SELECT COUNT(*) FROM sales.out_undo") == [(0,)]


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "merge"}, "mode 'merge' is not known; allowed: append, upsert"),
        ({"mode": "upsert"}, r"mode='upsert' needs key=, the columns by which .*; found key=\(\)"),
        ({"mode": "upsert", "key": ["k", "k"]}, "mode='upsert' needs key=, .* each once"),
        ({"key": "k"}, "key='k' is for mode='upsert'; found mode='append'"),
    ],
)
def test_invalid_parameters_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(FlowError, match=f"DatabaseSink: {says}"):
        DatabaseSink(lambda: None, "out", **options)


def test_a_key_that_the_rows_lack_is_refused() -> None:
    with pytest.raises(SchemaError, match="sink 'out0', key: there is no column 'kk'; did you mean 'k'"):
        flow_to(DatabaseSink(lambda: None, "out", mode="upsert", key="kk"), ddl=DDL)


def test_a_table_without_a_unique_index_is_refused(database: Database) -> None:
    database.run("CREATE TABLE out (k VARCHAR(20), n BIGINT, epoch BIGINT)")
    says = r"sink 'out0': rows cannot be upserted into 'out' by k: .*The table needs a unique index on exactly these"
    with pytest.raises(SetupError, match=says):
        run_local(flow_to(upserting(database), ddl=DDL))


def test_an_undo_table_with_other_columns_is_refused(out: Database) -> None:
    claimed(upserting(out))
    out.run("ALTER TABLE out ADD COLUMN more BIGINT")
    with pytest.raises(SetupError, match=r"'out_undo' has the columns k, n, note, epoch, and 'out' has .*, more; give"):
        check_tables(flow_to(upserting(out), ddl=DDL).graph, JOB)


def test_a_job_that_went_back_by_several_epochs_is_refused(out: Database) -> None:
    sink = claimed(upserting(out))
    for epoch in range(3):
        replace_epoch(sink, batches(("a", epoch)), Epoch(epoch))
    with pytest.raises(
        CheckpointError, match="'out' holds upserts up to epoch 2, and the job has gone back to epoch 1"
    ):
        replace_epoch(sink, batches(("a", 9)), Epoch(1))
    assert found(out) == {"a": 2}


def test_a_null_in_the_key_fails_the_epoch_and_changes_nothing(out: Database) -> None:
    rows: list[dict[str, Any]] = [{"k": "a", "n": 1}, {"k": None, "n": 2}]
    with pytest.raises(JobFailed, match="a row has a null in the column 'k', which is in the key of the upsert"):
        run_local(flow_to(upserting(out), ddl=DDL, rows=rows))
    assert found(out) == {}
