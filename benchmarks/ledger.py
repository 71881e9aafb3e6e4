"""The streaming ledger (SL) end to end on Spark: from the source to committed output and committed tables.

midstream's `transact` beside what people do today: each event takes a lock for each of its keys in a Redis server,
reads, decides, writes, and lets go (Debian's `redis-server`; started here on a socket of its own, and skipped with a
message where it is missing). Both are given the same events, by the same Spark source; Redis gets fewer of them, and
as many tasks as there are cores. At the end midstream's tables are compared with those of a plain Python program.

    python -m benchmarks.ledger [--quick] [--rows ROWS] [--plot FILE]
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.progress import Progress

from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, query_durations, session
from benchmarks.workloads.ledger import START, python_loop, rules
from midstream import Flow, NoopSink
from midstream.checkpoint.inspection import read_state
from midstream.txn import Batch

KEYS = 10_000
SKEW = 0.2
ABORTS = 0.01
TRANSFERS = 0.75
NAMES = ("account", "asset", "to_account", "to_asset")


@dataclass(frozen=True)
class Size:
    """Events of an epoch, how many epochs are counted, and how many events Redis gets."""

    rows: int
    warm_up: int
    epochs: int
    redis_rows: int
    redis_epochs: int


FULL = Size(rows=2_000_000, warm_up=3, epochs=6, redis_rows=10_000, redis_epochs=3)
QUICK = Size(rows=20_000, warm_up=1, epochs=2, redis_rows=500, redis_epochs=1)


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────


def events(numbers: DataFrame) -> DataFrame:
    """The ledger's events by number, made inside the JVM: the paper's defaults, one in ten out of order.

    What looks random are bits of two hashes of the number, so an event is the same whenever it is made.
    """
    n, keys, rest = F.col("value"), F.col("keys"), F.col("rest")
    hashed = numbers.select(n, F.xxhash64(n).alias("keys"), F.xxhash64(n, F.lit(1)).alias("rest"))
    is_transfer = _share(rest, 0) < TRANSFERS
    doomed = is_transfer & (_share(rest, 1) < ABORTS)
    shift = F.when(_share(rest, 3) < 0.1, F.floor(_share(rest, 3) * 2000)).otherwise(F.lit(0))
    return hashed.select(
        (n + shift).cast("bigint").alias("ts"),
        F.when(is_transfer, F.lit("transfer")).otherwise(F.lit("deposit")).alias("kind"),
        *(_key(keys, part).alias(name) for part, name in enumerate(NAMES)),
        F.when(doomed, F.lit(1e12)).otherwise(F.floor(_share(rest, 2) * 99) + 1.0).cast("double").alias("amount"),
    )


def _share(hashed: Column, part: int) -> Column:
    """A number from 0 to 1: sixteen bits of a hash."""
    return F.shiftrightunsigned(hashed, 16 * part).bitwiseAND(65535) / 65536.0


def _key(hashed: Column, part: int) -> Column:
    """Keys whose popularity falls with their rank to the power of the skew."""
    return F.floor(F.pow(_share(hashed, part), 1 / (1 - SKEW)) * KEYS).cast("bigint")


def stream(spark: SparkSession, rows: int) -> DataFrame:
    """As many events in every epoch."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", CORES)
    return events(source.load().select("value"))


def ledger(source: DataFrame) -> Flow:
    """The flow: events in, outcomes out."""
    flow = Flow("ledger")
    accounts = flow.table("accounts", key="bigint", value="double", default=START)
    assets = flow.table("assets", key="bigint", value="double", default=START)
    done = flow.source("events", source).transact("ledger", *rules(accounts, assets), order_by="ts", which="kind")
    done.sink("out", NoopSink())
    return flow


# ── midstream ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Ran:
    """How long epochs took, by which strategy, and how far the tables are from the oracle's."""

    durations_ms: list[float]
    why: str
    checked: int


def midstream(spark: SparkSession, size: Size, advance: Any) -> Ran:
    """Epochs as Spark times them; the tables must be what a plain program makes of the same events."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint:
        flow = ledger(stream(spark, size.rows))
        with flow.start(spark, checkpoint=checkpoint, partitions=CORES) as job:
            for epoch in range(size.warm_up + size.epochs):
                job.await_epoch(epoch + 1)
                advance()
            [query] = [query for query in spark.streams.active if job.id in str(query.name)]
            durations = [p["durationMs"]["triggerExecution"] for p in query.recentProgress][size.warm_up :]
            [stats] = [each for each in job.progress[-1].operators if each.operator == "ledger"]
        epochs = 1 + max(progress.epoch for progress in job.progress)
        checked = check(spark, checkpoint, size.rows, epochs)
    return Ran(durations[: size.epochs], stats.note, checked)


def check(spark: SparkSession, checkpoint: str, rows: int, epochs: int) -> int:
    """Compare the tables with those of a plain program; gives how many keys were compared."""
    money: dict[int, float] = {}
    goods: dict[int, float] = {}
    for epoch in range(epochs):
        numbers = spark.range(epoch * rows, (epoch + 1) * rows).select(F.col("id").alias("value"))
        batch = events(numbers).toArrow()
        kinds = pc.equal(batch["kind"], "transfer").to_numpy()
        # Of equal times any order will do: nobody runs out of money.
        columns = {name: batch[name].to_numpy() for name in ("ts", *NAMES, "amount")}
        python_loop(Batch.of(columns, order_by="ts", kinds=kinds), money, goods)
    compared = 0
    for name, wanted in (("accounts", money), ("assets", goods)):
        found = read_state(checkpoint, name)
        got = dict(zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True))
        if got != wanted:
            differing = {key for key in got.keys() | wanted.keys() if got.get(key) != wanted.get(key)}
            raise RuntimeError(f"table {name!r} is wrong at {len(differing)} keys, e.g. {sorted(differing)[:5]}")
        compared += len(got)
    return compared


# ── Redis ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def redis_server() -> Iterator[str | None]:
    """A Redis server of our own, without persistence; gives its socket, or None where there is no such program."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        socket = f"{folder}/redis.sock"
        options = ["--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no", "--dir", folder]
        server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        try:
            import redis
            from redis.backoff import ConstantBackoff
            from redis.retry import Retry

            patience = Retry(ConstantBackoff(0.05), 200)  # it takes a moment until there is a socket
            redis.Redis(unix_socket_path=socket, retry=patience, retry_on_error=[redis.ConnectionError]).ping()
            yield socket
        finally:
            server.terminate()
            server.wait()


