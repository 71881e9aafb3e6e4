"""A job that writes to PostgreSQL, which is killed: ``python -m tests.spark.database_job FOLDER MASTER``.

It adds rows to one table, and keeps the newest row of each key in another. The file ``port`` of the folder says where
the server is. Started again in the same folder it goes on; it ends when all rows are committed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from midstream import Flow, GeneratorSource
from tests.chaos.job import session
from tests.databases import Postgres
from tests.spark.lake_job import KEYS, PER_FILE, TOTAL, change_until_all_is_committed, counted_rows

COLUMNS = "k bigint, n bigint, a int, b int, nth bigint, epoch bigint"


def make(indexes: Any, rng: Any) -> dict[str, Any]:
    """The rows of some indexes."""
    return {"k": indexes % KEYS, "n": indexes}


def build(database: Postgres) -> Flow:
    """From a generator to two tables."""
    flow = Flow("tables")
    source = GeneratorSource(make, "k bigint, n bigint", rate=1e9, limit=TOTAL, max_rows_per_epoch=2 * PER_FILE)
    counted = counted_rows(flow, source)
    counted.sink("rows", database.sink("rows"))
    counted.sink("newest", database.sink("newest", mode="upsert", key="k"))
    return flow


def main(place: str, master: str) -> None:
    """Run and change the job until all rows are committed."""
    folder, spark = Path(place), session(master)
    database = Postgres(int((folder / "port").read_text()), "postgres")
    job = build(database).start(spark, checkpoint=str(folder / "checkpoint"), trigger="available-now")
    change_until_all_is_committed(job)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
