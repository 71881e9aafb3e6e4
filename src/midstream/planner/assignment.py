"""Assignments: which partition of a stage owns which bin of the key space.

A configuration has an assignment for each stage behind an exchange. The assignment of a task's own stage decides which
bins it *owns*; the assignment of the receiving stage decides where it *sends* the rows of a key. All operators of a
stage share its assignment, so their state moves together.

Programs name no owners. The assignments of all stages are one document of their own (:func:`pack_assignments`), so a
step of a migration leaves everything else that tasks have loaded as it is.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.data.key_space import MAX_BINS, KeySpace
from midstream.errors import FlowError
from midstream.flow.graph_format import CODEC
from midstream.ids import BINS, BinId, PartitionId, StageIndex, WireId
from midstream.storage.blobs import Blob
from midstream.storage.documents import read_document, write_document

__all__ = [
    "FIELDS",
    "Assignment",
    "Assignments",
    "DividedBin",
    "assign",
    "check_partitions",
    "pack_assignments",
    "spread",
    "unpack_assignments",
]

_WHAT = "the assignments of a job"


@dataclass(frozen=True)
class DividedBin:
    """Bins that share the rows of one of them at a join, see :mod:`.division`.

    >>> DividedBin("orders", "left", (7, 3), (WireId(0), WireId(1))).home
    7
    """

    join: str
    spread: str
    """The side whose rows are spread, ``"left"`` or ``"right"``; those of the other side are copied."""
    bins: tuple[int, ...]
    """The bin itself, then those that have a share in it."""
    wires: tuple[WireId, WireId] = field(compare=False)
    """The wires in the present plan whose rows are spread and copied."""

    @property
    def home(self) -> int:
        """The bin that is divided."""
        return self.bins[0]


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
    divided: tuple[DividedBin, ...] = field(default=(), repr=False)
    """Bins whose rows other bins share. No bin is in two of these."""
    united: tuple[DividedBin, ...] = field(default=(), repr=False, compare=False)
    """Bins that were divided: what others had of them is back, or comes back in the first epoch with this."""

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
        packed = base64.b64encode(zlib.compress(self.owner_array.astype("<u2").tobytes(), 1))
        document: dict[str, Any] = {"partitions": self.partitions, "owners": packed.decode()}
        for name, divisions in (("divided", self.divided), ("united", self.united)):
            if divisions:
                document[name] = [
                    {"join": each.join, "spread": each.spread, "bins": list(each.bins), "wires": list(each.wires)}
                    for each in divisions
                ]
        return document

    @classmethod
    def from_document(cls, found: Any) -> Assignment:
        """The inverse. Owners may also be a list of numbers, as they were written before. Raises :class:`ValueError`
        if this is no assignment."""
        if not isinstance(found, dict) or found.keys() - {"divided", "united"} != {"partitions", "owners"}:
            raise ValueError(f"{found!r:.80} is not an assignment: partitions and owners")
        partitions, owners = found["partitions"], found["owners"]
        if isinstance(owners, str):
            try:
                numbers = np.frombuffer(zlib.decompress(base64.b64decode(owners, validate=True)), "<u2")
            except (binascii.Error, zlib.error, ValueError) as error:
                raise ValueError(f"{owners!r:.80} are not owners of bins") from error
            owners = numbers.tolist()
        if type(partitions) is not int or not isinstance(owners, list) or any(type(each) is not int for each in owners):
            raise ValueError(f"{found!r:.80} is not an assignment: a number of partitions, and an owner for each bin")
        try:
            return cls(
                partitions,
                tuple(owners),
                divided=_divisions_of(found.get("divided", [])),
                united=_divisions_of(found.get("united", [])),
            )
        except FlowError as error:
            raise ValueError(str(error)) from error

    @property
    def space(self) -> KeySpace:
        """The key space that is assigned."""
        return KeySpace(len(self.owners))

    def owned_by(self, partition: PartitionId) -> tuple[BinId, ...]:
        """The bins of one partition, ascending."""
        return self._owned.get(partition, ())

    @cached_property
    def owner_array(self) -> npt.NDArray[np.uint16]:
        """The owners, indexed by bin. Partitions fit in 16 bits, for which numpy's stable sort is a radix sort."""
        array = np.asarray(self.owners, np.uint16)
        array.setflags(write=False)
        return array

    @cached_property
    def _owned(self) -> dict[PartitionId, tuple[BinId, ...]]:
        order = np.argsort(self.owner_array, kind="stable")
        starts = np.flatnonzero(np.diff(self.owner_array[order])) + 1
        parts = np.split(order, starts)
        return {PartitionId(self.owners[part[0]]): tuple(map(BinId, part.tolist())) for part in parts}


def _divisions_of(found: Any) -> tuple[DividedBin, ...]:
    try:
        return tuple(
            DividedBin(
                str(each["join"]),
                str(each["spread"]),
                tuple(map(int, each["bins"])),
                (WireId(each["wires"][0]), WireId(each["wires"][1])),
            )
            for each in found
        )
    except (TypeError, ValueError, LookupError) as error:
        raise ValueError(f"{found!r:.80} are not bins that are divided") from error


Assignments = Mapping[StageIndex, Assignment]
"""The assignment of each stage of a job that is behind an exchange."""
FIELDS = {"stages": Assignments}
"""Fields of the document of a job's assignments."""


def pack_assignments(assignments: Assignments) -> Blob:
    """The assignments of all stages as one document. Its digest names them.

    >>> blob = pack_assignments({StageIndex(1): spread(2, bins=4)})
    >>> unpack_assignments(blob.data)
    {1: Assignment(partitions=2, owners=(0, 1, 0, 1))}
    """
    return Blob.of(write_document({name: CODEC.encode(assignments, hint) for name, hint in FIELDS.items()}))


def unpack_assignments(data: bytes) -> dict[StageIndex, Assignment]:
    """The inverse. Raises :class:`.CheckpointError` for what another version of midstream wrote in another format."""
    return dict(CODEC.decode_fields(read_document(data, _WHAT), FIELDS, _WHAT)["stages"])


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
