"""SEA, stock exchange analysis: quotes and trades of a stock meet within a window, and give its turnover rate.

The market and its transactions are those of the example, :mod:`examples.turnover.market`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from examples.turnover.market import NO_QUOTE, TABLES, TOO_MUCH, WINDOW_US, rules
from midstream import Flow
from midstream.flow.sinks import SinkTarget

__all__ = ["RATES", "flow", "oracle"]

RATES = (
    "kind string, board bigint, stock bigint, at timestamp, matched bigint, quoted bigint, traded bigint, rate double"
)
"""``matched``: partners in the window; ``quoted`` and ``traded``: volumes in the window, this event's included."""

Row = dict[str, Any]


def flow(source: Any, sink: SinkTarget) -> Flow:
    """The turnover rate of a stock goes to ``sink`` with each of its quotes and trades but the refused ones."""
    flow = Flow("sea")
    tables = [flow.table(name, **what) for name, what in TABLES.items()]
    (
        flow.source("market", source, event_time="at")
        .transact("match", *rules(*tables), order_by="at", which="kind", domain="board")
        .filter_batches("accepted", is_committed)
        .map_batches("rates", project, returns=RATES)
        .sink("turnover", sink)
    )
    return flow


def is_committed(events: pa.RecordBatch) -> pa.Array:
    """All but the refused trades."""
    return events["committed"]


def project(events: pa.RecordBatch) -> pa.RecordBatch:
    """Only what is of interest from here on."""
    return events.select([column.split()[0] for column in RATES.split(", ")])


def oracle(events: pa.Table) -> tuple[list[Row], list[tuple[datetime, str]], dict[str, dict[int, int]]]:
    """The rates in the order of time, what was refused (its time, and why), and both tables afterwards."""
    past: dict[str, dict[int, deque[tuple[datetime, int]]]] = {"quote": defaultdict(deque), "trade": defaultdict(deque)}
    window = timedelta(microseconds=WINDOW_US)
    newest: dict[str, dict[int, int]] = {"quotes": {}, "trades": {}}
    rates: list[Row] = []
    refused: list[tuple[datetime, str]] = []
    for event in sorted(events.to_pylist(), key=lambda event: event["at"]):
        kind, stock, at, volume = event["kind"], event["stock"], event["at"], event["volume"]
        mine, others = past[kind][stock], past["quote" if kind == "trade" else "trade"][stock]
        for side in (mine, others):
            while side and side[0][0] <= at - window:
                side.popleft()
        own, matched = volume + _total(mine), len(others)
        quoted, traded = (own, _total(others)) if kind == "quote" else (_total(others), own)
        if kind == "trade" and (not matched or traded > quoted):
            refused.append((at, TOO_MUCH if matched else NO_QUOTE))
            continue
        mine.append((at, volume))
        newest[f"{kind}s"][stock] = volume
        about = {name: event[name] for name in ("kind", "board", "stock", "at")}
        rates.append(about | {"matched": matched, "quoted": quoted, "traded": traded, "rate": traded / quoted})
    return rates, refused, newest


def _total(side: Iterable[tuple[datetime, int]]) -> int:
    return sum(volume for _, volume in side)
