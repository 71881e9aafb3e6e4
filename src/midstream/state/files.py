"""State files in the checkpoint location: the changes of tasks (deltas) and whole bins (snapshots).

Each is an Arrow IPC file with the columns ``key`` (bin, namespace and key in one, see :mod:`.keys`) and ``value`` (null
means deleted), ascending by key, so the rows of a bin are contiguous. The name contains operator, epoch, run,
partition, attempt and part of the digest. So no file can be overwritten with different content, not even by a task of
an earlier driver process. A :class:`FileRef` records the expected size and digest; reading checks both. A large file
has an index (:mod:`.file_index`), with which some of its bins can be read, and checked, alone.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from midstream.data.key_space import BinNumbers, KeySpace
from midstream.errors import CheckpointError
from midstream.ids import BinId, Epoch, PartitionId, Run
from midstream.state.file_index import BLOCK, Block, FileIndex, digest_of, index_in, write_indexed
from midstream.storage.blobs import copy_file, filesystem_of, remove_file, write_atomically
from midstream.storage.documents import FORMAT, require_format

__all__ = [
    "SCHEMA",
    "Author",
    "FileKind",
    "FileRef",
    "StateFiles",
    "bin_ranges",
    "bytes_by_bin",
    "epoch_and_operator",
    "folder_of",
    "rows_of_bins",
    "table_of",
]

SCHEMA = pa.schema([pa.field("key", pa.large_binary(), nullable=False), pa.field("value", pa.large_binary())])
"""Columns of every state file."""

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
    """Bins that have rows, ascending and packed (:meth:`.KeySpace.pack`). Not stored in the lineage."""
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

    def __init__(self, location: str, *, durable: bool = True, space: KeySpace = KeySpace()) -> None:  # noqa: B008
        self.location = location
        self.durable = durable
        self.space = space
        self._fs, self._root = filesystem_of(location)

    @property
    def _identity(self) -> tuple[str, bool, KeySpace]:
        return self.location, self.durable, self.space

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateFiles) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def write(self, table: pa.Table, kind: FileKind, author: Author) -> FileRef:
        """Write rows that are ascending by key, atomically; return a reference to the file."""
        metadata = {"format": str(FORMAT), "kind": kind, **{name: str(value) for name, value in vars(author).items()}}
        table = table.combine_chunks()
        numbers, counts = np.unique(self.space.bins_of_stored(_keys(table)), return_counts=True)
        if table.nbytes < BLOCK:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, table.schema.with_metadata(metadata)) as writer:
                writer.write_table(table)
            data = sink.getvalue()
            digest = digest_of(data)
        else:
            data, digest = write_indexed(table, numbers, counts, metadata, FORMAT, self.space)
        stem = f"{author.epoch:010d}-{author.run}-{author.partition}-{author.attempt}-{kind}"
        name = f"{folder_of(author.operator)}/{stem}-{digest[:8].hex()}.arrow"
        write_atomically(self._fs, self._path(name), data, durable=self.durable, checked=True)
        return FileRef(name, data.size, digest, table.num_rows, self.space.pack(numbers), tuple(counts.tolist()))

    def read(self, ref: FileRef) -> pa.Table:
        """The rows of a file. Raises an error unless the content is exactly what was written."""
        with self._opened(ref) as source:
            index = self._index(ref, source)
            if index is None:
                return self._small(ref, source)
            return pa.Table.from_batches([self._block(ref, source, block) for block in index.blocks], SCHEMA)

    def read_bins(self, ref: FileRef, bins: Collection[BinId]) -> Iterator[pa.Table]:
        """The rows of some bins, ascending, in parts of about a megabyte. Of a large file only these bins are read.

        Raises an error unless what is read is exactly what was written.
        """
        with self._opened(ref) as source:
            index = self._index(ref, source)
            if index is None:
                rows = rows_of_bins(self._small(ref, source), bins, self.space)
                if rows.num_rows:
                    yield rows
                return
            for block, ranges in index.ranges(bins):
                batch = self._block(ref, source, block)
                parts = [batch.slice(start, stop - start) for start, stop in ranges]
                yield pa.Table.from_batches(parts, SCHEMA)

    def _index(self, ref: FileRef, source: pa.NativeFile) -> FileIndex | None:
        """The index of a large file, checked; None for a small file."""
        if (
            ref.size < BLOCK // 2
        ):  # with a margin, as Arrow may leave out parts of the memory that a block is measured by
            return None
        found = index_in(source.size(), source.read_at, self.space)
        if found is None:
            return None  # written before there were indexes, or damaged: then the digest of all bytes tells
        index, digest = found
        if source.size() != ref.size or digest != ref.digest:
            raise self._damaged(ref, source.size(), digest)
        self._require_ours(ref, index.format, index.rows, SCHEMA)
        return index

    def _block(self, ref: FileRef, source: pa.NativeFile, block: Block) -> pa.RecordBatch:
        data = pa.py_buffer(source.read_at(block.size, block.offset))
        if len(data) != block.size or digest_of(data) != block.digest:
            raise self._damaged(ref, source.size(), ref.digest, f" in the block at byte {block.offset}")
        return pa.ipc.read_record_batch(data, SCHEMA)

    def _small(self, ref: FileRef, source: pa.NativeFile) -> pa.Table:
        source.seek(0)  # Arrow wants it after read_at
        data = source.read_buffer()
        if len(data) != ref.size or digest_of(data) != ref.digest:
            raise self._damaged(ref, len(data), digest_of(data))
        table = pa.ipc.open_file(data).read_all()
        found = (table.schema.metadata or {}).get(b"format", b"")
        self._require_ours(ref, int(found) if found.isdigit() else None, table.num_rows, table.schema)
        return table

    def _require_ours(self, ref: FileRef, format_: int | None, rows: int, schema: pa.Schema) -> None:
        require_format(format_, f"the file of state {ref.name!r} in {self.location!r}")
        if rows != ref.rows or not schema.equals(SCHEMA):
            raise CheckpointError(
                f"the state file {ref.name!r} in {self.location!r} was written by another version of midstream: "
                f"expected {ref.rows} rows of {SCHEMA.names}, found {rows} of {schema.names}",
                file=ref.name,
            )

    def _damaged(self, ref: FileRef, size: int, digest: bytes, where: str = "") -> CheckpointError:
        return CheckpointError(
            f"the state file {ref.name!r} in {self.location!r} is damaged{where}: expected {ref.size} bytes with the "
            f"digest {ref.digest.hex()}, found {size} bytes with the digest {digest.hex()}. Restore it from a copy",
            file=ref.name,
        )

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

    @contextmanager
    def _opened(self, ref: FileRef) -> Iterator[pa.NativeFile]:
        try:
            with self._fs.open_input_file(self._path(ref.name)) as source:
                yield source
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


def bin_ranges(table: pa.Table, space: KeySpace = KeySpace()) -> Iterator[tuple[BinId, int, int]]:  # noqa: B008
    """For each bin that has rows: the bin, its first row, and the row after its last.

    >>> list(bin_ranges(table_of([b"\\x02a", b"\\x02b", b"\\x07c"], [None] * 3)))
    [(2, 0, 2), (7, 2, 3)]
    """
    numbers, starts, stops = _ranges(table, space)
    for number, start, stop in zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True):
        yield BinId(number), start, stop


def rows_of_bins(table: pa.Table, wanted: Collection[BinId], space: KeySpace) -> pa.Table:
    """The rows of some bins, without copying them."""
    numbers, starts, stops = _ranges(table, space)
    chosen = np.isin(numbers, np.fromiter(wanted, np.int64))
    if chosen.all():
        return table
    parts = zip(starts[chosen].tolist(), stops[chosen].tolist(), strict=True)
    return pa.concat_tables([table.slice(0, 0), *(table.slice(start, stop - start) for start, stop in parts)])


def bytes_by_bin(table: pa.Table, space: KeySpace) -> list[int]:
    """Bytes of keys and values of each bin that has rows, ascending by bin."""
    table = table.combine_chunks()
    _, starts, stops = _ranges(table, space)
    sizes = np.zeros(len(starts), np.int64)
    for name in SCHEMA.names if len(starts) else ():
        column = table[name].chunk(0)
        offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column) + 1]
        sizes += offsets[stops] - offsets[starts]
    return sizes.tolist()


def _ranges(table: pa.Table, space: KeySpace) -> tuple[BinNumbers, BinNumbers, BinNumbers]:
    """The bins that have rows, their first rows, and the rows after their last."""
    numbers = space.bins_of_stored(_keys(table))
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return numbers[starts], starts, np.append(starts[1:], len(numbers))[: len(starts)]


def _keys(table: pa.Table) -> pa.Array:
    column = table["key"].combine_chunks()
    return column


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
