"""A job from a table of Delta Lake to one of Delta Lake and one of Iceberg, which is killed.

``python -m tests.spark.lake_job FOLDER MASTER``.

It numbers the rows of each key and is changed again and again; version v of two operators puts v on rows. Started again
in the same folder it goes on; it ends when all rows are committed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from midstream import DeltaSink, DeltaSource, FileSink, Flow, State, Update
from midstream.checkpoint.change_records import Outcome
from midstream.operators.stream import Stream
from midstream.runtime.spark.job import Job
from tests.chaos.job import session
from tests.lakes import Warehouse

Row = dict[str, Any]
TOTAL = 6_000
KEYS = 7
ICEBERG, NEWEST = "sales.counted", "sales.newest"
PER_FILE = 150
"""Rows of a version of the table that it reads."""


class Mark:
    """Puts its version on the row."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, row: Row) -> Row:
        """Mark a row."""
        return {"k": row["k"], "n": row["n"], "a": self.version}


class Count:
    """Numbers the rows of a key."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, key: int, row: Row, state: State) -> Row:
        """Count a row."""
        state.set(state.get(0) + 1)
        return {**row, "b": self.version, "nth": state.get()}


def counted_rows(flow: Flow, source: Any) -> Stream:
    """Rows of a source, each with its number among those of its key, by the first version of the functions."""
    marked = flow.source("in", source).map("mark", Mark(1), returns="k bigint, n bigint, a int")
    return marked.key_by("by k", "k").process(
        "count", Count(1), returns="k bigint, n bigint, a int, b int, nth bigint", one_to_one=True
    )


def build(folder: Path) -> Flow:
    """From table to tables."""
    flow = Flow("lake")
    counted = counted_rows(flow, DeltaSource(folder / "in", starting_version=1, max_files_per_epoch=2))
    counted.sink("lake", DeltaSink(folder / "lake"))
    counted.sink("newest", DeltaSink(folder / "newest", mode="upsert", key="k"))
    counted.sink("files", FileSink(folder / "files"))
    with Warehouse.make(folder / "iceberg") as house:
        house.catalog.create_namespace_if_not_exists("sales")
        counted.sink("iceberg", house.sink(ICEBERG))
        counted.sink("newest in iceberg", house.sink(NEWEST, mode="upsert", key="k"))
    return flow


def change_until_all_is_committed(job: Job) -> None:
    """Replace both functions again and again, each time with the next version."""
    while not job.await_termination(0.1):  # raises if it has failed
        version = 2 + sum(each.outcome is Outcome.APPLIED for each in job.history())
        change = job.update(Update("mark", Mark(version)), Update("count", Count(version)))
        while change.outcome is Outcome.PENDING and not job.await_termination(0.1):
            pass


def main(place: str, master: str) -> None:
    """Run and change the job until all rows are committed."""
    folder, spark = Path(place), session(master)
    job = build(folder).start(spark, checkpoint=str(folder / "checkpoint"), trigger="available-now")
    change_until_all_is_committed(job)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
