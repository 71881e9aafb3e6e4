"""Stored keys as Arrow arrays: like :mod:`.keys`, but for many keys at once and without Python objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.data.key_space import NARROW, KeySpace
from midstream.data.schema import type_name
from midstream.state.integers import integer_matrix, integers_of, sign_flipped
from midstream.state.keys import Namespace

__all__ = ["decode_keys", "split_timers", "timer_keys"]

_Integers = npt.NDArray[np.int64]


def timer_keys(keys: pa.Array, namespace: Namespace, times: _Integers, space: KeySpace = NARROW) -> pa.Array:
    """:func:`~midstream.state.keys.timer_key` of each key and time.

    >>> timer_keys(pa.array([b"\\x07\\x00ann"]), Namespace.EVENT_TIMER, np.array([5]))[0].as_py()
    b'\\x07\\x03\\x80\\x00\\x00\\x00\\x00\\x00\\x00\\x05ann'
    """
    offsets, data = _offsets_and_data(keys)
    heads = np.empty((len(keys), space.head + 8), np.uint8)
    heads[:, : space.width] = data[offsets[:-1, None] + np.arange(space.width)]
    heads[:, space.width] = namespace
    heads[:, space.head :] = integer_matrix(times)
    return _replace_heads(heads, offsets, data, space.head)


def split_timers(stored: pa.Array, space: KeySpace = NARROW) -> tuple[_Integers, pa.Array]:
    """The times and the value keys that :func:`timer_keys` was given.

    >>> times, keys = split_timers(timer_keys(pa.array([b"\\x07\\x00ann"]), Namespace.EVENT_TIMER, np.array([-5])))
    >>> times.tolist(), keys.to_pylist()
    ([-5], [b'\\x07\\x00ann'])
    """
    offsets, data = _offsets_and_data(stored)
    heads = np.full((len(stored), space.head), int(Namespace.VALUE), np.uint8)
    heads[:, : space.width] = data[offsets[:-1, None] + np.arange(space.width)]
    return _integers(data, offsets[:-1] + space.head), _replace_heads(heads, offsets, data, space.head + 8)


def decode_keys(keys: pa.Array, schema: pa.Schema, space: KeySpace = NARROW) -> list[pa.Array]:
    """The key columns of stored keys; ``schema`` holds the key columns only.

    >>> from midstream.state.keys import encode_keys
    >>> batch = pa.record_batch({"user": ["ann", "bob"], "n": [-1, 2]})
    >>> keys = pa.array(encode_keys(batch, ["user", "n"], "aggregate 'a'"))
    >>> pa.record_batch(decode_keys(keys, batch.schema), schema=batch.schema).equals(batch)
    True
    """
    offsets, data = _offsets_and_data(keys)
    at, ends = offsets[:-1] + space.head, offsets[1:]
    columns = []
    for index, field in enumerate(schema):
        if type_name(field.type) in ("string", "binary"):
            if index == len(schema) - 1:
                sizes = ends - at
            else:
                sizes = (data[at].astype(np.int64) << 8) + data[at + 1]
                at = at + 2
            columns.append(_texts(data, at, sizes).cast(field.type))
            at = at + sizes
        elif pa.types.is_decimal(field.type):
            columns.append(_decimals(data, at, field.type))
            at = at + 16
        else:
            columns.append(_from_integers(_integers(data, at), field.type))
            at = at + 8
    return columns


def _replace_heads(
    heads: npt.NDArray[np.uint8], offsets: _Integers, data: npt.NDArray[np.uint8], replaced: int
) -> pa.Array:
    """Replace the first ``replaced`` bytes of each key with its row of ``heads``."""
    width = heads.shape[1]
    data, offsets = data[offsets[0] : offsets[-1]], offsets - offsets[0]
    moved = offsets + np.arange(len(offsets)) * (width - replaced)
    joined = np.empty(moved[-1], np.uint8)
    is_rest, stays = np.ones(len(joined), np.bool_), np.ones(len(data), np.bool_)
    at = moved[:-1, None] + np.arange(width)
    is_rest[at] = False
    stays[offsets[:-1, None] + np.arange(replaced)] = False
    joined[at] = heads
    joined[is_rest] = data[stays]
    buffers = [None, pa.py_buffer(moved.astype(np.int32)), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.binary(), len(heads), buffers)


def _offsets_and_data(keys: pa.Array) -> tuple[_Integers, npt.NDArray[np.uint8]]:
    if not len(keys):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, offsets, data = keys.buffers()
    return (
        np.frombuffer(offsets, np.int32)[keys.offset : keys.offset + len(keys) + 1].astype(np.int64),
        np.frombuffer(data, np.uint8),
    )


def _words(data: npt.NDArray[np.uint8], at: _Integers) -> npt.NDArray[np.uint64]:
    gathered: npt.NDArray[Any] = data[at[:, None] + np.arange(8)]
    words: npt.NDArray[np.uint64] = gathered.view(">u8").reshape(-1).astype(np.uint64)
    return words


def _integers(data: npt.NDArray[np.uint8], at: _Integers) -> _Integers:
    return integers_of(_words(data, at))


def _from_integers(values: _Integers, kind: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(kind):
        return pa.array(values.astype(np.bool_))
    if pa.types.is_timestamp(kind):
        return pa.array(values).view(kind)
    if pa.types.is_date(kind):
        return pa.array(values.astype(np.int32)).view(pa.date32()).cast(kind)
    return pa.array(values).cast(kind)


def _decimals(data: npt.NDArray[np.uint8], at: _Integers, kind: pa.DataType) -> pa.Array:
    words: npt.NDArray[Any] = np.empty((len(at), 2), "<u8")
    words[:, 0] = _words(data, at + 8)
    words[:, 1] = sign_flipped(_words(data, at))
    whole = pa.decimal128(kind.precision, kind.scale)
    return pa.Array.from_buffers(whole, len(at), [None, pa.py_buffer(words)]).cast(kind)


def _texts(data: npt.NDArray[np.uint8], at: _Integers, sizes: _Integers) -> pa.Array:
    ends = np.cumsum(sizes)
    offsets = np.concatenate([np.zeros(1, np.int64), ends]).astype(np.int32)
    source = np.repeat(at - ends + sizes, sizes) + np.arange(offsets[-1])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data[source])]
    return pa.Array.from_buffers(pa.binary(), len(at), buffers)
