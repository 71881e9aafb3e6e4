"""Sinks on Spark: the contents of their folders, epochs that run again, and folders that they refuse."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from midstream import ConsoleSink, FileSink, Flow, ListSource, MemorySink, NoopSink, Update
from midstream.checkpoint.change_records import Outcome
from midstream.errors import CheckpointError, FlowError, JobFailed
from midstream.runtime.spark import heartbeat
from midstream.runtime.walk import walk
from midstream.testing import run_local, run_spark
from tests.databases import Sqlite
from tests.ledger import REFUSED, Add, Ledger
from tests.spark.conftest import PATIENCE_S

Row = dict[str, Any]
ROWS = [{"n": n, "name": None if n == 3 else f"naïve {n}"} for n in range(9)]


def same(row: Row) -> Row:
    return row


def flow_to(*sinks: Any, name: str = "sinks", function: Callable[[Row], Row] = same) -> Flow:
    flow = Flow(name)
    rows = flow.source("rows", ListSource.of(ROWS, schema="n bigint, name string", epoch_rows=4, partitions=2))
    stream = rows.map("work", function)
    for i, sink in enumerate(sinks):
        stream.sink(f"out{i}", sink)
    return flow


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_files_of_every_format_read_as_one_table_with_the_epoch(spark: Any, tmp_path: Path) -> None:
    sinks = {
        "parquet": FileSink(tmp_path / "parquet"),
        "json": FileSink(tmp_path / "json", "json"),
        "csv": FileSink(tmp_path / "csv", "csv", header=True, compression="gzip"),
    }
    run_spark(flow_to(*sinks.values()), spark, checkpoint=str(tmp_path / "c"))

    expected = [(row["n"], row["name"], i // 4) for i, row in enumerate(ROWS)]
    for format, sink in sinks.items():
        table = (
            spark.read.schema("n bigint, name string, epoch int").option("header", True).format(format).load(sink.path)
        )
        assert sorted((row.n, row.name, row.epoch) for row in table.collect()) == expected
    assert list((tmp_path / "csv").glob("epoch-*.csv.gz"))
    assert spark.read.parquet(sinks["parquet"].path).where("epoch = 1").count() == 4


def test_an_epoch_that_fails_is_never_visible_in_files(spark: Any, tmp_path: Path) -> None:
    """Tasks have written the files of epoch 1 when the second sink fails; the fixed flow writes other rows there."""
    out = FileSink(tmp_path / "out")

    def broken(df: Any, epoch: int) -> None:
        if epoch == 1:
            raise OSError("disk full")

    with pytest.raises(JobFailed, match="disk full"):
        run_spark(flow_to(out, broken), spark, checkpoint=str(tmp_path / "c"))
    assert {row.epoch for row in spark.read.parquet(out.path).collect()} == {0}

    negative = flow_to(out, NoopSink(), function=lambda row: {**row, "n": -row["n"]})
    run_spark(negative, spark, checkpoint=str(tmp_path / "c"))

    found = {(row.epoch, row.n) for row in spark.read.parquet(out.path).collect()}
    assert found == {(0, n) for n in range(4)} | {(n // 4, -n) for n in range(4, 9)}


def test_folders_with_another_owner_are_refused_and_nothing_is_written(spark: Any, tmp_path: Path) -> None:
    taken = FileSink(tmp_path / "taken")
    run_spark(flow_to(taken), spark, checkpoint=str(tmp_path / "c"))
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.png").write_bytes(b"meow")
    (tmp_path / "file").write_text("I am a file")
    before = contents(tmp_path)

    def refused(says: str, *sinks: Any, checkpoint: str = "new", error: type[Exception] = CheckpointError) -> None:
        with pytest.raises(error, match=says):
            flow_to(*sinks).start(spark, checkpoint=str(tmp_path / checkpoint))
        assert contents(tmp_path) == before
        assert not (tmp_path / "free").exists()
        assert not (tmp_path / "new").exists()

    free = FileSink(tmp_path / "free")
    refused(r"holds the output of sink 'out0' of flow 'sinks' \(job \w{8}\), not of this job", free, taken)
    refused("of sink 'out0'.*not of this job", NoopSink(), taken, checkpoint="c")
    refused(r"sink 'out1': the folder .* holds other data \(cat\.png\)", free, FileSink(photos))
    refused("is a file; a FileSink needs a folder", free, FileSink(tmp_path / "file"))
    refused("'out0' and 'out1' both write to", free, FileSink(f"{tmp_path}/x/../free"), error=FlowError)

    marker = tmp_path / "taken" / "_midstream.json"
    whole = marker.read_bytes()
    marker.write_bytes(whole[:-3])
    before = contents(tmp_path)
    refused(r"_midstream\.json in the folder .* is damaged", taken, checkpoint="c")
    marker.write_bytes(whole)
    assert run_spark(flow_to(taken), spark, checkpoint=str(tmp_path / "c")).metrics.epochs == 0


TYPES = (
    "n bigint, i int, s string, x double, f float, yes boolean, price decimal(9, 2), "
    "at timestamp, local timestamp_ntz, day date"
)
PLAIN = ["n", "i", "s", "x", "f", "yes", "price", "at", "local", "day", "k"]
NESTED_NAMES = ["tags", "place", "scores"]
NESTED = "tags array<string>, place struct<lat: double, name: string>, scores map<string, int>"


def typed_rows(count: int) -> list[Row]:
    time = datetime(2026, 7, 1, 23, 30, tzinfo=UTC)
    return [
        {
            "n": n,
            "i": -n,
            "s": f'"ö", {n}\nline',
            "x": n / 4,
            "f": n / 2,
            "yes": n % 3 == 0,
            "price": Decimal(f"-{n}.10"),
        }
        | {"at": time + timedelta(microseconds=n), "local": datetime(2026, 1, 1) + timedelta(seconds=n)}
        | {"day": time.date() + timedelta(days=n), "k": "ab"[n % 2] if n % 5 else None}
        | {"tags": ["x", None][: n % 3], "place": {"lat": 1.5 * n, "name": None}, "scores": {"a": n}}
        if n % 4
        else {"n": n}  # all others are null
        for n in range(count)
    ]


@pytest.mark.slow
def test_plain_readers_read_all_types_in_all_formats(spark: Any, tmp_path: Path) -> None:
    """As one table with the same rows and types, partition columns among them, by Spark and by pyarrow."""
    rows = typed_rows(24)
    flow = Flow("types")
    ddl = f"{TYPES}, k string"
    everything = flow.source("in", ListSource([rows[:9], rows[9:]], f"{ddl}, {NESTED}", partitions=2))
    plain = everything.map("plain", lambda row: {name: row[name] for name in PLAIN}, returns=ddl)
    for format in ("parquet", "json"):
        everything.sink(format, FileSink(tmp_path / format, format))
        everything.sink(f"{format} by k", FileSink(tmp_path / f"{format} by k", format, partition_by="k"))
    plain.sink("csv", FileSink(tmp_path / "csv", "csv", header=True))
    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))

    schema = f"{ddl}, {NESTED}, epoch int"
    frame = spark.createDataFrame(
        [(*(row.get(name) for name in [*PLAIN, *NESTED_NAMES]), n >= 9) for n, row in enumerate(rows)],
        schema.replace("epoch int", "later boolean"),
    ).selectExpr("* except (later)", "cast(later as int) as epoch")
    expected = [row.asDict(recursive=True) for row in frame.orderBy("n").collect()]
    names = [*PLAIN, *NESTED_NAMES, "epoch"]

    parquet = spark.read.parquet(str(tmp_path / "parquet"))
    assert [(field.name, field.dataType) for field in parquet.schema] == [
        (field.name, field.dataType) for field in frame.schema
    ]
    for name in ("parquet", "parquet by k", "json", "json by k"):
        found = spark.read.schema(schema).format(name.split(" ")[0]).load(str(tmp_path / name))
        assert [row.asDict(recursive=True) for row in found.select(*names).orderBy("n").collect()] == expected, name
    found = (
        spark.read.schema(f"{ddl}, epoch int").option("header", True).option("multiLine", True).option("escape", '"')
    )
    assert [
        row.asDict() for row in found.csv(str(tmp_path / "csv")).select(*PLAIN, "epoch").orderBy("n").collect()
    ] == [{name: row[name] for name in [*PLAIN, "epoch"]} for row in expected]
    arrow = ds.dataset(tmp_path / "parquet by k", partitioning="hive").to_table().sort_by("n")
    assert arrow["k"].to_pylist() == [row["k"] for row in expected]
    assert arrow["price"].to_pylist() == [row["price"] for row in expected]
    assert arrow["tags"].to_pylist() == [row["tags"] for row in expected]


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def jobs_per_epoch(spark: Any, flow: Flow, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many Spark jobs each epoch was."""
    counts: list[int] = []
    real = walk

    def counted(*arguments: Any) -> None:
        jobs = spark.sparkContext._jsc.sc().dagScheduler().nextJobId
        before = jobs()
        real(*arguments)
        counts.append(jobs() - before)

    monkeypatch.setattr(heartbeat, "walk", counted)
    run_spark(flow, spark, checkpoint=str(checkpoint))
    return counts


