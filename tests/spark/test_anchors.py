"""Anchors as Spark plans them: one exchange, one task a partition, the order of frames, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from midstream import MemorySink
from midstream.engine.frames import FRAME_ORDER
from midstream.ids import ExecutorId, PartitionId
from midstream.runtime.spark import anchors as anchors_module
from midstream.runtime.spark.anchors import Anchors
from midstream.runtime.spark.doctor import REDUCE_LOCALITY
from midstream.runtime.spark.live_executors import live_executors
from midstream.runtime.spark.stage_columns import PreparedColumns, PublicColumns, exchange_count
from midstream.runtime.spark.worker import RUN_PROPERTY
from midstream.testing import run_local, run_spark
from tests.spark.conftest import kept_data
from tests.spark.test_stage_columns import CALLS_OF_AN_EPOCH, commands_sent, flow_of, in_order

TWO = [ExecutorId("0"), ExecutorId("1")]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the session had the setting that the tests' session lacks."""
    monkeypatch.setattr(anchors_module, "pins_partitions", lambda spark: True)


@pytest.fixture
def anchors(spark: Any, pinned: None) -> Iterator[Anchors]:
    made = Anchors(spark)
    yield made
    made.close()


@pytest.fixture
def without_adaptive_execution(spark: Any) -> Iterator[None]:
    """As in the session of a job's query."""
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", "false")
    yield
    spark.conf.set("spark.sql.adaptive.enabled", before)


@pytest.mark.usefixtures("without_adaptive_execution")
@pytest.mark.parametrize("columns", [PreparedColumns, PublicColumns])
def test_an_anchored_exchange_is_one_exchange_in_the_same_order(
    columns: Callable[[], PublicColumns], spark: Any, anchors: Anchors
) -> None:
    number = F.col("id")
    frames = spark.range(0, 1000, 1, 3).select(
        (number % 5).cast("int").alias("dest"),
        (number % 7 % 2).alias("revision"),
        (number % 3).alias("src"),
        (999 - number).alias("seq"),
        F.lit("x").alias("payload"),
    )
    plain = columns().exchange(frames, 7)
    anchored = columns().exchange(frames, 7, anchors.of(spark, 7))

    assert anchored.columns == plain.columns
    assert exchange_count(plain) == 1
    assert exchange_count(anchored) == 2, "one is the anchor's own, which is computed once"
    assert anchored.rdd.getNumPartitions() == 7
    found = [part.glom().collect() for part in (plain.rdd, anchored.rdd)]
    assert found[0] == found[1]
    for partition, rows in enumerate(found[1]):
        assert {row.dest for row in rows} == ({partition} if partition < 5 else set())
        keys = [tuple(row[name] for name in FRAME_ORDER) for row in rows]
        assert keys == sorted(keys)


def test_an_anchor_costs_one_call_an_exchange_and_changes_no_result(
    spark: Any, pinned: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Anchors, "are_useful", lambda self, executors: True)
    expected, found = MemorySink(), MemorySink()
    run_local(flow_of(tmp_path / "local", expected), checkpoint=str(tmp_path / "l"))
    with commands_sent() as sent:
        run_spark(flow_of(tmp_path / "out", found), spark, checkpoint=str(tmp_path / "c"), partitions=2)

    marks = [i for i, command in enumerate(sent) if f"setLocalProperty\ns{RUN_PROPERTY}\ns" in command]
    counts = [after - before for before, after in pairwise(marks)]
    assert max(counts[2:]) <= CALLS_OF_AN_EPOCH + 2, sent[marks[-2] : marks[-1]]
    assert in_order(found) == in_order(expected)


