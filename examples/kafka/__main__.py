"""Orders come from one topic of Kafka and totals go to another, on a real broker that this program starts.

make kafka; python -m examples.kafka

While orders come in, the job is changed twice. The second change is bad: its rows are in the topic before another sink
refuses them, and it is rolled back. A reader that takes only the runs that count finds nothing of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from midstream import Flow, KafkaSink, Update, local_session, runs_that_count

from . import jars
from .broker import Broker, broker

USERS = ("ann", "bob", "cat", "dan")
ORDERS = 3_000
PATIENCE_S = 100.0


def parse(row: dict[str, Any]) -> dict[str, Any]:
    """An order, in cents."""
    order = json.loads(row["value"])
    return {"user": order["user"], "number": order["number"], "cents": order["cents"]}


def with_discount(row: dict[str, Any]) -> dict[str, Any]:
    """The same, 10% off: the first change."""
    order = parse(row)
    return {**order, "cents": order["cents"] * 9 // 10}


def broken(row: dict[str, Any]) -> dict[str, Any]:
    """The second change, with a wrong sign."""
    order = parse(row)
    return {**order, "cents": -order["cents"]}


def refuse_negative(rows: Any, epoch: int) -> None:
    """A sink that checks what it gets."""
    if rows.filter("cents < 0").count():
        raise ValueError("an order has a negative amount")


def build(records: Any, servers: str) -> Flow:
    """Orders from a stream of records go to the topic ``paid``."""
    flow = Flow("orders")
    orders = flow.source("orders", records, event_time="timestamp").map(
        "parse", parse, returns="user string, number bigint, cents bigint"
    )
    orders.sink("paid", KafkaSink(servers, "paid", key="user"))
    orders.sink("checked", refuse_negative)
    return flow


def orders(first: int, count: int) -> Iterator[tuple[bytes, bytes]]:
    """Some orders, as key and value of records."""
    for number in range(first, first + count):
        user = USERS[number % len(USERS)]
        yield user.encode(), json.dumps({"user": user, "number": number, "cents": 1000 + number % 500}).encode()


def feed(started: Broker, until: threading.Event) -> None:
    """Write orders, portion by portion, until there are enough and no reader waits for more."""
    written = 0
    while written < ORDERS or not until.is_set():
        started.produce("orders", orders(written, 100))
        written += 100


def that_count(started: Broker) -> list[dict[str, Any]]:
    """The rows that count, each once."""
    counts = runs_that_count(record.value or b"" for record in started.read("paid.epochs"))
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in started.read("paid"):
        job, sink, epoch, run, position = (
            record.headers[f"midstream-{name}"].decode() for name in ("job", "sink", "epoch", "run", "position")
        )
        if counts.get((job, sink, int(epoch))) == run:
            rows[job, sink, epoch, position] = json.loads(record.value or b"")
    return list(rows.values())


def main() -> None:
    """Run it, and say what a reader finds."""
    if not all(map(jars.present, (jars.BROKER, jars.CONNECTOR))):
        sys.exit(f"The jars of Kafka are missing; {jars.COMMAND} fetches them.")
    connector = ",".join(map(str, jars.present(jars.CONNECTOR)))
    with broker() as started:
        for topic, partitions in (("orders", 2), ("paid", 2), ("paid.epochs", 1)):
            started.create_topic(topic, partitions)
        spark, changed = local_session("local[2]", {"spark.jars": connector}), threading.Event()
        reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", started.servers)
        records = reader.option("subscribe", "orders").option("startingOffsets", "earliest").load()
        feeding = threading.Thread(target=feed, args=(started, changed))
        feeding.start()
        try:
            checkpoint = tempfile.mkdtemp(prefix="midstream-orders-")
            with build(records, started.servers).start(spark, checkpoint=checkpoint) as job:
                job.await_epoch(2, PATIENCE_S)
                for name, function in (("10% off", with_discount), ("a wrong sign", broken)):
                    change = job.update(Update("parse", function), note=name, preflight=False)
                    print(f"{name}: {change.wait(PATIENCE_S)}")
                changed.set()
                feeding.join()
                job.await_epoch(job.metrics.epochs + 1, PATIENCE_S)
        finally:
            changed.set()
            feeding.join()
            spark.stop()
        rows, written = that_count(started), started.read("paid")
    negative = sum(json.loads(record.value or b"")["cents"] < 0 for record in written)
    print(f"The topic has {len(written):,} records, {negative:,} of them negative.")
    numbers = sorted(row["number"] for row in rows)
    print(f"{len(rows):,} count; {sum(row['cents'] < 0 for row in rows)} of these are negative.")
    print("Each order is there once." if numbers == list(range(len(numbers))) else "Orders are missing or doubled!")


if __name__ == "__main__":
    main()
