"""Hand-overs beside whatever else may happen at that moment: forks, reverts, stops, ends, requests that come early."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, Insert, MemorySink, Remove, fork
from midstream.change.offline_revert import revert_offline
from midstream.checkpoint.change_records import Outcome
from midstream.errors import SourceError
from midstream.runtime.spark.heartbeat import Heartbeat
from midstream.runtime.spark.job import Job, JobStatus
from midstream.runtime.spark.queries import Queries
from tests.spark.test_source_changes import WAIT_S, Folder, rows_of, sources_flow, united, wait_for


def adds(spark: Any, folder: Folder) -> Insert:
    """The folder as another source, while only a is there."""
    name = folder.path.name
    return Insert(united, between=("a", "by s"), source=lambda flow: flow.source(name, folder.read(spark)))


def test_forks_and_reverts_cross_hand_overs(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    out, checkpoint = MemorySink(), str(tmp_path / "checkpoint")
    handed_over = threading.Semaphore(0)
    next_query = Heartbeat.next_query

    def noted(heartbeat: Heartbeat, on_epoch: Any) -> Any:
        query = next_query(heartbeat, on_epoch)
        handed_over.release()
        return query

    monkeypatch.setattr(Heartbeat, "next_query", noted)
    a.put(2)
    with sources_flow(spark, out, a).start(spark, checkpoint=checkpoint, partitions=2) as job:
        wait_for(job, out, a)
        added = job.update(adds(spark, b))
        assert handed_over.acquire(timeout=WAIT_S)
        a.put()  # all that the change has touched gets rows, so that its trial can end
        b.put(2)
        added.require(WAIT_S)
        wait_for(job, out, a)
        wait_for(job, out, b)
        removal = job.update(Remove("b"))
        assert handed_over.acquire(timeout=WAIT_S)
        # The last epoch read both, Spark's log is for one of them already, and no epoch comes.
        job.savepoint("between")
        in_savepoint = len(out.rows)
        a.put()
        removal.require(WAIT_S)
        wait_for(job, out, a)

        # Its DataFrame is not stored, so nobody can bring it back but its user.
        with pytest.raises(SourceError, match=r"'b' reads a DataFrame, .*is not stored.*it goes on where it was"):
            job.revert(added.revision)
        assert list(job.graph.sources) == ["a"]
        a.put()
        wait_for(job, out, a)

    # The command for a job that is stopped goes by the script, which has it.
    revert_offline(checkpoint, added.revision, by="me")
    b.put()
    a.put()
    with sources_flow(spark, out, a, b).start(spark, checkpoint=checkpoint) as job:
        assert list(job.graph.sources) == ["a", "b"]
        wait_for(job, out, a)
        wait_for(job, out, b)

    fork(checkpoint, "between", str(tmp_path / "fork"))
    again = MemorySink()
    with sources_flow(spark, again, a, b).start(spark, checkpoint=str(tmp_path / "fork")) as job:
        while len(again.rows) < a.rows + b.rows - in_savepoint:
            assert job.await_epoch(job.metrics.epochs + 1, WAIT_S)
    for folder, before in ((a, 9), (b, 6)):
        totals = sorted(row["total"] for row in rows_of(again, folder))
        assert totals == list(range(before + 1, folder.rows + 1)), "it goes on with the state and the rows of then"


def test_a_thread_that_is_late_does_not_end_the_query_after_its_own(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch has ended the old query before: it was begun with the sources of before."""
    a, b = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    may_run, has_run = threading.Event(), threading.Event()
    run = threading.Thread.run

    def late(thread: threading.Thread) -> None:
        is_late = thread.name == "midstream-hand-over"
        assert not is_late or may_run.wait(WAIT_S)
        run(thread)
        if is_late:
            has_run.set()

    monkeypatch.setattr(threading.Thread, "run", late)
    out = MemorySink()
    a.put()
    with sources_flow(spark, out, a).start(spark, checkpoint=str(tmp_path / "checkpoint"), partitions=2) as job:
        wait_for(job, out, a)
        change = job.update(adds(spark, b))
        a.put()
        b.put()
        change.require(WAIT_S)
        may_run.set()
        assert has_run.wait(WAIT_S)
        a.put()
        b.put()
        wait_for(job, out, a)
        wait_for(job, out, b)
        assert job.status is JobStatus.RUNNING


