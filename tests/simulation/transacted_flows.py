"""Random ledgers under random faults, changed while they run, against a program with dictionaries.

The oracle does not know when a change came. It runs each epoch under every fee that the bank may have had by then; what
came out must be what one of them gives, for all rows of the epoch, and fees must follow each other in their order.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream import MemorySink, Table, Update
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.inspection import read_state
from midstream.testing import ChangeAt, Faults, LocalRun, run_local
from tests.simulation.flows import random_faults
from tests.transacted import Bank, Row, bank, outcomes, random_epochs, transactions

SCHEDULERS = ("fries", "epoch", "marker", "replay", "marker", "fries-unpruned")


@dataclass
class TransactedCase:
    """All that a seed decides."""

    seed: int
    folder: Path
    epochs: list[list[Row]]
    domain: str | None
    partitions: int
    faults: Faults
    fees: list[float]
    changes: list[tuple[int, str]]
    """Epoch and scheduler of each change to the next fee."""

    def run(self, sink: MemorySink) -> LocalRun:
        """Run it."""
        accounts = Table("accounts", key="string", value="double", default=0.0)
        changes = [
            ChangeAt.of(epoch, Update("ledger", transactions(accounts, fee)), scheduler=scheduler)
            for (epoch, scheduler), fee in zip(self.changes, self.fees[1:], strict=True)
        ]
        flow = bank(self.epochs, sink, domain=self.domain, fee=self.fees[0])
        return run_local(
            flow,
            seed=self.seed,
            partitions=self.partitions,
            faults=self.faults,
            checkpoint=str(self.folder),
            changes=changes,
        )


def transacted_case_of(seed: int, folder: Path) -> TransactedCase:
    """The case that a seed stands for."""
    rng = random.Random(f"transact {seed}")
    epochs = random_epochs(rng, rng.randint(1, 6), rng.choice([1, 10, 40]), accounts=rng.choice([1, 3, 20]))
    if rng.random() < 0.3:
        epochs[rng.randrange(len(epochs))] = []
    moments = sorted(rng.sample(range(len(epochs)), rng.randint(0, min(2, len(epochs)))))
    return TransactedCase(
        seed=seed,
        folder=folder,
        epochs=epochs,
        domain=rng.choice([None, "region", "src"]),
        partitions=rng.randint(1, 4),
        faults=random_faults(rng),
        fees=[float(number) for number in range(len(moments) + 1)],
        changes=[(moment, rng.choice(SCHEDULERS)) for moment in moments],
    )


def check_transacted(case: TransactedCase) -> LocalRun:
    """Run a case, and compare outcomes and tables with those of the plain program."""
    sink = MemorySink()
    run = case.run(sink)
    assert all(record.outcome not in (Outcome.ROLLED_BACK, Outcome.REVERTED) for record in run.history)
    key = {None: lambda row: "", "region": lambda row: row["region"], "src": lambda row: row["src"]}[case.domain]
    states = [(0, Bank(key=key))]
    for number, rows in enumerate(case.epochs):
        table = sink.tables.get(number)
        found = outcomes([] if table is None else table.to_pylist())
        states = [
            (which, after)
            for config, before in states
            for which in range(config, len(case.fees))
            for after in [copy.deepcopy(before)]
            if _under(after, case.fees[which], rows) == found
        ]
        assert states, f"epoch {number} is what no revision gives: {found}"
    held = _held(case)
    assert any(held == plain.accounts for _, plain in states), f"tables hold {held}"
    return run


def _under(plain: Bank, fee: float, rows: list[Row]) -> list[tuple[Any, ...]]:
    plain.fee = fee
    return plain.run([rows])


def _held(case: TransactedCase) -> dict[tuple[str, str], float]:
    if not any(case.epochs):
        return {}
    rows = read_state(str(case.folder), "accounts").to_pylist()
    return {(row.get(case.domain or "", ""), row["key"]): row["value"] for row in rows}
