"""Maps keys to small numbers: the ids that a table's keys have within a batch.

Ids are 0, 1, 2, … in order of first occurrence. If keys are close together, the id is the distance from the smallest
key, which needs no map.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.txn.kernels import compiled, ends, find_or_add, look_up, measure_from, number_keys

__all__ = ["IntKeys", "Keys", "NearKeys", "TextKeys", "keys_for"]

Ids = npt.NDArray[np.int64]

SMALLEST_MAP = 16
DENSE = 4
"""Keys are dense if the largest is below this multiple of their number."""
WASTE = 64
"""A map with more than this multiple of the slots that it needed is recreated instead of cleared."""

_places = np.arange(1024)


def places(size: int) -> Ids:
    """The numbers 0, 1, 2, …; the caller must not change them."""
    global _places
    found = _places  # another thread may replace it at any time
    if size > len(found):
        _places = found = np.arange(size * 2)
    return found[:size]


class IntKeys:
    """Maps whole numbers to ids; grows as keys are added.

    >>> known = IntKeys()
    >>> known.add(np.array([70, 50, 70])).tolist(), known.add(np.array([50, 60])).tolist(), known.values().tolist()
    ([0, 1, 0], [1, 2], [70, 50, 60])
    """

    direct: npt.NDArray[np.int32]
    keys: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
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

    def used(self) -> Ids:
        """The ids of :meth:`values`."""
        return places(len(self))

    def named(self, ids: Ids) -> Any:
        """The keys with these ids."""
        return self.keys[ids]

    def clear(self) -> None:
        """Remove all keys, but keep the capacity: the next batch probably has about as many."""
        if len(self.direct) + len(self.ids) > WASTE * (len(self) + SMALLEST_MAP):
            self._start()
            return
        self.direct.fill(-1)
        self.ids.fill(-1)
        self.count[0] = 0

    def reserve(self, more: int) -> None:
        """Make room for ``more`` new keys, whatever they are."""
        room = len(self) + more
        self._hold(room)
        if room * 2 >= len(self.slots):
            self._rebuild(self.direct, room)

    def add(self, keys: Any) -> Ids:
        """The ids of keys; new keys are added."""
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        found = np.empty(len(keys), np.int64)
        if not look_up(keys, self.direct, found):
            self.add_into(keys, places(len(keys)), 1, 0, found)
        return found

    def add_into(self, column: Any, rows: Any, width: int, slot: int, found: Any) -> None:
        """Like :meth:`add` for some rows of a column; the id of row x goes to ``found[x * width + slot]``."""
        done = 0
        while (done := number_keys(column, rows, done, width, slot, found, *self.parts)) < len(rows):
            self._make_room(column, rows, done)

    def add_one(self, key: Any) -> int:
        """The id of one key, for interpreted transactions."""
        self.reserve(1)
        return int(find_or_add(int(key), *self.parts))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The arrays in which compiled code looks up and adds keys."""
        return self.direct, self.slots, self.ids, self.keys, self.count

    def _make_room(self, column: Any, rows: Any, done: int) -> None:
        """Make room for the key of one of the rows."""
        low, high = ends(column, rows, done)
        most = len(self) + len(rows) - done
        self._hold(most)
        if low >= 0 and len(self.direct) <= high < DENSE * most:
            # Nearly dense keys need no hashing, which is most of the cost of mapping.
            self._rebuild(np.empty(min(int(high) * 2, DENSE * most) + 1, np.int32), 0)
        elif not 0 <= column[rows[done]] < len(self.direct) and 2 * len(self) + 2 >= len(self.slots):
            self._rebuild(self.direct, 2 * len(self))

    def _hold(self, room: int) -> None:
        if room > len(self.keys):
            self.keys = np.concatenate([self.values(), np.empty(room + room // 4 - len(self), np.int64)])

    def _rebuild(self, direct: Any, room: int) -> None:
        known = self.values().copy()
        hashed = int(np.count_nonzero((known < 0) | (known >= len(direct))))
        size = max(SMALLEST_MAP, 1 << int(max(room, hashed, len(known) if hashed else 0) * 2).bit_length())
        direct[:] = -1
        self.direct = direct
        self.slots, self.ids = np.zeros(size, np.int64), np.full(size, -1, np.int32)
        self.count[0] = 0
        number_keys(known, places(len(known)), 0, 1, 0, np.empty(len(known), np.int64), *self.parts)


SLACK = 8
"""Extra room on each side of the keys seen, as a fraction (1/n) of their range."""


class NearKeys:
    """Maps whole numbers that are close together to ids; keys that are too far away are refused.

    >>> known = NearKeys(50, 21)
    >>> found = np.empty(3, np.int64)
    >>> known.add_into(np.array([70, 50, 70]), places(3), 1, 0, found), found.tolist(), known.values().tolist()
    (True, [20, 0, 20], [50, 70])
    >>> known.add_into(np.array([71]), places(1), 1, 0, found)
    False
    """

    def __init__(self, low: int, size: int) -> None:
        self.low = low
        self.seen = np.zeros(size, np.bool_)
        self._used: Ids | None = None

    @staticmethod
    def around(keys: Ids, most: int) -> NearKeys | None:
        """A map for keys like these; None if it would need ``most`` ids or more.

        >>> NearKeys.around(np.array([3, 18]), 20), len(NearKeys.around(np.array([3, 18]), 21))
        (None, 20)
        """
        if not len(keys):
            return None
        low, high = int(keys.min()), int(keys.max())
        slack = (high - low + 1) // SLACK
        size = high - low + 1 + 2 * slack
        return NearKeys(max(low - slack, -(2**63)), size) if size < most else None

    def __len__(self) -> int:
        return len(self.seen)

    def values(self) -> Any:
        """The keys seen, ascending."""
        return self.named(self.used())

    def used(self) -> Ids:
        """The ids of :meth:`values`."""
        if self._used is None:
            self._used = np.flatnonzero(self.seen)
        return self._used

    def named(self, ids: Ids) -> Any:
        """The keys with these ids."""
        return ids + self.low

    def clear(self) -> None:
        """Remove all keys."""
        self.seen.fill(False)
        self._used = None

    def add_into(self, column: Any, rows: Any, width: int, slot: int, found: Any) -> bool:
        """Map some rows of a column: the id of row x goes to ``found[x * width + slot]``. False if a key is too far
        away.
        """
        self._used = None
        return bool(measure_from(column, rows, self.low, width, slot, found, self.seen))


class TextKeys:
    """Maps strings to ids.

    >>> known = TextKeys()
    >>> known.add(pa.array(["b", "a", "b"])).tolist(), known.values().to_pylist()
    ([0, 1, 0], ['b', 'a'])
    """

    def __init__(self) -> None:
        self._first = pa.array([], pa.string())  # the first keys added; converted to Python only when needed
        self._ids: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids) or len(self._first)

    def values(self) -> Any:
        """The keys by id."""
        return pa.array(list(self._ids), pa.string()) if self._ids else self._first

    def used(self) -> Ids:
        """The ids of :meth:`values`."""
        return places(len(self))

    def named(self, ids: Ids) -> Any:
        """The keys with these ids."""
        return self.values().take(pa.array(ids))

    def clear(self) -> None:
        """Remove all keys."""
        self._first = self._first[:0]
        self._ids = {}

    def reserve(self, more: int) -> None:
        """Nothing to do: dictionaries grow by themselves."""

    def add(self, keys: Any) -> Ids:
        """The ids of keys; new keys are added. Arrow finds the distinct keys; Python handles them from the second call
        on.
        """
        if isinstance(keys, pa.ChunkedArray):
            keys = keys.combine_chunks()
        encoded = keys.cast(pa.string()).dictionary_encode()
        positions: Ids = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if not len(self):
            self._first = encoded.dictionary
            return positions
        distinct = encoded.dictionary.to_pylist()
        ids = self._by_text()
        numbers = np.fromiter((ids.setdefault(key, len(ids)) for key in distinct), np.int64, len(distinct))
        return numbers[positions]

    def add_one(self, key: Any) -> int:
        """The id of one key."""
        ids = self._by_text()
        return ids.setdefault(str(key), len(ids))

    def _by_text(self) -> dict[str, int]:
        if not self._ids:
            self._ids = {key: number for number, key in enumerate(self._first.to_pylist())}
        return self._ids


Keys = IntKeys | NearKeys | TextKeys


def keys_for(kind: str) -> IntKeys | TextKeys:
    """An empty map for keys of a kind."""
    return IntKeys() if kind == "bigint" else TextKeys()


@compiled
def spread(found: Any, rows: Any, width: int, slot: int, keys: Any) -> None:
    """Put the ids of one key slot where each transaction expects them."""
    for x in range(len(rows)):
        keys[rows[x] * width + slot] = found[x]
