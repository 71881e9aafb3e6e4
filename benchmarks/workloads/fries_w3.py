"""W3 of the Fries paper: the probe pipeline of TPC-DS query 71, what three channels sold at which time of the day.

::

    web     → J5 (date_dim) ─┐
    catalog → J6 (date_dim) ─┼→ U1 (union) → J8 (item) → J9 (time_dim) → sink
    store   → J7 (date_dim) ─┘

Everything of the query up to its GROUP BY. Conditions on a table are conditions on the build side of its join: J5, J6
and J7 hold the days of November 1999, J8 the items of manager 1, J9 the seconds of breakfast and dinner. All drop sales
without a match; all keys are primary keys, so that all joins are one-to-one. A row of the result has what the query's
sums are made of, ``i_brand_id``, ``i_brand``, ``t_hour``, ``t_minute`` and ``ext_price``, and the day of the sale, by
which a change of J5, J6 or J7 shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.workloads import tpcds
from midstream import Flow, GeneratorSource
from midstream.flow.schedules import Indexes, Schedule
from midstream.flow.sinks import SinkTarget

__all__ = ["Sales", "flow", "oracle", "revised", "sales", "tables"]

SALE = (
    "sale bigint, channel string, ext_price decimal(7,2), sold_date_sk bigint, sold_item_sk bigint, sold_time_sk bigint"
)
CHANNELS = {"web": "ws", "catalog": "cs", "store": "ss"}
"""The three channels, and how the columns of their tables begin."""
DAYS_OF = {"web": "J5", "catalog": "J6", "store": "J7"}
"""The join that finds the day of a channel's sales."""

Row = dict[str, Any]


class Sales(NamedTuple):
    """The three streams, of :func:`sales` or of a test."""

    web: Any
    catalog: Any
    store: Any


def sales(rate: Schedule | float, *, scale: float = tpcds.SMALL, **options: Any) -> Sales:
    """The streams of sales, numbered per channel: TPC-DS's, in random order, over and over. ``rate`` is that of each.

    >>> [batch] = sales(rate=1000).store.rows(0, 2, start_us=0)
    >>> batch.num_columns, batch["sale"].to_pylist(), batch["channel"].to_pylist()
    (7, [0, 1], ['store', 'store'])
    """
    return Sales(*(GeneratorSource(partial(_make, channel, scale), SALE, rate, **options) for channel in CHANNELS))


def tables(*, scale: float = tpcds.SMALL, selective: bool = True) -> dict[str, pa.Table]:
    """What each join looks up, by the join's name.

    :param selective: with the query's conditions, by which one sale in 6,000 goes through; without them nearly all do,
        which is what small tests want.
    """
    days, items, times = (tpcds.table(name, scale) for name in ("date_dim", "item", "time_dim"))
    if selective:
        days = days.filter((pc.field("d_moy") == 11) & (pc.field("d_year") == 1999))
        items = items.filter(pc.field("i_manager_id") == 1)
        times = times.filter(pc.field("t_meal_time").isin(["breakfast", "dinner"]))
    days = days.select(["d_date_sk", "d_date"])
    return {
        "J5": days,
        "J6": days,
        "J7": days,
        "J8": items.select(["i_item_sk", "i_brand_id", "i_brand"]),
        "J9": times.select(["t_time_sk", "t_hour", "t_minute"]),
    }


def revised(name: str, *, scale: float = tpcds.SMALL, selective: bool = True) -> pa.Table:
    """Another table for a join, to change to while the flow runs.

    It has the same keys, so that the same sales go through, but knows other things about them, none of which is in the
    original: a row of the result tells which of the two it has met.

    >>> revised("J9")["t_hour"][0]
    <pyarrow.Int64Scalar: 30>
    """
    table = tables(scale=scale, selective=selective)[name]
    match name:
        case "J8":
            return tpcds.replaced(table, i_brand=tpcds.marked(table["i_brand"], "new"))
        case "J9":
            return tpcds.replaced(table, t_hour=pc.add(table["t_hour"], 24))
        case _:
            return tpcds.replaced(table, d_date=tpcds.ten_years_later(table["d_date"]))


def flow(
    source: Sales, sink: SinkTarget, build_sides: Mapping[str, pa.Table] | None = None, *, exchanges: bool = False
) -> Flow:
    """``source`` gives :func:`sales`; ``build_sides`` the joins, if not :func:`tables`.

    :param exchanges: rows are exchanged before J8 and J9, by the keys of these, as in the paper's engine. A lookup does
        not need that: without it, all joins run in one stage.
    """
    known = build_sides or tables()
    flow = Flow("fries_w3")
    web, catalog, store = (
        flow.source(channel, stream).lookup(DAYS_OF[channel], known[DAYS_OF[channel]], on={"sold_date_sk": "d_date_sk"})
        for channel, stream in source._asdict().items()
    )
    rows = web.union("U1", catalog, store)
    rows = rows.key_by("to_J8", "sold_item_sk") if exchanges else rows
    rows = rows.lookup("J8", known["J8"], on={"sold_item_sk": "i_item_sk"})
    rows = rows.key_by("to_J9", "sold_time_sk") if exchanges else rows
    rows = rows.lookup("J9", known["J9"], on={"sold_time_sk": "t_time_sk"})
    rows.sink("probed", sink)
    return flow


def oracle(sales: Iterable[Row], build_sides: Mapping[str, pa.Table] | None = None) -> list[Row]:
    """What comes of these sales, of any channel, with these tables; a change divides the sales, and each part has its
    own tables."""
    known = {name: tpcds.by_key(table) for name, table in (build_sides or tables()).items()}
    probed = []
    for sale in sales:
        found = (
            known[DAYS_OF[sale["channel"]]].get((sale["sold_date_sk"],)),
            known["J8"].get((sale["sold_item_sk"],)),
            known["J9"].get((sale["sold_time_sk"],)),
        )
        if all(match is not None for match in found):
            probed.append({key: value for match in (sale, *found) for key, value in (match or {}).items()})
    return probed


def _make(channel: str, scale: float, indexes: Indexes, rng: np.random.Generator) -> Row:
    rows, prefix = tpcds.replayed(f"{channel}_sales", indexes, scale), CHANNELS[channel]
    return {
        "sale": indexes,
        "channel": pa.repeat(channel, len(indexes)),
        "ext_price": rows[f"{prefix}_ext_sales_price"],
        "sold_date_sk": rows[f"{prefix}_sold_date_sk"],
        "sold_item_sk": rows[f"{prefix}_item_sk"],
        "sold_time_sk": rows[f"{prefix}_sold_time_sk"],
    }
