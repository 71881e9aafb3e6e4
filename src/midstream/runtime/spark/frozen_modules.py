"""What Python looks through for garbage in a worker.

Spark collects garbage after every task, all of it, and whoever runs next in this process waits for that: with the
libraries that a worker has loaded, 40 to 60 ms, as long as a small task takes. What is loaded for a program stays for
as long as that is run, so there is no need to look through it again and again; only when something was forgotten.
"""

from __future__ import annotations

import gc
from collections.abc import Collection

from midstream.ids import Digest

__all__ = ["Settled"]


class Settled:
    """The programs of which this process has run a task: what they need is loaded, and counts as no garbage."""

    def __init__(self) -> None:
        self._programs: set[Digest] = set()
        self._has_forgotten = False

    def forgotten(self, digests: Collection[Digest]) -> None:
        """The process has let go of what it had loaded of these blobs, programs or others."""
        if digests:
            self._programs.difference_update(digests)
            self._has_forgotten = True

    def after_task(self, program: Digest) -> None:
        """A task of a program is over; the first one has loaded what the others need, too."""
        if program in self._programs and not self._has_forgotten:
            return
        self._programs.add(program)
        self._has_forgotten = False
        gc.unfreeze()  # what was loaded before may be garbage by now
        gc.collect()
        gc.freeze()
