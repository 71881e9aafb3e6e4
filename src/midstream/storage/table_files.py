"""Writes the rows of one task to files of a table, staged where readers do not look.

A staged file becomes a file of the table by a rename (:mod:`midstream.checkpoint.sink_files`). Names of staged files
are unique to an attempt, so attempts never disturb each other.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import IO, Any, Protocol
from urllib.parse import quote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.fs as pafs
import pyarrow.parquet as papq

from midstream.data.json_lines import json_lines
from midstream.errors import CheckpointError
from midstream.storage import disk
from midstream.storage.blobs import is_local, make_folder
from midstream.storage.table_format import FileFormat, TableFormat

__all__ = ["EPOCH_FIELD", "NULL_FOLDER", "STAGED", "SinkFile", "TableFiles", "epochs_of", "file_name"]

EPOCH_FIELD = pa.field("epoch", pa.int32(), nullable=False)
"""The column that a file sink adds to rows."""

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
"""The folder of rows whose partition column is null; the same name as in Hive, Spark and DuckDB."""

STAGED = "_staged"
"""The folder, below the sink's, of files that are not published yet. Readers of tables skip names with ``_``."""

HELD_BYTES = 8 << 20
"""Rows of a file are buffered up to this size before they are encoded; otherwise each batch would be a row group."""
ALL_HELD_BYTES = 64 << 20
"""The same for all files of a task together."""

OPEN_FILES = 64
"""Most files that a task keeps open at once; each combination of partition values has its own."""


class SinkFile(msgspec.Struct, frozen=True):
    """A file that a task wrote: where it is staged, and its name in the table. Both are below the sink's folder."""

    staged: str
    name: str
    rows: int
    size: int


def file_name(first: int, last: int, partition: int | str, number: int, extension: str) -> str:
    """The name of a file of a table. It shows the range of epochs whose rows the file holds.

    >>> file_name(7, 7, 3, 0, ".parquet")
    'epoch-0000000007-0000000007-00003-0.parquet'
    """
    task = f"{partition:05d}" if isinstance(partition, int) else partition
    return f"epoch-{first:010d}-{last:010d}-{task}-{number}{extension}"


def epochs_of(name: str) -> tuple[int, int] | None:
    """The first and the last epoch of a file's rows, from its name; None if it is not a file of a table.

    >>> epochs_of("country=de/epoch-0000000007-0000000009-00003-0.parquet"), epochs_of("_midstream.json")
    ((7, 9), None)
    """
    parts = posixpath.basename(name).split("-")
    if len(parts) != 5 or parts[0] != "epoch" or not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return int(parts[1]), int(parts[2])


