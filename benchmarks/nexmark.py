"""NEXMark on midstream, on plain Structured Streaming as far as it can express the queries, and on PyFlink.

Structured Streaming and we read the same Parquet files, one set of them in each epoch, and drop what comes out (q10
writes files); times are Spark's own, from each query's progress. Sides take turns, and a first round is not counted:
the JVM takes that long to compile what is hot. Every row costs reading, so q0 says what is left for the others. "Spark
SQL" is what Catalyst runs alone; "Spark, Python" calls the same batch functions as our flow, in ``mapInArrow``. Where
no function of the user's is involved, Catalyst never leaves the JVM, and may be faster than we are: the table says by
how much.

PyFlink (``make rivals``, or ``--pyflink PYTHON``; without it, it is left out) reads CSV files, because it has no reader
of Parquet, and so do we when we are compared with it. It runs each query over some events and over six times as many;
its rate is that of the difference, so that its start does not count. Where that is nothing, too few events or too busy
a machine, there is no rate. "PyFlink, SQL" is what Flink's JVM runs alone;
"PyFlink, Python" calls functions in its Python workers.

Latency is measured by itself, at a steady rate that is far from full load: from when an event was due until the epoch
that took it was committed (:mod:`benchmarks.waits`).

That our answers are right is tested elsewhere, against DuckDB (``tests/simulation/test_nexmark.py``).

    python -m benchmarks.nexmark [--quick] [--only q0,q5] [--parts spark,pyflink,latency] [--pyflink PYTHON]
        [--plot FILE]
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from rich.progress import Progress

from benchmarks.company import company
from benchmarks.report import arguments, closing_line, table
from benchmarks.rivals.flink import Missing, find, run_script
from benchmarks.sessions import CORES, midstream_durations, plain_writer, query_durations, session
from benchmarks.waits import steady_waits
from benchmarks.workloads import nexmark
from benchmarks.workloads.nexmark import flink_sql, spark_sql
from midstream import FileSink, Flow, NoopSink
from midstream.data.schema import to_ddl
from midstream.runtime.spark.generator_source import stream_of

SIDES = MIDSTREAM, SPARK, PYTHON = "midstream", "Spark SQL", "Spark, Python"
CSV_SIDES = MIDSTREAM_CSV, FLINK, FLINK_PYTHON = "midstream, CSV", "PyFlink, SQL", "PyFlink, Python"
FIRST_US = 1_767_225_600_000_000
"""When the events begin; any whole day."""


@dataclass(frozen=True)
class Size:
    """Events of an epoch and of a second; epochs of each run of a query, of which the first ones warm up; rounds that
    count; seconds of steady load, of which the first ones warm up."""

    events: int
    rate: int
    epochs: int
    warm_up: int
    rounds: int
    steady_s: tuple[float, float]


FULL, QUICK = Size(500_000, 50_000, 6, 2, 1, (3, 5)), Size(20_000, 4_000, 2, 1, 1, (1, 1.5))
STEADY_RATE = 10_000
"""Events per second while latency is measured."""
CONF = {
    "spark.driver.memory": "4g",  # q20 of Spark SQL keeps a minute of bids in its heap
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
}
PARTS = "spark", "pyflink", "latency"
SPARE = 2
"""More epochs than are measured: a job is stopped in the middle of one."""
FLINK_RUNS = (1, 6)
"""Epochs of events in each of PyFlink's runs."""
PARQUET, CSV = "parquet", "csv"
QUICK_QUERIES = ("q0", "q2", "q5", "q14")


def write_events(folder: Path, size: Size, form: str, cuts: tuple[int, ...]) -> None:
    """Write all streams as files, as many for each stretch between two cuts as there are cores; cuts are in epochs."""
    for name, stream in nexmark.LARGE.streams(size.rate, limit=size.events * cuts[-1])._asdict().items():
        place, total = folder / name, stream.total
        place.mkdir(parents=True)
        assert total is not None
        for number, (begin, after) in enumerate(pairwise(cuts)):
            start, end = total * begin // cuts[-1], total * after // cuts[-1]
            rows = pa.Table.from_batches(list(stream.rows(start, end, FIRST_US)), stream.schema)
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


Run = Callable[[], list[float]]
Started = contextlib.AbstractContextManager[StreamingQuery]


