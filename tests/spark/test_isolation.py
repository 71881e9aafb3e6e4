"""A job leaves the session unchanged, and closes what functions opened in workers."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from midstream import Flow, ListSource, MemorySink
from midstream.testing import run_spark

Row = dict[str, Any]
EPOCHS = [[{"n": 10 * epoch + n} for n in range(10)] for epoch in range(3)]


def keyed_flow(function: Any, out: Any) -> Flow:
    flow = Flow("guest")
    source = flow.source("source", ListSource(EPOCHS, "n bigint", partitions=2))
    source.map("before", function).key_by("by_n", "n").map("after", function).sink("out", out)
    return flow


def settings(spark: Any) -> dict[str, str]:
    return {row.key: row.value for row in spark.sql("SET").collect()}


def test_the_session_is_unchanged_and_still_works(spark: Any, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    mine = spark.range(5).persist()
    mine.createOrReplaceTempView("mine")
    assert mine.count() == 5
    tables, before = spark.catalog.listTables(), settings(spark)

    flow, out, framed = Flow("guest"), MemorySink(), MemorySink()
    source = flow.source("source", ListSource(EPOCHS, "n bigint", partitions=2))
    source.sink("framed", framed)
    source.transform("joined", lambda df: df.join(mine, df.n == mine.id).select("n")).sink("out", out)
    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))

    assert sorted(row["n"] for row in out.rows) == list(range(5))
    assert settings(spark) == before
    assert spark.catalog.listTables() == tables
    assert mine.is_cached
    assert spark.sql("SELECT sum(id) AS total FROM mine").first().total == 10
    spark.catalog.dropTempView("mine")
    mine.unpersist(blocking=True)


class Resource:
    """Writes a line to a file of its process whenever something happens to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened = False

    def note(self, event: str) -> None:
        with open(self.folder / str(os.getpid()), "a") as log:
            log.write(f"{event}\n")

    def open(self) -> None:
        self.opened = True
        self.note("open")

    def __call__(self, row: Row) -> Row:
        self.note("call" if self.opened else "call before open")
        return row

    def close(self) -> None:
        self.note("close")


def logs(folder: Path) -> list[list[str]]:
    return [file.read_text().split("\n")[:-1] for file in folder.iterdir()]


def test_functions_are_opened_once_in_each_worker_and_closed_when_the_job_ends(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    out = MemorySink()

    run_spark(keyed_flow(Resource(folder), out), spark, checkpoint=str(tmp_path / "c"))

    assert sorted(row["n"] for row in out.rows) == list(range(30))
    found = logs(folder)
    assert str(os.getpid()) not in {file.name for file in folder.iterdir()}
    # The two operators hold equal functions, which are one blob, so a worker opens one object for both.
    assert [Counter(log)["open"] for log in found] == [1] * len(found)
    assert [(log[0], log[-1], Counter(log)["close"]) for log in found] == [("open", "close", 1)] * len(found)
    assert sum(Counter(log)["call"] for log in found) == 60
