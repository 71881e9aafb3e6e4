"""The base: a cache of committed state on a host's local disk, shared by the host's Python workers.

There is one LMDB environment per operator; each key begins with its bin. A slice's keys are read in one sorted
pass over all bins of a task. Whatever is applied in one transaction is applied together with the positions of its bins,
so a bin's rows and its position always agree, no matter when a process is killed. If the environment is damaged, or a
bin's position is not part of the lineage, the data is rebuilt from the files in the checkpoint location.

What takes longer than a transaction may (loading bins ahead of time, dropping them) first gives its bins a position
that is part of no lineage. If it is not finished, whoever needs such a bin clears it and loads it from the beginning.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import lmdb
import numpy as np
import pyarrow as pa

from midstream.data.key_space import BinNumbers, KeySpace
from midstream.errors import StateError
from midstream.ids import BinId
from midstream.state.files import StateFiles, bin_ranges
from midstream.state.lineage import EMPTY, Lineage, LineageStep, Position, Positions, Steps
from midstream.state.mapped import DAMAGED, Mapped
from midstream.state.marks import Marks
from midstream.state.view import View

__all__ = ["ALL_BINS", "Base", "Loaded", "View"]

ALL_BINS = KeySpace().all
"""All bins of an operator, if it has as many as usual."""

_MANY = 50_000
_TURN = 10_000
"""Rows that background work writes or deletes in one transaction. Tasks wait meanwhile, for a few milliseconds."""
_TURN_BYTES = 1 << 20
_LIGHT = 256 << 10
"""Bins with fewer bytes to load are loaded in one transaction, so that they can be read all the time."""
_FEW_DELTAS = 64
"""Steps that are read before they are applied in one transaction."""
_FEW_BYTES = 8 << 20
_ROOM_PER_BYTE = 2  # size of a row in a page relative to its size in a file
_T = TypeVar("_T")


@dataclass(frozen=True)
class Loaded:
    """What one call of :meth:`Base.prefetch` did, and what is left."""

    bins: tuple[BinId, ...]
    """The bins that are now at the lineage's positions and were not before."""
    rows: int
    nbytes: int
    """Bytes of keys and values that were applied."""
    left: tuple[BinId, ...]
    """The bins that are still behind."""


