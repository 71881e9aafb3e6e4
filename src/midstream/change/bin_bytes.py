"""How large the state in each bin is, estimated from the files of a committed state. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from midstream.checkpoint.committed_state import CommittedState
from midstream.ids import StageIndex
from midstream.planner.migration import BinMove
from midstream.planner.stages import Plan

__all__ = ["BinBytes"]


class BinBytes:
    """Bytes of state per stage and bin: what a partition that takes over a bin has to read.

    An estimate, because a lineage has the number of rows of each bin, but not how large they are. Without a committed
    state there is none.
    """

    def __init__(self, committed: CommittedState | None = None, plan: Plan | None = None) -> None:
        self._by_stage: dict[StageIndex, npt.NDArray[np.float64]] = {}
        if committed is None or plan is None:
            return
        for stage in plan.stages:
            for name in stage.operators:
                lineage = committed.lineages.get(name)
                rows = 0 if lineage is None else sum(entry.file.rows for entry in lineage.entries)
                if lineage is None or not rows:
                    continue
                per_row = sum(entry.file.size for entry in lineage.entries) / rows
                counts = np.asarray(lineage.rows, np.float64) + np.asarray(lineage.keys, np.float64)
                known = self._by_stage.get(stage.index)
                self._by_stage[stage.index] = per_row * counts + (0.0 if known is None else known)

    def __call__(self, move: BinMove) -> int:
        """The bytes that move with a bin."""
        known = self._by_stage.get(move.stage)
        return 0 if known is None else round(float(known[move.bin]))

    def of_stage(self, stage: StageIndex, bins: int) -> list[float]:
        """The bytes of each bin of a stage."""
        known = self._by_stage.get(stage)
        return [0.0] * bins if known is None else known.tolist()
