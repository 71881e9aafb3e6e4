"""The output of finished stages on the local runtime, which can be lost and computed again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from midstream.engine.frames import FRAME_ORDER
from midstream.ids import StageIndex
from midstream.runtime.local.data import LocalData, by_destination

__all__ = ["Exchanged", "StageInput", "StageOutput"]


class StageInput(Protocol):
    """What the tasks of a stage read."""

    def __len__(self) -> int:
        """How many partitions the stage has."""

    def of(self, partition: int) -> Sequence[pa.RecordBatch]:
        """What an attempt that starts now reads."""


@dataclass
class StageOutput:
    """What the tasks of a stage gave, by partition; ``read`` is what the stage itself has read."""

    stage: StageIndex
    read: StageInput
    batches: list[list[pa.RecordBatch]]

    @property
    def data(self) -> LocalData:
        """All of it, as it is now."""
        return LocalData(tuple(self.batches))


class Exchanged:
    """The output of a stage as the tasks of the next one read it: sorted by destination, revision and sender.

    When the output of a task is replaced by that of another attempt, readers that have read before keep what they have,
    so that readers can mix attempts of one task.
    """

    def __init__(self, output: StageOutput, partitions: int, rng: random.Random) -> None:
        self.output = output
        self._partitions = partitions
        self._rng = rng
        self._sorted = self._sort()

    def __len__(self) -> int:
        return self._partitions

    def of(self, partition: int) -> Sequence[pa.RecordBatch]:
        """What an attempt that starts now reads."""
        return self._sorted.partitions[partition]

    def some_sender(self) -> int:
        """A partition of the stage before."""
        return self._rng.randrange(len(self.output.batches))

    def replace(self, sender: int, batches: list[pa.RecordBatch]) -> None:
        """From now on, what another attempt of a sender gave is read."""
        self.output.batches[sender] = batches
        self._sorted = self._sort()

    def _sort(self) -> LocalData:
        return by_destination(self.output.data, self._partitions, FRAME_ORDER, self._rng)
