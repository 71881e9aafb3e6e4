"""Jobs on a small cluster, each run by a driver of its own, that print what tests of placement look at."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstream import Flow, ListSource, MemorySink, local_session
from midstream.control.messages import PrefetchRequest
from midstream.ids import BinId, ExecutorId, PartitionId, StageIndex
from midstream.planner.assignment import spread
from midstream.runtime.spark.job import Job
from midstream.state.access import StateAccess
from midstream.state.lineage import Lineage

KEYS = 40
COUNT = Lineage.start("count")
PARTITIONS = 4
PATIENCE_S = 180.0


class Placed:
    """Counts the rows of a key, and says where: on which executor, in which process."""

    def __call__(self, key: Any, row: Any, state: Any) -> dict[str, Any]:
        state.set(state.get(0) + 1)
        # Executors of such a cluster have folders that are named by their ids.
        return {**row, "count": state.get(), "executor": Path.cwd().name, "java": _java()}


def _java() -> int:
    """The Java process of this executor."""
    daemon = os.getppid()
    return int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])


def flow_of(epochs: int) -> tuple[Flow, MemorySink]:
    data = [[{"user": f"u{n}", "epoch": epoch} for n in range(KEYS)] for epoch in range(epochs)]
    flow, out = Flow("placed"), MemorySink()
    rows = flow.source("rows", ListSource(data, "user string, epoch bigint"))
    placed = rows.key_by("by user", "user").process(
        "count", Placed(), returns="user string, epoch bigint, count bigint, executor string, java bigint"
    )
    placed.sink("out", out)
    return flow, out


@contextmanager
def cluster(executors: str = "2", **conf: str) -> Iterator[Any]:
    spark = local_session(f"local-cluster[{executors},1,1024]", conf)
    try:
        yield spark
    finally:
        spark.stop()


def executors_by_epoch(out: MemorySink) -> list[dict[str, str]]:
    """By epoch, where each key was."""
    epochs: dict[int, dict[str, str]] = {}
    for row in out.rows:
        epochs.setdefault(row["epoch"], {})[row["user"]] = row["executor"]
    return [epochs[epoch] for epoch in sorted(epochs)]


def is_exact(out: MemorySink, epochs: int) -> bool:
    """Whether each key was counted from 1 to the last epoch, once each."""
    found = Counter((row["user"], row["epoch"], row["count"]) for row in out.rows)
    return found == Counter((f"u{n}", epoch, epoch + 1) for n in range(KEYS) for epoch in range(epochs))


def told(job: Job) -> list[dict[str, Any]]:
    return [{"name": each.name, "partitions": each.partitions, "bins": each.bins} for each in job.executors]


def stay(folder: str, reduce_locality: str) -> None:
    """A run of twelve epochs."""
    flow, out = flow_of(12)
    conf = {"spark.shuffle.reduceLocality.enabled": reduce_locality}
    with cluster(**conf) as spark:
        job = flow.start(spark, checkpoint=f"{folder}/checkpoint", trigger="available-now", partitions=PARTITIONS)
        assert job.await_termination(PATIENCE_S)
        kept = spark.sparkContext._jsc.getPersistentRDDs().size()
        result = {
            "exact": is_exact(out, 12),
            "where": executors_by_epoch(out),
            "executors": told(job),
            "read": [each.state_read for each in job.progress],
            "ms": [round(each.duration_ms) for each in job.progress],
            "kept": kept,
        }
    print(json.dumps(result))


def lose(folder: str) -> None:
    """An executor is killed during a run."""
    epochs = 24
    flow, out = flow_of(epochs)
    with cluster() as spark:
        job = flow.start(spark, checkpoint=f"{folder}/checkpoint", trigger="available-now", partitions=PARTITIONS)
        assert job.await_epoch(5, PATIENCE_S)
        before = told(job)
        victim = next(row for row in out.rows if row["epoch"] == 4)
        os.kill(victim["java"], signal.SIGKILL)
        assert job.await_termination(PATIENCE_S)
        result = {
            "exact": is_exact(out, epochs),
            "where": executors_by_epoch(out),
            "lost": victim["executor"],
            "before": before,
            "after": told(job),
        }
    print(json.dumps(result))


def move(folder: str, ahead: str) -> None:
    """All partitions get other executors where that is possible; before, these have loaded the bins, or not."""
    epochs, many = 40, 20_000
    data = [[{"user": f"u{n}", "epoch": epoch} for n in range(many if epoch < 2 else KEYS)] for epoch in range(epochs)]
    flow, out = Flow("placed"), MemorySink()
    rows = flow.source("rows", ListSource(data, "user string, epoch bigint"))
    rows.key_by("by user", "user").process(
        "count", Placed(), returns="user string, epoch bigint, count bigint, executor string, java bigint"
    ).sink("out", out)
    stage = StageIndex(1)
    with cluster() as spark:
        job = flow.start(spark, checkpoint=f"{folder}/checkpoint", trigger="available-now", partitions=PARTITIONS)
        assert job.await_epoch(4, PATIENCE_S)
        edge, driver = job._heartbeat, job._heartbeat._driver
        before = driver.placement.of(stage)
        places = before
        while places == before:
            places = edge.propose_places(PARTITIONS)
        bins = {name: owned_by(places, name) for name in set(places.values())}
        warm_after = 0
        if ahead == "true":
            driver.prefetch([PrefetchRequest(name, stage, numbers, 50_000_000) for name, numbers in bins.items()])
            while not all(set(numbers) == driver.placement.warmth(name, stage).bins for name, numbers in bins.items()):
                warm_after += 1
                assert job.await_epoch(job.metrics.epochs + 1, PATIENCE_S)
        edge.adopt_places(PARTITIONS)
        flipped = job.metrics.epochs
        loaded = {name: driver.placement.warmth(name, stage).bytes for name in bins}
        driver.prefetch([])
        assert job.await_epoch(flipped + 8, PATIENCE_S)
        held = {
            path.parent.parent.parent.name: sorted(
                StateAccess(job.id, "", str(path.parent)).held(Lineage.start("count"))
            )
            for path in Path(os.environ["SPARK_HOME"], "work").glob(f"app-*/*/midstream-state/{job.id}/count")
        }
        after = driver.placement.of(stage)
        assert job.await_termination(PATIENCE_S)
        result = {
            "exact": Counter((row["user"], row["epoch"], row["count"]) for row in out.rows)
            == Counter((row["user"], epoch, epoch + 1) for epoch in range(epochs) for row in data[epoch]),
            "before": before,
            "places": places,
            "after": after,
            "owned": {name: sorted(owned_by(after, ExecutorId(name))) for name in held},
            "held": held,
            "read": [each.state_read for each in job.progress],
            "ms": [round(each.duration_ms) for each in job.progress],
            "flipped": flipped,
            "warm after": warm_after,
            "loaded": loaded,
        }
    print(json.dumps(result))


def owned_by(places: Mapping[PartitionId, ExecutorId], name: ExecutorId) -> tuple[BinId, ...]:
    """The bins of the partitions on an executor."""
    return tuple(n for partition, at in places.items() if at == name for n in spread(PARTITIONS).owned_by(partition))
