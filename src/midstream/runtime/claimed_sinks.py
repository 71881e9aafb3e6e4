"""The sinks of a job, on the driver: who may write, and when files of a committed epoch appear."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from midstream.change.configuration import Configuration
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.checkpoint.sink_files import SinkFolders
from midstream.checkpoint.sink_marker import check_file_sinks, mark_folders
from midstream.flow.model import Graph, Sink
from midstream.flow.spec import SinkTable
from midstream.runtime.table_claims import TableClaims
from midstream.storage.table_files import SinkFile

__all__ = ["ClaimedSinks"]


class ClaimedSinks:
    """Folders and tables of a job's sinks. A sink that a change adds is claimed before the change is taken."""

    def __init__(
        self, graph: Graph, checkpoint: Checkpoint, newest: Manifest | None, *, at: Callable[[str], None]
    ) -> None:
        self._job = checkpoint.identity.job
        self.folders = SinkFolders(_tables(graph).values(), durable=checkpoint.durable, at=at)
        self.folders.recover(*((-1, {}) if newest is None else (newest.epoch, newest.files)))
        self._claims = TableClaims(self._job)
        self._claims.applied(graph)  # refuse a start that could not write
        self._writing: tuple[Configuration, Configuration] | None = None
        """The last configuration asked for, and the same one with sinks that may write."""

    def writable(self, configuration: Configuration) -> Configuration:
        """The configuration whose database sinks own their tables; the same one each time, with what it has linked."""
        if self._writing is None or self._writing[0] is not configuration:
            graph = self._claims.applied(configuration.graph)
            is_ready = graph is configuration.graph
            found = configuration if is_ready else replace(configuration, plan=replace(configuration.plan, graph=graph))
            self._writing = configuration, found
        return self._writing[1]

    def claim(self, graph: Graph, names: Collection[str], check: Callable[[Graph], None]) -> None:
        """Claim the folders and tables of those of these operators that are sinks; refuse those with other data.

        ``check`` is called first, with the sinks alone: the runtime may refuse some.
        """
        sinks = tuple(op for op in graph if op.delivery is not None and op.name in names)
        check(added := replace(graph, operators=sinks))
        self._claims.claim(graph, [op.name for op in sinks])
        if tables := _tables(added):
            mark_folders(check_file_sinks(graph, self._job))
            self.folders.add(tables.values())

    @staticmethod
    def by_location(graph: Graph, files: Mapping[str, tuple[SinkFile, ...]]) -> dict[str, tuple[SinkFile, ...]]:
        """Files by the location of their sink's folder, given those of each sink, as a manifest names them."""
        tables = _tables(graph)
        return {tables[sink].location: each for sink, each in files.items()}

    def publish(self, epoch: int, files: Mapping[str, Sequence[SinkFile]]) -> None:
        """Put the files of a committed epoch in place."""
        self.folders.publish(epoch, files)


def _tables(graph: Graph) -> dict[str, SinkTable]:
    """The table of each file sink of a flow."""
    return {op.name: op.table for op in graph.of(Sink) if op.table is not None}
