"""Control operations on Spark: their code travels, they fail, hang and kill workers, and the job goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from midstream import ControlContext, ControlOperation, Flow, Job, MemorySink
from midstream.checkpoint.control_log import ControlOutcome
from midstream.errors import ControlFailed

WAIT_S = 180.0
ROWS = 100


def numbered(key: int, row: dict[str, Any], state: Any) -> dict[str, Any]:
    state.set(state.get(0) + 1)
    return {"k": key, "n": state.get()}


def job_of(spark: Any, folder: Path, out: MemorySink) -> Job:
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 2)
    flow = Flow("controlled")
    source = flow.source("numbers", numbers.load().selectExpr("value % 7 AS k"))
    source.key_by("by k", "k").process("count", numbered, returns="k bigint, n int").sink("out", out)
    started: Job = flow.start(spark, checkpoint=str(folder / "c"))
    return started


class Rows(ControlOperation):
    def __init__(self, mode: str) -> None:
        self.mode = mode

    def complete(self, ctx: ControlContext) -> Any:
        return {ctx.operator: ctx.stats.rows_in}


class Add(ControlOperation):
    """Add to every count; gives how many keys there are."""

    mode = "blocking"

    def __init__(self, term: int, fails: bool = False) -> None:
        self.term, self.fails = term, fails

    def prepare(self, graph: Any) -> Any:
        return {"count": self.term}

    def complete(self, ctx: ControlContext) -> int:
        found = 0
        for _, state in ctx.state.items():
            state.set(state.get() + ctx.configuration)
            found += 1
        if self.fails and ctx.partition == 1:
            raise ValueError("not here")
        return found


class Hangs(ControlOperation):
    time_limit = "1 s"

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def complete(self, ctx: ControlContext) -> None:
        time.sleep(1_000)


class Kills(Hangs):
    def complete(self, ctx: ControlContext) -> None:
        os._exit(3)


def assert_counted(out: MemorySink, epochs: int, added: dict[int, int]) -> None:
    """Each key's rows are numbered without a gap, but for what was ``added`` after an epoch."""
    expected = dict.fromkeys(range(7), 0)
    for epoch in range(epochs):
        table = out.tables[epoch]
        found: dict[int, list[int]] = {}
        for row in table.to_pylist():
            found.setdefault(row["k"], []).append(row["n"])
        for key, numbers in found.items():
            assert sorted(numbers) == list(range(expected[key] + 1, expected[key] + 1 + len(numbers))), (epoch, key)
            expected[key] += len(numbers)
        for key in expected:
            expected[key] += added.get(epoch, 0)


def test_operations_run_while_the_job_does(spark: Any, tmp_path: Path) -> None:
    out = MemorySink()
    with job_of(spark, tmp_path, out) as job:
        assert job.await_epoch(1, WAIT_S)
        handles = [job.control(Rows(mode)) for mode in ("fast", "in-band", "blocking")]
        fast, in_band, blocking = (handle.result(WAIT_S) for handle in handles)
        assert set(fast or {}) <= {"numbers", "by k", "count"}
        assert in_band["numbers"] == 0, "before its first row"
        assert blocking == {"numbers": ROWS, "by k": ROWS, "count": ROWS}
        added = job.control(Add(1_000))
        assert added.result(WAIT_S) == 7
        failed = job.control(Add(5, fails=True))
        with pytest.raises(ControlFailed, match="ValueError: not here"):
            failed.result(WAIT_S)
        assert "in complete\n    raise ValueError" in str(failed.error)
        assert job.await_epoch(job.metrics.epochs + 2, WAIT_S)
        epoch, done = added.record.epoch, job.progress[-1].epoch
        assert [record.outcome for record in job.controls()][-2:] == [ControlOutcome.COMPLETE, ControlOutcome.FAILED]
    assert epoch is not None
    assert_counted(out, done + 1, {epoch: 1_000})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Hangs, Kills])
@pytest.mark.parametrize("mode", ["fast", "in-band", "blocking"])
def test_a_handler_that_hangs_or_kills_its_worker_costs_runs_and_nothing_else(
    spark: Any, tmp_path: Path, kind: type[Hangs], mode: str
) -> None:
    out = MemorySink()
    with job_of(spark, tmp_path, out) as job:
        assert job.await_epoch(1, WAIT_S)
        with pytest.raises(ControlFailed) as raised:
            job.control(kind(mode)).result(WAIT_S)
        told = "complete has not returned after 1 s" if kind is Hangs else "runs were lost while it was in progress"
        assert told in str(raised.value)
        assert job.control(Add(10)).result(WAIT_S) == 7
        assert job.await_epoch(job.metrics.epochs + 1, WAIT_S)
        [epoch] = [record.epoch for record in job.controls() if record.outcome is ControlOutcome.COMPLETE]
        done = job.progress[-1].epoch
    assert epoch is not None
    assert_counted(out, done + 1, {epoch: 10})


@pytest.mark.slow
def test_the_example_sees_rows_and_state(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.controlling import main

    found = main(spark)
    assert found["rows"]
    assert found["richest"] in range(20)
    assert "is ahead with" in capsys.readouterr().out
