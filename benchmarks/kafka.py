"""A topic of Kafka to committed files: midstream and plain Structured Streaming on the same topic of a real broker.

Both sides read with Spark's connector, parse each Arrow batch with the same Python function, and write Parquet files
exactly once: midstream with a FileSink, plain Spark with `mapInArrow` and its file sink.

* Full load: the records are there before, and an epoch takes a fixed number of them. Sides take turns, on the same
  records. `kafka_ratio` is midstream's rows per second by those of plain Spark.
* Live changes at full load: how long until a new function is in effect everywhere.
* Latency: another process writes records by a schedule, and a record's latency is the commit of its epoch minus the
  time at which it was due.

    python -m benchmarks.kafka [--quick] [--plot FILE] [--rate 5000]

The jars of the broker must be there (`make kafka`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json as pj
from pyspark.sql import DataFrame, SparkSession
from rich.progress import Progress

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, session
from examples.kafka import jars
from examples.kafka.broker import Broker, broker
from midstream import FileSink, Flow, Update

SIDES = ("midstream", "plain")
SCHEMA = pa.schema([("user", pa.int64()), ("amount", pa.float64())])
DDL = "user bigint, amount double"
CONF = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}


@dataclass(frozen=True)
class Size:
    """Records of an epoch at full load and how many epochs count; rounds; changes; seconds of the latency part."""

    rows: int
    epochs: int
    rounds: int
    changes: int
    seconds: float


FULL, QUICK = Size(100_000, 10, 3, 5, 30), Size(2_000, 3, 1, 2, 6)
WARM_UP = 2


def parse(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The records of a batch, as rows."""
    if not batch.num_rows:
        return pa.RecordBatch.from_pydict({"user": [], "amount": []}, schema=SCHEMA)
    lines = b"\n".join(batch.column("value").to_pylist())
    read = pj.read_json(pa.BufferReader(lines), parse_options=pj.ParseOptions(explicit_schema=SCHEMA))
    [found] = read.combine_chunks().to_batches()
    return found


