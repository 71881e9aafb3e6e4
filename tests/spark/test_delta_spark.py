"""Tables of Delta Lake on Spark: as source and sink, also under kills, and as the table of a lookup."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from midstream import DeltaSink, DeltaSource, Flow, GeneratorSource, ListSource, MemorySink
from midstream.checkpoint.change_records import Outcome
from midstream.errors import JobFailed
from midstream.metrics import JobMetrics
from midstream.testing import run_spark
from tests.chaos.processes import live_through_kills
from tests.lakes import Warehouse
from tests.spark.conftest import PATIENCE_S
from tests.spark.lake_job import ICEBERG, KEYS, NEWEST, PER_FILE, TOTAL

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'midstream[delta]'")

Row = dict[str, Any]


def rows_of(path: Path) -> list[Row]:
    found: list[Row] = deltalake.DeltaTable(path).to_pyarrow_table().to_pylist()
    return found


def test_both_runtimes_write_the_same_table(run: Callable[..., JobMetrics], tmp_path: Path) -> None:
    epochs = [[{"n": 10 * e + i, "a.b": None, "name": None if i else "naïve"} for i in range(5)] for e in range(3)]
    flow = Flow("lake")
    source = ListSource(epochs, "n bigint, `a.b` string, name string", partitions=2)
    flow.source("in", source).sink("lake", DeltaSink(tmp_path / "lake", partition_by="name"))
    run(flow)
    wanted = [{**row, "epoch": epoch} for epoch, rows in enumerate(epochs) for row in rows]
    assert sorted(rows_of(tmp_path / "lake"), key=lambda row: row["n"]) == wanted


def test_both_runtimes_upsert_the_last_row_of_each_key(run: Callable[..., JobMetrics], tmp_path: Path) -> None:
    """Behind a key_by of the key, as rows of different tasks have no order."""
    epochs = [[{"k": (e + i) % 4, "n": 10 * e + i} for i in range(6)] for e in range(3)]
    flow = Flow("lake")
    keyed = flow.source("in", ListSource(epochs, "k bigint, n bigint")).key_by("by k", "k")
    keyed.process("pass", lambda key, row, state: row).sink(
        "lake", DeltaSink(tmp_path / "lake", mode="upsert", key="k")
    )
    run(flow)
    wanted = {row["k"]: {**row, "epoch": epoch} for epoch, rows in enumerate(epochs) for row in rows}
    assert sorted(rows_of(tmp_path / "lake"), key=lambda row: row["k"]) == [wanted[k] for k in range(4)]


def add(path: Path, *numbers: int) -> None:
    deltalake.write_deltalake(path, pa.table({"n": pa.array(numbers, pa.int64())}), mode="append")


def test_a_table_is_read_once_also_across_restarts_and_while_it_grows(spark: Any, tmp_path: Path) -> None:
    table, out = tmp_path / "in", MemorySink()
    for n in range(5):
        add(table, n, 10 * n + 100)
    flow = Flow("versions")
    flow.source("lake", DeltaSource(table, max_files_per_epoch=2)).sink("out", out)
    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))
    assert [rows.num_rows for _, rows in sorted(out.tables.items())] == [4, 4, 2]
    add(table, 5)
    assert deltalake.DeltaTable(table).optimize.compact()["numFilesRemoved"] == 6
    with flow.start(spark, checkpoint=str(tmp_path / "c"), trigger="100 ms") as job:
        for n in (6, 7):
            add(table, n)
            for seen in job.watch():
                if any(row["n"] == n for row in out.rows):
                    break
                assert seen.epoch < 1_000
    wanted = [*range(8), *range(100, 150, 10)]
    assert sorted(row["n"] for row in out.rows) == wanted
    deltalake.DeltaTable(table).delete("n = 1")
    with pytest.raises(JobFailed, match="removes or replaces rows"):
        run_spark(flow, spark, checkpoint=str(tmp_path / "c"))
    add(table, 8)
    flow = Flow("versions")
    flow.source("lake", DeltaSource(table, changes="skip")).sink("out", out)
    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))
    assert sorted(row["n"] for row in out.rows) == sorted([*wanted, 8])


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_lookup_follows_the_versions_of_a_table(spark: Any, tmp_path: Path) -> None:
    """Each version becomes one change, a row meets the old one or the new one, and the table is read once a version."""
    place, out = tmp_path / "rates", tmp_path / "out"
    reads = []

    def put(rate: int) -> None:
        deltalake.write_deltalake(place, pa.table({"k": range(10), "rate": [rate] * 10}), mode="overwrite")

    def read() -> pa.Table:
        table = deltalake.DeltaTable(place)
        reads.append(table.version())
        return table.to_pyarrow_table()

    put(0)
    flow = Flow("refreshed")
    source = GeneratorSource(lambda indexes, rng: {"k": indexes % 10}, "k bigint", rate=200)
    rows = flow.source("in", source).lookup(
        "rates", read, on="k", refresh="100 ms", version=lambda: deltalake.DeltaTable(place).version()
    )
    rows.sink("out", DeltaSink(out))
    with flow.start(spark, checkpoint=str(tmp_path / "c"), trigger="200 ms") as job:
        assert job.await_epoch(1, PATIENCE_S)
        for rate in (1, 2):
            put(rate)
            for seen in job.watch():
                if sum(each.outcome is Outcome.APPLIED for each in job.history()) >= rate:
                    break
                assert seen.epoch < 1_000, job.history()
        assert job.await_epoch(job.metrics.epochs + 3, PATIENCE_S)
    assert [(each.by, each.operators) for each in job.history()] == [("refresh", ("rates",))] * 2
    by_epoch = sorted({(row["epoch"], row["rate"]) for row in rows_of(out)})
    both = [epoch for epoch, count in Counter(epoch for epoch, _ in by_epoch).items() if count > 1]
    assert len(by_epoch) == len({epoch for epoch, _ in by_epoch}) + len(both), "two versions in an epoch, not more"
    assert len(both) <= 2, "and only in one where a change took effect"
    assert [rate for _, rate in by_epoch] == sorted(rate for _, rate in by_epoch)
    assert {rate for _, rate in by_epoch} == {0, 1, 2}
    # When the flow is built, for the first comparison, and then once for each version.
    assert reads == [0, 0, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("seed", [1])
def test_changes_and_kills_leave_each_row_once(seed: int, tmp_path: Path) -> None:
    """Workers and drivers die while a job from table to table is changed. The oracle counts the rows of each key."""
    pytest.importorskip("sqlalchemy", reason="it also writes Iceberg: pip install 'pyiceberg[sql-sqlite]'")
    folder = tmp_path.resolve()
    deltalake.DeltaTable.create(folder / "in", pa.schema([("k", pa.int64()), ("n", pa.int64())]))
    for first in range(0, TOTAL, PER_FILE):
        numbers = range(first, first + PER_FILE)
        rows = pa.table({"k": [n % KEYS for n in numbers], "n": list(numbers)})
        deltalake.write_deltalake(folder / "in", rows, mode="append")
    live_through_kills(folder, "tests.spark.lake_job", random.Random(seed))

    rows = rows_of(folder / "lake")
    assert sorted(row["n"] for row in rows) == list(range(TOTAL))
    names = ["k", "n", "a", "b", "nth", "epoch"]
    filed = [row for part in (folder / "files").glob("[!._]*") for row in pq.ParquetFile(part).read().to_pylist()]
    mine = {row["n"]: {name: row[name] for name in names} for row in rows}
    with Warehouse.make(folder / "iceberg") as house:
        iced = house.table(ICEBERG).scan().to_arrow().to_pylist()
        newest_in_iceberg = house.table(NEWEST).scan().to_arrow().to_pylist()
    for others in (filed, iced):
        assert len(others) == len(rows)
        assert {row["n"]: {name: row[name] for name in names} for row in others} == mine, "sinks have the same rows"
    assert all(row["a"] == row["b"] for row in rows), "no row met a half of a change"
    assert len({row["a"] for row in rows}) > 2, "there were changes"
    last = {row["k"]: {name: row[name] for name in names} for row in sorted(rows, key=lambda row: row["nth"])}
    for newest in (rows_of(folder / "newest"), newest_in_iceberg):
        assert len(newest) == KEYS
        assert {row["k"]: {name: row[name] for name in names} for row in newest} == last, "the last row of each key"
    for key in range(KEYS):
        nth = sorted(row["nth"] for row in rows if row["k"] == key)
        assert nth == list(range(1, len(nth) + 1)), "each row of a key was counted once"