@dataclass(frozen=True)
class Sides:
    """A query over some streams, on each side that has it."""

    spark: SparkSession
    query: str
    streams: nexmark.Streams
    """Of Structured Streaming; ours may be descriptions of sources."""
    ours: nexmark.Streams

    def runs(self, size: Size) -> dict[str, Run]:
        """What runs it once, and gives the durations of its epochs, ms."""
        runs: dict[str, Run] = {MIDSTREAM: lambda: self._on_ours(size)}
        return runs | {side: partial(self._on_theirs, rows, size) for side, rows in self._rivals().items()}

    def started(self) -> dict[str, Callable[[], Started]]:
        """What starts it, until the end of the block."""
        found: dict[str, Callable[[], Started]] = {MIDSTREAM: self._job}
        return found | {side: partial(self._plain, rows) for side, rows in self._rivals().items()}

    def _rivals(self) -> dict[str, spark_sql.Query]:
        tables = {SPARK: spark_sql.SQL, PYTHON: spark_sql.PYTHON}
        return {side: queries[self.query] for side, queries in tables.items() if self.query in queries}

    @property
    def _parted_by(self) -> tuple[str, ...]:
        return nexmark.PARTED_BY.get(self.query, ())

    @property
    def _mode(self) -> str:
        return "update" if self.query in spark_sql.UPDATES else "append"

    def _flow(self, folder: str) -> Flow:
        sink = FileSink(f"{folder}/files", partition_by=self._parted_by) if self._parted_by else NoopSink()
        return nexmark.flow(self.query, self.ours, sink)

    def _on_ours(self, size: Size) -> list[float]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return midstream_durations(self.spark, self._flow(folder), size.epochs)

    def _on_theirs(self, rows: spark_sql.Query, size: Size) -> list[float]:
        found = rows(self.spark, self.streams)
        return query_durations(found, size.epochs, self._mode, parted_by=self._parted_by)

    @contextlib.contextmanager
    def _job(self) -> Iterator[StreamingQuery]:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            self._flow(folder).start(self.spark, checkpoint=f"{folder}/checkpoint", partitions=CORES) as job,
        ):
            [query] = [query for query in self.spark.streams.active if job.id in str(query.name)]
            yield query

    @contextlib.contextmanager
    def _plain(self, rows: spark_sql.Query) -> Iterator[StreamingQuery]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            query = plain_writer(rows(self.spark, self.streams), folder, self._mode, self._parted_by).start()
            try:
                yield query
            finally:
                query.stop()


def measure(runs: Mapping[str, Run], size: Size) -> dict[str, float]:
    """The median duration of an epoch of each side, ms; sides take turns, and the first round does not count."""
    found: dict[str, list[float]] = {side: [] for side in runs}
    for number in range(1 + size.rounds):
        for side, run in runs.items():
            durations = run()[size.warm_up :]
            if number:
                found[side] += durations
    return {side: statistics.median(durations) for side, durations in found.items()}


def measure_latency(spark: SparkSession, query: str, size: Size) -> dict[str, tuple[float, float]]:
    """How long an event waits on each side, ms: the median, and 99 of 100."""
    generators = nexmark.LARGE.streams(STEADY_RATE, partitions=CORES)
    streams = nexmark.Streams(*(stream_of(spark, generator) for generator in generators))
    found = {}
    for side, start in Sides(spark, query, streams, generators).started().items():
        with start() as started:
            waits = steady_waits(started, *size.steady_s)
        found[side] = (float(np.quantile(waits, 0.5)), float(np.quantile(waits, 0.99)))
    return found


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
        company.look()
        answers = run_script(python, "nexmark_pyflink.py", given) if wanted else []
        company.leave_out()  # Flink's JVM has ended, and would look like somebody else's
        for told in answers:
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


def show(
    found: Mapping[str, Mapping[str, float]], latency: Mapping[str, Mapping[str, tuple[float, float]]], size: Size
) -> None:
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
    rows = []
    for query, waits in latency.items():
        rows.append((query, *(f"{waits[s][0]:,.0f} / {waits[s][1]:,.0f}" if s in waits else "" for s in SIDES)))
    if rows:
        table(f"Latency at {STEADY_RATE:,} events/s, ms: median / 99 of 100", ("", *SIDES), rows)
    print("Below 1 the other side is faster: as a rule a JVM alone, without a function of the user's.")