@pytest.mark.usefixtures("without_adaptive_execution")
def test_anchors_are_kept_apart_and_freed(spark: Any, anchors: Anchors, pinned: None) -> None:
    other = Anchors(spark)
    for each in (anchors, other):
        for partitions in (2, 3):
            anchor = each.of(spark, partitions)
            assert anchor is not None
            assert anchor.count() == partitions
            assert each.of(spark, partitions) is anchor
    assert kept_data(spark) == 4
    other.close()
    assert kept_data(spark) == 2, "another job with as many partitions keeps its own"
    anchors.keep([3, 4])
    assert kept_data(spark) == 1
    assert anchors.propose(spark, 3) == dict.fromkeys(range(3), "driver")
    assert anchors.propose(spark, 3) == dict.fromkeys(range(3), "driver")
    assert kept_data(spark) == 2, "the newest proposal counts"
    before = anchors.of(spark, 3)
    anchors.adopt(3)
    anchors.adopt(3)
    anchors.keep([3, 4])
    assert anchors.of(spark, 3) is not before
    anchors.propose(spark, 5)
    anchors.adopt(5)
    anchors.keep([3])
    assert kept_data(spark) == 2, "what was adopted and not yet read is for the next configuration"
    anchors.of(spark, 5)
    anchors.keep([3])
    assert kept_data(spark) == 1
    anchors.close()
    assert kept_data(spark) == 0
    assert anchors.of(spark, 3) is None, "the job is over"


@pytest.mark.usefixtures("without_adaptive_execution")
def test_a_single_partition_has_no_anchor(spark: Any, anchors: Anchors) -> None:
    """Spark would join it with one by hashes, and give its rows to whatever partition these say."""
    assert anchors.of(spark, 1) is None
    assert anchors.propose(spark, 1) == {}
    assert kept_data(spark) == 0
    assert anchors.of(spark, 2) is not None


def test_one_executor_needs_no_anchor_and_several_need_a_setting(
    spark: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = Anchors(spark)
    assert not lacking.are_useful(TWO[:1])
    assert caplog.messages == []
    assert not lacking.are_useful(TWO)
    assert not lacking.are_useful(TWO)
    assert len(caplog.messages) == 1
    assert f"{REDUCE_LOCALITY}=false" in caplog.text
    assert lacking.of(spark, 2) is None
    assert lacking.propose(spark, 2) == {}
    with monkeypatch.context() as having:
        having.setattr(anchors_module, "pins_partitions", lambda spark: True)
        assert Anchors(spark).are_useful(TWO)
        assert not Anchors(spark).are_useful(TWO[:1])


def test_a_spark_that_plans_another_exchange_is_not_given_anchors(
    spark: Any, anchors: Anchors, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = iter([3, 1])
    monkeypatch.setattr(anchors_module, "exchange_count", lambda rows: next(counts))
    assert anchors.of(spark, 2) is None
    assert "this version of Spark plans 2 exchanges where 1 was expected" in caplog.text
    assert not anchors.are_useful(TWO)


def test_without_a_cluster_the_driver_is_the_executor(spark: Any) -> None:
    assert live_executors(spark) == {"driver"}


@pytest.mark.parametrize(
    ("offers", "used", "tries"), [(["aaaa", "aaab", "abab", "baba"], "abab", 3), (["aaab"] * 9, "aaab", 6)]
)
def test_anchors_are_computed_until_one_is_even(
    offers: list[str], used: str, tries: int, spark: Any, anchors: Anchors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark places partitions as tasks happen to end; here, as a test says."""
    computed = anchors_module._computed
    made: list[Any] = []

    def offered(session: Any, partitions: int) -> Any:
        places = {PartitionId(n): ExecutorId(name) for n, name in enumerate(offers[len(made)])}
        made.append(replace(computed(session, partitions), places=places))
        return made[-1]

    monkeypatch.setattr(anchors_module, "_computed", offered)
    monkeypatch.setattr(anchors_module, "live_executors", lambda spark: {ExecutorId("a"), ExecutorId("b")})
    assert "".join(anchors.propose(spark, 4).values()) == used
    assert len(made) == tries
    assert kept_data(spark) == 1, "the others are forgotten"
