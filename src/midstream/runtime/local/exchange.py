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
    """The input of a stage's tasks."""

    def __len__(self) -> int:
        """The number of partitions of the stage."""

    def of(self, partition: int) -> Sequence[pa.RecordBatch]:
        """The input of an attempt that starts now."""


@dataclass
class StageOutput:
    """The output of a stage's tasks, by partition; ``read`` is the stage's own input."""

    stage: StageIndex
    read: StageInput
    batches: list[list[pa.RecordBatch]]

    @property
    def data(self) -> LocalData:
        """The current output of all partitions."""
        return LocalData(tuple(self.batches))


class Exchanged:
    """The output of a stage as the tasks of the next one read it: sorted by destination, revision and sender.

    When another attempt's output replaces that of a task, earlier readers keep what they have read, so that
    different readers can see different attempts of one task.
    """

    def __init__(self, output: StageOutput, partitions: int, rng: random.Random) -> None:
        self.output = output
        self._partitions = partitions
        self._rng = rng
        self._sorted = self._sort()

    def __len__(self) -> int:
        return self._partitions

    def of(self, partition: int) -> Sequence[pa.RecordBatch]:
        """The input of an attempt that starts now."""
        return self._sorted.partitions[partition]

    def some_sender(self) -> int:
        """A partition of the stage before."""
        return self._rng.randrange(len(self.output.batches))

    def replace(self, sender: int, batches: list[pa.RecordBatch]) -> None:
        """From now on, readers get the output of another attempt of a sender."""
        self.output.batches[sender] = batches
        self._sorted = self._sort()

    def _sort(self) -> LocalData:
        return by_destination(self.output.data, self._partitions, FRAME_ORDER, self._rng)
