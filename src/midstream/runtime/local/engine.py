"""The engine of the local runtime: runs the parts of a plan immediately, in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from midstream.engine.file_outlets import FileOutlets
from midstream.flow.model import Operator
from midstream.ids import Epoch, PartitionId, StageIndex, WireId
from midstream.planner.assignment import Assignments
from midstream.planner.stages import Plan, Stage
from midstream.runtime.driver_sinks import give
from midstream.runtime.local.data import LocalData, transform
from midstream.runtime.local.exchange import Exchanged, StageInput, StageOutput
from midstream.runtime.local.sinks import write
from midstream.storage.table_files import SinkFile

__all__ = ["LocalEngine"]

RunTasks = Callable[[StageIndex, StageInput, Sequence[int]], Mapping[int, list[pa.RecordBatch]]]
"""Runs the tasks of some partitions of a stage and returns their output."""


@dataclass(frozen=True)
class LocalEngine:
    """The :class:`~midstream.runtime.walk.EpochEngine` of one run of an epoch."""

    plan: Plan
    epoch: Epoch
    assignments: Assignments
    rng: random.Random
    run_tasks: RunTasks
    is_output_lost: Callable[[], bool]
    """Whether some of the kept frames are lost when they are read."""
    on_written: Callable[[], None]
    """Called after a sink was written."""
    files: dict[str, tuple[SinkFile, ...]]
    """Takes the files that are staged behind transforms, by sink."""
    durable: bool

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
        """All input of a segment."""
        return LocalData.united(inlets, frames)

    def transform(self, operator: Operator, rows: LocalData, *, is_kept: bool) -> LocalData:
        """Call the transform's local function."""
        return transform(self.plan.graph, operator, rows)

    def collect(self, left: StageOutput, wires: Sequence[WireId]) -> dict[WireId, pa.Table]:
        """It is computed already."""
        graph = self.plan.graph
        return {wire: self.decoded(left, wire).table(graph.schema_of(self.plan.wire(wire).port)) for wire in wires}

    def drain(self, rows: LocalData) -> None:
        """It is computed already."""

    def is_computed(self, stage: Stage) -> bool:
        """Everything is computed at once."""
        return True

    def reads_in_turn(self, sink: Operator, stage: Stage) -> bool:
        """It is computed already."""
        return False

    def give(self, sink: Operator, rows: pa.Table) -> None:
        """Pass rows to a sink."""
        give(self.plan.graph.payloads[sink.name], rows, self.epoch)
        self.on_written()

    def table(self, rows: LocalData, schema: pa.Schema) -> pa.Table:
        """All rows."""
        return rows.table(schema)

    def write_files(self, sink: Operator, rows: LocalData) -> None:
        """Stage files of a sink behind a transform."""
        assert sink.table is not None
        wire = WireId(0)
        outlets = FileOutlets(
            {wire: {sink.name: sink.table}},
            {wire: sink.schema},
            epoch=self.epoch,
            partition=PartitionId(0),
            durable=self.durable,
        )
        for batch in rows.table(sink.schema).to_batches():
            outlets.write(wire, batch)
        self.files.update(outlets.finish())
        self.on_written()

    def write(self, sinks: Sequence[tuple[Operator, LocalData]]) -> None:
        """Write sinks, one after the other."""
        for sink, rows in sinks:
            write(sink.name, self.plan.graph.payloads[sink.name], rows.table(sink.schema), self.epoch)
            self.on_written()

    def release(self) -> None:
        """Nothing to free but memory."""
