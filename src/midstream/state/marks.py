"""Position and row count of each bin, as a base keeps them beside its rows."""

from __future__ import annotations

import zlib

import lmdb
import numpy as np

from midstream.data.key_space import BinNumbers
from midstream.state.lineage import Positions

__all__ = ["Marks"]

# Comparing numpy's bytes ignores zeros at the end; no two positions differ in nothing else.
_MARK = np.dtype([("position", "S16"), ("count", "<u8")])


class Marks:
    """Position and row count of each bin: one record, read and stored in the same transaction as the rows."""

    _KEY = b"bins"

    def __init__(self, transaction: lmdb.Transaction[bytes], table: lmdb._Database, bins: int) -> None:
        self._transaction = transaction
        self._table = table
        data = transaction.get(self._KEY, db=table)
        if data is None:
            self._marks = np.zeros(bins, _MARK)
            return
        if len(data) != 4 + bins * _MARK.itemsize or zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
            raise lmdb.CorruptedError("the positions of bins")
        self._marks = np.frombuffer(data, _MARK, offset=4).copy()

    def positions(self) -> Positions:
        """The position of each bin; a view, which later calls change."""
        return self._marks["position"]

    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """The number of rows of each bin."""
        return self._marks["count"]

    def count(self, number: int) -> int:
        """The number of rows of one bin."""
        return int(self._marks["count"][number])

    def set_count(self, number: int, count: int) -> None:
        """Set the number of rows of one bin."""
        self._marks["count"][number] = count

    def move(self, bins: BinNumbers, position: Positions | bytes) -> None:
        """Set the position of these bins."""
        self._marks["position"][bins] = position

    def store(self) -> None:
        """Write the record, in the transaction that it was read in."""
        data = self._marks.tobytes()
        self._transaction.put(self._KEY, zlib.crc32(data).to_bytes(4, "little") + data, db=self._table)
