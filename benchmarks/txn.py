"""Transactions over shared tables: the engine's choice against every fixed strategy, and against how others do it.

SL, GS and TP of the MorphStream paper over its knobs (skew, aborts, length, cost of functions, reads, interval), its
dynamic workload of four phases, and SL against a plain Python loop. S-Store-like (partitions, serial) and TStream-like
(operation chains, whole batch again on aborts) run in the same engine, with the same threads; what exactly they do is
said at ``S_STORE`` and ``T_STREAM`` in :mod:`midstream.txn.strategies`. No Spark.

    python -m benchmarks.txn [--quick] [--threads THREADS] [--interval EVENTS] [--plot FILE]
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.report import arguments, closing_line, table
from benchmarks.workloads import grepsum, ledger, tolls
from midstream.txn import Batch, Calibration, Engine, MemoryTables, Program
from midstream.txn.calibration import calibrate
from midstream.txn.strategies import FIXED, S_STORE, SERIAL, T_STREAM, Strategy

SHORT = 0.1
"""What takes less than this in all rounds, in seconds, runs more often."""
AGAIN = 4
"""So often what is very short runs in a row."""
NO_HOPE = 1.5
"""A fixed strategy slower than the fastest by this factor is not run again. Rivals are: their own figure counts."""

RIVALS = {"S-Store-like": S_STORE, "TStream-like": T_STREAM}


@dataclass(frozen=True)
class Case:
    """One setting of the knobs: a program, and a batch of it."""

    name: str
    program: Program
    batch: Batch


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    interval: int
    rounds: int
    every_knob: bool
    each: int  # intervals of a phase
    loop: int  # intervals for the Python loop


FULL = Size(interval=10_240, rounds=4, every_knob=True, each=4, loop=40)
QUICK = Size(interval=1_024, rounds=2, every_knob=False, each=1, loop=10)


def cases(size: Size) -> Iterator[Case]:
    """Defaults, and each knob turned by itself."""
    yield from _ledgers(size)
    yield from _greps(size)
    toll = tolls.Knobs(interval=4 * size.interval)
    program = tolls.program(toll.cost)
    yield Case("TP", program, next(tolls.batches(toll)))
    if size.every_knob:
        yield Case("TP two groups", program, next(tolls.batches(replace(toll, hot=0.5))))


def _ledgers(size: Size) -> Iterator[Case]:
    base = ledger.Knobs(interval=size.interval)
    turns: list[tuple[str, ledger.Knobs]] = [("SL", base), ("SL free of cost", replace(base, cost=0.0))]
    if size.every_knob:
        turns += [(f"SL skew {skew}", replace(base, skew=skew)) for skew in (0.0, 0.6, 1.0)]
        turns += [(f"SL aborts {aborts:.0%}", replace(base, aborts=aborts)) for aborts in (0.3, 0.9)]
        turns += [("SL cost 1 µs", replace(base, cost=1.0))]
        turns += [("SL cost 100 µs, interval 2,560", replace(base, cost=100.0, interval=size.interval // 4))]
        turns += [
            (f"SL interval {interval:,}", replace(base, interval=interval))
            for interval in (size.interval // 2, size.interval * 8)
        ]
    for name, knobs in turns:
        yield Case(name, ledger.program(knobs.cost), next(ledger.batches(knobs)))


def _greps(size: Size) -> Iterator[Case]:
    grep = grepsum.Knobs(interval=size.interval)
    program = grepsum.plain(grep)
    yield Case("GS", program, next(grepsum.batches(grep)))
    if size.every_knob:
        for name, knobs in (("skew 1.0", replace(grep, skew=1.0)), ("aborts 60%", replace(grep, aborts=0.6))):
            yield Case(f"GS {name}", program, next(grepsum.batches(knobs)))
        for name, knobs in (
            ("free of cost", replace(grep, cost=0.0)),
            ("length 5", replace(grep, length=5)),
            ("reads 8", replace(grep, reads=8)),
        ):
            yield Case(f"GS {name}", grepsum.plain(knobs), next(grepsum.batches(knobs)))
    yield Case("GS windows", grepsum.windowed(grep), next(grepsum.batches(grep, "windowed")))
    yield Case("GS late keys", grepsum.wandering(grep), next(grepsum.batches(grep, "wandering")))


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────


def seconds_of(action: Callable[[], Any]) -> tuple[float, Any]:
    """How long something takes, and what it gives."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def warm_up(engine: Engine, batch: Batch, strategies: Sequence[Strategy | None]) -> None:
    """Compile what will be used, on a few events."""
    few = Batch({name: column[:32] for name, column in batch.columns.items()}, batch.timestamps[:32], batch.kinds[:32])
    for strategy in strategies:
        engine.execute(few, MemoryTables(), strategy)


