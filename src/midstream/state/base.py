"""The base: a cache of committed state on a host's local disk, shared by the host's Python workers.

There is one LMDB environment per operator; the first byte of each key is the bin. A slice's keys are read in one sorted
pass over all bins of a task. A delta is applied in one transaction together with the positions of its bins, so a bin's
rows and its position always agree, no matter when a process is killed. If the environment is damaged, or a bin's
position is not part of the lineage, the data is rebuilt from the files in the checkpoint location.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from types import TracebackType
from typing import TypeVar

import lmdb
import pyarrow as pa

from midstream.errors import StateError
from midstream.ids import BINS, BinId
from midstream.state.files import StateFiles, bin_ranges, table_of
from midstream.state.keys import Namespace
from midstream.state.lineage import EMPTY, Lineage, LineageStep, Position
from midstream.state.mapped import DAMAGED, Mapped

__all__ = ["ALL_BINS", "Base", "View"]

ALL_BINS = tuple(BinId(number) for number in range(BINS))
"""All bins of an operator."""

_CHUNK = 1024
_MANY = 50_000
_ROOM_PER_BYTE = 2  # size of a row in a page relative to its size in a file
_T = TypeVar("_T")


class Base:
    """The committed state of one operator, for the bins that this host has needed so far.

    ``owner`` names the job and the operator. A folder that belongs to another owner is emptied.

    >>> import tempfile
    >>> from midstream.ids import Epoch, PartitionId, Run
    >>> from midstream.state.files import Author, FileKind
    >>> files = StateFiles(tempfile.mkdtemp())
    >>> author = Author("count", Epoch(0), Run(0), PartitionId(0), attempt=0)
    >>> delta = files.write(table_of([b"\\x07\\x00ann"], [b"5"]), FileKind.DELTA, author)
    >>> lineage = Lineage.start("count").after(Epoch(0), [delta])
    >>> base = Base(tempfile.mkdtemp(), "job 1, count", files)
    >>> with base.view(lineage, [BinId(7)]) as view:
    ...     view.get_many([b"\\x07\\x00ann", b"\\x07\\x00bob"])
    [b'5', None]
    >>> base.close()
    """

    _shared: dict[str, Base] = {}  # noqa: RUF012 (one per process on purpose: LMDB must not open a file twice)
    _shared_lock = threading.Lock()

    def __init__(self, folder: str, owner: str, files: StateFiles) -> None:
        self.files = files
        self.bytes_read = 0
        """Of files that this process has read to catch up."""
        self._mapped = Mapped(folder, owner)

    @classmethod
    def shared(cls, folder: str, owner: str, files: StateFiles) -> Base:
        """This process's only base for a folder: LMDB must not open an environment twice."""
        with cls._shared_lock:
            base = cls._shared.get(folder)
            if base is None or base._mapped.owner != owner or base.files != files:
                if base is not None:
                    base.close()
                base = cls._shared[folder] = Base(folder, owner, files)
            return base

    @classmethod
    def close_below(cls, folder: str) -> None:
        """Close this process's shared bases whose folders are below ``folder``."""
        with cls._shared_lock:
            found = [base for at, base in cls._shared.items() if at.startswith(folder + os.sep)]
        for base in found:
            base.close()

    def close(self) -> None:
        """Close the folder. Its contents stay for other processes and for the next start."""
        self._mapped.close()
        for folder, base in list(self._shared.items()):
            if base is self:
                del self._shared[folder]

    def positions(self) -> dict[BinId, Position]:
        """The position of each bin; bins that were never needed are left out."""
        return self._retry_if_damaged(lambda: self._marks(_Marks.positions))

    def _marks(self, look: Callable[[_Marks], _T]) -> _T:
        with self._mapped.begin() as transaction:
            return look(_Marks(transaction, self._mapped.marks))

    def catch_up(self, lineage: Lineage, bins: Iterable[BinId]) -> int:
        """Bring these bins to the lineage's positions; return the number of rows applied.

        Any process may call this at any time, with any lineage.
        """
        bins = tuple(bins)
        if not lineage.missing(self.positions(), bins):
            return 0
        return self._retry_if_damaged(lambda: self._catch_up(lineage, bins))

    def drop(self, bins: Iterable[BinId]) -> None:
        """Forget what it has of these bins, each in a transaction of its own. Views that are open keep seeing them.

        Any process may call this at any time: whoever needs one of them again catches up.
        """
        for number in bins:
            self._retry_if_damaged(partial(self._drop, number))

    def _drop(self, number: BinId) -> None:
        with self._mapped.guarded():
            self._mapped.write(lambda transaction: self._clear(transaction, [number]))

    def view(self, lineage: Lineage, bins: Iterable[BinId]) -> View:
        """Catch up, then show these bins at the given lineage, regardless of what other tasks do to the base."""
        return View(self, lineage, tuple(bins))

    def _catch_up(self, lineage: Lineage, bins: Sequence[BinId]) -> int:
        rows = 0
        with self._mapped.guarded():
            # Check again: another process may have caught up while this one waited for the guard.
            steps = lineage.missing(self.positions(), bins)
            if steps.clear:
                self._mapped.write(lambda transaction: self._clear(transaction, steps.clear))
            for step in steps.apply:
                table = self.files.read(step.file)
                self.bytes_read += step.file.size
                rows += self._mapped.write(_BinChange(self, step, table), room=_ROOM_PER_BYTE * table.nbytes)
        return rows

    def _retry_if_damaged(self, use: Callable[[], _T]) -> _T:
        """Use the environment; if it turns out to be damaged, replace it with an empty one and try again."""
        with self._mapped.lock:
            try:
                return use()
            except DAMAGED:
                with self._mapped.guarded():
                    self._mapped.replace()
            try:
                return use()
            except lmdb.Error as error:
                raise StateError(f"the base {str(self._mapped.folder)!r} cannot be used: {error}") from error

    def _clear(self, transaction: lmdb.Transaction[bytes], bins: Iterable[BinId]) -> None:
        marks = _Marks(transaction, self._mapped.marks)
        cursor = transaction.cursor()
        for number in bins:
            prefix = bytes([number])
            while cursor.set_range(prefix) and cursor.key()[0] == number:
                # Deleting moves the cursor to the next row.
                while cursor.delete() and cursor.key()[:1] == prefix:
                    pass
            marks.set(number, EMPTY, 0)
        marks.store()


