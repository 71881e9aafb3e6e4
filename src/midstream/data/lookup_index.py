"""An index over a static table, for the `lookup` operator.

Built once per process, probed once per slice. Hashes find candidates quickly; exact comparison decides, so two keys
with the same hash never produce a wrong row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.hashing import Hashes, hash_columns
from midstream.data.schema import check_key_columns, type_name
from midstream.errors import SchemaError

__all__ = ["LookupIndex", "RowNumbers"]

RowNumbers = npt.NDArray[np.int64]
"""Row numbers in a batch or a table."""

# Number of pairs verified at a time: bounds the memory if many rows share a hash.
_PAIRS = 1 << 20

# Layouts that Arrow compares only after a cast; it widens integers and decimals by itself.
_COMPARED_AS = {
    "string": pa.large_string(),
    "binary": pa.large_binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


class LookupIndex:
    """Finds the rows of a table by key.

    >>> index = LookupIndex.build(pa.table({"id": [3, 1, 3], "name": ["c", "a", "C"]}), ["id"])
    >>> left, right = index.probe(pa.record_batch({"user": [1, 2, 3]}), ["user"])
    >>> left.tolist(), right.tolist()
    ([0, 2, 2], [1, 0, 2])
    >>> index.duplicates()
    (3,)
    """

    def __init__(self, table: pa.Table, on: tuple[str, ...], hashes: Hashes, rows: RowNumbers) -> None:
        self.table = table
        """The table in one chunk; the right-hand row numbers refer to it."""
        self.on = on
        self._keys = [_plain(table.column(name).combine_chunks()) for name in on]
        self._hashes = hashes  # sorted
        self._rows = rows  # the table's row for each hash; ascending among equal hashes

    @classmethod
    def build(cls, table: pa.Table, on: Sequence[str]) -> Self:
        """Index the table by the columns ``on``; rows with a null in any of them never match, and are left out."""
        check_key_columns(table.schema, on, "the table of a lookup")
        table = table.unify_dictionaries().combine_chunks()
        parts = [hash_columns(batch, on) for batch in table.select(list(on)).to_batches()]
        hashes = np.concatenate(parts) if parts else np.empty(0, np.uint64)
        rows = np.flatnonzero(_all_valid([table.column(name) for name in on], table.num_rows))
        order = np.argsort(hashes[rows], kind="stable")
        rows = rows[order]
        return cls(table, tuple(on), hashes[rows], rows)

    def probe(self, batch: pa.RecordBatch, on: Sequence[str]) -> tuple[RowNumbers, RowNumbers]:
        """All pairs (row of the batch, row of the table) with equal keys, sorted by batch row, then table row."""
        keys = self._probe_keys(batch, on)
        valid = np.flatnonzero(_all_valid(keys, batch.num_rows))
        hashes = hash_columns(batch, on)[valid]
        first = np.searchsorted(self._hashes, hashes, side="left")
        counts = np.searchsorted(self._hashes, hashes, side="right") - first
        found = np.flatnonzero(counts)
        return self._verified(keys, valid[found], first[found], counts[found])

    def duplicates(self) -> tuple[Any, ...] | None:
        """The first key, in the table's order, that more than one row has; ``None`` if keys are unique."""
        same = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        if not len(same):
            return None
        # Only rows that share a hash can share a key.
        suspects = np.unique(np.concatenate((self._rows[same], self._rows[same + 1])))
        keys = [key.take(pa.array(suspects)).to_pylist() for key in self._keys]
        seen: dict[tuple[Any, ...], int] = {}
        twice = [seen[key] for row, key in enumerate(zip(*keys, strict=True)) if seen.setdefault(key, row) != row]
        if not twice:
            return None
        first = min(twice)
        return tuple(key[first] for key in keys)

    def _probe_keys(self, batch: pa.RecordBatch, on: Sequence[str]) -> list[pa.Array]:
        """The batch's key columns, in a layout that can be compared with the table's."""
        if len(on) != len(self.on):
            raise SchemaError(f"a lookup on {', '.join(self.on)} needs as many columns; found {', '.join(on)}")
        check_key_columns(batch.schema, on, "the stream of a lookup")
        keys = []
        for name, other, mine in zip(on, self.on, self._keys, strict=True):
            key = batch.column(name)
            if _family(key.type) != _family(mine.type):
                raise SchemaError(
                    f"a lookup compares column {name!r} ({type_name(key.type)}) of the stream with column {other!r} "
                    f"({type_name(mine.type)}) of the table; give both the same type",
                    column=name,
                )
            keys.append(_plain(key))
        return keys

    def _verified(
        self, keys: Sequence[pa.Array], left: RowNumbers, first: RowNumbers, counts: RowNumbers
    ) -> tuple[RowNumbers, RowNumbers]:
        """Expand runs of candidates to pairs, in portions, and keep the pairs whose keys are really equal."""
        lefts, rights = [], []
        ends = np.cumsum(counts)
        start = 0
        while start < len(left):
            done = ends[start - 1] if start else 0
            stop = max(int(np.searchsorted(ends, done + _PAIRS, side="right")), start + 1)
            part = counts[start:stop]
            position = np.arange(part.sum()) - np.repeat(np.cumsum(part) - part, part)
            pairs_left = np.repeat(left[start:stop], part)
            pairs_right = self._rows[np.repeat(first[start:stop], part) + position]
            equal = self._equal(keys, pairs_left, pairs_right)
            lefts.append(pairs_left[equal])
            rights.append(pairs_right[equal])
            start = stop
        if not lefts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(lefts), np.concatenate(rights)

    def _equal(self, keys: Sequence[pa.Array], left: RowNumbers, right: RowNumbers) -> npt.NDArray[np.bool_]:
        equal = np.ones(len(left), np.bool_)
        for key, mine in zip(keys, self._keys, strict=True):
            same = pc.equal(key.take(pa.array(left)), mine.take(pa.array(right)))
            equal &= same.to_numpy(zero_copy_only=False)
        return equal


def _all_valid(columns: Sequence[pa.Array | pa.ChunkedArray], rows: int) -> npt.NDArray[np.bool_]:
    valid = np.ones(rows, np.bool_)
    for column in columns:
        if column.null_count:
            valid &= column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _family(kind: pa.DataType) -> str:
    """Types of one family hash and compare alike, regardless of width and layout."""
    name = type_name(kind)
    if name in ("tinyint", "smallint", "int", "bigint"):
        return "integer"
    return f"decimal of scale {kind.scale}" if name.startswith("decimal") else name


def _plain(array: pa.Array) -> pa.Array:
    """The array in the one layout that can be compared with any other of its family."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    wanted = _COMPARED_AS.get(type_name(array.type))
    return array if wanted is None else array.cast(wanted)
