"""The driver of a round: ``python -m tests.chaos.job FOLDER MASTER [LOCAL_STATE]`` runs the flow to its end.

Started again in the same folder, it continues. It has one of each kind of operator with state, behind one or two
exchanges.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from midstream import FileSink, Flow, Table, agg, transaction, tumbling
from midstream.flow.transactions import Transaction
from tests.chaos.events import ORDERS_PER_STEP, PAYMENTS_PER_STEP
from tests.ledger import Ledger

Row = dict[str, Any]

PARTITIONS = 2
MERGED_AT_ONCE = 2
"""State files are merged, and the old ones removed, much sooner than usual: a round has few epochs."""
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""These JVMs are too short-lived for optimising compilation to pay off."""
COLUMNS = "user string, n bigint, value bigint, time timestamp"
NUMBERS = "user string, window_end timestamp, n bigint, total bigint, of string"


class Habit:
    """Numbers the orders of a user, remembers the last three, and reports when there was none for eight seconds."""

    def __call__(self, key: str, row: Row, state: Any) -> Row:
        """Count an order, and put off the end of the user's patience."""
        # Here, because this runs in the worker. By name, because a function must not hold midstream's own modules.
        import_module("midstream.state.lineage").MERGED_AT_ONCE = MERGED_AT_ONCE  # type: ignore[attr-defined]
        count, due = state.get((0, None))
        if due is not None:
            state.cancel_event_timer(due)
        quiet = row["time"] + timedelta(seconds=8)
        due = quiet if due is None else max(due, quiet)
        state.event_timer(due)
        state.set((count + 1, due))
        recent = state.list("recent")
        recent.append(row["value"], keep=3)
        return {"user": key, "count": count + 1, "recent": list(recent), "quiet": False}

    def on_timer(self, key: str, time: Any, state: Any) -> Row:
        """Report the pause, and forget the orders but not their number."""
        count, _ = state.get()
        recent = state.list("recent")
        said = {"user": key, "count": count, "recent": list(recent), "quiet": True}
        recent.clear()
        state.set((count, None))
        return said


def renamed(row: Row) -> Row:
    return {"payer": row["user"], "paid_n": row["n"], "paid": row["value"], "paid_time": row["time"]}


def late_payment(row: Row) -> Row:
    return {"user": row["payer"], "n": row["paid_n"], "value": row["paid"], "time": row["paid_time"]}


class Says:
    """Adds the origin of a row."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, row: Row) -> Row:
        return {**row, "of": self.where}


class AsNumbers:
    """Puts totals of any kind into the same columns."""

    def __init__(self, of: str) -> None:
        self.of = of

    def __call__(self, row: Row) -> Row:
        return {name: row.get(name) for name in ("user", "window_end", "n", "total")} | {"of": self.of}


ITEMS, STOCK = 5, 3_000


def sale(stock: Table, owned: Table) -> Transaction:
    """An order takes from the stock of an item, which all users share, as long as there is enough of it."""

    @transaction
    def book(t: Any, e: Any) -> Any:
        left = t.read(stock, e.value % ITEMS) - e.value
        t.require(left >= 0, "sold out")
        t.write(stock, e.value % ITEMS, left)
        t.write(owned, e.user, t.read(owned, e.user) + e.value)
        return {"total": left}

    return book


def build(orders: Any, payments: Any, out: Path) -> Flow:
    """The flow over two streams of :class:`~tests.chaos.events.Event`. Few sinks: each costs time in every epoch."""
    flow = Flow("chaos")
    placed = flow.source("orders", orders, event_time="time", delay="3 seconds").key_by("by user", "user")
    paid = flow.source("payments", payments, event_time="time", delay="4 seconds").map(
        "rename", renamed, returns="payer string, paid_n bigint, paid bigint, paid_time timestamp"
    )
    paid_by = paid.key_by("by payer", "payer")

    habits = placed.process("habit", Habit(), returns="user string, count bigint, recent array<bigint>, quiet boolean")
    spent = placed.aggregate("spent", n=agg.count(), total=agg.sum("value"))
    windows = placed.aggregate("by window", window=tumbling("5 seconds"), n=agg.count(), total=agg.sum("value"))
    of_all = windows.key_by("by end", "window_end").aggregate("of all", n=agg.count(), total=agg.sum("total"))
    stock = flow.table("stock", key="bigint", value="bigint", default=STOCK)
    owned = flow.table("owned", key="string", value="bigint", default=0)
    booked = placed.transact("book", sale(stock, owned), order_by="n")
    pairs = placed.join("pay", paid_by, within="3 seconds", how="left", right_time="paid_time")

    numbers = [
        rows.map(f"numbers of {of}", AsNumbers(of), returns=NUMBERS)
        for of, rows in (("user", spent), ("window", windows), ("all", of_all), ("sale", booked))
    ]
    late = [
        rows.map(f"late for {where}", Says(where), adds="of string")
        for where, rows in (
            ("window", windows.late()),
            ("payment", pairs.late("left")),
            ("order", pairs.late("right").map("as order", late_payment, returns=COLUMNS)),
        )
    ]
    habits.sink("habits", FileSink(out / "habits"))
    numbers[0].union("all numbers", *numbers[1:]).sink("numbers", FileSink(out / "numbers"))
    pairs.sink("pairs", FileSink(out / "pairs"))
    late[0].union("all late", *late[1:]).sink("late", FileSink(out / "late"))
    ledger_of(out.parent).keep(placed, "value")
    return flow


def ledger_of(folder: Path) -> Ledger:
    """The transactional sink: its contents are compared with state after every kill that ends the driver."""
    return Ledger(folder / "ledger.db")


def streams(spark: Any, folder: Path) -> Iterator[Any]:
    """One step of the input in each epoch."""
    for name, files in (("orders", ORDERS_PER_STEP), ("payments", PAYMENTS_PER_STEP)):
        reader = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", files)
        yield reader.json(str(folder / name))


def session(master: str, conf: Mapping[str, bool | float | int | str | None] = MappingProxyType({})) -> Any:
    """A small Spark that tries failed tasks again."""
    from pyspark.sql import SparkSession

    settings: dict[str, bool | float | int | str | None] = {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.task.maxFailures": "8",
        **conf,
    }
    spark = SparkSession.builder.master(master).config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def main(place: str, master: str, local_state: str | None = None) -> None:
    """Run until all input is read."""
    folder, spark = Path(place), session(master)
    orders, payments = streams(spark, folder / "in")
    ledger_of(folder).create()
    flow = build(orders, payments, folder / "out")
    job = flow.start(
        spark,
        checkpoint=str(folder / "checkpoint"),
        trigger="available-now",
        partitions=PARTITIONS,
        local_state=local_state,
    )
    job.await_termination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
