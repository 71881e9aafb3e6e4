"""The index of a large state file: where its blocks are, which bins they hold, and a digest of each.

A task that takes a few bins from a large file reads, and checks, only the blocks with these bins. The index lies
between the last record batch of an Arrow IPC file and its footer, where readers of Arrow files do not look::

        schema, an empty record batch, one record batch per block, index, its length (8 bytes), MAGIC, Arrow's footer

The digest of such a file is that of its index, which has the digests of all blocks: so the digest still stands for
every row. Small files have no index; their digest is that of all bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.data.key_space import BinNumbers, KeySpace

__all__ = ["BLOCK", "Block", "FileIndex", "digest_of", "index_in", "write_indexed"]

BLOCK = 1 << 20
"""Bytes of rows in a block. A file with fewer has no index."""

MAGIC = b"midstrix"
_TAIL = 1 << 16
_END = 8 + len(MAGIC)
_EOS = 8  # Arrow's mark for the end of a stream, before the footer
_DIGEST_SIZE = 16
_Integers = npt.NDArray[np.int64]


def digest_of(data: pa.Buffer | bytes) -> bytes:
    """The digest of a file or a part of one."""
    # SHA-256 because processors have instructions for it: twice as fast here as BLAKE2. Half of it is enough.
    return hashlib.sha256(data).digest()[:_DIGEST_SIZE]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """One record batch: the bytes it takes in the file, and its rows."""

    offset: int
    size: int
    rows: int
    digest: bytes


class _StoredIndex(msgspec.Struct, frozen=True, array_like=True):
    format: int
    blocks: tuple[Block, ...]
    bins: bytes
    counts: bytes


@dataclass(frozen=True)
class FileIndex:
    """The blocks of a file, and the rows of each bin."""

    format: int
    blocks: tuple[Block, ...]
    bins: BinNumbers
    counts: _Integers

    @cached_property
    def _starts(self) -> _Integers:
        """The first row of each block, and the number of all rows."""
        return np.concatenate([[0], np.cumsum([block.rows for block in self.blocks])]).astype(np.int64)

    @property
    def rows(self) -> int:
        """The number of rows of the file."""
        return int(self._starts[-1])

    def ranges(self, bins: Iterable[int]) -> Iterator[tuple[Block, list[tuple[int, int]]]]:
        """The blocks that have rows of some bins, in order, each with the ranges of these rows within it."""
        wanted = np.isin(self.bins, np.fromiter(bins, np.int64))
        ends = np.cumsum(self.counts)
        rows = _joined_ranges((ends - self.counts)[wanted], ends[wanted])
        for number, block in enumerate(self.blocks):
            first, behind = int(self._starts[number]), int(self._starts[number + 1])
            parts = [(max(a, first) - first, min(b, behind) - first) for a, b in rows if a < behind and b > first]
            if parts:
                yield block, parts

    def encode(self, space: KeySpace) -> bytes:
        """The bytes of the index."""
        counts = self.counts.astype("<u8").tobytes()
        return msgspec.msgpack.encode(_StoredIndex(self.format, self.blocks, space.pack(self.bins), counts))

    @classmethod
    def decode(cls, data: bytes, space: KeySpace) -> FileIndex:
        """The index that :meth:`encode` was given."""
        stored = msgspec.msgpack.decode(data, type=_StoredIndex)
        counts = np.frombuffer(stored.counts, "<u8").astype(np.int64)
        return cls(stored.format, stored.blocks, space.unpack(stored.bins), counts)


def write_indexed(
    rows: pa.Table, bins: BinNumbers, counts: _Integers, metadata: dict[str, str], format_: int, space: KeySpace
) -> tuple[pa.Buffer, bytes]:
    """The bytes of a file with an index, and its digest. ``rows`` are one chunk, of the given bins."""
    sink = pa.BufferOutputStream()
    [batch] = rows.to_batches()
    batch = batch.replace_schema_metadata(metadata)
    spans: list[tuple[int, int, int]] = []
    with pa.ipc.new_file(sink, batch.schema) as writer:
        # Only now is the schema written, and the offset of the first block known.
        writer.write_batch(pa.RecordBatch.from_pylist([], batch.schema))
        for start, stop in _cuts(batch.num_rows, rows.nbytes, np.cumsum(counts)):
            at = sink.tell()
            writer.write_batch(batch.slice(start, stop - start))
            spans.append((at, sink.tell() - at, stop - start))
        end = sink.tell()
    data = sink.getvalue()
    blocks = tuple(Block(at, size, count, digest_of(data.slice(at, size))) for at, size, count in spans)
    index = FileIndex(format_, blocks, bins, counts).encode(space)
    # Arrow's footer has the offsets of the batches, which lie before the index: it may move.
    parts = [data.slice(0, end), index, len(index).to_bytes(8, "little"), MAGIC, data.slice(end)]
    return pa.py_buffer(b"".join(parts)), digest_of(index)


def index_in(size: int, read_at: Callable[[int, int], bytes], space: KeySpace) -> tuple[FileIndex, bytes] | None:
    """The index of a file, and its digest; None if the file has none. ``read_at`` takes a size and an offset."""
    tail = read_at(min(size, _TAIL), size - min(size, _TAIL))
    footer = int.from_bytes(tail[-10:-6], "little", signed=True)  # before Arrow's last six bytes, which are its magic
    end = len(tail) - 10 - footer - _EOS
    if not 0 < footer < size or (end < _END and len(tail) == size):
        return None
    if end < _END:
        wanted = min(size, footer + _TAIL)
        tail = read_at(wanted, size - wanted)
        end = len(tail) - 10 - footer - _EOS
    if tail[end - len(MAGIC) : end] != MAGIC:
        return None
    length = int.from_bytes(tail[end - _END : end - len(MAGIC)], "little")
    if length > size:
        return None
    if length > end - _END:
        missing = length - (end - _END)
        start = size - len(tail) - missing
        if start < 0:
            return None
        data = read_at(missing, start) + tail[: end - _END]
    else:
        data = tail[end - _END - length : end - _END]
    try:
        return FileIndex.decode(data, space), digest_of(data)
    except (msgspec.MsgspecError, ValueError):
        return None


def _cuts(rows: int, nbytes: int, ends: _Integers) -> Iterator[tuple[int, int]]:
    """Cut rows into blocks: where a bin ends if that is near, else within the bin."""
    per_block = max(1, rows * BLOCK // max(1, nbytes))
    start = 0
    while start < rows:
        stop = min(rows, start + per_block)
        # The last end of a bin in the second half of the block, so that few bins lie in two blocks.
        at = int(np.searchsorted(ends, stop, side="right")) - 1
        if at >= 0 and ends[at] > start + per_block // 2:
            stop = int(ends[at])
        yield start, stop
        start = stop


def _joined_ranges(starts: _Integers, ends: _Integers) -> list[tuple[int, int]]:
    """Ascending ranges, with neighbours made one."""
    if not len(starts):
        return []
    apart = np.flatnonzero(starts[1:] != ends[:-1])
    firsts = starts[np.concatenate([[0], apart + 1])]
    lasts = ends[np.concatenate([apart, [len(ends) - 1]])]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
