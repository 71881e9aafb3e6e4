"""Assignments: which partition of a stage owns which bin of the key space.

A configuration has one for each stage that is behind an exchange. What a task *owns* is its own stage's assignment;
where it *sends* rows of a key is the assignment of the stage that they are for. Operators of one stage are partitioned
alike, so their state moves together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from midstream.errors import FlowError
from midstream.ids import BINS, BinId, PartitionId, StageIndex

__all__ = ["MAX_BINS", "Assignment", "assign", "check_partitions", "spread"]

MAX_BINS = 1 << 16
"""Most bins that a key space can have."""


@dataclass(frozen=True)
class Assignment:
    """The owner of each bin. A partition may own nothing.

    >>> moved = Assignment(3, (0, 0, 0, 2))
    >>> moved.bins, moved.owned_by(PartitionId(0)), moved.owned_by(PartitionId(1))
    (4, (0, 1, 2), ())
    >>> Assignment(2, (0, 2))
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: bin 1 belongs to partition 2, but there are only the partitions 0 to 1
    """

    partitions: int
    owners: tuple[int, ...]
    """Indexed by bin: the partition that owns it."""

    def __post_init__(self) -> None:
        bins = len(self.owners)
        if not 1 <= bins <= MAX_BINS or bins & (bins - 1):
            raise FlowError(f"{bins} bins: the number of bins must be a power of two from 1 to {MAX_BINS}")
        if not 1 <= self.partitions <= MAX_BINS:
            raise FlowError(f"{self.partitions} partitions: a stage has from 1 to {MAX_BINS}")
        for number in {min(self.owners), max(self.owners)} - set(range(self.partitions)):
            raise FlowError(
                f"bin {self.owners.index(number)} belongs to partition {number}, but there are only the partitions 0 "
                f"to {self.partitions - 1}"
            )

    @property
    def bins(self) -> int:
        """Number of bins of the key space."""
        return len(self.owners)

    def owned_by(self, partition: PartitionId) -> tuple[BinId, ...]:
        """The bins of one partition, ascending."""
        return tuple(BinId(number) for number, owner in enumerate(self.owners) if owner == partition)


def spread(partitions: int, bins: int = BINS) -> Assignment:
    """Every partition owns as many bins as every other, give or take one.

    >>> spread(2, bins=4)
    Assignment(partitions=2, owners=(0, 1, 0, 1))
    """
    return Assignment(partitions, tuple(number % partitions for number in range(bins)))


def assign(
    stages: Iterable[StageIndex], partitions: int, recorded: Mapping[StageIndex, Assignment]
) -> dict[StageIndex, Assignment]:
    """An assignment for each of these stages: the recorded one if there is one, else bins spread over ``partitions``.

    The number of bins is that of the recorded ones, because state is addressed by bin.
    """
    bins = next((each.bins for each in recorded.values()), BINS)
    return {stage: recorded.get(stage) or spread(partitions, bins) for stage in stages}


def check_partitions(partitions: int) -> int:
    """Refuse a number of partitions that a user cannot mean."""
    if type(partitions) is not int or not 1 <= partitions <= BINS:
        raise FlowError(
            f"partitions={partitions!r}: give a whole number from 1 to {BINS}, the number of bins of a key space"
        )
    return partitions