def rates(
    case: Case, strategies: dict[str, Strategy | None], size: Size, engine: Engine
) -> tuple[dict[str, float], str]:
    """Transactions per second by strategy, and what the engine said about its choice.

    Strategies take turns, so that a busy moment of the machine hits all of them, and each counts with its fastest run.
    The engine has seen a batch like this one before, as in any stream that does not change; for one that does, see
    :func:`dynamic`.
    """
    warm_up(engine, case.batch, tuple(strategies.values()))
    why = engine.execute(case.batch, MemoryTables()).explanation
    best = dict.fromkeys(strategies, float("inf"))
    turns, began = 0, time.perf_counter()
    while turns < size.rounds or (time.perf_counter() - began < SHORT * len(strategies) and turns < 10 * size.rounds):
        least = min(best.values())
        for name, strategy in strategies.items():
            if turns == 0 or best[name] <= NO_HOPE * least or name in ("adaptive", *RIVALS):
                action = partial(engine.execute, case.batch, MemoryTables(), strategy)
                spent, _ = seconds_of(action)
                if spent < SHORT / 10:  # whoever comes after a strategy with much data finds the caches full of that
                    spent = min(seconds_of(action)[0] for _ in range(AGAIN))
                best[name] = min(best[name], spent)
        turns += 1
    return {name: len(case.batch) / spent for name, spent in best.items()}, why


def dynamic(cost: float, size: Size, threads: int, prices: Calibration) -> dict[str, dict[str, float]]:
    """Transactions per second by strategy, of each phase and of all.

    Every round is a stream of its own from its first batch on, for an engine that knows nothing yet: each batch is seen
    once, and counts with the fastest of the rounds.
    """
    knobs = ledger.Knobs(interval=size.interval, cost=cost)
    program = ledger.program(cost)
    strategies: dict[str, Strategy | None] = {"adaptive": None, "serial": SERIAL, **RIVALS}
    stream = list(ledger.dynamic(knobs, size.each))
    warm_up(Engine(program, threads=threads, calibration=prices), stream[-1][1], (*strategies.values(), *FIXED))
    best: dict[str, list[float]] = {name: [float("inf")] * len(stream) for name in strategies}
    for _ in range(size.rounds):
        for name, strategy in strategies.items():
            engine, tables = Engine(program, threads=threads, calibration=prices), MemoryTables()
            for place, (_, batch) in enumerate(stream):
                spent, result = seconds_of(partial(engine.execute, batch, tables, strategy))
                tables.apply(result, program.tables)
                best[name][place] = min(best[name][place], spent)
    found: dict[str, dict[str, float]] = {}
    count = size.each * size.interval
    for name, times in best.items():
        spent_on: dict[str, float] = {}
        for (phase, _), spent in zip(stream, times, strict=True):
            spent_on[phase] = spent_on.get(phase, 0.0) + spent
        found[name] = {phase: count / spent for phase, spent in spent_on.items()}
        found[name]["all"] = len(stream) * size.interval / sum(times)
    return found


def against_a_loop(size: Size, threads: int, prices: Calibration) -> tuple[float, float]:
    """SL defaults without any cost of functions: the engine, tables and all, and a loop of Python."""
    knobs = ledger.Knobs(interval=size.interval, cost=0.0)
    batches = list(itertools.islice(ledger.batches(knobs), size.loop))
    engine = Engine(ledger.program(0.0), threads=threads, calibration=prices)
    warm_up(engine, batches[0], (None,))
    ours, loop = float("inf"), float("inf")
    for _ in range(size.rounds):  # each has the whole stream to itself, so that none finds the other's data in caches
        tables, committed = MemoryTables(), []
        for batch in batches:
            began = time.perf_counter()
            result = engine.execute(batch, tables)
            tables.apply(result, engine.program.tables)
            ours = min(ours, time.perf_counter() - began)
            committed.append(result.committed.tolist())
        money: dict[int, float] = {}
        goods: dict[int, float] = {}
        for batch, wanted in zip(batches, committed, strict=True):
            spent, found = seconds_of(partial(ledger.python_loop, batch, money, goods))
            loop = min(loop, spent)
            if found != wanted:
                raise AssertionError("the engine and the Python loop disagree")
    return size.interval / ours, size.interval / loop


