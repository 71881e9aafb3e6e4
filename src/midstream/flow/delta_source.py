"""A source that reads tables of Delta Lake as streams: which rows, in which order, and how an epoch is bounded.

A position is a file within a version. What lies between two positions is the same whenever it is read, as long as the
table keeps its log and its files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from midstream.data.schema import parse_ddl, to_ddl, type_name
from midstream.errors import SchemaError, SourceError
from midstream.storage.blobs import filesystem_of, is_plain_path
from midstream.storage.delta_log import DataFile, DeltaLog, read_files, table_filesystem

__all__ = ["DeltaSource", "FilesOf", "TablePosition", "TableReader", "advance", "files_between"]

REFUSE, SKIP = "refuse", "skip"
LATEST = "latest"


@dataclass(frozen=True)
class DeltaSource:
    """Reads a table of Delta Lake as a stream: what it holds when the job begins, then what each new version adds.

    **Exactly once**: an epoch is a range of files, and Spark's log of offsets has its end. ``starting_version=n`` reads
    what version n and later ones add, instead of the whole table; ``"latest"`` what comes after the newest one. An
    epoch takes at most ``max_files_per_epoch`` files, in up to ``partitions`` tasks.

    A version that removes or replaces rows, as an update, a delete or a merge does, fails the job, for what they have
    led to cannot be taken back; ``changes="skip"`` leaves such versions out, with the rows that they add. Compaction
    changes no rows, and is not seen.

    Columns are those of the table when the flow is built. Needs ``pip install 'midstream[delta]'``, on workers as well.

    >>> DeltaSource("lake/payments", max_files_per_epoch=100).starting_version is None
    True
    """

    path: str
    starting_version: int | str | None = None
    changes: str = REFUSE
    max_files_per_epoch: int = 1000
    partitions: int = 2
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    event_time = None

    def __init__(
        self,
        path: Any,
        *,
        starting_version: int | str | None = None,
        changes: str = REFUSE,
        max_files_per_epoch: int = 1000,
        partitions: int = 2,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        if not str(path):
            raise SourceError("DeltaSource: the path is empty; give the folder of a table, such as 'lake/payments'")
        if changes not in (REFUSE, SKIP):
            raise SourceError(f"DeltaSource: changes is {changes!r}; allowed: {REFUSE!r}, {SKIP!r}")
        asked: Any = starting_version
        is_version = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0
        if asked is not None and asked != LATEST and not is_version:
            raise SourceError(
                f"DeltaSource: starting_version is {asked!r}; give the number of a version, {LATEST!r}, or None for "
                f"the whole table and all that follows"
            )
        counts: dict[str, Any] = {"max_files_per_epoch": max_files_per_epoch, "partitions": partitions}
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise SourceError(f"DeltaSource: {name} is {count!r}; give a whole number of at least 1")
        options = dict(storage_options or {})
        for name, value in options.items():
            if {type(name), type(value)} != {str}:
                raise SourceError(f"DeltaSource: storage_options has {name!r}: {type(value).__name__}; give texts only")
        values: dict[str, Any] = {
            "path": str(path),
            "starting_version": starting_version,
            "changes": changes,
            "max_files_per_epoch": max_files_per_epoch,
            "partitions": partitions,
            "storage_options": options,
        }
        for field_name, found in values.items():
            object.__setattr__(self, field_name, found)

    @property
    def location(self) -> str:
        """Where the table is. A path on this machine is absolute."""
        return filesystem_of(self.path)[1] if is_plain_path(self.path) else self.path

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the rows: those of the table when this is first asked, which opens it."""
        found = self.log().schema()
        try:
            return parse_ddl(to_ddl(found))
        except SchemaError as error:
            raise SchemaError(f"{self.what}: the table's columns cannot be used: {error}") from error

    @property
    def what(self) -> str:
        """The name of the source in errors."""
        return f"DeltaSource({self.path!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Another process may have another working directory, and needs the columns that the flow was built with.
        return {**self.__dict__, "path": self.location, "schema": self.schema}

    def log(self) -> DeltaLog:
        """The log of the table, opened now."""
        return DeltaLog(self.location, self.storage_options, self.what)

    def rows(self, files: Sequence[DataFile]) -> Iterator[pa.RecordBatch]:
        """The rows of files of the table, in their order."""
        return read_files(tuple(files), self.schema, table_filesystem(self.location, self.storage_options), self.what)

    def shares(self, files: Sequence[DataFile]) -> list[tuple[DataFile, ...]]:
        """The files of each task."""
        return [tuple(files[part :: self.partitions]) for part in range(min(self.partitions, len(files)))]