class _BinChange:
    """Applies one lineage step to the environment. It may be called again if there was not enough room."""

    def __init__(self, base: Base, step: LineageStep, table: pa.Table) -> None:
        self._mapped = base._mapped
        self._step = step
        self._table = table

    def __call__(self, transaction: lmdb.Transaction[bytes]) -> int:
        wanted = self._step.positions
        marks = _Marks(transaction, self._mapped.marks)
        cursor = transaction.cursor()
        applied = 0
        entries = transaction.stat()["entries"]
        for rows in _in_chunks(self._table, wanted):
            keys, values = rows["key"].to_pylist(), rows["value"].to_pylist()
            for number, start, stop in bin_ranges(rows):
                _apply(transaction, cursor, keys[start:stop], values[start:stop])
                # Count by LMDB's number of entries: that avoids looking up whether each key is new.
                before, entries = entries, transaction.stat()["entries"]
                marks.set(number, EMPTY, marks.count(number) + entries - before)
            applied += len(keys)
        for number, position in wanted.items():
            marks.set(number, position, marks.count(number))
        marks.store()
        return applied


class View:
    """Some bins of a base at a given lineage. Valid until it is closed."""

    def __init__(self, base: Base, lineage: Lineage, bins: tuple[BinId, ...]) -> None:
        self.bins = frozenset(bins)
        self._base = base
        self._lineage = lineage
        self._wanted = lineage.positions(bins)
        self._transaction: lmdb.Transaction[bytes] | None = None
        self._remapped = -1
        with base._mapped.lock:  # otherwise what another thread reads meanwhile would be counted here
            before = base.bytes_read
            self.rows_applied = base.catch_up(lineage, bins)
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
        prefix = bytes([bin_id, namespace])
        last = prefix + stop if stop is not None else bytes([bin_id, namespace + 1])
        return self._scan(prefix + start, last)

    def occupied(self, bins: Iterable[BinId], namespace: Namespace, stop: bytes | None = None) -> list[BinId]:
        """Those of ``bins`` with at least one entry in a namespace before ``stop``; one lookup per bin."""
        return self._base._retry_if_damaged(lambda: self._occupied(bins, namespace, stop))

    def _occupied(self, bins: Iterable[BinId], namespace: Namespace, stop: bytes | None) -> list[BinId]:
        found = []
        with contextlib.closing(self._current().cursor()) as cursor:
            for number in bins:
                prefix = bytes([number, namespace])
                last = prefix + stop if stop is not None else bytes([number, namespace + 1])
                if cursor.set_range(prefix) and cursor.key() < last:
                    found.append(number)
        return found

    def count(self, bin_id: BinId) -> int:
        """The number of rows in a bin, over all namespaces."""
        return self._base._retry_if_damaged(lambda: _Marks(self._current(), self._base._mapped.marks).count(bin_id))

    def table(self, bins: Iterable[BinId]) -> pa.Table:
        """All rows of these bins, in the form that a snapshot stores."""
        keys: list[bytes] = []
        values: list[bytes] = []
        for number in sorted(bins):
            last = bytes([number + 1]) if number + 1 < BINS else None
            for key, value in self._scan(bytes([number]), last):
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
            held = _Marks(transaction, mapped.marks).positions()
            if all(held.get(number, EMPTY) == position for number, position in self._wanted.items()):
                self._transaction = transaction
                return
            # Another task moved the base to another epoch after we caught up.
            transaction.abort()
            self.rows_applied += self._base.catch_up(self._lineage, tuple(self.bins))
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


