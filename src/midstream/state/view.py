"""What tasks see of a base: some bins at one lineage, whatever other tasks do to the base meanwhile."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING

import lmdb
import numpy as np
import pyarrow as pa

from midstream.errors import StateError
from midstream.ids import BinId
from midstream.state.files import table_of
from midstream.state.keys import Namespace
from midstream.state.lineage import Lineage

if TYPE_CHECKING:
    from midstream.state.base import Base

__all__ = ["View"]

_CHUNK = 1024


class View:
    """Some bins of a base at a given lineage. Valid until it is closed."""

    def __init__(self, base: Base, lineage: Lineage, bins: tuple[BinId, ...]) -> None:
        self.bins = frozenset(bins)
        self._base = base
        self._lineage = lineage
        self._numbers = np.fromiter(bins, np.int64)
        self._wanted = lineage.position_array(bins)[self._numbers]
        self._space = base.space
        self._transaction: lmdb.Transaction[bytes] | None = None
        self._remapped = -1
        with base._mapped.lock:  # otherwise what another thread reads meanwhile would be counted here
            before = base.bytes_read
            base.catch_up(lineage, bins)
            base._retry_if_damaged(self._begin)
            self.bytes_read = base.bytes_read - before

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of stored keys, in the same order. Fastest when the keys are ascending."""
        found = self._base._retry_if_damaged(lambda: self._current().cursor().getmulti(keys))
        if len(found) == len(keys):
            return [value for _, value in found]
        return list(map(dict(found).get, keys))

    def scan(
        self, bin_id: BinId, namespace: Namespace, start: bytes = b"", stop: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Stored keys and values of a namespace, ascending; ``start`` and ``stop`` bound what follows the namespace."""
        prefix = self._space.prefix(bin_id, namespace)
        last = prefix + stop if stop is not None else self._space.prefix(bin_id, namespace + 1)
        return self._scan(prefix + start, last)

    def occupied(self, bins: Iterable[BinId], namespace: Namespace, stop: bytes | None = None) -> list[BinId]:
        """Those of ``bins`` with at least one entry in a namespace before ``stop``; one lookup per bin."""
        return self._base._retry_if_damaged(lambda: self._occupied(bins, namespace, stop))

    def _occupied(self, bins: Iterable[BinId], namespace: Namespace, stop: bytes | None) -> list[BinId]:
        found = []
        with contextlib.closing(self._current().cursor()) as cursor:
            for number in bins:
                prefix = self._space.prefix(number, namespace)
                last = prefix + stop if stop is not None else self._space.prefix(number, namespace + 1)
                if cursor.set_range(prefix) and cursor.key() < last:
                    found.append(number)
        return found

    def count(self, bin_id: BinId) -> int:
        """The number of rows in a bin, over all namespaces."""
        return self._base._retry_if_damaged(lambda: self._base._marks(self._current()).count(bin_id))

    def table(self, bins: Iterable[BinId]) -> pa.Table:
        """All rows of these bins, in the form that a snapshot stores."""
        keys: list[bytes] = []
        values: list[bytes] = []
        for number in sorted(bins):
            for key, value in self._scan(self._space.prefix(number), self._space.end(number)):
                keys.append(key)
                values.append(value)
        return table_of(keys, values)

    def close(self) -> None:
        """End the read transaction, so that LMDB can reuse the pages it held."""
        with self._base._mapped.lock:
            if self._transaction is not None and self._remapped == self._base._mapped.remapped:
                self._transaction.abort()
            self._transaction = None

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _current(self) -> lmdb.Transaction[bytes]:
        """The read transaction. It is renewed if this process has remapped the environment, which ends all
        transactions.
        """
        if self._transaction is None:
            raise StateError(f"the state of {self._lineage.operator!r} is closed; the task that read it is over")
        if self._remapped != self._base._mapped.remapped:
            self._begin()
        return self._transaction

    def _begin(self) -> None:
        mapped = self._base._mapped
        for _ in range(5):
            transaction = mapped.begin()
            self._remapped = mapped.remapped
            held = self._base._marks(transaction).positions()
            if np.array_equal(held[self._numbers], self._wanted):
                self._transaction = transaction
                return
            # Another task moved the base to another epoch after we caught up.
            transaction.abort()
            self._base.catch_up(self._lineage, tuple(self.bins))
        raise StateError(
            f"the base of {self._lineage.operator!r} does not stay at epoch {self._lineage.epoch}: tasks of another "
            f"epoch use it at the same time. This attempt should be over by now"
        )

    def _scan(self, start: bytes, stop: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        # In chunks, each with its own cursor: the caller may do anything between two rows.
        while True:
            chunk = self._base._retry_if_damaged(partial(self._chunk, start, stop))
            yield from chunk
            if len(chunk) < _CHUNK:
                return
            start = chunk[-1][0] + b"\x00"

    def _chunk(self, start: bytes, stop: bytes | None) -> list[tuple[bytes, bytes]]:
        with contextlib.closing(self._current().cursor()) as cursor:
            if not cursor.set_range(start):
                return []
            rows = list(islice(cursor.iternext(), _CHUNK))
        if stop is not None and rows and rows[-1][0] >= stop:
            del rows[bisect_left(rows, stop, key=itemgetter(0)) :]
        return rows
