"""NEXMark's queries in Flink's SQL, for PyFlink; tables and functions are in ``benchmarks.rivals.nexmark_pyflink``.

``SQL`` is what the JVM runs alone; ``PYTHON`` calls functions in Flink's Python workers, on batches as ours.
Missing are q6, since Flink has no OVER on rows that may be retracted; q10, whose Parquet files need a jar that PyFlink
does not bring; and q13, whose table would have to be a file as well.
"""

from __future__ import annotations

from benchmarks.workloads.nexmark import terms

__all__ = ["PYTHON", "SQL"]

_WITHIN = f"INTERVAL '{terms.RETENTION_S}' SECOND"
_EVERY, _HOT_WINDOW = f"INTERVAL '{terms.HOT_EVERY_S}' SECOND", f"INTERVAL '{terms.HOT_WINDOW_S}' SECOND"
_WINDOW = f"INTERVAL '{terms.WINDOW_S}' SECOND"
_PART = (
    "CASE WHEN HOUR(event_time) BETWEEN 8 AND 18 THEN 'day' "
    "WHEN HOUR(event_time) <= 6 OR HOUR(event_time) >= 20 THEN 'night' ELSE 'other' END AS part"
)
_RANGE = f"price > {terms.FROM_PRICE} AND price < {terms.TO_PRICE}"
_CHANNELS = " ".join(f"WHEN '{channel}' THEN '{number}'" for channel, number in terms.CHANNELS.items())
_COUNTS = ", ".join(
    [
        "COUNT(*) AS bids, COUNT(DISTINCT bidder) AS bidders, COUNT(DISTINCT auction) AS auctions",
        *(
            f"COUNT(*) FILTER (WHERE {within}) AS {rank}, "
            f"COUNT(DISTINCT bidder) FILTER (WHERE {within}) AS {rank}_bidders, "
            f"COUNT(DISTINCT auction) FILTER (WHERE {within}) AS {rank}_auctions"
            for rank, within in {
                "low": f"price < {terms.LOW_PRICE}",
                "middle": f"price >= {terms.LOW_PRICE} AND price < {terms.HIGH_PRICE}",
                "high": f"price >= {terms.HIGH_PRICE}",
            }.items()
        ),
    ]
)
_DAY = "DATE_FORMAT(event_time, 'yyyy-MM-dd')"

