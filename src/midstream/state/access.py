"""How a worker process opens keyed state: the job's files, and this host's base for each operator."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from midstream.ids import BinId
from midstream.state.base import Base
from midstream.state.files import StateFiles, folder_of
from midstream.state.lineage import Lineage
from midstream.state.task import TaskState

__all__ = ["StateAccess", "mapped_bytes", "resident_bytes"]


MAPPED_LIMIT = 256 << 20


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
        folder = os.path.join(self.local, folder_of(lineage.operator))
        base = Base.shared(folder, f"{self.job} {lineage.operator}", StateFiles(self.location, durable=self.durable))
        return TaskState(base, lineage, bins)
