"""NEXMark on midstream, and on plain Structured Streaming as far as it can express the queries.

Both sides read the same Parquet files, one set of them in each epoch, and drop what comes out; times are Spark's own,
from each query's progress. Every row costs reading, so q0 says what is left for the others. "Spark SQL" is what
Catalyst runs alone; "Spark, Python" calls the same batch functions as our flow, in ``mapInArrow``. Where no function of
the user's is involved, Catalyst never leaves the JVM, and is expected to be faster than we are: the table says by how
much. That answers are right is tested elsewhere, against DuckDB (``tests/simulation/test_nexmark.py``).

    python -m benchmarks.nexmark [--quick] [--only q0,q5] [--plot FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from rich.progress import Progress

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, midstream_durations, query_durations, session
from benchmarks.workloads import nexmark
from benchmarks.workloads.nexmark import spark_sql
from midstream import NoopSink
from midstream.data.schema import to_ddl

SIDES = MIDSTREAM, SPARK, PYTHON = "midstream", "Spark SQL", "Spark, Python"
FIRST_US = 1_767_225_600_000_000
"""When the events begin; any whole day."""


@dataclass(frozen=True)
class Size:
    """Events of an epoch and of a second, and epochs of each query, of which the first ones warm up."""

    events: int
    rate: int
    epochs: int
    warm_up: int


FULL, QUICK = Size(500_000, 50_000, 7, 2), Size(20_000, 4_000, 3, 1)
SPARE = 2
"""More epochs than are measured: a job is stopped in the midst of one."""
QUICK_QUERIES = ("q0", "q2", "q5", "q14")


def write_events(folder: Path, size: Size) -> int:
    """Write all streams as files, as many for each epoch as there are cores; gives the number of events."""
    epochs = size.epochs + SPARE
    streams = nexmark.LARGE.streams(size.rate, limit=size.events * epochs)
    written = 0
    for name, stream in streams._asdict().items():
        place = folder / name
        place.mkdir(parents=True)
        total = stream.total
        assert total is not None
        for epoch in range(epochs):
            start, end = total * epoch // epochs, total * (epoch + 1) // epochs
            rows = pa.Table.from_batches(list(stream.rows(start, end, FIRST_US)), stream.schema)
            written += rows.num_rows
            for part in range(CORES):
                file = place / f"{epoch:04d}-{part}.parquet"
                share = rows.num_rows * part // CORES, rows.num_rows * (part + 1) // CORES
                pq.write_table(rows.slice(share[0], share[1] - share[0]), file)
                os.utime(file, (epoch, epoch))  # Spark reads files in the order of these times
    return written


def read_events(spark: SparkSession, folder: Path) -> nexmark.Streams:
    """The streams, an epoch's files at a time."""
    schemas = {name: to_ddl(stream.schema) for name, stream in nexmark.LARGE.streams(1)._asdict().items()}
    reader = {
        name: spark.readStream.schema(schema).option("maxFilesPerTrigger", CORES) for name, schema in schemas.items()
    }
    return nexmark.Streams(**{name: each.parquet(str(folder / name)) for name, each in reader.items()})


def measure(spark: SparkSession, query: str, streams: nexmark.Streams, size: Size) -> dict[str, float]:
    """The median duration of an epoch of each side that has the query, ms."""
    found = {MIDSTREAM: midstream_durations(spark, nexmark.flow(query, streams, NoopSink()), size.epochs)}
    if query in spark_sql.SQL:
        mode = "update" if query in spark_sql.UPDATES else "append"
        found[SPARK] = query_durations(spark_sql.SQL[query](spark, streams), size.epochs, mode)
    if query in spark_sql.PYTHON:
        found[PYTHON] = query_durations(spark_sql.PYTHON[query](spark, streams), size.epochs)
    return {side: statistics.median(durations[size.warm_up :]) for side, durations in found.items()}


def show(found: Mapping[str, Mapping[str, float]], size: Size) -> None:
    """A line for each query."""
    rows = []
    for query, medians in found.items():
        rates = [f"{1000 * size.events / medians[side]:,.0f}" if side in medians else "" for side in SIDES]
        ours = medians[MIDSTREAM]
        ratios = [f"{medians[side] / ours:.2f}" if side in medians else "" for side in (SPARK, PYTHON)]
        rows.append((query, *rates, *ratios, f"{ours:,.0f}"))
    table(
        f"NEXMark, {size.events:,} events an epoch, events/s, {CORES} cores",
        ("", *SIDES, f"× {SPARK}", f"× {PYTHON}", "epoch, ms"),
        rows,
    )
    print("A factor below 1 means that Spark is faster: Catalyst alone, without a function of the user's.")


def plot(path: Path, found: Mapping[str, Mapping[str, float]], size: Size) -> None:
    """Events/s of each side, by query."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.6))
    for place, (side, colour) in enumerate(zip(SIDES, ("#2255aa", "#999999", "#e0a030"), strict=True)):
        bars = [(at, size.events / medians[side]) for at, medians in enumerate(found.values()) if side in medians]
        places = [at + 0.27 * (place - 1) for at, _ in bars]
        axes.bar(places, [rate for _, rate in bars], 0.26, color=colour, label=side)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(ylabel="events/s", yscale="log")
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", help="queries, e.g. q0,q5")
    options = parser.parse_args()
    size, began = (QUICK if options.quick else FULL), time.perf_counter()
    queries = options.only.split(",") if options.only else QUICK_QUERIES if options.quick else tuple(nexmark.QUERIES)
    if unknown := [query for query in queries if query not in nexmark.QUERIES]:
        parser.error(f"--only {unknown[0]}: the queries are {', '.join(nexmark.QUERIES)}")
    before = os.getloadavg()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, Progress() as progress:
        folder = Path(name)
        writing = progress.add_task("events", total=1)
        events = write_events(folder, size)
        progress.advance(writing)
        steps = progress.add_task("queries", total=len(queries))
        with session() as spark:
            spark.conf.set("spark.sql.session.timeZone", "UTC")
            streams = read_events(spark, folder)
            for query in queries:
                found[query] = measure(spark, query, streams, size)
                progress.advance(steps)
    show(found, size)
    if options.plot:
        plot(options.plot, found, size)
    figures = figures_of(found, size) | {"events": events, "load_average": [before, os.getloadavg()]}
    closing_line("nexmark", figures | {"took_s": round(time.perf_counter() - began)}, quick=options.quick)


def figures_of(found: Mapping[str, Mapping[str, float]], size: Size) -> dict[str, Any]:
    """For programs: factors over one that mean that we are faster, by query."""

    def over(side: str) -> dict[str, float]:
        return {q: round(medians[side] / medians[MIDSTREAM], 2) for q, medians in found.items() if side in medians}

    return {
        "over_spark": over(SPARK),
        "over_spark_python": over(PYTHON),
        "events_per_s": {query: round(1000 * size.events / medians[MIDSTREAM]) for query, medians in found.items()},
        "epoch_ms": {query: round(medians[MIDSTREAM]) for query, medians in found.items()},
        "events_per_epoch": size.events,
    }


if __name__ == "__main__":
    main()
