"""What it costs to change the plan of a running job: E-B3 and E-B4 of Bartnik et al., on their SMQ with 80 instances.

Under a constant load a filter is inserted, gets another function and is removed; a keyed operator with an exchange of
its own is inserted and removed. Delays count from the call, until the first number goes through the new plan and until
the last one goes through the old plan. Rivals are a stop and start with another script in the same driver, a new
driver, and PyFlink with a savepoint, in an environment of its own (``make rivals``, or ``--pyflink PYTHON``; without
it, PyFlink is left out). At last plans are changed at random while workers and drivers are killed. Every row of
everything is checked against arithmetic.

A second source comes and goes by hand-overs: how long no epoch is committed, beyond a steady one.

    python -m benchmarks.plan_changes [--quick] [--only changes,sources,pyflink,kills] [--rounds ROUNDS]
        [--pyflink PYTHON] [--plot FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.changing import median
from benchmarks.plan_timeline import (
    COST_US,
    CYCLE,
    INSERT,
    KEYED,
    REDEPLOY,
    RESTART,
    WITHIN,
    Course,
    Event,
    run,
)
from benchmarks.report import arguments, closing_line, table
from benchmarks.rivals.flink import Cycle, Missing, find, savepoint_cycles
from benchmarks.sessions import CORES, session
from benchmarks.source_changes import Sources, hand_overs
from tests.chaos.plans import Round, run_round

PARTS = CHANGES, SOURCES, PYFLINK, KILLS = "changes", "sources", "pyflink", "kills"


@dataclass(frozen=True)
class Size:
    """Numbers that are due each second; rounds of changes, epochs between two of them, restarts in the same driver;
    cycles of PyFlink, and how long it runs in between; changes at random, and epochs between two kills."""

    rate: int
    rounds: int
    calm: int
    restarts: int
    cycles: int
    steady_s: float
    random: int
    apart: tuple[int, int]


FULL = Size(rate=5_000, rounds=12, calm=8, restarts=4, cycles=5, steady_s=8.0, random=100, apart=(5, 15))
QUICK = Size(rate=1_500, rounds=1, calm=5, restarts=1, cycles=1, steady_s=2.0, random=4, apart=(3, 5))


@dataclass
class Results:
    """All that was measured; what was left out is empty."""

    course: Course | None = None
    cycles: list[Cycle] = field(default_factory=list)
    kills: Round | None = None
    missing: str | None = None
    sources: Sources | None = None


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Measured:
    """One change; milliseconds since the call, and epochs by comparison with steady ones."""

    event: Event
    first_new_ms: float
    last_old_ms: float
    pause_ms: float
    """The longest time for which no row was worked on."""
    epoch_s: float
    """A steady epoch before it."""
    longest: float
    """The longest epoch through it over a steady one, of the old plan or of the new one, whichever takes longer."""
    waited_ms: float
    """The longest that any row of these epochs waited for its commit, over the median of steady ones."""

    @property
    def epochs(self) -> float:
        """The delay until the first row of the new plan, in steady epochs."""
        return self.first_new_ms / 1000 / self.epoch_s


def measured(course: Course, calm: int) -> list[Measured]:
    """All changes of a course."""
    found = []
    for event, seam in zip(course.events, course.verdict.seams, strict=True):
        if seam.last_old is None or seam.first_new is None:
            raise RuntimeError(f"{event.kind}: no row says when one plan followed the other")
        first, end = event.running, event.epoch + 2
        before, after = course.lengths_s(first - calm, first), course.lengths_s(end, end + calm)
        steady = max(statistics.median(part) for part in (before, after) if part)
        waited, usual = course.latencies(first, end), course.latencies(first - calm, first)
        found.append(
            Measured(
                event,
                1000 * (seam.first_new - event.called_at),
                1000 * (seam.last_old - event.called_at),
                1000 * course.pause_s(event.called_at - 0.5, seam.first_new + 0.5),
                statistics.median(before),
                max(course.lengths_s(first, end)) / steady,
                1000 * (waited.max() - usual.quantile(0.5)),
            )
        )
    return found


def noise(course: Course, calm: int) -> float:
    """What ``longest`` is where nothing happens: of as many epochs before each change."""
    found = []
    for event in course.events:
        lengths = course.lengths_s(event.running - calm, event.running)
        if event.kind in CYCLE and len(lengths) >= 3:
            found.append(max(lengths[-3:]) / statistics.median(lengths))
    return round(statistics.median(found), 3)


def figures_of(results: Results, calm: int) -> dict[str, Any]:
    """For programs; None where nothing was measured."""
    names = ("within_stage_p50_ms", "exchange_epochs", "longest_epoch_ratio", "handover_s", "over_pyflink", "lost")
    figures: dict[str, Any] = dict.fromkeys(names)
    ours: float | None = None
    if results.course is not None:
        found = measured(results.course, calm)
        within = [each for each in found if each.event.kind in WITHIN]
        met = [each.event for each in within if each.event.met_tasks]
        keyed = [each for each in found if each.event.kind == KEYED]
        ratios = {kind: median([each.longest for each in found if each.event.kind == kind]) for kind in CYCLE}
        ours = median([each.first_new_ms for each in found if each.event.kind == INSERT])
        verdict = results.course.verdict
        figures |= {
            "within_stage_p50_ms": median([each.delay_ms for each in met if each.delay_ms is not None]),
            "within_stage_max_ms": max((each.delay_ms or 0.0 for each in met), default=None),
            "within_stage_call_p50_ms": median([each.in_effect_ms for each in met if each.in_effect_ms is not None]),
            "within_stage_met_tasks": len(met),
            "within_stage_met_none": len(within) - len(met),
            "exchange_epochs": median([each.epochs for each in keyed]),
            "exchange_epochs_max": round(max(each.epochs for each in keyed), 2),
            "longest_epoch_ratio": max(ratio for ratio in ratios.values() if ratio is not None),
            "longest_epoch_ratios": ratios,
            "longest_epoch_ratio_without_change": noise(results.course, calm),
            "epoch_ms": round(1000 * statistics.median(each.epoch_s for each in found)),
            "rate": results.course.rate,
            "first_row_ms": {kind: _median_of(found, kind, "first_new_ms") for kind in (*CYCLE, RESTART, REDEPLOY)},
            "last_row_ms": {kind: _median_of(found, kind, "last_old_ms") for kind in (*CYCLE, RESTART, REDEPLOY)},
            "pause_ms": {kind: _median_of(found, kind, "pause_ms") for kind in (*CYCLE, RESTART, REDEPLOY)},
            "waited_ms": {kind: _median_of(found, kind, "waited_ms") for kind in (*CYCLE, RESTART, REDEPLOY)},
            "rows": verdict.rows,
            "lost": verdict.lost,
            "doubled": verdict.doubled,
            "problems": verdict.problems,
        }
    if (sources := results.sources) is not None:
        pauses = [each.pause_s for each in sources.found]
        figures |= {
            "handover_s": median(pauses),
            "handover_max_s": max(pauses),
            "handover_longest_s": max(each.longest_s for each in sources.found),
            "handover_prepared_s": median([each.prepared_s for each in sources.found]),
            "handover_first_commit_s": median([each.committed_s for each in sources.found]),
            "handover_steady_epoch_s": sources.steady_s,
            "handovers": len(pauses),
            "handover_rows": sources.rows,
        }
        figures["lost"] = (figures["lost"] or 0) + sources.lost
        figures["doubled"] = figures.get("doubled", 0) + sources.doubled
    if results.cycles:
        first = statistics.median(each.first_row_s for each in results.cycles)
        figures["pyflink"] = {
            "savepoint_ms": round(1000 * statistics.median(each.savepoint_s for each in results.cycles)),
            "submitted_ms": round(1000 * statistics.median(each.submitted_s for each in results.cycles)),
            "first_row_ms": round(1000 * first),
            "pause_ms": round(1000 * statistics.median(each.pause_s for each in results.cycles)),
        }
        if ours is not None:
            figures["over_pyflink"] = round(1000 * first / ours, 1)
    if (kills := results.kills) is not None:
        figures |= {
            "random_changes": kills.changes,
            "random_kills": len(kills.kills),
            "random_drivers_killed": kills.drivers,
            "random_rows": kills.rows,
            "random_problems": kills.problems,
        }
        figures["lost"] = (figures["lost"] or 0) + kills.lost
        figures["doubled"] = figures.get("doubled", 0) + kills.doubled
    return figures


def _median_of(found: Sequence[Measured], kind: str, name: str) -> float | None:
    return median([getattr(each, name) for each in found if each.event.kind == kind])


# ── showing them ──────────────────────────────────────────────────────────────────────────────────────────────────


def show(results: Results, figures: dict[str, Any], rate: int) -> None:
    """Tables for people."""
    rows = []
    if results.course is not None:
        for kind in (*CYCLE, RESTART, REDEPLOY):
            cells = [_cell(figures[name][kind]) for name in ("first_row_ms", "last_row_ms", "pause_ms", "waited_ms")]
            rows.append((kind, *cells))
    if results.cycles:
        found = figures["pyflink"]
        rows.append(("PyFlink, savepoint", _cell(found["first_row_ms"]), "", _cell(found["pause_ms"]), ""))
    table(
        f"SMQ at {rate:,} rows/s, ms since the call (medians), {CORES} cores",
        ("", "first row of the new plan", "last row of the old one", "no row worked on for", "rows wait longer by"),
        rows,
    )
    wanted = {
        "within_stage_p50_ms": "≤ 20",
        "exchange_epochs": "≤ 1.5",
        "handover_s": "≤ 1",
        "longest_epoch_ratio": "≤ 1.3",
        "over_pyflink": "≥ 20",
        "lost": "0",
        "doubled": "0",
        "problems": "[]",
        "random_changes": "",
        "random_kills": "",
        "random_problems": "[]",
    }
    table(
        "in all", ("", "found", "wanted"), [(name, _cell(figures.get(name)), limit) for name, limit in wanted.items()]
    )
    if results.missing:
        print(results.missing)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 100 else f"{value}"


def plot(path: Path, results: Results, calm: int) -> None:
    """Left: each change as a dot, by what it was. Right: latency over time around one change of a kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 4))
    dots: dict[str, list[float]] = (
        {kind: [] for kind in (*CYCLE, RESTART, REDEPLOY)} if results.course is not None else {}
    )
    if (course := results.course) is not None:
        found = measured(course, calm)
        for each in found:
            dots.setdefault(each.event.kind, []).append(each.first_new_ms)
        colours = {INSERT: "#2255aa", KEYED: "#4c9be8", RESTART: "#e0a030", REDEPLOY: "#bb5566"}
        for kind, colour in colours.items():
            here = [each.event for each in found if each.event.kind == kind]
            event = here[len(here) // 2]
            latencies = course.latencies(event.running - calm, event.epoch + 2 * calm)
            line = [(at - event.called_at, p99) for at, p99 in latencies.buckets()]
            right.plot([x for x, _ in line], [y for _, y in line], color=colour, linewidth=1.4, label=kind)
        right.set(xlabel="seconds since the call, by when rows were due", ylabel="latency, s (p99 of 250 ms)")
        right.set(yscale="log", xlim=(-3, 25))
        right.axvline(0, color="#cccccc", linewidth=1)
        right.grid(axis="y", color="#eeeeee", which="both")
        right.legend(frameon=False, fontsize=8)
    if results.cycles:
        dots["PyFlink, savepoint"] = [1000 * each.first_row_s for each in results.cycles]
    for place, (kind, delays) in enumerate(dots.items()):
        colour = "#2255aa" if kind in CYCLE else "#bb5566"
        left.scatter(delays, [place] * len(delays), s=22, color=colour, alpha=0.6, linewidths=0)
    left.set_yticks(range(len(dots)), list(dots))
    left.invert_yaxis()
    left.set(xscale="log", xlabel="ms from the call to the first row of the new plan")
    left.grid(axis="x", color="#eeeeee")
    left.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default=",".join(PARTS), help="parts of it, e.g. changes,kills")
    parser.add_argument("--rounds", type=int, metavar="ROUNDS", help="how often each change is made")
    parser.add_argument("--pyflink", metavar="PYTHON", help="a Python that has apache-flink")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := sorted({*parts} - {*PARTS}):
        parser.error(f"--only {unknown[0]}: the parts are {', '.join(PARTS)}")
    size, results, began = (QUICK if options.quick else FULL), Results(), time.perf_counter()
    size, python = replace(size, rounds=options.rounds or size.rounds), None
    if PYFLINK in parts:
        try:
            python = find(options.pyflink)
        except Missing as missing:
            if options.pyflink:
                parser.error(str(missing))
            results.missing = str(missing)
    before = os.getloadavg()
    with Progress() as progress:
        if CHANGES in parts:
            changes = progress.add_task("changes", total=size.rounds * len(CYCLE) + size.restarts + 1)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, session() as spark:
                advance = lambda: progress.advance(changes)  # noqa: E731
                results.course = run(spark, Path(folder), size.rate, size.rounds, size.calm, size.restarts, advance)
        if SOURCES in parts:
            sources = progress.add_task("sources", total=2 * size.rounds)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, session() as spark:
                advance = lambda: progress.advance(sources)  # noqa: E731
                results.sources = hand_overs(spark, Path(folder), size.rate, size.rounds, size.calm, advance)
        if python is not None:
            cycles = progress.add_task("PyFlink", total=1)
            results.cycles = savepoint_cycles(python, size.rate, COST_US, size.cycles, size.steady_s)
            progress.advance(cycles)
        if KILLS in parts:
            kills = progress.add_task("changes with kills", total=1)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                results.kills = run_round("driver", 0, size.random, Path(folder), size.apart)
            progress.advance(kills)
    figures = figures_of(results, size.calm) | {"load_average": [before, os.getloadavg()]}
    figures["took_s"] = round(time.perf_counter() - began)
    show(results, figures, size.rate)
    if options.plot:
        plot(options.plot, results, size.calm)
    closing_line("plan_changes", figures, quick=options.quick)


if __name__ == "__main__":
    main()
