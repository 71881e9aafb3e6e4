"""Compiles one epoch into one Spark plan: ``mapInArrow`` per stage, one exchange between neighbours.

Runs inside ``foreachBatch``. The parts that are the same in every epoch are made once (:mod:`.stage_columns`), and
:mod:`midstream.runtime.walk` decides the order. This only makes DataFrames, until a sink is written: that starts jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark import inheritable_thread_target
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from midstream.data.schema import from_spark, to_ddl, type_name
from midstream.engine.frames import FRAME_SCHEMA, decode_rows
from midstream.engine.intake import FRAME_COLUMN, INLET_COLUMN, inlet_column
from midstream.errors import SchemaError
from midstream.flow.model import Operator, Sink, Transform
from midstream.flow.sinks import CallSink
from midstream.ids import Epoch, Run, StageIndex, WireId
from midstream.planner.assignment import Assignments
from midstream.planner.stages import Leaves, Plan, Stage
from midstream.runtime.driver_sinks import give
from midstream.runtime.spark.batch_size import BatchLimit
from midstream.runtime.spark.kafka import EpochNotes
from midstream.runtime.spark.sinks import drain, fetches_rows, write
from midstream.runtime.spark.stage_columns import PublicColumns, quoted
from midstream.runtime.spark.worker import Ticket, Whereabouts, decode_frames, run_stage, stage_files
from midstream.storage.table_files import SinkFile

FRAME_DDL = to_ddl(FRAME_SCHEMA)
FRAME_NAMES = tuple(FRAME_SCHEMA.names)
STAGED_DDL = "staged string, name string, rows bigint, size bigint"


@dataclass
class SparkEngine:
    """Spark as the :class:`~midstream.runtime.walk.EpochEngine` of one run of an epoch: all input and output are
    DataFrames."""

    plan: Plan
    epoch: Epoch
    run_number: Run
    assignments: Assignments
    at: Whereabouts
    steps: PublicColumns
    """Makes what each step applies to a DataFrame."""
    entering: tuple[str, ...]
    """The names of the columns that enter the first stage."""
    limit: BatchLimit
    finished: Callable[[StageIndex], int]
    """How many partitions of a stage have finished."""
    files: dict[str, tuple[SinkFile, ...]]
    """Takes the files that are staged behind transforms, by sink."""
    durable: bool
    notes: EpochNotes
    """Tells readers of Kafka sinks which runs count."""
    anchor: Callable[[int], DataFrame | None] = lambda partitions: None
    """The anchor for a number of partitions, which makes them stick to executors; None without one."""
    _kept: list[DataFrame] = field(default_factory=list)

    def run(self, stage: Stage, rows: DataFrame) -> DataFrame:
        """Run the first stage of a segment."""
        return self._run(stage, rows, tuple(rows.columns) if stage.segment else self.entering)

    def run_next(self, stage: Stage, before: DataFrame) -> DataFrame:
        """Run a stage behind an exchange."""
        partitions = self.assignments[stage.index].partitions
        exchanged = self.steps.exchange(before, partitions, self.anchor(partitions))
        return self._run(stage, self._spaced(exchanged), FRAME_NAMES)

    def _run(self, stage: Stage, rows: DataFrame, names: tuple[str, ...]) -> DataFrame:
        ddl = FRAME_DDL
        if stage.leaves is Leaves.TYPED:  # of the one wire that is not written
            [ddl] = [to_ddl(self._wire_schema(wire)) for wire in stage.emits if not self.plan.wire(wire).is_written]
        # Users' own functions may compute a DataFrame in any thread, and Spark's properties belong to one.
        run = (self.epoch, self.run_number) if hands_out_frames(self.plan) else None
        return self.steps.map(rows, names, run_stage, (Ticket(self.at, stage.index, run),), ddl)

    def _spaced(self, frames: DataFrame) -> DataFrame:
        return self.steps.select(frames, self.limit, self.limit.spacing)

    def keep(self, left: DataFrame) -> DataFrame:
        """Compute it once, however often it is read."""
        kept = left.persist()
        self._kept.append(kept)
        return kept

    def frames(self, left: DataFrame, wires: Sequence[WireId]) -> DataFrame:
        """The frames of some wires."""
        return self._spaced(self.steps.of_wires(left, wires))

    def decoded(self, left: DataFrame, wire: WireId) -> DataFrame:
        """The rows in the frames of a wire."""
        ddl = to_ddl(self._wire_schema(wire))
        return self.steps.map(self.frames(left, [wire]), FRAME_NAMES, decode_frames, (), ddl)

    def columns(self, left: DataFrame) -> DataFrame:
        """The output of the stage itself."""
        return left

    def unite(self, inlets: Sequence[DataFrame], frames: DataFrame | None) -> DataFrame:
        """All input of a segment."""
        return unite_inlets(inlets, frames)

    def transform(self, operator: Operator, rows: DataFrame, *, is_kept: bool) -> DataFrame:
        """Call the function; Catalyst runs the DataFrame that it returns."""
        function, _ = self.plan.graph.payloads[operator.name]
        result = apply_transform(operator.name, function, rows, operator.schema)
        return self.keep(result) if is_kept else result

    def collect(self, left: DataFrame, wires: Sequence[WireId]) -> dict[WireId, pa.Table]:
        """Run one job, whose result is the frames of the wires."""
        batches: dict[int, list[pa.RecordBatch]] = {int(wire): [] for wire in wires}
        if not wires:
            drain(left)
        else:
            is_kept = any(left is kept for kept in self._kept)  # then it has frames of other wires as well
            frames = self.steps.of_wires(left, wires) if is_kept else left
            for frame in self.steps.select(frames, "payloads", lambda: [F.col("wire"), F.col("payload")]).collect():
                batches[frame.wire].append(decode_rows(pa.py_buffer(bytes(frame.payload))))
        schemas = {wire: self._wire_schema(wire) for wire in wires}
        return {wire: pa.Table.from_batches(batches[int(wire)], schemas[wire]) for wire in wires}

    def drain(self, rows: DataFrame) -> None:
        """Run a job without output."""
        drain(rows)

    def is_computed(self, stage: Stage) -> bool:
        """True only behind an exchange, where the number of tasks is known."""
        assignment = self.assignments.get(stage.index)
        return assignment is not None and self.finished(stage.index) == assignment.partitions

    def reads_in_turn(self, sink: Operator, stage: Stage) -> bool:
        """Sinks that fetch rows do, each partition in a Spark job of its own."""
        assignment = self.assignments.get(stage.index)
        is_alone = assignment is not None and assignment.partitions == 1
        return fetches_rows(self.plan.graph.payloads[sink.name]) and not is_alone

    def give(self, sink: Operator, rows: pa.Table) -> None:
        """Pass rows to a sink."""
        give(self.plan.graph.payloads[sink.name], rows, self.epoch)

    def table(self, rows: DataFrame, schema: pa.Schema) -> pa.Table:
        """All rows, on the driver."""
        return rows.toArrow()

    def write_files(self, sink: Operator, rows: DataFrame) -> None:
        """Run a job whose tasks stage files, and return their names."""
        assert sink.table is not None
        given = (sink.table, sink.schema, self.epoch, self.durable)
        found = self.steps.map(rows, tuple(sink.schema.names), stage_files, given, STAGED_DDL).collect()
        self.files[sink.name] = tuple(SinkFile(row.staged, row.name, row.rows, row.size) for row in found)

    def write(self, sinks: Sequence[tuple[Operator, DataFrame]]) -> None:
        """Pass DataFrames to sinks; several are written at the same time."""
        if len(sinks) == 1:
            [(sink, rows)] = sinks
            write(sink.name, self.plan.graph.payloads[sink.name], rows, self.epoch, self.notes)
            return
        with ThreadPoolExecutor(len(sinks), "midstream-sinks") as pool:
            tasks = [
                pool.submit(
                    inheritable_thread_target(rows.sparkSession)(
                        partial(write, sink.name, self.plan.graph.payloads[sink.name], rows, self.epoch, self.notes)
                    )
                )
                for sink, rows in sinks
            ]
        for task in tasks:
            task.result()

    def release(self) -> None:
        """Free what was kept."""
        for df in self._kept:
            df.unpersist()

    def _wire_schema(self, wire: WireId) -> pa.Schema:
        return self.plan.graph.schema_of(self.plan.wire(wire).port)


def hands_out_frames(plan: Plan) -> bool:
    """Whether any of the user's functions gets the epoch's rows as a DataFrame."""
    graph = plan.graph
    return bool(graph.of(Transform)) or any(isinstance(graph.payloads[op.name], CallSink) for op in graph.of(Sink))


def apply_transform(name: str, function: Callable[[DataFrame], Any], rows: DataFrame, schema: pa.Schema) -> DataFrame:
    """Call a transform's function and check its result against the declared schema."""
    result = function(rows)
    what = f"transform {name!r}"
    if not isinstance(result, DataFrame):
        raise SchemaError(f"{what} must return a DataFrame, found {type(result).__name__}")
    if result.isStreaming:
        raise SchemaError(f"{what} returned a streaming DataFrame; it must be made from the rows it was given")
    try:
        found = from_spark(result.schema)
    except SchemaError as error:
        raise SchemaError(f"{what} returned columns that cannot be used: {error}") from error
    if set(found.names) != set(schema.names):
        raise SchemaError(
            f"{what} returned the columns {', '.join(found.names)}; declared are {', '.join(schema.names)}. Say what "
            f"it returns with returns='{to_ddl(found)}'"
        )
    for column in schema:
        if not found.field(column.name).type.equals(column.type):
            raise SchemaError(
                f"{what}: column {column.name!r} is {type_name(found.field(column.name).type)}, declared is "
                f"{type_name(column.type)}; cast it, or change returns=",
                column=column.name,
            )
    return result if found.names == schema.names else result.select(*[quoted(name) for name in schema.names])


def unite_inlets(inlets: Sequence[DataFrame], frames: DataFrame | None = None) -> DataFrame:
    """One DataFrame of all input of a stage, in the shapes of :mod:`midstream.engine.intake`."""
    if len(inlets) == 1 and frames is None:
        return inlets[0]
    columns = [inlet_column(i) for i in range(len(inlets))]
    parts = [*inlets] if frames is None else [*inlets, frames]
    columns += [] if frames is None else [FRAME_COLUMN]
    types = [part.schema for part in parts]
    united = [
        part.select(
            F.lit(number).cast("int").alias(INLET_COLUMN),
            *[
                (F.struct(*[quoted(c) for c in part.columns]) if i == number else F.lit(None).cast(types[i])).alias(
                    name
                )
                for i, name in enumerate(columns)
            ],
        )
        for number, part in enumerate(parts)
    ]
    first, *rest = united
    for part in rest:
        first = first.unionAll(part)
    return first
