"""Tables of Iceberg on Spark: as sink and as the table of a lookup. Under kills: with those of Delta Lake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, ListSource
from midstream.metrics import JobMetrics
from tests.lakes import Warehouse

pytest.importorskip("pyiceberg", reason="PyIceberg is not installed: pip install 'midstream[iceberg]'")
pytest.importorskip("sqlalchemy", reason="PyIceberg's catalog in a database: pip install 'pyiceberg[sql-sqlite]'")


def test_both_runtimes_write_the_same_table_of_iceberg(run: Callable[..., JobMetrics], tmp_path: Path) -> None:
    """Its rates come from a table of Iceberg, too."""
    epochs: list[list[dict[str, Any]]] = [
        [{"n": 10 * e + i, "k": i % 2, "name": None if i else "naïve"} for i in range(5)] for e in range(3)
    ]
    with Warehouse.make(tmp_path / "iceberg") as house:
        house.catalog.create_namespace("sales")
        rates = pa.table({"k": pa.array([0, 1], pa.int64()), "rate": [0.5, 1.5]})
        house.catalog.create_table("sales.rates", rates.schema).append(rates)
        flow = Flow("lake")
        rows = flow.source("in", ListSource(epochs, "n bigint, k bigint, name string", partitions=2))
        priced = rows.lookup(
            "rates",
            lambda: house.table("sales.rates").scan().to_arrow(),
            on="k",
            refresh="1 hour",
            version=lambda: house.table("sales.rates").current_snapshot().snapshot_id,
        )
        priced.sink("lake", house.sink("sales.lake"))
        run(flow)
        wanted = [{**row, "rate": row["k"] + 0.5, "epoch": epoch} for epoch, rows in enumerate(epochs) for row in rows]
        found = house.table("sales.lake").scan().to_arrow().to_pylist()
    assert sorted(found, key=lambda row: row["n"]) == wanted
