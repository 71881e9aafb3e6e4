"""What an epoch costs a table of a lake: appended, upserted, and run again. ``python -m benchmarks.lake_upserts``.

Tables of some sizes are filled by one epoch, or by ``--parts`` of neighbouring keys. Then epochs of a thousand rows, or
of ``--epoch-rows``, come, with keys from all over the table or, as ``near``, with neighbouring ones; each sink's call
is measured alone, without a job around it. The median of some epochs is shown, and the largest memory of the process so
far; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.catalog import load_catalog

from midstream import DeltaSink, Flow, IcebergSink, ListSource
from midstream.ids import Epoch
from midstream.runtime.owned_tables import LakeSink
from midstream.runtime.table_claims import check_tables, claim_tables, replace_epoch

DDL = "k bigint, name string, amount double"
EPOCHS = 5


def rows_of(keys: np.ndarray[Any, Any], epoch: int) -> pa.Table:
    """Rows with these keys."""
    return pa.table({"k": keys, "name": [f"name of {k}" for k in keys], "amount": np.full(len(keys), float(epoch))})


def claimed(sink: LakeSink) -> LakeSink:
    """The sink of a started job."""
    flow = Flow("upserts")
    flow.source("in", ListSource([[]], DDL)).sink("out", sink)
    check_tables(flow.graph, "bench")
    found = claim_tables(flow.graph, "bench").payloads["out"]
    assert isinstance(found, LakeSink)
    return found


def seconds_of(sink: LakeSink, size: int, parts: int, count: int, *, again: bool = False, near: bool = False) -> float:
    """The median time of an epoch of some rows, in a table of a size; of its second run if ``again``."""
    rng = np.random.default_rng(7)
    owned, times = claimed(sink), []
    for epoch, keys in enumerate(np.array_split(np.arange(size), parts)):
        replace_epoch(owned, rows_of(keys, epoch).to_batches, Epoch(epoch))
    for epoch in range(parts, parts + EPOCHS):
        for run in range(1 + again):
            anywhere = rng.choice(size, count, replace=False)
            neighbours = np.arange(count) + rng.integers(size - count)
            keys = (neighbours if near else anywhere) if sink.key else np.arange(count) + size + epoch * count
            rows = rows_of(keys, epoch)
            start = time.perf_counter()
            replace_epoch(owned, rows.to_batches, Epoch(epoch))
            if run == again:
                times.append(time.perf_counter() - start)
    return statistics.median(times)


def sink_in(lake: str, folder: Path, **options: Any) -> LakeSink:
    """A sink for a new table."""
    if lake == "delta":
        return DeltaSink(folder / "table", **options)
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    with load_catalog("bench", **catalog) as made:
        made.create_namespace("sales")
    return IcebergSink("sales.out", catalog="bench", catalog_options=catalog, **options)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--epoch-rows", type=int, default=1_000)
    parser.add_argument("--lakes", nargs="+", default=["delta", "iceberg"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results: list[dict[str, Any]] = []
    for lake in arguments.lakes:
        for size in arguments.sizes:
            found: dict[str, Any] = {"lake": lake, "rows": size}
            for name, options in (
                ("append", {}),
                ("append_again", {"again": True}),
                ("upsert", {}),
                ("upsert_again", {"again": True}),
                ("upsert_near", {"near": True}),
            ):
                mode = {"mode": "upsert", "key": "k"} if name.startswith("upsert") else {}
                with tempfile.TemporaryDirectory() as folder:
                    sink = sink_in(lake, Path(folder), **mode)
                    found[name] = round(seconds_of(sink, size, arguments.parts, arguments.epoch_rows, **options), 3)
            found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            results.append(found)
            print("  ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    print(json.dumps({"lake_upserts": results}))


if __name__ == "__main__":
    main()
