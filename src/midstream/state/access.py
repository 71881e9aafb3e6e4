"""How a worker process reaches keyed state: the files of the job, and its own host's base for each operator."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from midstream.ids import BinId
from midstream.state.base import Base
from midstream.state.files import StateFiles, folder_of
from midstream.state.lineage import Lineage
from midstream.state.task import TaskState

__all__ = ["StateAccess", "mapped_bytes"]


MAPPED_LIMIT = 256 << 20


def mapped_bytes() -> int:
    """How much of this process's resident memory is pages of files; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@dataclass(frozen=True)
class StateAccess:
    """Opens the state of operators of one job.

    ``location`` is the folder of state in the checkpoint location, ``local`` a folder on this host's disk for bases.
    ``durable``: files of state survive a loss of power once they are written.
    """

    job: str
    location: str
    local: str
    durable: bool = True

    def close(self) -> None:
        """Let go of all bases of this job in this process."""
        Base.close_below(self.local)

    def trim(self) -> None:
        """Let go of the bases when very many of their pages are mapped; no task may be using them.

        These pages belong to the kernel, which takes them back when it needs to, but they count as this process's
        memory, and whoever watches that would kill it. Opening a base again costs about a millisecond.
        """
        if mapped_bytes() > MAPPED_LIMIT:
            self.close()

    def open(self, lineage: Lineage, bins: Iterable[BinId]) -> TaskState:
        """The state of an operator as its lineage says, for one task."""
        folder = os.path.join(self.local, folder_of(lineage.operator))
        base = Base.shared(folder, f"{self.job} {lineage.operator}", StateFiles(self.location, durable=self.durable))
        return TaskState(base, lineage, bins)
