"""Tables of PostgreSQL while workers and drivers of a job on Spark are killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.processes import live_through_kills
from tests.databases import Postgres
from tests.spark.conftest import PATIENCE_S
from tests.spark.database_job import COLUMNS
from tests.spark.lake_job import KEYS, TOTAL

Row = dict[str, Any]


def rows_of(postgres: Postgres, table: str) -> list[Row]:
    names = [column.split()[0] for column in COLUMNS.split(", ")]
    return [dict(zip(names, row, strict=True)) for row in postgres.run(f"SELECT {', '.join(names)} FROM {table}")]


@pytest.mark.slow
@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("seed", [1])
def test_changes_and_kills_leave_each_row_of_a_database_once(postgres: Postgres, seed: int, tmp_path: Path) -> None:
    """One sink adds rows, the other one keeps the newest of each key. The oracle counts the rows of each key."""
    folder = tmp_path.resolve()
    (folder / "port").write_text(str(postgres.port))
    postgres.run(f"CREATE TABLE rows ({COLUMNS})", f"CREATE TABLE newest ({COLUMNS}, PRIMARY KEY (k))")
    live_through_kills(folder, "tests.spark.database_job", random.Random(seed))

    rows = rows_of(postgres, "rows")
    assert sorted(row["n"] for row in rows) == list(range(TOTAL))
    assert all(row["a"] == row["b"] for row in rows), "no row met a half of a change"
    assert len({row["a"] for row in rows}) > 2, "there were changes"
    by_key = {key: sorted((row for row in rows if row["k"] == key), key=lambda row: row["nth"]) for key in range(KEYS)}
    for mine in by_key.values():
        assert [row["nth"] for row in mine] == list(range(1, len(mine) + 1)), "each row of a key was counted once"
    newest = {row["k"]: row for row in rows_of(postgres, "newest")}
    assert newest == {key: mine[-1] for key, mine in by_key.items()}
