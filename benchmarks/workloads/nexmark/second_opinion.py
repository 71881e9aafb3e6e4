"""What the queries must give by DuckDB: plain SQL over all events at once, in tables ``persons, auctions, bids``.

Where a query waits for a window or an auction to close, a variable has the watermark of its streams at their end. Of
queries that give updates, these are the last ones.
"""

from __future__ import annotations

from typing import Any

import duckdb
import pyarrow as pa

from benchmarks.workloads.nexmark import terms
from benchmarks.workloads.nexmark.more_queries import side_input

__all__ = ["SQL", "answer"]

_EUROS = f"{terms.EUROS_PER_DOLLAR}::double"
_PEOPLE = "name, city, state, p.event_time AS joined"

_SALES = """
    SELECT a.id AS auction, a.seller, a.category, b.price, ends AS expires
    FROM (SELECT *, event_time + to_microseconds(lasts_us) AS ends FROM auctions) a JOIN bids b ON b.auction = a.id
    WHERE b.event_time >= a.event_time AND b.event_time < ends AND b.price >= a.reserve
      AND ends <= getvariable('closed_both')
    QUALIFY row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.event_time, b.bidder) = 1
"""

_RANGES = {
    "low": f"price < {terms.LOW_PRICE}",
    "middle": f"price >= {terms.LOW_PRICE} AND price < {terms.HIGH_PRICE}",
    "high": f"price >= {terms.HIGH_PRICE}",
}
_COUNTS = ", ".join(
    [
        "count(*) AS bids, count(DISTINCT bidder) AS bidders, count(DISTINCT auction) AS auctions",
        *(f"count(*) FILTER ({within}) AS {rank}" for rank, within in _RANGES.items()),
        *(f"count(DISTINCT bidder) FILTER ({within}) AS {rank}_bidders" for rank, within in _RANGES.items()),
        *(f"count(DISTINCT auction) FILTER ({within}) AS {rank}_auctions" for rank, within in _RANGES.items()),
    ]
)

