"""Dependencies of transactions, operations, chains and components, including the MorphStream paper's example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from midstream.txn import Batch, MemoryTables, Program, Table, transaction
from midstream.txn import dependencies as plan
from midstream.txn.dependencies import BatchLayout
from midstream.txn.operations import chains, operations
from midstream.txn.prepared_batch import prepare
from midstream.txn.properties import measure
from midstream.txn.schedule_cost import queue_seconds, work_of

ledger = Table("ledger", key="bigint", value="double", default=9.0)


@transaction
def deposit(t: Any, e: Any) -> None:
    t.write(ledger, e.a, t.read(ledger, e.a) + e.v)


@transaction
def transfer(t: Any, e: Any) -> None:
    t.require(t.read(ledger, e.a) > e.v)
    t.write(ledger, e.a, t.read(ledger, e.a) - e.v)
    t.write(ledger, e.b, t.read(ledger, e.b) + e.v)


@transaction
def look(t: Any, e: Any) -> dict[str, Any]:
    return {"seen": t.read(ledger, e.a)}


@transaction
def hop(t: Any, e: Any) -> None:
    t.write(ledger, t.key(t.floor(t.read(ledger, e.a))), 0.0)


PROGRAM = Program.of(*(one.trace({"a": "bigint", "b": "bigint", "v": "double"}) for one in (deposit, transfer, look)))
DEPOSIT, TRANSFER, LOOK, HOP = range(4)


def ready(*events: tuple[int, int, int], program: Program = PROGRAM, times: list[int] | None = None):
    kinds, a, b = ([event[place] for event in events] for place in range(3))
    columns = {
        "ts": np.array(times or range(len(events)), np.int64),
        "a": np.array(a, np.int64),
        "b": np.array(b, np.int64),
        "v": np.ones(len(events)),
    }
    batch = prepare(program, Batch.of(columns, order_by="ts", kinds=kinds), MemoryTables())
    return batch, BatchLayout.of(program), np.arange(len(events))


def edges(units: Any) -> set[tuple[int, int]]:
    return {(int(other), unit) for unit in range(len(units)) for other in _needed(units, unit)}


def _needed(units: Any, unit: int) -> Any:
    return units.needed[units.before[unit] : units.before[unit + 1]]


A, B, C, D = range(4)
PAPER = [(DEPOSIT, A, A), (TRANSFER, A, B), (TRANSFER, B, A)]  # figure 1


def test_the_papers_example_in_any_order_of_arrival():
    for arrival in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        batch, layout, members = ready(*(PAPER[i] for i in arrival), times=arrival)
        units = plan.transactions(batch, layout, members)
        assert edges(units) >= {(0, 1), (1, 2)}
        assert units.levels.tolist() == [0, 1, 2]


def test_the_papers_example_by_operations():
    batch, layout, members = ready(*PAPER)
    found = operations(batch, layout, members, waiting=False)
    # 0 is the deposit; 1, 2, 3 are check, withdrawal and credit of the first transfer; 4, 5, 6 of the second. The
    # credit also reads the source's balance, because both may be the same account.
    temporal = {(0, 2), (3, 5), (2, 6)}
    parametric = {(0, 1), (0, 3), (3, 4), (3, 6)}
    assert edges(found.units) == temporal | parametric
    logical = {(1, 2), (1, 3), (4, 5), (4, 6)}
    assert edges(operations(batch, layout, members, waiting=True).units) == temporal | parametric | logical


def test_readers_do_not_wait_for_each_other_but_a_writer_waits_for_them():
    batch, layout, members = ready((LOOK, A, A), (LOOK, A, A), (DEPOSIT, A, A), (LOOK, A, A))
    units = plan.transactions(batch, layout, members)
    assert edges(units) == {(0, 2), (1, 2), (2, 3)}
    assert [part.tolist() for part in units.strata] == [[0, 2, 3, 4], [0, 1, 2, 3]]


def test_transactions_without_common_keys_are_separate_components():
    batch, layout, members = ready((TRANSFER, A, B), (DEPOSIT, C, C), (TRANSFER, B, D), (DEPOSIT, D, D))
    parts = plan.components(batch, layout, members)
    groups = [parts.members[parts.starts[x] : parts.starts[x + 1]].tolist() for x in range(len(parts))]
    assert groups == [[0, 2, 3], [1]]
    assert len(parts.needed) == 0


def test_part_of_a_batch_is_planned_like_a_whole_batch():
    batch, layout, _ = ready((DEPOSIT, A, A), (DEPOSIT, B, B), (DEPOSIT, A, A), (DEPOSIT, B, B))
    units = plan.transactions(batch, layout, np.array([1, 2, 3]))
    assert edges(units) == {(0, 2)}
    assert units.members.tolist() == [1, 2, 3]


def test_chains_that_wait_for_each_other_become_one():
    batch, layout, members = ready((TRANSFER, A, B), (TRANSFER, C, D))
    merged, cyclic = chains(operations(batch, layout, members, waiting=True))
    assert not cyclic
    assert len(merged) == 4
    batch, layout, members = ready((TRANSFER, A, B), (TRANSFER, B, A), (DEPOSIT, C, C))
    merged, cyclic = chains(operations(batch, layout, members, waiting=True))
    assert cyclic
    assert sorted(np.diff(merged.starts).tolist()) == [1, 6]
    assert queue_seconds(merged, work_of(merged, np.ones(7)), threads=9, queue=0.0) == 6.0


def test_a_late_key_makes_its_whole_table_wait():
    program = Program.of(*PROGRAM.types, hop.trace({"a": "bigint", "b": "bigint", "v": "double"}))
    batch, layout, members = ready(
        (DEPOSIT, A, A), (DEPOSIT, B, B), (HOP, C, C), (DEPOSIT, A, A), (DEPOSIT, B, B), program=program
    )
    units = plan.transactions(batch, layout, members)
    assert units.levels.tolist() == [0, 0, 1, 2, 2]
    assert len(plan.components(batch, layout, members)) == 1


def test_transactions_of_a_partition_wait_for_the_previous_one():
    batch, layout, members = ready((DEPOSIT, A, A), (DEPOSIT, B, B), (DEPOSIT, C, C), (TRANSFER, A, B))
    units, home = plan.partitions(batch, layout, members, 2)
    assert edges(units) == {(0, 2), (1, 3), (2, 3)}
    assert home.tolist() == [0, 1, 0, 0]


def test_properties_are_counted():
    batch, layout, members = ready(*PAPER, (LOOK, D, D))
    units = plan.transactions(batch, layout, members)
    found = measure(batch, layout, members, units, cost=1e-6, abort_ratio=0.25)
    assert (found.transactions, found.operations, found.depth) == (4, 7, 3)
    assert (found.temporal, found.parametric, found.logical) == (3, 4, 4)
    assert found.skew == pytest.approx(3 / (6 / 3))