@dataclass(frozen=True)
class TablePosition:
    """The next file to be read, and how the stream began."""

    whole: bool
    """Whether all files of the first version are read, and not only those that it adds."""
    first: int
    """The version with which the stream began."""
    version: int
    index: int = 0
    """How many files of the version have been read."""

    @classmethod
    def of(cls, offset: Mapping[str, Any]) -> TablePosition:
        """The position that Spark's log has.

        >>> TablePosition.of({"whole": True, "first": 3, "version": 4, "index": 0}).version
        4
        """
        return cls(bool(offset["whole"]), offset["first"], offset["version"], offset["index"])

    @property
    def offset(self) -> dict[str, Any]:
        """The position for Spark's log."""
        return asdict(self)

    @property
    def beginning(self) -> TablePosition:
        """Where this stream began."""
        return TablePosition(self.whole, self.first, self.first)


FilesOf = Callable[[TablePosition], Sequence[DataFile]]
"""The files of the version at which a position is."""


def advance(start: TablePosition, newest: int, most: int | None, files_of: FilesOf) -> TablePosition:
    """The position after at most this many files, none later than the newest version. Passes versions without files.

    >>> files = {0: 2, 1: 0, 2: 3}
    >>> at = TablePosition(False, 0, 0)
    >>> [advance(at, 2, most, lambda at: [None] * files[at.version]).index for most in (1, 2, 3, None)]
    [1, 0, 1, 0]
    """
    at, left = start, most
    while at.version <= newest:
        here = len(files_of(at)) - at.index
        if left is not None and left < here:
            return replace(at, index=at.index + left)
        left = None if left is None else left - here
        at = replace(at, version=at.version + 1, index=0)
        if left == 0:
            break
    return at


def files_between(start: TablePosition, end: TablePosition, files_of: FilesOf) -> list[DataFile]:
    """The files from one position to another."""
    if (start.whole, start.first) != (end.whole, end.first):
        start = end.beginning  # of the first epoch Spark's log has only the end
    found: list[DataFile] = []
    at = start
    while (at.version, at.index) < (end.version, end.index):
        last = end.index if at.version == end.version else None
        found += files_of(at)[at.index : last]
        at = replace(at, version=at.version + 1, index=0)
    return found


class TableReader:
    """What a source reads next, by the table's log."""

    def __init__(self, source: DeltaSource) -> None:
        self._source = source
        self._log = source.log()
        self._snapshots: dict[int, tuple[DataFile, ...]] = {}
        """The first version, while it is read."""

    def newest(self) -> int:
        """The newest version of the table."""
        return self._log.newest()

    def begin(self) -> TablePosition:
        """Where a new stream begins."""
        newest, asked = self.newest(), self._source.starting_version
        if asked is None:
            return TablePosition(True, newest, newest)
        if asked == LATEST:
            return TablePosition(False, newest + 1, newest + 1)
        assert isinstance(asked, int), "checked when it was made"
        if asked > newest + 1:
            raise SourceError(
                f"{self._source.what}: starting_version is {asked}, and the newest version of the table is {newest}"
            )
        return TablePosition(False, asked, asked)

    def advance(self, start: TablePosition, newest: int, most: int | None) -> TablePosition:
        """See :func:`advance`."""
        return advance(start, newest, most, self.files_of)

    def files_between(self, start: TablePosition, end: TablePosition) -> list[DataFile]:
        """See :func:`files_between`."""
        return files_between(start, end, self.files_of)

    def files_of(self, at: TablePosition) -> Sequence[DataFile]:
        """The files to be read of a version."""
        if at.whole and at.version == at.first:
            if at.version not in self._snapshots:
                self._snapshots = {at.version: self._log.snapshot(at.version)}
            return self._snapshots[at.version]
        self._snapshots = {}
        commit = self._log.commit(at.version)
        if commit.schema is not None:
            self._require_same_types(commit.schema, at.version)
        if not commit.removes_rows:
            return commit.added
        if self._source.changes == SKIP:
            return ()
        raise SourceError(
            f"{self._source.what}: version {at.version} of the table removes or replaces rows, which may have been "
            f"read before. Use changes='skip' to leave such versions out, with the rows that they add; or start with a "
            f"new checkpoint, to read the table as it is now"
        )

    def _require_same_types(self, schema: str, version: int) -> None:
        from deltalake import Schema

        found = parse_ddl(to_ddl(pa.schema(Schema.from_json(schema))))
        for column in self._source.schema:
            if column.name in found.names and not found.field(column.name).type.equals(column.type):
                raise SchemaError(
                    f"{self._source.what}: with version {version} column {column.name!r} is "
                    f"{type_name(found.field(column.name).type)}, and the flow was built with "
                    f"{type_name(column.type)}; start with another table, or with a new checkpoint",
                    column=column.name,
                )
