"""NEXMark's later queries as flows: all of q9 to q22 but q12.

q12 counts bids in windows of the clock at which they are worked on. Operators know only the time that events carry, and
a task that ran again would give other rows. What texts hold differs from the public benchmark, so q14, q21 and q22 look
for other things in them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.workloads.nexmark import terms
from benchmarks.workloads.nexmark.generator import Streams
from benchmarks.workloads.nexmark.queries import auctions_of, bids_of, sales_of
from midstream import Flow, State, Stream, agg, sessions

__all__ = [
    "MORE_QUERIES",
    "MORE_UPDATES",
    "PARTED_BY",
    "Distinct",
    "TopBids",
    "count_letter",
    "minutes_of",
    "url_parts",
]

Row = dict[str, Any]

PARTS = "host string, kind string, item string"
SHOWN = ("auction", "bidder", "price", "channel")
"""What q21 and q22 show of a bid."""
RANKED = {
    "low": f"CASE WHEN price < {terms.LOW_PRICE} THEN 1 END",
    "middle": f"CASE WHEN price >= {terms.LOW_PRICE} AND price < {terms.HIGH_PRICE} THEN 1 END",
    "high": f"CASE WHEN price >= {terms.HIGH_PRICE} THEN 1 END",
}


RANKED_IDS = {
    f"{rank}_{who}": condition.replace("THEN 1 END", f"THEN {column} END")
    for rank, condition in RANKED.items()
    for who, column in (("bidders", "bidder"), ("auctions", "auction"))
}


def q9(flow: Flow, streams: Streams) -> Stream:
    """Winning bids: of each auction that has closed, the highest bid."""
    return sales_of(flow, streams)


def q10(flow: Flow, streams: Streams) -> Stream:
    """Log to files: bids with the day and the minute by which a ``FileSink`` parts them (:data:`PARTED_BY`)."""
    return bids_of(flow, streams, timed=False).map_batches("minutes", minutes_of, adds="day string, minute string")


def q11(flow: Flow, streams: Streams) -> Stream:
    """User sessions: how many bids a bidder makes while no pause between two of them is too long."""
    bids = bids_of(flow, streams, "bidder").key_by("by_bidder", "bidder")
    return bids.aggregate("count", window=sessions(f"{terms.SESSION_GAP_S} seconds"), bids=agg.count())


def q13(flow: Flow, streams: Streams) -> Stream:
    """Bounded side input: bids with what a table says of their auction."""
    bids = bids_of(flow, streams, "auction", "bidder", "price", "event_time", timed=False).with_columns(
        "key", key=f"auction % {terms.SIDE_ROWS}"
    )
    found = bids.lookup("side", side_input(), on="key")
    return found.select("pick", "auction", "bidder", "price", "event_time", "value")


def q14(flow: Flow, streams: Streams) -> Stream:
    """Calculation: prices in another currency, the time of day, and a function of the user's."""
    kept = bids_of(flow, streams, "auction", "bidder", "price", "url", "event_time", timed=False).where(
        "price", f"price > {terms.FROM_PRICE} AND price < {terms.TO_PRICE}"
    )
    counted = kept.map_batches("count", count_letter, adds="letters bigint")
    return counted.select(
        "calculate",
        "auction",
        "bidder",
        f"price * {terms.EUROS_PER_DOLLAR}D AS euros",
        "CASE WHEN hour(event_time) BETWEEN 8 AND 18 THEN 'day' "
        "WHEN hour(event_time) <= 6 OR hour(event_time) >= 20 THEN 'night' ELSE 'other' END AS part",
        "event_time",
        "letters",
    )


def q15(flow: Flow, streams: Streams) -> Stream:
    """Bidding statistics: of each day, how many bids, bidders and auctions, in all and in each range of prices."""
    bids = bids_of(flow, streams, "auction", "bidder", "price")
    bids = bids.with_columns("ranges", day="date_trunc('DAY', event_time)", **RANKED, **RANKED_IDS)
    return bids.key_by("by_day", "day").aggregate("statistics", **_counts())


def q16(flow: Flow, streams: Streams) -> Stream:
    """Channel statistics: the same of each channel and day, with the last minute of the day that had a bid."""
    bids = bids_of(flow, streams, "auction", "bidder", "price", "channel")
    bids = bids.with_columns("ranges", date="date_trunc('DAY', event_time)", **RANKED, **RANKED_IDS)
    timed = bids.map_batches("minutes", minutes_of, adds="day string, minute string")
    by_channel = timed.key_by("by_channel", "channel", "date")
    return by_channel.aggregate("statistics", minute=agg.max("minute"), **_counts())


def q17(flow: Flow, streams: Streams) -> Stream:
    """Auction statistics: of each auction and day, how many bids in which range, and their prices."""
    bids = bids_of(flow, streams, "auction", "price")
    bids = bids.with_columns("ranges", day="date_trunc('DAY', event_time)", **RANKED)
    return bids.key_by("by_day", "auction", "day").aggregate(
        "statistics",
        bids=agg.count(),
        low=agg.count("low"),
        middle=agg.count("middle"),
        high=agg.count("high"),
        least=agg.min("price"),
        most=agg.max("price"),
        average=agg.mean("price"),
        total=agg.sum("price"),
    )


def q18(flow: Flow, streams: Streams) -> Stream:
    """Find the last bid that a person made for an auction."""
    bids = bids_of(flow, streams).key_by("by_pair", "bidder", "auction")
    return bids.aggregate(
        "last",
        price=agg.last_by("price", "event_time"),
        channel=agg.last_by("channel", "event_time"),
        url=agg.last_by("url", "event_time"),
        event_time=agg.max("event_time"),
    )


