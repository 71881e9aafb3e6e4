"""NEXMark on midstream, on plain Structured Streaming as far as it can express the queries, and on PyFlink.

Structured Streaming and we read the same Parquet files, one set of them in each epoch, and drop what comes out; times
are Spark's own, from each query's progress. Every row costs reading, so q0 says what is left for the others. "Spark
SQL" is what Catalyst runs alone; "Spark, Python" calls the same batch functions as our flow, in ``mapInArrow``. Where
no function of the user's is involved, Catalyst never leaves the JVM, and may be faster than we are: the table says by
how much.

PyFlink (``make rivals``, or ``--pyflink PYTHON``; without it, it is left out) reads CSV files, because it has no reader
of Parquet, and so do we when we are compared with it. It runs each query over some events and over six times as many;
its rate is that of the difference, so that its start does not count. Where that is nothing, too few events or too busy
a machine, there is no rate. "PyFlink, SQL" is what Flink's JVM runs alone;
"PyFlink, Python" calls functions in its Python workers.

That our answers are right is tested elsewhere, against DuckDB (``tests/simulation/test_nexmark.py``).

    python -m benchmarks.nexmark [--quick] [--only q0,q5] [--pyflink PYTHON] [--plot FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.progress import Progress

from benchmarks.report import arguments, closing_line, table
from benchmarks.rivals.flink import Missing, find, run_script
from benchmarks.sessions import CORES, midstream_durations, query_durations, session
from benchmarks.workloads import nexmark
from benchmarks.workloads.nexmark import flink_sql, spark_sql
from midstream import NoopSink
from midstream.data.schema import to_ddl

SIDES = MIDSTREAM, SPARK, PYTHON = "midstream", "Spark SQL", "Spark, Python"
CSV_SIDES = MIDSTREAM_CSV, FLINK, FLINK_PYTHON = "midstream, CSV", "PyFlink, SQL", "PyFlink, Python"
FIRST_US = 1_767_225_600_000_000
"""When the events begin; any whole day."""


@dataclass(frozen=True)
class Size:
    """Events of an epoch and of a second, and epochs of each query, of which the first ones warm up."""

    events: int
    rate: int
    epochs: int
    warm_up: int


FULL, QUICK = Size(500_000, 50_000, 5, 2), Size(20_000, 4_000, 3, 1)
SPARE = 2
"""More epochs than are measured: a job is stopped in the middle of one."""
FLINK_RUNS = (1, 6)
"""Epochs of events in each of PyFlink's runs."""
PARQUET, CSV = "parquet", "csv"
QUICK_QUERIES = ("q0", "q2", "q5", "q14")


def write_events(folder: Path, size: Size, form: str, cuts: tuple[int, ...]) -> int:
    """Write all streams as files, as many for each stretch between two cuts as there are cores; cuts are in epochs.

    Gives the number of events.
    """
    written = 0
    for name, stream in nexmark.LARGE.streams(size.rate, limit=size.events * cuts[-1])._asdict().items():
        place, total = folder / name, stream.total
        place.mkdir(parents=True)
        assert total is not None
        for number, (begin, after) in enumerate(pairwise(cuts)):
            start, end = total * begin // cuts[-1], total * after // cuts[-1]
            rows = pa.Table.from_batches(list(stream.rows(start, end, FIRST_US)), stream.schema)
            written += rows.num_rows
            for part in range(CORES):
                # Every other row: so both files are read at the same pace of event time.
                share = rows.take(pa.array(range(part, rows.num_rows, CORES)))
                file = place / f"{number:04d}-{part}.{form}"
                if form == PARQUET:
                    pq.write_table(share, file)
                else:
                    plain = share.append_column("event_us", share["event_time"].cast(pa.int64()))
                    pacsv.write_csv(plain.drop_columns(["event_time"]), file, pacsv.WriteOptions(include_header=False))
                os.utime(file, (number, number))  # Spark reads files in the order of these times
    return written


