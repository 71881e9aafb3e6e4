"""All of NEXMark's queries that there are, by name, and a flow of any of them."""

from __future__ import annotations

from benchmarks.workloads.nexmark import more_queries, queries
from benchmarks.workloads.nexmark.generator import Streams
from benchmarks.workloads.nexmark.more_queries import PARTED_BY
from midstream import Flow
from midstream.flow.sinks import SinkTarget

__all__ = ["PARTED_BY", "QUERIES", "UPDATES", "flow"]

QUERIES = queries.QUERIES | more_queries.MORE_QUERIES
UPDATES = queries.UPDATES | more_queries.MORE_UPDATES
"""Queries that give updates, and the columns that say of what: the newest row of each of these counts."""


def flow(query: str, streams: Streams, sink: SinkTarget) -> Flow:
    """The flow of one of :data:`QUERIES`, e.g. ``flow("q5", House().streams(rate=10_000), sink)``."""
    flow = Flow(f"nexmark_{query}")
    QUERIES[query](flow, streams).sink("result", sink)
    return flow
