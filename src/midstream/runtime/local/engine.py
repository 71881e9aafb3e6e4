"""The engine of the local runtime: runs the parts of a plan at once, in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from midstream.flow.model import Operator
from midstream.ids import Epoch, StageIndex, WireId
from midstream.planner.assignment import Assignment
from midstream.planner.stages import Plan, Stage
from midstream.runtime.local.data import LocalData, transform
from midstream.runtime.local.exchange import Exchanged, StageInput, StageOutput
from midstream.runtime.local.sinks import write

__all__ = ["LocalEngine"]

RunTasks = Callable[[StageIndex, StageInput, Sequence[int]], Mapping[int, list[pa.RecordBatch]]]
"""Run the tasks of some partitions of a stage; gives their output."""


@dataclass(frozen=True)
class LocalEngine:
    """The :class:`~midstream.runtime.walk.EpochEngine` of one run of an epoch."""

    plan: Plan
    epoch: Epoch
    assignments: Mapping[StageIndex, Assignment]
    rng: random.Random
    run_tasks: RunTasks
    is_output_lost: Callable[[], bool]
    """Whether something is gone of kept frames that are read now."""
    on_written: Callable[[], None]
    """Called when a sink was written."""

    def run(self, stage: Stage, rows: StageInput) -> StageOutput:
        """Run a stage."""
        results = self.run_tasks(stage.index, rows, range(len(rows)))
        return StageOutput(stage.index, rows, [results[partition] for partition in range(len(rows))])

    def run_next(self, stage: Stage, before: StageOutput) -> StageOutput:
        """Run a stage behind an exchange."""
        return self.run(stage, Exchanged(before, self.assignments[stage.index].partitions, self.rng))

    def keep(self, left: StageOutput) -> StageOutput:
        """It is computed already."""
        return left

    def frames(self, left: StageOutput, wires: Sequence[WireId]) -> LocalData:
        """The frames of some wires, some of them perhaps computed again."""
        if self.is_output_lost():
            lost = self.rng.randrange(len(left.batches))
            left.batches[lost] = self.run_tasks(left.stage, left.read, [lost])[lost]
        return left.data.of_wires(wires)

    def decoded(self, left: StageOutput, wire: WireId) -> LocalData:
        """The rows in the frames of a wire."""
        return self.frames(left, [wire]).decoded()

    def columns(self, left: StageOutput) -> LocalData:
        """The rows, which went straight to the sink."""
        return left.data

    def unite(self, inlets: Sequence[LocalData], frames: LocalData | None) -> LocalData:
        """All that enters a segment."""
        return LocalData.united(inlets, frames)

    def transform(self, operator: Operator, rows: LocalData, *, is_kept: bool) -> LocalData:
        """Call the function that does without Spark."""
        return transform(self.plan.graph, operator, rows)

    def drain(self, rows: LocalData) -> None:
        """It is computed already."""

    def write(self, sink: Operator, rows: LocalData) -> None:
        """Write a sink."""
        write(sink.name, self.plan.graph.payloads[sink.name], rows.table(sink.schema), self.epoch)
        self.on_written()

    def release(self) -> None:
        """Nothing is held but memory."""
