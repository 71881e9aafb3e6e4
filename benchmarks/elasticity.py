"""The load doubles, and ``AutoScale`` sees it; against stop and start with more partitions (Chi, section 6.3).

Words are counted on two executors of this machine by one partition, with some work for each, so that rows and not
epochs are what it is busy with. After a while twice as many rows are due, 1.2 times what it can count. On one side a
controller is attached that knows nothing of that, but how old rows may be: half again as old as they were. On the other
a script that does stops the job and starts it again with two partitions, as soon after the surge as the controller made
up its mind.

A row's latency is the commit of its epoch minus the time it was due. The spike is the largest latency after the surge,
less the p99 before. At the end every key's count is compared with what the rows that were committed make by arithmetic.

Then an executor is killed in the middle (E-C5), under a load that does not change; Spark starts another one.
PyFlink changes its parallelism by a savepoint, in an environment of its own (``make rivals``, or ``--pyflink PYTHON``;
without it, PyFlink is left out). It runs SMQ, so only how long nothing is worked on can be compared.

    python -m benchmarks.elasticity [--quick] [--plot FILE] [--before S] [--after S] [--pyflink PYTHON]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pyspark.sql import SparkSession

from benchmarks.due_times import Latencies, Timeline, first_due
from benchmarks.report import arguments, closing_line, table
from benchmarks.rivals.flink import Cycle, Missing, find, savepoint_cycles
from benchmarks.sessions import cluster
from benchmarks.word_load import LEAD_S, Load, count, fill, filling, flow, source, state_errors, work
from midstream import AutoScale, Flow, Situation, State, Step
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.runtime.spark.job import Job

EXECUTORS = 2
SHARE = 0.6
"""What is due before the surge, by the work of one partition: it is at that for this share of the time if epochs
cost nothing else. Twice as much is due after the surge."""
WORK = 600
"""Rounds of arithmetic for each word, some 30 µs."""
OURS, RIVAL, KILLED = "AutoScale", "stop and start", "an executor is killed"
KILLED_SHARE = 1.2
"""What is due while an executor is killed, as a multiple of what is due before a surge: two executors serve it well."""
CALM = 1.5
"""Rows are served as in the end if the p99 of a bucket is at most this multiple of that of the last seconds."""
LAST_S = 10.0
LATE, LOOK = 1.5, 5
"""The objective is this multiple of the age of rows before the surge, which is the median of so many epochs."""


@dataclass(frozen=True)
class Size:
    """Keys, bins, rows of an epoch while keys are loaded and how many such epochs there are; seconds before the surge
    and after it."""

    keys: int
    bins: int
    chunk: int
    chunks: int
    before_s: float
    after_s: float


FULL = Size(50_000, 64, 10_000, 5, 40.0, 70.0)
QUICK = Size(5_000, 16, 2_000, 3, 16.0, 12.0)


@dataclass(frozen=True)
class Run:
    """One side."""

    before: Latencies
    after: Latencies
    surge: float
    """When the load doubled."""
    acted_s: float | None
    """Seconds from then until something was done; None if nothing was."""
    partitions: int
    commits: tuple[tuple[float, int], ...]
    """When epochs were committed, and their rows."""
    lost: int
    doubled: int

    @property
    def spike_s(self) -> float:
        """The largest latency after the surge, less what was usual before."""
        return max(1e-3, self.after.max() - self.before.quantile(0.99))

    @property
    def final_p99_s(self) -> float:
        """The p99 of the rows of the last seconds."""
        ending = self.after.due >= self.after.due[-1] - LAST_S
        return float(np.quantile(self.after.waited[ending], 0.99))

    @property
    def pause_s(self) -> float:
        """The longest time between two commits after the surge."""
        ends = [at for at, _ in self.commits if at >= self.surge]
        return max((later - earlier for earlier, later in pairwise(ends)), default=0.0)

    @property
    def stable_s(self) -> float:
        """Seconds from the surge until rows were served as in the end, for good."""
        late = [at for at, p99 in self.after.buckets() if p99 > CALM * self.final_p99_s]
        return max([0.0, *(at - self.surge for at in late)])

    def figures(self) -> dict[str, Any]:
        """For programs."""
        return {
            "before_p99_ms": _ms(self.before.quantile(0.99)),
            "spike_ms": _ms(self.spike_s),
            "final_p99_ms": _ms(self.final_p99_s),
            "stable_s": round(self.stable_s, 1),
            "acted_s": None if self.acted_s is None else round(self.acted_s, 1),
            "partitions": self.partitions,
            "lost": self.lost,
            "doubled": self.doubled,
        }


def worked(word: str, row: dict[str, Any], state: State) -> dict[str, Any]:
    """A word more, and some work."""
    work(len(word), WORK)
    return count(word, row, state)


def usual_age_ms(job: Job) -> float:
    """The age of rows in the next epochs, as a controller sees it."""
    with job.watch() as watch:
        return statistics.median(Situation(next(watch)).latency_ms() for _ in range(LOOK))


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def one_side(
    spark: SparkSession, size: Size, rate: int | None, act_after_s: float | None, tell: Callable[[str], None]
) -> tuple[Run, int]:
    """Run one side: with the controller, or with a restart so long after the surge. Also the rate before the surge."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        timeline, loaded = Timeline(), size.keys + size.chunk * size.chunks

        def words(load: Step, limit: int | None = None) -> Flow:
            return flow(source(size.keys, load, limit=limit, chunk=limit and size.chunk), "elasticity", worked)

        fill(spark, folder, words(filling(loaded), loaded), timeline, partitions=1, bins=size.bins)
        if rate is None:
            took_ms = statistics.median(phases["stage 1"] for phases in timeline.phases[-size.chunks :])
            rate = round(SHARE * size.chunk / took_ms * 1000)
            tell(f"{size.keys:,} keys are loaded; {rate:,} rows/s are due, and twice as many later")
        start_us = first_due(folder)
        begins = time.time() + LEAD_S - start_us / 1e6
        schedule = Step((*filling(loaded).steps, (begins, rate), (begins + size.before_s, 2 * rate)))
        surge = start_us / 1e6 + begins + size.before_s
        first = len(timeline.ends)
        job = words(schedule).start(spark, checkpoint=folder, partitions=1)
        acted: float | None = None
        try:
            if act_after_s is None:
                Load(job, timeline, schedule, start_us).follow(lambda: time.time() >= surge - size.before_s / 2)
                objective_ms = LATE * usual_age_ms(job)
                job.attach(AutoScale(latency=f"{objective_ms:.0f} ms", between=(1, EXECUTORS)))
                tell(f"{OURS} is attached: rows are to be {objective_ms:.0f} ms old at most")
            else:
                Load(job, timeline, schedule, start_us).follow(lambda: time.time() >= surge + act_after_s)
                acted = time.time() - surge
                job.stop()
                timeline.add(job.progress)
                job = words(schedule).start(spark, checkpoint=folder, partitions=EXECUTORS)
            Load(job, timeline, schedule, start_us).follow(lambda: time.time() >= surge + size.after_s)
            done = [each for each in job.proposals() if each.outcome is ProposalOutcome.APPLIED]
            if act_after_s is None and done:
                acted = done[0].proposed_at - surge
            partitions = len(job.assignment()[0].partitions)
            for each in job.proposals():
                tell(f"{each.proposed_at - surge:+.1f} s: {each.operation}: {each.reason} ({each.outcome})")
        finally:
            job.stop()
        timeline.add(job.progress)
        rows = timeline.latencies(schedule, start_us, first)
        before, late = rows.before(surge), int(np.searchsorted(rows.due, surge))
        after = Latencies(rows.due[late:], rows.waited[late:])
        settled = int(np.searchsorted(before.due, surge - size.before_s / 2))
        before = Latencies(before.due[settled:], before.waited[settled:])
        lost, doubled = state_errors(folder, size.keys, timeline.rows)
        return Run(before, after, surge, acted, partitions, _commits(timeline, first), lost, doubled), rate


