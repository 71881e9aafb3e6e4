"""The log of a table of Delta Lake: its versions, and the files whose rows each of them adds.

Commits are read as Delta Lake's protocol describes them: a file of JSON for each version, a line for each action. The
``deltalake`` package opens the table, and says what a whole version holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs

from midstream.errors import SetupError, SourceError, first_line
from midstream.storage.blobs import filesystem_of, is_plain_path

__all__ = ["DataFile", "DeltaLog", "TableCommit", "read_commit", "read_files", "table_filesystem"]

LOG = "_delta_log"
KNOWN_FEATURES = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
"""What a table may ask of its readers. With others, such as deletion vectors, a file is not what the table holds."""
BATCH_ROWS = 16_384


@dataclass(frozen=True)
class DataFile:
    """A file of a table, and the values of the columns by which the table is partitioned."""

    path: str
    partition: Mapping[str, Any]


@dataclass(frozen=True)
class TableCommit:
    """What a version changes."""

    added: tuple[DataFile, ...] = ()
    """Files with new rows, in the order of the commit. Files with rows that only moved are left out."""
    removes_rows: bool = False
    schema: str | None = None
    """The table's columns from now on, as JSON, if the commit says them."""
    features: tuple[str, ...] = ()
    """What its readers must know from now on."""
    is_mapped: bool = False
    """Whether columns have other names in files."""


class _AddEntry(msgspec.Struct):
    path: str
    partitionValues: dict[str, str | None] = {}
    dataChange: bool = True


class _RemoveEntry(msgspec.Struct):
    dataChange: bool = True


class _MetaDataEntry(msgspec.Struct):
    schemaString: str
    configuration: dict[str, str] = {}


class _ProtocolEntry(msgspec.Struct):
    readerFeatures: list[str] | None = None


class _CommitLine(msgspec.Struct):
    """A line of a commit: the parts that are needed here."""

    add: _AddEntry | None = None
    remove: _RemoveEntry | None = None
    metaData: _MetaDataEntry | None = None
    protocol: _ProtocolEntry | None = None


def read_commit(data: bytes) -> TableCommit:
    """What a version changes, from the file of its commit.

    >>> read_commit(b'{"add": {"path": "a%20b.parquet", "partitionValues": {}, "dataChange": true}}').added[0].path
    'a b.parquet'
    """
    actions = [msgspec.json.decode(line, type=_CommitLine) for line in data.splitlines() if line.strip()]
    about = next((action.metaData for action in actions if action.metaData is not None), None)
    protocol = next((action.protocol for action in actions if action.protocol is not None), None)
    return TableCommit(
        added=tuple(
            DataFile(unquote(action.add.path), action.add.partitionValues)
            for action in actions
            if action.add is not None and action.add.dataChange
        ),
        removes_rows=any(action.remove is not None and action.remove.dataChange for action in actions),
        schema=None if about is None else about.schemaString,
        features=() if protocol is None else tuple(protocol.readerFeatures or ()),
        is_mapped=about is not None and about.configuration.get("delta.columnMapping.mode", "none") != "none",
    )


def table_filesystem(location: str, options: Mapping[str, str]) -> pafs.FileSystem:
    """The folder of a table, as a file system."""
    if is_plain_path(location):
        fs, root = filesystem_of(location)
        return pafs.SubTreeFileSystem(root, fs)
    from deltalake.fs import DeltaStorageHandler

    return pafs.PyFileSystem(DeltaStorageHandler(location, dict(options)))


