"""Hashes of keys: the same in every process, on every machine, in every version.

State on disk is addressed by bin, and a bin is part of the hash. So the definition below must never change; a unit test
pins values of it. ``mix`` is the finaliser of splitmix64, G its increment; all arithmetic is modulo 2**64::

        hash(integer, boolean, date, timestamp)  = mix(value + G)          in 64-bit two's complement; times in
    microseconds
    hash(bytes)                              = mix(n * L + sum over i of mix(word[i] + (i + 1) * G))
    hash(string), hash(decimal)              = hash of its UTF-8 bytes, of the 16 bytes of its unscaled value
    hash(null)                               = mix(N)
    hash(first column, …, next column)       = mix(hash so far * C + hash(next column))

where ``n`` is the number of bytes and ``word[i]`` are eight of them, little-endian, the last padded with zeros (an
empty string is one word of zeros). The hash depends on the value, not on how Arrow stores it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.data.schema import type_name
from midstream.errors import SchemaError
from midstream.ids import BINS

__all__ = ["Hashes", "bins_of", "hash_columns"]

Hashes = npt.NDArray[np.uint64]
"""One 64-bit hash per row."""

_G = np.uint64(0x9E3779B97F4A7C15)
_L = np.uint64(0xD6E8FEB86659FD93)
_C = np.uint64(0x9FB21C651E98DF25)
_DECIMAL_SIZE = np.uint64(16 * 0xD6E8FEB86659FD93 % 2**64)  # n * L for the 16 bytes of a decimal
_N = np.uint64(0xA0761D6478BD642F)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)

# Blocks of this many rows stay in the processor's cache; a numpy step over a whole slice would wait for memory.
_BLOCK = 8192
# Only the first n % 8 bytes of a value's last word count (all of them if n is a multiple of 8).
_LAST_WORD = np.array([2**64 - 1, *(2 ** (8 * size) - 1 for size in range(1, 8))], np.uint64)


def hash_columns(batch: pa.RecordBatch, columns: Sequence[str]) -> Hashes:
    """The hash of each row's key; null is a key of its own.

    Equal keys have equal hashes regardless of their representation:

    >>> narrow = pa.record_batch({"k": pa.array([7, None], pa.int32())})
    >>> wide = pa.record_batch({"k": pa.array([7, None], pa.int64())})
    >>> hash_columns(narrow, ["k"]).tolist() == hash_columns(wide, ["k"]).tolist()
    True
    """
    if not columns:
        raise SchemaError(f"no key column given; use at least one of {', '.join(batch.schema.names)}")
    hashes = _hash_array(batch.column(columns[0]), columns[0])
    for name in columns[1:]:
        hashes *= _C
        hashes += _hash_array(batch.column(name), name)
        _mix_blocks(hashes)
    return hashes


def bins_of(hashes: Hashes, bins: int = BINS) -> npt.NDArray[np.uint16]:
    """The bin of each hash: its highest bits, so that sorting by hash also sorts by bin.

    >>> bins_of(np.array([0, 2**56, 2**64 - 1], np.uint64)).tolist()
    [0, 1, 255]
    >>> bins_of(np.array([0, 2**56, 2**64 - 1], np.uint64), bins=2).tolist()
    [0, 0, 1]
    """
    if bins == 1:  # a shift by all 64 bits is not defined
        return np.zeros(len(hashes), np.uint16)
    return (hashes >> np.uint64(64 - (bins - 1).bit_length())).astype(np.uint16)


def _hash_array(array: pa.Array, name: str) -> Hashes:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_temporal(kind):
        hashes = _hash_integers(_as_integers(array, name))
    elif pa.types.is_decimal(kind):
        hashes = _hash_decimals(array)
    elif type_name(kind) in ("string", "binary"):
        hashes = _hash_bytes(array)
    elif pa.types.is_null(kind):
        hashes = np.empty(len(array), np.uint64)
    else:
        raise SchemaError(f"column {name!r} is {type_name(kind)}, which cannot be hashed as a key", column=name)
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = _NULL_HASH
    return hashes


def _as_integers(array: pa.Array, name: str) -> Hashes:
    """The values as 64-bit patterns; the patterns of nulls are arbitrary."""
    kind = array.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        wanted = pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else pa.date32()
        try:
            array = array.cast(wanted).view(pa.int64() if pa.types.is_timestamp(kind) else pa.int32())
        except pa.ArrowInvalid as error:
            raise SchemaError(
                f"column {name!r} is {kind}, finer than Spark's microseconds: {error}", column=name
            ) from None
    elif pa.types.is_temporal(kind):
        raise SchemaError(f"column {name!r} is {kind}, which cannot be hashed as a key", column=name)
    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(kind) else 0)
    values: Hashes = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False).view(np.uint64)
    return values


def _hash_integers(values: Hashes) -> Hashes:
    hashes = values + _G
    _mix_blocks(hashes)
    return hashes


def _hash_decimals(array: pa.Array) -> Hashes:
    array = array.cast(pa.decimal128(array.type.precision, array.type.scale))
    count = len(array)
    words = np.frombuffer(array.buffers()[1], "<u8")[2 * array.offset : 2 * (array.offset + count)].astype(np.uint64)
    mixed = (words.reshape(count, 2) + _G * np.array([1, 2], np.uint64)).reshape(-1)
    _mix_blocks(mixed)
    hashes: Hashes = mixed[0::2] + mixed[1::2] + _DECIMAL_SIZE
    _mix_blocks(hashes)
    return hashes


def _hash_bytes(array: pa.Array) -> Hashes:
    offsets, data = _offsets_and_data(array)
    hashes = np.empty(len(array), np.uint64)
    for start in range(0, len(array), _BLOCK):
        _hash_bytes_block(offsets[start : start + _BLOCK + 1], data, hashes[start : start + _BLOCK])
    return hashes


def _offsets_and_data(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """The offsets of the values and their bytes, followed by eight zeros so that a whole word can always be read."""
    if array.type not in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()):
        array = array.cast(pa.large_string() if pa.types.is_string_view(array.type) else pa.large_binary())
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    if not len(array):
        return np.zeros(1, np.int64), np.zeros(8, np.uint8)
    _, offset_buffer, data_buffer = array.buffers()
    stored = np.frombuffer(offset_buffer, np.dtype(np.int64 if large else np.int32))
    offsets = stored[array.offset : array.offset + len(array) + 1].astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.zeros(last - first + 8, np.uint8)
    if last > first:
        data[:-8] = np.frombuffer(data_buffer, np.uint8)[first:last]
    return offsets - first, data


def _hash_bytes_block(offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8], hashes: Hashes) -> None:
    """Hash the values between the offsets: gather all their words, mix them, and sum up the words of each value."""
    # A view of unaligned words that start at every single byte; its shape excludes reads beyond the padding.
    every_word: Hashes = np.ndarray((len(data) - 7,), "<u8", data.data, strides=(1,))
    starts, sizes = offsets[:-1], np.diff(offsets)
    counts = np.maximum((sizes + 7) >> 3, 1)
    last_mask = _LAST_WORD[sizes & 7]
    last_mask[sizes == 0] = 0
    if counts.max() == 1:
        sums = every_word[starts] & last_mask
        sums += _G
        _mix(sums)
    else:
        ends = np.cumsum(counts)
        firsts = ends - counts
        index = np.arange(ends[-1]) - np.repeat(firsts, counts)
        words = every_word[np.repeat(starts, counts) + (index << 3)]
        words[ends - 1] &= last_mask
        index += 1
        words += index.view(np.uint64) * _G
        _mix_blocks(words)
        sums = np.add.reduceat(words, firsts)
    sums += sizes.view(np.uint64) * _L
    _mix(sums)
    hashes[:] = sums


def _mix_blocks(values: Hashes) -> None:
    for start in range(0, len(values), _BLOCK):
        _mix(values[start : start + _BLOCK])


def _mix(values: Hashes) -> None:
    """The finaliser of splitmix64, in place: a bijection in which every input bit affects every output bit."""
    values ^= values >> _SHIFT_30
    values *= _MIX_1
    values ^= values >> _SHIFT_27
    values *= _MIX_2
    values ^= values >> _SHIFT_31


def _null_hash() -> np.uint64:
    value = np.array([_N])
    _mix(value)
    return np.uint64(value[0])


_NULL_HASH = _null_hash()
