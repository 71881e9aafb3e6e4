"""Quotes and trades of a stock exchange, and the transactions that match them.

Each stream has a table of its own; a quote or a trade is one transaction, which puts itself into its own table and
looks into both for what happened within the last second of the exchange's clock. A trade that no quote can account for
is aborted, and does not count for those after it. It is the hash-based window join of the MorphStream paper (8.6.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream import Access, GeneratorSource, Table, transaction

COLUMNS = "kind string, board bigint, stock bigint, volume bigint, at timestamp"
"""``kind`` is quote or trade, ``at`` the exchange's clock; the source adds ``event_time``, when the event is due."""

TABLES: Mapping[str, Mapping[str, Any]] = {
    "quotes": {"key": "bigint", "value": "bigint", "default": 0},
    "trades": {"key": "bigint", "value": "bigint", "default": 0},
}
"""The volume of each stock's newest quote, and of its newest trade; windows see the older ones too."""

WINDOW_US = 1_000_000
OPENING_US = 1_767_576_600_000_000
"""5 January 2026, half past nine in Shanghai."""
EVENT_US = 50
"""Time from one event to the next by the exchange's clock: 20,000 events are in a window, however fast they come."""
BOARDS = 4
LOT = 100
NO_QUOTE, TOO_MUCH = "no quote in the window", "more traded than was quoted"

Row = dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """Stocks, some of them more popular than others; a stock belongs to one of the exchange's boards.

    >>> [batch] = SMALL.events(rate=1000).rows(0, 3, start_us=0)
    >>> [str(at.time()) for at in batch["at"].to_pylist()], batch["event_time"].cast("int64").to_pylist()
    (['01:30:00', '01:30:00.000050', '01:30:00.000100'], [0, 1000, 2000])
    """

    stocks: int = 2_000
    skew: float = 0.6
    """Exponent of Zipf's law: 0 makes all alike."""
    trades: float = 0.3

    def events(self, rate: float, **options: Any) -> GeneratorSource:
        """The stream of quotes and trades, in order; options as the source's."""
        return GeneratorSource(partial(_make, self), COLUMNS, rate, **options)


SMALL = Exchange(stocks=4_000)  # few events per stock and window, so that some trades find no quote
LARGE = Exchange()


def rules(quotes: Table, trades: Table, *, window: int = WINDOW_US) -> tuple[Any, Any]:
    """What a quote and a trade do to the tables."""

    @transaction
    def quote(t: Access, e: Any) -> Row:
        quoted = t.window(quotes, e.stock, window, "sum") + e.volume
        traded = t.window(trades, e.stock, window, "sum")
        t.write(quotes, e.stock, e.volume)
        matched = t.window(trades, e.stock, window, "count")
        return {"matched": matched, "quoted": quoted, "traded": traded, "rate": traded / quoted}

    @transaction
    def trade(t: Access, e: Any) -> Row:
        matched = t.window(quotes, e.stock, window, "count")
        quoted = t.window(quotes, e.stock, window, "sum")
        traded = t.window(trades, e.stock, window, "sum") + e.volume
        t.require(matched > 0, NO_QUOTE)
        t.require(traded <= quoted, TOO_MUCH)
        t.write(trades, e.stock, e.volume)
        return {"matched": matched, "quoted": quoted, "traded": traded, "rate": traded / quoted}

    return quote, trade


_KINDS = pa.array(["quote", "trade"])


def _make(exchange: Exchange, indexes: npt.NDArray[np.int64], rng: np.random.Generator) -> Row:
    n = len(indexes)
    popularity = _popularity(exchange.stocks, exchange.skew)
    stock = np.minimum(np.searchsorted(popularity, rng.random(n), side="right"), exchange.stocks - 1)
    is_trade = rng.random(n) < exchange.trades
    lots = np.where(is_trade, rng.integers(1, 5, n), rng.integers(1, 10, n))
    return {
        "kind": pc.take(_KINDS, pa.array(is_trade.astype(np.int8))),
        "board": stock % BOARDS,
        "stock": stock,
        "volume": lots * LOT,
        "at": pa.array(OPENING_US + indexes * EVENT_US).view(pa.timestamp("us", tz="UTC")),
    }


@cache
def _popularity(stocks: int, skew: float) -> npt.NDArray[np.float64]:
    weights = np.arange(1, stocks + 1) ** -skew
    return np.asarray(np.cumsum(weights) / weights.sum())
