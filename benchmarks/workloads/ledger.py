"""SL, the streaming ledger of the MorphStream paper: deposits, and transfers between accounts and assets.

A transfer needs enough on the source's side, in both tables; what is doomed to abort asks for more than anyone has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.workloads.shared_tables import popular, rounds_for, spin
from midstream.txn import Batch, Program, Table, Transaction, transaction

__all__ = ["START", "Knobs", "batches", "dynamic", "program", "python_loop", "rules"]

START = 1_000_000.0
"""What every account and every asset holds at first; enough for any number of small transfers."""

accounts = Table("accounts", key="bigint", value="double", default=START)
assets = Table("assets", key="bigint", value="double", default=START)


@dataclass(frozen=True)
class Knobs:
    """The paper's, with its defaults. ``cost`` is in microseconds per written value."""

    keys: int = 10_000
    skew: float = 0.2
    aborts: float = 0.01
    transfers: float = 0.75
    cost: float = 10.0
    interval: int = 10_240
    late: float = 0.1  # of the events arrive out of order
    seed: int = 1


def rules(accounts: Table, assets: Table, *, costly: bool = False) -> tuple[Transaction, Transaction]:
    """What a deposit and a transfer do to the tables; if it is to cost something, the event says how much."""

    def worked(t: Any, e: Any, value: Any) -> Any:
        return t.call(spin, value, e.rounds) if costly else value

    @transaction
    def deposit(t: Any, e: Any) -> None:
        t.write(accounts, e.account, worked(t, e, t.read(accounts, e.account) + e.amount))
        t.write(assets, e.asset, worked(t, e, t.read(assets, e.asset) + e.amount))

    @transaction
    def transfer(t: Any, e: Any) -> dict[str, Any]:
        money, goods = t.read(accounts, e.account), t.read(assets, e.asset)
        t.require(money >= e.amount, "not enough money")
        t.require(goods >= e.amount, "not enough goods")
        t.write(accounts, e.account, worked(t, e, money - e.amount))
        t.write(assets, e.asset, worked(t, e, goods - e.amount))
        t.write(accounts, e.to_account, worked(t, e, t.read(accounts, e.to_account) + e.amount))
        t.write(assets, e.to_asset, worked(t, e, t.read(assets, e.to_asset) + e.amount))
        return {"left": money - e.amount}

    return deposit, transfer


def program(cost: float) -> Program:
    """Deposits are type 0, transfers type 1."""
    return _program(costly=cost > 0)


@cache
def _program(costly: bool) -> Program:
    """What they cost is in the events, so that it is compiled once."""
    keys = dict.fromkeys(("account", "asset", "to_account", "to_asset", "rounds"), "bigint")
    return Program.of(*(one.trace({**keys, "amount": "double"}) for one in rules(accounts, assets, costly=costly)))


def batches(knobs: Knobs) -> Iterator[Batch]:
    """Punctuation intervals without end.

    >>> first = next(batches(Knobs(interval=100)))
    >>> len(first), sorted(first.columns)
    (100, ['account', 'amount', 'asset', 'rounds', 'timestamp', 'to_account', 'to_asset'])
    """
    rng = np.random.default_rng(knobs.seed)
    start = 0
    while True:
        yield one(knobs, rng, start)
        start += knobs.interval


def one(knobs: Knobs, rng: np.random.Generator, start: int) -> Batch:
    """One interval, from a time on."""
    size = knobs.interval
    account, asset, to_account, to_asset = popular(rng, knobs.keys, (4, size), knobs.skew)
    amount = rng.integers(1, 100, size).astype(np.float64)
    kinds = (rng.random(size) < knobs.transfers).astype(np.int8)
    amount[(kinds == 1) & (rng.random(size) < knobs.aborts)] = 1e12
    timestamps = np.arange(start, start + size)
    moved = np.flatnonzero(rng.random(size) < knobs.late)
    timestamps[moved] = timestamps[rng.permutation(moved)]
    columns = {
        "timestamp": timestamps,
        "account": account,
        "asset": asset,
        "to_account": to_account,
        "to_asset": to_asset,
        "amount": amount,
        "rounds": np.full(size, rounds_for(knobs.cost)),
    }
    return Batch.of(columns, order_by="timestamp", kinds=kinds)


def dynamic(knobs: Knobs, each: int) -> Iterator[tuple[str, Batch]]:
    """The paper's four phases (8.2.2), of ``each`` intervals: scattered deposits; ever more skew; ever more transfers;
    ever more aborts."""
    rng = np.random.default_rng(knobs.seed)
    start = 0
    for phase in ("deposits", "skew", "transfers", "aborts"):
        for step in range(each):
            share = (step + 1) / each
            now = replace(knobs, skew=0.0, transfers=0.0, aborts=0.0)
            if phase != "deposits":
                now = replace(now, skew=share if phase == "skew" else 1.0)
            if phase in ("transfers", "aborts"):
                now = replace(now, transfers=share if phase == "transfers" else 1.0)
            if phase == "aborts":
                now = replace(now, aborts=0.9 * share)
            yield phase, one(now, rng, start)
            start += knobs.interval


def python_loop(batch: Batch, money: dict[int, float], goods: dict[int, float]) -> list[bool]:
    """The same by hand, as people write it: sort, loop, two dictionaries. Without any cost of functions."""
    columns = [batch.columns[name].tolist() for name in ("account", "asset", "to_account", "to_asset", "amount")]
    order = np.argsort(batch.timestamps, kind="stable").tolist()
    kinds = batch.kinds.tolist()
    account, asset, to_account, to_asset, amounts = columns
    committed = [True] * len(order)
    for i in order:
        a, b, amount = account[i], asset[i], amounts[i]
        x, y = money.get(a, START), goods.get(b, START)
        if kinds[i] == 0:
            money[a] = x + amount
            goods[b] = y + amount
        elif x >= amount and y >= amount:
            money[a] = x - amount
            goods[b] = y - amount
            c, d = to_account[i], to_asset[i]
            money[c] = money.get(c, START) + amount
            goods[d] = goods.get(d, START) + amount
        else:
            committed[i] = False
    return committed
