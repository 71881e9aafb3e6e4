"""Weights of bins: how many rows, how much work and how much state each has. Planners balance them, explain shows them.

They are measured in every epoch and smoothed over time: an epoch counts half as much as one :data:`HALF_LIFE_S` later.
Pure; :mod:`midstream.checkpoint.bin_measures` measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from midstream.ids import BinId, PartitionId, StageIndex
from midstream.planner.assignment import Assignment

__all__ = ["HALF_LIFE_S", "BinWeights", "StageEpoch", "StageWeights"]

HALF_LIFE_S = 20.0
"""Seconds of run time after which a measurement counts half."""

_LEAST_S = 0.001  # epochs of the local runtime take no time

Weights = npt.NDArray[np.float64]
"""One number per bin."""


@dataclass(frozen=True)
class StageEpoch:
    """The measurements of one stage in one epoch."""

    assignment: Assignment
    rows: Weights
    """Rows that arrived, by bin."""
    busy_s: Mapping[PartitionId, float]
    """Seconds that the operators of each partition worked."""
    keys: Weights
    """Stored entries, by bin: those of the last snapshot and the changes since, so never too few."""
    nbytes: Weights
    """Bytes of the same."""

    def busy_by_bin(self) -> Weights:
        """The work of each partition, shared among its bins: by their rows, or evenly if it had none."""
        owners = np.asarray(self.assignment.owners)
        rows = np.bincount(owners, self.rows, self.assignment.partitions)
        bins = np.bincount(owners, minlength=self.assignment.partitions)
        busy = np.array([self.busy_s.get(PartitionId(number), 0.0) for number in range(self.assignment.partitions)])
        per_row = np.divide(busy, rows, out=np.zeros_like(busy), where=rows > 0)
        per_bin = np.divide(busy, bins, out=np.zeros_like(busy), where=(rows == 0) & (bins > 0))
        shared: Weights = self.rows * per_row[owners] + per_bin[owners]
        return shared


@dataclass(frozen=True, eq=False)
class StageWeights:
    """The weights of the bins of one stage, indexed by bin."""

    rows_per_s: Weights
    busy: Weights
    """Share of one core that each bin keeps busy."""
    keys: Weights
    nbytes: Weights
    seconds: float = 0.0
    """Run time that was measured, at most as much as still counts."""

    @classmethod
    def nothing(cls, bins: int) -> StageWeights:
        """The weights of a stage before its first epoch."""
        nothing = np.zeros(bins)
        return cls(nothing, nothing, nothing, nothing)

    def after(self, epoch: StageEpoch, seconds: float) -> StageWeights:
        """The weights after an epoch of this length."""
        seconds = max(seconds, _LEAST_S)
        kept = self.seconds * 0.5 ** (seconds / HALF_LIFE_S)
        total = kept + seconds

        def smoothed(before: Weights, found: Weights) -> Weights:
            mean: Weights = before * (kept / total) + found / total
            return mean

        return StageWeights(
            smoothed(self.rows_per_s, epoch.rows),
            smoothed(self.busy, epoch.busy_by_bin()),
            epoch.keys,
            epoch.nbytes,
            total,
        )

    def of(self, bins: Iterable[BinId]) -> tuple[float, float, float, float]:
        """Rows per second, share of a core, keys and bytes of some bins together."""
        chosen = np.fromiter(bins, np.int64)
        rows, busy, keys, nbytes = (
            float(each[chosen].sum()) for each in (self.rows_per_s, self.busy, self.keys, self.nbytes)
        )
        return rows, busy, keys, nbytes


@dataclass(frozen=True, eq=False)
class BinWeights:
    """The weights of all bins of all stages that keep keys.

    >>> two = Assignment(2, (0, 1, 0, 1))
    >>> rows = np.array([10.0, 0, 30, 0])
    >>> epoch = StageEpoch(two, rows, {PartitionId(0): 0.2, PartitionId(1): 0.1}, rows, 8 * rows)
    >>> weights = BinWeights().after({StageIndex(1): epoch}, seconds=0.5)[StageIndex(1)]
    >>> weights.rows_per_s.tolist(), weights.busy.round(3).tolist()
    ([20.0, 0.0, 60.0, 0.0], [0.1, 0.1, 0.3, 0.1])
    """

    stages: Mapping[StageIndex, StageWeights] = field(default_factory=dict)

    def __getitem__(self, stage: StageIndex) -> StageWeights:
        return self.stages[stage]

    def after(self, epochs: Mapping[StageIndex, StageEpoch], seconds: float) -> BinWeights:
        """The weights after one more epoch, of the stages that it had."""
        found = {}
        for stage, epoch in epochs.items():
            bins = epoch.assignment.bins
            before = self.stages.get(stage)
            found[stage] = (before or StageWeights.nothing(bins)).after(epoch, seconds)
        return replace(self, stages=found)
