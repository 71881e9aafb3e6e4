"""Assignments: which partition of a stage owns which bin of the key space.

A configuration has an assignment for each stage behind an exchange. The assignment of a task's own stage decides which
bins it *owns*; the assignment of the receiving stage decides where it *sends* the rows of a key. All operators of a
stage share its assignment, so their state moves together.
"""

from __future__ import annotations

import base64
import binascii
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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

    def to_document(self) -> dict[str, Any]:
        """As JSON. The owners are compressed 16-bit numbers in base64: a job may have 65,536 bins, and every step of a
        migration writes them.

        >>> document = Assignment(3, (0, 1, 2, 0)).to_document()
        >>> document["partitions"], Assignment.from_document(document).owners
        (3, (0, 1, 2, 0))
        """
        numbers = array("H", self.owners)
        if sys.byteorder == "big":
            numbers.byteswap()
        packed = base64.b64encode(zlib.compress(numbers.tobytes(), 1))
        return {"partitions": self.partitions, "owners": packed.decode()}

    @classmethod
    def from_document(cls, found: Any) -> Assignment:
        """The inverse. Owners may also be a list of numbers, as they were written before. Raises :class:`ValueError`
        if this is no assignment."""
        if not isinstance(found, dict) or found.keys() != {"partitions", "owners"}:
            raise ValueError(f"{found!r:.80} is not an assignment: partitions and owners")
        partitions, owners = found["partitions"], found["owners"]
        if isinstance(owners, str):
            try:
                numbers = array("H", zlib.decompress(base64.b64decode(owners, validate=True)))
            except (binascii.Error, zlib.error, ValueError) as error:
                raise ValueError(f"{owners!r:.80} are not owners of bins") from error
            if sys.byteorder == "big":
                numbers.byteswap()
            owners = numbers.tolist()
        if type(partitions) is not int or not isinstance(owners, list) or any(type(each) is not int for each in owners):
            raise ValueError(f"{found!r:.80} is not an assignment: a number of partitions, and an owner for each bin")
        try:
            return cls(partitions, tuple(owners))
        except FlowError as error:
            raise ValueError(str(error)) from error

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
