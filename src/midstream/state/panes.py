"""Rows stored by time and key: the state of each side of a join.

A *pane* holds the rows of one key in one time range. Its stored key is ``bin, namespace, start of the range, key``, so
the panes of a bin sort by time, and one range scan finds those that are over.

Rows are appended to a pane as bytes, without decoding its content. When a pane grows large, its rows move to *segments*
beside it, which are never rewritten. So appending costs at most :data:`SEGMENT` bytes more than the appended rows,
however many rows the key has.

======= ========================================= ==================================================================
entry   stored key                                value
======= ========================================= ==================================================================
pane    made by ``timer_key``                       rows; if there are segments, preceded by four zero bytes and the
                                                  number of segments (4 bytes)
segment the pane's, then its number (4 bytes)     rows
latest  bin, ``JOIN_LATEST``, namespace of panes  start of the latest pane written (event time moves forward, so most
                                                  panes that a task asks for are later, and need no lookup), then a
                                                  digest of the pane layout
======= ========================================= ==================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.schema import to_ddl
from midstream.errors import StateError
from midstream.ids import BinId
from midstream.state.integers import integer_bytes, integer_of
from midstream.state.keys import Namespace
from midstream.state.task import TaskState

__all__ = ["SEGMENT", "EncodedRows", "Panes", "RowCodec"]

SEGMENT = 16_384
"""Size in bytes above which a pane moves rows to a new segment."""

_NUMBER = 4
_SEGMENTED = bytes(_NUMBER)  # no row starts with zeros: its size comes first
_Integers = npt.NDArray[np.int64]


class EncodedRows:
    """Rows as contiguous bytes; ``offsets`` has the start of each row and the end of the last."""

    def __init__(self, data: bytes, offsets: _Integers) -> None:
        self.data = data
        self.offsets = offsets


class RowCodec:
    """Encodes rows of one schema as bytes and back, whole batches at a time.

    A row is a struct (its size, its nulls, the fixed-width values, the sizes of the others), followed by the string and
    binary values. Rows can be concatenated, and the bytes of many panes are decoded together. The nested columns of a
    row (arrays, maps, structs) are encoded as one Arrow message, which costs a few microseconds per row; no other
    column needs Python code per row.

    State on disk contains these bytes; a unit test pins examples.

    >>> codec = RowCodec(pa.schema({"user": pa.string(), "n": pa.int64()}))
    >>> batch = pa.record_batch({"user": ["ann", None], "n": [1, 2]}, schema=codec.schema)
    >>> rows = codec.encode(batch).data
    >>> found, counts = codec.decode([rows, b"", rows])
    >>> found.to_pylist() == 2 * batch.to_pylist(), counts.tolist()
    (True, [2, 0, 2])
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        kinds = [field.type for field in schema]
        self._fixed = [index for index, kind in enumerate(kinds) if _width(kind)]
        self._texts = [index for index, kind in enumerate(kinds) if _is_text(kind)]
        nested = [index for index in range(len(kinds)) if index not in {*self._fixed, *self._texts}]
        self._nested = pa.schema([schema.field(index) for index in nested])
        # After the texts, the nested columns of a row form one more binary value; columns are numbered by position.
        self._varying = [*self._texts, *([len(kinds)] if nested else [])]
        self._struct = np.dtype(
            [("size", "<u4"), ("nulls", "u1", ((len(kinds) + 7) // 8,))]
            + [(f"value{index}", f"V{_width(kinds[index])}") for index in self._fixed]
            + [(f"size{index}", "<u4") for index in self._varying]
        )

    def encode(self, batch: pa.RecordBatch) -> EncodedRows:
        """The bytes of each row."""
        structs = np.zeros(batch.num_rows, self._struct)
        structs["nulls"] = self._null_bits(batch)
        for index in self._fixed:
            structs[f"value{index}"] = _raw(batch.column(index))
        parts = [pc.fill_null(batch.column(index).cast(pa.large_binary()), b"") for index in self._texts]
        if len(self._nested):
            parts.append(self._messages(batch))
        sizes = np.full(batch.num_rows, self._struct.itemsize, np.int64)
        for index, part in zip(self._varying, parts, strict=True):
            lengths = pc.binary_length(part).to_numpy()
            structs[f"size{index}"] = lengths
            sizes += lengths
        structs["size"] = sizes
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        if not parts or not batch.num_rows:
            return EncodedRows(structs.tobytes(), offsets)
        heads = _binaries(structs.tobytes(), np.arange(batch.num_rows + 1) * self._struct.itemsize)
        rows = pc.binary_join_element_wise(heads, *parts, pa.scalar(b"", pa.large_binary()))
        return EncodedRows(rows.buffers()[2].to_pybytes(), offsets)

    def decode(self, values: Sequence[bytes]) -> tuple[pa.RecordBatch, _Integers]:
        """The rows of many values, in order, and the number of rows of each value."""
        data = b"".join(values)
        if not data:
            return pa.RecordBatch.from_pylist([], self.schema), np.zeros(len(values), np.int64)
        ends = np.cumsum(np.fromiter(map(len, values), np.int64, len(values)))
        starts = self._row_starts(data, ends)
        # View the data as if a struct started at every byte, and let numpy pick the real starts.
        everywhere = np.ndarray((len(data) - self._struct.itemsize + 1,), self._struct, data, strides=(1,))
        structs = everywhere[starts]
        counts = np.diff(np.searchsorted(starts, ends), prepend=0)
        return self._rows(data, starts, structs), counts

    def _row_starts(self, data: bytes, ends: _Integers) -> _Integers:
        if not self._varying:
            return np.arange(0, len(data), self._struct.itemsize)
        sizes = np.ndarray((len(data) - 3,), "<u4", data, strides=(1,))
        # Step from row to row in all values at once: as many steps as the longest value has rows.
        at = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        at, ends = at[at < ends], ends[at < ends]
        found = []
        while len(at):
            found.append(at)
            at = at + sizes[at]
            left = at < ends
            if not left.all():
                at, ends = at[left], ends[left]
        return np.sort(np.concatenate(found))

    def _rows(self, data: bytes, starts: _Integers, structs: npt.NDArray[np.void]) -> pa.RecordBatch:
        nulls = np.unpackbits(structs["nulls"], axis=1, count=len(self.schema), bitorder="little").astype(np.bool_)
        columns: dict[int, pa.Array] = {}
        for index in self._fixed:
            kind = self.schema.field(index).type
            columns[index] = _from_raw(structs[f"value{index}"], kind, nulls[:, index])
        varying = self._varying_values(data, starts, structs)
        for index, values in zip(self._texts, varying, strict=False):
            masked = values if not nulls[:, index].any() else pc.if_else(pa.array(nulls[:, index]), None, values)
            columns[index] = masked.cast(self.schema.field(index).type)
        if len(self._nested):
            # Copied to bytes, because Arrow requires aligned messages.
            parts = [pa.ipc.read_record_batch(pa.py_buffer(data), self._nested) for data in varying[-1].to_pylist()]
            for field, column in zip(self._nested, pa.concat_batches(parts).columns, strict=True):
                columns[self.schema.get_field_index(field.name)] = column
        return pa.RecordBatch.from_arrays([columns[index] for index in range(len(self.schema))], schema=self.schema)

    def _varying_values(self, data: bytes, starts: _Integers, structs: npt.NDArray[np.void]) -> list[pa.Array]:
        """One array per variable-width column: cut the data at all bounds, and take every n-th piece."""
        pieces = 1 + len(self._varying)
        sizes = [structs[f"size{index}"] for index in self._varying[:-1]]
        bounds = np.stack([starts, *np.cumsum([starts + self._struct.itemsize, *sizes], axis=0)][:pieces], axis=1)
        cut = _binaries(data, np.append(bounds, len(data)))
        return [cut.take(pa.array(np.arange(number, len(cut), pieces))) for number in range(1, pieces)]

    def _null_bits(self, batch: pa.RecordBatch) -> npt.NDArray[np.uint8]:
        nulls = np.zeros((batch.num_rows, len(self.schema)), np.bool_)
        for index, column in enumerate(batch.columns):
            if column.null_count:
                nulls[:, index] = column.is_null().to_numpy(zero_copy_only=False)
        return np.packbits(nulls, axis=1, bitorder="little")

    def _messages(self, batch: pa.RecordBatch) -> pa.Array:
        nested = batch.select(self._nested.names)
        messages = [nested.slice(row, 1).serialize().to_pybytes() for row in range(nested.num_rows)]
        return pa.array(messages, pa.large_binary())


class Panes:
    """The panes of one side of a join, identified by their stored keys, ascending.

    ``layout`` describes the panes in words; state with other columns or another layout is refused.
    """

    def __init__(
        self, state: TaskState, schema: pa.Schema, namespace: Namespace, segments: Namespace, layout: str, what: str
    ) -> None:
        self.codec = RowCodec(schema)
        self.namespace = namespace
        self._state = state
        self._space = state.space
        self._segments = segments
        text = f"{to_ddl(schema)}; {layout}"
        self._digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        bins = sorted(state.bins)
        stored = zip(bins, state.get_many([self._latest_key(number) for number in bins]), strict=True)
        found = {number: latest for number, latest in stored if latest is not None}
        self._latest = {number: latest[:8] for number, latest in found.items()}
        if any(latest[8:] != self._digest for latest in found.values()):
            raise StateError(
                f"{what}: its state was written with other columns, keys or times than it has now: {text}. Give the "
                f"join another name, so that it starts without state, or revert the change"
            )

    @property
    def latest(self) -> int | None:
        """The start of the latest pane in state; None if there is none."""
        return integer_of(max(self._latest.values())) if self._latest else None

    @staticmethod
    def rows_in(head: bytes) -> bytes:
        """The rows of a pane that are not in segments."""
        return _split(head)[1]

    def read(self, keys: Sequence[bytes]) -> tuple[pa.RecordBatch, _Integers]:
        """All rows of some panes, and for each row the index of its pane."""
        heads = self._state.get_many(keys)
        owners = [index for index, head in enumerate(heads) if head is not None]
        values = [head for head in heads if head is not None]
        more: list[tuple[bytes, int]] = []
        for index, head in enumerate(values):
            if head.startswith(_SEGMENTED):
                count, values[index] = _split(head)
                owner = owners[index]
                more += [(self._segment_key(keys[owner], number), owner) for number in range(count)]
        if more:
            values += self._state.get_many([key for key, _ in more])  # type: ignore[arg-type]  # segments always exist
            owners += [owner for _, owner in more]
        rows, counts = self.codec.decode(values)
        return rows, np.repeat(np.array(owners, np.int64), counts)

    def add(self, keys: Sequence[bytes], rows: EncodedRows, starts: _Integers, stops: _Integers) -> None:
        """Append the rows from ``starts`` to ``stops`` to each pane."""
        offsets, data = rows.offsets, rows.data
        firsts, lasts = offsets[starts].tolist(), offsets[stops].tolist()
        heads = [
            data[first:last] if head is None else head + data[first:last]
            for head, first, last in zip(self._state.get_many(keys), firsts, lasts, strict=True)
        ]
        for index, head in enumerate(heads):
            if len(head) > SEGMENT:
                own = offsets[starts[index] : stops[index] + 1] - lasts[index]
                heads[index] = self._cut(keys[index], head, own + len(head))
        self._state.put_many(keys, heads)
        # The keys of a bin sort by time, so its last key is the latest.
        at = slice(self._space.head, self._space.head + 8)
        latest = {self._space.bin_of(key): key[at] for key in keys}
        later = {number: time for number, time in latest.items() if time > self._latest.get(number, b"")}
        self._latest |= later
        values = [time + self._digest for time in later.values()]
        self._state.put_many([self._latest_key(number) for number in later], values)

    def bins_over(self, before: int) -> list[BinId]:
        """The bins with entries for panes that start before a time, ascending."""
        stop = integer_bytes(before)
        latest = (number for number, time in self._latest.items() if time < stop)
        return sorted({*self._state.occupied(self.namespace, stop), *latest})

    def over(self, bin_id: BinId, before: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """All entries of panes that start before a time: stored key, pane name, rows.

        The pane name is time and key, so the panes of both sides for the same key and time have the same name.
        """
        stop = integer_bytes(before)
        for key, value in self._state.scan(bin_id, self.namespace, stop=stop):
            yield key, key[self._space.head :], _split(value)[1]
        for key, value in self._state.scan(bin_id, self._segments, stop=stop):
            yield key, key[self._space.head : -_NUMBER], value

    def keys_over(self, bin_id: BinId, before: int) -> list[bytes]:
        """The stored keys of the entries that :meth:`over` returns, and of the bin's latest pane if it is over."""
        stop = integer_bytes(before)
        keys = [key for key, _ in self._state.scan(bin_id, self.namespace, stop=stop)]
        keys += [key for key, _ in self._state.scan(bin_id, self._segments, stop=stop)]
        if self._latest.get(bin_id, stop) < stop:
            keys.append(self._latest_key(bin_id))
        return keys

    def _cut(self, key: bytes, head: bytes, bounds: _Integers) -> bytes:
        """Move rows to segments and return the rest. ``bounds`` are the row boundaries, including the end."""
        count, rows = _split(head)
        bounds = bounds - (len(head) - len(rows))
        keys, segments, start = [], [], 0
        while len(rows) - start > SEGMENT:
            stop = int(bounds[np.searchsorted(bounds, start + SEGMENT)])
            keys.append(self._segment_key(key, count))
            segments.append(rows[start:stop])
            count, start = count + 1, stop
        self._state.put_many(keys, segments)
        return _SEGMENTED + count.to_bytes(_NUMBER, "big") + rows[start:]

    def _segment_key(self, key: bytes, number: int) -> bytes:
        head = self._space.head
        return b"%b%c%b%b" % (key[: head - 1], self._segments, key[head:], number.to_bytes(_NUMBER, "big"))

    def _latest_key(self, bin_id: BinId) -> bytes:
        return self._space.prefix(bin_id, Namespace.JOIN_LATEST) + bytes([self.namespace])


def _split(head: bytes) -> tuple[int, bytes]:
    """The number of segments of a pane, and its rows outside segments."""
    if not head.startswith(_SEGMENTED):
        return 0, head
    return int.from_bytes(head[_NUMBER : 2 * _NUMBER], "big"), head[2 * _NUMBER :]


def _width(kind: pa.DataType) -> int:
    """Size of a value in bytes; 0 if it varies."""
    if pa.types.is_boolean(kind):
        return 1
    return kind.bit_width // 8 if pa.types.is_primitive(kind) or pa.types.is_decimal(kind) else 0


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _raw(column: pa.Array) -> npt.NDArray[np.void]:
    """The raw bytes of each value; zeros for nulls, where Arrow may have anything."""
    kind = column.type
    dtype = np.dtype(f"V{_width(kind)}")
    if pa.types.is_boolean(kind):
        values: npt.NDArray[np.void] = column.cast(pa.uint8()).fill_null(0).to_numpy().view(dtype)
    else:
        values = np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]
    if column.null_count:
        values = values.copy()
        values[column.is_null().to_numpy(zero_copy_only=False)] = np.zeros(1, dtype)
    return values


def _from_raw(values: npt.NDArray[np.void], kind: pa.DataType, nulls: npt.NDArray[np.bool_]) -> pa.Array:
    valid = pa.py_buffer(np.packbits(~nulls, bitorder="little")) if nulls.any() else None
    data = np.ascontiguousarray(values).view(np.uint8)
    if pa.types.is_boolean(kind):
        data = np.packbits(data, bitorder="little")
    return pa.Array.from_buffers(kind, len(nulls), [valid, pa.py_buffer(data)])


def _binaries(data: bytes, offsets: _Integers) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
