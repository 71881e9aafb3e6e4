"""From key columns to dense numbers: within a batch, the keys of a table are 0, 1, 2, … in the order of first sight."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.txn.kernels import add_all, compiled, ends, find_or_add

__all__ = ["IntKeys", "Keys", "TextKeys", "keys_for"]

Ids = npt.NDArray[np.int64]


class IntKeys:
    """Whole numbers and their ids; grows with what is added.

    >>> known = IntKeys()
    >>> known.add(np.array([70, 50, 70])).tolist(), known.add(np.array([50, 60])).tolist(), known.values().tolist()
    ([0, 1, 0], [1, 2], [70, 50, 60])
    """

    def __init__(self) -> None:
        self.direct = np.empty(0, np.int32)
        self.keys = np.empty(0, np.int64)
        self.count = np.zeros(1, np.int64)
        self.slots = np.zeros(SMALLEST_MAP, np.int64)
        self.ids = np.full(SMALLEST_MAP, -1, np.int32)

    def __len__(self) -> int:
        return int(self.count[0])

    def values(self) -> Any:
        """The keys by id."""
        return self.keys[: len(self)]

    def reserve(self, more: int) -> None:
        """Make room for that many new keys, whatever they are."""
        room = len(self) + more
        if room > len(self.keys):
            self.keys = np.concatenate([self.values(), np.empty(room * 2 - len(self), np.int64)])
        if room * 2 > len(self.slots):
            self._rebuild(self.direct, room)

    def add(self, keys: Any) -> Ids:
        """Ids of keys, new ones included."""
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        if not len(keys):
            return np.empty(0, np.int64)
        low, high = ends(keys)
        self._make_room(low, high, len(keys))
        found = np.empty(len(keys), np.int64)
        add_all(keys, found, *self.parts)
        return found

    def add_into(self, column: Any, rows: Any, bases: Any, slot: int, keys: Any) -> None:
        """:meth:`add` the keys of some rows of a column, and put the ids where the rows' transactions expect them."""
        low, high = _ends_in(column, rows)
        self._make_room(low, high, len(rows))
        if low >= 0 and high < len(self.direct):
            _add_direct(column, rows, bases, slot, keys, self.direct, self.keys, self.count)
        else:
            spread(self.add(column[rows]), rows, bases, slot, keys)

    def _make_room(self, low: int, high: int, more: int) -> None:
        room = len(self) + more
        if low >= 0 and len(self.direct) <= high < DENSE * room:
            # Keys that are as good as dense need no hashing, which is most of the time that mapping takes.
            self._rebuild(np.full(min(int(high) * 2, DENSE * room) + 1, -1, np.int32), 0)
        if room > len(self.keys):
            self.keys = np.concatenate([self.values(), np.empty(room * 2 - len(self), np.int64)])
        if (low < 0 or high >= len(self.direct)) and room * 2 > len(self.slots):
            self._rebuild(self.direct, room)

    def add_one(self, key: Any) -> int:
        """The id of one key, for interpreted transactions."""
        self.reserve(1)
        return int(find_or_add(int(key), *self.parts))

    @property
    def parts(self) -> tuple[Any, ...]:
        """What compiled code looks keys up in, and adds them to."""
        return self.direct, self.slots, self.ids, self.keys, self.count

    def _rebuild(self, direct: Any, room: int) -> None:
        known = self.values().copy()
        # Any of the known keys may be one that needs hashing; a full map would be searched for ever.
        size = max(SMALLEST_MAP, 1 << int(max(room, len(known)) * 2).bit_length())
        direct[:] = -1
        self.direct = direct
        self.slots, self.ids = np.zeros(size, np.int64), np.full(size, -1, np.int32)
        self.count[0] = 0
        add_all(known, np.empty(len(known), np.int64), *self.parts)


SMALLEST_MAP = 16
DENSE = 4
"""Keys are dense when the largest is below this many times their number."""


class TextKeys:
    """Strings and their ids.

    >>> known = TextKeys()
    >>> known.add(pa.array(["b", "a", "b"])).tolist(), known.values().to_pylist()
    ([0, 1, 0], ['b', 'a'])
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def values(self) -> Any:
        """The keys by id."""
        return pa.array(list(self._ids), pa.string())

    def reserve(self, more: int) -> None:
        """Dictionaries grow by themselves."""

    def add(self, keys: Any) -> Ids:
        """Ids of keys, new ones included. Python sees each distinct string once."""
        encoded = keys.dictionary_encode()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        distinct = encoded.dictionary.to_pylist()
        ids = self._ids
        numbers = np.fromiter((ids.setdefault(key, len(ids)) for key in distinct), np.int64, len(distinct))
        positions = encoded.indices.to_numpy(zero_copy_only=False)
        return numbers[positions] if len(distinct) else np.empty(0, np.int64)

    def add_one(self, key: Any) -> int:
        """The id of one key."""
        return self._ids.setdefault(str(key), len(self._ids))


Keys = IntKeys | TextKeys


def keys_for(kind: str) -> Keys:
    """An empty mapping for keys of that kind."""
    return IntKeys() if kind == "bigint" else TextKeys()


@compiled
def spread(found: Any, rows: Any, bases: Any, slot: int, keys: Any) -> None:
    """Put the ids of one key slot where each transaction expects them."""
    for x in range(len(rows)):
        keys[bases[rows[x]] + slot] = found[x]


@compiled
def _ends_in(column: Any, rows: Any) -> Any:
    low = high = column[rows[0]]
    for x in range(len(rows)):
        low = min(low, column[rows[x]])
        high = max(high, column[rows[x]])
    return low, high


@compiled
def _add_direct(column: Any, rows: Any, bases: Any, slot: int, keys: Any, direct: Any, by_id: Any, count: Any) -> None:
    new = count[0]
    for x in range(len(rows)):
        key = column[rows[x]]
        if direct[key] < 0:
            direct[key] = new
            by_id[new] = key
            new += 1
        keys[bases[rows[x]] + slot] = direct[key]
    count[0] = new
