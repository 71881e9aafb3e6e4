"""The two applications of the MorphStream paper end to end on Spark: OSED (tweets) and SEA (stock exchange).

Both under full load, from the source to committed output and committed tables; what came out is compared with what a
plain Python program finds in the same events. The paper had 24 cores, and got 1,300 tweets/s and 70,000 stock events/s.

    python -m benchmarks.applications [--quick] [--only osed|sea]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from rich.progress import Progress

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, session
from benchmarks.workloads import osed, sea
from examples.turnover import market
from midstream import Flow, GeneratorSource, MemorySink

FULL_LOAD = 10_000_000
"""Rows due per second: more than any flow takes."""


@dataclass(frozen=True)
class Size:
    """Rows of an epoch, and how many epochs; the first ones warm up."""

    tweets: int
    trades: int
    warm_up: int
    epochs: int


FULL = Size(tweets=40_000, trades=500_000, warm_up=3, epochs=6)
QUICK = Size(tweets=4_000, trades=8_000, warm_up=1, epochs=2)


@dataclass(frozen=True)
class Application:
    """A flow, its load, and what must come out of it."""

    name: str
    wanted: int
    source: GeneratorSource
    flow: Callable[[GeneratorSource, MemorySink], Flow]
    expected: Callable[[pa.Table], list[dict[str, Any]]]


def applications(size: Size) -> list[Application]:
    """Both of them."""
    tweets = osed.LARGE.tweets(FULL_LOAD, max_rows_per_epoch=size.tweets)
    events = market.LARGE.events(FULL_LOAD, max_rows_per_epoch=size.trades)
    return [
        Application("osed", 40_000, tweets, osed.flow, lambda rows: osed.oracle(rows).events),
        Application("sea", 500_000, events, sea.flow, lambda rows: sea.oracle(rows)[0]),
    ]


def run(spark: SparkSession, of: Application, size: Size, advance: Callable[[], object]) -> tuple[float, int, str]:
    """Rows per second, how many rows came out and were compared, and what the transactions say of themselves."""
    sink = MemorySink()
    flow = of.flow(of.source, sink)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint,
        flow.start(spark, checkpoint=checkpoint, partitions=CORES) as job,
    ):
        for epoch in range(size.warm_up + size.epochs):
            job.await_epoch(epoch + 1)
            advance()
        rates = [progress.rows_per_s for progress in job.progress][size.warm_up :]
        notes = {stats.operator: stats.note for stats in job.progress[-1].operators if stats.note}
    compared = check(of, sink, job.metrics.rows_in)
    return statistics.median(rates), compared, "; ".join(f"{k}: {v}" for k, v in notes.items())


def check(of: Application, sink: MemorySink, rows: int) -> int:
    """Compare what came out with what must have; gives how many rows that is."""
    wanted = of.expected(pa.Table.from_batches(of.source.rows(0, rows, start_us=0)))
    found, expected = (sorted(map(_row, each)) for each in (sink.rows, wanted))
    if found != expected:
        raise RuntimeError(f"{of.name}: {len(found)} rows came out that differ from the {len(expected)} expected ones")
    return len(found)


def _row(row: dict[str, Any]) -> str:
    return repr(sorted(row.items()))


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=("osed", "sea"), help="only one of the two")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    figures: dict[str, Any] = {}
    lines = []
    with session(**{"spark.driver.memory": "4g"}) as spark, Progress() as progress:
        for each in applications(size):
            if options.only in (None, each.name):
                steps = progress.add_task(each.name, total=size.warm_up + size.epochs)
                rate, compared, note = run(spark, each, size, partial(progress.advance, steps))
                figures |= {f"{each.name}_rows_per_s": round(rate), f"{each.name}_rows_checked": compared}
                figures[f"{each.name}_strategy"] = note
                lines.append((each.name, f"{rate:,.0f}", f"≥ {each.wanted:,}", f"{compared:,}"))
    table(f"applications, {CORES} cores (medians)", ("", "rows/s", "wanted", "rows that came out, as they must"), lines)
    closing_line("applications", figures, quick=options.quick)


if __name__ == "__main__":
    main()
