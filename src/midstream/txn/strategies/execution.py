"""Runs a prepared batch, or some of its transactions, with a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.txn import dependencies
from midstream.txn.batches import DTYPES
from midstream.txn.compiler import Machine
from midstream.txn.dependencies import BatchLayout, Units
from midstream.txn.keys import IntKeys
from midstream.txn.operations import Operations, chains, operations
from midstream.txn.prepared_batch import PreparedBatch
from midstream.txn.strategies import Strategy
from midstream.txn.strategies.interpreter import run_columns
from midstream.txn.strategies.threads import run_in_threads

__all__ = ["RunSummary", "run", "run_serial"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RunSummary:
    """Statistics of a run: units, strata, and transactions that were run again because of aborts."""

    units: int
    depth: int
    redone: int = 0


def run(
    batch: PreparedBatch,
    machine: Machine,
    layout: BatchLayout,
    members: Array,
    strategy: Strategy,
    threads: int,
    units: Units | None = None,
) -> RunSummary:
    """Run transactions, given by their positions in order. Afterwards tables, reasons and outputs are up to date.

    ``units`` are their whole-transaction units, if they are already known.
    """
    if not len(members):
        return RunSummary(0, 0)
    if strategy.exploration == "serial":
        run_serial(batch, machine, members)
        return RunSummary(len(members), len(members))
    late = bool(layout.late.any())
    if batch.program.interpreted:
        units = units or dependencies.transactions(batch, layout, members)
        run_columns(batch, units)
        return RunSummary(len(units), units.depth)
    if strategy.exploration == "partitions":
        return _run_partitions(batch, machine, layout, members, threads)
    if strategy.on_versions and not late:
        return _run_versions(batch, machine, layout, members, strategy, threads)
    # Operations and chains need all keys in advance; with late keys, whole transactions are scheduled instead.
    if strategy.granularity == "component":
        units = dependencies.components(batch, layout, members)
    elif units is None:
        units = dependencies.transactions(batch, layout, members)
    explore(machine, strategy.exploration, units, threads, "", place_state(batch, machine))
    return RunSummary(len(units), units.depth)


def run_serial(batch: PreparedBatch, machine: Machine, members: Array) -> None:
    """Run transactions one after the other."""
    with np.errstate(all="ignore"):  # for interpreted programs; compiled code ignores it
        machine["in_order"](0, len(members), members, *place_state(batch, machine))


def _run_partitions(
    batch: PreparedBatch, machine: Machine, layout: BatchLayout, members: Array, threads: int
) -> RunSummary:
    units, home = dependencies.partitions(batch, layout, members, threads)
    done, failed = np.zeros(len(units), np.int64), np.zeros(1, np.int64)
    state = (units.before, units.needed, done, failed, units.starts, units.members, *place_state(batch, machine))
    run_in_threads(machine["depth_first"], [(np.flatnonzero(home == part), *state) for part in range(threads)], failed)
    return RunSummary(len(units), units.depth)


def _run_versions(
    batch: PreparedBatch, machine: Machine, layout: BatchLayout, members: Array, strategy: Strategy, threads: int
) -> RunSummary:
    eager = strategy.aborts == "eager"
    found = operations(batch, layout, members, waiting=eager)
    units = chains(found)[0] if strategy.granularity == "chain" else found.units
    state = version_state(batch, machine, found)
    redone = 0
    if strategy.aborts == "redo":
        redone = _redo_until_stable(batch, machine, layout, members, strategy, threads, units, state)
    else:
        explore(machine, strategy.exploration, units, threads, "_on_versions", (eager, *state.values()))
        if not eager:
            redone = _repair(batch, machine, layout, members, found, state)
    machine["conclude_all"](0, len(members), members, *state.values())
    machine["settle_all"](0, len(members), members, *state.values())
    return RunSummary(len(units), units.depth, redone)


def _redo_until_stable(
    batch: PreparedBatch,
    machine: Machine,
    layout: BatchLayout,
    members: Array,
    strategy: Strategy,
    threads: int,
    units: Units,
    state: dict[str, Any],
) -> int:
    """TStream: run all, see what failed, run all again without it.

    This terminates, because whether a transaction fails depends only on earlier ones.
    """
    redone = -len(members)
    while True:
        explore(machine, strategy.exploration, units, threads, "_on_versions", (False, *state.values()))
        redone += len(members)
        owners = state["x_owners"][state["x_verdicts"] == 2]
        failed = np.zeros(len(batch), np.int8)
        failed[owners] = 1
        if np.array_equal(failed, state["x_aborted"]):
            return redone
        state["x_aborted"][:] = failed


def _repair(
    batch: PreparedBatch,
    machine: Machine,
    layout: BatchLayout,
    members: Array,
    found: Operations,
    state: dict[str, Any],
) -> int:
    redone = machine["repair"](
        members,
        batch.kinds,
        batch.bases,
        layout.slots,
        found.origins,
        found.starts,
        layout.checks,
        layout.steps,
        layout.windows,
        state["x_aborted"],
        state["x_verdicts"],
        np.zeros(len(found.owners), np.int8),
        False,
        *state.values(),
    )
    return int(redone)


def explore(
    machine: Machine, exploration: str, units: Units, threads: int, suffix: str, state: tuple[Any, ...]
) -> None:
    """Visit all units, each after those that it needs."""
    failed = np.zeros(1, np.int64)
    common = (failed, units.starts, units.members, *state)
    if exploration == "strata":
        strata, order = units.strata
        arrived = np.zeros(1, np.int64)
        calls = [(thread, threads, strata, order, arrived, *common) for thread in range(threads)]
        run_in_threads(machine[f"by_strata{suffix}"], calls, failed)
    elif exploration == "depth":
        order = units.strata[1]
        done = np.zeros(len(units), np.int64)
        calls = [
            (np.ascontiguousarray(order[thread::threads]), units.before, units.needed, done, *common)
            for thread in range(threads)
        ]
        run_in_threads(machine[f"depth_first{suffix}"], calls, failed)
    else:
        after, dependents, missing = units.dependents
        ready = np.flatnonzero(missing == 0)
        queue = np.full(len(units), -1, np.int64)
        queue[: len(ready)] = ready
        ends = np.array([0, len(ready)], np.int64)
        run_in_threads(
            machine[f"from_queue{suffix}"],
            [(queue, ends, missing.copy(), after, dependents, *common)] * threads,
            failed,
        )


# ── arguments of kernels ──────────────────────────────────────────────────────────────────────────────────────────


def place_state(batch: PreparedBatch, machine: Machine) -> tuple[Any, ...]:
    """The arrays that ``run`` takes, in order."""
    held = _common(batch)
    for number in batch.program.late_tables:
        if batch.program.interpreted:
            held[f"K{number}"] = batch.growing_keys(number).add_one
        else:
            known = batch.growing_keys(number)
            assert isinstance(known, IntKeys)  # strings make a program interpreted
            held.update({f"K{number}_{part}": array for part, array in enumerate(known.parts)})
    return tuple(held[name] for name in machine.generated.place)


def version_state(batch: PreparedBatch, machine: Machine, found: Operations) -> dict[str, Any]:
    """The arrays that ``run_operation`` takes, by name, in order."""
    held = _common(batch)
    held.update(x_origins=found.origins, x_owners=found.owners, x_starts=found.starts, x_older=found.older)
    held.update(x_aborted=np.zeros(len(batch), np.int8), x_verdicts=np.zeros(len(found.owners), np.int8))
    for number, table in enumerate(batch.program.tables):
        for position, column in enumerate(table.columns):
            held[f"V{number}_{position}"] = np.empty(len(found.owners), DTYPES[column.kind])
    return {name: held[name] for name in machine.generated.version}


def _common(batch: PreparedBatch) -> dict[str, Any]:
    held: dict[str, Any] = {
        "x_kinds": batch.kinds,
        "x_bases": batch.bases,
        "x_keys": batch.keys,
        "x_timestamps": batch.timestamps,
        "x_reasons": batch.reasons,
    }
    held.update({f"E_{name}": column for name, column in batch.events.items()})
    held.update({f"O_{name}": column for name, column in batch.outputs.items()})
    for number, columns in enumerate(batch.tables):
        held[f"N{number}"] = batch.changed[number]
        held.update({f"T{number}_{position}": column for position, column in enumerate(columns)})
    for number, log in batch.logs.items():
        held.update({f"B{number}": log.base, f"H{number}": log.head, f"P{number}": log.older})
        held.update({f"S{number}": log.times, f"W{number}": log.newest})
        held.update({f"L{number}_{position}": column for position, column in enumerate(log.columns)})
    return held
