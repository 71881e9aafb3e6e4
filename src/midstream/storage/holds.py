"""Which blobs are about to be referred to, so that nobody removes them although nothing refers to them yet.

A change is prepared before it is on record: its functions are stored, then tried, which may take as long as the user's
code likes, and only then a record names them. Whoever stores a blob *touches* it. Whoever wants to remove some takes a
*mark* first, then finds out which ones are referred to, then removes others, as far as they have not been touched since
the mark, nor by a preparation that was in progress at the mark.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NewType

from midstream.ids import Digest

__all__ = ["Holds", "Mark"]

Mark = NewType("Mark", int)
"""A moment in the life of a store. Later marks are never smaller."""


class Holds:
    """What protects the blobs of one store from removal. All methods may be called from any thread.

    >>> holds, model = Holds(), Digest("ab")
    >>> with holds.preparing():
    ...     holds.touch(model)
    ...     holds.remove(model, holds.mark(), lambda: print("removed"))
    False
    >>> holds.remove(model, holds.mark(), lambda: print("removed"))
    removed
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._moment = 0
        self._touched: dict[Digest, int] = {}
        self._preparations: list[int] = []
        """When each one that is in progress began."""
        self._removing: set[Digest] = set()

    @property
    def is_preparing(self) -> bool:
        """Whether a preparation is in progress, so that what is touched now stays until it has ended."""
        return bool(self._preparations)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Inside, and until it is left, nothing that is touched can be removed."""
        with self._lock:
            began = self._next()
            self._preparations.append(began)
        try:
            yield
        finally:
            with self._lock:
                self._preparations.remove(began)

    def touch(self, digest: Digest) -> None:
        """Somebody is about to refer to this blob. To be called before looking whether it is there.

        Waits if it is being removed just now.
        """
        with self._lock:
            self._lock.wait_for(lambda: digest not in self._removing)
            self._touched[digest] = self._next()

    def mark(self) -> Mark:
        """Now; or, as long as preparations are in progress, the moment when the oldest of them began."""
        with self._lock:
            return Mark(min([self._next(), *self._preparations]))

    def remove(self, digest: Digest, mark: Mark, remove: Callable[[], None]) -> bool:
        """Call ``remove`` unless the blob has been touched since the mark; whether it was called.

        Whoever touches it meanwhile waits, and then finds it gone. Others do not wait, however long it takes.
        """
        with self._lock:
            if self._touched.get(digest, -1) >= mark:
                return False
            self._removing.add(digest)
        try:
            remove()
        finally:
            with self._lock:
                self._removing.remove(digest)
                self._lock.notify_all()
        return True

    def forget_before(self, mark: Mark) -> None:
        """No mark that is older than this one will be used any more."""
        with self._lock:
            self._touched = {digest: moment for digest, moment in self._touched.items() if moment >= mark}

    def _next(self) -> int:
        self._moment += 1
        return self._moment
