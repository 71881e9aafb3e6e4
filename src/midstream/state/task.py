"""The state that one task reads and changes: committed state below, the task's own changes above.

Nobody else sees a task's changes before its epoch is committed. They stay in memory, and beyond a limit on the local
disk (:mod:`.spill`), until they are written as one delta file, which takes effect only when the manifest refers to it.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from operator import itemgetter
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.key_space import KeySpace
from midstream.errors import StateError
from midstream.ids import BinId
from midstream.state.base import Base
from midstream.state.files import Author, FileKind, FileRef, bytes_by_bin, rows_of_bins, table_of
from midstream.state.keys import MAX_STORED_KEY, Namespace
from midstream.state.lineage import Lineage, Rewrite
from midstream.state.spill import UNKNOWN, Spill

__all__ = ["TaskState", "merged"]

_first = itemgetter(0)
_FEW = 64

HELD_BYTES = 32 << 20
"""Changes that a task keeps in memory for each of its operators, about; more are put on the local disk."""
_CHANGE_BYTES = 240
"""Approximate size in bytes of a change in memory without its key and value."""
_TOGETHER = 1 << 16
"""Changes that are read back from the disk at a time."""


class TaskState:
    """The bins of one task in one epoch: reads see committed state and the task's own writes.

    Keys are stored keys (:func:`~midstream.state.keys.encode_keys`), values are bytes.

    >>> import tempfile
    >>> from midstream.ids import Epoch, PartitionId, Run
    >>> from midstream.state.files import StateFiles
    >>> files = StateFiles(tempfile.mkdtemp())
    >>> base = Base(tempfile.mkdtemp(), "job 1, count", files)
    >>> with TaskState(base, Lineage.start("count"), [BinId(7)]) as state:
    ...     state.put_many([b"\\x07\\x00ann"], [b"1"])
    ...     print(state.get_many([b"\\x07\\x00ann", b"\\x07\\x00bob"]))
    ...     delta = state.write_delta(Author("count", Epoch(0), Run(0), PartitionId(0), attempt=0))
    [b'1', None]
    >>> delta.rows
    1
    >>> base.close()
    """

    def __init__(self, base: Base, lineage: Lineage, bins: Iterable[BinId]) -> None:
        self._base = base
        self._lineage = lineage
        self._view = base.view(lineage, bins)
        self.space = base.space
        self._bin_in = itemgetter(0) if self.space.width == 1 else itemgetter(slice(0, 2))
        self._own = frozenset(map(self._bin_in, map(self.space.prefix, self._view.bins)))
        self.delta_sizes: tuple[int, ...] = ()
        """Bytes of keys and values in each bin of the delta, once it is written."""
        self._changes: dict[bytes, bytes | None] = {}
        """The newest ones; those in the spill are older."""
        self._held_bytes = 0
        self._spill: Spill | None = None
        self._sorted: list[bytes] = []

    @property
    def bins(self) -> frozenset[BinId]:
        """The bins of this task; keys in other bins are refused."""
        return self._view.bins

    @property
    def lineage(self) -> Lineage:
        """The state that the task began with."""
        return self._lineage

    @property
    def bytes_read(self) -> int:
        """Bytes of files that the base had to read first."""
        return self._view.bytes_read

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None if it has none. Fastest when the keys are ascending."""
        self._require_own(keys)
        if not self._changes and self._spill is None:
            return self._view.get_many(keys)
        get = self._changes.get
        values: list[Any] = [get(key, UNKNOWN) for key in keys]
        if self._spill is not None:
            _fill_in(values, keys, self._spill.get_many)
        _fill_in(values, keys, self._view.get_many)
        return values

    def put_many(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Set the value of each key."""
        self._change(keys, values)

    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Delete the value of each key, if it has one."""
        self._change(keys, [None] * len(keys))

    def scan(
        self, bin_id: BinId, namespace: Namespace, start: bytes = b"", stop: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Stored keys and values of a namespace, ascending; ``start`` and ``stop`` bound what follows the namespace.

        The scan sees changes made before it began; more may be made while it runs.
        """
        prefix, behind = self.space.prefix(bin_id, namespace), self.space.prefix(bin_id, namespace + 1)
        self._require_own([prefix])
        changed = self._changed(prefix + start, behind if stop is None else prefix + stop)
        committed = self._view.scan(bin_id, namespace, start, stop)
        if self._spill is not None:
            spilled = self._spill.scan(prefix + start, behind if stop is None else prefix + stop)
            committed = _over_committed(committed, spilled)
        return _overlay(committed, [(key, self._changes[key]) for key in changed])

    def occupied(self, namespace: Namespace, stop: bytes | None = None) -> list[BinId]:
        """The bins of this task, ascending, that may have entries in a namespace before ``stop``.

        Most bins have nothing due; running a :meth:`scan` on each of them would take milliseconds.
        """
        at = self.space.width
        changed = {self.space.bin_of(key) for key in self._changes if key[at] == namespace}
        if self._spill is not None:
            changed |= self._spill.occupied(self.bins, namespace, self.space)
        return sorted({*changed, *self._view.occupied(sorted(self.bins), namespace, stop)})

    def scan_prefix(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Stored keys with a prefix (at least bin and namespace) and their values, ascending."""
        rest = prefix[self.space.head :]
        namespace = Namespace(prefix[self.space.width])
        return self.scan(self.space.bin_of(prefix), namespace, rest, _prefix_end(rest))

    def changes(self) -> pa.Table:
        """All changes, ascending by key; a null value is a deletion."""
        if self._spill is not None:
            self._spill_all(self._spill)
            return _table_of(self._spill)
        keys = sorted(self._changes)
        return table_of(keys, list(map(self._changes.__getitem__, keys)))

    def write_delta(self, author: Author) -> FileRef | None:
        """Write the changes to the checkpoint location; None if there are none."""
        if not self._changes and self._spill is None:
            return None
        changes = self.changes()
        self.delta_sizes = tuple(bytes_by_bin(changes, self.space))
        return self._base.files.write(changes, FileKind.DELTA, author)

    def write_rewrites(self, author: Author) -> list[Rewrite]:
        """Write the rewrites that are due for this task's bins: snapshots, and merged files of many small deltas.

        They hold the state *before* this epoch, and cost in proportion to the rows that epochs have touched.
        """
        due = self._lineage.due_for_snapshot(sorted(self.bins), self._count)
        rewrites = []
        if due:
            rewrites.append(_snapshot(self, sorted(due), author))
        rest = sorted(self.bins - set(due))
        small = self._lineage.due_for_merging(rest, author.epoch, author.partition)
        if small:
            table = merged([(self._base.files.read(file), bins) for file, bins in small], self.space)
            file = self._base.files.write(table, FileKind.MERGED, author)
            replaced = tuple(one.digest for one, _ in small)
            rewrites.append(Rewrite(file, self.space.pack(rest), replaced, complete=False))
        return rewrites

    def close(self) -> None:
        """Close the view of the base. Unwritten changes are lost."""
        self._view.close()
        if self._spill is not None:
            self._spill.close()

    def __enter__(self) -> TaskState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _change(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        if len(keys) != len(values):
            raise StateError(f"{len(keys)} keys and {len(values)} values were given; each key needs one value")
        if not keys:
            return
        self._require_own(keys)
        lengths = list(map(len, keys))
        largest = max(lengths)
        if largest > MAX_STORED_KEY:
            raise StateError(
                f"operator {self._lineage.operator!r}: a stored key takes {largest} bytes; at most {MAX_STORED_KEY} "
                f"are allowed. Use a shorter key, or shorter keys in its map"
            )
        self._changes.update(zip(keys, values, strict=True))
        self._held_bytes += sum(lengths) + sum(map(len, filter(None, values))) + _CHANGE_BYTES * len(keys)
        if self._held_bytes > HELD_BYTES:
            self._relieve()

    @property
    def _count(self) -> int:
        """The number of changed keys; those that are both in memory and on the disk count twice."""
        return len(self._changes) + (0 if self._spill is None else len(self._spill))

    def _relieve(self) -> None:
        """Put changes on the disk, unless most of what was counted were changes of the same keys."""
        nbytes = sum(map(len, self._changes)) + sum(map(len, filter(None, self._changes.values())))
        self._held_bytes = nbytes + _CHANGE_BYTES * len(self._changes)
        if self._held_bytes > HELD_BYTES // 2:
            if self._spill is None:
                self._spill = Spill(os.path.dirname(self._base.folder))  # a base empties its own folder
            self._spill_all(self._spill)

    def _spill_all(self, spill: Spill) -> None:
        spill.put((key, self._changes[key]) for key in sorted(self._changes))
        self._changes, self._sorted, self._held_bytes = {}, [], 0

    def _changed(self, start: bytes, stop: bytes) -> list[bytes]:
        """Changed keys in this range, ascending."""
        new = len(self._changes) - len(self._sorted)
        if new > _FEW:
            self._sorted = sorted(self._changes)
        else:
            # A dict keeps its keys in the order of their first change, so new keys are at the end.
            for key in islice(reversed(self._changes), new):
                insort(self._sorted, key)
        return self._sorted[bisect_left(self._sorted, start) : bisect_left(self._sorted, stop)]

    def _require_own(self, keys: Sequence[bytes]) -> None:
        strays = set(map(self._bin_in, keys)) - self._own
        if strays:
            found = sorted({self.space.bin_of(key) for key in keys} - self.bins)
            raise StateError(
                f"operator {self._lineage.operator!r}: keys of the bins {found} do not belong to this task, "
                f"which has {len(self.bins)} others; rows must be exchanged by key before a stateful operator"
            )


def _prefix_end(prefix: bytes) -> bytes | None:
    """The smallest bytes greater than everything with this prefix; None if there are none."""
    shortened = prefix.rstrip(b"\xff")
    return shortened[:-1] + bytes([shortened[-1] + 1]) if shortened else None


def merged(
    deltas: Sequence[tuple[pa.Table, Collection[BinId]]],
    space: KeySpace = KeySpace(),  # noqa: B008
) -> pa.Table:
    """The rows of several deltas, oldest first, each for some bins; for each key, its last row.

    >>> old, new = table_of([b"\\x01a", b"\\x01b"], [b"1", b"1"]), table_of([b"\\x01b", b"\\x02a"], [None, b"2"])
    >>> merged([(old, [BinId(1)]), (new, [BinId(1)])]).to_pylist()
    [{'key': b'\\x01a', 'value': b'1'}, {'key': b'\\x01b', 'value': None}]
    """
    # Newest first: sorting is stable, so the first row of a key is its last change.
    parts = [rows_of_bins(table, bins, space) for table, bins in reversed(deltas)]
    rows = pa.concat_tables([table_of([], []), *parts]).combine_chunks()
    if not rows.num_rows:
        return rows
    rows = rows.take(pc.array_sort_indices(rows["key"].chunk(0)))
    keys = rows["key"].combine_chunks()
    is_first = pa.concat_arrays([pa.array([True]), pc.not_equal(keys[1:], keys[:-1])])
    return rows.filter(is_first)


def _snapshot(state: TaskState, bins: list[BinId], author: Author) -> Rewrite:
    rows = state._view.table(bins)
    file = state._base.files.write(rows, FileKind.SNAPSHOT, author)
    replaced = tuple(one.digest for one in state._lineage.files_of(bins))
    sizes = tuple(bytes_by_bin(rows, state.space))
    return Rewrite(file, state.space.pack(bins), replaced, complete=True, sizes=sizes)


def _fill_in(values: list[Any], keys: Sequence[bytes], get_many: Callable[[Sequence[bytes]], list[Any]]) -> None:
    """Ask for the values that are still unknown."""
    unknown = [index for index, value in enumerate(values) if value is UNKNOWN]
    if len(unknown) == len(keys):
        values[:] = get_many(keys)
    elif unknown:
        for index, value in zip(unknown, get_many([keys[index] for index in unknown]), strict=True):
            values[index] = value


def _table_of(spill: Spill) -> pa.Table:
    """All changes in a spill, in the form that files store, without a Python object for each of them at once."""
    rows, parts = spill.scan(), [table_of([], [])]
    while some := list(islice(rows, _TOGETHER)):
        parts.append(table_of([key for key, _ in some], [value for _, value in some]))
    return pa.concat_tables(parts).combine_chunks()


def _over_committed(
    committed: Iterator[tuple[bytes, bytes]], spilled: Iterator[tuple[bytes, bytes | None]]
) -> Iterator[tuple[bytes, bytes]]:
    """Both inputs merged, ascending; spilled changes win over committed values, and deleted keys are left out."""
    newest = None
    for key, value in merge(spilled, committed, key=_first):  # of equal keys the first input's comes first
        if key != newest and value is not None:
            yield key, value
        newest = key


def _overlay(
    committed: Iterator[tuple[bytes, bytes]], changed: Sequence[tuple[bytes, bytes | None]]
) -> Iterator[tuple[bytes, bytes]]:
    """Both inputs merged, ascending; changes win over committed values, and deleted keys are left out."""
    hidden = dict(changed)
    below = ((key, value) for key, value in committed if key not in hidden)
    for key, value in merge(below, changed, key=_first):
        if value is not None:
            yield key, value