def counting(df: Any, epoch: int) -> None:
    df.write.format("noop").mode("append").save()


@pytest.mark.parametrize(
    ("sinks", "jobs"),
    [
        (("file", "memory", "noop", "console"), 1),
        pytest.param(("file", "noop"), 1, marks=pytest.mark.slow),
        pytest.param(("noop", "function"), 1, marks=pytest.mark.slow),
        pytest.param(("file", "function"), 1, marks=pytest.mark.slow),
        (("function", "file"), 2),
        pytest.param(("function", "function"), 3, marks=pytest.mark.slow),
        pytest.param(("function", "memory"), 2, marks=pytest.mark.slow),
        (("noop", "database"), 3),  # it is computed in one, and fetched from two partitions
    ],
)
def test_the_number_of_jobs_of_an_epoch(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sinks: tuple[str, ...], jobs: int
) -> None:
    """With two exchanges; sinks read rows as they come in and as they are made last, by turns.

    Sinks of our own cost no job, a single reader of a DataFrame at the end none beyond its own.
    """
    targets: dict[str, Callable[[int], Any]] = {
        "file": lambda i: FileSink(tmp_path / f"out{i}"),
        "memory": lambda i: MemorySink(),
        "noop": lambda i: NoopSink(),
        "console": lambda i: ConsoleSink(2),
        "function": lambda i: counting,
        "database": lambda i: database.sink(),
    }
    database = Sqlite(tmp_path / "out.db")
    database.run("CREATE TABLE out (n, name, epoch)")
    flow = Flow("jobs")
    rows = flow.source("rows", ListSource.of(ROWS, schema="n bigint, name string", epoch_rows=4, partitions=2))
    made = rows.key_by("by_n", "n").map("one", same).key_by("by_name", "name").map("two", same)
    for i, sink in enumerate(sinks):
        (made if i % 2 else rows).sink(f"out{i}", targets[sink](i))
    if "function" not in sinks:
        made.filter("never", lambda row: False).sink("empty", MemorySink())  # an outlet without rows
    assert jobs_per_epoch(spark, flow, tmp_path / "c", monkeypatch) == [jobs] * 3


