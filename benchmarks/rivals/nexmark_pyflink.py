"""NEXMark's queries on PyFlink: tables over CSV files, and SQL that Flink's JVM runs; some with Python functions.

Run by PyFlink's own Python, in its own process; knows nothing of this project:
``PYTHON nexmark_pyflink.py '{"folder": …, "runs": [folder, …], "queries": {name: SQL}}'``. Each query reads all files
of each folder and drops its result; the line of JSON that it prints has the seconds of each run. Before that it reads
the first folder once, so that no run has a cold JVM.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pandas as pd
from pyflink.common import Configuration
from pyflink.datastream import StreamExecutionEnvironment
from pyflink.table import DataTypes, StreamTableEnvironment
from pyflink.table.udf import udf

PARALLELISM = 2
COLUMNS = {
    "persons": "id BIGINT, name STRING, email STRING, credit_card STRING, city STRING, state STRING, event_us BIGINT",
    "auctions": (
        "id BIGINT, item STRING, description STRING, initial_bid BIGINT, reserve BIGINT, lasts_us BIGINT, "
        "seller BIGINT, category INT, event_us BIGINT"
    ),
    "bids": "auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, event_us BIGINT",
}
EUROS_PER_DOLLAR, MODULUS, LETTER = 0.908, 123, "e"
"""As in ``benchmarks.workloads.nexmark.terms``."""


def euros(price: Any) -> Any:
    """A price in another currency."""
    return price * EUROS_PER_DOLLAR


def is_selected(auction: Any) -> Any:
    """Whether q2 looks at an auction."""
    return auction % MODULUS == 0


def letters(url: Any) -> Any:
    """How often a letter is in an address."""
    return pd.Series(url).str.count(LETTER)


def tables(folder: str) -> StreamTableEnvironment:
    """The tables over a folder, and the functions; Python functions get whole batches, as ours do."""
    settings = Configuration()
    settings.set_string("python.executable", sys.executable)
    settings.set_string("python.client.executable", sys.executable)
    settings.set_string("table.local-time-zone", "UTC")
    env = StreamExecutionEnvironment.get_execution_environment(settings)
    env.set_parallelism(PARALLELISM)
    made = StreamTableEnvironment.create(env)
    for name, columns in COLUMNS.items():
        made.execute_sql(
            f"CREATE TEMPORARY TABLE {name} ({columns}, event_time AS TO_TIMESTAMP_LTZ(event_us / 1000, 3), "
            "WATERMARK FOR event_time AS event_time - INTERVAL '1' SECOND) "
            f"WITH ('connector' = 'filesystem', 'path' = 'file://{folder}/{name}', 'format' = 'csv')"
        )
    kinds = {"euros": (euros, DataTypes.DOUBLE()), "is_selected": (is_selected, DataTypes.BOOLEAN())}
    kinds["letters"] = (letters, DataTypes.BIGINT())
    for name, (function, result) in kinds.items():
        made.create_temporary_function(name, udf(function, result_type=result, func_type="pandas"))
    return made


def seconds(folder: str, sql: str) -> float:
    """Run a query over a folder to its end."""
    made = tables(folder)
    result = made.sql_query(sql)
    schema = result.get_schema()
    columns = ", ".join(f"`{name}` {kind}" for name, kind in zip(schema.get_field_names(), _types(result), strict=True))
    made.execute_sql(f"CREATE TEMPORARY TABLE nowhere ({columns}) WITH ('connector' = 'blackhole')")
    began = time.perf_counter()
    result.execute_insert("nowhere").wait()
    return time.perf_counter() - began


def _types(result: Any) -> list[str]:
    """The types of a table's columns, as SQL writes them; an attribute of time is a plain time there."""
    kinds = result._j_table.getResolvedSchema().getColumnDataTypes()
    return [kind.getLogicalType().copy(True).asSerializableString().replace(" *ROWTIME*", "") for kind in kinds]


def main() -> None:
    """Run all queries."""
    given = json.loads(sys.argv[1])
    for query, sql in given["queries"].items():
        try:
            seconds(given["runs"][0], sql)
            taken = [seconds(folder, sql) for folder in given["runs"]]
            print(json.dumps({"query": query, "seconds": taken}), flush=True)
        except Exception as error:
            print(json.dumps({"query": query, "error": str(error)[:2000]}), flush=True)


if __name__ == "__main__":
    main()
