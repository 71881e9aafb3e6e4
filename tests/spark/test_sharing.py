"""Two jobs of one Spark session share a budget of rows per epoch; one fails, and the other has it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, GeneratorSource, NoopSink, Share, Sharing
from midstream.errors import FlowError, JobFailed
from midstream.runtime.spark.job import Job, JobStatus

TOTAL, LEAST = 1_000, 300


def rows(index: Any, rng: Any) -> dict[str, Any]:
    return {"k": index % 50}


def started(spark: Any, folder: Path, name: str, rate: float) -> Job:
    """A job that fails once there is a file of its name."""
    failure = str(folder / name)

    def passed(row: dict[str, Any]) -> dict[str, Any]:
        import os

        if os.path.exists(failure):
            raise ValueError("told to fail")
        return row

    flow = Flow(name)
    flow.source("in", GeneratorSource(rows, "k bigint", rate=rate, partitions=1)).map("pass", passed).sink(
        "out", NoopSink()
    )
    return flow.start(spark, checkpoint=str(folder / f"{name}-job"), knobs={"rows_per_epoch": TOTAL // 2})


def limit(job: Job) -> int:
    return job.knobs["rows_per_epoch"] or 0


def test_what_one_job_does_not_need_the_other_gets_until_one_fails(spark: Any, tmp_path: Path) -> None:
    # In epochs of ten seconds, calm would take 200 rows; busy takes all that it may in any.
    with started(spark, tmp_path, "busy", 20_000) as busy, started(spark, tmp_path, "calm", 20) as calm:
        sharing = Sharing(Share(rows_per_epoch=TOTAL, least=LEAST), [busy, calm])
        sharing.attach()
        with busy.watch() as watch:
            for seen in watch:
                assert limit(calm) + limit(busy) <= TOTAL
                assert seen.rows_in <= limit(busy)
                if limit(busy) == TOTAL - LEAST and not busy.changes:
                    break
        assert limit(calm) == LEAST
        [change] = busy.history()
        assert change.by == "controller Share"
        assert "it is short, and so much is free" in (change.note or "")
        (tmp_path / "calm").touch()
        with pytest.raises(JobFailed, match="told to fail"):
            calm.await_termination()
        assert sharing.shares == {"busy": limit(busy)}
        with busy.watch() as watch:
            for _ in watch:
                if limit(busy) == TOTAL:
                    break
        assert (busy.status, busy.controllers[0].stopped) == (JobStatus.RUNNING, None)
        with pytest.raises(FlowError, match="job 'calm' has ended, so it cannot share"):
            Sharing(Share(rows_per_epoch=TOTAL), [busy, calm])
    assert sharing.shares == {}