def q19(flow: Flow, streams: Streams) -> Stream:
    """The ten highest bids of each auction, by rank."""
    bids = bids_of(flow, streams, "auction", "bidder", "price").key_by("by_auction", "auction")
    return bids.process("top", TopBids(terms.TOP), returns="auction bigint, rank int, bidder bigint, price bigint")


def q20(flow: Flow, streams: Streams) -> Stream:
    """Expand bids of one category with their auctions."""
    lots = auctions_of(flow, streams, "id", "item", "seller", "category", "reserve")
    lots = lots.where("category", f"category = {terms.CATEGORY}")
    lots = lots.select("lots", "id", "item", "seller", "category", "reserve", "event_time AS opened")
    bids = bids_of(flow, streams).key_by("by_auction", "auction")
    within = f"{terms.RETENTION_S} seconds"
    return bids.join("expand", lots.key_by("by_id", "id"), within=within, right_time="opened")


def q21(flow: Flow, streams: Streams) -> Stream:
    """Add channel id: a number for the well-known channels; for others, what their address says."""
    bids = bids_of(flow, streams, *SHOWN, "url", timed=False).map_batches(
        "parts", url_parts, adds="host string, kind string, item string"
    )
    known = " ".join(f"WHEN '{channel}' THEN '{number}'" for channel, number in terms.CHANNELS.items())
    return bids.select("number", *SHOWN, f"CASE lower(channel) {known} ELSE item END AS channel_id")


def q22(flow: Flow, streams: Streams) -> Stream:
    """Get URL directories."""
    bids = bids_of(flow, streams, *SHOWN, "url", timed=False).map_batches(
        "parts", url_parts, adds="host string, kind string, item string"
    )
    return bids.select("pick", *SHOWN, "host", "kind", "item")


MORE_QUERIES = {query.__name__: query for query in (q9, q10, q11, q13, q14, q15, q16, q17, q18, q19, q20, q21, q22)}
MORE_UPDATES = {
    "q15": ("day",),
    "q16": ("channel", "date"),
    "q17": ("auction", "day"),
    "q18": ("bidder", "auction"),
    "q19": ("auction", "rank"),
}
"""Queries that give updates, and the columns that say of what."""
PARTED_BY = {"q10": ("day", "minute")}
"""Queries whose result is a folder of files, and the columns that part them."""


# ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def side_input() -> pa.Table:
    """What q13 looks up."""
    keys = list(range(terms.SIDE_ROWS))
    return pa.table({"key": pa.array(keys, pa.int64()), "value": [f"side {key}" for key in keys]})


def minutes_of(bids: pa.RecordBatch) -> pa.RecordBatch:
    """The day and the minute of each bid, as texts; each minute is written once."""
    minutes = pc.floor_temporal(bids["event_time"], unit="minute").dictionary_encode()
    for name, form in (("day", "%Y-%m-%d"), ("minute", "%H:%M")):
        bids = bids.append_column(name, pc.strftime(minutes.dictionary, form).take(minutes.indices))
    return bids


def count_letter(bids: pa.RecordBatch) -> pa.RecordBatch:
    """How often a letter is in the address."""
    return bids.append_column("letters", pc.count_substring(bids["url"], terms.LETTER).cast(pa.int64()))


def url_parts(bids: pa.RecordBatch) -> pa.RecordBatch:
    """The host and the directories of the address."""
    parts = pc.split_pattern(bids["url"], "/")
    for name, place in (("host", 2), ("kind", 3), ("item", 4)):
        bids = bids.append_column(name, pc.list_element(parts, place))
    return bids


class Distinct:
    """Counts distinct whole numbers exactly. A total is these numbers, in order, as bytes."""

    def zero(self) -> bytes:
        """No number."""
        return b""

    def add(self, total: bytes, rows: pa.RecordBatch) -> bytes:
        """Add the numbers of some rows."""
        return self.merge(total, np.unique(rows.column(0).drop_null().to_numpy()).tobytes())

    def merge(self, one: bytes, other: bytes) -> bytes:
        """The numbers of both."""
        if not (one and other):
            return one or other
        return np.union1d(np.frombuffer(one, np.int64), np.frombuffer(other, np.int64)).tobytes()

    def result(self, total: bytes) -> int:
        """How many there are."""
        return len(total) // np.dtype(np.int64).itemsize


class TopBids:
    """The highest bids of an auction; of equal ones, the earliest. Gives the ranks that a bid has changed."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, auction: int, bid: Row, state: State) -> list[Row]:
        """Take a bid."""
        best = state.get([])
        entry = (-bid["price"], bid["event_time"], bid["bidder"])
        place = bisect_left(best, entry)
        if place >= self._count:
            return []
        best = [*best[:place], entry, *best[place:]][: self._count]
        state.set(best)
        return [
            {"auction": auction, "rank": rank + 1, "bidder": bidder, "price": -price}
            for rank, (price, _, bidder) in enumerate(best)
            if rank >= place
        ]


def _counts() -> dict[str, Any]:
    """What q15 and q16 count."""
    found = {"bids": agg.count(), **{rank: agg.count(rank) for rank in RANKED}}
    numbers = {"bidders": "bidder", "auctions": "auction", **{name: name for name in RANKED_IDS}}
    distinct = {name: agg.custom(Distinct(), column, returns="bigint") for name, column in numbers.items()}
    return found | distinct
