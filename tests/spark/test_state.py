"""Keyed state on Spark: it outlives jobs, a failed epoch does not change it, and damage is reported."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstream import FileSink, Flow, ListSource, State, agg
from midstream.change.configuration import configuration_of
from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError, JobFailed
from midstream.ids import StageIndex
from midstream.planner.assignment import Assignment, spread
from midstream.testing import run_spark

Row = dict[str, Any]
WORDS = ["ann", "bob", "cat", "dog", "eve"]
EPOCHS = [[{"word": WORDS[(7 * i + e) % 5], "n": i} for i in range(40)] for e in range(4)]


def count(key: str, row: Row, state: State) -> Row:
    state.set(state.get(0) + 1)
    return {"word": key, "nth": state.get()}


def counting(epochs: list[list[Row]], folder: Path, function: Any = count) -> Flow:
    flow = Flow("counting")
    words = flow.source("words", ListSource(epochs, "word string, n int")).key_by("by word", "word")
    words.process("count", function, returns="word string, nth int").sink("nths", FileSink(folder / "nths"))
    words.aggregate("totals", n=agg.count(), sum=agg.sum("n")).sink("totals out", FileSink(folder / "totals"))
    return flow


def expected(epochs: list[list[Row]]) -> tuple[Counter[tuple[int, str, int]], list[tuple[int, str, int, int]]]:
    """The expected rows of both sinks, counted by hand."""
    seen: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    nths: Counter[tuple[int, str, int]] = Counter()
    totals = []
    for epoch, rows in enumerate(epochs):
        for row in rows:
            seen[row["word"]] += 1
            sums[row["word"]] += row["n"]
            nths[epoch, row["word"], seen[row["word"]]] += 1
        totals += [(epoch, word, seen[word], sums[word]) for word in sorted({row["word"] for row in rows})]
    return nths, totals


def found(spark: Any, folder: Path) -> tuple[Counter[tuple[int, str, int]], list[tuple[int, str, int, int]]]:
    nths = Counter((row.epoch, row.word, row.nth) for row in spark.read.parquet(str(folder / "nths")).collect())
    totals = spark.read.parquet(str(folder / "totals")).collect()
    return nths, sorted((row.epoch, row.word, row.n, row.sum) for row in totals)


@pytest.mark.slow
def test_state_outlives_jobs_and_may_be_spread_over_other_tasks(spark: Any, tmp_path: Path) -> None:
    for epochs, partitions in ((2, 2), (3, 3), (4, 1)):
        job = run_spark(
            counting(EPOCHS[:epochs], tmp_path), spark, checkpoint=str(tmp_path / "c"), partitions=partitions
        )
    assert found(spark, tmp_path) == expected(EPOCHS)
    last = {word: (n, total) for epoch, word, n, total in expected(EPOCHS)[1] if epoch == 3}
    assert {row.word: (row.n, row.sum) for row in job.state("totals").collect()} == last
    values = job.state("count").filter("view = 'value'").collect()
    assert {row.word: int(row.value) for row in values} == {word: n for word, (n, _) in last.items()}


@pytest.mark.slow
def test_stages_continue_with_the_partitions_and_owners_of_the_last_epoch(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def flow_over(epochs: list[list[Row]]) -> Flow:
        flow = Flow("counting")
        words = flow.source("words", ListSource(epochs, "word string, n int")).key_by("by word", "word")
        nths = words.process("count", count, returns="word string, nth int")
        nths.sink("nths", FileSink(tmp_path / "nths"))
        nths.key_by("by nth", "nth").aggregate("per nth", n=agg.count()).sink("out", FileSink(tmp_path / "per nth"))
        return flow

    location = str(tmp_path / "c")
    run_spark(flow_over(EPOCHS[:2]), spark, checkpoint=location, partitions=2)
    checkpoint = Checkpoint.of_any_flow(location)
    before = checkpoint.newest_manifest()
    assert before is not None
    ran = configuration_of(before, checkpoint.blobs)
    assert ran.assignments == {StageIndex(1): spread(2), StageIndex(2): spread(2)}
    # As future moves will leave them: other numbers of partitions per stage, and partitions that own nothing.
    moved = {StageIndex(1): Assignment(3, (2,) * 200 + (0,) * 56), StageIndex(2): Assignment(4, (3, 1) * 128)}
    owners = replace(ran, assignments=moved).store(checkpoint.blobs).owners
    checkpoint.commit(msgspec.structs.replace(before, assignments=owners.digest))
    run_spark(flow_over(EPOCHS[:3]), spark, checkpoint=location)
    assert "continues with 3 and 4 partitions" in caplog.text
    after = checkpoint.newest_manifest()
    assert after is not None
    assert configuration_of(after, checkpoint.blobs).assignments == moved
    run_spark(flow_over(EPOCHS), spark, checkpoint=location, partitions=3)
    last = checkpoint.newest_manifest()
    assert last is not None
    found_last = configuration_of(last, checkpoint.blobs).assignments
    assert found_last == {StageIndex(1): moved[StageIndex(1)], StageIndex(2): spread(3)}, "one had three already"
    nths = Counter((row.epoch, row.word, row.nth) for row in spark.read.parquet(str(tmp_path / "nths")).collect())
    assert nths == expected(EPOCHS)[0]
    totals = [(row.nth, row.n) for row in spark.read.parquet(str(tmp_path / "per nth")).collect()]
    assert max(Counter(totals).values()) == 1, "each total is said once, when a row has come"
    assert dict(sorted(totals)) == Counter(nth for _, _, nth in nths.elements())


@pytest.mark.slow
def test_an_epoch_that_fails_does_not_change_state(spark: Any, tmp_path: Path) -> None:
    def stumble(key: str, row: Row, state: State) -> Row:
        result = count(key, row, state)
        if row["n"] == 39 and state.get() > 8:
            raise ValueError("once is enough")
        return result

    with pytest.raises(JobFailed, match="once is enough") as caught:
        run_spark(counting(EPOCHS, tmp_path, stumble), spark, checkpoint=str(tmp_path / "c"))
    assert (caught.value.operator, caught.value.epoch) == ("count", 1)
    run_spark(counting(EPOCHS, tmp_path), spark, checkpoint=str(tmp_path / "c"))
    assert found(spark, tmp_path) == expected(EPOCHS)


@pytest.mark.slow
def test_a_torn_manifest_is_set_aside_if_spark_has_not_committed_its_epoch(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_spark(counting(EPOCHS[:2], tmp_path), spark, checkpoint=str(tmp_path / "c"))
    (tmp_path / "c" / "epochs" / "0000000001").write_bytes(b"")
    commit = tmp_path / "c" / "spark" / "commits" / "1"
    with pytest.raises(CheckpointError, match=r"the manifest of epoch 1 .* is damaged.*go back to epoch 0, the last"):
        counting(EPOCHS, tmp_path).start(spark, checkpoint=str(tmp_path / "c"))
    commit.write_bytes(b"")  # Spark does not sync it
    run_spark(counting(EPOCHS, tmp_path), spark, checkpoint=str(tmp_path / "c"))
    assert "the manifest of epoch 1" in caplog.text
    assert (tmp_path / "c" / "epochs" / "0000000001.torn").read_bytes() == b""
    assert found(spark, tmp_path) == expected(EPOCHS)


@pytest.mark.slow
def test_a_damaged_state_file_is_reported_and_after_restoring_it_the_job_continues_exactly(
    spark: Any, tmp_path: Path
) -> None:
    run_spark(counting(EPOCHS[:2], tmp_path), spark, checkpoint=str(tmp_path / "c"))
    [victim, *_] = sorted((tmp_path / "c" / "state" / "count").iterdir())
    data = victim.read_bytes()
    victim.write_bytes(data[:-8] + bytes(8))

    # On another disk: with the workers' copies, the job would continue without reading the file.
    flow, elsewhere = counting(EPOCHS, tmp_path), str(tmp_path / "elsewhere")
    with (
        pytest.raises(JobFailed, match=f"the state file 'count/{victim.name}' .* is damaged") as caught,
        flow.start(spark, checkpoint=str(tmp_path / "c"), trigger="available-now", local_state=elsewhere) as job,
    ):
        job.await_termination()
    assert (caught.value.operator, caught.value.epoch) == ("count", 2)

    victim.write_bytes(data)
    run_spark(counting(EPOCHS, tmp_path), spark, checkpoint=str(tmp_path / "c"))
    assert found(spark, tmp_path) == expected(EPOCHS)
