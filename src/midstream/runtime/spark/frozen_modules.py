"""Limits what Python's garbage collector scans in a worker.

Spark runs a full garbage collection after every task, and the next task in this process waits for it: with the
libraries that a worker has loaded, 40 to 60 ms, as long as a small task takes. What is loaded for a program stays as
long as the program runs, so it need not be scanned again and again; only after something was dropped.
"""

from __future__ import annotations

import gc
from collections.abc import Collection

from midstream.ids import Digest

__all__ = ["Settled"]


class Settled:
    """The programs of which this process has run a task: all that they need is loaded, and frozen for the collector."""

    def __init__(self) -> None:
        self._programs: set[Digest] = set()
        self._has_forgotten = False

    def forgotten(self, digests: Collection[Digest]) -> None:
        """The process has dropped what it had loaded for these blobs, programs or others."""
        if digests:
            self._programs.difference_update(digests)
            self._has_forgotten = True

    def after_task(self, program: Digest) -> None:
        """A task of a program is over; the first one has loaded what the others need, too."""
        if program in self._programs and not self._has_forgotten:
            return
        self._programs.add(program)
        self._has_forgotten = False
        gc.unfreeze()  # objects that were frozen before may be garbage now
        gc.collect()
        gc.freeze()