def killed_side(spark: SparkSession, size: Size, rate: int, tell: Callable[[str], None]) -> Run:
    """An executor of two is killed while both work at a load that one of them could not serve."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        timeline, loaded = Timeline(), size.keys + size.chunk * size.chunks

        def words(load: Step, limit: int | None = None) -> Flow:
            return flow(source(size.keys, load, limit=limit, chunk=limit and size.chunk), "killed", worked)

        fill(spark, folder, words(filling(loaded), loaded), timeline, partitions=EXECUTORS, bins=size.bins)
        start_us = first_due(folder)
        begins = time.time() + LEAD_S - start_us / 1e6
        schedule = Step((*filling(loaded).steps, (begins, rate)))
        first = len(timeline.ends)
        job = words(schedule).start(spark, checkpoint=folder, partitions=EXECUTORS)
        try:
            load = Load(job, timeline, schedule, start_us)
            load.follow(lambda: time.time() >= start_us / 1e6 + begins + size.before_s)
            victim = executors()[-1]
            victim.kill()
            at = time.time()
            tell(f"process {victim.pid} of an executor is killed")
            load.follow(lambda: time.time() >= at + size.after_s)
            partitions = len(job.assignment()[0].partitions)
        finally:
            job.stop()
        timeline.add(job.progress)
        rows = timeline.latencies(schedule, start_us, first)
        settled, late = (int(np.searchsorted(rows.due, moment)) for moment in (at - size.before_s / 2, at))
        before = Latencies(rows.due[settled:late], rows.waited[settled:late])
        after = Latencies(rows.due[late:], rows.waited[late:])
        lost, doubled = state_errors(folder, size.keys, timeline.rows)
        return Run(before, after, at, 0.0, partitions, _commits(timeline, first), lost, doubled)


def executors() -> list[psutil.Process]:
    """The processes of this cluster's executors, oldest first."""
    found = [
        each
        for each in psutil.Process().children(recursive=True)
        if any("CoarseGrainedExecutorBackend" in word for word in _words_of(each))
    ]
    return sorted(found, key=lambda each: each.create_time())


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has ended
        return []


