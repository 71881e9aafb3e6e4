"""Encodes the values of state as bytes and back: Python objects, and packed structs for built-in aggregates.

Each stored object starts with the revision of the function that wrote it, so that a later revision can convert it when
it first reads it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from midstream.errors import StateError
from midstream.ids import Revision

__all__ = ["MISSING", "ObjectCodec", "PackedCodec", "Stored"]

MISSING: Any = type("Missing", (), {"__repr__": lambda _: "MISSING", "__bool__": lambda _: False})()
"""The value of a key that has none; ``None`` is an ordinary value."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object of state, and the revision of the function that wrote it."""

    value: Any
    revision: Revision


class ObjectCodec:
    """Pickles the Python objects of one operator.

    ``what`` names the operator in errors; ``show_key`` formats a stored key for users.

    >>> codec = ObjectCodec("process 'count'")
    >>> codec.decode(codec.encode({"n": 1}, Revision(3), b"k"), b"k")
    Stored(value={'n': 1}, revision=3)
    """

    def __init__(self, what: str, show_key: Callable[[bytes], object] = repr) -> None:
        self._what = what
        self._show_key = show_key

    def encode(self, value: Any, revision: Revision, key: bytes) -> bytes:
        """The bytes of one object; ``key`` is for errors."""
        return _varint(revision) + self._pickled(value, key)

    def encode_many(self, values: Sequence[Any], revision: Revision, keys: Sequence[bytes]) -> list[bytes]:
        """The bytes of each object."""
        head = _varint(revision)
        dumps = pickle.dumps
        try:
            return [head + dumps(value, 5) for value in values]
        except Exception:  # a user's __reduce__ may raise anything; one by one, the error names the key
            return [head + self._pickled(value, key) for key, value in zip(keys, values, strict=True)]

    def decode(self, data: bytes, key: bytes) -> Stored:
        """The object that :meth:`encode` was given."""
        revision, start = _read_varint(data)
        try:
            return Stored(pickle.loads(memoryview(data)[start:]), revision)
        except (AttributeError, ImportError) as error:
            raise StateError(
                f"{self._what}: the state of key {self._show_key(key)} needs a class that no longer exists: {error}. "
                f"Restore the class under its old name, or keep plain dicts, lists and numbers in state",
                key=key,
            ) from error
        except Exception as error:  # a user's __setstate__ may raise anything
            raise StateError(
                f"{self._what}: the state of key {self._show_key(key)} cannot be read back: "
                f"{type(error).__name__}: {error}",
                key=key,
            ) from error

    def decode_many(self, data: Sequence[bytes | None], keys: Sequence[bytes]) -> list[Any]:
        """A :class:`Stored` for each value, or MISSING."""
        return [MISSING if value is None else self.decode(value, key) for key, value in zip(keys, data, strict=True)]

    def _pickled(self, value: Any, key: bytes) -> bytes:
        try:
            return pickle.dumps(value, 5)
        except Exception as first:
            try:
                # Classes of a script or notebook cannot be imported by name elsewhere, so they are pickled by value.
                data: bytes = cloudpickle.dumps(value, 5)
                return data
            except Exception:
                raise StateError(
                    f"{self._what}: the state of key {self._show_key(key)} is a {type(value).__qualname__} that cannot "
                    f"be pickled: {first}. Use numbers, strings, dicts, lists or dataclasses of a module, but no "
                    f"open files, locks, connections or generators",
                    key=key,
                ) from first


class PackedCodec:
    """Encodes arrays of fixed-width structs.

    >>> codec = PackedCodec(np.dtype([("n", "<i8"), ("sum", "<f8")]), "aggregate 'totals'")
    >>> structs, known = codec.join([codec.split(np.array([(1, 0.5)], codec.dtype))[0], None])
    >>> structs.tolist(), known.tolist()
    ([(1, 0.5), (0, 0.0)], [True, False])
    """

    def __init__(self, dtype: np.dtype[Any], what: str) -> None:
        if dtype.hasobject:
            raise StateError(f"{what}: a packed struct cannot hold Python objects: {dtype}")
        self.dtype = dtype
        self._what = what
        self._nothing = bytes(dtype.itemsize)

    def join(self, data: Sequence[bytes | None]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """The structs, with zeros for missing values, and a mask of the values present. The caller may change the
        array.
        """
        known = np.ones(len(data), np.bool_)
        if None in data:
            known = np.fromiter((value is not None for value in data), np.bool_, len(data))
        filled = [self._nothing if value is None else value for value in data]
        if not set(map(len, filled)) <= {self.dtype.itemsize}:
            raise StateError(
                f"{self._what}: the stored structs do not have the {self.dtype.itemsize} bytes of {self.dtype}; they "
                f"were written with other aggregates. Give the operator another name, or restore the old aggregates"
            )
        return np.frombuffer(bytearray().join(filled), self.dtype), known

    def split(self, structs: npt.NDArray[Any]) -> list[bytes]:
        """The bytes of each struct."""
        packed = np.ascontiguousarray(structs, self.dtype)
        values: list[bytes] = packed.view(f"V{self.dtype.itemsize}").tolist()
        return values


def _varint(number: int) -> bytes:
    data = bytearray()
    while number >= 0x80:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _read_varint(data: bytes) -> tuple[Revision, int]:
    number = shift = index = 0
    while data[index] >= 0x80:
        number |= (data[index] & 0x7F) << shift
        shift += 7
        index += 1
    return Revision(number | data[index] << shift), index + 1
