"""The files that one task writes for the sinks of its stage."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import pyarrow as pa

from midstream.engine.failure import failed
from midstream.errors import CheckpointError
from midstream.flow.spec import SinkTable
from midstream.ids import Epoch, PartitionId, WireId
from midstream.storage.blobs import filesystem_of
from midstream.storage.disk import Unsynced
from midstream.storage.table_files import SinkFile, TableFiles

__all__ = ["FileOutlets"]


class FileOutlets:
    """:meth:`write` takes rows by wire, :meth:`finish` returns the staged files by sink.

    Names of staged files are unique, so attempts of a task never collide, not even under different driver processes.
    """

    def __init__(
        self,
        tables: Mapping[WireId, Mapping[str, SinkTable]],
        schemas: Mapping[WireId, pa.Schema],
        *,
        epoch: Epoch,
        partition: PartitionId,
        durable: bool,
    ) -> None:
        self._tables = tables
        self._schemas = schemas
        self._epoch, self._partition, self._durable = epoch, partition, durable
        self._attempt = f"{epoch}-{uuid.uuid4().hex}"
        self._open: dict[str, TableFiles] = {}
        self._unsynced = Unsynced()

    def write(self, wire: WireId, rows: pa.RecordBatch) -> None:
        """Write rows of a wire. Raises :class:`~midstream.errors.OperatorFailed` if they cannot be written."""
        for sink, table in self._tables[wire].items():
            try:
                if sink not in self._open:
                    self._open[sink] = self._files(table, self._schemas[wire])
                self._open[sink].write(rows)
            except CheckpointError as error:
                raise failed(sink, error, None) from error

    def _files(self, table: SinkTable, schema: pa.Schema) -> TableFiles:
        fs, folder = filesystem_of(table.location)
        return TableFiles(
            fs,
            folder,
            table.format,
            schema,
            epoch=self._epoch,
            partition=self._partition,
            attempt=self._attempt,
            partition_by=table.partition_by,
            durable=self._durable,
            unsynced=self._unsynced,
        )

    def finish(self) -> dict[str, tuple[SinkFile, ...]]:
        """Close all files, and sync them all at once; on a local disk they survive a loss of power from here on."""
        found = {}
        for sink, files in self._open.items():
            try:
                found[sink] = files.finish()
            except CheckpointError as error:
                raise failed(sink, error, None) from error
        self._sync()
        self._open = {}
        return found

    def _sync(self) -> None:
        try:
            self._unsynced.sync()
        except OSError as error:
            lost = CheckpointError(
                f"files of epoch {self._epoch} cannot be synced to disk: {error}. Nothing of this epoch is visible in "
                f"the folders of its sinks; it is run again"
            )
            raise failed(next(iter(self._open)), lost, None) from error

    def close(self) -> None:
        """Remove what was staged, unless it was finished."""
        for files in self._open.values():
            files.abort()
        self._open = {}