class _Encoder(Protocol):
    """One file being written."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""

    def close(self) -> None:
        """Write the footer of the format. The underlying file stays open."""


class _Parquet:
    def __init__(self, out: IO[bytes], schema: pa.Schema, format: TableFormat) -> None:
        codec = None if format.compression == "none" else format.compression
        self._rows = format.rows_per_group
        self._writer = papq.ParquetWriter(out, schema, compression=codec, compression_level=format.compression_level)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch, self._rows)

    def close(self) -> None:
        self._writer.close()


class _Csv:
    def __init__(self, out: IO[bytes], schema: pa.Schema, format: TableFormat) -> None:
        style = "all_valid" if format.quote_all else "needed"
        options = pacsv.WriteOptions(include_header=format.header, delimiter=format.separator, quoting_style=style)
        self._writer = pacsv.CSVWriter(out, schema, write_options=options)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()


class _Json:
    def __init__(self, out: IO[bytes], schema: pa.Schema, format: TableFormat) -> None:
        self._out = out
        self._format = format

    def write(self, batch: pa.RecordBatch) -> None:
        self._out.write(json_lines(batch, ignore_nulls=self._format.ignore_null_fields))

    def close(self) -> None:
        """Nothing to do: a file of lines has no footer."""


_ENCODERS: dict[FileFormat, Callable[[Any, pa.Schema, TableFormat], _Encoder]] = {
    FileFormat.PARQUET: _Parquet,
    FileFormat.CSV: _Csv,
    FileFormat.JSON: _Json,
}


@dataclass
class _OpenFile:
    staged: str
    name: str
    path: str
    raw: Any
    out: Any
    encoder: _Encoder
    rows: int = 0
    held: list[pa.RecordBatch] = field(default_factory=list)
    held_bytes: int = 0

    def hold(self, batch: pa.RecordBatch) -> None:
        """Buffer rows; :meth:`flush` encodes them."""
        self.held.append(batch)
        self.held_bytes += batch.nbytes
        self.rows += batch.num_rows

    def flush(self) -> None:
        """Encode the buffered rows."""
        if self.held:
            self.encoder.write(pa.concat_batches(self.held) if len(self.held) > 1 else self.held[0])
        self.held, self.held_bytes = [], 0


class TableFiles:
    """The files that one task writes for one sink. :meth:`write` takes rows, :meth:`finish` returns the files.

    :param folder: the sink's, on ``fs``.
    :param attempt: unique to the attempt of the task; names its staged files.
    :param unsynced: gets the files on a local disk that must survive a loss of power. The caller syncs them, together
        with those of other sinks.
    """

    def __init__(
        self,
        fs: pafs.FileSystem,
        folder: str,
        format: TableFormat,
        schema: pa.Schema,
        *,
        epoch: int,
        partition: int,
        attempt: str,
        partition_by: Sequence[str] = (),
        unsynced: disk.Unsynced,
        durable: bool = True,
    ) -> None:
        self._fs = fs
        self._folder = folder
        self._format = format
        self._partition_by = tuple(partition_by)
        self._epoch, self._partition, self._attempt = epoch, partition, attempt
        self._durable = durable
        self._unsynced = unsynced
        self._kept = [name for name in schema.names if name not in self._partition_by]
        self._schema = pa.schema([*(schema.field(name) for name in self._kept), EPOCH_FIELD])
        self._open: dict[str, _OpenFile] = {}
        self._done: list[SinkFile] = []
        self._count = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows. Raises :class:`CheckpointError` if the disk is full or cannot be reached."""
        if not batch.num_rows:
            return
        try:
            for folder, rows in self._divided(batch):
                epochs = pa.array(np.full(rows.num_rows, self._epoch, np.int32))
                columns = [*rows.select(self._kept).columns, epochs]
                self._put(folder, pa.RecordBatch.from_arrays(columns, schema=self._schema))
            if sum(file.held_bytes for file in self._open.values()) > ALL_HELD_BYTES:
                for file in self._open.values():
                    file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def finish(self) -> tuple[SinkFile, ...]:
        """Close all files; they are not synced yet."""
        try:
            for folder in list(self._open):
                self._close(folder)
        except OSError as error:
            raise self._cannot_write(error) from error
        return tuple(self._done)

    def abort(self) -> None:
        """Remove what was staged, as far as possible. The sweeper removes what a killed task leaves."""
        for file in self._open.values():
            for close in (file.encoder.close, file.out.close, file.raw.close):
                with contextlib.suppress(OSError, pa.ArrowInvalid):
                    close()
        for path in [file.path for file in self._open.values()] + [
            posixpath.join(self._folder, file.staged) for file in self._done
        ]:
            with contextlib.suppress(OSError):
                self._fs.delete_file(path)
        self._open, self._done = {}, []

    def _cannot_write(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"files of epoch {self._epoch} cannot be written to {self._folder!r}: {error}. Nothing of this epoch is "
            f"visible there; the epoch is run again"
        )

    def _divided(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows of each folder, in their order."""
        if not self._partition_by:
            yield "", batch
            return
        columns = [pc.dictionary_encode(batch.column(name), null_encoding="encode") for name in self._partition_by]
        codes = np.zeros(batch.num_rows, np.int64)
        for column in columns:
            codes = codes * len(column.dictionary) + column.indices.to_numpy(zero_copy_only=False)
        order = np.argsort(codes, kind="stable")
        found = codes[order]
        starts = [0, *(np.flatnonzero(np.diff(found)) + 1).tolist(), len(found)]
        arranged = batch.take(pa.array(order))
        for start, end in pairwise(starts):
            first = int(order[start])
            values = [column.dictionary[column.indices[first].as_py()].as_py() for column in columns]
            yield _folder_of(self._partition_by, values), arranged.slice(start, end - start)

    def _put(self, folder: str, rows: pa.RecordBatch) -> None:
        """Add rows to the folder's file, and to further ones when that is full."""
        most = self._format.rows_per_file
        while rows.num_rows:
            file = self._file_of(folder)
            fitting = rows if most is None else rows.slice(0, most - file.rows)
            file.hold(fitting)
            if file.rows == most:
                self._close(folder)
            elif file.held_bytes >= HELD_BYTES:
                file.flush()
            rows = rows.slice(fitting.num_rows)

    def _file_of(self, folder: str) -> _OpenFile:
        if folder in self._open:
            self._open[folder] = self._open.pop(folder)  # the most recently used one is last
            return self._open[folder]
        if len(self._open) >= OPEN_FILES:
            self._close(next(iter(self._open)))
        number, extension = self._count, self._format.extension
        self._count += 1
        staged = posixpath.join(STAGED, f"{self._attempt}-{number}{extension}")
        path = posixpath.join(self._folder, staged)
        raw = self._create(path)
        compressed = self._format.format is not FileFormat.PARQUET and self._format.compression != "none"
        out = pa.CompressedOutputStream(raw, self._format.compression) if compressed else raw
        name = posixpath.join(folder, file_name(self._epoch, self._epoch, self._partition, number, extension))
        encoder = _ENCODERS[self._format.format](out, self._schema, self._format)
        self._open[folder] = _OpenFile(staged, name, path, raw, out, encoder)
        return self._open[folder]

    def _create(self, path: str) -> Any:
        make_folder(self._fs, posixpath.dirname(path), durable=self._durable)
        return self._fs.open_output_stream(path, compression=None)  # otherwise Arrow compresses again, by the extension

    def _close(self, folder: str) -> None:
        file = self._open[folder]
        file.flush()
        file.encoder.close()
        if file.out is not file.raw:
            file.out.close()
        if not file.raw.closed:
            file.raw.close()
        del self._open[folder]
        local = is_local(self._fs)
        if local and self._durable:
            self._unsynced.add_file(file.path)
        size = os.path.getsize(file.path) if local else int(self._fs.get_file_info(file.path).size or 0)
        self._done.append(SinkFile(file.staged, file.name, file.rows, size))


def _folder_of(columns: Sequence[str], values: Sequence[Any]) -> str:
    """The folder of a combination of partition values, named as in Hive.

    >>> _folder_of(("country", "day"), ("a/b", None))
    'country=a%2Fb/day=__HIVE_DEFAULT_PARTITION__'
    """
    return "/".join(
        f"{quote(name, safe=' ')}={NULL_FOLDER if value is None or value == '' else quote(_shown(value), safe=' ')}"
        for name, value in zip(columns, values, strict=True)
    )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
