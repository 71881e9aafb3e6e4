"""Encodes key columns as bytes and back, whole batches at a time.

A stored key is ``bin + namespace (1 byte) + key columns``. The bin takes one byte, or two if there are more than 256
(:mod:`midstream.data.key_space`). The encoding depends on the values, not on how
Arrow stores them, so equal keys have equal bytes whatever the width of the column. The column types decode it:

=============================== ======================================================================
integer, boolean, date, time    8 bytes, big-endian, sign flipped, so that bytes sort like the values
decimal                         16 bytes of the unscaled value, encoded in the same way
string, binary                  its bytes, after their length in 2 bytes unless it is the last column
=============================== ======================================================================

State on disk contains these bytes, so the encoding must never change; a unit test pins examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.hashing import bins_of, hash_columns
from midstream.data.key_space import NARROW, KeySpace
from midstream.data.rows import from_rows
from midstream.data.schema import check_key_columns, type_name
from midstream.errors import StateError
from midstream.state.integers import integer_bytes, integer_matrix, integer_of, sign_flipped

__all__ = [
    "MAX_KEY",
    "MAX_STORED_KEY",
    "DistinctKeys",
    "Namespace",
    "SortedKeys",
    "decode_key",
    "distinct_keys",
    "encode_key",
    "encode_keys",
    "group_keys",
    "item_key",
    "key_sizes",
    "split_item",
    "split_timer",
    "timer_key",
]

MAX_KEY = 480
"""Most bytes that the key columns of one row may take."""

MAX_STORED_KEY = 511
"""Most bytes of a stored key: LMDB's limit. The rest is for bin and namespace, a timer's time or a view's item."""

_EPOCH = datetime(1970, 1, 1)
_EXACT = Context(prec=38)

_Matrix = npt.NDArray[np.uint8]


class Namespace(IntEnum):
    """The purpose of a stored key; separates the values, timers and views of one bin."""

    VALUE = 0
    LIST = 1
    MAP = 2
    EVENT_TIMER = 3
    CLOCK_TIMER = 4
    EXPIRY = 5
    WRITTEN = 6
    MIGRATED = 7
    WINDOW = 10
    SESSION_END = 11
    JOIN_LEFT = 20
    JOIN_RIGHT = 21
    JOIN_LEFT_MORE = 22
    JOIN_RIGHT_MORE = 23
    JOIN_WAITING = 24
    JOIN_LATEST = 25
    JOIN_RIGHT_WAITING = 26
    JOIN_DIVIDED = 27
    TABLE = 30
    TABLE_PAST = 31


@dataclass(frozen=True)
class SortedKeys:
    """The distinct keys of a batch, and the key of each row."""

    keys: list[bytes]
    """Distinct stored keys, ascending, because the base reads them fastest in that order."""
    group_of_row: npt.NDArray[np.int64]
    """Index into ``keys``, one per row."""
    distinct: pa.RecordBatch
    """The key columns, one row per key of ``keys``."""


@dataclass(frozen=True)
class DistinctKeys:
    """The distinct keys of a batch as Arrow arrays, in the order of their first rows."""

    stored: pa.Array
    """Stored keys."""
    first_row: npt.NDArray[np.int64]
    """The first row of each key, ascending."""
    group_of_row: npt.NDArray[np.int64]
    """Index into ``stored``, one per row."""


def encode_keys(
    batch: pa.RecordBatch,
    columns: Sequence[str],
    what: str,
    namespace: Namespace = Namespace.VALUE,
    space: KeySpace = NARROW,
) -> list[bytes]:
    """The stored key of each row; ``what`` names the operator in errors.

    >>> narrow = pa.record_batch({"k": pa.array([7], pa.int32())})
    >>> wide = pa.record_batch({"k": pa.array([7], pa.int64())})
    >>> encode_keys(narrow, ["k"], "process 'p'") == encode_keys(wide, ["k"], "process 'p'")
    True
    >>> encode_keys(pa.record_batch({"k": ["ann", None]}), ["k"], "process 'p'")
    Traceback (most recent call last):
    ...
    midstream.errors.StateError: process 'p': the key column 'k' is null in row 1; a null cannot be a key. Before this
    operator, filter such rows out or replace the null in a map
    """
    check_key_columns(batch.schema, columns, what)
    keys: list[bytes] = _stored(batch, columns, what, namespace, space).to_pylist()
    return keys


