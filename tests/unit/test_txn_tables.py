"""Numbering of keys, tables in memory, and the cache of generated code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.txn import Batch, Engine, MemoryTables, Program, Table, compiler, transaction
from midstream.txn.keys import IntKeys, NearKeys, TextKeys
from midstream.txn.prepared_batch import Room, prepare
from midstream.txn.sort import order_of
from midstream.txn.strategies import SERIAL

# Kernels are compiled when they are first used, which takes a minute on a new machine.
pytestmark = pytest.mark.long

NUMBERS = st.one_of(st.integers(0, 50), st.integers(-(2**63), 2**63 - 1), st.integers(-3, 10_000))


@given(st.lists(st.lists(NUMBERS, max_size=60), max_size=5))
def test_numbers_get_dense_ids_and_keep_them(parts):
    known = IntKeys()
    expected: dict[int, int] = {}
    for part in parts:
        for key in part:
            expected.setdefault(key, len(expected))
        assert known.add(np.array(part, np.int64)).tolist() == [expected[key] for key in part]
        assert known.values().tolist() == list(expected)
    for key, number in expected.items():
        assert known.add_one(key) == number


@given(st.lists(st.lists(NUMBERS, max_size=60), max_size=5))
def test_ids_restart_after_clearing(parts):
    known = IntKeys()
    for part in parts:
        expected = {key: number for number, key in enumerate(dict.fromkeys(part))}
        assert known.add(np.array(part, np.int64)).tolist() == [expected[key] for key in part]
        assert known.values().tolist() == list(expected)
        known.clear()
        assert len(known) == 0


def test_a_far_too_large_map_is_recreated():
    known = IntKeys()
    known.add(np.arange(100_000))
    known.clear()
    known.add(np.arange(3))
    known.clear()
    assert len(known.direct) + len(known.ids) < 5_000


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6)), max_size=80))
def test_times_are_sorted_and_arrival_breaks_ties(times):
    column = np.array([0, *times], np.int64)
    found = order_of(column)
    wanted = np.argsort(column, kind="stable")
    assert (found if len(found) else np.arange(len(column))).tolist() == wanted.tolist()


@given(st.lists(st.lists(st.text(max_size=2), max_size=20), max_size=4))
def test_strings_get_dense_ids_and_keep_them(parts):
    known = TextKeys()
    expected: dict[str, int] = {}
    for part in parts:
        for key in part:
            expected.setdefault(key, len(expected))
        assert known.add(pa.array(part, pa.string())).tolist() == [expected[key] for key in part]
    assert known.values().to_pylist() == list(expected)


def pay_program() -> Program:
    """Payments from one account to another."""
    accounts = Table("accounts", key="bigint", value="double", default=0.0)

    @transaction
    def pay(t: Any, e: Any) -> None:
        t.write(accounts, e.sender, t.read(accounts, e.sender) - 1.0)
        t.write(accounts, e.receiver, t.read(accounts, e.receiver) + 1.0)

    return Program.of(pay.trace({"sender": "bigint", "receiver": "bigint"}))


def payments(senders: Any, receivers: Any) -> Batch:
    columns = {"ts": np.arange(len(senders)), "sender": np.array(senders), "receiver": np.array(receivers)}
    return Batch.of({name: column.astype(np.int64) for name, column in columns.items()}, order_by="ts")


PLACES = st.sampled_from([0, 5, -40, 10_000, -(2**63) + 50, 2**63 - 51])
PAYMENTS = st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), max_size=60)


@given(st.lists(st.tuples(PLACES, PAYMENTS), max_size=8))
def test_key_numbers_are_correct_for_any_range_of_keys(batches):
    program = pay_program()
    room, tables = Room(program), MemoryTables()
    for place, pairs in batches:
        keys = [(place + a, place + b) for a, b in pairs]
        ready = prepare(program, payments([a for a, _ in keys], [b for _, b in keys]), tables, room)
        [known] = ready.known
        assert known.named(ready.keys).tolist() == [key for pair in keys for key in pair]
        assert sorted(known.values().tolist()) == sorted({key for pair in keys for key in pair})
        assert known.named(known.used()).tolist() == known.values().tolist()
        assert len(ready.tables[0][0]) == len(ready.changed[0]) == len(known)


def test_cleared_near_keys_are_empty():
    known, found = NearKeys(0, 10), np.empty(1, np.int64)
    assert known.add_into(np.array([4]), np.array([0]), 1, 0, found)
    assert known.values().tolist() == [4]
    known.clear()
    assert known.values().tolist() == []


def test_keys_that_stay_close_together_need_no_map():
    program = pay_program()
    room, tables, random = Room(program), MemoryTables(), np.random.default_rng(3)

    def kind_of_keys(low: int) -> type:
        batch = payments(*(low + random.integers(0, 100, (2, 400))))
        return type(prepare(program, batch, tables, room).known[0])

    assert [kind_of_keys(0) for _ in range(3)] == [IntKeys, NearKeys, NearKeys]
    # The range moves: that is noticed, and after skipping one batch the new range is expected.
    assert [kind_of_keys(5000) for _ in range(4)] == [IntKeys, IntKeys, NearKeys, NearKeys]
    # Far apart keys give no expected range; few keys do not use a wide one.
    assert type(prepare(program, payments([0, 2**40], [1, 2]), tables, room).known[0]) is IntKeys
    assert kind_of_keys(5000) is NearKeys


def test_balances_are_correct_while_key_ranges_move():
    program = pay_program()
    [accounts] = program.tables
    engine, tables, random = Engine(program, threads=1), MemoryTables(), np.random.default_rng(4)
    balances: dict[int, float] = {}
    for low in (0, 0, 0, 1000, 1000, 50, 50, -7, 0, 0, 0, 0):
        senders, receivers = low + random.integers(0, 60, (2, 300))
        for key, change in [(k, -1.0) for k in senders.tolist()] + [(k, 1.0) for k in receivers.tolist()]:
            balances[key] = balances.get(key, 0.0) + change
        tables.apply(engine.execute(payments(senders, receivers), tables), program.tables)
    assert {key: value for key, (value,) in tables.as_dict(accounts).items()} == balances


def test_large_keys_keep_their_ids_when_small_keys_are_added():
    known = IntKeys()
    large = np.arange(100) + 2**40
    assert known.add(large).tolist() == list(range(100))
    assert known.add(np.arange(300)).tolist() == list(range(100, 400))
    assert known.add(large).tolist() == list(range(100))


def test_room_can_be_reserved_before_compiled_code_adds_keys():
    known = IntKeys()
    known.add(np.array([5, 6]))
    known.reserve(1000)
    assert len(known.keys) >= 1002
    assert len(known.slots) >= 2004
    assert known.add(np.array([6, 2**40, 5])).tolist() == [1, 2, 0]


def test_writes_too_old_for_any_window_can_be_forgotten():
    heat = Table("heat", key="bigint", value="double", default=0.0)

    @transaction
    def note(t: Any, e: Any) -> dict[str, Any]:
        before = t.window(heat, e.key, 10, "count")
        t.write(heat, e.key, e.value)
        return {"before": before}

    program = Program.of(note.trace({"key": "bigint", "value": "double"}))
    engine, tables = Engine(program, threads=1), MemoryTables()

    def run(*times: int) -> list[int]:
        columns = {"ts": np.array(times), "key": np.ones(len(times), np.int64), "value": np.ones(len(times))}
        result = engine.execute(Batch.of(columns, order_by="ts"), tables, SERIAL)
        tables.apply(result, program.tables)
        found: list[int] = result.returned["before"].tolist()
        return found

    assert run(1, 5, 9) == [0, 1, 2]
    assert run(11, 12) == [2, 3]
    tables.forget(heat, before=9)
    assert len(tables.history(heat, np.array([1])).rows) == 3
    assert run(13) == [3]


def test_generated_code_is_cached_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDSTREAM_CACHE", str(tmp_path))
    table = Table("kept", key="bigint", value="bigint", default=0)

    @transaction
    def put(t: Any, e: Any) -> None:
        t.write(table, e.key, 41)

    program = Program.of(put.trace({"key": "bigint"}))
    batch = Batch.of({"ts": np.array([1]), "key": np.array([2])}, order_by="ts")
    for _ in range(2):
        compiler._machines.clear()
        result = Engine(program, threads=1).execute(batch, MemoryTables(), SERIAL)
        assert result.changes["kept"].columns[0].tolist() == [41]
    texts = list(tmp_path.rglob("transactions_*.py"))
    assert len(texts) == 1
    assert list(tmp_path.rglob("*.nbi")), "numba's cache files are beside it"


def test_an_unwritable_cache_folder_is_no_obstacle(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("MIDSTREAM_CACHE", str(blocked))
    assert compiler._from_disk("x = 1\n") is None


def test_a_cache_folder_that_others_can_write_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDSTREAM_CACHE", str(tmp_path))
    assert compiler._from_disk("x = 1\n") is not None
    (compiler.cache_folder() / "transactions").chmod(0o777)
    assert compiler._from_disk("x = 1\n") is None


def test_strings_in_several_columns_and_types_are_keys_of_one_table():
    purse = Table("purse", key="string", value="double", default=1.0)

    @transaction
    def give(t: Any, e: Any) -> None:
        t.write(purse, e.src, t.read(purse, e.src) - e.amount)
        t.write(purse, e.dst, t.read(purse, e.dst) + e.amount)

    @transaction
    def find(t: Any, e: Any) -> None:
        t.write(purse, e.src, t.read(purse, e.src) + 10 * e.amount)

    columns = {"src": "string", "dst": "string", "amount": "double"}
    program = Program.of(give.trace(columns), find.trace(columns))
    engine, tables = Engine(program, threads=1), MemoryTables()
    for first in (1, 4):  # the second time in the buffers of the first
        events = {
            "ts": np.array([first + 2, first, first + 1]),
            "src": pa.array(["b", "a", "a"]),
            "dst": pa.array([None, "b", "c"]),
            "amount": np.array([1.0, 2.0, 3.0]),
        }
        result = engine.execute(Batch.of(events, order_by="ts", kinds=[1, 0, 0]), tables)
        tables.apply(result, program.tables)
    assert tables.as_dict(purse) == {"a": (-9.0,), "b": (25.0,), "c": (7.0,)}
