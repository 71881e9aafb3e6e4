"""Every strategy, on any batch, equals running the transactions one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.txn import Batch, Calibration, Engine, MemoryTables, Program, Table, transaction
from midstream.txn import engine as engine_module
from midstream.txn.decision import Decision, Group
from midstream.txn.dependencies import components
from midstream.txn.serial import SerialTables, TransactionOutcome, run_serially
from midstream.txn.strategies import FIXED, S_STORE, SERIAL, T_STREAM, Strategy
from tests.examples import examples

# Kernels are compiled when they are first used, which takes a minute on a new machine.
pytestmark = pytest.mark.long

EVERY: tuple[Strategy | None, ...] = (None, *FIXED, S_STORE, T_STREAM)
CHEAP_THREADS = Calibration(start=0.0, plan=0.0, join=0.0, operation=0.0, chain=0.0, meeting=0.0, wait=0.0, queue=0.0)

accounts = Table("accounts", key="bigint", value="double", default=10.0)
stock = Table("stock", key="bigint", value="pieces bigint, sold boolean", default={"pieces": 3, "sold": False})
totals = Table("totals", key="bigint", value="bigint", default=0)


@transaction
def deposit(t, e):
    balance = t.read(accounts, e.a)
    t.write(accounts, e.a, balance + e.amount)
    return {"seen": balance}


@transaction
def transfer(t, e):
    balance = t.read(accounts, e.a)
    t.require(balance >= e.amount, "not enough")
    t.write(accounts, e.a, balance - e.amount)
    t.write(accounts, e.b, t.read(accounts, e.b) + e.amount)  # sees the line above if a and b are the same account
    return {"seen": t.read(accounts, e.b)}


@transaction
def buy(t, e):
    """Two tables; the second check comes after a write and reads it back."""
    piece = t.read(stock, e.b)
    t.write(stock, e.b, {"pieces": piece.pieces - 1, "sold": True})
    t.require(t.read(stock, e.b).pieces >= 0, "sold out")
    t.write(accounts, e.a, t.max(t.read(accounts, e.a) - 2 * e.amount, t.where(piece.sold, -50.0, -20.0)))
    t.require(t.read(accounts, e.a) >= -40.0, "too poor")
    t.write(totals, e.b % 2, t.read(totals, e.b % 2) + t.floor(e.amount))


@transaction
def watch(t, e):
    """A condition on one window; other windows are written and returned."""
    recent = t.window(accounts, e.a, 4, "sum")
    t.require(recent <= 60.0, "overheated")
    t.write(totals, e.b, t.window(totals, e.b, 6, "max") + t.window(accounts, e.a, 3, "count"))
    return {"seen": t.window(accounts, e.b, 5, "mean") - t.window(accounts, e.b, 5, "min")}


SCHEMA = {"a": "bigint", "b": "bigint", "amount": "double"}
LEDGER = Program.of(*(one.trace(SCHEMA) for one in (deposit, transfer, buy, watch)))


def rows_of(program: Program, batch: Batch) -> list[tuple[int, int, dict[str, Any]]]:
    columns = {
        name: column.to_pylist() if hasattr(column, "to_pylist") else column.tolist()
        for name, column in batch.columns.items()
    }
    return [
        (int(time), int(kind), {name: column[row] for name, column in columns.items()})
        for row, (time, kind) in enumerate(zip(batch.timestamps, batch.kinds, strict=True))
    ]


def same(left: Any, right: Any) -> bool:
    return bool(left == right or (left != left and right != right))


def outcomes(result: Any, program: Program) -> list[TransactionOutcome]:
    found = []
    for row, committed in enumerate(result.committed.tolist()):
        returns = program.types[int(result.kinds[row])].returns
        returned = {name: result.returned[name][row] for name in returns} if committed else {}
        found.append(TransactionOutcome(committed, result.reason(row), returned))
    return found


def assert_as_serial(
    program: Program, batches: Sequence[Batch], strategies: Sequence[Strategy | None] = EVERY, threads: int = 1
) -> None:
    """Run the batches in order with each strategy, and compare everything with the oracle."""
    oracle = SerialTables()
    expected = [run_serially(program.types, rows_of(program, batch), oracle) for batch in batches]
    for strategy in strategies:
        engine = Engine(program, threads=threads, calibration=CHEAP_THREADS)
        tables = MemoryTables()
        for batch, wanted in zip(batches, expected, strict=True):
            result = engine.execute(batch, tables, strategy)
            tables.apply(result, program.tables)
            for row, (got, want) in enumerate(zip(outcomes(result, program), wanted, strict=True)):
                assert (got.committed, got.reason) == (want.committed, want.reason), (str(strategy), row)
                assert got.returned.keys() == want.returned.keys()
                assert all(same(got.returned[name], want.returned[name]) for name in got.returned), (str(strategy), row)
        for table in program.tables:
            assert tables.as_dict(table) == oracle.values.get(table.name, {}), str(strategy)


def batch_of(events: Sequence[tuple[int, int, int, int, float]]) -> Batch:
    kinds, times, a, b, amounts = ([event[i] for event in events] for i in range(5))
    columns = {
        "ts": np.array(times, np.int64),
        "a": np.array(a, np.int64),
        "b": np.array(b, np.int64),
        "amount": np.array(amounts, np.float64),
    }
    return Batch.of(columns, order_by="ts", kinds=np.array(kinds, np.int8))


def batches(kinds: int, keys: int = 4, largest: int = 24) -> st.SearchStrategy[list[Batch]]:
    """Few keys, so that they are hot; few timestamps, so that some are equal; any order."""
    event = st.tuples(
        st.integers(0, kinds - 1),
        st.integers(0, 12),
        st.integers(0, keys - 1),
        st.integers(0, keys - 1),
        st.sampled_from([0.0, 1.0, 3.0, 4.0, 7.0, 11.0, 25.0]),
    )
    return st.lists(st.lists(event, max_size=largest).map(batch_of), min_size=1, max_size=2)


@examples(25)
@given(batches(kinds=4))
def test_all_strategies_equal_serial_execution(given_batches):
    assert_as_serial(LEDGER, given_batches)


@examples(5)  # threads that wait for each other are slow on a busy machine
@given(batches(kinds=4, keys=2), st.sampled_from([2, 3]))
def test_hot_keys_with_several_threads_equal_serial_execution(given_batches, threads):
    assert_as_serial(LEDGER, given_batches, threads=threads)


@examples(20)
@given(batches(kinds=2, keys=6, largest=60))
def test_money_is_neither_created_nor_lost(given_batches):
    for strategy in EVERY:
        engine, tables = Engine(LEDGER, threads=1, calibration=CHEAP_THREADS), MemoryTables()
        paid_in = 0.0
        for batch in given_batches:
            result = engine.execute(batch, tables, strategy)
            tables.apply(result, LEDGER.tables)
            paid_in += float(batch.columns["amount"][(batch.kinds == 0) & result.committed].sum())
        held = tables.as_dict(accounts)
        assert sum(value for (value,) in held.values()) == 10.0 * len(held) + paid_in, str(strategy)


# ── the examples of the paper ─────────────────────────────────────────────────────────────────────────────────────

DEPOSIT, TRANSFER, BUY, WATCH = range(4)


def test_an_abort_cascades_three_deep():
    """Account 0 cannot pay 1, so 1 cannot pay 2, so 2 cannot pay 3, so 3 cannot pay 0."""
    events = [(TRANSFER, time, time, (time + 1) % 4, 20.0 + 10 * time) for time in range(4)]
    oracle = run_serially(LEDGER.types, rows_of(LEDGER, batch_of(events)), SerialTables())
    assert [outcome.committed for outcome in oracle] == [False] * 4
    assert_as_serial(LEDGER, [batch_of(events)])


def test_an_abort_lets_a_later_transaction_succeed():
    """The first transaction would have taken the money that the second needs."""
    events = [(TRANSFER, 1, 0, 1, 25.0), (TRANSFER, 2, 0, 1, 8.0), (TRANSFER, 3, 1, 2, 18.0)]
    oracle = run_serially(LEDGER.types, rows_of(LEDGER, batch_of(events)), SerialTables())
    assert [outcome.committed for outcome in oracle] == [False, True, True]
    assert_as_serial(LEDGER, [batch_of(events)])


def test_a_check_that_fails_late_undoes_the_whole_transaction():
    poor = [(BUY, 1, 0, 1, 11.0), (BUY, 2, 0, 1, 25.0)]
    events = [*poor, (BUY, 3, 2, 1, 1.0), (BUY, 4, 3, 1, 1.0), (BUY, 5, 3, 1, 1.0)]
    oracle = run_serially(LEDGER.types, rows_of(LEDGER, batch_of(events)), SerialTables())
    assert {outcome.reason for outcome in oracle} == {None, "too poor", "sold out"}
    assert_as_serial(LEDGER, [batch_of(events)])


def test_a_transfer_to_oneself_changes_nothing():
    events = [(TRANSFER, 1, 2, 2, 4.0), (TRANSFER, 2, 2, 2, 10.0), (TRANSFER, 3, 2, 2, 10.5)]
    assert_as_serial(LEDGER, [batch_of(events)])
    tables = MemoryTables()
    tables.apply(Engine(LEDGER, threads=1).execute(batch_of(events), tables), LEDGER.tables)
    assert tables.as_dict(accounts) == {2: (10.0,)}


def test_arrival_breaks_ties():
    events = [(TRANSFER, 5, 0, 1, 8.0), (TRANSFER, 5, 0, 2, 8.0), (TRANSFER, 1, 3, 0, 1.0)]
    result = Engine(LEDGER, threads=1).execute(batch_of(events), MemoryTables())
    assert result.committed.tolist() == [True, False, True]
    assert_as_serial(LEDGER, [batch_of(events)])


@pytest.mark.parametrize("events", [[], [(DEPOSIT, 7, 1, 1, 3.0)], [(TRANSFER, 7, 1, 2, 99.0)]])
def test_batches_of_zero_and_one_event_work(events):
    assert_as_serial(LEDGER, [batch_of(events)])


def test_windows_reach_back_into_earlier_batches():
    first = [(DEPOSIT, time, 0, 0, 11.0) for time in range(1, 5)]
    second = [(WATCH, 6, 0, 1, 0.0), (DEPOSIT, 3, 0, 0, 7.0), (WATCH, 7, 0, 1, 0.0), (WATCH, 30, 0, 1, 0.0)]
    assert_as_serial(LEDGER, [batch_of(first), batch_of(second), batch_of(first[:1])])


@pytest.mark.parametrize("keys", [40, 4000])
def test_a_large_batch_with_contending_threads_equals_serial_execution(keys):
    rng = np.random.default_rng(5)
    size = 800
    columns = [rng.integers(0, high, size).tolist() for high in (4, size, keys, keys, 15)]
    events = [(kind, time, a, b, float(amount)) for kind, time, a, b, amount in zip(*columns, strict=True)]
    assert_as_serial(LEDGER, [batch_of(events)], threads=2)


def test_groups_without_common_keys_may_have_different_strategies(monkeypatch):
    """Every component with another strategy, one after the other, equals serial execution."""

    def by_component(batch: Any, layout: Any, members: Any, **measured: Any) -> Decision:
        parts = components(batch, layout, members)
        groups = [
            Group(parts.members[parts.starts[x] : parts.starts[x + 1]], FIXED[x % len(FIXED)], None, "a test")
            for x in range(len(parts))
        ]
        return Decision(tuple(groups))

    monkeypatch.setattr(engine_module, "decide", by_component)
    rng = np.random.default_rng(8)
    size = 300
    columns = [rng.integers(0, high, size).tolist() for high in (2, size, 150, 150, 15)]
    events = [(kind, time, a, b, float(amount)) for kind, time, a, b, amount in zip(*columns, strict=True)]
    assert_as_serial(LEDGER, [batch_of(events)], strategies=(None,), threads=2)
    result = Engine(LEDGER, threads=1).execute(batch_of(events), MemoryTables())
    assert len(result.explanation.splitlines()) > 5
    assert "strata/operation/lazy for" in result.explanation


# ── keys that are computed at run time ────────────────────────────────────────────────────────────────────────────


@numba.njit
def hop(place, step):
    return (place * 3 + step) % 7


@transaction
def follow(t, e):
    """Read a key from a value, read the value there, and write to yet another key."""
    place = t.key(hop, t.read(totals, e.a), e.b)
    found = t.read(totals, place)
    t.require(found < 40)
    t.write(totals, t.key(found % 5), found + 1)
    t.write(totals, place, t.read(totals, place) + 2)
    return {"seen": found}


@transaction
def put(t, e):
    t.write(totals, e.a, t.read(totals, e.a) * 2 + e.b)


WANDERING = Program.of(*(one.trace({"a": "bigint", "b": "bigint"}) for one in (follow, put)))


@examples(25)
@given(batches(kinds=2, keys=9))
def test_late_keys_equal_serial_execution(given_batches):
    assert_as_serial(WANDERING, given_batches)


# ── Python functions and objects ──────────────────────────────────────────────────────────────────────────────────

names = Table("names", key="string", value="object", default=())
scores = Table("scores", key="string", value="double", default=1.0)


@transaction
def remember(t, e):
    """A function that must not see what the check before it keeps away: it would raise."""
    score = t.read(scores, e.who)
    t.require(score > 0.0, "spent")
    t.write(scores, e.who, score + t.call(lambda x, y: 1.0 / x - y, score, e.amount))
    t.write(names, e.other, t.call(lambda old, who: (*old, who)[-3:], t.read(names, e.other), e.who, returns="object"))
    return {"count": t.call(len, t.read(names, e.other), returns="bigint")}


@transaction
def visit(t, e):
    place = t.key(lambda many: "abc"[many % 3], t.call(len, t.read(names, e.who), returns="bigint"), returns="string")
    t.write(scores, place, t.read(scores, place) + t.window(scores, e.other, 5, "sum"))
    t.write(names, e.who, ())


PYTHON = Program.of(*(one.trace({"who": "string", "other": "string", "amount": "double"}) for one in (remember, visit)))


@examples(25)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 1),
                st.integers(0, 9),
                st.sampled_from("abcd"),
                st.sampled_from("abcd"),
                st.sampled_from([0.0, 0.5, 2.0, 4.0]),
            ),
            max_size=15,
        ),
        min_size=1,
        max_size=2,
    )
)
def test_python_functions_and_objects_equal_serial_execution(events_of_batches):
    given_batches = []
    for events in events_of_batches:
        kinds, times, who, other, amounts = ([event[i] for event in events] for i in range(5))
        columns = {
            "ts": pa.array(times, pa.int64()),
            "who": pa.array(who, pa.string()),
            "other": pa.array(other, pa.string()),
            "amount": pa.array(amounts, pa.float64()),
        }
        given_batches.append(Batch.of(pa.table(columns), order_by="ts", kinds=kinds))
    assert_as_serial(PYTHON, given_batches, (None, SERIAL, Strategy("strata"), Strategy("queue", "operation", "lazy")))
