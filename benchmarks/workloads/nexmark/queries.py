"""NEXMark's queries q0–q8 as flows. Each adds to a flow what it makes of the streams of an auction house.

q4 and q6 give updates: of each category or seller, the newest row counts (:data:`UPDATES`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.workloads.nexmark import terms
from benchmarks.workloads.nexmark.generator import BID, Streams
from midstream import Flow, Stream, agg, sliding, tumbling

__all__ = [
    "QUERIES",
    "UPDATES",
    "Auctioneer",
    "Highest",
    "LastSales",
    "auctions_of",
    "bids_of",
    "people_of",
    "sales_of",
]

Row = dict[str, Any]


def q0(flow: Flow, streams: Streams) -> Stream:
    """Pass: all bids, as they are; what the rest costs."""
    return bids_of(flow, streams, timed=False).map_batches("pass", lambda bids: bids)


def q1(flow: Flow, streams: Streams) -> Stream:
    """Currency conversion: bids in euros."""
    bids = bids_of(flow, streams, timed=False)
    return bids.map_batches("convert", in_euros, returns=BID.replace("price bigint", "euros double"))


def q2(flow: Flow, streams: Streams) -> Stream:
    """Selection: bids for some of the auctions."""
    wanted = bids_of(flow, streams, "auction", "price", timed=False).filter_batches("select", is_selected)
    return wanted.map_batches("project", lambda bids: bids.select(["auction", "price"]), returns=OFFER)


def q3(flow: Flow, streams: Streams) -> Stream:
    """Local item suggestion: who sells goods of one category in some states?"""
    sellers = people_of(flow, streams).filter_batches("states", is_local)
    items = auctions_of(flow, streams, "id", "seller", "category").filter_batches("category", is_suggested)
    lots = items.map_batches("project", lambda rows: rows.select(["id", "seller", "event_time"]), returns=ITEM)
    within = f"{terms.RETENTION_S} seconds"
    return lots.key_by("by_seller", "seller").join(
        "suggest", sellers.key_by("by_id", "id"), within=within, right_time="joined"
    )


def q4(flow: Flow, streams: Streams) -> Stream:
    """Average price for a category: of the winning bids of all auctions that have closed."""
    sales = sales_of(flow, streams).key_by("by_category", "category")
    return sales.aggregate("average", sold=agg.count(), average=agg.mean("price"))


def q5(flow: Flow, streams: Streams) -> Stream:
    """Hot items: the auctions with the most bids in the last ten seconds, every two seconds."""
    window = sliding(f"{terms.HOT_WINDOW_S} seconds", every=f"{terms.HOT_EVERY_S} seconds")
    bids = bids_of(flow, streams, "auction").key_by("by_auction", "auction")
    counts = bids.aggregate("count", window=window, bids=agg.count()).filter_batches("leaders", has_most_bids)
    return counts.key_by("by_window", "window_end").process("hottest", Highest("bids"))


def q6(flow: Flow, streams: Streams) -> Stream:
    """Average selling price by seller: of the last ten auctions that have closed."""
    sales = sales_of(flow, streams).key_by("by_seller", "seller")
    return sales.process("average", LastSales(terms.LAST_SALES), returns="seller bigint, average double")


def q7(flow: Flow, streams: Streams) -> Stream:
    """Highest bid in each ten seconds, with who made it and for what."""
    # First the highest bids of each slice, where the work is shared; what is left for one key is little.
    bids = bids_of(flow, streams, "auction", "bidder", "price").filter_batches("leaders", is_high)
    window = tumbling(f"{terms.WINDOW_S} seconds")
    highest = bids.key_by("by_pair", "auction", "bidder").aggregate("of_pair", window=window, price=agg.max("price"))
    return highest.key_by("by_window", "window_end").process("highest", Highest("price"))


def q8(flow: Flow, streams: Streams) -> Stream:
    """Monitor new users: who opens an auction in the same ten seconds in which they joined?"""
    people = people_of(flow, streams).key_by("by_id", "id")
    opened = auctions_of(flow, streams, "id", "seller", "reserve").map_batches("project", as_opened, returns=OPENED)
    window = tumbling(f"{terms.WINDOW_S} seconds")
    return people.join("meet", opened.key_by("by_seller", "seller"), window=window, left_time="joined")


QUERIES: dict[str, Callable[[Flow, Streams], Stream]] = {
    query.__name__: query for query in (q0, q1, q2, q3, q4, q5, q6, q7, q8)
}
UPDATES = {"q4": ("category",), "q6": ("seller",)}
"""Queries that give updates, and the columns that say of what."""

# ── the streams, and their columns on the way ─────────────────────────────────────────────────────────────────────

OFFER = "auction bigint, price bigint"
ITEM = "id bigint, seller bigint, event_time timestamp"
PEOPLE = "id bigint, name string, city string, state string, joined timestamp"
OPENED = "auction bigint, seller bigint, reserve bigint, event_time timestamp"
LOT_OR_BID = (
    "auction bigint, event_time timestamp, expires timestamp, seller bigint, category int, reserve bigint, "
    "bidder bigint, price bigint"
)
SALE = "auction bigint, seller bigint, category int, price bigint, expires timestamp"

_DELAY = f"{terms.DELAY_S} seconds"


def bids_of(flow: Flow, streams: Streams, *columns: str, timed: bool = True) -> Stream:
    """The bids; of a DataFrame, if columns are named, only these, and if they are ``timed`` their time."""
    if not timed:
        return flow.source("bids", _picked(streams.bids, columns))
    return flow.source("bids", _picked(streams.bids, columns, "event_time"), event_time="event_time", delay=_DELAY)


def auctions_of(flow: Flow, streams: Streams, *columns: str) -> Stream:
    """The auctions; of a DataFrame, if columns are named, only these and the time."""
    picked = _picked(streams.auctions, columns, "event_time")
    return flow.source("auctions", picked, event_time="event_time", delay=_DELAY)


def people_of(flow: Flow, streams: Streams) -> Stream:
    """The people, as far as queries ask for them."""
    picked = _picked(streams.persons, ("id", "name", "city", "state"), "event_time")
    persons = flow.source("persons", picked, event_time="event_time", delay=_DELAY)
    return persons.map_batches("people", as_people, returns=PEOPLE)


def _picked(rows: Any, columns: tuple[str, ...], *more: str) -> Any:
    """What a user does who knows what a flow needs: Spark then reads no other columns, and passes none to Python."""
    return rows.select(*columns, *more) if columns and hasattr(rows, "select") else rows


def sales_of(flow: Flow, streams: Streams) -> Stream:
    """One row for each auction that has closed with a winner."""
    auctions = auctions_of(flow, streams, "id", "seller", "category", "reserve", "lasts_us")
    lots = auctions.map_batches("lots", as_lots, returns=LOT_OR_BID)
    bids = bids_of(flow, streams, "auction", "bidder", "price").map_batches("offers", as_offers, returns=LOT_OR_BID)
    return lots.union("both", bids).key_by("by_auction", "auction").process("close", Auctioneer(), returns=SALE)


def in_euros(bids: pa.RecordBatch) -> pa.RecordBatch:
    """Prices, still in hundredths."""
    euros = pc.multiply(bids["price"].cast(pa.float64()), terms.EUROS_PER_DOLLAR)
    return bids.set_column(bids.schema.get_field_index("price"), "euros", euros).drop_columns(["event_time"])


def is_selected(bids: pa.RecordBatch) -> pa.Array:
    """Whether each bid is for an auction that q2 looks at."""
    return pa.array(bids["auction"].to_numpy() % terms.AUCTION_MODULUS == 0)


def has_most_bids(counts: pa.RecordBatch) -> pa.Array:
    """Whether no other auction in the slice has more bids in the window."""
    return _leads(counts["bids"], counts["window_end"].view(pa.int64()).to_numpy())


def is_high(bids: pa.RecordBatch) -> pa.Array:
    """Whether no other bid in the slice is higher in the window."""
    times = bids["event_time"].view(pa.int64()).to_numpy()
    return _leads(bids["price"], times // (1_000_000 * terms.WINDOW_S))


def _leads(values: pa.Array, windows: npt.NDArray[np.int64]) -> pa.Array:
    """Whether each value is the highest of its window."""
    found, codes = np.unique(windows, return_inverse=True)
    highest = np.full(len(found), np.iinfo(np.int64).min)
    np.maximum.at(highest, codes, values.to_numpy())
    return pa.array(values.to_numpy() == highest[codes])


def is_local(people: pa.RecordBatch) -> pa.Array:
    """Whether each person lives in one of the states."""
    return pc.is_in(people["state"], value_set=pa.array(terms.STATES))


def is_suggested(auctions: pa.RecordBatch) -> pa.Array:
    """Whether each auction is of the category."""
    return pc.equal(auctions["category"], terms.CATEGORY)


def as_people(persons: pa.RecordBatch) -> pa.RecordBatch:
    """What queries ask of a person; their time has a name of its own, because joins refuse two of one name."""
    kept = persons.select(["id", "name", "city", "state", "event_time"])
    return kept.rename_columns(["id", "name", "city", "state", "joined"])


def as_opened(auctions: pa.RecordBatch) -> pa.RecordBatch:
    """What q8 asks of an auction."""
    kept = auctions.select(["id", "seller", "reserve", "event_time"])
    return kept.rename_columns(["auction", "seller", "reserve", "event_time"])


def as_lots(auctions: pa.RecordBatch) -> pa.RecordBatch:
    """Auctions in the columns that they share with bids."""
    n = auctions.num_rows
    columns = {
        "auction": auctions["id"],
        "event_time": auctions["event_time"],
        "expires": pc.add(auctions["event_time"], auctions["lasts_us"].cast(pa.duration("us"))),
        "seller": auctions["seller"],
        "category": auctions["category"],
        "reserve": auctions["reserve"],
        "bidder": pa.nulls(n, pa.int64()),
        "price": pa.nulls(n, pa.int64()),
    }
    return pa.RecordBatch.from_pydict(columns)


def as_offers(bids: pa.RecordBatch) -> pa.RecordBatch:
    """Bids in the columns that they share with auctions."""
    n = bids.num_rows
    columns = {
        "auction": bids["auction"],
        "event_time": bids["event_time"],
        "expires": pa.nulls(n, bids["event_time"].type),
        "seller": pa.nulls(n, pa.int64()),
        "category": pa.nulls(n, pa.int32()),
        "reserve": pa.nulls(n, pa.int64()),
        "bidder": bids["bidder"],
        "price": bids["price"],
    }
    return pa.RecordBatch.from_pydict(columns)


# ── functions with state ──────────────────────────────────────────────────────────────────────────────────────────


class Auctioneer:
    """Sells each auction, when the watermark passes its end, to the highest bid; of equal ones, to the earliest.

    A bid counts from the opening until before the end, and from the reserve price up. The two streams are not in step:
    a bid whose auction is not known waits until the watermark says that no earlier auction can come any more. If there
    is none by then, the auction has closed before the bid was made.
    """

    def __call__(self, auction: int, row: Row, state: Any) -> None:
        """Take an auction or a bid."""
        if row["expires"] is not None:
            waiting = state.list("waiting")
            state.set((row, min((bid for bid in waiting if _counts(bid, row)), key=_rank, default=None)))
            state.event_timer(row["expires"])
            waiting.clear()
        elif (known := state.get()) is None:
            state.list("waiting").append(row)
            state.event_timer(row["event_time"] + timedelta(microseconds=1))
        else:
            lot, best = known
            if _counts(row, lot) and (best is None or _rank(row) < _rank(best)):
                state.set((lot, row))

    def on_timer(self, auction: int, time: Any, state: Any) -> Row | None:
        """Close the auction; or drop bids that have waited in vain."""
        known = state.get()
        if known is None:
            waiting = state.list("waiting")
            hopeful = [bid for bid in waiting if bid["event_time"] >= time]
            waiting.clear()
            waiting.extend(hopeful)
            return None
        lot, best = known
        if time < lot["expires"]:  # set by a bid that had to wait for its auction
            return None
        state.delete()
        return best and {
            "auction": auction,
            "seller": lot["seller"],
            "category": lot["category"],
            "price": best["price"],
            "expires": lot["expires"],
        }


def _counts(bid: Row, lot: Row) -> bool:
    return bool(lot["event_time"] <= bid["event_time"] < lot["expires"] and bid["price"] >= lot["reserve"])


def _rank(bid: Row) -> Any:
    return -bid["price"], bid["event_time"], bid["bidder"]


class Highest:
    """The rows of a window that have the highest value in a column, once the window has closed."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __call__(self, window_end: Any, row: Row, state: Any) -> None:
        """Keep a row if none is above it."""
        best = state.get([])
        if not best:
            state.event_timer(window_end)
        if not best or row[self._column] > best[0][self._column]:
            state.set([row])
        elif row[self._column] == best[0][self._column]:
            state.set([*best, row])

    def on_timer(self, window_end: Any, time: Any, state: Any) -> list[Row]:
        """All rows of the window have come: they leave ``aggregate`` in the epoch that closes it."""
        best: list[Row] = state.get([])
        state.delete()
        return best


class LastSales:
    """The average price of a seller's last sales, after each sale."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, seller: int, sale: Row, state: Any) -> Row:
        """Take a sale. Sales of one epoch come in any order, so they are put in that of their auctions' ends."""
        sales = sorted([*state.get([]), (sale["expires"], sale["auction"], sale["price"])])[-self._count :]
        state.set(sales)
        return {"seller": seller, "average": sum(price for _, _, price in sales) / len(sales)}
