"""How long a change takes, by what is changed and how: Tables 3, 4 and 5 of the Fries paper, on its workloads W1 to W5.

The flows are under full load, with epochs of more than 5 s. Changes are made one after the other, at moments that are
spread over the epochs. The delay is the time from the request, checked and stored, until no row meets an updated
operator as it was before. If no task that hosts one is running at that moment, the change is in effect at once, and the
delay is well below a millisecond; medians are given with and without such cases.

Beside the schedulers there is what people do without them: stopping and starting the query in the same driver, and
deploying the driver anew. In audit mode, further changes of shorter epochs are checked for rows that met a mixture.

    python -m benchmarks.fries [--quick] [--only W1,W5] [--plot FILE]
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from rich.progress import Progress

from benchmarks.changing import WORKLOADS, Changer, Made, Workload, audited, median, rows_for, running
from benchmarks.idle import idle_overhead_ratio
from benchmarks.report import arguments, closing_line, table
from benchmarks.restarting import Restarted, redeploy, restart
from benchmarks.sessions import CORES, session
from midstream.planner.change_plan import Scheduler, plan_change

PAPER = {  # (fries, epoch), Tables 3 and 4; of W5 (fries, fries-unpruned), Table 5; milliseconds
    ("W2", "J1"): (46, 11_432),
    ("W2", "J2"): (44, 11_709),
    ("W2", "J1,J3"): (1_664, 12_339),
    ("W2", "J1,J4"): (1_702, 12_361),
    ("W2", "J3,J4"): (387, 13_767),
    ("W3", "J5"): (87, 4_127),
    ("W3", "J5,J6"): (127, 8_352),
    ("W3", "J5,J6,J7,J8"): (447, 19_608),
    ("W3", "J5,J6,J7,J9"): (526, 19_717),
    ("W3", "J7,J8,J9"): (1_340, 20_532),
    ("W4", "F1,U2"): (69, 151),
    ("W4", "FD1"): (47_892, 131_103),
    ("W4", "F2"): (221_353, 236_153),
    ("W5", "FD4"): (158, 450_149),
    ("W5", "F3"): (94, 383_781),
    ("W5", "F4"): (10, 446),
    ("W5", "FD3,FD4"): (661_892, 663_460),
    ("W5", "E1"): (85, 1_122_686),
}
SCHEDULERS = FRIES, UNPRUNED, MARKER, EPOCH, REPLAY = "fries", "fries-unpruned", "marker", "epoch", "replay"


@dataclass(frozen=True)
class Size:
    """How much is measured. ``few`` leaves out most of what the paper changes."""

    epoch_s: float | None
    """None: epochs of as many rows as a probe has."""
    fries: int
    """Changes by Fries of each set of operators that falls into single ones; there is one of each other set."""
    alone: int
    """How many times as often where the workload has one set only, and for E1 of W5."""
    audited: int
    restarts: int
    idle_rows: int
    idle_rounds: int
    few: bool


FULL = Size(epoch_s=5.6, fries=5, alone=3, audited=2, restarts=2, idle_rows=10_000, idle_rounds=15, few=False)
QUICK = Size(epoch_s=None, fries=1, alone=1, audited=1, restarts=1, idle_rows=1_000, idle_rounds=3, few=True)
LEAST_EPOCH_S = 5.0
FEW = {"W1": ("FD",), "W2": ("J1",), "W5": ("E1",)}


@dataclass
class Results:
    """All that was measured."""

    made: dict[str, list[Made]] = field(default_factory=dict)
    epoch_ms: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    audited: int = 0
    violations: int = 0
    restarted: list[Restarted] = field(default_factory=list)
    redeployed: list[Restarted] = field(default_factory=list)

    def of(self, workload: str, scheduler: str, *sets: str) -> list[Made]:
        """Changes of a workload by one scheduler, of these sets of operators or of all."""
        return [
            each
            for each in self.made.get(workload, [])
            if each.scheduler == scheduler and (not sets or ",".join(each.updated) in sets)
        ]

    def sets(self, workload: str) -> list[tuple[str, ...]]:
        """The sets of operators that were changed, as the paper has them."""
        [of] = [each for each in WORKLOADS if each.name == workload]
        return [updated for updated in of.updated if any(each.updated == updated for each in self.made[workload])]


# ── what is to be done ────────────────────────────────────────────────────────────────────────────────────────────


def sets_of(workload: Workload, size: Size) -> Sequence[tuple[str, ...]]:
    """The sets of operators that are changed."""
    return [FEW[workload.name]] if size.few else workload.updated


def schedule(workload: Workload, size: Size) -> list[tuple[tuple[str, ...], str]]:
    """What to change how, in random order. By one scheduler where another one would do the very same."""
    graph = workload.flow(1, 0).graph
    wanted = []
    for updated in sets_of(workload, size):
        plans = {name: plan_change(graph, updated, Scheduler(name)) for name in (FRIES, UNPRUNED)}
        is_single = all(len(component.operators) == 1 for component in plans[FRIES].components)
        times = size.alone if workload.name == "W1" or updated == ("E1",) else 1
        wanted += [(updated, FRIES)] * (times * size.fries if is_single else 1)
        wanted += [(updated, EPOCH)] * (times if workload.name == "W1" else 1)
        if not size.few:
            wanted += [(updated, MARKER)]
        if plans[UNPRUNED].components != plans[FRIES].components:
            wanted += [(updated, UNPRUNED)] * (size.fries if updated == ("E1",) else 1)
    if not size.few:
        wanted.append((workload.updated[0], REPLAY))
    random.Random(7).shuffle(wanted)
    return wanted


def schedulers_to_audit(workload: Workload) -> list[str]:
    """Those that do something of their own, besides the epoch's end."""
    return [FRIES, MARKER, UNPRUNED] if workload.name == "W5" else [FRIES, MARKER]


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(spark: SparkSession, workload: Workload, size: Size, results: Results, progress: Progress) -> None:
    """All changes of one workload."""
    wanted = schedule(workload, size)
    audits = size.audited * len(schedulers_to_audit(workload))
    steps = progress.add_task(workload.name, total=1 + len(wanted) + audits)
    epoch_s = None if size.epoch_s is None else size.epoch_s * workload.longer
    rows = workload.probe if epoch_s is None else rows_for(spark, workload, epoch_s)
    progress.advance(steps)
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(running(spark, workload.flow(rows, 0)))
        if epoch_s is not None and job.progress[-1].duration_ms < 1000 * LEAST_EPOCH_S * workload.longer:
            # The machine was busy with something else when the rows of an epoch were counted out.
            stack.close()
            rows = round(rows * 1000 * epoch_s / job.progress[-1].duration_ms)
            job = stack.enter_context(running(spark, workload.flow(rows, 0)))
        changer = Changer(job, workload)
        results.made[workload.name] = []
        for updated, scheduler in wanted:
            results.made[workload.name].append(changer.make(updated, scheduler))
            progress.advance(steps)
        results.rows[workload.name] = rows
        results.epoch_ms[workload.name] = round(statistics.median(p.duration_ms for p in job.progress))
    short = rows if epoch_s is None else max(rows // 5, 100)
    made, violations = audited(
        spark, workload, schedulers_to_audit(workload), size.audited, short, lambda: progress.advance(steps)
    )
    results.audited += made
    results.violations += violations


def baselines(spark: SparkSession, size: Size, results: Results, progress: Progress) -> None:
    """Without live changes."""
    steps = progress.add_task("restarts", total=2 * size.restarts)
    rows, epoch_s = results.rows["W1"], results.epoch_ms["W1"] / 1000
    for found, way in ((results.restarted, restart), (results.redeployed, redeploy)):
        for _ in range(size.restarts):
            found.append(way(spark, rows, epoch_s))
            progress.advance(steps)


# ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def delays(made: Sequence[Made], *, running_only: bool = False) -> list[float]:
    """Their delays; those that were in effect at once may be left out."""
    return [each.delay_ms for each in made if not (running_only and each.at_once)]


def rows_of(results: Results) -> list[dict[str, Any]]:
    """One object for each workload, set of operators and scheduler."""
    found = []
    for workload, made in results.made.items():
        schedulers = [name for name in SCHEDULERS if any(each.scheduler == name for each in made)]
        for updated, scheduler in itertools.product(results.sets(workload), schedulers):
            name = ",".join(updated)
            these = results.of(workload, scheduler, name)
            if not these:
                continue
            found.append(
                {
                    "workload": workload,
                    "updated": name,
                    "scheduler": scheduler,
                    "changes": len(these),
                    "delay_ms": {"median": median(delays(these)), "max": round(max(delays(these)), 2)},
                    "at_once": sum(each.at_once for each in these),
                    "median_of_others_ms": median(delays(these, running_only=True)),
                }
            )
    return found


def ratio(above: Sequence[Made], below: Sequence[Made], *, running_only: bool) -> float | None:
    """How many times the one median is the other."""
    over, under = median(delays(above)), median(delays(below, running_only=running_only))
    return round(over / under, 1) if over and under else None


def figures_of(results: Results, overhead: float) -> dict[str, Any]:
    """What the closing line says."""
    fries = [each for name in results.made for each in results.of(name, FRIES)]
    single = [each for each in fries if each.is_single]
    told = delays(single, running_only=True)
    pairs = {
        "w1_epoch_over_fries": (results.of("W1", EPOCH), results.of("W1", FRIES)),
        "w2_epoch_over_fries": (results.of("W2", EPOCH), results.of("W2", FRIES, "J1", "J2")),
        "w5_e1_unpruned_over_fries": (results.of("W5", UNPRUNED, "E1"), results.of("W5", FRIES, "E1")),
    }
    figures: dict[str, Any] = {
        "rows": rows_of(results),
        "epoch_ms": results.epoch_ms,
        "fcm_p50_ms": median(delays(single)),
        "fcm_max_ms": round(max(delays(single)), 2),
        "fcm_changes": len(single),
        "at_once": sum(each.at_once for each in single),
        "fcm_p50_of_others_ms": median(told),
        "preparation_p50_ms": median([each.preparation_ms for each in fries]),
    }
    for name, (above, below) in pairs.items():
        figures[name] = ratio(above, below, running_only=False)
        figures[f"{name}_of_others"] = ratio(above, below, running_only=True)
    return figures | {
        "audited_changes": results.audited,
        "violations": results.violations,
        "idle_overhead_ratio": round(overhead, 4),
        "restart_same_driver_ms": median([each.first_row_ms for each in results.restarted]),
        "restart_same_driver_committed_ms": median([each.first_epoch_ms for each in results.restarted]),
        "redeploy_ms": median([each.first_row_ms for each in results.redeployed]),
        "redeploy_committed_ms": median([each.first_epoch_ms for each in results.redeployed]),
    }


def show(results: Results, figures: dict[str, Any]) -> None:
    """The tables."""
    lines = []
    for workload in results.made:
        for updated in results.sets(workload):
            name = ",".join(updated)
            told = results.of(workload, FRIES, name)
            cells = [_cell(results.of(workload, scheduler, name)) for scheduler in (FRIES, UNPRUNED, MARKER, EPOCH)]
            at_once = f"{sum(each.at_once for each in told)} of {len(told)}"
            paper = PAPER.get((workload, name))
            lines.append((f"{workload} {name}", *cells, at_once, "" if paper is None else "{:,} / {:,}".format(*paper)))
    table(
        f"delay of changes, ms (medians, in brackets without those at once); {CORES} cores",
        ("", FRIES, UNPRUNED, MARKER, EPOCH, "at once", "paper: fries / epoch (W5: unpruned)"),
        lines,
    )
    wanted = {
        "fcm_p50_ms": "≤ 10",
        "fcm_p50_of_others_ms": "≤ 10",
        "fcm_max_ms": "≤ 50",
        "w1_epoch_over_fries_of_others": "≥ 200",
        "w2_epoch_over_fries_of_others": "≥ 200",
        "w5_e1_unpruned_over_fries_of_others": "≥ 1,000",
        "violations": "0",
        "idle_overhead_ratio": "≤ 1.02",
        "restart_same_driver_ms": "",
        "restart_same_driver_committed_ms": "",
        "redeploy_ms": "",
        "redeploy_committed_ms": "",
    }
    found = {name: "" if figures[name] is None else f"{figures[name]:,}" for name in wanted}
    table("in all", ("", "found", "wanted"), [(name, found[name], limit) for name, limit in wanted.items()])


def _cell(made: Sequence[Made]) -> str:
    if not made:
        return ""
    everything, others = median(delays(made)), median(delays(made, running_only=True))
    return f"{everything:,}" if others in (None, everything) else f"{everything:,} ({others:,})"


def plot(path: Path, results: Results) -> None:
    """Every change as a dot, by workload and set; one colour for each scheduler."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places = [(workload, updated) for workload in results.made for updated in results.sets(workload)]
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(places) + 1.4))
    colours = {FRIES: "#2255aa", UNPRUNED: "#4c9be8", MARKER: "#e0a030", EPOCH: "#999999", REPLAY: "#bb5566"}
    for scheduler, colour in colours.items():
        dots = [
            (each.delay_ms, at)
            for at, (workload, updated) in enumerate(places)
            for each in results.of(workload, scheduler, ",".join(updated))
        ]
        if dots:
            x, y = zip(*dots, strict=True)
            axes.scatter(x, y, s=26, color=colour, label=scheduler, alpha=0.8, linewidths=0)
    for at, (above, below) in enumerate(itertools.pairwise(places)):
        if above[0] != below[0]:
            axes.axhline(at + 0.5, color="#dddddd", linewidth=0.8)
    axes.set_yticks(range(len(places)), [f"{workload}  {','.join(updated)}" for workload, updated in places])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="delay of a change, ms", title=f"changes under full load, {CORES} cores")
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5 / figure.get_figheight() * 1.0), ncols=5, frameon=False)
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", help="workloads, e.g. W1,W5; restarts are measured with W1")
    options = parser.parse_args()
    size, results, began = (QUICK if options.quick else FULL), Results(), time.perf_counter()
    names = options.only.split(",") if options.only else [w.name for w in WORKLOADS if not size.few or w.name in FEW]
    overhead = idle_overhead_ratio(size.idle_rows, size.idle_rounds)
    with session() as spark, Progress() as progress:
        for workload in WORKLOADS:
            if workload.name in names:
                measure(spark, workload, size, results, progress)
        if "W1" in results.made:
            baselines(spark, size, results, progress)
    figures = figures_of(results, overhead)
    figures["took_s"] = round(time.perf_counter() - began)
    show(results, figures)
    if options.plot:
        plot(options.plot, results)
    closing_line("fries", figures, quick=options.quick)


if __name__ == "__main__":
    main()
