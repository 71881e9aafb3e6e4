"""Queries that are started ahead of a hand-over: epochs go on meanwhile, and nothing is left of one in vain.

Also sources that answer too late, which only Spark's own processes can be.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql.datasource import DataSource, DataSourceStreamReader

from midstream import Flow, GeneratorSource, Insert, MemorySink, Remove
from midstream.checkpoint.change_records import Outcome
from midstream.errors import MidstreamError, SourceError
from midstream.runtime.spark import held_query
from midstream.runtime.spark.source_gate import SourceGate
from tests.spark.conftest import Gate
from tests.spark.test_source_changes import WAIT_S, Folder, rows_of, sources_flow, united, wait_for

FIRST = 1_000_000


def generator(number: int) -> GeneratorSource:
    """Numbers from a million times the given one on."""
    return GeneratorSource(lambda index, rng: {"n": index + FIRST * number}, "n bigint", rate=200, partitions=1)


def generators(out: MemorySink) -> Flow:
    flow = Flow("generators")
    rows = flow.source("g1", generator(1)).union("all", flow.source("g2", generator(2)))
    rows.drop("no time", "event_time").sink("out", out)
    return flow


def third() -> Insert:
    return Insert(source=lambda flow: flow.source("g3", generator(3)), before="all")


def require_exact(out: MemorySink, *numbers: int) -> None:
    """Of each generator all numbers up to its last one left the job, once."""
    for number in numbers:
        found = sorted(row["n"] for row in out.rows if row["n"] // FIRST == number)
        assert found, f"{number} has given nothing"
        assert found == list(range(FIRST * number, FIRST * number + len(found)))


def require_readers(count: int) -> None:
    """So many processes of sources are left; one that was ended may take a moment."""
    until = time.monotonic() + WAIT_S
    while len(found := _readers()) != count and time.monotonic() < until:
        psutil.wait_procs(found, timeout=0.1)
    assert len(found) == count


def _readers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "python_streaming_source_runner" in " ".join(_command(child))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has just ended
        return []


@pytest.mark.slow
def test_epochs_go_on_while_the_sources_of_a_hand_over_are_made(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, checkpoint = MemorySink(), tmp_path / "checkpoint"
    meanwhile: list[int] = []
    has_arrived = SourceGate.has_arrived

    def arrives_late(gate: SourceGate, patience_s: float) -> bool:
        if not has_arrived(gate, patience_s):
            return False
        if len(meanwhile) < 3:  # all sources are made: as many epochs as one likes fit in here
            meanwhile.append(job.metrics.epochs)
            assert job.await_epoch(job.metrics.epochs + 2, WAIT_S)
            assert list(job.graph.sources) == ["g1", "g2", "g3"][: 1 + len(meanwhile)]
            assert len(spark.streams.active) == 2
        return True

    monkeypatch.setattr(SourceGate, "has_arrived", arrives_late)
    with generators(out).start(spark, checkpoint=str(checkpoint), partitions=2) as job:
        assert job.await_epoch(2, WAIT_S)
        job.update(third()).require(WAIT_S)
        assert len(meanwhile) == 1
        assert job.await_epoch(job.metrics.epochs + 2, WAIT_S)
        [query] = spark.streams.active
        assert job.id in query.name
        # Back again, in one change with another source: the log has entries of later epochs than when it was begun.
        back = job.update(Remove("g1"), Insert(source=lambda flow: flow.source("g4", generator(4)), before="all"))
        back.require(WAIT_S)
        assert len(meanwhile) == 2
        assert job.await_epoch(job.metrics.epochs + 2, WAIT_S)
        require_readers(3)
        assert sorted(path.name for path in checkpoint.glob("spark*")) == ["spark-2"]
    require_exact(out, 1, 2, 3, 4)
    require_readers(0)


@pytest.mark.slow
def test_a_query_that_was_started_in_vain_leaves_nothing(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, checkpoint = MemorySink(), tmp_path / "checkpoint"
    with generators(out).start(spark, checkpoint=str(checkpoint), partitions=2) as job:
        assert job.await_epoch(2, WAIT_S)

        # Its reader does not come to the gate, so that it runs an epoch too early: that must not count.
        with monkeypatch.context() as patched:
            patched.setattr(held_query, "source_at_gate", lambda graph: "nobody")
            with pytest.raises(SourceError, match="the sources cannot be read"):
                job.update(third())
        assert job.await_epoch(job.metrics.epochs + 1, WAIT_S)
        assert [record.outcome for record in job.history()] == [Outcome.REFUSED]
        assert len(spark.streams.active) == 1
        require_readers(2)
        assert sorted(path.name for path in checkpoint.glob("spark*")) == ["spark"]

        # It takes too long.
        with monkeypatch.context() as patched:
            patched.setattr(held_query, "PATIENCE_S", 0.0)
            patched.setattr(SourceGate, "has_arrived", lambda gate, patience_s: False)
            with pytest.raises(SourceError, match=r"'g1', 'g2', 'g3' were not made within 0 s; nothing has changed"):
                job.update(third())
        assert len(spark.streams.active) == 1
        require_readers(2)

        # The job is stopped meanwhile.
        stops = threading.Thread(target=job.stop, daemon=True)

        def is_stopped(gate: SourceGate, patience_s: float) -> bool:
            if not stops.ident:
                stops.start()
            return False

        monkeypatch.setattr(SourceGate, "has_arrived", is_stopped)
        with pytest.raises(MidstreamError, match="stopping"):
            job.update(third())
        stops.join(WAIT_S)
    require_readers(0)
    assert sorted(path.name for path in checkpoint.glob("spark*")) == ["spark"]
    require_exact(out, 1, 2)


class Hanging(DataSource):
    """A source that never says where it begins: until a gate is opened, or its process is ended."""

    @classmethod
    def name(cls) -> str:
        return "hanging"

    def schema(self) -> str:
        return "s string, n bigint"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return HangingReader(int(self.options["port"]))


class HangingReader(DataSourceStreamReader):
    def __init__(self, port: int) -> None:
        self.port = port

    def initialOffset(self) -> dict[str, int]:
        import socket

        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.recv(1)
        return {"n": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # without limits, it is called so
        return {"n": 0}

    def read(self, partition: Any) -> Any:
        raise AssertionError("nothing was planned")


@pytest.mark.slow
def test_a_change_to_a_source_that_hangs_is_rolled_back_within_its_time_limit(
    spark: Any, tmp_path: Path, gate: Gate
) -> None:
    a = Folder(tmp_path / "a")
    a.put()
    spark.dataSource.register(Hanging)
    out = MemorySink()
    with sources_flow(spark, out, a).start(spark, checkpoint=str(tmp_path / "checkpoint"), partitions=2) as job:
        wait_for(job, out, a)
        hanging = spark.readStream.format("hanging").option("port", gate.port).load()
        change = job.update(
            Insert(united, between=("a", "by s"), source=lambda flow: flow.source("hanging", hanging)),
            time_limit="3 seconds",
        )
        gate.arrive()
        a.put(2)
        assert change.wait(WAIT_S) is Outcome.ROLLED_BACK
        assert "its sources did not answer within the time limit of 3 s" in str(change.error)
        wait_for(job, out, a)
        assert list(job.graph.sources) == ["a"]
        require_readers(0)


@pytest.mark.slow
def test_a_source_without_rows_is_not_taken_for_one_that_hangs(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    a.put()
    out, is_over = MemorySink(), threading.Event()
    timer = threading.Timer

    def told(seconds: float, call: Any) -> threading.Timer:
        def run() -> None:
            call()
            is_over.set()

        return timer(seconds, run)

    with sources_flow(spark, out, a).start(spark, checkpoint=str(tmp_path / "checkpoint"), partitions=2) as job:
        wait_for(job, out, a)
        monkeypatch.setattr(threading, "Timer", told)
        add = Insert(united, between=("a", "by s"), source=lambda flow: flow.source("b", b.read(spark)))
        change = job.update(add, time_limit="10 seconds")
        assert is_over.wait(WAIT_S)
        assert change.outcome is Outcome.PENDING
        a.put()
        b.put()
        change.require(WAIT_S)
        wait_for(job, out, a)
        wait_for(job, out, b)
        assert len(rows_of(out, b)) == 3
