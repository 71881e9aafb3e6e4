"""The queries of a job, one after the other, each with the flow's sources at that time.

Spark fixes the sources of a query when it starts. So a change of sources is a *hand-over*: between two epochs the
query ends, the checkpoint gets a log for the new sources that continues after the newest epoch, and another query
starts on it. All else stays: the coordinator, workers, state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.source_positions import require_one_line_each
from midstream.errors import CheckpointError, SourceError
from midstream.flow.inputs import DescribedSource
from midstream.flow.model import Graph
from midstream.runtime.spark.callback import on_each_batch
from midstream.runtime.spark.epoch import unite_inlets
from midstream.runtime.spark.generator_source import stream_of
from midstream.runtime.spark.offset_log import start_query
from midstream.runtime.spark.pace import RowLimit

__all__ = ["Queries", "is_asking", "query_name", "source_stream"]


@dataclass
class Queries:
    """Starts the queries of a job. ``closes_windows``: the schema of the rows is needed when the last one has ended."""

    spark: SparkSession
    checkpoint: Checkpoint
    name: str
    trigger: Mapping[str, Any]
    row_limit: RowLimit
    closes_windows: bool = False
    schema: StructType | None = field(default=None, init=False)
    """The schema of the newest query's rows, if windows are to be closed after it."""

    def start(self, graph: Graph, on_epoch: Callable[[DataFrame, int], None]) -> StreamingQuery:
        """Start a query that reads the sources of a flow. The checkpoint's log must be theirs."""
        rows = self._rows(graph, {})
        self.schema = rows.schema if self.closes_windows else None
        return self._started(rows, on_epoch, self.checkpoint.identity.log)

    def hold(
        self, graph: Graph, on_epoch: Callable[[DataFrame, int], None], log: int, gates: Mapping[str, str]
    ) -> tuple[StreamingQuery, StructType | None]:
        """Start a query on another log, which is not filled yet; ``gates``: where the readers of sources wait for that.

        Its second result is :attr:`schema` once the query is the newest one.
        """
        rows = self._rows(graph, gates)
        return self._started(rows, on_epoch, log), rows.schema if self.closes_windows else None

    def _rows(self, graph: Graph, gates: Mapping[str, str]) -> DataFrame:
        return unite_inlets(
            [
                source_stream(self.spark, name, graph.payloads[name], self.row_limit, gates.get(name))
                for name in sorted(graph.sources)
            ]
        )

    def _started(self, rows: DataFrame, on_epoch: Callable[[DataFrame, int], None], log: int) -> StreamingQuery:
        location = self.checkpoint.log_location(log)
        writer = rows.writeStream.queryName(query_name(self.name, log)).option("checkpointLocation", location)
        if self.trigger:
            writer = writer.trigger(**self.trigger)
        return start_query(self.spark, on_each_batch(writer, on_epoch), location)

    def check(self, sources: Sequence[str], graph: Graph, new: Sequence[str]) -> None:
        """Refuse a hand-over that is not possible: from ``sources`` to those of a flow, of which some are new."""
        for name in new:
            source_stream(self.spark, name, graph.payloads.get(name), self.row_limit)
        log = self.checkpoint.spark_files
        if log.holds_state():
            raise CheckpointError(
                "sources cannot change while the job runs, because a DataFrame of one of them keeps state in Spark "
                f"({log.location}/state), and Spark knows that by its place in the query. Remove duplicates, aggregate "
                "or join in the flow instead, or start the other sources with a new checkpoint"
            )
        if (newest := log.newest_offsets()) is not None:
            require_one_line_each(newest[1], sources, newest[0])


def query_name(job: str, log: int) -> str:
    """The name of a query in Spark, which is unique among those that run: two of a job may, during a hand-over.

    >>> query_name("clicks 7f", 0), query_name("clicks 7f", 2)
    ('clicks 7f', 'clicks 7f log 2')
    """
    return job if log == 0 else f"{job} log {log}"


def is_asking(query: StreamingQuery) -> bool:
    """Whether a query makes its sources, or asks them for rows: it neither has ended nor waits for new rows."""
    return query.isActive and not str(query.status["message"]).startswith("Waiting")


def source_stream(
    spark: SparkSession, name: str, stream: Any, row_limit: RowLimit, gate: str | None = None
) -> DataFrame:
    """The streaming DataFrame of a source."""
    if isinstance(stream, DescribedSource):
        return stream_of(spark, stream, row_limit.path, gate)
    if not isinstance(stream, DataFrame):
        raise SourceError(
            f"source {name!r} reads a DataFrame, which belongs to the process that made it and is not stored. Add it "
            f"there: job.deploy(flow), or job.update(Insert(…, source=…)). If it was removed before, it goes on where "
            f"it was"
        )
    if stream.sparkSession.sparkContext is not spark.sparkContext:
        raise SourceError(f"source {name!r} was made with another Spark application than the one the job is started on")
    return stream
