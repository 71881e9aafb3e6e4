"""A query that is started ahead of a hand-over, while epochs go on, and held until its log is written.

Sources of midstream's own are made in processes of their own, one after the other: more than half a second each. Spark
makes all sources of a query before it reads from the query's log where they begin. So a query with other sources can be
started on a log for the epochs so far, and stopped at a gate (:mod:`.source_gate`) behind its last source. At the
hand-over the query of before ends, the log is written anew, and the gate opened. (Spark looks for settings in the
newest entry when it starts, so there must be one, but these are the same in all.)

Other sources of Spark may look at what they remember in the log when they are made. So the gate is in front of the
first of them, and if that is the first of all, there is nothing to hold: the query starts at the hand-over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from midstream.errors import MidstreamError, SourceError, first_line
from midstream.flow.inputs import DescribedSource
from midstream.flow.model import Graph
from midstream.runtime.spark.queries import Queries
from midstream.runtime.spark.source_gate import SourceGate

__all__ = ["PATIENCE_S", "QueriesAhead", "source_at_gate"]

PATIENCE_S = 60.0
"""How long sources may take until they are made. Epochs go on meanwhile."""
LOOK_S = 0.1
"""How often to check that a query that is being started has not failed."""
END_S = 10.0
"""Longest wait for a query to get through its start, so that it can be ended without leaving its processes behind."""


def source_at_gate(graph: Graph) -> str | None:
    """The source whose reader comes to the gate: the last one that is made before any that has a memory.

    Queries have their sources sorted by name.
    """
    last = None
    for name in sorted(graph.sources):
        if not isinstance(graph.payloads[name], DescribedSource):
            break
        last = name
    return last


@dataclass
class _HeldQuery:
    """A query at the gate; its epochs go to ``on_epoch`` from :meth:`release` on."""

    graph: Graph
    log: int
    gate: SourceGate
    on_epoch: Callable[[DataFrame, int], None] | None = None
    query: StreamingQuery | None = None
    schema: StructType | None = None

    def run(self, rows: DataFrame, epoch: int) -> None:
        if self.on_epoch is None:
            raise RuntimeError("midstream: this query was started ahead, and is not needed")
        self.on_epoch(rows, epoch)

    def end(self) -> None:
        """End it without a trace. Spark stops the processes of sources only when all of them are made."""
        self.gate.open()
        if (query := self.query) is None:
            return
        until = time.monotonic() + END_S
        with contextlib.suppress(StreamingQueryException):
            while str(query.status["message"]).startswith("Initializing") and time.monotonic() < until:
                query.awaitTermination(LOOK_S / 10)  # type: ignore[arg-type]  # it takes fractions
        query.stop()


class QueriesAhead:
    """Holds the query for the next hand-over, if one was prepared; at most one. Any thread may call."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._preparing = threading.Lock()
        """Held while a query is started or ended, which takes its time."""
        self._lock = threading.Lock()
        self._held: _HeldQuery | None = None
        self._is_wanted = False
        """Whether the request for which it is held has not been answered yet."""
        self._is_closed = False

    def prepare(self, graph: Graph) -> None:
        """Start a query for a flow and wait until it is at the gate; does nothing if it cannot be held.

        Raises :class:`~midstream.errors.SourceError` if its sources cannot be made, or not within this time.
        """
        at_gate, checkpoint = source_at_gate(graph), self._queries.checkpoint
        if at_gate is None or checkpoint.newest_manifest() is None:
            return
        with self._preparing:
            self._drop()
            self._require_open()
            log = checkpoint.new_log(graph.sources)
            try:
                gate = SourceGate()
            except OSError:  # no such sockets here, or the name of the folder is too long for them
                checkpoint.remove_log(log)
                return
            held = _HeldQuery(graph, log, gate)
            try:
                held.query, held.schema = self._queries.hold(graph, held.run, held.log, {at_gate: gate.path})
                self._await_arrival(held)
            except BaseException as error:
                self._end(held)
                if isinstance(error, PySparkException):
                    raise SourceError(f"the sources cannot be read: {first_line(error)}") from error
                raise
            with self._lock:
                self._held, self._is_wanted = held, True

    def _await_arrival(self, held: _HeldQuery) -> None:
        assert held.query is not None
        until = time.monotonic() + PATIENCE_S
        while not held.gate.has_arrived(LOOK_S):
            self._require_open()
            if not held.query.isActive:
                ended = held.query.exception()
                why = "the query has ended" if ended is None else first_line(ended)
                raise SourceError(f"the sources cannot be read: {why}")
            if time.monotonic() > until:
                raise SourceError(
                    f"the sources {', '.join(map(repr, sorted(held.graph.sources)))} were not made within "
                    f"{PATIENCE_S:g} s; nothing has changed. Is something that one of them needs slow or away?"
                )

    def _require_open(self) -> None:
        if self._is_closed:
            raise MidstreamError("the job is stopping, so its sources cannot be changed")

    @contextlib.contextmanager
    def taken(self, graph: Graph) -> Iterator[_HeldQuery | None]:
        """The query for this flow, if it was prepared. Its log is to be filled then, and the query released."""
        with self._lock:
            held = self._held
            if held is not None and held.graph.reads_as(graph):
                self._held = None
            else:
                held = None
        try:
            yield held
        except BaseException:
            if held is not None:
                self._end(held)
            raise

    def release(self, held: _HeldQuery, on_epoch: Callable[[DataFrame, int], None]) -> StreamingQuery:
        """Its log is filled: let it run epochs."""
        assert held.query is not None
        self._queries.schema = held.schema
        held.on_epoch = on_epoch
        held.gate.open()
        return held.query

    def answered(self, *, is_needed: bool) -> None:
        """The request has been taken or refused. ``is_needed``: the next hand-over takes the query."""
        self._is_wanted = False
        if not is_needed:
            self.drop_unwanted()

    @property
    def has_unwanted(self) -> bool:
        """Whether a query is held for no request; it is of no use if no hand-over is due."""
        return self._held is not None and not self._is_wanted

    def drop_unwanted(self) -> None:
        """End the query that is held, unless it is for a request that has just come."""
        if self.has_unwanted:
            with self._preparing:
                if self.has_unwanted:
                    self._drop()

    def close(self) -> None:
        """The job is over; what is being prepared is given up, and nothing more will be."""
        self._is_closed = True
        with self._preparing:
            self._drop()

    def _drop(self) -> None:
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            self._end(held)

    def _end(self, held: _HeldQuery) -> None:
        held.end()
        self._queries.checkpoint.remove_log(held.log)
