"""What programs are apart from the owners of bins: what a process has learnt about one holds for others that are alike.

Each step of a migration makes other programs. But nothing else has to be loaded for them, and slices of rows may be as
large as before.
"""

from __future__ import annotations

from collections.abc import Collection

from midstream.engine.resources import Resources
from midstream.ids import Digest

__all__ = ["Behaviours"]


class Behaviours:
    """The behaviours of the programs that a process runs, by digest."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._of: dict[Digest, Digest] = {}

    def of(self, program: Digest) -> Digest:
        """That of a program: equal for programs that differ only in who owns which bin."""
        if program not in self._of:
            self._of[program] = self._resources.program(program).without_owners().to_blob().digest
        return self._of[program]

    def forgotten(self, blobs: Collection[Digest]) -> frozenset[Digest]:
        """These blobs are not needed any more. What is over with them: functions and tables, and behaviours that no
        program has that is left."""
        programs = {digest: self._of.pop(digest) for digest in blobs if digest in self._of}
        return (frozenset(blobs) - programs.keys()) | (frozenset(programs.values()) - frozenset(self._of.values()))