def parse_again(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same, as another function: what a change puts in its place."""
    return parse(batch)


def parse_all(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same for ``mapInArrow``."""
    for batch in batches:
        yield parse(batch)


def stream(spark: SparkSession, servers: str, topic: str, limit: int | None) -> DataFrame:
    """The topic, with the columns that both sides need."""
    options = {"subscribe": topic, "startingOffsets": "earliest", "kafka.bootstrap.servers": servers}
    limits = {} if limit is None else {"maxOffsetsPerTrigger": str(limit)}
    return spark.readStream.format("kafka").options(**options, **limits).load().select("value")


def flow_over(rows: DataFrame, folder: Path) -> Flow:
    """midstream's side."""
    flow = Flow("kafka")
    flow.source("records", rows).map_batches("parse", parse, returns=DDL).sink("files", FileSink(folder / "out"))
    return flow


@dataclass(frozen=True)
class Epoch:
    """A committed epoch of either side: its rows, how long it took, when it was committed, and up to which offsets."""

    rows: int
    ms: float
    committed_at: float
    offsets: Mapping[str, int]


class Side:
    """A running job of one side."""

    def __init__(self, side: str, rows: DataFrame, folder: Path) -> None:
        self.job: Any = None
        if side == "midstream":
            self.job = flow_over(rows, folder).start(rows.sparkSession, checkpoint=str(folder / "c"), partitions=CORES)
            [self._query] = [each for each in rows.sparkSession.streams.active if self.job.id in str(each.name)]
        else:
            writer = rows.mapInArrow(parse_all, DDL).writeStream.format("parquet")
            self._query = writer.option("checkpointLocation", str(folder / "c")).start(str(folder / "out"))

    def epochs(self) -> list[Epoch]:
        """What is committed so far, as Spark tells it of either side."""
        found = []
        for told in self._query.recentProgress:
            if told["numInputRows"]:
                began = datetime.fromisoformat(told["timestamp"]).timestamp()
                ms = float(told["durationMs"]["triggerExecution"])
                [offsets] = json.loads(told["sources"][0].endOffset).values()
                found.append(Epoch(told["numInputRows"], ms, began + ms / 1000, offsets))
        return found

    def wait(self, epochs: int) -> None:
        """Until that many are committed."""
        while self._query.isActive and len(self.epochs()) < epochs:
            self._query.awaitTermination(0.1)  # type: ignore[arg-type]  # parts of a second are taken, too
        if self._query.exception() is not None:
            raise RuntimeError(str(self._query.exception()))

    def stop(self) -> None:
        """End it."""
        (self.job or self._query).stop()


def at_full_load(spark: SparkSession, servers: str, side: str, size: Size) -> tuple[list[float], list[float]]:
    """How long epochs of that many rows take, in milliseconds; of midstream, also the delays of changes after these."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        running = Side(side, stream(spark, servers, "full", size.rows), Path(folder))
        delays = []
        try:
            running.wait(WARM_UP + size.epochs)
            usual_s = statistics.median(each.ms for each in running.epochs()[WARM_UP:]) / 1000
            for number in range(size.changes if running.job is not None else 0):
                time.sleep(usual_s * (0.2 + 0.37 * number % 0.6))  # somewhere within an epoch
                change = running.job.update(Update("parse", parse if number % 2 else parse_again))
                change.wait(60)
                delays.append(change.delay_ms)
        finally:
            running.stop()
        # The connector rounds the share of each partition down, so epochs lack a row or two.
        whole = [each.ms * size.rows / each.rows for each in running.epochs() if each.rows > 0.9 * size.rows]
    return whole[WARM_UP : WARM_UP + size.epochs], [delay for delay in delays if delay is not None]


def latencies(
    spark: SparkSession, started: Broker, topic: str, side: str, size: Size, rate: float
) -> npt.NDArray[np.float64]:
    """The latency of each record of the second half, in milliseconds."""
    started.create_topic(topic, CORES)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        running = Side(side, stream(spark, started.servers, topic, None), Path(folder))
        try:
            begin = time.time() + 3  # the producer needs a moment
            command = [sys.executable, "-m", "benchmarks.kafka", "--produce", started.servers, topic]
            subprocess.run([*command, str(rate), str(size.seconds), str(begin)], check=True)
            until = time.monotonic() + 60
            while sum(running.epochs()[-1].offsets.values()) < int(rate * size.seconds) and time.monotonic() < until:
                running.wait(len(running.epochs()) + 1)
        finally:
            running.stop()
        epochs = running.epochs()
    found, before = [], dict.fromkeys(map(str, range(CORES)), 0)
    for epoch in epochs:
        for partition, end in epoch.offsets.items():
            numbers = np.arange(before[partition], end) * CORES + int(partition)
            found.append(1000 * (epoch.committed_at - (begin + numbers[numbers >= rate * size.seconds / 2] / rate)))
            before[partition] = end
    return np.concatenate(found)


def produce(servers: str, topic: str, rate: float, seconds: float, begin: float) -> None:
    """Write records by a schedule: number i is due at ``begin + i / rate``, in partition ``i % CORES``."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "linger.ms": 2})
    written, total = 0, int(rate * seconds)
    while written < total:
        due = max(written, min(total, int((time.time() - begin) * rate) + 1))
        for number in range(written, due):
            producer.produce(topic, _record(number), partition=number % CORES)
        written = due
        producer.poll(0.002)
    producer.flush()


def _record(number: int) -> bytes:
    return b'{"user": %d, "amount": %d.5}' % (number % 1_003, number % 100)


def main() -> None:
    """Run it and print the results."""
    options = arguments(__doc__ or "")
    options.add_argument("--rate", type=float, default=5_000, help="records a second (default: %(default)s)")
    options.add_argument("--produce", nargs=5, help="internal: be the process that writes records")
    args = options.parse_args()
    if args.produce:
        servers, topic, *numbers = args.produce
        produce(servers, topic, *map(float, numbers))
        return
    if not all(map(jars.present, (jars.BROKER, jars.CONNECTOR))):
        print(f"skipped: the jars of Kafka are not in {jars.folder()}; {jars.COMMAND} fetches them")
        closing_line("kafka", {"skipped": True}, quick=args.quick)
        return
    size = QUICK if args.quick else FULL
    rate = min(args.rate, 500.0) if args.quick else args.rate
    durations: dict[str, list[float]] = {side: [] for side in SIDES}
    delays: list[float] = []
    waited = {}
    connector = ",".join(map(str, jars.present(jars.CONNECTOR)))
    with broker() as started, session(**{"spark.jars": connector, **CONF}) as spark, Progress() as progress:
        task = progress.add_task("records", total=1 + len(SIDES) * (size.rounds + 1))
        started.create_topic("full", CORES)
        total = size.rows * (WARM_UP + size.epochs + 6 * size.changes)
        started.produce("full", ((None, _record(number)) for number in range(total)))
        progress.advance(task)
        for number in range(size.rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                progress.update(task, description=f"full load, {side}")
                took, found = at_full_load(spark, started.servers, side, size)
                durations[side] += took
                delays += found
                progress.advance(task)
        for side in SIDES:
            progress.update(task, description=f"latency, {side}")
            waited[side] = latencies(spark, started, f"paced-{side}", side, size, rate)
            progress.advance(task)
    report(size, rate, durations, delays, waited, args)


def report(
    size: Size,
    rate: float,
    durations: Mapping[str, list[float]],
    delays: list[float],
    waited: Mapping[str, npt.NDArray[np.float64]],
    args: Any,
) -> None:
    """Print a table and the closing line; draw the latencies."""
    median = {side: statistics.median(durations[side]) for side in SIDES}
    per_s = {side: 1000 * size.rows / median[side] for side in SIDES}
    at = {side: np.percentile(waited[side], [50, 99]) for side in SIDES}
    table(
        f"Kafka to Parquet: epochs of {size.rows:,} records; latency at {rate:,.0f} records/s",
        ("side", "epoch, ms", "rows/s", "latency p50, ms", "p99, ms"),
        [
            (side, f"{median[side]:.0f}", f"{per_s[side]:,.0f}", f"{at[side][0]:.0f}", f"{at[side][1]:.0f}")
            for side in SIDES
        ],
    )
    print(f"{len(delays)} changes at full load: in effect after {statistics.median(delays):.0f} ms (median)")
    if args.plot:
        plot(args.plot, waited, rate)
    figures = {
        "kafka_ratio": round(per_s["midstream"] / per_s["plain"], 3),
        **{f"{side}_rows_per_s": round(per_s[side]) for side in SIDES},
        **{f"{side}_latency_p50_ms": round(float(at[side][0]), 1) for side in SIDES},
        **{f"{side}_latency_p99_ms": round(float(at[side][1]), 1) for side in SIDES},
        "change_delay_ms": round(statistics.median(delays), 1),
        "change_delay_max_ms": round(max(delays), 1),
        "epoch_ms": round(median["midstream"], 1),
    }
    closing_line("kafka", figures, quick=args.quick)


def plot(path: Path, waited: Mapping[str, npt.NDArray[np.float64]], rate: float) -> None:
    """The share of records that waited at most so long."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    share = np.linspace(0, 1, 200)
    for side, found in waited.items():
        axes.plot(np.quantile(found, share), 100 * share, label=side)
    axes.set_xlabel("latency of a record, ms (from due to committed)")
    axes.set_ylabel("% of records")
    axes.set_title(f"From a topic to committed files, {rate:,.0f} records/s")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
