"""State files in the checkpoint location: the changes of tasks (deltas) and whole bins (snapshots).

Each is an Arrow IPC file with the columns ``key`` (bin, namespace and key in one, see :mod:`.keys`) and ``value`` (null
means deleted), ascending by key, so the rows of a bin are contiguous. The name contains operator, epoch, run,
partition, attempt and part of the digest. So no file can be overwritten with different content, not even by a task of
an earlier driver process. A :class:`FileRef` records the expected size and digest; reading checks both.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs

from midstream.errors import CheckpointError
from midstream.ids import BINS, BinId, Epoch, PartitionId, Run
from midstream.storage.blobs import copy_file, filesystem_of, remove_file, write_atomically
from midstream.storage.documents import FORMAT, require_format

__all__ = [
    "SCHEMA",
    "Author",
    "FileKind",
    "FileRef",
    "StateFiles",
    "bin_ranges",
    "epoch_and_operator",
    "folder_of",
    "table_of",
]

SCHEMA = pa.schema([pa.field("key", pa.large_binary(), nullable=False), pa.field("value", pa.large_binary())])
"""Columns of every state file."""

_DIGEST_SIZE = 16
_NAME = re.compile(r"(?P<operator>[^/]+)/(?P<epoch>\d{10})-\d+-\d+-\d+-[a-z]+-[0-9a-f]{16}\.arrow(\.\d+\.tmp)?")


class FileKind(StrEnum):
    """The kind of rows in a file: changes of one epoch, changes of several epochs, or the whole state of its bins."""

    DELTA = "delta"
    MERGED = "merged"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class Author:
    """The task that writes a file."""

    operator: str
    epoch: Epoch
    run: Run
    partition: PartitionId
    attempt: int


class FileRef(msgspec.Struct, frozen=True, array_like=True):
    """A file and its expected contents."""

    name: str
    """Path below the state location."""
    size: int
    digest: bytes
    rows: int
    bins: bytes = b""
    """Bins that have rows, ascending. Set when the file is committed, not stored in the lineage."""
    counts: tuple[int, ...] = ()
    """Number of rows of each of ``bins``."""

    @property
    def epoch(self) -> Epoch:
        """The epoch in which the file was written."""
        return _epoch_of(self.name)


class StateFiles:
    """The state files below one location. With ``durable``, a written file survives a power loss.

    >>> import tempfile
    >>> files = StateFiles(tempfile.mkdtemp())
    >>> author = Author("count", Epoch(3), Run(0), PartitionId(1), attempt=0)
    >>> ref = files.write(table_of([b"\\x07\\x00ann"], [b"5"]), FileKind.DELTA, author)
    >>> ref.name
    'count/0000000003-0-1-0-delta-....arrow'
    >>> files.read(ref).to_pylist()
    [{'key': b'\\x07\\x00ann', 'value': b'5'}]
    """

    def __init__(self, location: str, *, durable: bool = True) -> None:
        self.location = location
        self.durable = durable
        self._fs, self._root = filesystem_of(location)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateFiles) and (self.location, self.durable) == (other.location, other.durable)

    def __hash__(self) -> int:
        return hash((self.location, self.durable))

    def write(self, table: pa.Table, kind: FileKind, author: Author) -> FileRef:
        """Write rows that are ascending by key, atomically; return a reference to the file."""
        metadata = {"format": str(FORMAT), "kind": kind, **{name: str(value) for name, value in vars(author).items()}}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema.with_metadata(metadata)) as writer:
            writer.write_table(table.combine_chunks())
        data = sink.getvalue()
        digest = _digest(data)
        stem = f"{author.epoch:010d}-{author.run}-{author.partition}-{author.attempt}-{kind}"
        name = f"{folder_of(author.operator)}/{stem}-{digest[:8].hex()}.arrow"
        write_atomically(self._fs, self._path(name), data, durable=self.durable)
        bins, counts = np.unique(_first_bytes(table), return_counts=True)
        return FileRef(name, data.size, digest, table.num_rows, bins.tobytes(), tuple(counts.tolist()))

    def read(self, ref: FileRef) -> pa.Table:
        """The rows of a file. Raises an error unless the content is exactly what was written."""
        data = self._data(ref)
        if len(data) != ref.size or _digest(data) != ref.digest:
            raise CheckpointError(
                f"the state file {ref.name!r} in {self.location!r} is damaged: expected {ref.size} bytes with the "
                f"digest {ref.digest.hex()}, found {len(data)} bytes with the digest {_digest(data).hex()}. Restore it "
                f"from a copy",
                file=ref.name,
            )
        table = pa.ipc.open_file(data).read_all()
        found = (table.schema.metadata or {}).get(b"format", b"")
        require_format(int(found) if found.isdigit() else None, f"the file of state {ref.name!r} in {self.location!r}")
        if table.num_rows != ref.rows or not table.schema.equals(SCHEMA):
            raise CheckpointError(
                f"the state file {ref.name!r} in {self.location!r} was written by another version of midstream: "
                f"expected {ref.rows} rows of {SCHEMA.names}, found {table.num_rows} of {table.schema.names}",
                file=ref.name,
            )
        return table

    def names(self) -> list[str]:
        """The names of all files, sorted, including temporary files that were never completed."""
        selector = pafs.FileSelector(self._root, allow_not_found=True, recursive=True)
        found = [posixpath.relpath(info.path, self._root) for info in self._fs.get_file_info(selector) if info.is_file]
        return sorted(name for name in found if _NAME.fullmatch(name))

    def lacks(self, refs: Iterable[FileRef]) -> list[str]:
        """The names of files that are missing or have the wrong size. Content is not read."""
        wanted = {self._path(ref.name): ref for ref in refs}
        found = {info.path: info for info in self._fs.get_file_info(list(wanted))}
        return sorted(ref.name for path, ref in wanted.items() if found[path].size != ref.size)

    def copy(self, ref: FileRef, to: StateFiles) -> None:
        """Copy a file to another location, unless it is there."""
        if not to.lacks([ref]):
            return
        try:
            copy_file(self._fs, self._path(ref.name), to._fs, to._path(ref.name), durable=to.durable)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the state file {ref.name!r} is missing from {self.location!r}; restore it from a copy", file=ref.name
            ) from error

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; files that no longer exist are ignored."""
        for name in names:
            try:
                remove_file(self._fs, self._path(name))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CheckpointError(f"cannot remove {name!r} from {self.location!r}: {error}") from error

    def _data(self, ref: FileRef) -> pa.Buffer:
        try:
            with self._fs.open_input_file(self._path(ref.name)) as source:
                return source.read_buffer()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the state file {ref.name!r} is missing from {self.location!r}; expected {ref.size} bytes. The "
                f"checkpoint location must be storage that the driver and all executors share, and nothing but "
                f"midstream may remove files from it. Restore it from a copy",
                file=ref.name,
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"the state file {ref.name!r} cannot be read from {self.location!r}: {error}", file=ref.name
            ) from error

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)


