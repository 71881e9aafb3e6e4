"""The key space of a job: the number of bins that keys are divided into, and how a bin is written in front of a stored
key.

The number of bins is chosen when a job is made and never changes, because state is addressed by bin. Up to 256 bins
take one byte in front of each stored key, more take two. Nothing else depends on their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.errors import FlowError
from midstream.ids import BINS, BinId

__all__ = ["MAX_BINS", "NARROW", "BinNumbers", "KeySpace", "check_bins", "pack_counts", "unpack_counts"]

MAX_BINS = 1 << 16
"""The largest number of bins that a key space can have."""

BinNumbers = npt.NDArray[np.int64]
"""Numbers of bins, ascending."""


@dataclass(frozen=True)
class KeySpace:
    """A number of bins, and what follows from it for stored keys.

    >>> narrow, wide = KeySpace(256), KeySpace(4096)
    >>> narrow.prefix(BinId(7)), wide.prefix(BinId(7))
    (b'\\x07', b'\\x00\\x07')
    >>> narrow.bin_of(b"\\x07\\x00ann") == wide.bin_of(b"\\x00\\x07\\x00ann") == 7
    True
    """

    bins: int = BINS

    def __post_init__(self) -> None:
        if not 1 <= self.bins <= MAX_BINS or self.bins & (self.bins - 1):
            raise FlowError(f"{self.bins} bins: the number of bins must be a power of two from 1 to {MAX_BINS}")

    @cached_property
    def width(self) -> int:
        """Bytes of a bin in front of a stored key."""
        return 1 if self.bins <= 256 else 2

    @cached_property
    def head(self) -> int:
        """Bytes of a stored key before its key columns: bin and namespace."""
        return self.width + 1

    @cached_property
    def all(self) -> tuple[BinId, ...]:
        """All bins, ascending."""
        return tuple(map(BinId, range(self.bins)))

    def prefix(self, bin_id: int, namespace: int | None = None) -> bytes:
        """What all stored keys of a bin, or of a namespace in it, start with."""
        start = int(bin_id).to_bytes(self.width, "big")
        return start if namespace is None else start + bytes([namespace])

    def end(self, bin_id: int) -> bytes | None:
        """The smallest bytes after all stored keys of a bin; None if nothing can be greater."""
        following = int(bin_id) + 1
        return None if following == 256**self.width else following.to_bytes(self.width, "big")

    def bin_of(self, stored: bytes) -> BinId:
        """The bin of a stored key."""
        return BinId(int.from_bytes(stored[: self.width], "big"))

    def bins_of_stored(self, keys: pa.Array) -> BinNumbers:
        """The bin of each stored key: an Arrow array of binaries."""
        if not len(keys):
            return np.empty(0, np.int64)
        offset_type = np.int64 if pa.types.is_large_binary(keys.type) else np.int32
        starts = np.frombuffer(keys.buffers()[1], offset_type)[keys.offset : keys.offset + len(keys)]
        data = np.frombuffer(keys.buffers()[2], np.uint8)
        numbers: BinNumbers = data[starts].astype(np.int64)
        if self.width == 2:
            numbers = numbers << 8 | data[starts + 1]
        return numbers

    def pack(self, bins: Iterable[int]) -> bytes:
        """Bins as bytes, one after the other, as wide as in stored keys."""
        numbers = bins if isinstance(bins, np.ndarray) else np.fromiter(bins, np.int64)
        return numbers.astype(np.uint8 if self.width == 1 else ">u2").tobytes()

    def unpack(self, data: bytes) -> BinNumbers:
        """The bins that :meth:`pack` was given."""
        numbers: BinNumbers = np.frombuffer(data, np.uint8 if self.width == 1 else ">u2").astype(np.int64)
        return numbers


NARROW = KeySpace()
"""The key space of jobs that do not say how many bins they want."""


def check_bins(bins: int) -> int:
    """Refuse what cannot be a number of bins.

    >>> check_bins(300)
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: bins=300: give a power of two from 1 to 65536
    """
    if type(bins) is not int or not 1 <= bins <= MAX_BINS or bins & (bins - 1):
        raise FlowError(f"bins={bins!r}: give a power of two from 1 to {MAX_BINS}")
    return bins


def pack_counts(counts: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> bytes:
    """Whole numbers by bin, in few bytes, because every task of every epoch reports some.

    >>> unpack_counts(pack_counts(np.array([0, 3, 0, 70_000])), 4).tolist()
    [0, 3, 0, 70000]
    >>> len(pack_counts(np.zeros(65_536)))
    1
    """
    numbers = np.rint(counts).astype(np.int64)
    places = np.flatnonzero(numbers)
    largest = int(numbers.max(initial=0))
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4 if largest < 1 << 32 else 8
    head = bytes([width])
    if (width + 2) * len(places) < width * len(numbers):
        return head + places.astype("<u2").tobytes() + numbers[places].astype(f"<u{width}").tobytes()
    return bytes([width | _DENSE]) + numbers.astype(f"<u{width}").tobytes()


def unpack_counts(data: bytes, bins: int) -> npt.NDArray[np.int64]:
    """The numbers that :func:`pack_counts` was given."""
    width = data[0] & ~_DENSE
    if data[0] & _DENSE:
        return np.frombuffer(data, f"<u{width}", offset=1).astype(np.int64)
    places = (len(data) - 1) // (width + 2)
    counts = np.zeros(bins, np.int64)
    at = np.frombuffer(data, "<u2", count=places, offset=1)
    counts[at] = np.frombuffer(data, f"<u{width}", offset=1 + 2 * places)
    return counts


_DENSE = 0x80
