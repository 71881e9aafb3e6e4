"""SMQ under a constant load while its plan is changed, live and by restarts: what ``benchmarks.plan_changes`` measures.

One checkpoint, one sink and one timeline for everything, so that one verdict covers all rows. Run as a module, this is
the driver that is deployed anew: ``python -m benchmarks.plan_timeline CHECKPOINT SINK RATE NTH EPOCHS``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import SparkSession

from benchmarks.changing import GOLDEN, PATIENCE_S
from benchmarks.due_times import Latencies, Timeline, first_due
from benchmarks.sessions import CORES, session
from benchmarks.workloads import smq
from midstream import Constant, FileSink, Flow
from midstream.metrics import EpochProgress
from midstream.runtime.spark.job import Job

__all__ = ["COST_US", "CYCLE", "INSERT", "KEYED", "REDEPLOY", "RESTART", "WITHIN", "Course", "Event", "run"]

COST_US = 100.0
"""What a number costs, beside what the engine does with it."""
LONGEST_S = 3
"""The numbers of an epoch were due within this time at most: a job that is behind catches up in steps."""
ROOT = Path(__file__).parents[1]
WARM_UP = 10
"""Least number of epochs after a start that do not count."""
EVEN, SETTLES = 1.5, 20
"""Epochs are settled once as many as between two changes differ by this factor at most; how often that is looked at."""

FIFTH, TENTH, TALLIED = smq.Plan(nth=5), smq.Plan(nth=10), smq.Plan(has_tally=True)
INSERT, REPLACE, REMOVE = "insert a filter", "replace its function", "remove the filter"
KEYED, UNKEYED = "insert a keyed operator", "remove the keyed operator"
RESTART, REDEPLOY = "stop and start", "a new driver"
CYCLE = {
    INSERT: smq.Change(smq.BASE, FIFTH),
    REPLACE: smq.Change(FIFTH, TENTH),
    REMOVE: smq.Change(TENTH, smq.BASE),
    KEYED: smq.Change(smq.BASE, TALLIED),
    UNKEYED: smq.Change(TALLIED, smq.BASE),
}
"""The changes of a round, in order."""
WITHIN = (INSERT, REPLACE, REMOVE)
"""Those that can take effect within the running epoch."""


@dataclass(frozen=True)
class Event:
    """A change of the plan, by whatever means; times are seconds since 1970."""

    kind: str
    change: smq.Change
    called_at: float
    running: int
    """The epoch that was running then."""
    epoch: int
    """The first one in which the new plan was in effect."""
    in_effect_ms: float | None = None
    """By a stopwatch, from the call until it was in effect in every task; None for a restart."""
    delay_ms: float | None = None
    """The same from when it was checked and stored."""
    met_tasks: bool = False
    """Whether tasks switched in the middle of their work. Otherwise there was nobody to wait for but the epoch."""


@dataclass
class Course:
    """All that happened on one checkpoint."""

    rate: int
    """Numbers that are due each second."""
    timeline: Timeline = field(default_factory=Timeline)
    start_us: int = 0
    events: list[Event] = field(default_factory=list)
    warm: int = WARM_UP
    """The first epoch that counts."""
    verdict: smq.Verdict = field(default_factory=lambda: smq.Verdict(0))
    stamps: np.ndarray[tuple[int], np.dtype[np.float64]] = field(default_factory=lambda: np.empty(0))
    """When rows were worked on, sorted."""

    def length_s(self, epoch: int) -> float:
        """How long an epoch took, from the commit of the one before to its own."""
        return self.timeline.ends[epoch][1] - self.timeline.ends[epoch - 1][1]

    def lengths_s(self, first: int, end: int) -> list[float]:
        """Of the epochs from ``first`` up to, not including, ``end``."""
        return [self.length_s(epoch) for epoch in range(max(first, 1), min(end, len(self.timeline.ends)))]

    def newest_s(self, epochs: int) -> list[float]:
        """The lengths of the newest epochs."""
        return self.lengths_s(len(self.timeline.ends) - epochs, len(self.timeline.ends))

    def latencies(self, first: int, end: int) -> Latencies:
        """Of the rows of these epochs."""
        return self.timeline.latencies(Constant(self.rate), self.start_us, first, end)

    def pause_s(self, since: float, until: float) -> float:
        """The longest time in between for which no row was worked on."""
        begin, end = np.searchsorted(self.stamps, [since, until])
        return float(np.diff(self.stamps[max(begin - 1, 0) : end + 1]).max(initial=0.0))


def script(sink: Path, rate: int, plan: smq.Plan) -> Flow:
    """The flow with this plan, under the load."""
    source = smq.numbers(rate, partitions=CORES, max_rows_per_epoch=rate * LONGEST_S)
    return smq.flow(source, FileSink(sink, merge=False), COST_US, plan)


def run(
    spark: SparkSession, folder: Path, rate: int, rounds: int, calm: int, restarts: int, advance: Callable[[], None]
) -> Course:
    """Make all changes, ``calm`` epochs apart; then restart the job with other scripts, at last in a new driver."""
    checkpoint, sink, course = str(folder / "checkpoint"), folder / "out", Course(rate)
    job = script(sink, rate, smq.BASE).start(spark, checkpoint=checkpoint, partitions=CORES)
    try:
        follow(job, course.timeline, 2)
        course.start_us = first_due(checkpoint)
        course.warm = settle(job, course, calm)
        moment = 0.0
        for _ in range(rounds):
            for kind, change in CYCLE.items():
                moment = (moment + GOLDEN) % 1.0
                time.sleep(moment * statistics.median(course.newest_s(calm)))
                course.events.append(update(job, course.timeline, kind, change))
                follow(job, course.timeline, calm)
                advance()
        plan = smq.BASE
        for _ in range(restarts):
            change = smq.Change(plan, plan := smq.BASE if plan is FIFTH else FIFTH)
            job, event = restart(spark, job, course, change, checkpoint, sink)
            course.events.append(event)
            follow(job, course.timeline, calm)
            advance()
        change = smq.Change(plan, smq.BASE if plan is FIFTH else FIFTH)
        course.events.append(redeploy(job, course, change, checkpoint, sink, calm))
        advance()
    finally:
        job.stop()
    check(course, sink)
    return course


def follow(job: Job, timeline: Timeline, epochs: int) -> None:
    """Let the job run for some epochs."""
    if not job.await_epoch(job.metrics.epochs + epochs, PATIENCE_S):
        raise RuntimeError(f"the job is {job.status}: it has not committed {epochs} epochs in {PATIENCE_S:.0f} s")
    timeline.add(job.progress)


def settle(job: Job, course: Course, calm: int) -> int:
    """Let the job run until it has caught up with the load, and return how many epochs that took."""
    follow(job, course.timeline, WARM_UP)
    for _ in range(SETTLES):
        warm = len(course.timeline.ends)
        follow(job, course.timeline, calm)
        lengths = course.newest_s(calm)
        if max(lengths) <= EVEN * min(lengths):
            break
    return warm


def update(job: Job, timeline: Timeline, kind: str, change: smq.Change) -> Event:
    """Change the plan live, and wait until the change is applied."""
    timeline.add(job.progress)
    called_at, began = time.time(), time.perf_counter()
    made = job.update(*change.edits())
    made.wait_effect(PATIENCE_S)
    in_effect_ms = 1000 * (time.perf_counter() - began)
    record = made.require(PATIENCE_S).record
    assert record.epoch is not None
    return Event(
        kind,
        change,
        called_at,
        len(timeline.ends),
        record.epoch,
        in_effect_ms,
        record.delay_ms,
        met_tasks=any(event.what == "switched" for event in made.events),
    )


def restart(
    spark: SparkSession, job: Job, course: Course, change: smq.Change, checkpoint: str, sink: Path
) -> tuple[Job, Event]:
    """Stop the job, and start the other script on its checkpoint in this driver, where everything is warm."""
    timeline = course.timeline
    timeline.add(job.progress)
    called_at, running = time.time(), len(timeline.ends)
    job.stop()
    timeline.add(job.progress)
    again = script(sink, course.rate, change.after).start(
        spark, checkpoint=checkpoint, partitions=CORES, changes="drop"
    )
    return again, Event(RESTART, change, called_at, running, len(timeline.ends))


def redeploy(job: Job, course: Course, change: smq.Change, checkpoint: str, sink: Path, epochs: int) -> Event:
    """Stop the job, and start the other script in another process, with a JVM, Spark and workers of its own."""
    timeline = course.timeline
    timeline.add(job.progress)
    called_at, running = time.time(), len(timeline.ends)
    job.stop()
    timeline.add(job.progress)
    event = Event(REDEPLOY, change, called_at, running, len(timeline.ends))
    told = (checkpoint, sink, course.rate, change.after.nth, epochs)
    command = [sys.executable, "-m", "benchmarks.plan_timeline", *map(str, told)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"the new driver ended with {ended.returncode}:\n{ended.stderr.decode()[-4000:]}")
    timeline.add(msgspec.json.decode(ended.stdout.splitlines()[-1], type=list[EpochProgress]))
    return event


def check(course: Course, sink: Path) -> None:
    """Judge all rows of committed epochs."""
    rows = ds.dataset(sink, exclude_invalid_files=True).to_table()
    ends = [end for end, _ in course.timeline.ends.values()]
    changes = [(event.change, event.epoch) for event in course.events]
    course.verdict = smq.verdict(rows.filter(pc.less(rows["n"], ends[-1])), ends, changes, partitions=CORES)
    course.stamps = np.sort(rows["at"].to_numpy())


def main() -> None:
    """Be the new driver; its last line has its epochs."""
    checkpoint, sink, rate, nth, epochs = sys.argv[1:]
    flow = script(Path(sink), int(rate), smq.Plan(nth=int(nth)))
    with session() as spark, flow.start(spark, checkpoint=checkpoint, partitions=CORES, changes="drop") as job:
        job.await_epoch(int(epochs), PATIENCE_S)
        job.stop()
        print(msgspec.json.encode(job.progress).decode(), flush=True)


if __name__ == "__main__":
    main()
