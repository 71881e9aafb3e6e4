"""NEXMark's queries on Spark give what DuckDB gives on the same events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.workloads import nexmark
from benchmarks.workloads.nexmark.second_opinion import SQL, answer
from midstream import MemorySink
from midstream.testing import run_spark
from tests.simulation.test_nexmark import TABLES, plain, recorded

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.parametrize("query", SQL)
def test_a_query_gives_what_duckdb_gives(query: str, spark: Any, tmp_path: Path) -> None:
    out = MemorySink()
    run_spark(nexmark.flow(query, recorded(3), out), spark, checkpoint=str(tmp_path / "checkpoint"))
    assert plain(out.rows, query) == plain(answer(query, *TABLES), query)