def _commits(timeline: Timeline, first: int) -> tuple[tuple[float, int], ...]:
    marks = list(timeline.ends.values())[first - 1 :]
    return tuple((at, count - earlier) for (earlier, _), (count, at) in pairwise(marks))


def plot(path: Path, runs: dict[str, Run]) -> None:
    """Latency and throughput around the surge, and latency around the death of an executor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower, last) = plt.subplots(3, 1, figsize=(8, 8))
    lower.sharex(upper)
    for name, run in runs.items():
        if name == KILLED:
            buckets = [*run.before.buckets(), *run.after.buckets()]
            last.plot([at - run.surge for at, _ in buckets], [p99 for _, p99 in buckets], color="tab:red")
            continue
        buckets = [*run.before.buckets(), *run.after.buckets()]
        upper.plot([at - run.surge for at, _ in buckets], [p99 for _, p99 in buckets], label=name)
        seconds = np.floor([at - run.surge for at, _ in run.commits]).astype(int)
        totals = np.bincount(seconds - seconds.min(), [count for _, count in run.commits])
        lower.step(np.arange(len(totals)) + seconds.min(), totals, where="post", label=name)
        if run.acted_s is not None:
            upper.axvline(run.acted_s, color="#cccccc", linewidth=1)
    upper.set(ylabel="latency, s (p99 of 250 ms)", title="twice the load from second 0 on")
    upper.set_yscale("log")
    upper.grid(axis="y", color="#eeeeee", which="both")
    upper.legend(frameon=False, fontsize=8)
    lower.set(xlabel="seconds since the surge", ylabel="rows committed in a second")
    last.set(xlabel="seconds since an executor was killed", ylabel="latency, s (p99 of 250 ms)", yscale="log")
    last.grid(axis="y", color="#eeeeee", which="both")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def flink_cycles(python: str | None, is_quick: bool, tell: Callable[[str], None]) -> list[Cycle]:
    """PyFlink's changes of parallelism by savepoint; none if it is not there."""
    try:
        found = find(python)
    except Missing as missing:
        if python:
            raise SystemExit(f"{missing}") from None
        tell(f"{missing}")
        return []
    rate, count, steady_s = (1_500, 1, 2.0) if is_quick else (5_000, 4, 6.0)
    return savepoint_cycles(found, rate, 10.0, count, steady_s, is_rescaled=True)


def report(runs: dict[str, Run], rate: int) -> None:
    """A table for people."""
    columns = ("before_p99_ms", "spike_ms", "final_p99_ms", "stable_s", "acted_s", "partitions", "lost", "doubled")
    rows: Sequence[Sequence[str]] = [
        (name, *(str(run.figures()[column]) for column in columns)) for name, run in runs.items()
    ]
    title = f"{rate:,} rows/s are due, then {2 * rate:,}; {round(KILLED_SHARE * rate):,} where {KILLED}"
    table(title, ("", *(column.replace("_", " ") for column in columns)), rows)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--before", type=float, metavar="S", help="seconds before the surge")
    parser.add_argument("--after", type=float, metavar="S", help="seconds after it")
    parser.add_argument("--pyflink", metavar="PYTHON", help="a Python that has apache-flink")
    options = parser.parse_args()
    size, began = (QUICK if options.quick else FULL), time.perf_counter()
    size = replace(size, before_s=options.before or size.before_s, after_s=options.after or size.after_s)

    def tell(line: str) -> None:
        print(line, flush=True)

    with cluster(EXECUTORS) as spark:
        ours, rate = one_side(spark, size, None, None, tell)
        tell(f"{OURS}: {ours.figures()}")
        after_s = size.after_s / 4 if ours.acted_s is None or ours.acted_s < 0 else ours.acted_s
        rival, _ = one_side(spark, size, rate, after_s, tell)
        tell(f"{RIVAL}: {rival.figures()}")
        killed = killed_side(spark, size, round(KILLED_SHARE * rate), tell)
        tell(f"{KILLED}: {killed.figures()}")
    runs = {OURS: ours, RIVAL: rival, KILLED: killed}
    cycles = flink_cycles(options.pyflink, options.quick, tell)
    report(runs, rate)
    if options.plot:
        plot(options.plot, runs)
    figures = {
        "rate": rate,
        "before_s": size.before_s,
        "after_s": size.after_s,
        "spike_ratio": round(ours.spike_s / rival.spike_s, 3),
        "stable_s": round(ours.stable_s, 1),
        "rival_stable_s": round(rival.stable_s, 1),
        "killed_stable_s": round(killed.stable_s, 1),
        "pause_s": round(ours.pause_s, 2),
        "rival_pause_s": round(rival.pause_s, 2),
        "pyflink_pause_s": round(statistics.median(each.pause_s for each in cycles), 2) if cycles else None,
        "partitions": ours.partitions,
        "lost": sum(run.lost for run in runs.values()),
        "doubled": sum(run.doubled for run in runs.values()),
        "runs": {name: run.figures() for name, run in runs.items()},
        "took_s": round(time.perf_counter() - began),
    }
    closing_line("elasticity", figures, quick=options.quick)


if __name__ == "__main__":
    main()
