"""The show: ``python -m examples.turnover`` joins quotes with trades and tells which stocks change hands most.

A quote or a trade puts itself into its own table and looks into both for the last second; a trade that the quotes
cannot account for is aborted. Boards of the exchange are domains, so they run in parallel.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from midstream import Flow, GeneratorSource, MemorySink, agg, local_session
from midstream.cli.live import watch

from . import market

Row = dict[str, Any]


def build(source: GeneratorSource, stocks: Any, refused: Any) -> Flow:
    """Per epoch: of each stock that moved its newest rate, and how many trades were refused so far, and why."""
    flow = Flow("turnover")
    tables = [flow.table(name, **what) for name, what in market.TABLES.items()]
    matched = flow.source("market", source).transact(
        "match", *market.rules(*tables), order_by="event_time", which="kind", domain="board"
    )
    by_stock = matched.filter_batches("accepted", lambda events: events["committed"]).key_by("by stock", "stock")
    by_stock.aggregate("busy", events=agg.count(), traded=agg.last("traded", 1), rate=agg.last("rate", 1)).sink(
        "stocks", stocks
    )
    by_reason = matched.filter("aborted", lambda row: not row["committed"]).key_by("by reason", "reason")
    by_reason.aggregate("why", trades=agg.count()).sink("refused", refused)
    return flow


def main(arguments: Sequence[str] | None = None, spark: Any = None, console: Console | None = None) -> list[Row]:
    """Run the demo, on ``spark`` if given, else on a session of its own; gives back the busiest stocks."""
    parser = argparse.ArgumentParser("python -m examples.turnover", description="Turnover rates of stocks.")
    parser.add_argument(
        "--seconds", type=float, default=15, help="how long the exchange is open (default: %(default)g)"
    )
    parser.add_argument("--rate", type=float, default=50_000, help="quotes and trades/s (default: %(default)g)")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.rate <= 0:
        parser.error("--seconds and --rate must be above 0")
    console = console or Console(highlight=False)
    source = market.LARGE.events(options.rate, limit=max(1, int(options.rate * options.seconds)))
    stocks, refused = MemorySink(), MemorySink()
    console.print(f"Starting Spark for {source.total:,} quotes and trades in {options.seconds:g} s", style="dim")
    session = spark or local_session("local[2]")
    try:
        with build(source, stocks, refused).start(session, checkpoint=tempfile.mkdtemp(prefix="midstream-sea-")) as job:
            shown = -1
            while job.metrics.rows_in < (source.total or 0):
                shown = watch(job, epochs=job.metrics.epochs + 1, plain=True, console=console, after=shown)
            quoted = job.state("quotes").count()
    finally:
        if spark is None:
            session.stop()
    console.print(f"{quoted:,} stocks were quoted")
    return report(stocks.rows, refused.rows, console)


def report(stocks: Sequence[Row], refused: Sequence[Row], console: Console) -> list[Row]:
    """The ten stocks with most quotes and trades, and what was refused."""
    newest = {row["stock"]: row for row in stocks}  # totals of later epochs replace earlier ones
    busiest = sorted(newest.values(), key=lambda row: -row["events"])[:10]
    table = Table("stock", "quotes and trades", "traded in its last second", "turnover rate")
    for row in busiest:
        table.add_row(f"{row['stock']:06}", f"{row['events']:,}", f"{row['traded'][0]:,}", f"{row['rate'][0]:.0%}")
    console.print(table)
    for reason, trades in {row["reason"]: row["trades"] for row in refused}.items():
        console.print(f"{trades:,} trades were refused: {reason}")
    return busiest


if __name__ == "__main__":
    main()
