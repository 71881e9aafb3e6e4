"""Flows from a source straight to sinks, and rows for their tables."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from midstream import Flow, ListSource

DDL = "n bigint, name string"


def flow_to(*sinks: Any, ddl: str = DDL, rows: list[dict[str, Any]] | None = None, name: str = "shop") -> Flow:
    """A flow whose sinks are named out0, out1, …"""
    flow = Flow(name)
    stream = flow.source("in", ListSource([rows or []], ddl))
    for number, sink in enumerate(sinks):
        stream.sink(f"out{number}", sink)
    return flow


def table_of(*numbers: int, **more: list[Any]) -> pa.Table:
    """Rows with these numbers, and names made of them."""
    return pa.table({"n": pa.array(numbers, pa.int64()), "name": [f"no. {n}" for n in numbers], **more})