def _in_chunks(table: pa.Table, bins: Container[BinId]) -> Iterator[pa.Table]:
    """The rows of these bins, in bounded chunks, because each row becomes Python objects."""
    start = stop = 0
    for number, first, behind in bin_ranges(table):
        if number not in bins or stop != first or stop - start > _MANY:
            if stop > start:
                yield table.slice(start, stop - start)
            start = first
        stop = behind if number in bins else first
    if stop > start:
        yield table.slice(start, stop - start)


def _apply(
    transaction: lmdb.Transaction[bytes],
    cursor: lmdb.Cursor[bytes],
    keys: Sequence[bytes],
    values: Sequence[bytes | None],
) -> None:
    rows = zip(keys, values, strict=True)
    if None in values:
        cursor.putmulti((key, value) for key, value in rows if value is not None)
        for key, value in zip(keys, values, strict=True):
            if value is None:
                transaction.delete(key)
    else:
        cursor.putmulti(rows)  # type: ignore[arg-type]  # no None is among the values


class _Marks:
    """Position and row count of each bin: one record, read and stored in the same transaction as the rows."""

    _KEY = b"bins"
    _SIZE = 24
    _NOTHING = bytes(16)

    def __init__(self, transaction: lmdb.Transaction[bytes], table: lmdb._Database) -> None:
        self._transaction = transaction
        self._table = table
        data = transaction.get(self._KEY, db=table)
        if data is None:
            self._data = bytearray(BINS * self._SIZE)
            return
        self._data = bytearray(data[4:])
        if len(self._data) != BINS * self._SIZE or zlib.crc32(self._data).to_bytes(4, "little") != data[:4]:
            raise lmdb.CorruptedError("the positions of bins")

    def positions(self) -> dict[BinId, Position]:
        data, nothing = bytes(self._data), self._NOTHING
        found = ((number, data[at : at + 16]) for number, at in zip(ALL_BINS, range(0, len(data), 24), strict=True))
        return {number: Position(position) for number, position in found if position != nothing}

    def count(self, number: BinId) -> int:
        at = number * self._SIZE
        return int.from_bytes(self._data[at + 16 : at + 24], "little")

    def set(self, number: BinId, position: Position, count: int) -> None:
        at = number * self._SIZE
        self._data[at : at + 24] = (position or self._NOTHING) + count.to_bytes(8, "little")

    def store(self) -> None:
        data = bytes(self._data)
        self._transaction.put(self._KEY, zlib.crc32(data).to_bytes(4, "little") + data, db=self._table)
