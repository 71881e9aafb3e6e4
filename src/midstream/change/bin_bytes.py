"""How large the state in each bin is, estimated from the files of a committed state. Pure."""

from __future__ import annotations

import numpy as np

from midstream.checkpoint.committed_state import CommittedState
from midstream.ids import StageIndex
from midstream.planner.migration import BinMove
from midstream.planner.stages import Plan
from midstream.planner.weights import Weights

__all__ = ["BinBytes"]


class BinBytes:
    """Bytes of files per stage and bin: what a partition must read to take over a bin of which it holds nothing.

    An estimate, because how a file divides among its bins is unknown. Without a committed state there is none.
    """

    def __init__(self, committed: CommittedState | None = None, plan: Plan | None = None) -> None:
        self._committed = committed
        self._by_stage: dict[StageIndex, Weights] = {}
        if committed is None or plan is None:
            return
        for stage in plan.stages:
            for name in stage.operators:
                lineage = committed.lineages.get(name)
                if lineage is not None:
                    found = lineage.bytes_behind(np.zeros(lineage.space.bins, "S16"), lineage.space.all)
                    self._by_stage[stage.index] = self._by_stage.get(stage.index, np.zeros(len(found))) + found

    def in_plan(self, plan: Plan) -> BinBytes:
        """The same state, in the stages of another plan."""
        return BinBytes(self._committed, plan)

    def __call__(self, move: BinMove) -> int:
        """The bytes that move with a bin."""
        known = self._by_stage.get(move.stage)
        return 0 if known is None else round(float(known[move.bin]))