def table_of(keys: Sequence[bytes], values: Sequence[bytes | None]) -> pa.Table:
    """Rows in the form that files store; the keys must be ascending.

    >>> table_of([b"a", b"b"], [b"1", None])["value"].to_pylist()
    [b'1', None]
    """
    arrays = [pa.array(keys, pa.large_binary()), pa.array(values, pa.large_binary())]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def bin_ranges(table: pa.Table) -> Iterator[tuple[BinId, int, int]]:
    """For each bin that has rows: the bin, its first row, and the row after its last.

    >>> list(bin_ranges(table_of([b"\\x02a", b"\\x02b", b"\\x07c"], [None] * 3)))
    [(2, 0, 2), (7, 2, 3)]
    """
    bounds = np.searchsorted(_first_bytes(table), np.arange(BINS + 1))
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        yield BinId(number), int(bounds[number]), int(bounds[number + 1])


def _first_bytes(table: pa.Table) -> npt.NDArray[np.uint8]:
    """The bin of each row."""
    column = table["key"].combine_chunks()
    if not len(column):
        return np.empty(0, np.uint8)
    offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column)]
    first: npt.NDArray[np.uint8] = np.frombuffer(column.buffers()[2], np.uint8)[offsets]
    return first


def epoch_and_operator(name: str) -> tuple[Epoch, str] | None:
    """The epoch in which a file was written and the folder of its operator, or None if the name is not a state file's.

    >>> epoch_and_operator("count/0000000003-0-1-0-delta-0123456789abcdef.arrow")
    (3, 'count')
    """
    match = _NAME.fullmatch(name)
    return (Epoch(int(match["epoch"])), match["operator"]) if match else None


def _epoch_of(name: str) -> Epoch:
    found = epoch_and_operator(name)
    if found is None:
        raise CheckpointError(f"{name!r} is not the name of a state file", file=name)
    return found[0]


def folder_of(operator: str) -> str:
    """A valid folder name for any operator name, short enough for every file system.

    >>> folder_of("FC"), folder_of("a/b"), len(folder_of("ä" * 100))
    ('FC', 'a%2Fb', 97)
    """
    quoted = quote(operator, safe=" ").replace(".", "%2E")
    if len(quoted) <= 100:
        return quoted
    return f"{quoted[:80]}-{hashlib.sha256(operator.encode()).hexdigest()[:16]}"


def _digest(data: pa.Buffer) -> bytes:
    # SHA-256 because processors have instructions for it: twice as fast here as BLAKE2. Half of it is enough.
    return hashlib.sha256(data).digest()[:_DIGEST_SIZE]