SQL: dict[str, str] = {
    "q0": "SELECT auction, bidder, price, channel, url, event_us FROM bids",
    "q1": f"SELECT auction, bidder, price * CAST({terms.EUROS_PER_DOLLAR} AS DOUBLE) AS euros, channel, url FROM bids",
    "q2": f"SELECT auction, price FROM bids WHERE MOD(auction, {terms.AUCTION_MODULUS}) = 0",
    "q3": f"""
        SELECT a.id, a.seller, a.event_us, p.name, p.city, p.state, p.event_us AS joined FROM auctions a, persons p
        WHERE a.seller = p.id AND a.category = {terms.CATEGORY} AND p.state IN {terms.STATES}
          AND a.event_time BETWEEN p.event_time - {_WITHIN} AND p.event_time + {_WITHIN}
    """,
    "q4": """
        SELECT category, COUNT(*) AS sold, AVG(price) AS average FROM (
            SELECT a.id, a.category, MAX(b.price) AS price FROM auctions a, bids b
            WHERE b.auction = a.id AND b.event_us >= a.event_us AND b.event_us < a.event_us + a.lasts_us
              AND b.price >= a.reserve
            GROUP BY a.id, a.category
        ) GROUP BY category
    """,
    "q5": f"""
        SELECT auction, window_start, window_end, bids FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start, window_end ORDER BY bids DESC) AS place FROM (
                SELECT auction, window_start, window_end, COUNT(*) AS bids FROM TABLE(HOP(TABLE bids,
                    DESCRIPTOR(event_time), {_EVERY}, {_HOT_WINDOW}))
                GROUP BY auction, window_start, window_end
            )
        ) WHERE place = 1
    """,
    "q7": f"""
        SELECT auction, bidder, price, window_start, window_end FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start, window_end ORDER BY price DESC) AS place
            FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(event_time), {_WINDOW}))
        ) WHERE place = 1
    """,
    "q8": f"""
        SELECT p.id, p.name, p.city, p.state, a.id AS auction, a.reserve FROM (
            SELECT * FROM TABLE(TUMBLE(TABLE persons, DESCRIPTOR(event_time), {_WINDOW}))
        ) p JOIN (
            SELECT * FROM TABLE(TUMBLE(TABLE auctions, DESCRIPTOR(event_time), {_WINDOW}))
        ) a ON p.id = a.seller AND p.window_start = a.window_start AND p.window_end = a.window_end
    """,
    "q9": """
        SELECT id, seller, category, price, event_us + lasts_us AS expires FROM (
            SELECT a.*, b.price,
                ROW_NUMBER() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.event_us, b.bidder) AS place
            FROM auctions a, bids b
            WHERE b.auction = a.id AND b.event_us >= a.event_us AND b.event_us < a.event_us + a.lasts_us
              AND b.price >= a.reserve
        ) WHERE place = 1
    """,
    "q11": f"""
        SELECT bidder, window_start, window_end, COUNT(*) AS bids FROM TABLE(SESSION(TABLE bids PARTITION BY bidder,
            DESCRIPTOR(event_time), INTERVAL '{terms.SESSION_GAP_S}' SECOND))
        GROUP BY bidder, window_start, window_end
    """,
    "q14": f"""
        SELECT auction, bidder, price * CAST({terms.EUROS_PER_DOLLAR} AS DOUBLE) AS euros, {_PART}, event_us,
            CHAR_LENGTH(url) - CHAR_LENGTH(REPLACE(url, '{terms.LETTER}', '')) AS letters
        FROM bids WHERE {_RANGE}
    """,
    "q15": f"SELECT {_DAY} AS d, {_COUNTS} FROM bids GROUP BY {_DAY}",
    "q16": f"""
        SELECT channel, {_DAY} AS d, MAX(DATE_FORMAT(event_time, 'HH:mm')) AS latest, {_COUNTS}
        FROM bids GROUP BY channel, {_DAY}
    """,
    "q17": f"""
        SELECT auction, {_DAY} AS d, COUNT(*) AS bids, COUNT(*) FILTER (WHERE price < {terms.LOW_PRICE}) AS low,
            COUNT(*) FILTER (WHERE price >= {terms.LOW_PRICE} AND price < {terms.HIGH_PRICE}) AS middle,
            COUNT(*) FILTER (WHERE price >= {terms.HIGH_PRICE}) AS high,
            MIN(price) AS least, MAX(price) AS most, AVG(price) AS average, SUM(price) AS total
        FROM bids GROUP BY auction, {_DAY}
    """,
    "q18": """
        SELECT auction, bidder, price, channel, url, event_us FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY event_time DESC) AS place FROM bids
        ) WHERE place = 1
    """,
    "q19": f"""
        SELECT auction, place, bidder, price FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC) AS place FROM bids
        ) WHERE place <= {terms.TOP}
    """,
    "q20": f"""
        SELECT b.auction, b.bidder, b.price, b.channel, b.url, b.event_us, a.item, a.seller, a.category, a.reserve
        FROM bids b, auctions a WHERE b.auction = a.id AND a.category = {terms.CATEGORY}
          AND b.event_time BETWEEN a.event_time - {_WITHIN} AND a.event_time + {_WITHIN}
    """,
    "q21": f"""
        SELECT auction, bidder, price, channel,
            CASE LOWER(channel) {_CHANNELS} ELSE SPLIT_INDEX(url, '/', 4) END AS channel_id FROM bids
    """,
    "q22": """
        SELECT auction, bidder, price, channel, SPLIT_INDEX(url, '/', 2) AS host, SPLIT_INDEX(url, '/', 3) AS kind,
            SPLIT_INDEX(url, '/', 4) AS item FROM bids
    """,
}
PYTHON: dict[str, str] = {
    "q1": "SELECT auction, bidder, euros(price) AS euros, channel, url FROM bids",
    "q2": "SELECT auction, price FROM bids WHERE is_selected(auction)",
    "q14": f"""
        SELECT auction, bidder, price * CAST({terms.EUROS_PER_DOLLAR} AS DOUBLE) AS euros, {_PART}, event_us,
            letters(url) AS letters
        FROM bids WHERE {_RANGE}
    """,
}
