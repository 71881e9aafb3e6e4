"""SEA: the transactions match the oracle, for any order of arrival and any batch boundaries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.workloads import sea
from examples.turnover import market
from midstream import ListSource, MemorySink
from midstream.checkpoint.inspection import read_state
from midstream.data.schema import to_ddl
from midstream.testing import Faults, run_local
from midstream.txn import Batch, Engine, MemoryTables, Program, Table
from midstream.txn.strategies import SERIAL, Strategy

# Kernels are compiled when they are first used, which takes a minute on a new machine.
pytestmark = pytest.mark.long

KINDS = ("quote", "trade")
RETURNED = ("matched", "quoted", "traded", "rate")


def market_rows(count: int, **options: Any) -> pa.Table:
    return pa.Table.from_batches(market.SMALL.events(1000, **options).rows(0, count, start_us=0))


def tables() -> list[Table]:
    return [Table(name, **what) for name, what in market.TABLES.items()]


def program() -> Program:
    kinds = {"kind": "string", "stock": "bigint", "volume": "bigint"}
    return Program.of(*(rule.trace(kinds) for rule in market.rules(*tables())))


def executed(
    epochs: list[pa.Table], strategy: Strategy | None = None
) -> tuple[list[dict[str, Any]], list[tuple[datetime, str]], dict[str, dict[int, int]]]:
    """The engine's results in the oracle's form, batch by batch."""
    engine, memory = Engine(program(), threads=1), MemoryTables()
    rates: list[dict[str, Any]] = []
    refused: list[tuple[datetime, str]] = []
    for events in epochs:
        kinds = [KINDS.index(kind) for kind in events["kind"].to_pylist()]
        result = engine.execute(Batch.of(events, order_by="at", kinds=kinds), memory, strategy)
        memory.apply(result, engine.program.tables)
        for row, event in enumerate(events.to_pylist()):
            if (reason := result.reason(row)) is not None:
                refused.append((event["at"], reason))
                continue
            about = {name: event[name] for name in ("kind", "board", "stock", "at")}
            rates.append(about | {name: result.returned[name][row].item() for name in RETURNED})
    values = {table.name: {key: value for key, (value,) in memory.as_dict(table).items()} for table in tables()}
    return sorted(rates, key=lambda row: row["at"]), sorted(refused), values


@pytest.mark.parametrize("strategy", [None, SERIAL, Strategy("queue")], ids=str)
def test_the_engine_agrees_with_the_oracle(strategy: Strategy | None) -> None:
    events = market_rows(24_000)  # the first ones leave the window of the last 4,000
    shuffled = events.slice(9_000).take(np.random.default_rng(3).permutation(15_000))
    assert executed([events.slice(0, 9_000), shuffled], strategy) == sea.oracle(events)


@pytest.mark.parametrize("seed", range(2))
def test_the_flow_agrees_with_the_oracle(seed: int, tmp_path: Path) -> None:
    every = market_rows(43_000)
    # A second passes between some of them, so that windows end within an epoch and between two.
    events = pa.concat_tables([every.slice(start, 1_000) for start in (0, 1_000, 20_500, 22_000, 41_700)])
    source = ListSource.of(events.to_pylist(), schema=to_ddl(events.schema), epoch_rows=1_500, partitions=2)
    out, expected = MemorySink(), sea.oracle(events)
    faults = Faults(crash=0.02, speculate=0.05, repeat=0.05)
    run_local(sea.flow(source, out), seed=seed, faults=faults, checkpoint=str(tmp_path))
    assert sorted(out.rows, key=lambda row: row["at"]) == expected[0]
    for name, values in expected[2].items():
        held = read_state(str(tmp_path), name).to_pylist()
        assert {row["key"]: row["value"] for row in held} == values
        assert all(row["board"] == row["key"] % market.BOARDS for row in held)


def test_every_case_occurs() -> None:
    rates, refused, values = sea.oracle(market_rows(24_000))
    assert {reason for _, reason in refused} == {market.NO_QUOTE, market.TOO_MUCH}
    assert 0.02 < len(refused) / 24_000 < 0.15
    assert max(row["matched"] for row in rates) > 10
    assert all(0 <= row["rate"] <= 1 for row in rates if row["kind"] == "trade")
    assert set(values["trades"]) <= set(values["quotes"])


def test_a_refused_trade_does_not_affect_later_ones() -> None:
    def event(at: int, kind: str, volume: int) -> dict[str, Any]:
        return {"kind": kind, "board": 0, "stock": 7, "volume": volume, "at": when(at)}

    def when(us: int) -> datetime:
        return datetime(2026, 1, 5, tzinfo=UTC) + timedelta(microseconds=us)

    second = market.WINDOW_US
    events = pa.Table.from_pylist(
        [
            event(0, "trade", 100),  # nothing is quoted yet
            event(1, "quote", 500),
            event(2, "trade", 600),  # too much
            event(3, "trade", 500),  # all of it, because the previous one was refused
            event(second, "quote", 300),  # the quote at 1 is still there
            event(second + 1, "trade", 100),  # the quote at 1 is gone, the trade at 3 is not
            event(second + 3, "trade", 300),  # the trade at 3 is gone as well
        ]
    )
    rates, refused, values = executed([events])
    assert refused == [(when(0), market.NO_QUOTE), (when(2), market.TOO_MUCH), (when(second + 1), market.TOO_MUCH)]
    assert [(row["at"], row["matched"], row["rate"]) for row in rates] == [
        (when(1), 0, 0.0),
        (when(3), 1, 1.0),
        (when(second), 1, 500 / 800),
        (when(second + 3), 1, 1.0),
    ]
    assert values == {"quotes": {7: 300}, "trades": {7: 300}}
    assert (rates, refused, values) == sea.oracle(events)


def test_a_stock_belongs_to_one_board_and_time_advances() -> None:
    events = market_rows(5_000)
    board_of = {row["stock"]: row["board"] for row in events.to_pylist()}
    assert all(row["board"] == board_of[row["stock"]] for row in events.to_pylist())
    assert set(board_of.values()) == set(range(market.BOARDS))
    assert (np.diff(events["at"].cast(pa.int64()).to_numpy()) > 0).all()
    assert not market_rows(100, seed=5).equals(market_rows(100, seed=6))