def encode_key(
    values: Sequence[Any],
    schema: pa.Schema,
    what: str,
    namespace: Namespace = Namespace.VALUE,
    space: KeySpace = NARROW,
) -> bytes:
    """The stored key of one tuple of Python values; ``schema`` holds the key columns only.

    >>> schema = pa.schema({"user": pa.string()})
    >>> encode_key(("ann",), schema, "process 'p'")[2:]
    b'ann'
    """
    if len(values) != len(schema):
        raise StateError(
            f"{what}: the key has the columns {', '.join(schema.names)}, but {len(values)} values were given: "
            f"{values!r}"
        )
    row = dict(zip(schema.names, values, strict=True))
    return encode_keys(from_rows([row], schema, what), schema.names, what, namespace, space)[0]


def item_key(key: bytes, namespace: Namespace, item: bytes = b"", space: KeySpace = NARROW) -> bytes:
    """The stored key of one item of a view of ``key``.

    All items of a key, and nothing else, start with ``item_key(key, namespace)``.

    >>> item_key(b"\\x07\\x00ann", Namespace.MAP, b"red")
    b'\\x07\\x02\\x00\\x03annred'
    """
    head = space.head
    return b"%b%c%b%b%b" % (key[: head - 1], namespace, (len(key) - head).to_bytes(2, "big"), key[head:], item)


def split_item(stored: bytes, space: KeySpace = NARROW) -> tuple[bytes, bytes]:
    """The value key and the item that :func:`item_key` was given.

    >>> split_item(item_key(b"\\x07\\x00ann", Namespace.MAP, b"red"))
    (b'\\x07\\x00ann', b'red')
    """
    start = space.head + 2
    end = start + int.from_bytes(stored[space.head : start], "big")
    return b"%b%c%b" % (stored[: space.width], Namespace.VALUE, stored[start:end]), stored[end:]


def timer_key(key: bytes, namespace: Namespace, time: int, space: KeySpace = NARROW) -> bytes:
    """The stored key of a timer of ``key``; the timers of a bin sort by time (microseconds).

    >>> timer_key(b"\\x07\\x00ann", Namespace.EVENT_TIMER, 5)
    b'\\x07\\x03\\x80\\x00\\x00\\x00\\x00\\x00\\x00\\x05ann'
    """
    return b"%b%c%b%b" % (key[: space.width], namespace, integer_bytes(time), key[space.head :])


def split_timer(stored: bytes, space: KeySpace = NARROW) -> tuple[int, bytes]:
    """The time and the value key that :func:`timer_key` was given.

    >>> split_timer(timer_key(b"\\x07\\x00ann", Namespace.EVENT_TIMER, -5))
    (-5, b'\\x07\\x00ann')
    """
    end = space.head + 8
    return integer_of(stored[space.head : end]), b"%b%c%b" % (stored[: space.width], Namespace.VALUE, stored[end:])


def decode_key(stored: bytes, schema: pa.Schema, space: KeySpace = NARROW) -> tuple[Any, ...]:
    """The Python values of a stored key; ``schema`` holds the key columns only.

    Times outside Python's range (years 1 to 9999) are returned as numbers.

    >>> schema = pa.schema({"user": pa.string(), "n": pa.int64()})
    >>> decode_key(encode_key(("ann", -1), schema, "process 'p'"), schema)
    ('ann', -1)
    """
    values: list[Any] = []
    at = space.head
    for index, field in enumerate(schema):
        size, at = _size_and_start(stored, at, field.type, last=index == len(schema) - 1)
        if at + size > len(stored):
            raise StateError(
                f"a stored key ends before its column {field.name!r}: {stored!r} is not a key of "
                f"({', '.join(schema.names)})"
            )
        values.append(_decoded(stored[at : at + size], field.type))
        at += size
    if at != len(stored):
        raise StateError(f"a stored key has {len(stored) - at} bytes too many: {stored!r} ({', '.join(schema.names)})")
    return tuple(values)


