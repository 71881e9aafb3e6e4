"""Holds protect blobs that are about to be referenced from removal, although nothing refers to them yet.

A change is prepared before it is recorded: its functions are stored, then tried, which may take as long as the user's
code likes; only then a record refers to them. Storing a blob *touches* it. To remove blobs, take a *mark*, determine
which blobs are referenced, and remove others, except those touched since the mark, or by a preparation that was in
progress at the mark.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NewType

from midstream.ids import Digest

__all__ = ["Holds", "Mark"]

Mark = NewType("Mark", int)
"""A point in the history of a store. Later marks are never smaller."""


class Holds:
    """Protects the blobs of one store from removal. All methods may be called from any thread.

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
        """The start of each preparation in progress."""
        self._removing: set[Digest] = set()

    @property
    def is_preparing(self) -> bool:
        """Whether a preparation is in progress; blobs touched now are kept until it ends."""
        return bool(self._preparations)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """A preparation: blobs touched within this context are kept until it ends."""
        with self._lock:
            began = self._next()
            self._preparations.append(began)
        try:
            yield
        finally:
            with self._lock:
                self._preparations.remove(began)

    def touch(self, digest: Digest) -> None:
        """Announce a reference to this blob. Call this before checking whether the blob exists.

        Waits while the blob is being removed.
        """
        with self._lock:
            self._lock.wait_for(lambda: digest not in self._removing)
            self._touched[digest] = self._next()

    def mark(self) -> Mark:
        """The current mark or, while preparations are in progress, the start of the oldest one."""
        with self._lock:
            return Mark(min([self._next(), *self._preparations]))

    def remove(self, digest: Digest, mark: Mark, remove: Callable[[], None]) -> bool:
        """Call ``remove`` unless the blob has been touched since the mark; return whether it was called.

        A concurrent ``touch`` of this blob waits, and then finds it gone. Others do not wait, however long it takes.
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
        """Forget everything before a mark; no older mark will be used again."""
        with self._lock:
            self._touched = {digest: moment for digest, moment in self._touched.items() if moment >= mark}

    def _next(self) -> int:
        self._moment += 1
        return self._moment
