"""A lookup's table is read again while a job runs on Spark: rows meet it, the history has it, and nothing grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import FileSink, Flow, GeneratorSource
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.retention import KEPT_REVISIONS
from tests.spark.conftest import PATIENCE_S

REFRESHES = KEPT_REVISIONS + 6


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE_S)
def test_tables_are_refreshed_in_consistent_changes_and_old_ones_are_swept(spark: Any, tmp_path: Path) -> None:
    """Two lookups by one function: the numbers that they add come from one table each, and never go back."""
    version = tmp_path / "version"
    version.write_text("0")
    filler = ["x" * 1_000] * 1_000

    def read() -> pa.Table:
        number = int(version.read_text())
        keys = list(range(1_000))
        return pa.table({"k": keys, "version": [number] * 1_000, "filler": [f"{number} {each}" for each in filler]})

    flow = Flow("refreshed")
    source = GeneratorSource(lambda index, rng: {"k": index % 1_000}, "k bigint", rate=2_000)
    rows = flow.source("in", source).lookup("table", read, on="k", refresh="100 ms", version=version.read_text)
    rows.select("narrow", "k", "version").sink("out", FileSink(tmp_path / "out"))
    with flow.start(spark, checkpoint=str(tmp_path / "c"), trigger="200 ms") as job:
        assert job.await_epoch(1, PATIENCE_S)
        for number in range(1, REFRESHES + 1):
            version.write_text(str(number))
            for seen in job.watch():
                applied = [each for each in job.history() if each.outcome is Outcome.APPLIED]
                if len(applied) >= number:
                    break
                assert seen.epoch < 1_000, job.history()
        assert job.await_epoch(job.metrics.epochs + 3, PATIENCE_S)
    records = job.history()
    assert [(each.by, str(each.outcome), each.operators) for each in records] == [
        ("refresh", "applied", ("table",))
    ] * REFRESHES
    blobs = [file.stat().st_size for file in (tmp_path / "c" / "blobs").rglob("*") if file.is_file()]
    assert sum(size > 500_000 for size in blobs) <= KEPT_REVISIONS + 2, "older tables are gone"
    written = spark.read.parquet(str(tmp_path / "out")).select("epoch", "version").distinct().collect()
    by_epoch = sorted((row.epoch, row.version) for row in written)
    assert [number for _, number in by_epoch] == sorted(number for _, number in by_epoch)
    assert {number for _, number in by_epoch} == set(range(REFRESHES + 1))
