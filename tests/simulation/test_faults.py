"""Repeated faults of the local runtime become rarer, so that every run ends."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from midstream import Flow, ListSource, MemorySink, State
from midstream.runtime.local import runtime as local
from midstream.runtime.local import tasks as local_tasks
from midstream.testing import Faults, LocalRun, ManualClock, run_local
from tests.oracle import Row

KEYS, ROWS, EPOCHS = 7, 40, 2


def numbered(key: Any, row: Row, state: State) -> Row:
    """The row, with its number among those of its key."""
    count = state.get(0) + 1
    state.set(count)
    return {**row, "count": count}


def chain(operators: int) -> tuple[Flow, MemorySink]:
    """A chain of operators with state, with an exchange before each."""
    flow, out = Flow("chain"), MemorySink()
    epochs = [[{"id": ROWS * epoch + n, "k": n % KEYS, "count": 0} for n in range(ROWS)] for epoch in range(EPOCHS)]
    rows = flow.source("in", ListSource(epochs, "id bigint, k bigint, count bigint", partitions=2))
    for number in range(operators):
        rows = rows.key_by(f"key{number}", "k").process(f"count{number}", numbered)
    rows.sink("out", out)
    return flow, out


def run_counted(flow: Flow, faults: Faults, partitions: int) -> tuple[LocalRun, Counter[int]]:
    """Run a flow; return also the number of runs of each epoch."""
    runs: Counter[int] = Counter()
    make_ready = local._Runtime.make_ready

    def counted(self: Any) -> None:
        runs[self._epoch] += 1
        make_ready(self)

    with patch.object(local._Runtime, "make_ready", counted):
        return run_local(flow, partitions=partitions, seed=1, faults=faults, clock=ManualClock()), runs


def assert_exact(out: MemorySink) -> None:
    """Check that every row came once, and was counted once."""
    assert sorted(row["id"] for row in out.rows) == list(range(ROWS * EPOCHS))
    for key in range(KEYS):
        counts = [row["count"] for row in out.rows if row["k"] == key]
        assert sorted(counts) == list(range(1, len(counts) + 1))


def test_an_epoch_succeeds_after_a_few_runs_because_faults_become_rarer():
    """With these chances, a run of 300 steps would succeed once in a hundred million times."""
    flow, out = chain(operators=6)
    run, runs = run_counted(flow, Faults(crash=0.05, speculate=0.1, crash_driver=0.03, give_up=0.03), partitions=8)
    assert run.metrics.epochs == EPOCHS
    assert_exact(out)
    assert set(runs) == set(range(EPOCHS))
    assert max(runs.values()) <= 20
    assert min(runs.values()) > local.FULL_RUNS, "the faults did occur"


@pytest.mark.parametrize(
    "faults", [Faults(crash=0.5), Faults(speculate=0.5), Faults(lose_output=0.5), Faults(0.3, 0.5, lose_output=0.3)]
)
@pytest.mark.long
def test_a_task_of_many_steps_succeeds(faults: Faults):
    flow, out = chain(operators=2)
    with patch.object(local_tasks, "MAX_SLICE", 1):
        _, runs = run_counted(flow, faults, partitions=2)
    assert_exact(out)
    assert max(runs.values()) == 1, "no whole run is given up for it"
