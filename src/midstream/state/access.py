"""How a worker process opens keyed state: the job's files, and this host's base for each operator."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from midstream.ids import BinId
from midstream.state.base import Base
from midstream.state.files import StateFiles, folder_of
from midstream.state.lineage import EMPTY, Lineage, Steps
from midstream.state.task import TaskState

__all__ = ["StateAccess", "mapped_bytes"]


MAPPED_LIMIT = 256 << 20
PORTION_ROWS = 10_000
"""Rows that are loaded ahead at a time, about: tasks that open the same base wait for that."""
MOST_PORTIONS = 32
"""A file is read once for each portion that needs it, so there must not be too many."""


def mapped_bytes() -> int:
    """Resident memory of this process that is mapped from files; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")
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
        return TaskState(self._base(lineage.operator), lineage, bins)

    def load_ahead(self, lineage: Lineage, bins: Collection[BinId]) -> Iterator[int]:
        """Bring bins that tasks of this host will need to the given lineage, portion by portion.

        After each portion, this yields how many bytes of files were read for it. Bins that others move meanwhile are
        left to them: they are tasks, which know better where the bins should be.
        """
        held = self._base(lineage.operator).positions()
        for portion in _portions(lineage.missing(held, bins)):
            base = self._base(lineage.operator)  # it may have been closed between two portions
            now = base.positions()
            free = [number for number in portion if now.get(number, EMPTY) == held.get(number, EMPTY)]
            size = sum(step.file.size for step in lineage.missing(now, free).apply)
            base.catch_up(lineage, free)
            yield size

    def has(self, lineage: Lineage, bins: Iterable[BinId]) -> frozenset[BinId]:
        """Those of the bins that this host's base has, exactly as the lineage says."""
        wanted, held = lineage.positions(bins), self._base(lineage.operator).positions()
        return frozenset(number for number, position in wanted.items() if held.get(number, EMPTY) == position)

    def held(self, lineage: Lineage) -> frozenset[BinId]:
        """The bins of an operator of which this host's base has anything."""
        return frozenset(self._base(lineage.operator).positions())

    def drop(self, lineage: Lineage, bins: Iterable[BinId]) -> None:
        """Free what this host's base has of these bins."""
        self._base(lineage.operator).drop(bins)

    def _base(self, operator: str) -> Base:
        folder = os.path.join(self.local, folder_of(operator))
        return Base.shared(folder, f"{self.job} {operator}", StateFiles(self.location, durable=self.durable))


def _portions(steps: Steps) -> Iterator[list[BinId]]:
    """The bins that have something to do, in portions of about equal numbers of rows."""
    rows: dict[BinId, float] = dict.fromkeys(sorted(steps.clear), 0.0)
    for step in steps.apply:
        share = step.file.rows / len(step.positions)
        for number in step.positions:
            rows[number] = rows.get(number, 0.0) + share
    most = max(PORTION_ROWS, sum(rows.values()) / MOST_PORTIONS)
    portion: list[BinId] = []
    taken = 0.0
    for number in sorted(rows):
        portion.append(number)
        taken += rows[number]
        if taken >= most:
            yield portion
            portion, taken = [], 0.0
    if portion:
        yield portion
