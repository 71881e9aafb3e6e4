"""``Pace`` looks for the longest epochs whose rows are young enough, on a job under a constant load (Chi, section 6.4).

First the curve is measured: the age of rows, and the CPU that the job takes, at some paces. The objective is three
times the age at no pace at all. Then the controller starts, once far too small and once far too large: how long it
takes to the longest pace that meets the objective, how often it oversteps it, and what it has come to, beside what the
curve says.

    python -m benchmarks.tuning [--quick] [--plot FILE] [--paces 0,150,300,600,1200,2400] [--patience S]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.control import cpu_seconds
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, session
from midstream import Flow, GeneratorSource, NoopSink, Pace, Situation, State, Tune
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.observation import Observation
from midstream.runtime.spark.job import Job

KEYS = 2_000
PATIENCE_S = 120.0
STEP = 1.5
STILL = 30
"""Epochs without a proposal after which the controller has come to its end."""
SETTLES = 3
"""Epochs after a step of the curve that do not count."""
MEETS = 1.1
"""Of the objective: quantiles of the age are known within a fifth."""


@dataclass(frozen=True)
class Size:
    """Rows per second; the paces of the curve and the epochs at each; where the controller starts, as multiples of the
    best pace; and for how long it is followed at most."""

    rate: int
    paces_ms: Sequence[int]
    epochs: int
    starts: Sequence[float]
    patience_s: float


FULL = Size(10_000, (0, 150, 300, 600, 1_200, 2_400), 15, (0.1, 4.0), 120.0)
QUICK = Size(2_000, (0, 300, 900), 6, (0.3,), 40.0)


@dataclass(frozen=True)
class Stretch:
    """What a pace comes to."""

    pace_ms: float
    age_ms: float
    cores: float
    """CPU time of all processes of this job, by time."""


@dataclass
class Course:
    """What the controller did."""

    start_ms: float
    points: list[tuple[float, float, float]] = field(default_factory=list)
    """Of each epoch: seconds since it was attached, the pace, the age of rows."""
    applied: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def end_ms(self) -> float:
        """The pace that it has come to."""
        return self.points[-1][1]

    @property
    def found_s(self) -> float:
        """When it had come to it for good."""
        others = [at for at, pace, _ in self.points if pace != self.end_ms]
        return max(others, default=0.0)

    def overshoots(self, objective_ms: float) -> int:
        """How often a step led from epochs that met the objective to some that did not."""
        paces = list(dict.fromkeys(pace for _, pace, _ in self.points))
        ages = {pace: statistics.median(age for _, own, age in self.points if own == pace) for pace in paces}
        return sum(
            1 for before, after in pairwise(paces) if after > before and ages[before] <= objective_ms < ages[after]
        )


def rows(index: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
    """Users, by turns."""
    return {"user": index * 7_919 % KEYS}


def count(user: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    """Number the rows of a user."""
    state.set(state.get(0) + 1)
    return {"user": user, "n": state.get(), "event_time": row["event_time"]}


def flow(rate: int) -> Flow:
    """Rows of users, numbered."""
    built = Flow("tuning")
    source = built.source("rows", GeneratorSource(rows, "user bigint", rate=rate, partitions=CORES))
    numbered = source.key_by("by user", "user").process(
        "count", count, returns="user bigint, n bigint, event_time timestamp"
    )
    numbered.sink("out", NoopSink())
    return built


def age_ms(seen: Observation) -> float:
    """The age of rows, as the controller sees it."""
    return Situation(seen).latency_ms()


def tuned(job: Job, pace_ms: float) -> None:
    """Set the pace, and wait until that is over."""
    if job.knobs["pace"] != round(1000 * pace_ms):
        job.update(Tune(pace=round(1000 * pace_ms))).require(PATIENCE_S)


def curve(job: Job, size: Size, tell: Callable[[str], None]) -> list[Stretch]:
    """The age of rows at some paces."""
    found = []
    for pace_ms in size.paces_ms:
        tuned(job, pace_ms)
        ages: list[float] = []
        began = cpu = 0.0
        with job.watch() as watch:
            for number, seen in enumerate(watch):
                if number == SETTLES:
                    began, cpu = time.perf_counter(), cpu_seconds()
                if number > SETTLES:
                    ages.append(age_ms(seen))
                if len(ages) == size.epochs:
                    break
        cores = (cpu_seconds() - cpu) / (time.perf_counter() - began)
        found.append(Stretch(pace_ms, statistics.median(ages), cores))
        tell(f"pace {pace_ms} ms: rows are {found[-1].age_ms:.0f} ms old, {cores:.2f} cores")
    return found


def best_pace(found: Sequence[Stretch], objective_ms: float) -> float:
    """The longest pace that meets the objective, by the curve: straight between its points."""
    rising = sorted(found, key=lambda each: each.pace_ms)
    ages = np.maximum.accumulate([each.age_ms for each in rising])
    return float(np.interp(objective_ms, ages, [each.pace_ms for each in rising]))


def followed(job: Job, start_ms: float, objective_ms: float, size: Size) -> Course:
    """Start at a pace, and leave the rest to the controller."""
    tuned(job, start_ms)
    course, known = Course(start_ms), {each.number for each in job.proposals()}
    policy = Pace(latency=f"{objective_ms:.0f} ms", between=("20 ms", "10 s"), step=STEP)
    job.attach(policy)
    began, still = time.perf_counter(), 0
    with job.watch() as watch:
        for seen in watch:
            at = time.perf_counter() - began
            course.points.append((at, (job.knobs["pace"] or 0) / 1000, age_ms(seen)))
            new = [each for each in job.proposals() if each.number not in known]
            still = 0 if len(new) > len(course.reasons) else still + 1
            course.reasons = [each.reason for each in new]
            if still >= STILL or at > size.patience_s:
                break
    job.detach(policy.name)
    course.applied = sum(
        1 for each in job.proposals() if each.number not in known and each.outcome is ProposalOutcome.APPLIED
    )
    return course


def plot(path: Path, found: Sequence[Stretch], courses: Sequence[Course], objective_ms: float) -> None:
    """The curve, and pace and age over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, *others) = plt.subplots(1, 1 + len(courses), figsize=(4.2 * (1 + len(courses)), 3.8))
    left.plot([each.pace_ms for each in found], [each.age_ms for each in found], "o-", label="age of rows, p95")
    left.axhline(objective_ms, color="grey", linewidth=0.8, label="objective")
    left.set(title="what a pace comes to", xlabel="pace, ms", ylabel="ms")
    twin = left.twinx()
    twin.plot([each.pace_ms for each in found], [each.cores for each in found], "s:", color="tab:orange")
    twin.set_ylabel("cores", color="tab:orange")
    twin.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    for axis, course in zip(others, courses, strict=True):
        times = [at for at, _, _ in course.points]
        axis.step(times, [pace for _, pace, _ in course.points], where="post", label="pace")
        axis.plot(times, [age for _, _, age in course.points], ".", markersize=3, label="age of rows, p95")
        axis.axhline(objective_ms, color="grey", linewidth=0.8)
        axis.set(title=f"from {course.start_ms:.0f} ms", xlabel="seconds", ylabel="ms")
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--paces", help="the paces of the curve, in milliseconds")
    parser.add_argument("--patience", type=float, metavar="S", help="how long the controller is followed at most")
    options = parser.parse_args()
    size, began = (QUICK if options.quick else FULL), time.perf_counter()
    paces = size.paces_ms if options.paces is None else [int(pace) for pace in options.paces.split(",")]
    size = replace(size, paces_ms=paces, patience_s=options.patience or size.patience_s)

    def tell(line: str) -> None:
        print(line, flush=True)

    courses: list[Course] = []
    with (
        session() as spark,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        flow(size.rate).start(spark, checkpoint=folder, partitions=CORES) as job,
    ):
        job.await_epoch(10, PATIENCE_S)
        found = curve(job, size, tell)
        objective_ms = round(3 * found[0].age_ms)
        best = best_pace(found, objective_ms)
        tell(f"objective: {objective_ms} ms; by the curve the longest pace is {best:.0f} ms")
        for start in size.starts:
            courses.append(followed(job, max(20.0, start * best), objective_ms, size))
            tell(f"from {courses[-1].start_ms:.0f} ms: {'; '.join(courses[-1].reasons)}")
    table(
        f"Pace, for rows of at most {objective_ms} ms; by the curve {best:.0f} ms is the longest pace",
        ("from ms", "to ms", "of the best", "found after s", "steps", "overshoots"),
        [
            (
                f"{each.start_ms:.0f}",
                f"{each.end_ms:.0f}",
                f"{each.end_ms / best:.2f}",
                f"{each.found_s:.1f}",
                str(each.applied),
                str(each.overshoots(MEETS * objective_ms)),
            )
            for each in courses
        ],
    )
    if options.plot:
        plot(options.plot, found, courses, objective_ms)
    cheapest = min(found, key=lambda each: abs(each.pace_ms - best))
    figures = {
        "objective_ms": objective_ms,
        "best_pace_ms": round(best),
        "cores_at_no_pace": round(found[0].cores, 2),
        "cores_near_best": round(cheapest.cores, 2),
        "found_s": round(max(each.found_s for each in courses), 1),
        "end_over_best": [round(each.end_ms / best, 2) for each in courses],
        "steps": [each.applied for each in courses],
        "overshoots": max(each.overshoots(MEETS * objective_ms) for each in courses),
        "curve": [[each.pace_ms, round(each.age_ms, 1), round(each.cores, 3)] for each in found],
        "took_s": round(time.perf_counter() - began),
    }
    closing_line("tuning", figures, quick=options.quick)


if __name__ == "__main__":
    main()
