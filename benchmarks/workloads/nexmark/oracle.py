"""What the queries must give, as plain Python over all events at once. Knows nothing of flows.

Results are in no order. Of q4 and q6, which give updates, these are the last ones; :func:`latest` makes a flow's
result comparable.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.workloads.nexmark import terms

__all__ = ["latest", "oracle"]

Row = dict[str, Any]
Rows = Sequence[Row]

_START = datetime(1970, 1, 1, tzinfo=UTC)


def oracle(query: str, persons: Rows, auctions: Rows, bids: Rows) -> list[Row]:
    """The result of a query, with all windows and auctions that the streams' last watermark closes."""
    answers: dict[str, Callable[[], Iterable[Row]]] = {
        "q0": lambda: bids,
        "q1": lambda: map(_in_euros, bids),
        "q2": lambda: (_only(bid, "auction", "price") for bid in bids if bid["auction"] % terms.AUCTION_MODULUS == 0),
        "q3": lambda: _suggestions(persons, auctions),
        "q4": lambda: _by_category(_sales(auctions, bids)),
        "q5": lambda: _hot_items(bids),
        "q6": lambda: _by_seller(_sales(auctions, bids)),
        "q7": lambda: _highest_bids(bids),
        "q8": lambda: _new_users(persons, auctions),
    }
    return list(answers[query]())


def latest(rows: Iterable[Row], *columns: str) -> list[Row]:
    """The last row for each combination of values of some columns.

    >>> latest([{"k": 1, "n": 1}, {"k": 2, "n": 1}, {"k": 1, "n": 2}], "k")
    [{'k': 1, 'n': 2}, {'k': 2, 'n': 1}]
    """
    return list({tuple(row[column] for column in columns): row for row in rows}.values())


def watermark(*streams: Rows) -> datetime:
    """Up to when all streams have come in, at their end."""
    newest: datetime = min(max(row["event_time"] for row in rows) for rows in streams)
    return newest - timedelta(seconds=terms.DELAY_S)


def _in_euros(bid: Row) -> Row:
    euros = bid["price"] * terms.EUROS_PER_DOLLAR
    return _only(bid, "auction", "bidder", "channel", "url") | {"euros": euros}


def _suggestions(persons: Rows, auctions: Rows) -> Iterator[Row]:
    for auction in auctions:
        for person in persons:
            apart = abs(auction["event_time"] - person["event_time"])
            if (
                auction["category"] == terms.CATEGORY
                and auction["seller"] == person["id"]
                and person["state"] in terms.STATES
                and apart <= timedelta(seconds=terms.RETENTION_S)
            ):
                yield _only(auction, "id", "seller", "event_time") | _described(person)


def _new_users(persons: Rows, auctions: Rows) -> Iterator[Row]:
    opened: dict[tuple[int, datetime], list[Row]] = defaultdict(list)
    for auction in auctions:
        opened[auction["seller"], _window(auction, terms.WINDOW_S)].append(auction)
    for person in persons:
        for auction in opened[person["id"], _window(person, terms.WINDOW_S)]:
            yield {
                "id": person["id"],
                **_described(person),
                "auction": auction["id"],
                **_only(auction, "reserve", "event_time"),
            }


def _sales(auctions: Rows, bids: Rows) -> list[Row]:
    """Auctions that have closed, each with its winning price, in the order of their ends."""
    closed = watermark(auctions, bids)
    bids_for: dict[int, list[Row]] = defaultdict(list)
    for bid in bids:
        bids_for[bid["auction"]].append(bid)
    sales = []
    for auction in auctions:
        opens, ends = auction["event_time"], auction["event_time"] + timedelta(microseconds=auction["lasts_us"])
        valid = [
            bid["price"]
            for bid in bids_for[auction["id"]]
            if opens <= bid["event_time"] < ends and bid["price"] >= auction["reserve"]
        ]
        if valid and ends <= closed:
            sales.append({**auction, "ends": ends, "price": max(valid)})
    return sorted(sales, key=lambda sale: (sale["ends"], sale["id"]))


def _by_category(sales: Rows) -> Iterator[Row]:
    for category, prices in _prices_by("category", sales).items():
        yield {"category": category, "sold": len(prices), "average": sum(prices) / len(prices)}


def _by_seller(sales: Rows) -> Iterator[Row]:
    for seller, prices in _prices_by("seller", sales).items():
        last = prices[-terms.LAST_SALES :]
        yield {"seller": seller, "average": sum(last) / len(last)}


def _prices_by(column: str, sales: Rows) -> dict[int, list[int]]:
    prices: dict[int, list[int]] = defaultdict(list)
    for sale in sales:
        prices[sale[column]].append(sale["price"])
    return prices


def _hot_items(bids: Rows) -> Iterator[Row]:
    size, step = timedelta(seconds=terms.HOT_WINDOW_S), timedelta(seconds=terms.HOT_EVERY_S)
    counts: dict[datetime, Counter[int]] = defaultdict(Counter)
    for bid in bids:
        start = _window(bid, terms.HOT_EVERY_S)
        while start > bid["event_time"] - size:
            counts[start][bid["auction"]] += 1
            start -= step
    closed = watermark(bids)
    for start, of_window in counts.items():
        most = max(of_window.values())
        for auction, count in of_window.items():
            if count == most and start + size <= closed:
                yield {"auction": auction, "window_start": start, "window_end": start + size, "bids": count}


def _highest_bids(bids: Rows) -> Iterator[Row]:
    size = timedelta(seconds=terms.WINDOW_S)
    windows: dict[datetime, list[Row]] = defaultdict(list)
    for bid in bids:
        windows[_window(bid, terms.WINDOW_S)].append(bid)
    for start, of_window in windows.items():
        highest = max(bid["price"] for bid in of_window)
        if start + size <= watermark(bids):
            for auction, bidder in {(b["auction"], b["bidder"]) for b in of_window if b["price"] == highest}:
                window = {"window_start": start, "window_end": start + size}
                yield {"auction": auction, "bidder": bidder, **window, "price": highest}


def _window(row: Row, seconds: int) -> datetime:
    """The start of the window of this length that a row is in."""
    length, elapsed = timedelta(seconds=seconds), row["event_time"] - _START
    number: int = elapsed // length
    return _START + number * length


def _described(person: Row) -> Row:
    return _only(person, "name", "city", "state") | {"joined": person["event_time"]}


def _only(row: Row, *columns: str) -> Row:
    return {column: row[column] for column in columns}