class Base:
    """The committed state of one operator, for the bins that this host has needed so far.

    ``owner`` names the job and the operator. A folder that belongs to another owner is emptied.

    >>> import tempfile
    >>> from midstream.ids import Epoch, PartitionId, Run
    >>> from midstream.state.files import Author, FileKind, table_of
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
        """Bytes of files that this process has read to catch up."""
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

    @property
    def folder(self) -> str:
        """Its folder on the local disk."""
        return str(self._mapped.folder)

    @property
    def space(self) -> KeySpace:
        """The key space of the operator."""
        return self.files.space

    def positions(self) -> dict[BinId, Position]:
        """The position of each bin; bins that were never needed are left out."""
        held = self._held()
        return {BinId(number): Position(held[number].item()) for number in np.flatnonzero(held != EMPTY).tolist()}

    def held(self) -> frozenset[BinId]:
        """The bins that it has anything of."""
        return frozenset(map(BinId, np.flatnonzero(self._held() != EMPTY).tolist()))

    def rows(self) -> dict[BinId, int]:
        """The number of rows of each bin that has any, over all namespaces."""
        counts = self._retry_if_damaged(lambda: self._look(Marks.counts))
        return {BinId(number): counts[number].item() for number in np.flatnonzero(counts).tolist()}

    def _held(self) -> Positions:
        """The position of each bin."""
        return self._retry_if_damaged(lambda: self._look(Marks.positions))

    def _look(self, look: Callable[[Marks], _T]) -> _T:
        with self._mapped.begin() as transaction:
            return look(self._marks(transaction))

    def _marks(self, transaction: lmdb.Transaction[bytes]) -> Marks:
        return Marks(transaction, self._mapped.marks, self.space.bins)

    def catch_up(self, lineage: Lineage, bins: Iterable[BinId]) -> int:
        """Bring these bins to the lineage's positions; return the number of rows applied.

        Any process may call this at any time, with any lineage.
        """
        bins = tuple(bins)
        self._require_space(lineage)
        if not lineage.missing(self._held(), bins):
            return 0
        return self._retry_if_damaged(lambda: self._catch_up(lineage, bins))

    def prefetch(self, lineage: Lineage, bins: Iterable[BinId], limit_bytes: int) -> Loaded:
        """Load some of ``bins`` ahead of time: as many as fit in about ``limit_bytes``, but at least one.

        For a thread in the background, which calls again until nothing is left: other tasks may use the base, at any
        lineage, at the same time. They wait for a few milliseconds at a time at most. Bins that are only slightly
        behind are brought up to date in the same way.
        """
        bins = tuple(bins)
        self._require_space(lineage)
        held = self._held()
        behind = _behind(lineage, bins, held)
        sizes = lineage.bytes_behind(held, behind)[behind]
        light = sizes <= _LIGHT
        if light.any():
            chosen = behind[light][: _count_within(sizes[light], min(limit_bytes, _TURN_BYTES))]
            done, rows, nbytes = self._load_at_once(lineage, chosen, held)
        elif len(behind):
            chosen = behind[: _count_within(sizes, limit_bytes)]
            done, rows, nbytes = self._load_in_turns(lineage, chosen)
        else:
            return Loaded((), 0, 0, ())
        left = _behind(lineage, bins, self._held())
        return Loaded(tuple(map(BinId, done.tolist())), rows, nbytes, tuple(map(BinId, left.tolist())))

    def drop(self, bins: Iterable[BinId]) -> int:
        """Forget these bins; return the number of rows dropped. Tasks that read them keep what they see.

        Like :meth:`prefetch`, this holds up others for a few milliseconds at a time. LMDB uses the space for other
        bins; :meth:`compact` gives it back to the disk.
        """
        return self._drop(tuple(bins))

    def compact(self) -> int:
        """Copy what is left to a smaller file if most of it is free space; return the bytes given back to the disk.

        Others wait meanwhile, and go on with the copy. Readers keep the old file until they are done with it.
        """
        return self._retry_if_damaged(self._mapped.compact)

    @property
    def disk_bytes(self) -> int:
        """The size of the file."""
        return self._mapped.size

    def _require_space(self, lineage: Lineage) -> None:
        if lineage.space != self.space:
            raise StateError(
                f"the state of {lineage.operator!r} has {lineage.space.bins} bins, but its base was opened with "
                f"{self.space.bins}; the number of bins of a job never changes"
            )

    def view(self, lineage: Lineage, bins: Iterable[BinId]) -> View:
        """Catch up, then show these bins at the given lineage, regardless of what other tasks do to the base."""
        return View(self, lineage, tuple(bins))

    def _catch_up(self, lineage: Lineage, bins: Sequence[BinId]) -> int:
        rows = 0
        with self._mapped.guarded():
            # Check again: another process may have caught up while this one waited for the guard.
            steps = lineage.missing(self._held(), bins)
            if steps.clear:
                self._mapped.write(lambda transaction: self._clear(transaction, steps.clear))
            for together in self._in_batches(steps):
                nbytes = sum(table.nbytes for _, tables in together for table in tables)
                self.bytes_read += nbytes
                room = _ROOM_PER_BYTE * nbytes
                rows += self._mapped.write(_Application(self, together), room=room)
        return rows

    def _in_batches(self, steps: Steps) -> Iterator[list[tuple[LineageStep, list[pa.Table]]]]:
        """The steps with their rows: small ones together, as a transaction costs more than a few rows."""
        together: list[tuple[LineageStep, list[pa.Table]]] = []
        nbytes = 0
        for step in steps.apply:
            tables = list(self.files.read_bins(step.file, step.bins))
            size = sum(table.nbytes for table in tables)
            if together and (nbytes + size > _FEW_BYTES or len(together) == _FEW_DELTAS):
                yield together
                together, nbytes = [], 0
            together.append((step, tables))
            nbytes += size
        if together:
            yield together

    # ── in the background ─────────────────────────────────────────────────────────────────────────────────────────

    def _load_at_once(self, lineage: Lineage, bins: BinNumbers, held: Positions) -> tuple[BinNumbers, int, int]:
        """Load bins that lack little in one transaction, unless another process moves one of them meanwhile."""
        steps = lineage.missing(held, map(BinId, bins.tolist()))
        if steps.clear:
            return self._load_in_turns(lineage, bins)
        tables = [(step, list(self.files.read_bins(step.file, step.bins))) for step in steps.apply]
        nbytes = sum(table.nbytes for _, parts in tables for table in parts)
        application = _Application(self, tables)

        def apply(transaction: lmdb.Transaction[bytes]) -> int | None:
            if not np.array_equal(self._marks(transaction).positions()[bins], held[bins]):
                return None
            return application(transaction)

        rows = self._in_turn(apply, room=_ROOM_PER_BYTE * nbytes)
        return (bins[:0], 0, 0) if rows is None else (bins, rows, nbytes)

    def _load_in_turns(self, lineage: Lineage, bins: BinNumbers) -> tuple[BinNumbers, int, int]:
        """Load bins in several transactions. Until they are complete they are at a position of no lineage."""
        token = _token()
        steps = self._in_turn(lambda transaction: self._claim(transaction, lineage, bins, token))
        self._clear_in_turns(list(steps.clear), token)
        rows = nbytes = 0
        for step in steps.apply:
            for table in self.files.read_bins(step.file, step.bins):
                for start in range(0, table.num_rows, _TURN):
                    part = table.slice(start, _TURN)
                    rows += self._in_turn(_Extension(self, token, part), room=_ROOM_PER_BYTE * part.nbytes)
                    nbytes += part.nbytes
        final = lineage.position_array(bins)
        return self._in_turn(lambda transaction: self._settle(transaction, token, bins, final)), rows, nbytes

    def _claim(self, transaction: lmdb.Transaction[bytes], lineage: Lineage, bins: BinNumbers, token: bytes) -> Steps:
        """The steps to load these bins; from now on they are at a position of no lineage, so that nobody reads them."""
        marks = self._marks(transaction)
        steps = lineage.missing(marks.positions(), bins)
        marks.move(bins, token)
        marks.store()
        return steps

    def _settle(
        self, transaction: lmdb.Transaction[bytes], token: bytes, bins: BinNumbers, final: Positions | bytes
    ) -> BinNumbers:
        """Move bins from the position of their claim, except those that another process has meanwhile taken over."""
        marks = self._marks(transaction)
        own: BinNumbers = bins[marks.positions()[bins] == token]
        marks.move(own, final if isinstance(final, bytes) else final[own])
        marks.store()
        return own

    def _drop(self, bins: Sequence[BinId]) -> int:
        numbers = np.fromiter(bins, np.int64)
        numbers = numbers[self._held()[numbers] != EMPTY]
        if not len(numbers):
            return 0
        token = _token()

        def claim(transaction: lmdb.Transaction[bytes]) -> None:
            marks = self._marks(transaction)
            marks.move(numbers, token)
            marks.store()

        self._in_turn(claim)
        dropped = self._clear_in_turns(list(map(BinId, numbers.tolist())), token)
        self._in_turn(lambda transaction: self._settle(transaction, token, numbers, EMPTY))
        return dropped

    def _clear_in_turns(self, bins: list[BinId], token: bytes) -> int:
        """Delete the rows of claimed bins; return how many."""
        total = 0
        while bins:
            deleted, bins = self._in_turn(partial(self._clear_some, bins, token))
            total += deleted
        return total

    def _in_turn(self, change: Callable[[lmdb.Transaction[bytes]], _T], room: int = 0) -> _T:
        """One short transaction of background work. Nothing is held between two of them."""

        def guarded() -> _T:
            with self._mapped.guarded():
                return self._mapped.write(change, room=room)

        return self._retry_if_damaged(guarded)

    def _clear_some(
        self, bins: list[BinId], token: bytes, transaction: lmdb.Transaction[bytes]
    ) -> tuple[int, list[BinId]]:
        """Delete some rows of claimed bins; return how many, and the bins that may have more."""
        marks = self._marks(transaction)
        held, left = marks.positions(), _TURN
        with contextlib.closing(transaction.cursor()) as cursor:
            for at, number in enumerate(bins):
                if held[number] != token:
                    continue  # another process has taken it over
                deleted = self._delete(cursor, number, left)
                marks.set_count(number, marks.count(number) - deleted)
                left -= deleted
                if left <= 0:
                    marks.store()
                    return _TURN, bins[at:]
        marks.store()
        return _TURN - left, []

    def _delete(self, cursor: lmdb.Cursor[bytes], number: BinId, limit: int | None = None) -> int:
        prefix, deleted = self.space.prefix(number), 0
        if cursor.set_range(prefix):
            # Deleting moves the cursor to the next row.
            while (limit is None or deleted < limit) and cursor.key().startswith(prefix) and cursor.delete():
                deleted += 1
        return deleted

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

    def _clear(self, transaction: lmdb.Transaction[bytes], bins: Collection[BinId]) -> None:
        marks = self._marks(transaction)
        with contextlib.closing(transaction.cursor()) as cursor:
            for number in sorted(bins):
                self._delete(cursor, number)
                marks.set_count(number, 0)
        marks.move(np.fromiter(bins, np.int64), EMPTY)
        marks.store()


class _Application:
    """Applies lineage steps to the environment. It may be called again if there was not enough room."""

    def __init__(self, base: Base, steps: list[tuple[LineageStep, list[pa.Table]]]) -> None:
        self._base = base
        self._steps = steps

    def __call__(self, transaction: lmdb.Transaction[bytes]) -> int:
        marks = self._base._marks(transaction)
        applied = 0
        for step, tables in self._steps:
            for table in tables:
                applied += _apply_rows(transaction, marks, table, self._base.space)
            for position, bins in step.leads_to:
                marks.move(bins, position)
        marks.store()
        return applied


class _Extension:
    """Adds rows to claimed bins that are being loaded; those of bins that were taken over are left out."""

    def __init__(self, base: Base, token: bytes, table: pa.Table) -> None:
        self._base = base
        self._token = token
        self._table = table

    def __call__(self, transaction: lmdb.Transaction[bytes]) -> int:
        marks = self._base._marks(transaction)
        held = marks.positions()
        applied = 0
        for number, start, stop in bin_ranges(self._table, self._base.space):
            if held[number] == self._token:
                part = self._table.slice(start, stop - start)
                applied += _apply_rows(transaction, marks, part, self._base.space)
        marks.store()
        return applied


def _apply_rows(transaction: lmdb.Transaction[bytes], marks: Marks, table: pa.Table, space: KeySpace) -> int:
    """Apply rows, and count them by bin, in bounded chunks, because each row becomes Python objects."""
    with contextlib.closing(transaction.cursor()) as cursor:
        entries = transaction.stat()["entries"]
        for start in range(0, table.num_rows, _MANY):
            rows = table.slice(start, _MANY)
            keys, values = rows["key"].to_pylist(), rows["value"].to_pylist()
            has_deletions = rows["value"].null_count > 0
            ranges = list(bin_ranges(rows, space))
            # Behind everything that is stored, LMDB need not search, and fills pages instead of halving them.
            is_behind = not has_deletions and (not cursor.last() or cursor.key() < keys[0])
            if is_behind:
                cursor.putmulti(zip(keys, values, strict=True), append=True)
                for number, first, behind in ranges:
                    marks.set_count(number, marks.count(number) + behind - first)
                entries += len(keys)
                continue
            for number, first, behind in ranges:
                _apply(transaction, cursor, keys[first:behind], values[first:behind], has_deletions)
                # Count by LMDB's number of entries: that avoids looking up whether each key is new.
                before, entries = entries, transaction.stat()["entries"]
                marks.set_count(number, marks.count(number) + entries - before)
    return int(table.num_rows)


def _token() -> bytes:
    """A position of no lineage, for bins that are being loaded or dropped; without a zero at its end, see _MARK."""
    return uuid.uuid4().bytes[:15] + b"\xff"


def _behind(lineage: Lineage, bins: Iterable[BinId], held: Positions) -> BinNumbers:
    """Those of ``bins`` that are not at the lineage's positions."""
    numbers: BinNumbers = np.fromiter(bins, np.int64)
    behind: BinNumbers = numbers[held[numbers] != lineage.position_array(numbers)[numbers]]
    return behind


def _count_within(sizes: np.ndarray[tuple[int], np.dtype[np.float64]], limit: float) -> int:
    """How many of the first bins fit into ``limit`` bytes together; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(sizes), limit, side="right")))


def _apply(
    transaction: lmdb.Transaction[bytes],
    cursor: lmdb.Cursor[bytes],
    keys: Sequence[bytes],
    values: Sequence[bytes | None],
    has_deletions: bool,
) -> None:
    rows = zip(keys, values, strict=True)
    if has_deletions:
        cursor.putmulti((key, value) for key, value in rows if value is not None)
        for key, value in zip(keys, values, strict=True):
            if value is None:
                transaction.delete(key)
    else:
        cursor.putmulti(rows)  # type: ignore[arg-type]  # no None is among the values
