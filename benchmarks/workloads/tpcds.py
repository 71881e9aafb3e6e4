"""TPC-DS: what a shop sold by catalogue, on the web and in stores, and what that refers to; made by DuckDB.

The tables are small in columns (only what the workloads use) and as large in rows as the scale factor says. Making them
takes about a second at a factor of 0.01 and three at 0.1, once in each process that asks; nothing is kept on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import as_file, files
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.flow.schedules import Indexes

__all__ = ["SMALL", "by_key", "marked", "replaced", "replayed", "table", "ten_years_later"]

SMALL = 0.01
"""The scale factor of tests: 14,313 catalogue sales, 7,212 on the web, 28,810 in stores, of 180 items."""

_QUERIES = {
    "catalog_sales": """
        SELECT cs_order_number, cs_item_sk, cs_warehouse_sk, cs_sold_date_sk, cs_sold_time_sk, cs_sales_price,
               cs_ext_sales_price
        FROM catalog_sales""",
    "web_sales": """
        SELECT ws_order_number, ws_item_sk, ws_sold_date_sk, ws_sold_time_sk, ws_ext_sales_price FROM web_sales""",
    "store_sales": """
        SELECT ss_ticket_number, ss_item_sk, ss_sold_date_sk, ss_sold_time_sk, ss_ext_sales_price FROM store_sales""",
    "catalog_returns": "SELECT cr_order_number, cr_item_sk, cr_refunded_cash FROM catalog_returns",
    "warehouse": "SELECT w_warehouse_sk, w_state FROM warehouse",
    "item": "SELECT i_item_sk, i_item_id, i_current_price, i_brand_id, i_brand, i_manager_id FROM item",
    # Of the two centuries in the calendar, the years in which something was sold.
    "date_dim": "SELECT d_date_sk, d_date, d_moy, d_year FROM date_dim WHERE d_year BETWEEN 1998 AND 2003",
    "time_dim": "SELECT t_time_sk, t_hour, t_minute, t_meal_time FROM time_dim",
}
"""Of each table the first column is the primary key; of sales and returns, the first two are."""


def table(name: str, scale: float = SMALL) -> pa.Table:
    """A table, by its name in TPC-DS.

    >>> table("warehouse").to_pylist()
    [{'w_warehouse_sk': 1, 'w_state': 'TN'}]
    """
    return _tables(scale)[name]


def replayed(name: str, indexes: Indexes, scale: float = SMALL) -> pa.Table:
    """The rows of these events, in a stream that gives a table over and over, shuffled once.

    Sales are generated in the order of their dates; unshuffled, a condition on dates would let all of the stream
    through for a while and then nothing.

    >>> some = replayed("web_sales", np.arange(3))
    >>> some.equals(replayed("web_sales", np.arange(3) + 7212))
    True
    """
    rows = _shuffled(name, scale)
    return rows.take(pa.array(indexes % rows.num_rows))


def replaced(table: pa.Table, **columns: Any) -> pa.Table:
    """The table with other values in these columns, of the same types."""
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), values)
    return table


def marked(texts: pa.ChunkedArray, mark: str) -> pa.ChunkedArray:
    """The texts with a mark behind them; also where there was none."""
    return pc.binary_join_element_wise(texts, mark, ", ", null_handling="replace", null_replacement="none")


def ten_years_later(dates: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dates that the sales, which are of five years, do not have."""
    return pc.add(dates.cast(pa.int32()), pa.scalar(3653, pa.int32())).cast(pa.date32())


def by_key(table: pa.Table, keys: int = 1) -> Mapping[tuple[Any, ...], dict[str, Any]]:
    """What a table knows by its first columns, which are its key: for oracles, which must not use a lookup."""
    columns = [column.to_pylist() for column in table.columns]
    names = table.column_names[keys:]
    return {row[:keys]: dict(zip(names, row[keys:], strict=True)) for row in zip(*columns, strict=True)}


@cache
def _tables(scale: float) -> dict[str, pa.Table]:
    with duckdb.connect() as database:
        # Loaded from the package that brings it, so that no network is needed and nothing is installed anywhere.
        with as_file(files("duckdb_extension_tpcds")) as package:
            [extension] = package.rglob("tpcds.duckdb_extension")
            database.load_extension(str(extension))
        database.execute("CALL dsdgen(sf = $scale)", {"scale": scale})
        # Sorted by the key, so that the rows have one order in every process; sales need both columns of theirs.
        return {name: database.execute(f"{query} ORDER BY 1, 2").to_arrow_table() for name, query in _QUERIES.items()}


@cache
def _shuffled(name: str, scale: float) -> pa.Table:
    rows = table(name, scale)
    order = np.random.default_rng(0).permutation(rows.num_rows)
    return rows.take(pa.array(order)).combine_chunks()
