"""midstream's own sources as Spark streams, through Spark's Python data source API.

The description of the source travels in an option; a reader on the driver decides what is due, and tasks make the rows.
Offsets hold everything that a restart needs, so a query that continues from a checkpoint loses and repeats nothing, and
the same range of offsets gives the same rows again:

- generator: ``{"start_us": when the stream began, "index": the next event}``. What is due is decided by the wall clock
  since ``start_us``, also while the query was down: the load does not wait for the system under test.
- list: ``{"epoch": the next epoch}``.
- table: see :mod:`.delta_reader`.

An available-now run reads a finite source to its end, without waiting for the clock; from an endless generator it reads
what was due when it began.
"""

from __future__ import annotations

import base64
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from midstream.data.schema import to_ddl
from midstream.errors import SourceError
from midstream.flow.delta_source import DeltaSource
from midstream.flow.functions import pack
from midstream.flow.inputs import DescribedSource
from midstream.flow.sources import GeneratorSource, ListSource
from midstream.runtime.spark.doctor import require_pyspark
from midstream.runtime.spark.pace import read_row_limit
from midstream.runtime.spark.source_gate import pass_gate

# Spark 4.1 lacks the next import. This check tells users why the version matters, not that a name is missing.
require_pyspark(pyspark.__version__)

from pyspark.sql.streaming.datasource import (  # noqa: E402
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from midstream.runtime.spark.delta_reader import DeltaReader  # noqa: E402  # it needs the same

__all__ = ["stream_of"]

_OPTION = "description"
_ROW_LIMIT = "rowlimit"
_GATE = "gate"

Offset = dict[str, int]


def stream_of(
    spark: SparkSession, source: DescribedSource, row_limit: str | None = None, gate: str | None = None
) -> DataFrame:
    """A streaming DataFrame of the source's rows.

    The source is pickled like the operators' functions: by value, unless it comes from an installed package.
    ``row_limit`` is a file on this machine with a generator's limit of rows per epoch, see :class:`.RowLimit`. ``gate``
    is where its reader waits when it is made, see :mod:`.source_gate`.
    """
    if not isinstance(source, DescribedSource):
        raise SourceError(f"a source must be a GeneratorSource, a ListSource or a DeltaSource; found {source!r}")
    _register(spark)
    description = base64.b64encode(pack(source, type(source).__name__).data).decode()
    reader = spark.readStream.format(SourceDescription.name()).option(_OPTION, description)
    for option, value in ((_ROW_LIMIT, row_limit), (_GATE, gate)):
        reader = reader if value is None else reader.option(option, value)
    return reader.load()


class SourceDescription(DataSource):
    """Spark's data source for the option, wherever Spark plans or reads the source."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.source: DescribedSource = pickle.loads(base64.b64decode(options[_OPTION]))
        self.row_limit = options.get(_ROW_LIMIT)
        self.gate = options.get(_GATE)

    @classmethod
    def name(cls) -> str:
        """The format's name in Spark."""
        return "midstream"

    def schema(self) -> str:
        """Schema of the rows."""
        return to_ddl(self.source.schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """The reader for this kind of source. Spark asks for it when a query makes its sources."""
        if self.gate is not None:
            pass_gate(self.gate)
        if isinstance(self.source, GeneratorSource):
            return GeneratorReader(self.source, row_limit=self.row_limit)
        if isinstance(self.source, DeltaSource):
            return DeltaReader(self.source)
        return ListReader(self.source)


def now_us() -> int:
    """The wall clock, in microseconds since 1970."""
    return time.time_ns() // 1000


class GeneratorReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the due events of a generator. Spark keeps one on the driver while a query runs."""

    def __init__(
        self, source: GeneratorSource, clock: Callable[[], int] = now_us, *, row_limit: str | None = None
    ) -> None:
        self._source = source
        self._clock = clock
        self._row_limit = row_limit
        self._begun: Offset | None = None
        self._seen: Offset | None = None
        self._available_at: int | None = None

    def initialOffset(self) -> Offset:
        """Start of a new stream: the time of the first call, because Spark calls this more than once."""
        if self._begun is None:
            self._begun = {"start_us": self._clock(), "index": 0}
        return self._begun

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on, nothing more becomes due."""
        self._available_at = self._clock()

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of rows per epoch."""
        bound = self._source.max_rows_per_epoch
        return ReadAllAvailable() if bound is None else ReadMaxRows(bound)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """End of the next epoch: what is due, within the limit."""
        self._seen = start
        # Spark asks for its limit once, when the query starts; the knob may have been tuned since.
        bound = read_row_limit(self._row_limit) or (limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        due = self._due(start)
        if bound is not None:
            due = min(due, start["index"] + bound)
        # A clock that was set back must not withdraw events.
        return {"start_us": start["start_us"], "index": max(due, start["index"])}

    def reportLatestOffset(self) -> Offset | None:
        """What is due, for the query's progress report."""
        seen = self._seen
        return None if seen is None else {"start_us": seen["start_us"], "index": self._due(seen)}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """One task for each share of the epoch."""
        self._seen = end
        # After a crash, Spark asks initialOffset() again for the first epoch's start; only the end is from the log.
        shares = self._source.split(start["index"], end["index"])
        return [InputPartition((first, last, end["start_us"])) for first, last in shares if first < last]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one share, inside a task."""
        return self._source.rows(*partition.value)

    def _due(self, offset: Offset) -> int:
        if self._available_at is not None and self._source.total is not None:
            return self._source.total
        at = self._clock() if self._available_at is None else self._available_at
        return self._source.due(at - offset["start_us"])


class ListReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one epoch of a list in each micro-batch, whatever limits Spark sets: the epochs are the point."""

    def __init__(self, source: ListSource) -> None:
        self._source = source

    def initialOffset(self) -> Offset:
        """Start of the list."""
        return {"epoch": 0}

    def prepareForTriggerAvailableNow(self) -> None:
        """Nothing to fix: a list never grows."""

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """The next epoch, if there is one."""
        return {"epoch": min(start["epoch"] + 1, max(start["epoch"], len(self._source.epochs)))}

    def reportLatestOffset(self) -> Offset:
        """End of the list."""
        return {"epoch": len(self._source.epochs)}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """One task for each share of each epoch, even an empty one."""
        shares = range(self._source.partitions)
        return [InputPartition((epoch, share)) for epoch in range(start["epoch"], end["epoch"]) for share in shares]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one share, inside a task."""
        yield self._source.batches(*partition.value)


_registered: weakref.WeakSet[SparkSession] = weakref.WeakSet()


def _register(spark: SparkSession) -> None:
    # Spark warns about a format that is registered again.
    if spark not in _registered:
        spark.dataSource.register(SourceDescription)
        _registered.add(spark)