LET_GO = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"
"""The usual way to release a lock: only if it is still one's own."""


def through_redis(socket: str, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One event after the other: lock its keys in their order, read, decide, write, unlock."""
    import os

    import redis

    client = redis.Redis(unix_socket_path=socket)
    let_go = client.register_script(LET_GO)
    me = str(os.getpid())
    for batch in rows:
        columns = {name: batch.column(name).to_pylist() for name in ("kind", *NAMES, "amount")}
        committed = []
        for kind, account, asset, to_account, to_asset, amount in zip(*columns.values(), strict=True):
            keys = [f"account:{account}", f"asset:{asset}"]
            if kind == "transfer":
                keys += [f"account:{to_account}", f"asset:{to_asset}"]
            locks = sorted({f"lock:{key}" for key in keys})
            for lock in locks:
                while not client.set(lock, me, nx=True, px=10_000):
                    pass
            have = [START if value is None else float(value) for value in client.mget(keys)]
            if kind == "deposit":
                client.mset(dict(zip(keys, [have[0] + amount, have[1] + amount], strict=True)))
                committed.append(True)
            elif have[0] >= amount and have[1] >= amount:
                # To oneself nothing changes; the second of equal keys would overwrite the first.
                new = dict(zip(keys, have, strict=True))
                new[keys[0]] -= amount
                new[keys[1]] -= amount
                new[keys[2]] += amount
                new[keys[3]] += amount
                client.mset(new)
                committed.append(True)
            else:
                committed.append(False)
            for lock in locks:
                let_go(keys=[lock], args=[me])
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, pa.array(committed)], names=[*batch.schema.names, "committed"]
        )


def by_redis(spark: SparkSession, size: Size, socket: str) -> list[float]:
    """Epochs of a plain PySpark stream whose state is in Redis."""
    source = stream(spark, size.redis_rows)
    schema = f"{', '.join(f'{f.name} {f.dataType.simpleString()}' for f in source.schema)}, committed boolean"
    done = source.mapInArrow(lambda rows: through_redis(socket, rows), schema)
    return query_durations(done, size.redis_epochs + 1)[1:]


# ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, help="events of an epoch")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    size = replace(size, rows=options.rows or size.rows)
    # Rows of a task go to Python in batches; the ledger's are narrow.
    with session(**{"spark.driver.memory": "4g"}) as spark, Progress() as progress:
        steps = progress.add_task("ledger", total=size.warm_up + size.epochs + 1)
        ran = midstream(spark, size, lambda: progress.advance(steps))
        rival: list[float] | None = None
        with redis_server() as socket:
            if socket is not None:
                rival = by_redis(spark, size, socket)
        progress.advance(steps)
    ours = 1000 * size.rows / statistics.median(ran.durations_ms)
    theirs = None if rival is None else 1000 * size.redis_rows / statistics.median(rival)
    figures: dict[str, Any] = {
        "rows_per_epoch": size.rows,
        "end_to_end_txn_per_s": round(ours),
        "epoch_ms": round(statistics.median(ran.durations_ms)),
        "keys_checked": ran.checked,
        "strategy": ran.why,
        "redis_txn_per_s": None if theirs is None else round(theirs),
        "ratio_over_redis": None if theirs is None else round(ours / theirs, 1),
    }
    shown = "no redis-server here: skipped (Debian: apt install redis-server)" if theirs is None else f"{theirs:,.0f}"
    table(
        f"streaming ledger, {size.rows:,} events an epoch, {KEYS:,} accounts and assets, {CORES} cores (medians)",
        ("", "transactions/s", "× Redis", "wanted"),
        [
            ("Redis, a lock for each key", shown, "1", ""),
            ("midstream", f"{ours:,.0f}", "" if theirs is None else f"{ours / theirs:,.0f}", "≥ 800,000; ≥ 100 ×"),
            ("strategy", ran.why, "", ""),
        ],
    )
    if options.plot:
        plot(options.plot, ours, theirs)
    closing_line("ledger", figures, quick=options.quick)


def plot(path: Path, ours: float, theirs: float | None) -> None:
    """One bar for each side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 2.2))
    found = {"midstream\ntransact": ours} | ({} if theirs is None else {"Redis, a lock\nfor each key": theirs})
    bars = axes.barh(list(found), list(found.values()), color=["#2255aa", "#999999"][: len(found)])
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.set(xscale="log", xlabel="transactions/s", title=f"streaming ledger on Spark, {CORES} cores")
    axes.margins(x=0.2)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
