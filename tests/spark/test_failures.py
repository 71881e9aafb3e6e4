"""Failures of the user's code and of the machinery: users get a clear error, and a fixed flow continues exactly."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from midstream import FileSink, Flow, ListSource, MemorySink, NoopSink
from midstream.control.channel import Address, Server
from midstream.control.messages import Refused
from midstream.errors import ChannelError, Fenced, JobFailed
from midstream.ids import Epoch, Run, StageIndex
from midstream.runtime.spark import worker
from midstream.runtime.spark.job import JobStatus
from midstream.testing import run_spark
from tests.spark.conftest import PATIENCE_S

Row = dict[str, Any]
EPOCHS = [[{"n": 10 * epoch + n} for n in range(10)] for epoch in range(3)]
NOISE = ("py4j", "org.apache", "java.", "\tat ", "SparkException", "mapInArrow", "run_stage")


def numbers() -> ListSource:
    return ListSource(EPOCHS, "n bigint", partitions=2)


def two_stages(before: Callable[[Row], Row], after: Callable[[Row], Row], *sinks: Any) -> Flow:
    flow = Flow("fragile")
    stream = flow.source("numbers", numbers()).map("before", before).key_by("by_n", "n").map("after", after)
    for i, sink in enumerate(sinks):
        stream.sink(f"out{i}", sink)
    return flow


def same(row: Row) -> Row:
    return row


def fails_on_13(row: Row) -> Row:
    if row["n"] == 13:
        raise ValueError("thirteen is not welcome")
    return row


def failure_of(flow: Flow, spark: Any, folder: Path) -> JobFailed:
    with pytest.raises(JobFailed) as caught:
        run_spark(flow, spark, checkpoint=str(folder / "checkpoint"))
    error = caught.value
    assert isinstance(error, JobFailed)
    assert not any(noise in str(error) for noise in NOISE), f"noise in: {error}"
    assert len(str(error)) < 1_500
    return error


# ── the user's functions ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_function_that_raises_fails_the_job_and_the_fixed_flow_continues_exactly(spark: Any, tmp_path: Path) -> None:
    out = FileSink(tmp_path / "out")

    error = failure_of(two_stages(same, fails_on_13, out), spark, tmp_path)

    assert (error.operator, error.epoch, error.row) == ("after", 1, "{'n': 13}")
    assert error.partition in (0, 1)
    assert error.error == "ValueError: thirteen is not welcome"
    first, *frames, last = error.user_traceback.splitlines()
    assert first == "Traceback (most recent call last):"
    assert "in fails_on_13" in frames[0]
    assert "raise ValueError" in error.user_traceback
    assert last == error.error
    assert "start the flow again with the same checkpoint" in str(error)
    assert sorted(row.n for row in spark.read.parquet(out.path).collect()) == list(range(10)), "epoch 0 stands"

    again = run_spark(two_stages(same, same, out), spark, checkpoint=str(tmp_path / "checkpoint"))

    assert [p.epoch for p in again.progress] == [1, 2]
    found = sorted((row.epoch, row.n) for row in spark.read.parquet(out.path).collect())
    assert found == [(n // 10, n) for n in range(30)]


def test_every_method_of_a_failed_job_reports_the_failure(spark: Any, tmp_path: Path) -> None:
    job = two_stages(fails_on_13, same, NoopSink()).start(spark, checkpoint=str(tmp_path / "c"))
    with pytest.raises(JobFailed, match="'before', epoch 1") as caught:
        job.await_epoch(3, PATIENCE_S)
    with pytest.raises(JobFailed):
        job.await_termination(PATIENCE_S)
    assert job.exception is caught.value
    assert job.status is JobStatus.FAILED
    assert [p.epoch for p in job.progress] == [0]
    job.stop()
    assert job.status is JobStatus.FAILED


def test_the_failing_row_of_a_batch_function_is_found(spark: Any, tmp_path: Path) -> None:
    def check(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 27 in batch["n"].to_pylist():
            raise KeyError("n")
        return batch

    flow = Flow("batches")
    flow.source("numbers", numbers()).map_batches("check", check).sink("out", NoopSink())

    error = failure_of(flow, spark, tmp_path)

    assert (error.operator, error.epoch, error.row) == ("check", 2, "{'n': 27}")


class Broken:
    """Cannot be opened."""

    def open(self) -> None:
        raise OSError("no model here")

    def __call__(self, row: Row) -> Row:
        return row


@pytest.mark.parametrize(
    ("function", "says"),
    [
        pytest.param(lambda row: {"n": "many"}, "expected bigint, found str 'many'", marks=pytest.mark.slow),
        (lambda row: None, "expected a dict"),
        pytest.param(lambda row: {"m": 1}, "the key is missing", marks=pytest.mark.slow),
        pytest.param(Broken(), "OSError: no model here", marks=pytest.mark.slow),
        (lambda row: sys.exit("enough"), "SystemExit: enough"),
    ],
    ids=["type", "none", "key", "open", "exit"],
)
def test_a_misbehaving_function_is_reported_with_its_operator(
    spark: Any, tmp_path: Path, function: Any, says: str
) -> None:
    flow = Flow("wrong")
    flow.source("numbers", numbers()).map("wrong", function).sink("out", NoopSink())

    error = failure_of(flow, spark, tmp_path)

    assert says in str(error)
    assert (error.operator, error.epoch) == ("wrong", 0)


@pytest.mark.slow
def test_a_sink_that_raises_fails_the_epoch_and_the_others_are_replaced_on_the_next_run(
    spark: Any, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []

    def deliver(df: Any, epoch: int) -> None:
        if epoch == 1 and len(seen) == 1:
            raise ConnectionError("the database is away")
        seen.append((epoch, df.count()))

    memory = MemorySink()
    flow = two_stages(same, same, memory, deliver)
    error = failure_of(flow, spark, tmp_path)
    assert (error.operator, error.epoch, error.error) == ("out1", 1, "ConnectionError: the database is away")
    assert "in deliver" in error.user_traceback
    assert list(memory.tables) == [0, 1], "the sink before it had its rows already"

    seen.append((-1, 0))
    run_spark(flow, spark, checkpoint=str(tmp_path / "checkpoint"))

    assert seen == [(0, 10), (-1, 0), (1, 10), (2, 10)]
    assert sorted(row["n"] for row in memory.rows) == list(range(30))


@pytest.mark.slow
def test_a_transform_that_fails_while_it_runs_is_named(spark: Any, tmp_path: Path) -> None:
    flow = Flow("transformed")
    stream = flow.source("numbers", numbers()).map("same", same)
    gamble = stream.transform("gamble", lambda df: df.selectExpr("CAST(raise_error('no luck') AS bigint) AS n"))
    gamble.sink("out", NoopSink())

    with pytest.raises(JobFailed, match="no luck") as caught:
        run_spark(flow, spark, checkpoint=str(tmp_path / "c"))

    assert caught.value.epoch == 0
    assert len(str(caught.value)) < 1_500


# ── the machinery ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this thread look like a task's."""
    context = SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 7)
    monkeypatch.setattr(worker, "TaskContext", SimpleNamespace(get=lambda: context))
    yield
    for thread in threading.enumerate():
        if thread.name == "midstream-lifeline":
            thread.join()


