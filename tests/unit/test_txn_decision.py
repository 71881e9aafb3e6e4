"""The choice of a strategy: simulated schedules, similar batches, and digests of compiled functions."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from midstream.txn import Batch, Calibration, Engine, MemoryTables, Program, Table, decision, transaction
from midstream.txn import engine as engine_module
from midstream.txn.dependencies import Units
from midstream.txn.digests import digest_of
from midstream.txn.schedule_cost import depth_seconds, queue_seconds, strata_seconds, work_of

# Kernels are compiled when they are first used, which takes a minute on a new machine.
pytestmark = pytest.mark.long


def units(*needs: tuple[int, ...]) -> Units:
    """One member per unit; unit u needs ``needs[u]``."""
    levels: list[int] = []
    for mine in needs:
        levels.append(max((levels[other] + 1 for other in mine), default=0))
    before = np.cumsum([0, *(len(mine) for mine in needs)])
    needed = np.array([other for mine in needs for other in mine], np.int64)
    return Units(np.arange(len(needs) + 1), np.arange(len(needs)), before, needed, np.array(levels, np.int64))


def test_a_chain_takes_its_total_time_with_any_strategy():
    chain, work = units((), (0,), (1,), (2,)), np.array([1.0, 2.0, 3.0, 4.0])
    assert queue_seconds(chain, work, 2, 0.0) == 10.0
    assert depth_seconds(chain, work, 2, 0.0) == 10.0
    assert strata_seconds(chain, work, 2, 0.0) == 10.0
    assert strata_seconds(chain, work, 2, 0.5) == 12.0, "four meetings"


def test_independent_units_are_divided_among_threads():
    free, work = units((), (), (), ()), np.ones(4)
    assert queue_seconds(free, work, 2, 0.25) == 2.5
    assert depth_seconds(free, work, 2, 0.25) == 2.5
    assert strata_seconds(free, work, 2, 0.25) == 2.25


def test_only_a_queue_avoids_waiting_for_a_slow_unit():
    # Units 0 and 1 are ready; 2 needs 1, which is fast, while 0 is slow.
    graph, work = units((), (), (1,), (2,)), np.array([3.0, 1.0, 1.0, 1.0])
    assert queue_seconds(graph, work, 2, 0.0) == 3.0
    assert strata_seconds(graph, work, 2, 0.0) == 5.0


def test_the_work_of_a_unit_is_the_sum_of_its_members():
    pairs = Units(np.array([0, 2, 3]), np.array([2, 0, 1]), np.zeros(3, np.int64), np.empty(0, np.int64), np.zeros(2))
    assert work_of(pairs, np.array([1.0, 10.0, 100.0])).tolist() == [101.0, 10.0]


# ── similar batches ───────────────────────────────────────────────────────────────────────────────────────────────

counts = Table("counts", key="bigint", value="double", default=0.0)


@numba.njit
def slowly(value: float) -> float:
    x = 1.0
    for _ in range(4000):
        x = x * 1.0000001 + 1e-9
    return value + (x - x)


@transaction
def count(t: Any, e: Any) -> None:
    t.write(counts, e.key, t.call(slowly, t.read(counts, e.key) + 1.0))


PROGRAM = Program.of(count.trace({"key": "bigint"}))


def batch(keys: int, size: int = 600) -> Batch:
    rng = np.random.default_rng(7)
    return Batch.of({"ts": np.arange(size), "key": rng.integers(0, keys, size)}, order_by="ts")


def test_a_similar_batch_repeats_the_strategy_and_a_different_one_is_evaluated(monkeypatch):
    looked: list[int] = []
    real = decision.decide

    def noting(*args: Any, **named: Any) -> Any:
        looked.append(len(args[2]))
        return real(*args, **named)

    monkeypatch.setattr(engine_module, "decide", noting)
    # Threads cost nothing here, so that there is a choice on any machine.
    engine = Engine(PROGRAM, threads=2, calibration=Calibration(start=0.0, plan=0.0, join=0.0))
    engine._is_known_to_be_cheap = lambda members: False  # type: ignore[method-assign]
    monkeypatch.setattr(engine, "_timed", _always(engine, 10e-6))
    tables = MemoryTables()
    first = engine.execute(batch(300), tables)
    second = engine.execute(batch(300), tables)
    assert len(looked) == 1
    assert "similar to the previous batch" in second.explanation
    assert second.explanation.split(" for ")[0] == first.explanation.split(" for ")[0]
    engine.execute(batch(3), tables)
    assert len(looked) == 2, "far fewer keys: not similar"
    for _ in range(engine_module.REPEATS + 1):
        engine.execute(batch(3), tables)
    assert len(looked) == 3, "evaluated again now and then"


def test_the_first_batch_already_measures_the_cost():
    engine = Engine(PROGRAM, threads=2)
    assert "serial" not in engine.execute(batch(300, size=4000), MemoryTables()).explanation.split(" for ")[0]


def _always(engine: Engine, cost: float) -> Any:
    """A clock that shows the given cost per transaction, regardless of the load of the machine."""
    real = engine._timed

    def timed(ready: Any, members: Any) -> float:
        real(ready, members)
        return cost * len(members)

    return timed


# ── digests ───────────────────────────────────────────────────────────────────────────────────────────────────────


def made(text: str, **names: Any) -> Any:
    exec(text, names)
    return names["f"]


def test_a_digest_changes_with_the_code():
    digest = digest_of(made("def f(x): return x + 1"))
    assert digest is not None
    assert digest == digest_of(made("def f(x): return x + 1"))
    assert digest != digest_of(made("def f(x): return x + 2"))
    assert digest != digest_of(numba.njit(fastmath=True)(made("def f(x): return x + 1")))


def test_a_digest_changes_with_used_constants_and_functions():
    text = "def f(x): return g(x) + step"
    one, two = made("def f(x): return x"), made("def f(x): return -x")
    digests = [digest_of(made(text, g=g, step=step)) for g in (one, two) for step in (1, 2)]
    assert len(set(digests)) == 4
    assert None not in digests

    def inside(step: float) -> Any:
        return lambda x: x + step

    assert digest_of(inside(1.0)) != digest_of(inside(2.0))
    assert digest_of(inside(1.0)) == digest_of(inside(1.0))


@pytest.mark.parametrize("unknown", [np.zeros(3), {"a": 1}, object(), [1]])
def test_there_is_no_digest_if_a_value_cannot_be_determined(unknown):
    assert digest_of(made("def f(x): return used", used=unknown)) is None


def test_numpy_and_math_have_digests():
    import math

    assert digest_of(made("def f(x): return np.sqrt(x) + math.pi + abs(x)", np=np, math=math)) is not None
