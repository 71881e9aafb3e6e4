"""W2 of the Fries paper: the probe pipeline of TPC-DS query 40, catalogue sales and what has come back of them.

::

    sales → J1 (warehouse) → J2 (item) → J3 (date_dim) → J4 (catalog_returns) → sink

Everything of the query up to its GROUP BY. Conditions on a table are conditions on the build side of its join: J2 holds
the items that cost from 0.99 to 1.49, J3 the days from 10 February to 10 April 2000. J1, J2 and J3 drop sales without a
match, J4 keeps them with a null, as the query's outer join does. All keys are primary keys, so that all joins are
one-to-one. A row of the result has what the query's sums are made of: ``w_state``, ``i_item_id``, ``d_date``,
``cs_sales_price`` and ``cr_refunded_cash``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.workloads import tpcds
from midstream import Flow, GeneratorSource
from midstream.flow.schedules import Indexes, Schedule
from midstream.flow.sinks import SinkTarget

__all__ = ["flow", "oracle", "revised", "sales", "tables"]

PRICES = (Decimal("0.99"), Decimal("1.49"))
DATES = (date(2000, 2, 10), date(2000, 4, 10))

TAKEN = ("cs_order_number", "cs_item_sk", "cs_warehouse_sk", "cs_sold_date_sk", "cs_sales_price")
SALE = (
    "sale bigint, cs_order_number bigint, cs_item_sk bigint, cs_warehouse_sk bigint, cs_sold_date_sk bigint, "
    "cs_sales_price decimal(7,2)"
)

Row = dict[str, Any]


def sales(rate: Schedule | float, *, scale: float = tpcds.SMALL, **options: Any) -> GeneratorSource:
    """The stream of catalogue sales, numbered: TPC-DS's, in random order, over and over.

    >>> [batch] = sales(rate=1000).rows(0, 2, start_us=0)
    >>> batch.num_columns, batch["sale"].to_pylist(), batch["event_time"].cast("int64").to_pylist()
    (7, [0, 1], [0, 1000])
    """
    return GeneratorSource(partial(_make, scale), SALE, rate, **options)


def tables(*, scale: float = tpcds.SMALL, selective: bool = True) -> dict[str, pa.Table]:
    """What each join looks up, by the join's name.

    :param selective: with the query's conditions, by which one sale in 370 goes through; without them nearly all do,
        which is what small tests want.
    """
    items, days = tpcds.table("item", scale), tpcds.table("date_dim", scale)
    if selective:
        price, day = pc.field("i_current_price"), pc.field("d_date")
        items = items.filter((price >= PRICES[0]) & (price <= PRICES[1]))
        days = days.filter((day >= DATES[0]) & (day <= DATES[1]))
    return {
        "J1": tpcds.table("warehouse", scale),
        "J2": items.select(["i_item_sk", "i_item_id"]),
        "J3": days.select(["d_date_sk", "d_date"]),
        "J4": tpcds.table("catalog_returns", scale),
    }


def revised(name: str, *, scale: float = tpcds.SMALL, selective: bool = True) -> pa.Table:
    """Another table for a join, to change to while the flow runs.

    It has the same keys, so that the same sales go through, but knows other things about them, none of which is in the
    original: a row of the result tells which of the two it has met. (Of J4, only the rows of sales that came back do.)

    >>> revised("J1").to_pylist()
    [{'w_warehouse_sk': 1, 'w_state': 'TN, moved'}]
    """
    table = tables(scale=scale, selective=selective)[name]
    match name:
        case "J1":
            return tpcds.replaced(table, w_state=tpcds.marked(table["w_state"], "moved"))
        case "J2":
            return tpcds.replaced(table, i_item_id=tpcds.marked(table["i_item_id"], "new"))
        case "J3":
            return tpcds.replaced(table, d_date=tpcds.ten_years_later(table["d_date"]))
        case _:
            refunds = pa.repeat(pa.scalar(Decimal("-1.00"), pa.decimal128(7, 2)), table.num_rows)
            return tpcds.replaced(table, cr_refunded_cash=refunds)


def flow(
    source: Any, sink: SinkTarget, build_sides: Mapping[str, pa.Table] | None = None, *, exchanges: bool = False
) -> Flow:
    """``source`` gives :func:`sales`; ``build_sides`` the joins, if not :func:`tables`.

    :param exchanges: rows are exchanged between the joins, by the key of the next one, as in the paper's engine. A
        lookup does not need that: without it, all four joins run in one stage.
    """
    known = build_sides or tables()
    flow = Flow("fries_w2")
    rows = flow.source("sales", source).lookup("J1", known["J1"], on={"cs_warehouse_sk": "w_warehouse_sk"})
    rows = rows.key_by("to_J2", "cs_item_sk") if exchanges else rows
    rows = rows.lookup("J2", known["J2"], on={"cs_item_sk": "i_item_sk"})
    rows = rows.key_by("to_J3", "cs_sold_date_sk") if exchanges else rows
    rows = rows.lookup("J3", known["J3"], on={"cs_sold_date_sk": "d_date_sk"})
    rows = rows.key_by("to_J4", "cs_order_number") if exchanges else rows
    rows = rows.lookup(
        "J4", known["J4"], on={"cs_order_number": "cr_order_number", "cs_item_sk": "cr_item_sk"}, how="left"
    )
    rows.sink("probed", sink)
    return flow


def oracle(sales: Iterable[Row], build_sides: Mapping[str, pa.Table] | None = None) -> list[Row]:
    """What comes of these sales with these tables; a change divides the sales, and each part has its own tables."""
    known = build_sides or tables()
    warehouses, items, days = (tpcds.by_key(known[name]) for name in ("J1", "J2", "J3"))
    returns = tpcds.by_key(known["J4"], keys=2)
    probed = []
    for sale in sales:
        found = (
            warehouses.get((sale["cs_warehouse_sk"],)),
            items.get((sale["cs_item_sk"],)),
            days.get((sale["cs_sold_date_sk"],)),
        )
        if all(match is not None for match in found):
            refund = returns.get((sale["cs_order_number"], sale["cs_item_sk"]), {"cr_refunded_cash": None})
            probed.append({key: value for match in (sale, *found, refund) for key, value in (match or {}).items()})
    return probed


def _make(scale: float, indexes: Indexes, rng: np.random.Generator) -> Row:
    rows = tpcds.replayed("catalog_sales", indexes, scale)
    return {"sale": indexes} | {name: rows[name] for name in TAKEN}
