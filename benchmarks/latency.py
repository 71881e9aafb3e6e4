"""How long a payment waits: the fraud flow at a steady rate, in midstream and in plain tuned PySpark, side by side.

The load is open loop: payments are due by a schedule, whether or not the job is ready, and a payment's latency is the
commit of its epoch minus the time it was due. Both sides read the same source, run the same functions on the same Arrow
batches, exchange twice, and write Parquet files: one sink (everything), or three (alerts, passed, mixtures).

The plain side is what a careful engineer writes: ``foreachBatch``, broadcast joins for the lookups, ``mapInArrow``, one
persisted frame that all sinks read, Arrow batches limited as midstream limits them, models loaded once per worker.

    python -m benchmarks.latency [--quick] [--plot FILE] [--rate 10000] [--seconds 40] [--rounds 2]
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
from py4j.clientserver import ClientServerConnection  # type: ignore[import-untyped]
from py4j.java_gateway import GatewayConnection  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.progress import track

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, session
from examples.fraud.models import Combine, FirstOpinion, Models, judge, train
from examples.fraud.payments import Bank
from midstream import FileSink, Flow
from midstream.data.schema import from_spark, to_ddl
from midstream.runtime.spark.batch_size import BatchLimit
from midstream.runtime.spark.generator_source import stream_of

SIDES = ("midstream", "plain")
SINKS = (1, 3)
BRANCHES = ("alert", "pass", "mixture")
WEIGHTS = {"p_customer": 0.4, "p_merchant": 0.6}
TYPICAL_ROW = 160
"""Bytes of a payment."""


@dataclass(frozen=True)
class Size:
    """Seconds of each run, of which the first ones do not count, and how often the sides take turns."""

    seconds: float
    warm_up: float
    rounds: int


FULL, QUICK = Size(40, 15, 2), Size(12, 6, 1)


@dataclass(frozen=True)
class Measured:
    """One run: durations of epochs, a latency for each row, and what an epoch asked of the JVM (starting and stopping
    the query, and reading its progress, are not in it)."""

    epochs_ms: list[float]
    latencies_ms: npt.NDArray[np.float64]
    jvm_calls: float
    compile_ms: float | None = None


class JvmCalls:
    """Counts the commands that Python sends to the JVM."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[JvmCalls]:
        """Inside, commands are counted."""
        classes = (GatewayConnection, ClientServerConnection)
        originals = [each.send_command for each in classes]

        def counting(original: Callable[..., Any]) -> Callable[..., Any]:
            def send(this: Any, *given: Any, **more: Any) -> Any:
                self.count += 1
                return original(this, *given, **more)

            return send

        for each, original in zip(classes, originals, strict=True):
            each.send_command = counting(original)
        try:
            yield self
        finally:
            for each, original in zip(classes, originals, strict=True):
                each.send_command = original


# ── midstream ─────────────────────────────────────────────────────────────────────────────────────────────────────


def fraud_flow(stream: DataFrame, models: Models, sinks: int, folder: Path) -> Flow:
    """The flow of the fraud example, on any stream, with one sink or three."""
    bank, flow = Bank(), Flow("fraud")
    judged = (
        flow.source("payments", stream)
        .key_by("by customer", "user")
        .lookup("customer", bank.customers(), on="user")
        .map_batches("FC", models.customer, adds="p_customer double")
        .key_by("by merchant", "merchant")
        .lookup("merchant", bank.merchants(), on="merchant")
        .map_batches("FM", FirstOpinion(models.merchant), adds="p_merchant double, fm int")
        .map_batches("MC", Combine(WEIGHTS), adds="p_fraud double, mc int")
    )
    if sinks == 1:
        judged.sink("all", FileSink(folder / "all"))
        return flow
    verdict = judged.route_batches("verdict", judge, branches=BRANCHES)
    for branch in BRANCHES:
        verdict[branch].sink(branch, FileSink(folder / branch))
    return flow


def run_midstream(spark: SparkSession, stream: DataFrame, models: Models, sinks: int, seconds: float) -> Measured:
    """Run the flow for some seconds; the caller's ``after`` cuts off the warm-up."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, calls = Path(name), JvmCalls()
        flow = fraud_flow(stream, models, sinks, folder)
        with calls.counted(), flow.start(spark, checkpoint=str(folder / "c"), partitions=CORES) as job:
            job.await_epoch(1)
            since = calls.count, job.metrics.epochs
            time.sleep(seconds)  # the load is open loop: this is how long it is on
            per_epoch = (calls.count - since[0]) / max(1, job.metrics.epochs - since[1])
            progress = list(job.progress)
            [query] = [query for query in spark.streams.active if job.id in str(query.name)]
            durations = {p["batchId"]: p["durationMs"]["triggerExecution"] for p in query.recentProgress}
        ends = {p.epoch: p.committed_at for p in progress}
        compile_ms = [phase.ms for p in progress for phase in p.phases if phase.name == "plan"]
        return measured(
            folder, ends, durations, per_epoch, "epoch", statistics.median(compile_ms) if compile_ms else None
        )


# ── plain PySpark ─────────────────────────────────────────────────────────────────────────────────────────────────


class Loaded:
    """A function of the flow as ``mapInArrow`` wants it, opened once in each worker process."""

    opened: dict[str, Any] = {}  # noqa: RUF012 (one for the process is the point)

    def __init__(self, name: str, *functions: Any) -> None:
        self.name, self.functions = name, functions

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run all functions on each batch."""
        functions = Loaded.opened.get(self.name)
        if functions is None:
            for function in self.functions:
                if hasattr(function, "open"):
                    function.open()
            functions = Loaded.opened[self.name] = self.functions
        for batch in batches:
            for function in functions:
                batch = function(batch)
            yield batch


