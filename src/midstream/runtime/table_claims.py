"""Tables that sinks own: each is checked, and claimed for one driver process, before anything is written to it."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from midstream.flow.model import Graph, Sink
from midstream.flow.sink_owner import SinkOwner
from midstream.flow.sinks import DatabaseSink
from midstream.ids import Epoch
from midstream.runtime import database_sink, owned_tables
from midstream.runtime.delta_sink import OwnedDelta
from midstream.runtime.iceberg_sink import OwnedIceberg
from midstream.runtime.owned_tables import LakeSink, OwnedTable, Rows

__all__ = ["TableClaims", "check_tables", "claim_tables", "replace_epoch"]

Owning = DatabaseSink | LakeSink
LAKES: tuple[type[OwnedTable], ...] = (OwnedDelta, OwnedIceberg)


def check_tables(graph: Graph, job: str) -> None:
    """Refuse tables that cannot be written, or that are not this job's. Only reads."""
    database_sink.check_tables(graph, job)
    for kind in LAKES:
        owned_tables.check_tables(kind, graph, job)


def claim_tables(graph: Graph, job: str) -> Graph:
    """Claim the tables for this job and this driver process; return the graph whose sinks may write."""
    driver = uuid.uuid4().hex
    graph = database_sink.claim_tables(graph, job, driver)
    for kind in LAKES:
        graph = owned_tables.claim_tables(kind, graph, job, driver)
    return graph


def replace_epoch(sink: LakeSink, rows: Rows, epoch: Epoch) -> None:
    """Write an epoch to a table of a lake; see :func:`midstream.runtime.owned_tables.replace_epoch`."""
    [kind] = [kind for kind in LAKES if isinstance(sink, kind.sink_type)]
    owned_tables.replace_epoch(kind, sink, rows, epoch)


class TableClaims:
    """A driver's claims on tables of sinks that were added while the job runs, after :func:`claim_tables` at the
    start."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._owners: dict[tuple[Any, ...], SinkOwner] = {}

    def claim(self, graph: Graph, names: Collection[str]) -> None:
        """Check and claim the tables of these sinks of a flow. A table that is not this job's is refused."""
        new = [name for name, _ in _owning_sinks(graph) if name in names]
        if not new:
            return
        check_tables(graph, self._job)
        owned = claim_tables(replace(graph, operators=tuple(graph[name] for name in new)), self._job)
        for name, sink in _owning_sinks(owned):
            assert sink.owner is not None, "it was claimed just now"
            self._owners[name, *sink.place] = sink.owner

    def applied(self, graph: Graph) -> Graph:
        """The flow whose sinks may write. After a restart, tables of recorded sinks are claimed here."""
        waiting = {name: sink for name, sink in _owning_sinks(graph) if sink.owner is None}
        if not waiting:
            return graph
        self.claim(graph, [name for name, sink in waiting.items() if (name, *sink.place) not in self._owners])
        owned = {name: sink.owned_by(self._owners[name, *sink.place]) for name, sink in waiting.items()}
        return replace(graph, payloads={**graph.payloads, **owned})


def _owning_sinks(graph: Graph) -> Iterator[tuple[str, Owning]]:
    for op in graph.of(Sink):
        target = graph.payloads.get(op.name)
        if isinstance(target, Owning):
            yield op.name, target
