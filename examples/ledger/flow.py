"""The ledger: accounts are one table, which every deposit and every transfer reads and writes as a transaction.

midstream run examples.ledger.flow:flow --for 20 --checkpoint out/ledger
midstream state out/ledger accounts acc7          # one account, while it runs or after
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream import Access, ConsoleSink, Flow, GeneratorSource, Table, agg, transaction

CUSTOMERS = 1_000
BANK = "bank"


def rules(accounts: Table, fee: int = 0, limit: int | None = None) -> tuple[Any, Any]:
    """What orders do to the accounts. They are traced once; ``if`` may ask for what is known then, as the fee is."""

    @transaction
    def deposit(t: Access, e: Any) -> dict[str, Any]:
        balance = t.read(accounts, e.account) + e.cents
        t.write(accounts, e.account, balance)
        return {"balance": balance}

    @transaction
    def transfer(t: Access, e: Any) -> dict[str, Any]:
        balance = t.read(accounts, e.account) - e.cents - fee
        if limit is not None:
            t.require(e.cents <= limit, "over the limit")
        t.require(balance >= 0, "not enough money")
        t.write(accounts, e.account, balance)
        t.write(accounts, e.to, t.read(accounts, e.to) + e.cents)  # sees the write above, if both are the same
        if fee:
            t.write(accounts, BANK, t.read(accounts, BANK) + fee)
        return {"balance": balance}

    return deposit, transfer


def orders(rate: float, **options: Any) -> GeneratorSource:
    """One deposit to three transfers, between accounts that are not equally busy."""
    return GeneratorSource(_make, "kind string, account string, to string, cents bigint", rate, **options)


def build(source: GeneratorSource, totals: Any) -> tuple[Flow, Table]:
    """The flow, and its table: cents by account.

    How many orders were committed, or aborted for which reason, goes to ``totals`` after each epoch.
    """
    flow = Flow("ledger")
    accounts = flow.table("accounts", key="string", value="bigint", default=0)
    (
        flow.source("orders", source)
        .transact("ledger", *rules(accounts), order_by="event_time", which="kind")
        .map_batches("outcome", name_outcome, adds="outcome string")
        .key_by("by outcome", "kind", "outcome")
        .aggregate("totals", orders=agg.count(), cents=agg.sum("cents"))
        .sink("show", totals)
    )
    return flow, accounts


def name_outcome(orders: pa.RecordBatch) -> pa.RecordBatch:
    """Committed, or why not."""
    return orders.append_column("outcome", pc.fill_null(orders["reason"], "committed"))


def _make(indexes: Any, rng: np.random.Generator) -> dict[str, Any]:
    names = np.char.add("acc", (rng.random((2, len(indexes))) ** 2 * CUSTOMERS).astype(np.int64).astype(str))
    is_deposit = rng.random(len(indexes)) < 0.25
    cents = np.where(is_deposit, 30_000, np.exp(rng.normal(8.5, 1.2, len(indexes))) + 1).astype(np.int64)
    kinds = np.where(is_deposit, "deposit", "transfer")
    return {"kind": kinds.tolist(), "account": names[0].tolist(), "to": names[1].tolist(), "cents": cents}


def flow() -> Flow:
    """For the command line."""
    return build(orders(rate=5_000), ConsoleSink(limit=5))[0]