def with_verdict(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The branch of each payment as a column."""
    return batch.append_column("verdict", judge(batch))


def run_plain(spark: SparkSession, stream: DataFrame, models: Models, sinks: int, seconds: float) -> Measured:
    """The same in ``foreachBatch``."""
    bank = Bank()
    customers = spark.createDataFrame(bank.customers().to_pandas()).cache()
    merchants = spark.createDataFrame(bank.merchants().to_pandas()).cache()
    first = Loaded("first", models.customer)
    functions: list[Any] = [FirstOpinion(models.merchant), Combine(WEIGHTS)]
    second = Loaded(f"second {sinks}", *functions, *([with_verdict] if sinks == 3 else []))
    joined = stream.join(customers, "user")
    after_first = f"{to_ddl_of(joined)}, p_customer double"
    after_second: list[str] = []
    ends: dict[int, float] = {}
    first_done = threading.Event()
    conf = {"spark.sql.adaptive.enabled": "false", **BatchLimit.of(TYPICAL_ROW).conf()}

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, calls = Path(name), JvmCalls()

        def on_batch(df: DataFrame, batch: int) -> None:
            for key, value in conf.items():
                df.sparkSession.conf.set(key, value)
            known = df.repartition(CORES, "user").join(F.broadcast(customers), "user")
            scored = known.mapInArrow(first, after_first)
            known = scored.repartition(CORES, "merchant").join(F.broadcast(merchants), "merchant")
            if not after_second:
                more = ", verdict string" if sinks == 3 else ""
                after_second.append(f"{to_ddl_of(known)}, p_merchant double, fm int, p_fraud double, mc int{more}")
            judged = known.mapInArrow(second, after_second[0])
            if sinks == 1:
                judged.write.mode("overwrite").parquet(str(folder / "all" / f"batch={batch}"))
            else:
                judged = judged.persist()
                for branch in BRANCHES:
                    rows = judged.filter(F.col("verdict") == branch).drop("verdict")
                    rows.write.mode("overwrite").parquet(str(folder / branch / f"batch={batch}"))
                judged.unpersist()
            ends[batch] = time.time()
            first_done.set()

        writer = stream.writeStream.option("checkpointLocation", str(folder / "c")).foreachBatch(on_batch)
        with calls.counted():
            query = writer.start()
            first_done.wait()
            since = calls.count, len(ends)
            time.sleep(seconds)  # the load is open loop: this is how long it is on
            per_epoch = (calls.count - since[0]) / max(1, len(ends) - since[1])
            done = dict(ends)
            durations = {p["batchId"]: p["durationMs"]["triggerExecution"] for p in query.recentProgress}
            query.stop()
            if query.exception() is not None:
                raise RuntimeError(str(query.exception()))
        for cached in (customers, merchants):
            cached.unpersist()
        return measured(folder, done, durations, per_epoch, "batch", None)


def to_ddl_of(df: DataFrame) -> str:
    """A DataFrame's columns as DDL."""
    return to_ddl(from_spark(df.schema))


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────


def measured(
    folder: Path,
    ends: dict[int, float],
    durations: dict[int, float],
    jvm_calls: float,
    column: str,
    compile_ms: float | None,
) -> Measured:
    """Latencies from what was written: each row's own due time against the end of its epoch."""
    due, epoch = [], []
    for sink in sorted(path for path in folder.iterdir() if path.name != "c"):
        rows = ds.dataset(sink, partitioning="hive", exclude_invalid_files=True)
        found = rows.to_table(columns=["event_time", column]) if rows.files else None
        if found is not None and found.num_rows:
            due.append(found["event_time"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy() / 1e6)
            epoch.append(found[column].to_numpy())
    dues, epochs = np.concatenate(due), np.concatenate(epoch)
    known = np.isin(epochs, list(ends))
    finished = np.array([ends.get(int(each), 0.0) for each in epochs[known]])
    order = sorted(set(durations) & set(ends))
    latencies = 1000 * (finished - dues[known])
    stamped = np.stack([dues[known], latencies])
    return Measured([durations[each] for each in order], stamped, jvm_calls, compile_ms)


def settled(run: Measured, warm_up: float) -> tuple[list[float], npt.NDArray[np.float64]]:
    """Epochs and latencies after the warm-up."""
    dues, latencies = run.latencies_ms
    elapsed, kept = 0.0, []
    for ms in run.epochs_ms:
        elapsed += ms / 1000
        if elapsed > warm_up:
            kept.append(ms)
    return kept or run.epochs_ms[-3:], latencies[dues > dues.min() + warm_up]


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rate", type=float, default=10_000, help="payments per second")
    parser.add_argument("--seconds", type=float, help="of each run, of which the first two in five do not count")
    parser.add_argument("--rounds", type=int, help="how often the sides take turns")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.seconds:
        size = replace(size, seconds=options.seconds, warm_up=options.seconds * 0.4)
    size = replace(size, rounds=options.rounds or size.rounds)
    models = train()
    epochs: dict[tuple[str, int], list[float]] = {}
    latencies: dict[tuple[str, int], list[npt.NDArray[np.float64]]] = {}
    calls: dict[tuple[str, int], list[float]] = {}
    compile_ms: list[float] = []
    runners = {"midstream": run_midstream, "plain": run_plain}
    cases = [(side, sinks) for _ in range(size.rounds) for sinks in SINKS for side in SIDES]
    with session() as spark:
        for side, sinks in track(cases, description="runs"):
            stream = stream_of(spark, Bank().payments(options.rate))
            run = runners[side](spark, stream, models, sinks, size.seconds)
            kept, waited = settled(run, size.warm_up)
            epochs.setdefault((side, sinks), []).extend(kept)
            latencies.setdefault((side, sinks), []).append(waited)
            calls.setdefault((side, sinks), []).append(run.jvm_calls)
            compile_ms += [] if run.compile_ms is None else [run.compile_ms]
    report(options, epochs, {key: np.concatenate(found) for key, found in latencies.items()}, calls, compile_ms)


def report(
    options: Any,
    epochs: dict[tuple[str, int], list[float]],
    latencies: dict[tuple[str, int], npt.NDArray[np.float64]],
    calls: dict[tuple[str, int], list[float]],
    compile_ms: list[float],
) -> None:
    """Table, plot and the closing line."""
    epoch = {key: statistics.median(found) for key, found in epochs.items()}
    rows = []
    for key in epoch:
        p50, p99 = np.percentile(latencies[key], [50, 99])
        rows.append(
            [
                f"{key[0]}, {key[1]} sink{'s' if key[1] > 1 else ''}",
                f"{epoch[key]:,.0f}",
                f"{p50:,.0f}",
                f"{p99:,.0f}",
                f"{statistics.median(calls[key]):,.0f}",
                f"{len(epochs[key])}",
            ]
        )
    title = f"The fraud flow at {options.rate:,.0f} payments/s"
    table(title, ["", "epoch ms", "latency p50 ms", "p99 ms", "JVM calls per epoch", "epochs"], rows)
    three = {side: np.percentile(latencies[side, 3], [50, 99]) for side in SIDES}
    figures = {
        "rate": options.rate,
        "epoch_ms": round(epoch["midstream", 3], 1),
        "plain_epoch_ms": round(epoch["plain", 3], 1),
        "epoch_ratio": round(epoch["midstream", 3] / epoch["plain", 3], 3),
        "one_sink_epoch_ms": round(epoch["midstream", 1], 1),
        "one_sink_ratio": round(epoch["midstream", 1] / epoch["plain", 1], 3),
        "three_over_one_sink": round(epoch["midstream", 3] / epoch["midstream", 1], 3),
        "plain_three_over_one_sink": round(epoch["plain", 3] / epoch["plain", 1], 3),
        "compile_ms": round(statistics.median(compile_ms), 1) if compile_ms else None,
        "jvm_calls": round(statistics.median(calls["midstream", 3]), 1),
        "plain_jvm_calls": round(statistics.median(calls["plain", 3]), 1),
        "latency_p50_ms": round(float(three["midstream"][0]), 1),
        "latency_p99_ms": round(float(three["midstream"][1]), 1),
        "plain_latency_p50_ms": round(float(three["plain"][0]), 1),
        "plain_latency_p99_ms": round(float(three["plain"][1]), 1),
    }
    if options.plot:
        plot(options.plot, latencies, title)
    closing_line("latency", figures, quick=options.quick)


def plot(path: Path, latencies: dict[tuple[str, int], npt.NDArray[np.float64]], title: str) -> None:
    """The share of payments that waited at most so long."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for (side, sinks), found in latencies.items():
        share = np.linspace(0, 1, 200)
        style = "-" if sinks == 3 else "--"
        label = f"{side}, {sinks} sink{'s' if sinks > 1 else ''}"
        axes.plot(np.quantile(found, share), 100 * share, style, label=label)
    axes.set_xlabel("latency of a payment, ms (from due to committed)")
    axes.set_ylabel("% of payments")
    axes.set_title(title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