def read_events(spark: SparkSession, folder: Path, form: str) -> nexmark.Streams:
    """The streams, an epoch's files at a time."""
    made = {}
    for name, stream in nexmark.LARGE.streams(1)._asdict().items():
        ddl = to_ddl(stream.schema)
        reader = spark.readStream.option("maxFilesPerTrigger", CORES)
        if form == PARQUET:
            made[name] = reader.schema(ddl).parquet(str(folder / name))
        else:
            rows = reader.schema(ddl.replace("event_time timestamp", "event_us bigint")).csv(str(folder / name))
            made[name] = rows.withColumn("event_time", F.timestamp_micros("event_us")).drop("event_us")
    return nexmark.Streams(**made)


def measure(spark: SparkSession, query: str, streams: nexmark.Streams, size: Size) -> dict[str, float]:
    """The median duration of an epoch of each side that has the query, ms."""
    found = {MIDSTREAM: midstream_durations(spark, nexmark.flow(query, streams, NoopSink()), size.epochs)}
    if query in spark_sql.SQL:
        mode = "update" if query in spark_sql.UPDATES else "append"
        found[SPARK] = query_durations(spark_sql.SQL[query](spark, streams), size.epochs, mode)
    if query in spark_sql.PYTHON:
        found[PYTHON] = query_durations(spark_sql.PYTHON[query](spark, streams), size.epochs)
    return {side: statistics.median(durations[size.warm_up :]) for side, durations in found.items()}


def measure_flink(python: str, folder: Path, queries: Sequence[str], size: Size) -> dict[str, dict[str, float]]:
    """PyFlink's time for an epoch's events, by query and side, ms."""
    runs = []
    for epochs in FLINK_RUNS:
        runs.append(folder / f"flink-{epochs}")
        write_events(runs[-1], size, CSV, (0, epochs))
    found: dict[str, dict[str, float]] = {}
    for side, sql in ((FLINK, flink_sql.SQL), (FLINK_PYTHON, flink_sql.PYTHON)):
        wanted = {query: sql[query] for query in queries if query in sql}
        given = {"folder": str(folder), "runs": [str(run) for run in runs], "queries": wanted}
        for told in run_script(python, "nexmark_pyflink.py", given) if wanted else ():
            if "error" in told:
                raise RuntimeError(f"PyFlink cannot run {told['query']}: {told['error']}")
            if (epoch_ms := of_difference(*told["seconds"])) is None:
                print(f"{told['query']}: no rate of {side}; {FLINK_RUNS[1]} times the events took no longer")
            else:
                found.setdefault(told["query"], {})[side] = epoch_ms
    return found


def of_difference(short_s: float, long_s: float) -> float | None:
    """The time for an epoch's events, ms, from that of both runs; None if the longer one was no longer.

    >>> of_difference(2.0, 4.5), of_difference(2.0, 1.9)
    (500.0, None)
    """
    extra = FLINK_RUNS[1] - FLINK_RUNS[0]
    return 1000 * (long_s - short_s) / extra if long_s > short_s else None


def show(found: Mapping[str, Mapping[str, float]], size: Size) -> None:
    """A line for each query."""
    for title, ours, others in ((PARQUET, MIDSTREAM, SIDES[1:]), (CSV, MIDSTREAM_CSV, CSV_SIDES[1:])):
        rows = []
        for query, medians in found.items():
            if ours in medians:
                rates = [f"{1000 * size.events / medians[s]:,.0f}" if s in medians else "" for s in (ours, *others)]
                ratios = [f"{medians[side] / medians[ours]:.2f}" if side in medians else "" for side in others]
                rows.append((query, *rates, *ratios, f"{medians[ours]:,.0f}"))
        if rows:
            table(
                f"NEXMark, {size.events:,} events an epoch as {title}, events/s, {CORES} cores",
                ("", ours, *others, *(f"over {side}" for side in others), "our epoch, ms"),
                rows,
            )
    print("Below 1 the other side is faster: as a rule a JVM alone, without a function of the user's.")


