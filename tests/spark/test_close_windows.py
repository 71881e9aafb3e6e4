"""A run that ends by itself closes its last windows on Spark, in an additional epoch after Spark's last one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from midstream import FileSink, Flow, ListSource, agg, tumbling
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.errors import CheckpointError, FlowError, JobFailed
from midstream.runtime.spark.job import JobStatus
from tests.spark.conftest import PATIENCE_S

START = datetime(2026, 1, 1, tzinfo=UTC)


def flow_of(epochs: int, folder: Path) -> Flow:
    """Two rows an epoch, ten seconds apart, over several sources and stages."""
    flow = Flow("finite")
    rows = [[{"k": k, "t": START + timedelta(seconds=10 * epoch)} for k in ("a", "b")] for epoch in range(epochs)]
    left = flow.source("left", ListSource(rows, "k string, t timestamp", event_time="t"))
    right = flow.source("right", ListSource(rows, "k string, t timestamp", event_time="t"))
    counts = left.union("both", right).key_by("by_k", "k")
    counts.aggregate("count", window=tumbling("10 seconds"), n=agg.count()).sink("out", FileSink(str(folder), "json"))
    return flow


def written(spark: SparkSession, folder: Path) -> list[tuple[int, int]]:
    """Epoch and count of each window."""
    return sorted((row["epoch"], row["n"]) for row in spark.read.json(str(folder)).collect())


@pytest.mark.slow
def test_a_finite_run_closes_its_windows_and_its_checkpoint(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    with pytest.raises(FlowError, match="close_windows=True is for a run that ends by itself, with trigger='available"):
        flow_of(2, out).start(spark, checkpoint=str(checkpoint), close_windows=True)
    commit = Checkpoint.commit

    def dies(self: Checkpoint, manifest: Manifest) -> None:
        if manifest.closing:
            raise OSError("no power")
        commit(self, manifest)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "commit", dies)
        job = flow_of(2, out).start(
            spark, checkpoint=str(checkpoint), trigger="available-now", partitions=1, close_windows=True
        )
        with pytest.raises(JobFailed, match="no power"):
            job.await_termination(PATIENCE_S)
    assert written(spark, out) == [(1, 2), (1, 2)], "what was not committed is not visible"

    # New rows get the number of the epoch that was not committed.
    job = flow_of(4, out).start(
        spark, checkpoint=str(checkpoint), trigger="available-now", partitions=1, close_windows=True
    )
    assert job.await_termination(PATIENCE_S)
    assert job.status is JobStatus.FINISHED
    assert [progress.epoch for progress in job.progress] == [2, 3, 4]
    assert written(spark, out) == [(epoch, 2) for epoch in (1, 2, 3, 4) for _ in "ab"]

    with pytest.raises(CheckpointError, match=r"closed by its last run \(close_windows=True, epoch 4\)"):
        flow_of(5, out).start(spark, checkpoint=str(checkpoint), trigger="available-now")
