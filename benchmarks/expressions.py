"""A slice of rows through a filter and five columns: expressions of midstream, DuckDB's SQL and Polars' expressions.

All take and give Arrow record batches, with one thread. DuckDB and Polars are left out where they are not installed.

    python -m benchmarks.expressions [--quick]
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from benchmarks.report import arguments, closing_line, table
from midstream.expressions.compiler import column_of, condition_of

SIZES = (50, 500, 5_000, 50_000)
WHERE = "eur > 30"
COLUMNS = {
    "usr": "usr",
    "total": "eur * qty",
    "upper": "upper(usr)",
    "size": "CASE WHEN qty > 50 THEN 'big' ELSE 'small' END",
    "due": "due",
}


def rows(count: int) -> pa.RecordBatch:
    """Sales; a thousand users."""
    rng = np.random.default_rng(0)
    return pa.record_batch(
        {
            "usr": pa.array([f"user{number}" for number in (np.arange(count) % 997).tolist()]),
            "eur": pa.array(rng.normal(50, 20, count)),
            "qty": pa.array(rng.integers(0, 100, count).astype(np.int32)),
            "due": pa.array(np.arange(count) * 1_000_000).cast(pa.timestamp("us", "UTC")),
        }
    )


def ours(schema: pa.Schema) -> Callable[[pa.RecordBatch], object]:
    """What `where` and `select` do in a task."""
    condition = condition_of(WHERE, schema, "where")
    columns = [column_of(text, schema, name) for name, text in COLUMNS.items()]

    def run(batch: pa.RecordBatch) -> object:
        kept = batch.filter(condition(batch))
        return pa.RecordBatch.from_arrays([column(kept) for column in columns], names=list(COLUMNS))

    return run


def duckdb_sql() -> Callable[[pa.RecordBatch], object]:
    """One query on a registered batch."""
    import duckdb

    connection = duckdb.connect(":memory:", config={"threads": 1})
    query = f"SELECT {', '.join(f'{text} AS {name}' for name, text in COLUMNS.items())} FROM batch WHERE {WHERE}"

    def run(batch: pa.RecordBatch) -> object:
        connection.register("batch", batch)
        return connection.sql(query).to_arrow_table()

    return run


def polars_sql() -> Callable[[pa.RecordBatch], object]:
    """Expressions that Polars makes of the same texts."""
    os.environ["POLARS_MAX_THREADS"] = "1"
    polars = importlib.import_module("polars")
    condition = polars.sql_expr(WHERE)
    columns = [polars.sql_expr(f"{text} AS {name}") for name, text in COLUMNS.items()]
    return lambda batch: polars.from_arrow(batch).filter(condition).select(columns).to_arrow()


def engines() -> Iterator[tuple[str, Callable[[pa.RecordBatch], object]]]:
    """Those that are installed."""
    yield "midstream", ours(rows(1).schema)
    if importlib.util.find_spec("duckdb"):
        yield "duckdb", duckdb_sql()
    if importlib.util.find_spec("polars"):
        yield "polars", polars_sql()


def microseconds(run: Callable[[pa.RecordBatch], object], batch: pa.RecordBatch, calls: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(calls + 3):
        began = time.perf_counter_ns()
        run(batch)
        times.append((time.perf_counter_ns() - began) / 1000)
    return statistics.median(times[3:])


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    options = arguments(__doc__ or "").parse_args()
    calls = 40 if options.quick else 200
    found = {
        name: [microseconds(run, rows(size), max(calls * 1000 // (size + 1000), 10)) for size in SIZES]
        for name, run in engines()
    }
    lines = [[name, *(f"{value:,.0f}" for value in values)] for name, values in found.items()]
    table("µs for a slice", ["", *(f"{size:,} rows" for size in SIZES)], lines)
    figures = {f"{name}_us": [round(one) for one in us] for name, us in found.items()}
    closing_line("expressions", {"rows": list(SIZES), **figures}, quick=options.quick)


if __name__ == "__main__":
    main()
