"""The show: ``python -m examples.ledger`` books orders, changes the rules meanwhile, and counts the money."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from midstream import MemorySink, Update, local_session
from midstream.cli.live import watch

from .flow import BANK, build, orders, rules

if TYPE_CHECKING:
    from midstream import Job

PATIENCE_S = 120.0


def main(arguments: Sequence[str] | None = None, spark: Any = None, console: Console | None = None) -> int:
    """Run the demo, on ``spark`` if given, else on a session of its own; gives back how many cents are missing."""
    options = _options(arguments)
    console = console or Console(highlight=False)
    total = max(10, int(options.rate * options.seconds))
    source, totals = orders(options.rate, limit=total, max_rows_per_epoch=total // 10), MemorySink()
    console.print(f"Starting Spark for {total:,} orders in {options.seconds:g} s", style="dim")
    session = spark or local_session("local[2]")
    flow, accounts = build(source, totals)
    try:
        with flow.start(session, checkpoint=tempfile.mkdtemp(prefix="midstream-ledger-")) as job:
            shown = follow(job, total // 2, console)
            new = Update("ledger", rules(accounts, fee=5, limit=20_000))
            change = job.update(new, note="a limit and a fee").require(PATIENCE_S)
            console.print(f"New rule of transfers, in effect after {change.delay_ms or 0:.1f} ms", style="bold")
            follow(job, total, console, shown)
            balances = {row["key"]: row["value"] for row in job.state("accounts").collect()}
    finally:
        if spark is None:
            session.stop()
    return report(totals.rows, balances, console)


def follow(job: Job, orders: int, console: Console, shown: int = -1) -> int:
    """Show epochs until a number of orders is booked; returns the last one shown."""
    while job.metrics.rows_in < orders:
        shown = watch(job, epochs=job.metrics.epochs + 1, plain=True, console=console, after=shown)
    return shown


def report(totals: Sequence[dict[str, Any]], balances: dict[str, int], console: Console) -> int:
    """Print the outcomes of the orders, and whether the accounts hold what was paid in."""
    latest = {(row["kind"], row["outcome"]): row for row in totals}
    table = Table("order", "outcome", "orders", "EUR")
    for (kind, outcome), row in sorted(latest.items()):
        table.add_row(kind, outcome, f"{row['orders']:,}", f"{row['cents'] / 100:,.2f}")
    console.print(table)
    paid_in, held = latest["deposit", "committed"]["cents"], sum(balances.values())
    console.print(f"Paid in {paid_in / 100:,.2f} EUR; {len(balances):,} accounts hold {held / 100:,.2f} EUR")
    console.print(f"Of that the bank has {balances.get(BANK, 0) / 100:,.2f} EUR; the lowest balance is", end=" ")
    console.print(f"{min(balances.values()) / 100:,.2f} EUR")
    return int(paid_in - held)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.ledger", description="A streaming ledger.")
    parser.add_argument("--seconds", type=float, default=20, help="how long orders come in (default: %(default)g)")
    parser.add_argument("--rate", type=float, default=20_000, help="orders/s (default: %(default)g)")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.rate <= 0:
        parser.error("--seconds and --rate must be above 0")
    return options


if __name__ == "__main__":
    raise SystemExit(main() and "Money got lost.")
