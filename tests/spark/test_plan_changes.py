"""Changes of a running job's plan on Spark: inserted within an epoch and from the next one, removed, deployed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, Insert, MemorySink, Remove, State, Update
from midstream.audit import decide
from midstream.checkpoint.audit_files import read_history
from midstream.checkpoint.change_records import Outcome
from midstream.cli.app import app
from midstream.errors import FlowError
from midstream.runtime.spark.job import Job
from tests.spark.test_changes import ROWS, WAIT_S, Row, committed, numbers


def passing(row: Row) -> Row:
    return row


class Waiting:
    """A map that waits at the gate on one row, and is slow, so that slices are short."""

    def __init__(self, gate: Any, at: int) -> None:
        self.pass_through, self.at = gate.pass_through, at

    def __call__(self, row: Row) -> Row:
        time.sleep(0.0005)
        if row["n"] == self.at:
            self.pass_through()
        return row


def every_5th(row: Row) -> bool:
    return bool(row["n"] % 5 == 0)


def count_up(key: int, row: Row, state: State) -> Row:
    state.set(state.get(0) + 1)
    return {**row, "k": state.get()}


FILTER = Insert(lambda rows: rows.filter("every 5th", every_5th), between=("numbers", "m"))
COUNT = Insert(lambda rows: rows.key_by("by k", "k").process("count", count_up, one_to_one=True), after="m")


def flow_of(spark: Any, sink: Any, function: Any = passing, **parts: bool) -> Flow:
    flow = Flow("plans")
    stream = flow.source("numbers", numbers(spark))
    if parts.get("filtered"):
        stream = stream.filter("every 5th", every_5th)
    stream = stream.map("m", function)
    if parts.get("counted"):
        stream = stream.key_by("by k", "k").process("count", count_up, one_to_one=True)
    stream.sink("out", sink)
    return flow


@pytest.mark.slow
def test_the_example_of_a_deployment_leaves_nothing_to_deploy(spark: Any, capsys: Any) -> None:
    from examples.deploying import main

    totals = main(spark)
    assert len(totals) == 20
    assert all(0 < row["fee"] < row["cents"] for row in totals)
    assert "adds where 'sold'" in (told := capsys.readouterr().out)
    assert "left to deploy: None" in told


def epochs_of(out: MemorySink) -> dict[int, list[int]]:
    return {epoch: sorted(row["n"] for row in table.to_pylist()) for epoch, table in out.tables.items()}


def test_a_filter_comes_within_an_epoch_a_counter_from_the_next_and_both_go_again(
    spark: Any, tmp_path: Path, gate: Any
):
    out, audit = MemorySink(), str(tmp_path / "checkpoint")
    flow = flow_of(spark, out, Waiting(gate, ROWS + 30))
    with flow.start(spark, checkpoint=audit, audit="n") as job:
        gate.arrive()
        change = job.update(FILTER)
        assert change.plan.heads == {"numbers"}
        gate.open()
        assert change.require(WAIT_S).record.met is not None
        assert "met" in str(change.record.met) or "within an epoch" in str(change.record.met)
        explained = job.explain(COUNT)
        assert "added" in str(explained)
        assert "next epoch" in str(explained)
        assert "by k" in explained.to_svg()
        counted = job.update(COUNT).require(WAIT_S)
        job.await_epoch(job.metrics.epochs + 2, WAIT_S)
        gone = job.update(Remove("count"), Remove("by k"), Remove("every 5th")).require(WAIT_S)
        job.await_epoch(job.metrics.epochs + 2, WAIT_S)
        epochs = stop_after(job, 1)
    rows = {epoch: found for epoch, found in epochs_of(out).items() if epoch < epochs}
    first, last = change.record.epoch, gone.record.epoch
    assert first is not None
    assert last is not None
    assert counted.record.epoch is not None
    for epoch, found in rows.items():
        everything = list(range(epoch * ROWS, (epoch + 1) * ROWS))
        fifths = [n for n in everything if n % 5 == 0]
        if epoch < first or epoch > last:
            assert found == everything, epoch
        elif first < epoch < last:
            assert found == fifths, epoch
        assert set(fifths) <= set(found), f"epoch {epoch} lacks rows"
    numbered: dict[int, list[int]] = {}
    for row in committed([row for epoch in sorted(rows) for row in out.tables[epoch].to_pylist()], epochs):
        if counted.record.epoch <= row["n"] // ROWS < last:
            numbered.setdefault(row["n"] % 7, []).append(row["k"])
    assert numbered
    for counts in numbered.values():
        assert sorted(counts) == list(range(1, len(counts) + 1)), "a gap"
    history = read_history(job._heartbeat._driver._audit.location)  # type: ignore[union-attr]
    changes = {record.revision: record.decided_at for record in job.history()}
    verdict = decide(history, changes)
    assert verdict.serialisable, str(verdict)


def stop_after(job: Job, more: int) -> int:
    """Stop after some more epochs; the number of committed ones."""
    job.await_epoch(job.metrics.epochs + more, WAIT_S)
    job.stop()
    return job.metrics.epochs


def test_a_script_is_deployed_and_deploying_it_again_changes_nothing(spark: Any, tmp_path: Path):
    out = MemorySink()
    with flow_of(spark, out).start(spark, checkpoint=str(tmp_path)) as job:
        assert job.await_epoch(1, WAIT_S)
        script = flow_of(spark, MemorySink(), filtered=True, counted=True)
        explained = job.explain_deployment(script)
        assert explained is not None
        assert "adds filter 'every 5th'" in str(explained)
        change = job.deploy(script)
        assert change is not None
        assert change.require(WAIT_S).outcome is Outcome.APPLIED
        assert job.deploy(script) is None
        other = Flow("other")
        other.source("numbers", numbers(spark)).sink("out", MemorySink())
        with pytest.raises(FlowError, match="the script is of flow 'other'"):
            job.deploy(other)
        job.await_epoch(job.metrics.epochs + 1, WAIT_S)
        before = len(job.history())
        back = job.revert(1).require(WAIT_S)
        assert len(job.history()) == before + 1
        assert back.outcome is Outcome.APPLIED
        assert [op.name for op in job.graph] == ["numbers", "m", "out"]
        epochs = stop_after(job, 2)
    last = epochs_of(out)[epochs - 1]
    assert last == list(range((epochs - 1) * ROWS, epochs * ROWS))


def test_a_job_starts_again_with_the_plan_that_it_had(spark: Any, tmp_path: Path, caplog: Any):
    with flow_of(spark, MemorySink()).start(spark, checkpoint=str(tmp_path)) as job:
        assert job.await_epoch(1, WAIT_S)
        job.update(COUNT, FILTER, Update("m", passing)).require(WAIT_S)
        first = stop_after(job, 1)
    out = MemorySink()
    with flow_of(spark, out).start(spark, checkpoint=str(tmp_path)) as job:
        assert {"count", "every 5th"} <= {op.name for op in job.graph}
        job.await_epoch(2, WAIT_S)
        job.stop()
    told = [record.getMessage() for record in caplog.records]
    assert sum("was inserted while the job ran" in each for each in told) == 3
    assert all(n % 5 == 0 for found in epochs_of(out).values() for n in found)
    assert first


def test_a_broken_insert_on_spark_is_rolled_back_without_losing_a_row(spark: Any, tmp_path: Path):
    out = MemorySink()
    broken = Insert(lambda rows: rows.filter("broken", lambda row: 1 // (row["n"] - row["n"])), after="numbers")
    with flow_of(spark, out).start(spark, checkpoint=str(tmp_path)) as job:
        assert job.await_epoch(1, WAIT_S)
        change = job.update(broken, preflight=False)
        assert change.wait(WAIT_S) is Outcome.ROLLED_BACK
        assert "broken" in str(change.error)
        epochs = stop_after(job, 1)
    rows = committed(out.rows, epochs)
    assert sorted(row["n"] for row in rows) == list(range(epochs * ROWS))


def test_midstream_deploy_changes_a_served_job_and_plans_for_a_stopped_one(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from typer.testing import CliRunner

    script = """
