"""Jobs whose state moves between executors while some of these are drained, killed and added, each run by a driver of
its own. They print what the tests look at."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.executors import resize
from midstream import Controller, FileSink, Flow, ListSource, MemorySink, Outcome, Proposal, Situation, local_session
from midstream.controllers.controller import Executors
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.data.hashing import bins_of as bins_of_hashes
from midstream.data.hashing import hash_columns
from midstream.errors import FlowError
from midstream.runtime.spark.job import Job
from midstream.state.access import StateAccess
from midstream.state.lineage import Lineage
from tests.spark.placement_jobs import KEYS, Placed, cluster, flow_of

PATIENCE_S = 180.0
BINS = 32
OCCUPIED = set(
    bins_of_hashes(
        hash_columns(pa.RecordBatch.from_pydict({"user": [f"u{n}" for n in range(KEYS)]}), ["user"]), BINS
    ).tolist()
)
"""The bins in which there are keys."""
EPOCHS = 600
"""More than any of these jobs runs."""
COUNTED = "user string, number bigint, count bigint, executor string, java bigint"


def start(spark: Any, folder: str, partitions: int) -> tuple[Job, MemorySink]:
    flow, out = flow_of(EPOCHS)
    return flow.start(spark, checkpoint=f"{folder}/checkpoint", partitions=partitions, bins=BINS), out


def wait_epochs(job: Job, count: int) -> None:
    assert job.await_epoch(job.metrics.epochs + count, PATIENCE_S)


def is_exact(job: Job, out: MemorySink) -> bool:
    """Whether each key was counted from 1 to the last epoch, once each, as a plain count says."""
    epochs = job.progress[-1].epoch + 1  # the one after that may have been given up
    found = Counter((row["user"], row["epoch"], row["count"]) for row in out.rows if row["epoch"] < epochs)
    return found == Counter((f"u{n}", epoch, epoch + 1) for n in range(KEYS) for epoch in range(epochs))


def java_of(out: MemorySink, executor: str) -> int:
    """The newest process of an executor."""
    return int([row["java"] for row in out.rows if row["executor"] == executor][-1])


def bins_of(job: Job) -> dict[str, int]:
    return {each.name: sum(each.bins.values()) for each in job.executors}


def held(job: Job) -> dict[str, list[int]]:
    """The bins of which each executor has a copy."""
    return {
        path.parent.parent.parent.name: sorted(
            StateAccess(job.id, "", str(path.parent)).held(Lineage.start("count", BINS))
        )
        for path in Path(os.environ["SPARK_HOME"], "work").glob(f"app-*/*/midstream-state/{job.id}/count")
    }


def drain(folder: str) -> None:
    """One of three executors is drained and taken away, then another; the last one cannot be."""
    with cluster("3") as spark:
        job, out = start(spark, folder, 6)
        wait_epochs(job, 5)
        before = bins_of(job)
        drained = job.drain("0", strategy="batched").require(PATIENCE_S)
        wait_epochs(job, 8)
        result: dict[str, Any] = {
            "before": before,
            "after": bins_of(job),
            "held": held(job),
            "steps": len(drained.steps),
        }
        try:
            job.drain("0")
        except FlowError as error:
            result["again"] = str(error)
        runs = len(job.progress)
        resize(spark, 2, keep=("1", "2"))
        wait_epochs(job, 5)
        result["taken away"] = bins_of(job)
        job.drain("1", strategy="sudden").require(PATIENCE_S)
        resize(spark, 1, keep=("2",))
        wait_epochs(job, 5)
        result["last"] = bins_of(job)
        for name in ("2", "7"):
            try:
                job.drain(name)
            except FlowError as error:
                result[f"drain {name}"] = str(error)
        moved_before = job.assignment()[0].owners
        wait_epochs(job, 2)
        result["unchanged"] = job.assignment()[0].owners == moved_before
        assert runs
        job.stop()
        result |= {"exact": is_exact(job, out), "failed": [str(one.outcome) for one in job.history()]}
    print(json.dumps(result))


def kill_in_mid_drain(folder: str, who: str) -> None:
    """The giver, or a taker, is killed between two steps, and once more within the epoch of one."""
    with cluster("3") as spark:
        job, out = start(spark, folder, 6)
        wait_epochs(job, 5)
        leaving = bins_of(job)["0"]
        migration = job.drain("0", strategy="fluid", prewarm=who == "taker")
        assert migration.wait_step(2, PATIENCE_S)
        victim = "0" if who == "giver" else "1"
        os.kill(java_of(out, victim), signal.SIGKILL)
        outcome = migration.wait(PATIENCE_S)
        wait_epochs(job, 5)
        job.stop()
        print(
            json.dumps(
                {
                    "exact": is_exact(job, out),
                    "outcome": str(outcome),
                    "error": migration.error,
                    "steps": len(migration.steps),
                    "leaving": leaving,
                    "executors": bins_of(job),
                }
            )
        )


def join_in_mid_migration(folder: str) -> None:
    """An executor joins while bins move; a rebalance gives it its part."""
    with cluster("3") as spark:
        resize(spark, 2)
        job, out = start(spark, folder, 6)
        wait_epochs(job, 5)
        began = bins_of(job)
        migration = job.rescale(4, strategy="fluid")
        assert migration.wait_step(2, PATIENCE_S)
        resize(spark, 3)
        migration.require(PATIENCE_S)
        wait_epochs(job, 2)
        joined = {each.name: sum(map(len, each.partitions.values())) for each in job.executors}
        job.rescale(6, strategy="sudden").require(PATIENCE_S)
        wait_epochs(job, 2)
        rescaled = {each.name: sum(map(len, each.partitions.values())) for each in job.executors}
        # As it may be after a start: Spark placed partitions while one executor was not there yet.
        job.stop()
        print(json.dumps({"exact": is_exact(job, out), "began": began, "joined": joined, "rescaled": rescaled}))


def to_one_and_back(folder: str) -> None:
    """A stage on two executors gets a single partition, then three."""
    with cluster("2") as spark:
        job, out = start(spark, folder, 4)
        wait_epochs(job, 4)
        found = []
        for partitions in (1, 3):
            job.rescale(partitions, strategy="sudden").require(PATIENCE_S)
            wait_epochs(job, 3)
            found.append([share.bins for share in job.assignment()[0].partitions])
        job.stop()
        print(json.dumps({"exact": is_exact(job, out), "bins": found}))


def go_on(folder: str) -> None:
    """Rescale step by step, or go on with that, and say so after each step; the test kills this driver at some."""
    data = [[{"user": f"u{n}", "number": epoch} for n in range(KEYS)] for epoch in range(EPOCHS)]
    flow, out = Flow("moving"), f"{folder}/out"
    rows = flow.source("rows", ListSource(data, "user string, number bigint"))
    rows.key_by("by user", "user").process("count", Placed(), returns=COUNTED).sink("out", FileSink(out))
    spark = local_session("local[2]")
    checkpoint = f"{folder}/checkpoint"
    first = not Path(checkpoint).exists()  # a start that names a number of partitions would end the migration
    job = flow.start(spark, checkpoint=checkpoint, partitions=2 if first else None, bins=BINS)
    print("pending", len(job.migrations), flush=True)
    if not job.history():
        wait_epochs(job, 2)
        job.rescale(6, strategy="fluid")
    migration = job.migrations[0] if job.migrations else None
    for step in itertools.count(1):
        if migration is None or not migration.wait_step(step, PATIENCE_S):
            break
        print("step", step, flush=True)
    wait_epochs(job, 2)
    job.stop()
    [record] = job.history()
    assert record.outcome is Outcome.APPLIED
    print("last epoch", job.progress[-1].epoch, len(job.assignment()[0].partitions))
    spark.stop()


@dataclass(frozen=True)
class Wants(Controller):
    """Wants these numbers of executors, one after the other."""

    counts: tuple[int, ...]

    def first(self) -> Any:
        return self.counts

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        left = memory[1:] if memory and seen.executors == memory[0] else memory
        if seen.in_progress is not None or not left:
            return (), left
        return [Proposal(Executors(left[0]), "a test")], left


def ask_and_give_back(folder: str) -> None:
    """A controller gives one of three executors back, asks for another one, and gives back two, one with bins."""
    with cluster("3") as spark:
        job, out = start(spark, folder, 2)
        wait_epochs(job, 5)
        before = bins_of(job)
        job.attach(Wants((2, 3, 1)))
        deadline = time.monotonic() + PATIENCE_S
        while len(done := applied(job)) < 3 and time.monotonic() < deadline:
            wait_epochs(job, 1)
        wait_epochs(job, 5)
        result = {
            "before": before,
            "left": bins_of(job),
            "applied": done,
            "failed": [each.error for each in job.proposals() if each.outcome is ProposalOutcome.FAILED],
            "history": [(each.by, str(each.outcome)) for each in job.history()],
        }
        job.stop()
        print(json.dumps({**result, "exact": is_exact(job, out)}))


def applied(job: Job) -> list[str]:
    return [each.operation for each in job.proposals() if each.outcome is ProposalOutcome.APPLIED]
