"""A small bank for tests of `transact`, and a plain Python program that processes the same events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream import Flow, ListSource, MemorySink, Table, transaction
from midstream.flow.transactions import Transaction

Row = dict[str, Any]

COLUMNS = "n bigint, kind string, region string, src string, dst string, eur double"


def event(n: int, kind: str, src: str, eur: float, dst: str = "", region: str = "eu") -> Row:
    return {"n": n, "kind": kind, "region": region, "src": src, "dst": dst, "eur": eur}


def transactions(accounts: Table, fee: float = 0.0) -> tuple[Transaction, Transaction]:
    """The bank's transactions; a transfer costs a fee, which nobody gets."""

    @transaction
    def deposit(t: Any, e: Any) -> Any:
        balance = t.read(accounts, e.src) + e.eur
        t.write(accounts, e.src, balance)
        return {"balance": balance}

    @transaction
    def transfer(t: Any, e: Any) -> Any:
        balance = t.read(accounts, e.src)
        t.require(balance >= e.eur + fee, "not enough money")
        t.write(accounts, e.src, balance - e.eur - fee)
        t.write(accounts, e.dst, t.read(accounts, e.dst) + e.eur)
        return {"balance": balance - e.eur - fee}

    return deposit, transfer


def bank(
    epochs: Sequence[Sequence[Row]],
    sink: MemorySink,
    *,
    domain: str | None = None,
    fee: float = 0.0,
    name: str = "bank",
) -> Flow:
    flow = Flow(name)
    accounts = flow.table("accounts", key="string", value="double", default=0.0)
    events = flow.source("events", ListSource([list(epoch) for epoch in epochs], COLUMNS))
    done = events.transact("ledger", *transactions(accounts, fee), order_by="n", which="kind", domain=domain)
    done.sink("out", sink)
    return flow


@dataclass
class Bank:
    """The same bank with dictionaries, one event after the other."""

    key: Callable[[Row], str] = lambda row: ""
    """The domain of an event."""
    fee: float = 0.0
    accounts: dict[tuple[str, str], float] = field(default_factory=dict)

    def run(self, epochs: Iterable[Iterable[Row]]) -> list[tuple[Any, ...]]:
        """Outcomes in the form of :func:`outcomes`."""
        return sorted(self.one(row) for epoch in epochs for row in sorted(epoch, key=lambda row: row["n"]))

    def one(self, row: Row) -> tuple[Any, ...]:
        region = self.key(row)
        src, dst = (region, row["src"]), (region, row["dst"])
        have = self.accounts.get(src, 0.0)
        if row["kind"] == "deposit":
            self.accounts[src] = have + row["eur"]
            return (row["n"], True, have + row["eur"], None)
        if not have >= row["eur"] + self.fee:
            return (row["n"], False, None, "not enough money")
        self.accounts[src] = have - row["eur"] - self.fee
        had = have if src == dst else self.accounts.get(dst, 0.0)
        self.accounts[dst] = (self.accounts[src] if src == dst else had) + row["eur"]
        return (row["n"], True, have - row["eur"] - self.fee, None)


def outcomes(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    """The outcome of each event, ascending by number."""
    return sorted((row["n"], row["committed"], row["balance"], row["reason"]) for row in rows)


def random_epochs(rng: Any, epochs: int, rows: int, accounts: int = 5) -> list[list[Row]]:
    """Deposits and transfers (also to oneself) in random order."""
    names = [f"a{number}" for number in range(accounts)]
    made = []
    for epoch in range(epochs):
        numbers = [epoch * rows + i for i in range(rows)]
        rng.shuffle(numbers)
        made.append(
            [
                event(
                    n,
                    rng.choice(["deposit", "transfer", "transfer"]),
                    rng.choice(names),
                    float(rng.randrange(1, 40)),
                    rng.choice(names),
                    rng.choice(["eu", "us", "asia"]),
                )
                for n in numbers
            ]
        )
    return made
