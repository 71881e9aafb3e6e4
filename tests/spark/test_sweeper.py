"""Sweeping during the epochs of a real job: failures stop nothing, and files that a preflight reads stay."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, NoopSink, State, Update
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.journals import KEPT_JOURNALS
from midstream.checkpoint.sweeper import RETRY_EVERY
from midstream.state.lineage import MERGED_AT_ONCE

WAIT_S = 180.0


def counting(spark: Any) -> Flow:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).option("numPartitions", 1)
    flow = Flow("counting")
    keyed = flow.source("in", source.load().selectExpr("value % 5 AS k")).key_by("key", "k")
    keyed.process("count", count, returns="k bigint, n bigint").sink("out", NoopSink())
    return flow


def count(key: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    state.set(state.get(0) + 1)
    return {**row, "n": state.get()}


class Slow:
    """A function that is slow to open."""

    def __init__(self, gate: Any) -> None:
        self.pass_through = gate.pass_through

    def open(self) -> None:
        self.pass_through()

    def __call__(self, key: int, row: dict[str, Any], state: State) -> dict[str, Any]:
        assert state.get(0) > 0, "it is tried on the state of the sample's keys"
        return count(key, row, state)


@pytest.mark.slow
def test_a_job_continues_when_files_cannot_be_removed_and_removes_them_later(spark: Any, tmp_path: Path):
    with counting(spark).start(spark, checkpoint=str(tmp_path), partitions=1) as job:
        assert job.await_epoch(1, WAIT_S)
    # A folder in place of a file: not even root can unlink it.
    folders = [tmp_path / "journal" / f"{number:010d}.0" for number in range(KEPT_JOURNALS + 3)]
    for folder in folders:
        folder.mkdir(parents=True)
    with counting(spark).start(spark, checkpoint=str(tmp_path), partitions=1) as job:
        assert job.await_epoch(3, WAIT_S)
        sweep = job.metrics.sweep
        assert sweep.overdue == 3
        assert sweep.failed >= 3
        assert "journal" in str(sweep.error)
        for folder in folders:
            shutil.rmtree(folder)
            folder.touch()
        assert job.await_epoch(3 + 2 * RETRY_EVERY, WAIT_S)
        assert job.metrics.sweep.overdue == 0
    assert sum(folder.exists() for folder in folders) == KEPT_JOURNALS


@pytest.mark.slow
def test_preflight_keeps_its_state_files_while_a_function_is_opened(spark: Any, tmp_path: Path, gate: Any):
    outcomes: list[Outcome] = []
    with counting(spark).start(spark, checkpoint=str(tmp_path), partitions=1) as job:
        assert job.await_epoch(2, WAIT_S)
        thread = threading.Thread(target=lambda: outcomes.append(job.update(Update("count", Slow(gate))).wait(WAIT_S)))
        thread.start()
        gate.arrive()
        before = job.metrics.epochs
        # By then the sample's files have been merged into others, and swept.
        assert job.await_epoch(before + 2 * MERGED_AT_ONCE, WAIT_S)
        gate.open()
        thread.join()
        assert outcomes == [Outcome.APPLIED]
