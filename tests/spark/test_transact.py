"""Transactions on Spark: output, contents of tables, restarts, changes, and the examples."""

from __future__ import annotations

import io
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from midstream import MemorySink, Table, Update
from midstream.checkpoint.change_records import Outcome
from midstream.testing import run_spark
from tests.transacted import Bank, bank, event, outcomes, random_epochs, transactions

PATIENCE_S = 180.0


@pytest.mark.parametrize("domain", [None, "region"])
def test_outcomes_and_tables_equal_those_of_a_plain_program(spark: Any, tmp_path: Path, domain: str | None) -> None:
    epochs = random_epochs(random.Random(3), epochs=3, rows=200, accounts=20)
    out, plain = MemorySink(), Bank(key=lambda row: row["region"] if domain else "")
    job = run_spark(bank(epochs, out, domain=domain), spark, checkpoint=str(tmp_path), partitions=2)
    assert outcomes(out.rows) == plain.run(epochs)
    found = [row.asDict() for row in job.state("accounts").collect()]
    assert {(row.get("region", ""), row["key"]): row["value"] for row in found} == plain.accounts


def test_a_restart_continues_with_the_tables(spark: Any, tmp_path: Path) -> None:
    epochs = random_epochs(random.Random(4), epochs=4, rows=50)
    out, again = MemorySink(), MemorySink()
    run_spark(bank(epochs[:2], out), spark, checkpoint=str(tmp_path))
    run_spark(bank(epochs, again), spark, checkpoint=str(tmp_path))
    assert outcomes(out.rows + again.rows) == Bank().run(epochs)


def test_transactions_are_changed_while_they_run(spark: Any, tmp_path: Path) -> None:
    rows = [[event(0, "deposit", "ann", 1e6)]]
    rows += [[event(10 * epoch + j, "transfer", "ann", 1.0, "bob") for j in range(5)] for epoch in range(1, 400)]
    out = MemorySink()
    flow = bank(rows, out)
    accounts = Table("accounts", key="string", value="double", default=0.0)
    with flow.start(spark, checkpoint=str(tmp_path)) as job:
        job.await_epoch(3, PATIENCE_S)
        dearer = Update("ledger", transactions(accounts, fee=2.0))
        assert "next epoch" in str(job.explain(dearer))
        change = job.update(dearer)
        assert change.wait(PATIENCE_S) is Outcome.APPLIED
        job.await_epoch(job.metrics.epochs + 2, PATIENCE_S)
        assert job.history()[0].updates[0].label == "deposit, transfer"
    steps = []
    for table in list(out.tables.values())[1:]:
        balances = [balance for *_, balance, _ in outcomes(table.to_pylist())]
        steps.append({round(a - b, 6) for a, b in pairwise(balances)})
    assert all(step in ({1.0}, {3.0}) for step in steps), "an epoch runs under one revision"
    assert steps[0] == {1.0}
    assert steps[-1] == {3.0}
    assert sorted(steps, key=max) == steps


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ledger_example_keeps_all_money(spark: Any) -> None:
    from examples.ledger.__main__ import main

    screen = io.StringIO()
    missing = main(["--seconds", "6", "--rate", "2000"], spark=spark, console=Console(file=screen, width=120))
    assert missing == 0
    assert "New rule of transfers" in screen.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_turnover_example_finds_busy_stocks(spark: Any) -> None:
    from examples.turnover.__main__ import main

    screen = io.StringIO()
    busiest = main(["--seconds", "4", "--rate", "5000"], spark=spark, console=Console(file=screen, width=120))
    assert len(busiest) == 10
    assert "trades were refused" in screen.getvalue()