def test_the_console_says_that_there_are_more_rows(spark: Any, tmp_path: Path, capsys: Any) -> None:
    run_spark(flow_to(ConsoleSink(4)), spark, checkpoint=str(tmp_path / "c"))
    assert "more than" not in capsys.readouterr().out
    run_spark(flow_to(ConsoleSink(3)), spark, checkpoint=str(tmp_path / "d"))
    assert capsys.readouterr().out.count("… more than 3 rows") == 2


# ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_both_runtimes_write_the_same_to_a_database(spark: Any, tmp_path: Path) -> None:
    """Whatever the session's time zone and the names of columns; in portions of several partitions."""
    ddl = "`a.b` bigint, `c``d` string, at timestamp, day date, price decimal(9, 2), raw binary, yes boolean, x float"
    time = datetime(2026, 7, 1, 23, 30, tzinfo=UTC)
    rows: list[Row] = [
        {"a.b": n, "c`d": "" if n % 2 else None, "at": time + timedelta(microseconds=n), "day": time.date()}
        | {"price": Decimal(f"-{n}.10"), "raw": bytes([n % 256, 0]), "yes": n % 3 == 0, "x": n / 4}
        for n in range(50)
    ]

    def written(where: str, run: Callable[[Flow], Any]) -> list[tuple[Any, ...]]:
        database = Sqlite(tmp_path / f"{where}.db")
        names = ", ".join(f'"{name}"' for name in rows[0])
        database.run(f"CREATE TABLE out ({names}, epoch)")
        flow = Flow("types")
        flow.source("in", ListSource([rows[:20], rows[20:]], ddl, partitions=3)).sink("out", database.sink())
        run(flow)
        return database.run(f"SELECT epoch, {names} FROM out ORDER BY 2")

    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        found = written("spark", lambda flow: run_spark(flow, spark, checkpoint=str(tmp_path / "c")))
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert len(found) == 50
    assert found == written("local", run_local)


def test_partitions_for_a_database_are_computed_at_the_same_time(spark: Any, tmp_path: Path) -> None:
    """Whoever fetches them one after the other: here each waits for the other one."""
    met, out = tmp_path / "met", Sqlite(tmp_path / "out.db")
    met.mkdir()
    out.run("CREATE TABLE out (n, epoch)")

    def wait_for_the_other(row: Row) -> Row:
        (met / str(os.getpid())).touch()
        for _ in range(600):
            if len(list(met.iterdir())) == 2:
                return row
            time.sleep(0.1)
        raise TimeoutError("the other partition was not computed meanwhile")

    flow = Flow("together")
    rows = [{"n": n} for n in range(8)]
    keyed = flow.source("in", ListSource([rows], "n bigint", partitions=2)).key_by("by n", "n")
    keyed.map("wait", wait_for_the_other).sink("out", out.sink())
    run_spark(flow, spark, checkpoint=str(tmp_path / "c"), partitions=2)
    assert out.run("SELECT n FROM out ORDER BY n") == [(n,) for n in range(8)]


