"""Every NEXMark query gives what DuckDB gives on the same events; ``tests/spark/test_nexmark_spark.py`` has Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from benchmarks.workloads import nexmark
from benchmarks.workloads.nexmark.second_opinion import SQL, answer
from midstream import FileSink, GeneratorSource, ListSource, MemorySink
from midstream.data.schema import to_ddl
from midstream.testing import Faults, run_local
from tests.oracle import multiset

Row = dict[str, Any]
STREAMS = nexmark.SMALL.streams(100, limit=3000)
ROUGH = Faults(crash=0.02, speculate=0.05, repeat=0.05, give_up=0.005)


def table_of(source: GeneratorSource) -> pa.Table:
    assert source.total is not None
    return pa.Table.from_batches(list(source.rows(0, source.total, start_us=0)))


TABLES = [table_of(stream) for stream in STREAMS]


def recorded(epochs: int) -> nexmark.Streams:
    """The streams, each cut into epochs of its own."""
    parts = []
    for table, more in zip(TABLES, (0, 1, 2), strict=True):
        size = -(-table.num_rows // (epochs + more))
        rows = table.to_pylist()
        parts.append(ListSource.of(rows, schema=to_ddl(table.schema), epoch_rows=size, event_time="event_time"))
    return nexmark.Streams(*parts)


def plain(rows: list[Row], query: str) -> Any:
    """Rows as a bag; of updates, the last ones."""
    columns = nexmark.UPDATES.get(query, ())
    return multiset(nexmark.latest(rows, *columns) if columns else rows)


def test_every_query_has_a_second_opinion() -> None:
    assert set(SQL) == set(nexmark.QUERIES)


@pytest.mark.long
@pytest.mark.parametrize("query", SQL)
def test_a_query_gives_what_duckdb_gives(query: str) -> None:
    out = MemorySink()
    run_local(nexmark.flow(query, recorded(5), out), seed=3, faults=ROUGH)
    expected = answer(query, *TABLES)
    assert expected, "the events say something about it"
    assert plain(out.rows, query) == plain(expected, query)


def test_q10_parts_its_files_by_day_and_minute(tmp_path: Path) -> None:
    columns = nexmark.PARTED_BY["q10"]
    run_local(nexmark.flow("q10", recorded(2), FileSink(tmp_path / "bids", partition_by=columns)), seed=3)
    parts = ds.partitioning(pa.schema([(name, pa.string()) for name in columns]), flavor="hive")
    files = ds.dataset(tmp_path / "bids", partitioning=parts, exclude_invalid_files=True)
    assert plain(files.to_table().drop_columns(["epoch"]).to_pylist(), "q10") == plain(answer("q10", *TABLES), "q10")
