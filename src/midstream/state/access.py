"""How a worker process opens keyed state: the job's files, and this host's base for each operator."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from midstream.ids import BinId
from midstream.state.base import Base, Loaded
from midstream.state.contents import contents
from midstream.state.files import StateFiles, folder_of
from midstream.state.lineage import EMPTY, Lineage
from midstream.state.task import TaskState

__all__ = ["StateAccess", "mapped_bytes", "resident_bytes"]


MAPPED_LIMIT = 256 << 20
PORTION_BYTES = 1 << 20
"""About the number of bytes of files in one portion of loading ahead, and one bin at least. Between two portions the
budget is checked, and a newer message is followed: bins that fall behind for several epochs may be read anew."""


def mapped_bytes() -> int:
    """Resident memory of this process that is mapped from files; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@dataclass(frozen=True)
class StateAccess:
    """Opens the state of one job's operators.

    ``location`` is the state folder in the checkpoint location; ``local`` is a folder on this host's disk for bases.
    With ``durable``, a written state file survives a power loss.
    """

    job: str
    location: str
    local: str
    durable: bool = True

    def close(self) -> None:
        """Close all bases of this job in this process."""
        Base.close_below(self.local)

    def trim(self) -> None:
        """Close the bases if too many of their pages are mapped. No task may be using them.

        The kernel reclaims these pages when it needs memory, but they count towards this process's memory, so a memory
        watchdog would kill it. Reopening a base takes about a millisecond.
        """
        if mapped_bytes() > MAPPED_LIMIT:
            self.close()

    def open(self, lineage: Lineage, bins: Iterable[BinId]) -> TaskState:
        """Open an operator's state at the given lineage, for one task."""
        return TaskState(self.base(lineage), lineage, bins)

    def contents(self, lineage: Lineage, bins: Iterable[BinId]) -> pa.Table:
        """Stored keys and values of some bins, whoever owns them, read from the checkpoint."""
        return contents(StateFiles(self.location, durable=self.durable, space=lineage.space), lineage, bins)

    def base(self, lineage: Lineage) -> Base:
        """This process's base for an operator."""
        folder = os.path.join(self.local, folder_of(lineage.operator))
        files = StateFiles(self.location, durable=self.durable, space=lineage.space)
        return Base.shared(folder, f"{self.job} {lineage.operator}", files)

    def prefetch(self, lineage: Lineage, bins: Iterable[BinId], limit_bytes: int) -> Loaded:
        """Load some of these bins ahead of time; see :meth:`.Base.prefetch`."""
        return self.base(lineage).prefetch(lineage, bins, limit_bytes)

    def load_ahead(self, lineage: Lineage, bins: Collection[BinId]) -> Iterator[int]:
        """Bring bins that tasks of this host will need to the given lineage, portion by portion.

        After each portion, this yields how many bytes of rows were loaded. Bins that tasks move meanwhile are left to
        them, because tasks know better where bins should be.
        """
        held, left = self.base(lineage).positions(), bins
        while left:
            now = self.base(lineage).positions()  # it may have been closed between two portions
            free = [number for number in left if now.get(number, EMPTY) == held.get(number, EMPTY)]
            loaded = self.prefetch(lineage, free, PORTION_BYTES)
            if not loaded.bins:
                return
            left = loaded.left
            yield loaded.nbytes

    def has(self, lineage: Lineage, bins: Iterable[BinId]) -> frozenset[BinId]:
        """Those of the bins that this host's base has, exactly as the lineage says."""
        wanted, held = lineage.positions(bins), self.base(lineage).positions()
        return frozenset(number for number, position in wanted.items() if held.get(number, EMPTY) == position)

    def held(self, lineage: Lineage) -> frozenset[BinId]:
        """The bins of an operator that this host's base has anything of."""
        return self.base(lineage).held()

    def drop(self, lineage: Lineage, bins: Iterable[BinId]) -> None:
        """Free what this host's base has of these bins."""
        self.base(lineage).drop(bins)

    def compact(self, lineage: Lineage) -> int:
        """Give disk back if most of what this host's base takes is free; return how many bytes."""
        return self.base(lineage).compact()
