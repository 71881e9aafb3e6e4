"""Changes of one task that are too many for memory, in a file without a name on the local disk.

The file's name is removed as soon as it is open. So it is gone when its process is, however that ends, and nothing has
to be cleaned up.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from midstream.data.key_space import KeySpace
from midstream.errors import StateError
from midstream.ids import BinId
from midstream.state.keys import Namespace

__all__ = ["UNKNOWN", "Spill"]

UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda _: "UNKNOWN"})()
"""The result of :meth:`Spill.get_many` for a key that was not changed; None says that it was deleted."""

MAP_BYTES = 1 << 33
"""Address space for the file, and so the most that it can hold. It takes as much of the disk as there are changes. Not
more, because some clusters limit address space, too."""
NEARLY_NOTHING = 1 << 20
_TOGETHER = 2048
"""Changes of one transaction. LMDB keeps each page that a transaction changes in memory, and does not give that back
before the file is closed: where keys are spread, that is a page for each of them."""
_SET, _DELETED = b"\x01", b"\x00"


class Spill:
    """Changed keys and their values; a value of None is a deletion.

    :param folder: an existing folder on the local disk.

    >>> spill = Spill(tempfile.gettempdir())
    >>> spill.put([(b"ann", b"1"), (b"bob", None)])
    >>> spill.put([(b"ann", b"2")])
    >>> spill.get_many([b"ann", b"bob", b"cem"]), len(spill)
    ([b'2', None, UNKNOWN], 2)
    >>> spill.close()
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        try:
            with tempfile.TemporaryDirectory(prefix=".spill-", dir=self._folder) as name:
                # Never flushed: its content is worthless once this process has ended.
                self._env = lmdb.open(name, map_size=MAP_BYTES, sync=False, metasync=False, meminit=False)
        except (OSError, lmdb.Error) as error:
            raise self._cannot_write(error) from error

    def __len__(self) -> int:
        return int(self._env.stat()["entries"])

    def put(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Add changes, ascending by key; each replaces an earlier one of its key."""
        rows = ((key, _DELETED if value is None else _SET + value) for key, value in changes)
        try:
            while some := list(islice(rows, _TOGETHER)):
                with self._env.begin(write=True) as transaction, transaction.cursor() as cursor:
                    cursor.putmulti(some)
        except lmdb.Error as error:
            raise self._cannot_write(error) from error

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        """The new value of each key: bytes, None if it was deleted, UNKNOWN if it was not changed."""
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            found = {key: _value_of(data) for key, data in cursor.getmulti(keys)}
        return [found.get(key, UNKNOWN) for key in keys]

    def scan(self, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, bytes | None]]:
        """Changes from ``start`` to before ``stop``, ascending, as they are now, whatever is added meanwhile."""
        return self._rows(self._env.begin(), start, stop)

    @staticmethod
    def _rows(
        transaction: lmdb.Transaction[bytes], start: bytes, stop: bytes | None
    ) -> Iterator[tuple[bytes, bytes | None]]:
        with transaction, transaction.cursor() as cursor:
            if not cursor.set_range(start):
                return
            for key, data in cursor:
                if stop is not None and key >= stop:
                    return
                yield key, _value_of(data)

    def occupied(self, bins: Iterable[BinId], namespace: Namespace, space: KeySpace) -> set[BinId]:
        """Those of ``bins`` with a change in a namespace."""
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            return {
                number
                for number in bins
                if cursor.set_range(space.prefix(number, namespace))
                and cursor.key() < space.prefix(number, namespace + 1)
            }

    def close(self) -> None:
        """Give the disk space back."""
        self._env.close()

    def _cannot_write(self, error: Exception) -> StateError:
        # LMDB reports a write that a full disk has cut short as an error of input or output.
        is_full = shutil.disk_usage(self._folder).free < NEARLY_NOTHING
        why = f"the disk is full ({error})" if is_full else str(error)
        if isinstance(error, lmdb.MapFullError):
            why = f"in one epoch, a task can change {MAP_BYTES >> 20:,} MB for each operator"
        return StateError(
            f"changes of state that are too many for memory cannot be written to {self._folder!r}: {why}. Nothing "
            f"is lost: the epoch runs again. Free space, set another local_state=, or bound the rows of an epoch",
            folder=self._folder,
        )


def _value_of(data: bytes) -> bytes | None:
    return data[1:] if data[:1] == _SET else None
