"""Reads a table of Delta Lake for Spark: offsets on the driver, files in tasks.

Offsets are those of :class:`~midstream.flow.delta_source.TablePosition`: ``{"whole": whether all of the first version
is read, "first": that version, "version": the next one, "index": how many of its files have been read}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow

from midstream.flow.delta_source import DeltaSource, TablePosition, TableReader

__all__ = ["DeltaReader"]

Offset = dict[str, Any]


class DeltaReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what versions of a table add. Spark keeps one on the driver while a query runs."""

    def __init__(self, source: DeltaSource) -> None:
        self._source = source
        self._opened: TableReader | None = None
        self._begun: TablePosition | None = None
        self._last: int | None = None
        """The newest version that may be read, in an available-now run."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}  # tasks get the files by name

    def initialOffset(self) -> Offset:
        """Start of a new stream: by the table at the first call, because Spark calls this more than once."""
        if self._begun is None:
            self._begun = self._reader.begin()
        return self._begun.offset

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on, versions that are committed are not read."""
        self._last = self._reader.newest()

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of files per epoch."""
        return ReadMaxFiles(self._source.max_files_per_epoch)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """End of the next epoch: what is committed, within the limit."""
        most = None if isinstance(limit, ReadAllAvailable) else self._source.max_files_per_epoch
        return self._reader.advance(TablePosition.of(start), self._newest(), most).offset

    def reportLatestOffset(self) -> Offset | None:
        """The end of what is committed, for the query's progress report."""
        return {"version": self._newest() + 1, "index": 0}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """One task for each share of the files."""
        files = self._reader.files_between(TablePosition.of(start), TablePosition.of(end))
        return [InputPartition(share) for share in self._source.shares(files)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one share, inside a task."""
        return self._source.rows(partition.value)

    @property
    def _reader(self) -> TableReader:
        if self._opened is None:
            self._opened = TableReader(self._source)
        return self._opened

    def _newest(self) -> int:
        return self._reader.newest() if self._last is None else self._last
