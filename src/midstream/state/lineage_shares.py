"""The part of a lineage that each task of a stage must know: that of its own bins. Pure.

A lineage names a file for each task and epoch, with the bins for which it is live. Sent whole to every task, it would
take bytes in proportion to the square of the number of tasks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from midstream.ids import PartitionId
from midstream.planner.assignment import Assignment
from midstream.state.lineage import Lineage, LineageEntry

__all__ = ["LineageShares", "shared_bins"]


_AT_ONCE = 1024
"""Number of entries whose bitmaps are processed together; with 65,536 bins they take 64 MB."""


class LineageShares:
    """The encoded lineages of a stage's operators, partition by partition. All of them are looked through once, when
    this is made.

    >>> from midstream.planner.assignment import spread
    >>> shares = LineageShares({"count": Lineage.start("count").encode()}, spread(2))
    >>> Lineage.decode(shares.of(PartitionId(1))["count"]) == Lineage.start("count")
    True
    """

    def __init__(self, lineages: Mapping[str, bytes], assignment: Assignment) -> None:
        self._assignment = assignment
        self._lineages = [Lineage.decode(data) for data in lineages.values()]
        self._entries = [_by_owner(lineage, assignment) for lineage in self._lineages]

    def of(self, partition: PartitionId) -> dict[str, bytes]:
        """By operator: the share of a partition. The same bytes whenever it is asked for."""
        bins = self._assignment.owned_by(partition)
        found = {}
        for lineage, entries in zip(self._lineages, self._entries, strict=True):
            others = shared_bins(self._assignment, lineage.operator, partition)
            own = lineage.only({*bins, *others}) if others else lineage.only(bins, entries.get(partition, ()))
            found[lineage.operator] = own.encode()
        return found


def shared_bins(assignment: Assignment, operator: str, partition: PartitionId) -> frozenset[int]:
    """Bins of others from which a partition may have to read the state of an operator, because bins are divided or
    united."""
    groups = [each.bins for each in (*assignment.divided, *assignment.united) if each.join == operator]
    if not groups:
        return frozenset()
    own = set(assignment.owned_by(partition))
    return frozenset(number for group in groups if own & set(group) for number in group if number not in own)


def _by_owner(lineage: Lineage, assignment: Assignment) -> dict[int, list[LineageEntry]]:
    """The entries that are live for any bin of a partition, oldest first."""
    found: dict[int, list[LineageEntry]] = {}
    owners = assignment.owner_array.astype(np.int64)
    for start in range(0, len(lineage.entries), _AT_ONCE):
        some = lineage.entries[start : start + _AT_ONCE]
        bitmaps = np.frombuffer(b"".join(entry.live for entry in some), np.uint8).reshape(len(some), -1)
        number, bins = np.nonzero(np.unpackbits(bitmaps, axis=1, count=lineage.space.bins, bitorder="little"))
        pairs = np.unique(number * assignment.partitions + owners[bins])
        at, of = np.divmod(pairs, assignment.partitions)
        for entry, partition in zip(at.tolist(), of.tolist(), strict=True):
            found.setdefault(partition, []).append(some[entry])
    return found
