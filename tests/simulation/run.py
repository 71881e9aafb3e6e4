"""Thousands of random flows under random faults, each against the oracle.

``python -m tests.simulation.run --seeds 5000`` takes about an hour. Each seed stands for a flow without state, for one
with state, for one that is changed while it runs, for one whose tasks switch with rivals about, for one of
transactions, and for one under control operations; ``--only`` runs one kind. A seed that fails is printed with its
whole case, and replays alone: ``--start SEED --seeds 1``.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.simulation.changing_check import check_changes
from tests.simulation.changing_flows import changing_case_of
from tests.simulation.flows import Case, check, random_case, random_faults
from tests.simulation.keyed_flows import check_keyed, keyed_case_of
from tests.simulation.switching_flows import ROWS, check_switching
from tests.simulation.traced_controls import check_traces, random_controls
from tests.simulation.transacted_flows import check_transacted, transacted_case_of

KINDS = ("stateless", "keyed", "changes", "switching", "transactions", "controls")


def case_of(seed: int) -> Case:
    """The case that a seed stands for."""
    rng = random.Random(seed)
    case = random_case(rng)
    case.faults = random_faults(rng)
    return case


def run_seed(seed: int, kind: str) -> int:
    """Run a seed; how many rows its sources gave. What it raises shows the whole case."""
    if kind == "stateless":
        return check(case_of(seed)).metrics.rows_in
    with tempfile.TemporaryDirectory() as folder:
        if kind == "changes":
            return check_changes(changing_case_of(seed, Path(folder))).metrics.rows_in
        if kind == "switching":
            check_switching(seed, Path(folder))
            return ROWS
        if kind == "controls":
            return run_controls(seed, Path(folder))
        if kind == "transactions":
            return check_transacted(transacted_case_of(seed, Path(folder))).metrics.rows_in
        return sum(run.metrics.rows_in for run in check_keyed(keyed_case_of(seed, Path(folder))))


def run_controls(seed: int, folder: Path) -> int:
    """Traced control operations on a flow without state, or on one with state."""
    rng = random.Random(seed)
    if seed % 2:
        case = case_of(seed)
        case.controls = random_controls(rng, max(map(len, case.epochs.values())))
        rows = check(case).metrics.rows_in
        check_traces(case.flow.graph, case.controls, ends=False)
        return rows
    keyed = keyed_case_of(seed, folder)
    keyed.controls = random_controls(rng, sum(life.epochs for life in keyed.lives))
    rows = sum(run.metrics.rows_in for run in check_keyed(keyed))
    check_traces(keyed.flow.graph, keyed.controls, ends=False)
    return rows


def story_of(seed: int, kind: str) -> str:
    """The case of a seed, in full."""
    folder = Path("folder")
    if kind == "stateless":
        return str(case_of(seed))
    if kind == "switching":
        return "the flow of tests/simulation/switching_flows.py"
    cases: dict[str, Callable[[int, Path], object]] = {
        "changes": changing_case_of,
        "controls": lambda seed, folder: case_of(seed) if seed % 2 else keyed_case_of(seed, folder),
        "keyed": keyed_case_of,
        "transactions": transacted_case_of,
    }
    return str(cases[kind](seed, folder))


def main() -> int:
    """Run seeds one after the other; the exit code says whether one failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=1000, help="how many seeds to run (default: %(default)s)")
    options.add_argument("--start", type=int, default=0, help="the first seed (default: %(default)s)")
    options.add_argument("--only", choices=KINDS, help="only flows of this kind (default: of all)")
    options.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    args = options.parse_args()
    began, failed, rows = time.perf_counter(), 0, 0
    for seed in range(args.start, args.start + args.seeds):
        for kind in [args.only] if args.only else KINDS:
            try:
                rows += run_seed(seed, kind)
            except Exception:
                failed += 1
                again = f"python -m tests.simulation.run --start {seed} --seeds 1 --only {kind}"
                print(f"\nseed {seed} failed; to see it again: {again}")
                traceback.print_exc(file=sys.stdout)
                print(story_of(seed, kind), flush=True)
                if not args.keep_going:
                    return 1
    took = time.perf_counter() - began
    print(f"{args.seeds} seeds from {args.start}, {rows} source rows, {took:.1f} s: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