def ticket_of(address: Address, folder: Path) -> worker.Ticket:
    at = worker.Whereabouts(address, "job", str(folder), str(folder), str(folder))
    return worker.Ticket(at, StageIndex(0), (Epoch(0), Run(0)))


def input_that_must_not_be_read() -> Iterator[pa.RecordBatch]:
    yield pytest.fail("the task read its input before it knew what to run")


def test_a_task_that_cannot_reach_the_coordinator_fails_and_says_so(
    in_a_task: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PATIENCE_S", 0.2)
    with Server(lambda peer, message: []) as server:
        address = server.address
    ticket = ticket_of(address, tmp_path)
    with pytest.raises(ChannelError, match=r"no answer to \w+ within.*is the driver alive") as caught:
        list(worker.run_stage(ticket, input_that_must_not_be_read()))
    assert address.endpoint in str(caught.value)


def test_a_task_of_a_run_that_is_over_is_fenced(in_a_task: None, tmp_path: Path) -> None:
    with Server(lambda peer, message: [(peer, Refused("epoch 0.0 is over"))]) as server:
        ticket = ticket_of(server.address, tmp_path)
        with pytest.raises(Fenced, match=r"refused TaskStarted: epoch 0\.0 is over"):
            list(worker.run_stage(ticket, input_that_must_not_be_read()))


@pytest.mark.slow
def test_an_epoch_whose_coordinator_went_away_fails(spark: Any, tmp_path: Path, gate: Any) -> None:
    pass_through = gate.pass_through

    def wait(row: Row) -> Row:
        if row["n"] == 13:
            pass_through()
        return row

    out = FileSink(tmp_path / "out")
    job = two_stages(wait, same, out).start(spark, checkpoint=str(tmp_path / "c"))
    gate.arrive()
    job._control._server.close()
    gate.open()

    with pytest.raises(JobFailed, match="ChannelError: the coordinator cannot be reached") as caught:
        job.await_termination(PATIENCE_S)

    assert caught.value.epoch == 1
    job.stop()
    run_spark(two_stages(same, same, out), spark, checkpoint=str(tmp_path / "c"))
    found = sorted((row.epoch, row.n) for row in spark.read.parquet(out.path).collect())
    assert found == [(n // 10, n) for n in range(30)]


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE_S)  # a JVM has to start first
def test_a_killed_worker_is_replaced_and_the_result_is_exact(driver: Any, tmp_path: Path) -> None:
    """In a separate driver, because this session does not retry tasks."""
    assert driver(lose_workers, tmp_path).finish().splitlines() == ["finished", "exact"]
    assert len(list(tmp_path.glob("killed-*"))) == 2


def lose_workers(folder: str) -> None:
    """Runs in another process: in both stages, the first attempt at one row kills its worker."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    out = FileSink(f"{folder}/out")
    flow = two_stages(die_once(f"{folder}/killed-before", 13), die_once(f"{folder}/killed-after", 25), out)
    job = run_spark(flow, spark, checkpoint=f"{folder}/checkpoint")
    print(job.status)
    found = sorted((row.epoch, row.n) for row in spark.read.parquet(out.path).collect())
    counts = {stats.operator: stats.rows_in for stats in job.metrics.operators}
    print("exact" if found == [(n // 10, n) for n in range(30)] and set(counts.values()) == {30} else found)
    spark.stop()


def die_once(marker: str, at: int) -> Callable[[Row], Row]:
    def work(row: Row) -> Row:
        if row["n"] == at and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    return work
