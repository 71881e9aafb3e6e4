"""Knobs of a job on Spark: its pace and its rows per epoch follow while its query runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from midstream import Flow, GeneratorSource, MemorySink, Tune
from midstream.checkpoint.change_records import Outcome
from midstream.cli.app import app
from midstream.errors import FlowError
from tests.spark.test_changes import WAIT_S


def flow_of(out: MemorySink) -> Flow:
    source = GeneratorSource(lambda index, rng: {"n": index}, "n bigint", rate=1e9, max_rows_per_epoch=10, limit=10**6)
    flow = Flow("tuned")
    flow.source("in", source).key_by("by n", "n").distinct("once").sink("out", out)
    return flow


def test_pace_and_rows_per_epoch_follow_and_a_restart_keeps_them(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    cli = CliRunner()
    out, folder = MemorySink(), str(tmp_path / "job")
    with flow_of(out).start(spark, checkpoint=folder, serve=True, knobs={"pace": "1 hour"}) as job:
        assert job.await_epoch(1, WAIT_S)
        assert not job.await_epoch(2, 1.0), "an hour has not passed"
        change = job.update(Tune(pace=0, rows_per_epoch=25, frame="8 KiB"))
        assert change.wait(WAIT_S) is Outcome.APPLIED
        assert job.await_epoch(5, WAIT_S)
        assert job.knobs["rows_per_epoch"] == 25
        assert job.knobs["slice"] == 5000
        told = cli.invoke(app, ["tune", "tuned", "pace=1 hour"])
        assert (told.exit_code, "applied" in told.output) == (0, True), told.output
        assert "3600 s" in cli.invoke(app, ["tune", "tuned"]).output
        refused = cli.invoke(app, ["tune", "tuned", "pace=2 hours"])
        assert (refused.exit_code, "out of range" in refused.output) == (1, True)
    rows = [table.num_rows for table in out.tables.values()]
    assert (rows[0], set(rows[2:])) == (10, {25}), rows
    assert sorted(row["n"] for row in out.rows) == list(range(sum(rows)))
    with flow_of(out).start(spark, checkpoint=folder) as job:
        assert job.knobs["pace"] == 3_600_000_000
        assert job.await_epoch(1, WAIT_S)
    assert [*out.tables.values()][-1].num_rows == 25
    assert [each.outcome for each in job.history()] == [Outcome.APPLIED, Outcome.APPLIED]


def test_knobs_that_spark_has_fixed_are_refused(spark: Any, tmp_path: Path) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load().selectExpr("value AS n")
    flow = Flow("fixed")
    flow.source("rate", rows).sink("out", MemorySink())
    with pytest.raises(FlowError, match=r"'rate' is none: .*maxOffsetsPerTrigger"):
        flow.start(spark, checkpoint=str(tmp_path / "job"), knobs={"rows_per_epoch": 10})
    with pytest.raises(FlowError, match="pace=100 ms is less than the trigger of 200 ms"):
        flow.start(spark, checkpoint=str(tmp_path / "job"), trigger="200 ms", knobs={"pace": "100 ms"})
    assert not (tmp_path / "job").exists()
    with flow.start(spark, checkpoint=str(tmp_path / "job"), trigger="200 ms") as job:
        for edit, says in (
            (Tune(rows_per_epoch=10), "Spark fixes the limits of its sources"),
            (Tune(pace="100 ms"), "pace=100 ms is less than the trigger"),
        ):
            for attempt in (job.explain, job.update):
                with pytest.raises(FlowError, match=says):
                    attempt(edit)
    assert [each.outcome for each in job.history()] == list(itertools.repeat(Outcome.REFUSED, 2))
