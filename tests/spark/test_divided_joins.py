"""A hot key of a join on Spark: several partitions share its rows, also after a start with another number of them."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from pyspark import TaskContext

from midstream import Divide, Flow, ListSource, MemorySink, Outcome
from midstream.errors import FlowError
from tests.spark.conftest import PATIENCE_S

EPOCHS, LEFT, RIGHT = 300, 12, 2
NEAR = 2
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOT = {"user": "bot"}


def side(name: str, count: int) -> list[list[dict[str, Any]]]:
    return [
        [{**HOT, name: count * epoch + i, f"{name}_at": NOON + timedelta(seconds=epoch)} for i in range(count)]
        for epoch in range(EPOCHS)
    ]


def placed(row: Any) -> dict[str, Any]:
    context = TaskContext.get()
    return {"l": row["l"], "r": row["r"], "partition": -1 if context is None else context.partitionId()}


def flow_to(out: MemorySink, how: str = "inner") -> Flow:
    flow = Flow("shop")
    left = ListSource(side("l", LEFT), "user string, l int, l_at timestamp", event_time="l_at", partitions=2)
    right = ListSource(side("r", RIGHT), "user string, r int, r_at timestamp", event_time="r_at", partitions=2)
    viewers, payers = flow.source("ls", left).key_by("by l", "user"), flow.source("rs", right).key_by("by r", "user")
    both = viewers.join("both", payers, how=how, within=f"{NEAR} seconds")
    both.map("placed", placed, returns="l int, r int, partition int").sink("out", out)
    return flow


def partitions_of(out: MemorySink, epoch: int) -> set[int]:
    return set(out.tables[epoch].column("partition").to_pylist())


@pytest.mark.spark
@pytest.mark.timeout(4 * PATIENCE_S)
def test_a_hot_key_is_shared_and_united_again_after_a_restart(spark: Any, tmp_path: Path) -> None:
    out, checkpoint = MemorySink(), str(tmp_path / "c")
    with flow_to(out).start(spark, checkpoint=checkpoint, partitions=3) as job:
        assert job.await_epoch(3, PATIENCE_S)
        with pytest.raises(FlowError, match="cannot be divided into 4: only 3 partitions"):
            job.migrate(Divide("both", HOT, into=4))
        assert job.migrate(Divide("both", HOT, into=3)).wait(PATIENCE_S) is Outcome.APPLIED
        assert job.await_epoch(job.metrics.epochs + 3, PATIENCE_S)
    assert len(partitions_of(out, 0)) == 1
    assert partitions_of(out, max(out.tables)) == {0, 1, 2}
    with flow_to(out).start(spark, checkpoint=checkpoint, partitions=4) as job:
        assert job.await_epoch(3, PATIENCE_S)
        shared = max(out.tables)
        divided = job.history()[-1]
        back = job.migrate(Divide("both", HOT, into=1))
        assert back.wait(PATIENCE_S) is Outcome.APPLIED
        assert job.await_epoch(job.metrics.epochs + 2, PATIENCE_S)
        again = back.reverse()
        assert again.wait(PATIENCE_S) is Outcome.APPLIED
        assert job.await_epoch(job.metrics.epochs + 2, PATIENCE_S)
    assert divided.outcome is Outcome.APPLIED
    counts = [len(partitions_of(out, epoch)) for epoch in range(shared, max(out.tables) + 1)]
    assert counts[0] > 1, "the division outlasts the start"
    assert [count for count, _ in groupby(counts)] == [counts[0], 1, 3], "united, and divided anew"
    epochs = max(out.tables) + 1
    assert Counter((row["l"], row["r"]) for row in out.rows) == Counter(
        (one, r) for one in range(LEFT * epochs) for r in range(RIGHT * epochs) if abs(one // LEFT - r // RIGHT) <= NEAR
    )
