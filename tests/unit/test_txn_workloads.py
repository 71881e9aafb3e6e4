"""The workloads of the benchmark match the oracle, and have the properties they claim."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from benchmarks.workloads import grepsum, ledger, shared_tables, tolls
from midstream.txn import Batch, Engine, MemoryTables, Program
from midstream.txn.strategies import SERIAL, Strategy

# Kernels are compiled when they are first used, which takes a minute on a new machine.
pytestmark = pytest.mark.long

LEDGER = ledger.Knobs(keys=50, skew=0.6, aborts=0.1, interval=150, cost=0.0)
GREPS = grepsum.Knobs(keys=40, skew=0.6, aborts=0.1, interval=120, cost=0.0, window=60, every=10)
TOLLS = tolls.Knobs(segments=20, aborts=0.1, interval=150, cost=0.0, hot=0.3)

CASES: dict[str, tuple[Program, list[Batch]]] = {
    "ledger": (ledger.program(0.0), list(islice(ledger.batches(LEDGER), 2))),
    "plain": (grepsum.plain(GREPS), list(islice(grepsum.batches(GREPS), 2))),
    "windowed": (grepsum.windowed(GREPS), list(islice(grepsum.batches(GREPS, "windowed"), 2))),
    "wandering": (grepsum.wandering(GREPS), list(islice(grepsum.batches(GREPS, "wandering"), 2))),
    "tolls": (tolls.program(0.0), list(islice(tolls.batches(TOLLS), 2))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", [SERIAL, Strategy("queue"), None], ids=str)
def test_the_engine_agrees_with_the_oracle(name, strategy):
    program, batches = CASES[name]
    expected, oracle = shared_tables.oracle(program, batches)
    engine, tables = Engine(program, threads=1), MemoryTables()
    for batch, wanted in zip(batches, expected, strict=True):
        result = engine.execute(batch, tables, strategy)
        tables.apply(result, program.tables)
        assert result.committed.tolist() == [outcome.committed for outcome in wanted]
        for row, outcome in enumerate(wanted):
            for column, value in outcome.returned.items():
                assert result.returned[column][row] == value
    for table in program.tables:
        assert tables.as_dict(table) == oracle.values.get(table.name, {})


def test_the_python_loop_matches_the_oracle():
    program, batches = CASES["ledger"]
    expected, oracle = shared_tables.oracle(program, batches)
    money: dict[int, float] = {}
    goods: dict[int, float] = {}
    for batch, wanted in zip(batches, expected, strict=True):
        assert ledger.python_loop(batch, money, goods) == [outcome.committed for outcome in wanted]
    assert {key: (value,) for key, value in money.items()} == oracle.values["accounts"]
    assert {key: (value,) for key, value in goods.items()} == oracle.values["assets"]


def test_generators_are_seeded():
    def columns(seed: int) -> Any:
        batch = next(ledger.batches(ledger.Knobs(interval=20, seed=seed)))
        return [column.tolist() for column in batch.columns.values()]

    assert columns(3) == columns(3)
    assert columns(3) != columns(4)


def test_aborts_have_the_requested_frequency():
    knobs = ledger.Knobs(interval=4000, aborts=0.3, transfers=1.0, cost=0.0)
    result = Engine(ledger.program(0.0), threads=1).execute(next(ledger.batches(knobs)), MemoryTables(), SERIAL)
    assert 0.26 < 1 - result.committed.mean() < 0.34


def test_the_dynamic_workload_has_its_phases():
    found = list(ledger.dynamic(ledger.Knobs(interval=500), each=2))
    assert [phase for phase, _ in found] == [
        phase for phase in ("deposits", "skew", "transfers", "aborts") for _ in "12"
    ]
    assert found[0][1].kinds.max() == 0, "deposits only"
    assert found[-1][1].kinds.min() == 1, "transfers only"
    busiest = [np.bincount(batch.columns["account"]).max() for _, batch in found]
    assert busiest[3] > 3 * busiest[0], "skew"
    assert (found[-1][1].columns["amount"] > 1e9).mean() > 0.8, "aborts"


def test_a_cost_takes_the_requested_time():
    rounds = shared_tables.rounds_for(50.0)
    assert rounds > 100 * shared_tables.rounds_for(0.0)
    assert shared_tables.rounds_for(100.0) == pytest.approx(2 * rounds, rel=0.5)
    assert shared_tables.spin(3.25, rounds) == 3.25