SQL: dict[str, str] = {
    "q0": "SELECT * FROM bids",
    "q1": f"SELECT auction, bidder, price * {_EUROS} AS euros, channel, url FROM bids",
    "q2": f"SELECT auction, price FROM bids WHERE auction % {terms.AUCTION_MODULUS} = 0",
    "q3": f"""
        SELECT a.id, a.seller, a.event_time, {_PEOPLE} FROM auctions a JOIN persons p ON a.seller = p.id
        WHERE a.category = {terms.CATEGORY} AND p.state IN {terms.STATES}
          AND abs(epoch_us(a.event_time) - epoch_us(p.event_time)) <= {terms.RETENTION_S * 1_000_000}
    """,
    "q4": f"SELECT category, count(*) AS sold, avg(price) AS average FROM ({_SALES}) GROUP BY category",
    "q5": f"""
        SELECT auction, window_start, window_start + to_seconds({terms.HOT_WINDOW_S}) AS window_end, bids FROM (
            SELECT auction, window_start, count(*) AS bids FROM (
                SELECT auction, unnest([
                    time_bucket(to_seconds({terms.HOT_EVERY_S}), event_time) - to_seconds({terms.HOT_EVERY_S} * back)
                    FOR back IN range({terms.HOT_WINDOW_S // terms.HOT_EVERY_S})
                ]) AS window_start FROM bids
            ) GROUP BY ALL
        ) WHERE window_end <= getvariable('closed_bids')
        QUALIFY rank() OVER (PARTITION BY window_start ORDER BY bids DESC) = 1
    """,
    "q6": f"""
        SELECT seller, avg(price) AS average FROM (
            SELECT * FROM ({_SALES})
            QUALIFY row_number() OVER (PARTITION BY seller ORDER BY expires DESC, auction DESC) <= {terms.LAST_SALES}
        ) GROUP BY seller
    """,
    "q7": f"""
        SELECT DISTINCT auction, bidder, window_start, window_start + to_seconds({terms.WINDOW_S}) AS window_end, price
        FROM (SELECT *, time_bucket(to_seconds({terms.WINDOW_S}), event_time) AS window_start FROM bids)
        WHERE window_end <= getvariable('closed_bids')
        QUALIFY rank() OVER (PARTITION BY window_start ORDER BY price DESC) = 1
    """,
    "q8": f"""
        SELECT p.id, {_PEOPLE}, a.id AS auction, reserve, a.event_time FROM persons p JOIN auctions a ON a.seller = p.id
        WHERE time_bucket(to_seconds({terms.WINDOW_S}), p.event_time)
            = time_bucket(to_seconds({terms.WINDOW_S}), a.event_time)
    """,
    "q9": _SALES,
    "q10": "SELECT *, strftime(event_time, '%Y-%m-%d') AS day, strftime(event_time, '%H:%M') AS minute FROM bids",
    "q11": f"""
        SELECT bidder, min(event_time) AS window_start,
            max(event_time) + to_seconds({terms.SESSION_GAP_S}) AS window_end, count(*) AS bids
        FROM (
            SELECT *, sum(begins) OVER (PARTITION BY bidder ORDER BY event_time) AS session FROM (
                SELECT *, coalesce(event_time - lag(event_time) OVER (PARTITION BY bidder ORDER BY event_time)
                    >= to_seconds({terms.SESSION_GAP_S}), true)::int AS begins FROM bids
            )
        ) GROUP BY bidder, session HAVING window_end <= getvariable('closed_bids')
    """,
    "q13": f"""
        SELECT auction, bidder, price, event_time, value FROM bids JOIN side ON auction % {terms.SIDE_ROWS} = key
    """,
    "q14": f"""
        SELECT auction, bidder, price * {_EUROS} AS euros,
            CASE WHEN hour(event_time) BETWEEN 8 AND 18 THEN 'day'
                 WHEN hour(event_time) <= 6 OR hour(event_time) >= 20 THEN 'night' ELSE 'other' END AS part,
            event_time, length(url) - length(replace(url, '{terms.LETTER}', '')) AS letters
        FROM bids WHERE price > {terms.FROM_PRICE} AND price < {terms.TO_PRICE}
    """,
    "q15": f"SELECT date_trunc('day', event_time)::timestamptz AS day, {_COUNTS} FROM bids GROUP BY day",
    "q16": f"""
        SELECT channel, date_trunc('day', event_time)::timestamptz AS date,
            max(strftime(event_time, '%H:%M')) AS minute, {_COUNTS}
        FROM bids GROUP BY channel, date
    """,
    "q17": f"""
        SELECT auction, date_trunc('day', event_time)::timestamptz AS day, count(*) AS bids,
            {", ".join(f"count(*) FILTER ({within}) AS {rank}" for rank, within in _RANGES.items())},
            min(price) AS least, max(price) AS most, avg(price) AS average, sum(price)::bigint AS total
        FROM bids GROUP BY ALL
    """,
    "q18": """
        SELECT bidder, auction, price, channel, url, event_time FROM bids
        QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY event_time DESC) = 1
    """,
    "q19": f"""
        SELECT auction, row_number() OVER best AS rank, bidder, price FROM bids
        WINDOW best AS (PARTITION BY auction ORDER BY price DESC, event_time, bidder)
        QUALIFY rank <= {terms.TOP}
    """,
    "q20": f"""
        SELECT b.*, a.item, a.seller, a.category, a.reserve, a.event_time AS opened
        FROM bids b JOIN auctions a ON b.auction = a.id WHERE a.category = {terms.CATEGORY}
          AND abs(epoch_us(a.event_time) - epoch_us(b.event_time)) <= {terms.RETENTION_S * 1_000_000}
    """,
    "q21": f"""
        SELECT auction, bidder, price, channel, coalesce(
            map {{{", ".join(f"'{name}': '{number}'" for name, number in terms.CHANNELS.items())}}}[lower(channel)],
            split_part(url, '/', 5)) AS channel_id
        FROM bids
    """,
    "q22": """
        SELECT auction, bidder, price, channel, split_part(url, '/', 3) AS host, split_part(url, '/', 4) AS kind,
            split_part(url, '/', 5) AS item
        FROM bids
    """,
}


def answer(query: str, persons: pa.Table, auctions: pa.Table, bids: pa.Table) -> list[dict[str, Any]]:
    """The result of a query over these events, in no order."""
    with duckdb.connect() as engine:
        engine.execute("SET TimeZone = 'UTC'")
        for name, table in {"persons": persons, "auctions": auctions, "bids": bids, "side": side_input()}.items():
            engine.register(name, table)
        for name, streams in {"bids": ("bids",), "both": ("auctions", "bids")}.items():
            newest = ", ".join(f"(SELECT max(event_time) FROM {stream})" for stream in streams)
            engine.execute(f"SET VARIABLE closed_{name} = least({newest}) - to_seconds({terms.DELAY_S})")
        rows: list[dict[str, Any]] = engine.execute(SQL[query]).to_arrow_table().to_pylist()
        return rows