def plot(path: Path, figures: Mapping[str, Any]) -> None:
    """Our factor over each rival, by query."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(figsize=(9.5, 4))
    rivals = {
        "over_spark": (SPARK, "o", "#999999"),
        "over_spark_python": (PYTHON, "o", "#2255aa"),
        "over_pyflink": (FLINK, "D", "#dd99aa"),
        "over_pyflink_python": (FLINK_PYTHON, "D", "#bb5566"),
    }
    queries = sorted({query for key in rivals for query in figures[key]}, key=lambda query: int(query[1:]))
    for key, (label, marker, colour) in rivals.items():
        places = [queries.index(query) for query in figures[key]]
        if places:
            axes.plot(places, [*figures[key].values()], marker, color=colour, label=f"over {label}")
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set_xticks(range(len(queries)), queries)
    axes.set(ylabel="midstream's events/s, × the other's", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", help="queries, e.g. q0,q5")
    parser.add_argument("--pyflink", metavar="PYTHON", help="a Python that has apache-flink")
    parser.add_argument("--parts", default=",".join(PARTS), help="what is measured, e.g. spark,latency")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts {unknown[0]}: the parts are {', '.join(PARTS)}")
    size, began = (QUICK if options.quick else FULL), time.perf_counter()
    queries = options.only.split(",") if options.only else QUICK_QUERIES if options.quick else tuple(nexmark.QUERIES)
    if unknown := [query for query in queries if query not in nexmark.QUERIES]:
        parser.error(f"--only {unknown[0]}: the queries are {', '.join(nexmark.QUERIES)}")
    before, missing, python = os.getloadavg(), None, None
    try:
        python = find(options.pyflink) if "pyflink" in parts else None
    except Missing as error:
        if options.pyflink:
            parser.error(str(error))
        missing = str(error)
    found: dict[str, dict[str, float]] = {query: {} for query in queries}
    latency: dict[str, dict[str, tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, Progress() as progress:
        folder, cuts = Path(name), tuple(range(size.epochs + SPARE + 1))
        forms = {PARQUET: "spark" in parts, CSV: python is not None}
        for form in progress.track([form for form, is_read in forms.items() if is_read], description="events"):
            write_events(folder / form, size, form, cuts)
        steps = progress.add_task("queries", total=len(queries))
        with session(**CONF) as spark:
            spark.conf.set("spark.sql.session.timeZone", "UTC")
            streams = {form: read_events(spark, folder / form, form) for form, is_read in forms.items() if is_read}
            for query in queries:
                if "spark" in parts:
                    found[query] |= measure(Sides(spark, query, streams[PARQUET], streams[PARQUET]).runs(size), size)
                if python is not None and query in flink_sql.SQL:
                    ours = Sides(spark, query, streams[CSV], streams[CSV]).runs(size)[MIDSTREAM]
                    found[query] |= measure({MIDSTREAM_CSV: ours}, size)
                if "latency" in parts:
                    latency[query] = measure_latency(spark, query, size)
                progress.console.print(query, {side: round(ms) for side, ms in found[query].items()}, "ms an epoch")
                progress.advance(steps)
        if python is not None:
            flink = progress.add_task("PyFlink", total=1)
            for query, medians in measure_flink(python, folder, queries, size).items():
                found[query] |= medians
            progress.advance(flink)
    show(found, latency, size)
    if missing:
        print(missing)
    figures = figures_of(found, latency, size)
    if options.plot:
        plot(options.plot, figures)
    figures |= {"load_average": [before, os.getloadavg()]}
    closing_line("nexmark", figures | {"took_s": round(time.perf_counter() - began)}, quick=options.quick)


def figures_of(
    found: Mapping[str, Mapping[str, float]], latency: Mapping[str, Mapping[str, tuple[float, float]]], size: Size
) -> dict[str, Any]:
    """For programs, by query: factors, of which one over 1 means that we are faster; rates and latency of each side."""

    def over(side: str, ours: str = MIDSTREAM) -> dict[str, float]:
        return {
            q: round(medians[side] / medians[ours], 2) for q, medians in found.items() if {side, ours} <= {*medians}
        }

    return {
        "over_spark": over(SPARK),
        "over_spark_python": over(PYTHON),
        "over_pyflink": over(FLINK, MIDSTREAM_CSV),
        "over_pyflink_python": over(FLINK_PYTHON, MIDSTREAM_CSV),
        "events_per_s": {
            side: {q: round(1000 * size.events / medians[side]) for q, medians in found.items() if side in medians}
            for side in (*SIDES, *CSV_SIDES)
        },
        "latency_p50_ms": {
            side: {q: round(waits[side][0]) for q, waits in latency.items() if side in waits} for side in SIDES
        },
        "latency_p99_ms": {
            side: {q: round(waits[side][1]) for q, waits in latency.items() if side in waits} for side in SIDES
        },
        "events_per_epoch": size.events,
    }


if __name__ == "__main__":
    main()