def test_a_job_can_be_stopped_during_a_hand_over(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """stop() meets the query that has ended, and the next one is not known yet."""
    a, b = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    out, checkpoint = MemorySink(), str(tmp_path / "checkpoint")
    a.put()
    job = sources_flow(spark, out, a).start(spark, checkpoint=checkpoint, partitions=2)
    wait_for(job, out, a)
    met = threading.Event()
    start, end_query = Queries.start, Job._end_query

    def started(queries: Queries, *args: Any) -> Any:
        query = start(queries, *args)
        threading.Thread(target=job.stop, daemon=True).start()
        assert met.wait(WAIT_S)
        return query

    def ended(stopped: Job) -> None:
        end_query(stopped)
        met.set()

    with monkeypatch.context() as patched:
        patched.setattr(Queries, "start", started)
        patched.setattr(Job, "_end_query", ended)
        change = job.update(adds(spark, b))
        assert job.await_termination(WAIT_S)
    assert job.status is JobStatus.STOPPED
    assert change.outcome is Outcome.PENDING
    a.put()
    b.put(2)
    with sources_flow(spark, out, a, b).start(spark, checkpoint=checkpoint) as job:
        wait_for(job, out, a)
        wait_for(job, out, b)


def test_a_change_that_comes_before_the_first_query_or_after_the_last_is_handed_over(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is served before its query starts, and until it has closed all windows."""
    a, b, c = (Folder(tmp_path / name) for name in "abc")
    a.put()
    b.put()
    c.put()
    out = MemorySink()
    start, close = Queries.start, Heartbeat.close_windows
    known, changes = threading.Event(), list[Any]()

    def starts(queries: Queries, graph: Any, on_epoch: Any) -> Any:
        if not changes:
            changes.append(on_epoch.__self__.update(adds(spark, b)))
        return start(queries, graph, on_epoch)

    def closes(heartbeat: Heartbeat, schema: Any) -> None:
        if len(changes) == 1:
            assert known.wait(WAIT_S)
            more = Insert(source=lambda flow: flow.source("c", c.read(spark)), before="all")
            changes.append(job.update(more))
        close(heartbeat, schema)

    monkeypatch.setattr(Queries, "start", starts)
    monkeypatch.setattr(Heartbeat, "close_windows", closes)
    flow: Flow = sources_flow(spark, out, a)
    options: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "partitions": 2}
    job = flow.start(spark, trigger="available-now", close_windows=True, **options)
    known.set()
    assert job.await_termination(WAIT_S)
    assert [each.outcome for each in changes] == [Outcome.APPLIED] * 2
    for folder in (a, b, c):
        assert sorted(row["n"] for row in rows_of(out, folder)) == list(range(folder.rows))


def test_a_change_that_comes_before_the_first_query_waits_for_no_epoch(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rows in the sources of before there is none."""
    a, b = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    start, changes = Queries.start, list[Any]()

    def starts(queries: Queries, graph: Any, on_epoch: Any) -> Any:
        if not changes:
            changes.append(on_epoch.__self__.update(adds(spark, b)))
        return start(queries, graph, on_epoch)

    monkeypatch.setattr(Queries, "start", starts)
    out = MemorySink()
    b.put()
    with sources_flow(spark, out, a).start(spark, checkpoint=str(tmp_path / "checkpoint"), partitions=2) as job:
        wait_for(job, out, b)
        assert list(job.graph.sources) == ["a", "b"]