def group_keys(
    batch: pa.RecordBatch,
    columns: Sequence[str],
    what: str,
    namespace: Namespace = Namespace.VALUE,
    space: KeySpace = NARROW,
) -> SortedKeys:
    """The distinct keys of a batch. Only these are hashed and encoded; no Python code runs per row.

    >>> groups = group_keys(pa.record_batch({"k": ["b", "a", "b"]}), ["k"], "process 'p'")
    >>> [groups.keys[index][2:] for index in groups.group_of_row]
    [b'b', b'a', b'b']
    """
    found = distinct_keys(batch, columns, what, namespace, space)
    order = pc.sort_indices(found.stored)
    rank = np.empty(len(order), np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    rows = pa.array(found.first_row).take(order)
    chosen = [_takeable(batch.column(name)).take(rows) for name in columns]
    distinct = pa.RecordBatch.from_arrays(chosen, names=list(columns))
    return SortedKeys(found.stored.take(order).to_pylist(), rank[found.group_of_row], distinct)


def distinct_keys(
    batch: pa.RecordBatch,
    columns: Sequence[str],
    what: str,
    namespace: Namespace = Namespace.VALUE,
    space: KeySpace = NARROW,
) -> DistinctKeys:
    """Like :func:`group_keys`, for callers that need neither Python objects nor an order.

    >>> found = distinct_keys(pa.record_batch({"k": ["b", "a", "b"]}), ["k"], "process 'p'")
    >>> found.first_row.tolist(), found.group_of_row.tolist()
    ([0, 1], [0, 1, 0])
    """
    if not columns:  # all rows have one key, in the first bin
        first = np.zeros(min(batch.num_rows, 1), np.int64)
        stored = pa.array([bytes([0, namespace])] * len(first), pa.binary())
        return DistinctKeys(stored, first, np.zeros(batch.num_rows, np.int64))
    check_key_columns(batch.schema, columns, what)
    codes = _codes(batch, columns, what)
    first = np.empty(int(codes.max()) + 1 if len(codes) else 0, np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]  # the last assignment to a place wins: the first row
    chosen = [_takeable(batch.column(name)).take(pa.array(first)) for name in columns]
    distinct = pa.RecordBatch.from_arrays(chosen, names=list(columns))
    try:
        return DistinctKeys(_stored(distinct, columns, what, namespace, space), first, codes)
    except StateError:
        _stored(batch, columns, what, namespace, space)  # fails too, but with the row number of the batch
        raise


def _codes(batch: pa.RecordBatch, columns: Sequence[str], what: str) -> npt.NDArray[np.int64]:
    """A number per row, without gaps; equal exactly for rows with equal keys, since Arrow's hash tables are exact."""
    codes: npt.NDArray[np.int64] | None = None
    for name in columns:
        column = _plain(batch.column(name))
        _refuse_null(column, name, what)
        encoded = column.dictionary_encode()
        found = encoded.indices.to_numpy().astype(np.int64)
        if codes is None:
            codes = found
        else:
            # Both factors are below the number of rows, so the product fits; encoding again keeps it that way.
            combined = pa.array(codes * len(encoded.dictionary) + found).dictionary_encode()
            codes = combined.indices.to_numpy().astype(np.int64)
    assert codes is not None
    return codes


def _stored(
    batch: pa.RecordBatch, columns: Sequence[str], what: str, namespace: Namespace, space: KeySpace
) -> pa.Array:
    bins = bins_of(hash_columns(batch, columns), space.bins)
    prefix = np.full((len(bins), space.head), int(namespace), np.uint8)
    if space.width == 1:
        prefix[:, 0] = bins
    else:
        prefix[:, :2] = bins.astype(">u2").view(np.uint8).reshape(-1, 2)
    parts: list[_Matrix | pa.Array] = [prefix]
    for index, name in enumerate(columns):
        column = _plain(batch.column(name))
        _refuse_null(column, name, what)
        parts += _encoded(column, last=index == len(columns) - 1)
    keys = _joined(parts)
    _refuse_huge(keys, columns, what, space.head)
    return keys


def key_sizes(batch: pa.RecordBatch, columns: Sequence[str]) -> npt.NDArray[np.int64] | None:
    """The size of each row's key in bytes, with nulls as empty; None if all keys have the same, small size.

    >>> key_sizes(pa.record_batch({"k": ["ann", None], "n": [1, 2]}), ["k", "n"]).tolist()
    [13, 10]
    """
    fixed, texts = 0, []
    for index, name in enumerate(columns):
        column = _plain(batch.column(name))
        if pa.types.is_decimal(column.type):
            fixed += 16
        elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            texts.append(column)
            fixed += 0 if index == len(columns) - 1 else 2
        else:
            fixed += 8
    if not texts:
        return None
    sizes = np.full(batch.num_rows, fixed, np.int64)
    for column in texts:
        sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy()
    return sizes


def _takeable(column: pa.Array) -> pa.Array:
    """A column whose rows Arrow can take; it cannot take rows of views yet."""
    if pa.types.is_string_view(column.type):
        return column.cast(pa.large_string())
    return column.cast(pa.large_binary()) if pa.types.is_binary_view(column.type) else column


def _plain(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    name = type_name(column.type)
    if name in ("string", "binary"):
        column = column.cast(pa.binary() if column.nbytes < 2**31 - 1 else pa.large_binary())
    return column


def _refuse_null(column: pa.Array, name: str, what: str) -> None:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise StateError(
            f"{what}: the key column {name!r} is null in row {row}; a null cannot be a key. Before this operator, "
            f"filter such rows out or replace the null in a map",
            column=name,
            row_index=row,
        )


def _refuse_huge(keys: pa.Array, columns: Sequence[str], what: str, head: int) -> None:
    sizes = pc.binary_length(keys)
    largest = pc.max(sizes).as_py() or 0
    if largest > MAX_KEY + head:
        row = pc.index(sizes, largest).as_py()
        raise StateError(
            f"{what}: the key ({', '.join(columns)}) of row {row} takes {largest - head} bytes; at most {MAX_KEY} are "
            f"allowed. Shorten the key in a map before this operator, for example by hashing it",
            row_index=row,
        )


def _encoded(column: pa.Array, last: bool) -> list[_Matrix | pa.Array]:
    kind = column.type
    if pa.types.is_decimal(kind):
        return [_decimal_bytes(column)]
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        return [_integer_bytes(column)]
    if last:
        return [column]
    # A length that does not fit is capped here; the key is then refused as too long.
    sizes = np.minimum(pc.binary_length(column).to_numpy(), 2**16 - 1)
    return [sizes.astype(">u2").view(np.uint8).reshape(-1, 2), column]


def _integer_bytes(column: pa.Array) -> _Matrix:
    if pa.types.is_temporal(column.type):
        # Hashing has already refused anything finer than microseconds.
        is_timestamp = pa.types.is_timestamp(column.type)
        column = column.cast(pa.timestamp("us", column.type.tz) if is_timestamp else pa.date32())
        column = column.view(pa.int64() if is_timestamp else pa.int32())
    return integer_matrix(column.to_numpy(zero_copy_only=False))


def _decimal_bytes(column: pa.Array) -> _Matrix:
    column = column.cast(pa.decimal128(column.type.precision, column.type.scale))
    count, start = len(column), column.offset
    # Little-endian words, low word first.
    words = np.frombuffer(column.buffers()[1], "<u8")[2 * start : 2 * (start + count)].reshape(count, 2)
    flipped = np.empty((count, 2), np.uint64)
    flipped[:, 0] = sign_flipped(words[:, 1])
    flipped[:, 1] = words[:, 0]
    return flipped.astype(">u8").view(np.uint8).reshape(count, 16)


def _joined(parts: list[_Matrix | pa.Array]) -> pa.Array:
    """The parts side by side: fixed-width parts as one matrix; joined by Arrow if any part varies in length."""
    arrays: list[pa.Array] = []
    fixed: list[_Matrix] = []
    for part in parts:
        if isinstance(part, np.ndarray):
            fixed.append(part)
            continue
        if fixed:
            arrays.append(_as_binary(np.hstack(fixed)))
            fixed = []
        arrays.append(part)
    if fixed:
        arrays.append(_as_binary(np.hstack(fixed)))
    if len(arrays) == 1:
        return arrays[0]
    if any(pa.types.is_large_binary(array.type) for array in arrays):
        arrays = [array.cast(pa.large_binary()) for array in arrays]
        return pc.binary_join_element_wise(*arrays, pa.scalar(b"", pa.large_binary()))
    return pc.binary_join_element_wise(*arrays, b"")


def _as_binary(matrix: _Matrix) -> pa.Array:
    rows, width = matrix.shape
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    data = pa.py_buffer(np.ascontiguousarray(matrix))
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), data])


def _size_and_start(stored: bytes, at: int, kind: pa.DataType, last: bool) -> tuple[int, int]:
    if pa.types.is_decimal(kind):
        return 16, at
    if type_name(kind) not in ("string", "binary"):
        return 8, at
    if last:
        return len(stored) - at, at
    return int.from_bytes(stored[at : at + 2], "big"), at + 2


def _decoded(data: bytes, kind: pa.DataType) -> Any:
    name = type_name(kind)
    if name == "string":
        return data.decode()
    if name == "binary":
        return data
    number = int.from_bytes(data, "big") - (1 << (8 * len(data) - 1))
    if pa.types.is_decimal(kind):
        return Decimal(number).scaleb(-kind.scale, _EXACT)
    if pa.types.is_boolean(kind):
        return bool(number)
    try:
        if pa.types.is_date(kind):
            return date(1970, 1, 1) + timedelta(days=number)
        if pa.types.is_timestamp(kind):
            return (_EPOCH if kind.tz is None else _EPOCH.replace(tzinfo=UTC)) + timedelta(microseconds=number)
    except OverflowError:
        pass
    return number
