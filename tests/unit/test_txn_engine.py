"""The engine: what it refuses, explains and returns."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pytest

from midstream.errors import SchemaError
from midstream.txn import Batch, Calibration, Engine, MemoryTables, Program, Table, transaction
from midstream.txn.strategies import FIXED, S_STORE, SERIAL, T_STREAM, Strategy

# Kernels are compiled when they are first used, which takes a minute on a new machine.
pytestmark = pytest.mark.long

accounts = Table("accounts", key="string", value="double", default=0.0)
counts = Table("counts", key="bigint", value="bigint", default=0)


@transaction
def add(t: Any, e: Any) -> dict[str, Any]:
    balance = t.read(accounts, e.who) + e.amount
    t.require(balance >= 0, "not enough")
    t.write(accounts, e.who, balance)
    return {"balance": balance}


ADD = Program.of(add.trace({"who": "string", "amount": "double"}))


def test_only_keys_changed_by_committed_transactions_are_returned():
    events = pa.table({"ts": [1, 2, 3], "who": ["ann", "bob", "ann"], "amount": [5.0, -1.0, 1.0]})
    result = Engine(ADD, threads=1).execute(Batch.of(events, order_by="ts"), MemoryTables())
    assert result.changes["accounts"].keys.to_pylist() == ["ann"]
    assert result.changes["accounts"].columns[0].tolist() == [6.0]
    assert result.committed.tolist() == [True, False, True]
    assert [result.reason(row) for row in range(3)] == [None, "not enough", None]


def test_a_batch_that_changes_nothing_has_no_changes():
    events = pa.table({"ts": [1], "who": ["ann"], "amount": [-5.0]})
    assert Engine(ADD, threads=1).execute(Batch.of(events, order_by="ts"), MemoryTables()).changes == {}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ({"ts": [1], "who": ["a"]}, "lack the columns amount"),
        ({"ts": [1], "who": ["a"], "amount": [1]}, "'amount' was traced as double, but in the batch it is int64"),
        ({"ts": [1], "who": ["a"], "amount": [None]}, "'amount' is .* null|null"),
        ({"ts": [1, 2], "who": ["a", None], "amount": [1.0, 2.0]}, "'who' is null in 1 events .* event 1 of the batch"),
    ],
)
def test_events_that_do_not_fit_are_refused(events, message):
    table = pa.table(events, schema=None)
    if table.num_rows == 1 and "amount" in events and events["amount"] == [None]:
        table = table.set_column(2, "amount", pa.array([None], pa.float64()))
    with pytest.raises(SchemaError, match=message):
        Engine(ADD, threads=1).execute(Batch.of(table, order_by="ts"), MemoryTables())


def test_a_batch_needs_timestamps_and_columns_of_equal_length():
    with pytest.raises(SchemaError, match="no column 'when' to order by; they have: ts"):
        Batch.of({"ts": np.array([1])}, order_by="when")
    with pytest.raises(SchemaError, match="must not be null; 1 values are"):
        Batch.of({"ts": pa.array([1, None])}, order_by="ts")
    with pytest.raises(SchemaError, match="whole numbers or times; found float64"):
        Batch.of({"ts": np.array([1.5])}, order_by="ts")
    with pytest.raises(SchemaError, match="must have equal length"):
        Batch.of({"ts": np.array([1]), "a": np.array([1, 2])}, order_by="ts")


def test_an_event_must_trigger_an_existing_transaction():
    events = {"ts": np.array([1, 2]), "who": pa.array(["a", "b"]), "amount": np.ones(2)}
    batch = Batch.of(events, order_by="ts", kinds=[0, 1])
    with pytest.raises(SchemaError, match="trigger transactions 0 to 0; found 0 to 1"):
        Engine(ADD, threads=1).execute(batch, MemoryTables())


def test_a_null_in_an_unused_column_is_allowed():
    @transaction
    def count(t: Any, e: Any) -> None:
        t.write(accounts, e.who, t.read(accounts, e.who) + 1.0)

    program = Program.of(*ADD.types, count.trace({"who": "string"}))
    events = pa.table({"ts": [1, 2], "who": ["a", "b"], "amount": [2.0, None]})
    tables = MemoryTables()
    tables.apply(
        Engine(program, threads=1).execute(Batch.of(events, order_by="ts", kinds=[0, 1]), tables), program.tables
    )
    assert tables.as_dict(accounts) == {"a": (2.0,), "b": (1.0,)}


def test_a_source_that_returns_too_few_values_is_an_error():
    class Short(MemoryTables):
        def load(self, table: Table, keys: Any) -> Any:
            return [column[:-1] for column in super().load(table, keys)]

    events = pa.table({"ts": [1], "who": ["a"], "amount": [2.0]})
    with pytest.raises(SchemaError, match="asked for 1 values, got 0"):
        Engine(ADD, threads=1).execute(Batch.of(events, order_by="ts"), Short())


def test_timestamps_may_be_times():
    when = pa.array([2_000_000, 1_000_000], pa.timestamp("us"))
    events = pa.table({"ts": when, "who": ["a", "a"], "amount": [-3.0, 3.0]})
    result = Engine(ADD, threads=1).execute(Batch.of(events, order_by="ts"), MemoryTables())
    assert result.committed.all()


# ── the user's compiled functions ─────────────────────────────────────────────────────────────────────────────────


@numba.njit
def picky(value):
    if value == 13:
        raise ValueError("thirteen")
    return value + 1


@transaction
def bump(t: Any, e: Any) -> None:
    t.write(counts, e.key, t.call(picky, t.read(counts, e.key) + e.by, returns="bigint"))


BUMP = Program.of(bump.trace({"key": "bigint", "by": "bigint"}))


@pytest.mark.parametrize("strategy", [SERIAL, Strategy("strata"), Strategy("depth"), Strategy("queue"), S_STORE])
def test_an_error_in_one_thread_ends_all_of_them(strategy):
    """The others must not wait forever for what it did not finish."""
    keys = np.arange(400) % 7
    columns = {"ts": np.arange(400), "key": keys, "by": np.where(np.arange(400) == 200, 13 - 28, 0)}
    columns["by"][200] = 13 - 28  # the 29th of its key, which has the value 28 by then
    with pytest.raises(ValueError, match="thirteen"):
        Engine(BUMP, threads=2).execute(Batch.of(columns, order_by="ts"), MemoryTables(), strategy)


# ── choice of strategy ────────────────────────────────────────────────────────────────────────────────────────────


def choice(cost: float, *, keys: int, size: int = 2000, program: Program = BUMP, **prices: float) -> str:
    from midstream.txn.decision import decide
    from midstream.txn.dependencies import BatchLayout
    from midstream.txn.prepared_batch import prepare

    columns = {"ts": np.arange(size), "key": np.arange(size) % keys, "by": np.zeros(size, np.int64)}
    ready = prepare(program, Batch.of(columns, order_by="ts"), MemoryTables())
    decision = decide(
        ready,
        BatchLayout.of(program),
        np.arange(size),
        cost=cost,
        abort_ratio=0.0,
        threads=4,
        calibration=Calibration(**prices),
    )
    return decision.text


def test_cheap_transactions_run_serially():
    assert choice(20e-9, keys=2000).startswith("serial for 2,000 transactions: 20 ns each, 40.0 µs in all")


def test_costly_independent_transactions_run_in_parallel():
    text = choice(10e-6, keys=2000)
    assert not text.startswith("serial")
    assert "1 strata" in text
    assert "20.0 ms serially" in text


def test_one_hot_key_leaves_nothing_to_parallelise():
    text = choice(10e-6, keys=1)
    assert text.startswith("serial")
    assert "2,000 strata" in text


def test_expensive_barriers_rule_out_strata():
    assert "strata/" not in choice(10e-6, keys=200, meeting=1e-3)


def test_an_engine_explains_itself():
    events = pa.table({"ts": [1], "who": ["ann"], "amount": [5.0]})
    engine = Engine(ADD, threads=2)
    assert engine.execute(Batch.of(events, order_by="ts"), MemoryTables(), SERIAL).explanation == "serial, as requested"
    assert engine.execute(Batch.of(events, order_by="ts"), MemoryTables()).explanation.startswith("serial for 0")
    with pytest.raises(SchemaError, match="at least one thread"):
        Engine(ADD, threads=0)


def test_strategies_have_distinct_names():
    names = [str(strategy) for strategy in (*FIXED, S_STORE, T_STREAM)]
    assert len(set(names)) == len(names) == 19


def with_weights(weights: Any) -> Program:
    """A program that calls a function with a large object in its closure."""

    @numba.njit
    def scaled(amount: Any) -> Any:
        return amount * weights[0]

    @transaction
    def scale(t: Any, e: Any) -> None:
        t.write(accounts, e.who, t.call(scaled, e.amount, returns="double"))

    return Program.of(scale.trace({"who": "string", "amount": "double"}))


def test_a_machine_with_user_functions_is_dropped_after_use_and_one_without_is_kept():
    known = set(sys.modules)
    engine = Engine(with_weights((2.0,) * 10), threads=1)
    gone = weakref.ref(engine.machine)
    events = pa.table({"ts": [1], "who": ["ann"], "amount": [5.0]})
    result = engine.execute(Batch.of(events, order_by="ts"), MemoryTables())
    assert result.changes["accounts"].columns[0].tolist() == [10.0]
    assert Engine(engine.program, threads=1).machine is engine.machine, "cached while it is used"
    del engine, result
    gc.collect()
    assert gone() is None
    assert {name for name in set(sys.modules) - known if name.startswith("transactions_")} == set()
    assert Engine(ADD, threads=1).machine is Engine(ADD, threads=1).machine