class DeltaLog:
    """A table's log, as far as a reader of the table needs it. ``what`` names the reader in errors."""

    def __init__(self, location: str, options: Mapping[str, str], what: str) -> None:
        self._location = location
        self._options = dict(options)
        self._what = what
        self._fs = table_filesystem(location, options)
        self._table = self._opened()
        self._commit = lru_cache(64)(self._read)

    def schema(self) -> pa.Schema:
        """The columns of the newest version."""
        self._require_readable()
        return pa.schema(self._table.schema())

    def newest(self) -> int:
        """The newest version."""
        self._table.update_incremental()
        return int(self._table.version())

    def snapshot(self, version: int) -> tuple[DataFile, ...]:
        """All files of a version, in the order of their names."""
        table = self._opened(version)
        if pa.table(table.deletion_vectors()).num_rows:
            self._refuse_features(["deletionVectors"])
        found = pa.table(table.get_add_actions())
        partitions = found.column("partition").to_pylist() if "partition" in found.column_names else []
        files = zip(found.column("path").to_pylist(), partitions or [{}] * found.num_rows, strict=True)
        return tuple(sorted((DataFile(unquote(path), values) for path, values in files), key=lambda file: file.path))

    def commit(self, version: int) -> TableCommit:
        """What a version changes."""
        return self._commit(version)

    def _read(self, version: int) -> TableCommit:
        try:
            with self._fs.open_input_stream(f"{LOG}/{version:020}.json") as stream:
                found = read_commit(bytes(stream.read()))
        except FileNotFoundError:
            raise SourceError(
                f"{self._what}: version {version} of the table {self._location!r} is no longer in its log, so rows may "
                f"be missed. Start with a new checkpoint, which reads the whole table, or with starting_version= of a "
                f"version that is there; keep the log longer (delta.logRetentionDuration) than a job may be down"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise SourceError(
                f"{self._what}: version {version} of the table {self._location!r} cannot be read: {error}"
            ) from error
        mapped = ["columnMapping"] if found.is_mapped else []
        self._refuse_features([*found.features, *mapped])
        return found

    def _opened(self, version: int | None = None) -> Any:
        try:
            from deltalake import DeltaTable
            from deltalake.exceptions import DeltaError
        except ImportError as error:
            raise SetupError(
                f"{self._what}: a DeltaSource needs the deltalake package on the driver and where tasks run ({error}); "
                f"pip install 'midstream[delta]'"
            ) from None
        place = f"the table {self._location!r}" + ("" if version is None else f" at version {version}")
        try:
            return DeltaTable(self._location, version, self._options)
        except (DeltaError, OSError, ValueError) as error:
            raise SourceError(f"{self._what}: {place} cannot be read: {first_line(error)}") from error

    def _require_readable(self) -> None:
        self._refuse_features(self._table.protocol().reader_features or ())
        if self._table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
            self._refuse_features(["columnMapping"])

    def _refuse_features(self, found: Any) -> None:
        if unknown := sorted(set(found) - KNOWN_FEATURES):
            raise SourceError(
                f"{self._what}: the table {self._location!r} has {', '.join(unknown)}, with which its files are not "
                f"what it holds; known are {', '.join(sorted(KNOWN_FEATURES))}. Read it with Delta Lake's connector "
                f"for Spark, or copy it to a table without"
            )


def read_files(
    files: tuple[DataFile, ...], columns: pa.Schema, filesystem: pafs.FileSystem, what: str
) -> Iterator[pa.RecordBatch]:
    """The rows of files, in their order, with these columns; those that a file lacks are null."""
    import pyarrow.dataset as pads  # here, because it loads pandas

    kind = pads.ParquetFileFormat(read_options=pads.ParquetReadOptions(coerce_int96_timestamp_unit="us"))
    for file in files:
        given = [name for name in file.partition if name in columns.names]
        wanted = [name for name in columns.names if name not in given]
        partition = {name: _value(file.partition[name], columns.field(name).type) for name in given}
        try:
            fragment = kind.make_fragment(file.path, filesystem=filesystem)
            plain = pa.schema([columns.field(name) for name in wanted])
            for batch in fragment.to_batches(schema=plain, columns=wanted, batch_size=BATCH_ROWS, use_threads=False):
                arrays = [
                    pa.repeat(partition[name], batch.num_rows) if name in partition else batch.column(name)
                    for name in columns.names
                ]
                if batch.num_rows:
                    yield pa.RecordBatch.from_arrays(arrays, schema=columns)
        except FileNotFoundError:
            raise SourceError(
                f"{what}: the file {file.path!r} is gone, so its rows cannot be read: the table was vacuumed before "
                f"they were. Start with a new checkpoint, and keep files longer (delta.deletedFileRetentionDuration)"
            ) from None


def _value(found: Any, kind: pa.DataType) -> pa.Scalar:
    """A partition's value: a text in a commit, already typed in a snapshot. An empty text is null in all types."""
    if found is None or found == "":
        return pa.scalar(None, kind)
    if not isinstance(found, str) or pa.types.is_string(kind):
        return pa.scalar(found, kind)
    if pa.types.is_binary(kind):
        return pa.scalar(found.encode(), kind)
    if pa.types.is_timestamp(kind):  # in UTC, with or without a Z
        plain = pa.scalar(found.replace("T", " ").removesuffix("Z")).cast(pa.timestamp(kind.unit))
        return pa.scalar(plain.value, kind)
    return pa.scalar(found).cast(kind)
