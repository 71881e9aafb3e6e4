"""The workers, the driver and the checkpoint of a job do not grow with repeated changes."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from midstream import Flow, NoopSink, Update
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.retention import KEPT_REVISIONS
from midstream.errors import FlowError

MB = 1 << 20
UPDATES = 200
TABLE_EVERY = 4
WARM_UP = 30
UPDATE_BYTES = 6 * MB
WAIT_S = 180.0


class Model:
    """A model of 5 MB that shares nothing with others: most of it one array, the rest small objects, in a cycle."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.weights = generator.random(4 * MB // 8)
        self.names = {f"{seed} {n}": float(n) for n in range(10_000)}
        self.itself = self

    def open(self) -> None:
        self.cache = self.weights[: MB // 8].copy()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "score": float(self.cache[row["k"]])}


def table(seed: int) -> pa.Table:
    """About 5 MB."""
    generator = np.random.default_rng(seed)
    return pa.table({"k": np.arange(320_000), "price": generator.random(320_000)})


def worker_memory() -> dict[int, int]:
    """The resident memory of each of Spark's Python workers, by process id."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.ppid() != os.getpid() and "pyspark.daemon" in " ".join(process.parent().cmdline()):
                found[process.pid] = process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


def size_of(folder: Path) -> int:
    sizes = 0
    for path in folder.rglob("*"):
        try:
            sizes += path.stat().st_size
        except FileNotFoundError:
            continue
    return sizes


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_neither_workers_nor_driver_nor_checkpoint_grow_with_updates(spark: Any, tmp_path: Path):
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).option("numPartitions", 2)
    flow = Flow("growing")
    rows = flow.source("in", source.load().selectExpr("value % 1000 AS k"))
    scored = rows.map("score", Model(0), adds="score double")
    scored.key_by("key", "k").lookup("price", table(0), on="k").sink("out", NoopSink())
    by_worker: list[dict[int, int]] = []
    driver: list[int] = []
    blobs: list[int] = []
    checkpoint: list[int] = []
    with flow.start(spark, checkpoint=str(tmp_path), partitions=2) as job:
        assert job.await_epoch(2, WAIT_S)
        for number in range(1, UPDATES + 1):
            update = Update("price", table(number)) if number % TABLE_EVERY == 0 else Update("score", Model(number))
            assert job.update(update).wait(WAIT_S) is Outcome.APPLIED
            by_worker.append(worker_memory())
            driver.append(psutil.Process().memory_info().rss)
            blobs.append(size_of(tmp_path / "blobs"))
            checkpoint.append(size_of(tmp_path))
        with pytest.raises(FlowError, match="what 'score', 'price' ran at revision 1 is no longer stored"):
            job.revert(1)
        assert job.revert(job.revision - KEPT_REVISIONS).wait(WAIT_S) is Outcome.APPLIED
        assert job.metrics.sweep.failed == 0
    figures = {"workers": [max(each.values()) for each in by_worker], "driver": driver, "blobs": blobs}
    figures["checkpoint"] = checkpoint
    for what, sizes in figures.items():
        print(what, *(f"{size / MB:.0f}" for size in sizes[:: UPDATES // 20]), "MB")
    assert by_worker[WARM_UP].keys() & by_worker[-1].keys(), "the same processes from beginning to end"
    # Each update would leave 5 MB behind, so 500 MB in the second half.
    for what, sizes in figures.items():
        first, second = sizes[WARM_UP : UPDATES // 2], sizes[UPDATES // 2 :]
        assert statistics.median(second) - statistics.median(first) < 20 * MB, what
        assert max(second) - max(first) < 40 * MB, what
    assert max(blobs[UPDATES // 2 :]) <= max(blobs[WARM_UP : UPDATES // 2]) + 2 * UPDATE_BYTES