def plot(path: Path, found: Mapping[str, Mapping[str, float]], size: Size) -> None:
    """Events/s of each side, by query."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 4))
    colours = ("#2255aa", "#999999", "#e0a030", "#4c9be8", "#bb5566", "#dd99aa")
    shown = [side for side in (*SIDES, *CSV_SIDES) if any(side in medians for medians in found.values())]
    width = 0.84 / len(shown)
    for place, side in enumerate(shown):
        bars = [
            (at, 1000 * size.events / medians[side]) for at, medians in enumerate(found.values()) if side in medians
        ]
        places = [at + width * (place - (len(shown) - 1) / 2) for at, _ in bars]
        axes.bar(places, [rate for _, rate in bars], width, color=colours[place], label=side)
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
    parser.add_argument("--pyflink", metavar="PYTHON", help="a Python that has apache-flink")
    options = parser.parse_args()
    size, began = (QUICK if options.quick else FULL), time.perf_counter()
    queries = options.only.split(",") if options.only else QUICK_QUERIES if options.quick else tuple(nexmark.QUERIES)
    if unknown := [query for query in queries if query not in nexmark.QUERIES]:
        parser.error(f"--only {unknown[0]}: the queries are {', '.join(nexmark.QUERIES)}")
    before, missing, python = os.getloadavg(), None, None
    try:
        python = find(options.pyflink)
    except Missing as error:
        if options.pyflink:
            parser.error(str(error))
        missing = str(error)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, Progress() as progress:
        folder, cuts = Path(name), tuple(range(size.epochs + SPARE + 1))
        writing = progress.add_task("events", total=2)
        events = write_events(folder / PARQUET, size, PARQUET, cuts)
        progress.advance(writing)
        write_events(folder / CSV, size, CSV, cuts)
        progress.advance(writing)
        steps = progress.add_task("queries", total=len(queries))
        with session() as spark:
            spark.conf.set("spark.sql.session.timeZone", "UTC")
            streams, csv_streams = (read_events(spark, folder / form, form) for form in (PARQUET, CSV))
            for query in queries:
                found[query] = measure(spark, query, streams, size)
                if python is not None and query in flink_sql.SQL:
                    flow = nexmark.flow(query, csv_streams, NoopSink())
                    durations = midstream_durations(spark, flow, size.epochs)[size.warm_up :]
                    found[query][MIDSTREAM_CSV] = statistics.median(durations)
                progress.advance(steps)
        if python is not None:
            flink = progress.add_task("PyFlink", total=1)
            for query, medians in measure_flink(python, folder, queries, size).items():
                found[query] |= medians
            progress.advance(flink)
    show(found, size)
    if missing:
        print(missing)
    if options.plot:
        plot(options.plot, found, size)
    figures = figures_of(found, size) | {"events": events, "load_average": [before, os.getloadavg()]}
    closing_line("nexmark", figures | {"took_s": round(time.perf_counter() - began)}, quick=options.quick)


def figures_of(found: Mapping[str, Mapping[str, float]], size: Size) -> dict[str, Any]:
    """For programs: factors over one that mean that we are faster, by query."""

    def over(side: str, ours: str = MIDSTREAM) -> dict[str, float]:
        return {q: round(medians[side] / medians[ours], 2) for q, medians in found.items() if side in medians}

    return {
        "over_spark": over(SPARK),
        "over_spark_python": over(PYTHON),
        "over_pyflink": over(FLINK, MIDSTREAM_CSV),
        "over_pyflink_python": over(FLINK_PYTHON, MIDSTREAM_CSV),
        "events_per_s": {query: round(1000 * size.events / medians[MIDSTREAM]) for query, medians in found.items()},
        "epoch_ms": {query: round(medians[MIDSTREAM]) for query, medians in found.items()},
        "events_per_epoch": size.events,
    }


if __name__ == "__main__":
    main()
