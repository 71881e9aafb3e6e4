"""Assignments: which partition of a stage owns which bin of the key space.

A configuration has an assignment for each stage behind an exchange. The assignment of a task's own stage decides which
bins it *owns*; the assignment of the receiving stage decides where it *sends* the rows of a key. All operators of a
stage share its assignment, so their state moves together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from midstream.data.key_space import MAX_BINS, KeySpace
from midstream.errors import FlowError
from midstream.ids import BINS, BinId, PartitionId, StageIndex

__all__ = ["Assignment", "assign", "check_partitions", "spread"]


@dataclass(frozen=True)
class Assignment:
    """The owner of each bin. A partition may own nothing.

    >>> moved = Assignment(3, (0, 0, 0, 2))
    >>> moved.bins, moved.owned_by(PartitionId(0)), moved.owned_by(PartitionId(1))
    (4, (0, 1, 2), ())
    >>> Assignment(2, (0, 2))
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: bin 1 belongs to partition 2, but the partitions are 0 to 1
    """

    partitions: int
    owners: tuple[int, ...]
    """Indexed by bin: the partition that owns it."""

    def __post_init__(self) -> None:
        KeySpace(len(self.owners))  # refuses other numbers of bins than a key space can have
        if not 1 <= self.partitions <= MAX_BINS:
            raise FlowError(f"{self.partitions} partitions: the number of partitions must be from 1 to {MAX_BINS}")
        for number in {min(self.owners), max(self.owners)} - set(range(self.partitions)):
            raise FlowError(
                f"bin {self.owners.index(number)} belongs to partition {number}, but the partitions are 0 to "
                f"{self.partitions - 1}"
            )

    @property
    def bins(self) -> int:
        """Number of bins of the key space."""
        return len(self.owners)

    @property
    def space(self) -> KeySpace:
        """The key space that is assigned."""
        return KeySpace(len(self.owners))

    def owned_by(self, partition: PartitionId) -> tuple[BinId, ...]:
        """The bins of one partition, ascending."""
        return tuple(BinId(number) for number, owner in enumerate(self.owners) if owner == partition)


def spread(partitions: int, bins: int = BINS) -> Assignment:
    """Spread bins evenly: the partitions own equal numbers of bins, give or take one.

    >>> spread(2, bins=4)
    Assignment(partitions=2, owners=(0, 1, 0, 1))
    """
    return Assignment(partitions, tuple(number % partitions for number in range(bins)))


def assign(
    stages: Iterable[StageIndex], partitions: int, recorded: Mapping[StageIndex, Assignment], bins: int = BINS
) -> dict[StageIndex, Assignment]:
    """An assignment for each of these stages: the recorded one if there is one, else bins spread over ``partitions``.

    New assignments have as many bins as the recorded ones, because state is addressed by bin, or ``bins`` if there are
    none.
    """
    bins = next((each.bins for each in recorded.values()), bins)
    return {stage: recorded.get(stage) or spread(partitions, bins) for stage in stages}


def check_partitions(partitions: int, bins: int = BINS) -> int:
    """Refuse a number of partitions that is not a whole number from 1 to the number of bins."""
    if type(partitions) is not int or not 1 <= partitions <= bins:
        raise FlowError(
            f"partitions={partitions!r}: give a whole number from 1 to {bins}, the number of bins of a key space"
        )
    return partitions