def ledger_flow(spark: Any, ledger: Ledger, connect: Callable[[], Any] | None = None) -> Flow:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).option("numPartitions", 2)
    flow = Flow("ledger")
    ledger.create()
    stream = flow.source("numbers", source.load().selectExpr("value AS n", "value % 7 AS k"))
    ledger.keep(stream.key_by("by k", "k"), "n", connect)
    return flow


def test_when_the_second_sink_refuses_a_change_the_first_keeps_none_of_its_rows(spark: Any, tmp_path: Path) -> None:
    """The database has the change's rows when the other sink fails. The epoch is run again without the change."""
    ledger, checkpoint = Ledger(tmp_path / "ledger.db"), str(tmp_path / "c")
    job = ledger_flow(spark, ledger).start(spark, checkpoint=checkpoint)
    assert job.await_epoch(0, PATIENCE_S)
    change = job.update(Update("ledger", Add("n", 1, is_refused=True)))
    assert change.wait(PATIENCE_S) is Outcome.ROLLED_BACK
    assert "an amount that nobody pays" in str(change.error)
    applied = job.update(Update("ledger", Add("n", 2)))
    assert applied.wait(PATIENCE_S) is Outcome.APPLIED
    job.stop()
    assert ledger.problems(checkpoint) == []
    assert {len(rows) for rows in ledger.by_epoch().values()} == {100}, "every epoch once, and as a whole"
    assert max(amount for _, amount, _ in ledger.rows()) < REFUSED


@pytest.mark.slow
def test_a_run_that_is_given_up_within_a_transaction_leaves_nothing(spark: Any, tmp_path: Path) -> None:
    ledger, checkpoint = Ledger(tmp_path / "ledger.db"), str(tmp_path / "c")
    arrived, go_on = threading.Event(), threading.Event()

    def connect() -> Any:
        if go_on.is_set() or not (tmp_path / "c" / "epochs" / f"{1:010d}").exists():
            return ledger.connect()
        connection = ledger.connect()
        arrived.set()
        assert go_on.wait(PATIENCE_S)
        return connection

    job = ledger_flow(spark, ledger, connect).start(spark, checkpoint=checkpoint)
    assert arrived.wait(PATIENCE_S)
    change = job.update(Update("ledger", Add("n", 1)), scheduler="replay")
    go_on.set()
    assert change.wait(PATIENCE_S) is Outcome.APPLIED
    job.stop()
    assert ledger.problems(checkpoint) == []
    assert {len(rows) for rows in ledger.by_epoch().values()} == {100}, "every epoch once, and as a whole"


# ── others ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_function_sink_may_read_its_rows_as_often_and_as_little_as_it_likes(spark: Any, tmp_path: Path) -> None:
    """How much it reads does not affect what the flow computes; operators run once for each row."""
    curious: list[Any] = []

    def look(df: Any, epoch: int) -> None:
        curious.append((epoch, df.count(), sorted(row.n for row in df.collect()), len(df.take(1)), df.columns))

    def ignore(df: Any, epoch: int) -> None:
        pass

    (tmp_path / "calls").mkdir()
    calls = str(tmp_path / "calls")

    def count(row: Row) -> Row:
        open(f"{calls}/{row['n']}", "x").close()  # fails if it is called again
        return row

    job = run_spark(flow_to(look, ignore, function=count), spark, checkpoint=str(tmp_path / "c"))

    assert curious == [
        (0, 4, [0, 1, 2, 3], 1, ["n", "name"]),
        (1, 4, [4, 5, 6, 7], 1, ["n", "name"]),
        (2, 1, [8], 1, ["n", "name"]),
    ]
    assert len(list((tmp_path / "calls").iterdir())) == 9
    assert job.metrics.rows_out == 18


def test_the_flow_runs_even_if_its_sink_reads_nothing(spark: Any, tmp_path: Path) -> None:
    job = run_spark(flow_to(lambda df, epoch: None), spark, checkpoint=str(tmp_path / "c"))
    assert job.metrics.rows_in == 9


def test_the_console_sink_shows_the_first_rows_of_each_epoch(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = MemorySink()
    run_spark(flow_to(ConsoleSink(2), memory), spark, checkpoint=str(tmp_path / "c"))
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if "epoch" in line] == [f"── epoch {n} ──" for n in range(3)]
    assert shown.count("… more than 2 rows") == 2
    assert "naïve 0" in shown
    assert [table.num_rows for table in memory.tables.values()] == [4, 4, 1]