from midstream import Flow, GeneratorSource, NoopSink

flow = Flow("served")
rows = flow.source("in", GeneratorSource(lambda index, rng: {{"n": index}}, "n bigint", rate=200.0))
{middle}
rows.sink("out", NoopSink())
"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(script.format(middle=""))
    runner, at = CliRunner(), str(tmp_path / "checkpoint")
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(compile(script.format(middle=""), "script.py", "exec"), namespace)
    with namespace["flow"].start(spark, checkpoint=at, serve=True) as job:
        assert job.await_epoch(1, WAIT_S)
        same = runner.invoke(app, ["deploy", "served", "script.py:flow"])
        assert same.exit_code == 0, same.output
        assert "nothing to change" in same.output
        (tmp_path / "script.py").write_text(
            script.format(middle='rows = rows.filter("even", lambda row: row["n"] % 2 == 0)')
        )
        planned = runner.invoke(app, ["deploy", "served", "script.py:flow", "--plan", "--svg", "plan.svg"])
        assert planned.exit_code == 0, planned.output
        assert "adds filter 'even'" in planned.output
        assert (tmp_path / "plan.svg").read_text().startswith("<svg")
        assert job.revision == 1
        deployed = runner.invoke(app, ["deploy", "served", "script.py:flow"])
        assert deployed.exit_code == 0, deployed.output
        assert "even" in [op.name for op in job.graph]
        assert job.revision == 2
    (tmp_path / "script.py").write_text(
        script.format(middle='rows = rows.filter("even", lambda row: row["n"] % 2 == 0).map("all", lambda row: row)')
    )
    offline = runner.invoke(app, ["deploy", at, "script.py:flow", "--plan"])
    assert offline.exit_code == 0, offline.output
    assert "adds map 'all' behind even" in offline.output
    refused = runner.invoke(app, ["deploy", at, "script.py:flow"])
    assert refused.exit_code == 1
    assert "no job is running" in refused.output