# ── reporting ─────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="threads of the engine")
    parser.add_argument("--interval", type=int, help="events of a batch")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    size = replace(size, interval=options.interval or size.interval)
    prices = calibrate(options.threads)
    strategies: dict[str, Strategy | None] = {"adaptive": None, **{str(one): one for one in FIXED}, **RIVALS}
    found: dict[str, dict[str, float]] = {}
    reasons: dict[str, str] = {}
    engines: dict[int, Engine] = {}
    with Progress(transient=True) as progress:
        every = list(cases(size))
        steps = progress.add_task("strategies", total=len(every) + 3)
        for case in every:
            engine = engines.setdefault(
                id(case.program), Engine(case.program, threads=options.threads, calibration=prices)
            )
            found[case.name], reasons[case.name] = rates(case, strategies, size, engine)
            share = found[case.name]["adaptive"] / best_fixed(found[case.name])[1]
            progress.console.print(f"{case.name}: {share:.2f} × {best_fixed(found[case.name])[0]}", style="dim")
            progress.advance(steps)
        phases = {}
        for cost in (10.0, 0.0):
            phases[cost] = dynamic(cost, size, options.threads, prices)
            progress.advance(steps)
        ours, loop = against_a_loop(size, options.threads, prices)
        progress.advance(steps)
    report(found, reasons, phases, ours, loop, options.threads)
    if options.plot:
        plot(options.plot, found)
    closing_line("txn", figures(found, phases, ours, loop), quick=options.quick)


def best_fixed(rates_of: dict[str, float]) -> tuple[str, float]:
    """The fastest of the fixed strategies, by hindsight."""
    return max(((str(one), rates_of[str(one)]) for one in FIXED), key=lambda pair: pair[1])


def figures(
    found: dict[str, dict[str, float]], phases: dict[float, dict[str, dict[str, float]]], ours: float, loop: float
) -> dict[str, Any]:
    """The figures that are wanted."""
    shares = {name: rate["adaptive"] / best_fixed(rate)[1] for name, rate in found.items()}
    worst = min(shares, key=lambda name: shares[name])
    result: dict[str, Any] = {
        "sl_txn_per_s": round(ours),
        "python_loop_txn_per_s": round(loop),
        "python_loop_ratio": round(ours / loop, 1),
        "adaptive_share_of_best_fixed": round(shares[worst], 2),
        "worst_case": worst,
    }
    for cost, rate in phases.items():
        suffix = "" if cost else "_free_of_cost"
        result[f"dynamic_txn_per_s{suffix}"] = round(rate["adaptive"]["all"])
        result[f"dynamic_over_s_store{suffix}"] = round(rate["adaptive"]["all"] / rate["S-Store-like"]["all"], 2)
        result[f"dynamic_over_t_stream{suffix}"] = round(rate["adaptive"]["all"] / rate["TStream-like"]["all"], 2)
    return result


def report(
    found: dict[str, dict[str, float]],
    reasons: dict[str, str],
    phases: dict[float, dict[str, dict[str, float]]],
    ours: float,
    loop: float,
    threads: int,
) -> None:
    """Tables for people."""
    rows = []
    for name, rate in found.items():
        best, fastest = best_fixed(rate)
        chosen = ", ".join(line.split(" for ")[0] for line in reasons[name].splitlines())
        rows.append(
            (
                name,
                f"{rate['adaptive']:,.0f}",
                chosen,
                f"{fastest:,.0f}",
                best,
                f"{rate['adaptive'] / fastest:.2f}",
                f"{rate['S-Store-like']:,.0f}",
                f"{rate['TStream-like']:,.0f}",
            )
        )
    columns = ("", "adaptive/s", "chosen", "best fixed/s", "which", "× best", "S-Store-like/s", "TStream-like/s")
    table(f"transactions per second, {threads} threads (× best wanted: ≥ 0.9)", columns, rows)
    for cost, by_strategy in phases.items():
        adaptive = by_strategy["adaptive"]
        table(
            f"four phases, functions of {cost:g} µs (wanted in all: 3 × S-Store-like, 2.2 × TStream-like)",
            ("", *adaptive, "adaptive is ×"),
            [
                (name, *(f"{value:,.0f}" for value in values.values()), f"{adaptive['all'] / values['all']:.2f}")
                for name, values in by_strategy.items()
            ],
        )
    table(
        "SL without cost of functions, tables included",
        ("", "transactions/s", "× loop", "wanted"),
        [("engine", f"{ours:,.0f}", f"{ours / loop:.1f}", "≥ 5M, ≥ 10 ×"), ("Python loop", f"{loop:,.0f}", "1", "")],
    )


def plot(path: Path, found: dict[str, dict[str, float]]) -> None:
    """For each case, every strategy as a share of the fastest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.4 * len(found) + 1.5))
    for row, rate in enumerate(found.values()):
        fastest = max(rate.values())
        fixed = [value / fastest for other, value in rate.items() if other != "adaptive" and other not in RIVALS]
        axes.plot(fixed, [row] * len(fixed), "|", color="#999999", markersize=12)
        for rival, color in zip(RIVALS, ("#cc6633", "#aa3377"), strict=True):
            axes.plot(rate[rival] / fastest, row, "x", color=color, label=rival if row == 0 else None)
        axes.plot(rate["adaptive"] / fastest, row, "o", color="#2255aa", label="adaptive" if row == 0 else None)
    axes.set_yticks(range(len(found)), list(found))
    axes.set(xlabel="share of the fastest (bars: fixed strategies)", xlim=(0, 1.03))
    axes.invert_yaxis()
    axes.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
