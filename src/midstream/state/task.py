"""The state that one task reads and changes: committed state below, the task's own changes above.

Nobody else sees a task's changes before its epoch is committed. They stay in memory until they are written as one delta
file, which takes effect only when the manifest refers to it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from operator import itemgetter
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from midstream.errors import StateError
from midstream.ids import BinId
from midstream.state.base import Base
from midstream.state.files import Author, FileKind, FileRef, bin_ranges, table_of
from midstream.state.keys import MAX_STORED_KEY, Namespace
from midstream.state.lineage import Lineage, Rewrite

__all__ = ["TaskState", "merged"]

_ABSENT: Any = object()
_first = itemgetter(0)
_FEW = 64


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
        self._changes: dict[bytes, bytes | None] = {}
        self._sorted: list[bytes] = []

    @property
    def bins(self) -> frozenset[BinId]:
        """The bins of this task; keys in other bins are refused."""
        return self._view.bins

    @property
    def lineage(self) -> Lineage:
        """What the task began with."""
        return self._lineage

    @property
    def bytes_read(self) -> int:
        """Bytes of files that the base had to read first."""
        return self._view.bytes_read

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None if it has none. Fastest when the keys are ascending."""
        self._require_own(keys)
        if not self._changes:
            return self._view.get_many(keys)
        get = self._changes.get
        values: list[Any] = [get(key, _ABSENT) for key in keys]
        unknown = [index for index, value in enumerate(values) if value is _ABSENT]
        if len(unknown) == len(keys):
            return self._view.get_many(keys)
        for index, value in zip(unknown, self._view.get_many([keys[index] for index in unknown]), strict=True):
            values[index] = value
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
        self._require_own([bytes([bin_id])])
        prefix = bytes([bin_id, namespace])
        changed = self._changed(prefix + start, prefix + stop if stop is not None else bytes([bin_id, namespace + 1]))
        committed = self._view.scan(bin_id, namespace, start, stop)
        return _overlay(committed, [(key, self._changes[key]) for key in changed])

    def occupied(self, namespace: Namespace, stop: bytes | None = None) -> list[BinId]:
        """The bins of this task, ascending, that may have entries in a namespace before ``stop``.

        Most bins have nothing due; running a :meth:`scan` on each of them would take milliseconds.
        """
        changed = {BinId(key[0]) for key in self._changes if key[1] == namespace}
        return sorted({*changed, *self._view.occupied(sorted(self.bins), namespace, stop)})

    def scan_prefix(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Stored keys with a prefix (at least bin and namespace) and their values, ascending."""
        rest = prefix[2:]
        return self.scan(BinId(prefix[0]), Namespace(prefix[1]), rest, _prefix_end(rest))

    def changes(self) -> pa.Table:
        """All changes, ascending by key; a null value is a deletion."""
        keys = sorted(self._changes)
        return table_of(keys, list(map(self._changes.__getitem__, keys)))

    def write_delta(self, author: Author) -> FileRef | None:
        """Write the changes to the checkpoint location; None if there are none."""
        if not self._changes:
            return None
        return self._base.files.write(self.changes(), FileKind.DELTA, author)

    def write_rewrites(self, author: Author) -> list[Rewrite]:
        """Write the rewrites that are due for this task's bins: snapshots, and merged files of many small deltas.

        They hold the state *before* this epoch, and cost in proportion to the rows that epochs have touched.
        """
        due = self._lineage.due_for_snapshot(sorted(self.bins), len(self._changes))
        rewrites = []
        if due:
            rewrites.append(_snapshot(self, sorted(due), author))
        rest = sorted(self.bins - set(due))
        small = self._lineage.due_for_merging(rest)
        if small:
            table = merged([(self._base.files.read(file), bins) for file, bins in small])
            file = self._base.files.write(table, FileKind.MERGED, author)
            rewrites.append(Rewrite(file, bytes(rest), tuple(one.digest for one, _ in small), complete=False))
        return rewrites

    def close(self) -> None:
        """Close the view of the base. Unwritten changes are lost."""
        self._view.close()

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
        largest = max(map(len, keys))
        if largest > MAX_STORED_KEY:
            raise StateError(
                f"operator {self._lineage.operator!r}: a stored key takes {largest} bytes; at most {MAX_STORED_KEY} "
                f"are allowed. Use a shorter key, or shorter keys in its map"
            )
        self._changes.update(zip(keys, values, strict=True))

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
        strays = set(map(_first, keys)) - self.bins
        if strays:
            raise StateError(
                f"operator {self._lineage.operator!r}: keys of the bins {sorted(strays)} do not belong to this task, "
                f"which has {len(self.bins)} others; rows must be exchanged by key before a stateful operator"
            )


def _prefix_end(prefix: bytes) -> bytes | None:
    """The smallest bytes greater than everything with this prefix; None if there are none."""
    shortened = prefix.rstrip(b"\xff")
    return shortened[:-1] + bytes([shortened[-1] + 1]) if shortened else None


def merged(deltas: Sequence[tuple[pa.Table, Iterable[BinId]]]) -> pa.Table:
    """The rows of several deltas, oldest first, each for some bins; for each key, its last row.

    >>> old, new = table_of([b"\\x01a", b"\\x01b"], [b"1", b"1"]), table_of([b"\\x01b", b"\\x02a"], [None, b"2"])
    >>> merged([(old, [BinId(1)]), (new, [BinId(1)])]).to_pylist()
    [{'key': b'\\x01a', 'value': b'1'}, {'key': b'\\x01b', 'value': None}]
    """
    # Newest first: sorting is stable, so the first row of a key is its last change.
    parts = [_rows_of_bins(table, set(bins)) for table, bins in reversed(deltas)]
    rows = pa.concat_tables([table_of([], []), *parts]).combine_chunks()
    if not rows.num_rows:
        return rows
    rows = rows.take(pc.array_sort_indices(rows["key"].chunk(0)))
    keys = rows["key"].combine_chunks()
    is_first = pa.concat_arrays([pa.array([True]), pc.not_equal(keys[1:], keys[:-1])])
    return rows.filter(is_first)


def _rows_of_bins(table: pa.Table, wanted: set[BinId]) -> pa.Table:
    ranges = list(bin_ranges(table))
    if all(number in wanted for number, _, _ in ranges):
        return table
    return pa.concat_tables(
        [table.slice(0, 0), *(table.slice(start, stop - start) for number, start, stop in ranges if number in wanted)]
    )


def _snapshot(state: TaskState, bins: list[BinId], author: Author) -> Rewrite:
    file = state._base.files.write(state._view.table(bins), FileKind.SNAPSHOT, author)
    replaced = tuple(one.digest for one in state._lineage.files_of(bins))
    return Rewrite(file, bytes(bins), replaced, complete=True)


def _overlay(
    committed: Iterator[tuple[bytes, bytes]], changed: Sequence[tuple[bytes, bytes | None]]
) -> Iterator[tuple[bytes, bytes]]:
    """Both inputs merged, ascending; changes win over committed values, and deleted keys are left out."""
    hidden = dict(changed)
    below = ((key, value) for key, value in committed if key not in hidden)
    for key, value in merge(below, changed, key=_first):
        if value is not None:
            yield key, value
