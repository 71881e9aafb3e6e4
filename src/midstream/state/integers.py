"""Integers, and times in microseconds, as stored in keys: 8 bytes that sort in the order of the numbers.

Big-endian, with the sign bit flipped. State on disk contains these bytes, so the encoding must never change; the unit
tests of :mod:`.keys` pin examples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["integer_bytes", "integer_matrix", "integer_of", "integers_of", "sign_flipped"]

_OFFSET = 1 << 63
_SIGN = np.uint64(_OFFSET)


def integer_bytes(value: int) -> bytes:
    """The bytes of one number.

    >>> integer_bytes(-1) < integer_bytes(0) < integer_bytes(256)
    True
    """
    return (value + _OFFSET).to_bytes(8, "big")


def integer_of(data: bytes) -> int:
    """The inverse of :func:`integer_bytes`.

    >>> integer_of(integer_bytes(-5))
    -5
    """
    return int.from_bytes(data, "big") - _OFFSET


def integer_matrix(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of many numbers, one row per number.

    >>> bytes(integer_matrix(np.array([5]))[0]) == integer_bytes(5)
    True
    """
    words = sign_flipped(values.astype(np.int64, copy=False).view(np.uint64))
    matrix: npt.NDArray[np.uint8] = words.astype(">u8").view(np.uint8).reshape(-1, 8)
    return matrix


def integers_of(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The inverse of :func:`integer_matrix`, for bytes that were read as big-endian words."""
    return sign_flipped(words).view(np.int64)


def sign_flipped(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Words with the first bit flipped; used for the first word of a number that takes several."""
    flipped: npt.NDArray[np.uint64] = words ^ _SIGN
    return flipped
