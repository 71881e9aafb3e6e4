"""A job's life on Spark: start, status, waiting, stop."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, GeneratorSource, ListSource, MemorySink, NoopSink
from midstream.errors import CheckpointError, FlowError, SetupError
from midstream.runtime.spark.doctor import require_pyspark
from midstream.runtime.spark.job import Job, JobStatus
from midstream.runtime.spark.offset_log import MANAGER_CONF, RAW_FILES
from midstream.testing import run_spark

WAIT_S = 180.0

Row = dict[str, Any]


def endless() -> GeneratorSource:
    return GeneratorSource(lambda index, rng: {"n": index}, "n bigint", rate=1000, max_rows_per_epoch=50)


def flow_of(source: Any, sink: Any = None, function: Callable[[Row], Row] = lambda row: row, name: str = "job") -> Flow:
    flow = Flow(name)
    flow.source("source", source).map("work", function).sink("out", NoopSink() if sink is None else sink)
    return flow


def waits_in(gate: Any, at: int) -> Callable[[Row], Row]:
    pass_through = gate.pass_through

    def work(row: Row) -> Row:
        if row["n"] == at:
            pass_through()
        return row

    return work


def status_of(job: Job) -> JobStatus:
    """A function, because type checkers assume that a property is constant, and this one is not."""
    return job.status


# ── its life ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_status_from_start_to_stop(spark: Any, tmp_path: Path, gate: Any) -> None:
    job = flow_of(endless(), function=waits_in(gate, at=0)).start(spark, checkpoint=str(tmp_path / "c"))
    gate.arrive()
    assert status_of(job) is JobStatus.STARTING
    assert not job.await_epoch(1, timeout=0.01)
    assert not job.await_termination(timeout=0)
    assert not job.await_termination(timeout=0.01)

    gate.open()
    assert job.await_epoch(2, WAIT_S)
    assert status_of(job) is JobStatus.RUNNING
    assert job.exception is None
    assert repr(job).startswith("Job('job', running, epochs=")

    job.stop()
    assert status_of(job) is JobStatus.STOPPED
    job.stop()
    assert job.await_termination(timeout=0)
    assert status_of(job) is JobStatus.STOPPED
    assert job.exception is None


def test_workers_do_not_collect_garbage_in_loaded_objects(spark: Any, tmp_path: Path) -> None:
    def frozen(row: Row) -> Row:
        return {"n": gc.get_freeze_count()}

    sink = MemorySink()
    flow = flow_of(ListSource([[{"n": 1}]] * 4, "n bigint"), sink, frozen)
    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))
    assert max(row["n"] for row in sink.rows) > 10_000


def test_an_available_now_job_ends_by_itself_and_measures_what_it_did(spark: Any, tmp_path: Path) -> None:
    epochs = [[{"n": 1}, {"n": 2}], [{"n": 3}]]
    job = flow_of(ListSource(epochs, "n bigint")).start(spark, checkpoint=str(tmp_path / "c"), trigger="available-now")

    assert not job.await_epoch(3, WAIT_S), "there are only two"
    assert job.await_termination(WAIT_S)
    assert job.status is JobStatus.FINISHED
    job.stop()
    assert job.status is JobStatus.FINISHED, "it had ended before"
    assert [(p.epoch, p.revision, p.rows_in, p.rows_out) for p in job.progress] == [(0, 1, 2, 2), (1, 1, 1, 1)]
    assert all(p.duration_ms > 0 for p in job.progress)
    assert job.progress[0].committed_at < job.progress[1].committed_at
    assert (job.metrics.epochs, job.metrics.rows_in, job.metrics.rows_out) == (2, 3, 3)
    assert job.metrics.busy_ms == sum(p.duration_ms for p in job.progress)
    assert {s.operator: (s.rows_in, s.rows_out) for s in job.metrics.operators} == {"source": (3, 3), "work": (3, 3)}


def test_stop_in_the_middle_of_an_epoch_gives_it_up_and_a_restart_runs_it_again(
    spark: Any, tmp_path: Path, gate: Any
) -> None:
    rows, out = [{"n": n} for n in range(20)], MemorySink()
    source = ListSource([rows[:10], rows[10:]], "n bigint", partitions=2)
    checkpoint = str(tmp_path / "c")
    job = flow_of(source, out, waits_in(gate, at=15)).start(spark, checkpoint=checkpoint)
    gate.arrive()

    job.stop()

    assert job.status is JobStatus.STOPPED
    assert job.exception is None
    assert list(out.tables) == [0]
    gate.open()
    again = flow_of(source, out).start(spark, checkpoint=checkpoint, trigger="available-now")
    assert again.await_termination(WAIT_S)
    assert again.id == job.id
    assert [p.epoch for p in again.progress] == [1]
    assert sorted(row["n"] for row in out.rows) == list(range(20))


def test_the_context_manager_stops_the_job_also_on_an_error(spark: Any, tmp_path: Path) -> None:
    with (  # noqa: PT012  the block is what is tested
        pytest.raises(ZeroDivisionError),
        flow_of(endless()).start(spark, checkpoint=str(tmp_path / "c")) as job,
    ):
        assert job.await_epoch(1, WAIT_S)
        raise ZeroDivisionError
    assert job.status is JobStatus.STOPPED


def test_waiting_threads_return_when_the_job_is_stopped(spark: Any, tmp_path: Path, gate: Any) -> None:
    job = flow_of(endless(), function=waits_in(gate, at=0)).start(spark, checkpoint=str(tmp_path / "c"))
    found: dict[str, bool] = {}
    waiting = [
        threading.Thread(target=lambda: found.update(epoch=job.await_epoch(1_000_000))),
        threading.Thread(target=lambda: found.update(termination=job.await_termination())),
    ]
    for thread in waiting:
        thread.start()
    gate.arrive()

    stopping = [threading.Thread(target=job.stop) for _ in range(2)]
    for thread in stopping:
        thread.start()
    for thread in (*stopping, *waiting):
        thread.join(WAIT_S)

    assert found == {"epoch": False, "termination": True}


# ── how it is started ─────────────────────────────────────────────────────────────────────────────────────────────


def test_an_interval_triggers_epochs(spark: Any, tmp_path: Path) -> None:
    with flow_of(endless()).start(spark, checkpoint=str(tmp_path / "c"), trigger="100 ms") as job:
        assert job.await_epoch(2, WAIT_S)


@pytest.mark.parametrize("trigger", ["often", "ms", "-1 s", "1 fortnight", "", 5, "availableNow"])
def test_other_triggers_are_refused(spark: Any, tmp_path: Path, trigger: Any) -> None:
    with pytest.raises(FlowError, match="available-now"):
        flow_of(endless()).start(spark, checkpoint=str(tmp_path / "c"), trigger=trigger)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("interval", ["500 ms", "5s", "5 s", "1 second", "0.5 seconds", "1.5 minutes", "2 hours"])
def test_spark_understands_every_interval_that_is_allowed(spark: Any, interval: str) -> None:
    from midstream.runtime.spark.start import parse_trigger

    writer = spark.readStream.format("rate").load().writeStream
    assert writer.trigger(**parse_trigger(interval)) is writer


def test_partitions_is_the_number_of_tasks_behind_an_exchange_and_a_key_has_one_of_them(
    spark: Any, tmp_path: Path
) -> None:
    def where(row: Row) -> Row:
        from pyspark import TaskContext

        return {**row, "partition": TaskContext.get().partitionId()}  # type: ignore[union-attr]

    rows = [{"key": n % 40, "n": n} for n in range(200)]
    flow, out = Flow("partitioned"), MemorySink()
    source = flow.source("source", ListSource([rows[:100], rows[100:]], "key int, n int", partitions=3))
    source.key_by("by_key", "key").map("where", where, returns="key int, n int, partition int").sink("out", out)

    with flow.start(spark, checkpoint=str(tmp_path / "c"), partitions=5, trigger="available-now") as job:
        assert job.await_termination(WAIT_S)

    places = defaultdict(set)
    for row in out.rows:
        places[row["key"]].add(row["partition"])
    assert sorted(row["n"] for row in out.rows) == list(range(200))
    assert all(len(found) == 1 for found in places.values()), "in every epoch the same"
    assert set.union(*places.values()) == set(range(5))


@pytest.mark.parametrize("partitions", [0, -1, 257, 2.0, "2", True])
def test_other_numbers_of_partitions_are_refused(spark: Any, tmp_path: Path, partitions: Any) -> None:
    with pytest.raises(FlowError, match=r"whole number from 1 to (256|65536)"):
        flow_of(endless()).start(spark, checkpoint=str(tmp_path / "c"), partitions=partitions)
    assert not (tmp_path / "c").exists()


def test_two_jobs_of_one_flow_run_side_by_side_each_with_its_checkpoint(spark: Any, tmp_path: Path) -> None:
    rows = [{"n": n} for n in range(30)]
    sinks = [MemorySink(), MemorySink()]
    source = ListSource.of(rows, schema="n bigint", epoch_rows=10)
    flows = [flow_of(source, sink, multiply(i)) for i, sink in enumerate(sinks)]
    jobs = [flow.start(spark, checkpoint=str(tmp_path / str(i))) for i, flow in enumerate(flows)]
    try:
        assert all(job.await_epoch(3, WAIT_S) for job in jobs)
        with pytest.raises(CheckpointError, match="a job is running on the checkpoint"):
            flows[0].start(spark, checkpoint=str(tmp_path / "0"))
    finally:
        for job in jobs:
            job.stop()
    assert jobs[0].id != jobs[1].id
    for i, sink in enumerate(sinks):
        assert sorted(row["n"] for row in sink.rows) == sorted(n * i for n in range(30))


def multiply(factor: int) -> Callable[[Row], Row]:
    return lambda row: {"n": row["n"] * factor}


def test_only_a_classic_session_is_accepted(tmp_path: Path) -> None:
    connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(SetupError, match="Spark Connect"):
        flow_of(endless()).start(connect, checkpoint=str(tmp_path / "c"))
    with pytest.raises(FlowError, match="must be a SparkSession, found str"):
        flow_of(endless()).start("local[2]", checkpoint=str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("version", ["3.5.1", "4.0.2", "5.0.0"])
def test_versions_of_pyspark_that_cannot_run_a_flow_are_refused(version: str) -> None:
    with pytest.raises(SetupError, match=f"pyspark {version} cannot run a flow"):
        require_pyspark(version)


def test_settings_for_sparks_log_are_removed_when_a_job_runs(spark, tmp_path):
    """Only the log is written without checksums; sinks and the user's session use files as usual."""
    found = []

    def look(df, epoch):
        found.append([df.sparkSession.conf.get(key, None) for key in RAW_FILES])
        df.count()

    flow = Flow("settings")
    flow.source("in", ListSource([[{"n": 1}]], "n int")).sink("out", look)
    run_spark(flow, spark, checkpoint=str(tmp_path))
    assert found == [[None, None]]
    assert [spark.conf.get(key, None) for key in (*RAW_FILES, MANAGER_CONF)] == [None, None, None]
    assert not list((tmp_path / "spark" / "commits").glob(".*.crc")), "so it does take effect"
