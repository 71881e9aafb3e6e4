"""State moves while a job runs on Spark: stages of its plan get other partitions; nothing is lost or doubled."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark import TaskContext

from midstream import Flow, ListSource, MemorySink, Outcome, Update
from tests.spark.conftest import PATIENCE_S

EPOCHS, ROWS = 400, 60
DATA = [[{"id": ROWS * epoch + i, "k": f"user {(7 * epoch + i) % 50}"} for i in range(ROWS)] for epoch in range(EPOCHS)]


def numbered(key: Any, row: Any, state: Any) -> dict[str, Any]:
    state.set(state.get(0) + 1)
    context = TaskContext.get()  # none in preflight, on the driver
    return {**row, "n": state.get(), "partition": -1 if context is None else context.partitionId()}


def numbered_anew(key: Any, row: Any, state: Any) -> dict[str, Any]:
    return numbered(key, row, state)


def flow_to(out: MemorySink) -> Flow:
    flow = Flow("counts")
    rows = flow.source("in", ListSource(DATA, "id bigint, k string", partitions=2))
    rows.key_by("by user", "k").process("count", numbered, returns="id bigint, k string, n int, partition int").sink(
        "out", out
    )
    return flow


def assert_gapless(rows: list[Any]) -> None:
    """Every row of the epochs that were run is there once, and each user has counted its rows without a gap."""
    ids = sorted(row["id"] for row in rows)
    assert ids == list(range(len(ids)))
    numbers: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        numbers[row["k"]].append(row["n"])
    assert all(sorted(found) == list(range(1, len(found) + 1)) for found in numbers.values())


def partitions_of(out: MemorySink, epoch: int) -> set[int]:
    return set(out.tables[epoch].column("partition").to_pylist())


@pytest.mark.spark
@pytest.mark.timeout(4 * PATIENCE_S)
def test_a_job_is_rescaled_up_and_down_under_load_and_goes_on_after_a_restart(spark: Any, tmp_path: Path) -> None:
    """2 → 3 → 1 partitions (M11), with a change of the function in between; the last steps in another start (M10)."""
    out = MemorySink()
    checkpoint = str(tmp_path / "c")
    with flow_to(out).start(spark, checkpoint=checkpoint, partitions=2) as job:
        assert job.await_epoch(3, PATIENCE_S)
        up = job.rescale(3, strategy="batched")
        assert up.wait_step(3, PATIENCE_S)
        change = job.update(Update("count", numbered_anew))
        up.cancel()
        assert up.wait(PATIENCE_S) is Outcome.STOPPED
        sudden = job.rescale(3, strategy="sudden")
        assert sudden.wait(PATIENCE_S) is Outcome.APPLIED
        assert change.wait(PATIENCE_S) is Outcome.APPLIED
        down = job.rescale(1, strategy="fluid", prewarm=False)
        assert down.wait_step(2, PATIENCE_S)
        shares = job.assignment()[0]
        assert len(shares.partitions) == 3
        assert job.exception is None
    assert down.outcome is Outcome.PENDING
    last = max(out.tables)
    assert partitions_of(out, 0) == {0, 1}
    assert partitions_of(out, last) == {0, 1, 2}
    with flow_to(out).start(spark, checkpoint=checkpoint) as job:
        [going_on] = job.migrations
        assert going_on.number == down.number
        assert going_on.wait_step(2, PATIENCE_S)
        going_on.cancel()
        going_on.wait(PATIENCE_S)
        assert job.rescale(1, strategy="sudden").wait(PATIENCE_S) is Outcome.APPLIED
        assert job.await_epoch(job.metrics.epochs + 2, PATIENCE_S)
    assert partitions_of(out, max(out.tables)) == {0}
    assert_gapless(out.rows)
    assert [str(record.outcome) for record in job.history()] == ["stopped", "applied", "applied", "stopped", "applied"]
    steps = [step for record in job.history() if record.migration for step in record.migration.steps]
    assert all(step.epoch_ms > 0 and step.step_ms > 0 for step in steps)
    print("ms per step", [step.step_ms for step in steps])


@pytest.mark.slow
@pytest.mark.timeout(8 * PATIENCE_S)
def test_the_example_of_moved_state_misnumbers_no_visit(spark: Any, capsys: Any) -> None:
    from examples.moving_state import main

    assert main(spark) == []
    assert "4 partitions: 128 bins moved in 8 steps" in capsys.readouterr().out
