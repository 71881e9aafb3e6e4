"""Measures the bins of a job: what tasks report at every commit becomes weights. Pure.

Rows are counted where senders hash keys, work is what the receiving tasks report, and state is measured by its files.
Nothing is measured row by row, and nothing is stored: after a restart, state is estimated from the sizes of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from midstream.checkpoint.committed_state import CommittedState
from midstream.control.messages import Commit, StateChange
from midstream.data.key_space import KeySpace, unpack_counts
from midstream.planner.assignment import Assignments
from midstream.planner.stages import Plan
from midstream.planner.weights import BinWeights, StageEpoch, Weights
from midstream.state.lineage import Lineage

__all__ = ["BinMeasures"]


@dataclass(frozen=True, eq=False)
class BinMeasures:
    """The weights of bins after an epoch, and the bytes of each operator's state by bin."""

    weights: BinWeights = field(default_factory=BinWeights)
    _nbytes: Mapping[str, Weights] = field(default_factory=dict)

    def after(
        self,
        commit: Commit,
        committed: CommittedState,
        plan: Plan,
        assignments: Assignments,
        seconds: float,
    ) -> BinMeasures:
        """The measures after an epoch of this length; ``committed`` is the state after it."""
        nbytes = {
            name: self._bytes_after(lineage, commit.states.get(name, ()))
            for name, lineage in committed.lineages.items()
        }
        epochs = {}
        for stage, assignment in assignments.items():
            rows, keys, size = (np.zeros(assignment.bins) for _ in range(3))
            for packed in commit.bin_rows.get(stage, ()):
                rows += unpack_counts(packed, assignment.bins)
            for name in plan.stages[stage].operators if stage < len(plan.stages) else ():
                if name in nbytes:
                    lineage = committed.lineages[name]
                    keys += lineage.keys + lineage.rows
                    size += nbytes[name]
            busy = {partition: us / 1e6 for partition, us in commit.busy_us.get(stage, {}).items()}
            epochs[stage] = StageEpoch(assignment, rows, busy, keys, size)
        return replace(self, weights=self.weights.after(epochs, seconds), _nbytes=nbytes)

    def _bytes_after(self, lineage: Lineage, changes: tuple[StateChange, ...]) -> Weights:
        before = self._nbytes.get(lineage.operator)
        if before is None:
            return lineage.bytes_behind(np.zeros(lineage.space.bins, "S16"), lineage.space.all)
        return _changed(before, changes, lineage.space)


def _changed(before: Weights, changes: tuple[StateChange, ...], space: KeySpace) -> Weights:
    nbytes = before.copy()
    for change in changes:
        for rewrite in change.rewrites:
            if rewrite.complete and len(rewrite.sizes) == len(rewrite.file.counts):
                nbytes[space.unpack(rewrite.bins)] = 0
                nbytes[space.unpack(rewrite.file.bins)] = rewrite.sizes
    # Snapshots hold the state before the epoch, so its deltas come on top.
    for change in changes:
        if change.delta is not None and len(change.sizes) == len(change.delta.counts):
            nbytes[space.unpack(change.delta.bins)] += change.sizes
    return nbytes
