"""The driver of a round of plan changes: ``python -m tests.chaos.plan_job FOLDER MASTER``.

It changes the plan of SMQ, one random change after the other, while its processes are killed. How many changes there
are is in a file of the folder. Started again in the same folder, it goes on with the plan that is in force.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from benchmarks.workloads import smq
from midstream import FileSink
from midstream.checkpoint.change_records import Outcome
from midstream.flow.model import Graph
from midstream.runtime.spark.job import Job
from tests.chaos.job import PARTITIONS, session

RATE = 2_000
COST_US = 100.0
CHANGES = "changes"
"""The file that says how many changes there are to be."""
NTHS = (1, 2, 5, 10)
OUTCOME_S = 180.0
KEPT = 100_000
"""Epochs that Spark's log keeps, so that the oracle can read how far each one went."""


def plan_of(graph: Graph) -> smq.Plan:
    """The plan that a job has."""
    nth = graph.payloads["every"].nth if "every" in graph else 1
    return smq.Plan(nth, "tally" in graph)


def another(plan: smq.Plan, rng: random.Random) -> smq.Plan:
    """Any other plan: a filter that comes, goes or gets another function, a second counter that comes or goes, or all
    of it at once."""
    others = [smq.Plan(nth, has) for nth in NTHS for has in (False, True)]
    return rng.choice([each for each in others if each != plan])


def note(plan: smq.Plan) -> str:
    """How a change's record says which plan it leads to."""
    return f"{plan.nth} {plan.has_tally}"


def noted(text: str) -> smq.Plan:
    """The plan of a :func:`note`."""
    nth, has_tally = text.split()
    return smq.Plan(int(nth), has_tally == "True")


def applied(job: Job) -> int:
    """The number of changes so far."""
    return sum(record.outcome is Outcome.APPLIED for record in job.history())


def main(place: str, master: str) -> None:
    """Run and change the job until there were enough changes."""
    folder, spark = Path(place), session(master)
    spark.conf.set("spark.sql.streaming.minBatchesToRetain", KEPT)
    wanted, rng = int((folder / CHANGES).read_text()), random.Random()
    source = smq.numbers(RATE, partitions=PARTITIONS)
    job = smq.flow(source, FileSink(folder / "out", merge=False), COST_US).start(
        spark, checkpoint=str(folder / "checkpoint"), partitions=PARTITIONS
    )
    while applied(job) < wanted:
        if (change := job.on_trial) is None:
            before = plan_of(job.graph)
            after = another(before, rng)
            change = job.update(*smq.Change(before, after).edits(), note=note(after))
        change.wait(OUTCOME_S)
        job.await_termination(rng.random() * 0.2)  # raises if it has failed
    job.await_epoch(job.metrics.epochs + 1)
    job.stop()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
