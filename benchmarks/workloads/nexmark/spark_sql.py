"""NEXMark's queries in plain Structured Streaming, as far as it can express them: the rival of our flows.

``SQL`` is what Catalyst runs alone; ``PYTHON`` calls the same batch functions as our flows, in ``mapInArrow``. q4, q6
and q9 are missing, because a streaming query cannot rank bids or close an auction at its own time; q19, for its ranks;
q15 and q16, for their distinct counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.workloads.nexmark import terms
from benchmarks.workloads.nexmark.generator import BID, Streams
from benchmarks.workloads.nexmark.more_queries import count_letter, minutes_of, side_input
from benchmarks.workloads.nexmark.queries import in_euros, is_selected

__all__ = ["PYTHON", "SQL", "UPDATES", "Query"]

Query = Callable[[SparkSession, Streams], DataFrame]
_DELAY = f"{terms.DELAY_S} seconds"
_TIMED = f"{BID}, event_time timestamp"


def _bids(streams: Streams) -> DataFrame:
    bids: DataFrame = streams.bids
    return bids


def _late(rows: DataFrame, time: str = "event_time") -> DataFrame:
    return rows.withWatermark(time, _DELAY)


def _people(streams: Streams) -> DataFrame:
    return _late(streams.persons.select("id", "name", "city", "state", F.col("event_time").alias("joined")), "joined")


def _near(one: str, other: str, seconds: int = terms.RETENTION_S) -> Any:
    within = F.expr(f"INTERVAL {seconds} SECONDS")
    return (F.col(one) >= F.col(other) - within) & (F.col(one) <= F.col(other) + within)


def _q2(spark: SparkSession, streams: Streams) -> DataFrame:
    return _bids(streams).where(f"auction % {terms.AUCTION_MODULUS} = 0").select("auction", "price")


def _q3(spark: SparkSession, streams: Streams) -> DataFrame:
    lots = streams.auctions.where(F.col("category") == terms.CATEGORY)
    lots = _late(lots.select(F.col("id").alias("auction"), "seller", "event_time"))
    people = _people(streams).where(F.col("state").isin(*terms.STATES))
    return lots.join(people, (F.col("seller") == F.col("id")) & _near("event_time", "joined"))


def _q5(spark: SparkSession, streams: Streams) -> DataFrame:
    hop = F.window("event_time", f"{terms.HOT_WINDOW_S} seconds", f"{terms.HOT_EVERY_S} seconds")
    counts = _late(_bids(streams)).groupBy(hop, "auction").count()
    return counts.groupBy("window").agg(F.max_by("auction", "count"), F.max("count"))


def _q7(spark: SparkSession, streams: Streams) -> DataFrame:
    tumble = F.window("event_time", f"{terms.WINDOW_S} seconds")
    highest = F.max_by(F.struct("auction", "bidder"), "price")
    return _late(_bids(streams)).groupBy(tumble).agg(highest, F.max("price"))


def _q8(spark: SparkSession, streams: Streams) -> DataFrame:
    opened = streams.auctions.select(F.col("id").alias("auction"), "seller", "reserve", "event_time")
    # A window is an event time of its own, and a query may have only one for each stream.
    same = [F.floor(F.unix_micros(time) / (1_000_000 * terms.WINDOW_S)) for time in ("joined", "event_time")]
    near = _near("event_time", "joined", terms.WINDOW_S)
    return _people(streams).join(_late(opened), (F.col("id") == F.col("seller")) & (same[0] == same[1]) & near)


def _q10(spark: SparkSession, streams: Streams) -> DataFrame:
    form = {"day": "yyyy-MM-dd", "minute": "HH:mm"}
    return _bids(streams).withColumns({name: F.date_format("event_time", each) for name, each in form.items()})


def _q11(spark: SparkSession, streams: Streams) -> DataFrame:
    session = F.session_window("event_time", f"{terms.SESSION_GAP_S} seconds")
    return _late(_bids(streams)).groupBy("bidder", session).count()


def _q13(spark: SparkSession, streams: Streams) -> DataFrame:
    side = spark.createDataFrame(side_input().to_pandas())
    bids = _bids(streams).withColumn("key", F.expr(f"auction % {terms.SIDE_ROWS}"))
    return bids.join(F.broadcast(side), "key").select("auction", "bidder", "price", "event_time", "value")


_EUROS = f"price * {terms.EUROS_PER_DOLLAR}D AS euros"
_PART = (
    "CASE WHEN hour(event_time) BETWEEN 8 AND 18 THEN 'day' "
    "WHEN hour(event_time) <= 6 OR hour(event_time) >= 20 THEN 'night' ELSE 'other' END AS part"
)
_RANGE = f"price > {terms.FROM_PRICE} AND price < {terms.TO_PRICE}"


def _q14(spark: SparkSession, streams: Streams) -> DataFrame:
    letters = f"length(url) - length(replace(url, '{terms.LETTER}', '')) AS letters"
    return _bids(streams).where(_RANGE).selectExpr("auction", "bidder", _EUROS, _PART, "event_time", letters)


def _q17(spark: SparkSession, streams: Streams) -> DataFrame:
    low, high = terms.LOW_PRICE, terms.HIGH_PRICE
    bids = _bids(streams).withColumn("day", F.expr("date_trunc('DAY', event_time)")).groupBy("auction", "day")
    return bids.agg(
        F.count("*"),
        F.expr(f"count_if(price < {low})"),
        F.expr(f"count_if(price >= {low} AND price < {high})"),
        F.expr(f"count_if(price >= {high})"),
        F.min("price"),
        F.max("price"),
        F.avg("price"),
        F.sum("price"),
    )


def _q18(spark: SparkSession, streams: Streams) -> DataFrame:
    last = F.max_by(F.struct("price", "channel", "url"), "event_time")
    return _bids(streams).groupBy("bidder", "auction").agg(last, F.max("event_time"))


def _q20(spark: SparkSession, streams: Streams) -> DataFrame:
    lots = streams.auctions.where(F.col("category") == terms.CATEGORY)
    names = ("id", "item", "seller", "category", "reserve")
    lots = _late(lots.select(*names, F.col("event_time").alias("opened")), "opened")
    return _late(_bids(streams)).join(lots, (F.col("auction") == F.col("id")) & _near("event_time", "opened"))


def _q21(spark: SparkSession, streams: Streams) -> DataFrame:
    known = " ".join(f"WHEN '{channel}' THEN '{number}'" for channel, number in terms.CHANNELS.items())
    number = f"CASE lower(channel) {known} ELSE split_part(url, '/', 5) END AS channel_id"
    return _bids(streams).selectExpr("auction", "bidder", "price", "channel", number)


def _q22(spark: SparkSession, streams: Streams) -> DataFrame:
    parts = [f"split_part(url, '/', {place}) AS {name}" for name, place in (("host", 3), ("kind", 4), ("item", 5))]
    return _bids(streams).selectExpr("auction", "bidder", "price", "channel", *parts)


SQL: dict[str, Query] = {
    "q0": lambda spark, streams: _bids(streams),
    "q1": lambda spark, streams: _bids(streams).selectExpr("auction", "bidder", _EUROS, "channel", "url"),
    "q2": _q2,
    "q3": _q3,
    "q5": _q5,
    "q7": _q7,
    "q8": _q8,
    "q10": _q10,
    "q11": _q11,
    "q13": _q13,
    "q14": _q14,
    "q17": _q17,
    "q18": _q18,
    "q20": _q20,
    "q21": _q21,
    "q22": _q22,
}
UPDATES = ("q17", "q18")
"""Queries without windows, so that their mode is ``update``."""


def _in_arrow(function: Callable[[pa.RecordBatch], pa.RecordBatch]) -> Callable[[Iterator[pa.RecordBatch]], Any]:
    return lambda batches: map(function, batches)


def _selected(bids: pa.RecordBatch) -> pa.RecordBatch:
    return bids.filter(is_selected(bids)).select(["auction", "price"])


PYTHON: dict[str, Query] = {
    "q0": lambda spark, streams: _bids(streams).mapInArrow(_in_arrow(lambda bids: bids), _TIMED),
    "q1": lambda spark, streams: _bids(streams).mapInArrow(
        _in_arrow(in_euros), BID.replace("price bigint", "euros double")
    ),
    "q2": lambda spark, streams: (
        _bids(streams).select("auction", "price").mapInArrow(_in_arrow(_selected), "auction bigint, price bigint")
    ),
    "q10": lambda spark, streams: _bids(streams).mapInArrow(
        _in_arrow(minutes_of), f"{_TIMED}, day string, minute string"
    ),
    "q14": lambda spark, streams: (
        _bids(streams)
        .where(_RANGE)
        .drop("channel")
        .mapInArrow(_in_arrow(count_letter), f"{_TIMED.replace('channel string, ', '')}, letters bigint")
        .selectExpr("auction", "bidder", _EUROS, _PART, "event_time", "letters")
    ),
}
