"""Compiles one epoch into one Spark plan: ``mapInArrow`` per stage, one exchange between neighbours.

Called afresh for every epoch, inside ``foreachBatch``. Only DataFrames are made here; the sinks start the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from midstream.data.schema import from_spark, to_ddl, type_name
from midstream.engine.frames import FRAME_ORDER, FRAME_SCHEMA
from midstream.engine.intake import FRAME_COLUMN, INLET_COLUMN, inlet_column
from midstream.errors import SchemaError
from midstream.flow.model import Transform
from midstream.ids import StageIndex, WireId
from midstream.planner.assignment import Assignment
from midstream.planner.stages import Leaves, Plan, Stage
from midstream.runtime.spark.batch_size import BatchLimit
from midstream.runtime.spark.worker import Body, Ticket, decode_frames, rename_columns, run_stage

FRAME_DDL = to_ddl(FRAME_SCHEMA)
TicketFor = Callable[[StageIndex], Ticket]


@cache
def _struct(ddl: str) -> StructType:
    """Spark would ask the JVM what a text means, in every epoch anew."""
    struct = StructType.fromDDL(ddl)
    assert isinstance(struct, StructType)
    return struct


@dataclass
class EpochFrames:
    """An epoch's DataFrames: one per sink, and those that must be kept until all sinks are done."""

    sinks: dict[str, DataFrame] = field(default_factory=dict)
    kept: list[DataFrame] = field(default_factory=list)

    def keep(self, df: DataFrame) -> DataFrame:
        """Compute it once, however often it is read."""
        kept = df.persist()
        self.kept.append(kept)
        return kept

    def release(self) -> None:
        """Free what was kept."""
        for df in self.kept:
            df.unpersist()


def compile_epoch(
    plan: Plan,
    assignments: Mapping[StageIndex, Assignment],
    rows: DataFrame,
    ticket: TicketFor,
    limit: BatchLimit,
) -> EpochFrames:
    """The DataFrame of every sink, for the rows of one epoch (united as :func:`unite_inlets` does)."""
    compiler = _Compiler(plan, assignments, ticket, limit)
    df = rows
    for segment in range(plan.segments):
        stages = plan.segment(segment)
        if segment:
            df = compiler.enter_segment(stages[0], segment)
        for stage in stages:
            df = compiler.run(stage, df)
        if stages[-1].leaves is Leaves.FRAMES:
            df = compiler.epoch.keep(df)
        compiler.leaving[segment] = df
        compiler.transform(segment)
    for name, feed in plan.feeds.items():
        if not isinstance(plan.graph[name].spec, Transform):
            compiler.epoch.sinks[name] = compiler.rows_of(feed)
    return compiler.epoch


@dataclass
class _Compiler:
    """The DataFrames of an epoch as they come to be, segment by segment."""

    plan: Plan
    assignments: Mapping[StageIndex, Assignment]
    ticket: TicketFor
    limit: BatchLimit
    epoch: EpochFrames = field(default_factory=EpochFrames)
    results: dict[str, DataFrame] = field(default_factory=dict)
    """Of transforms."""
    leaving: dict[int, DataFrame] = field(default_factory=dict)
    """What leaves each segment."""

    def run(self, stage: Stage, df: DataFrame) -> DataFrame:
        """One stage, and the exchange behind it if there is one."""
        typed = stage.leaves is Leaves.TYPED
        ddl = to_ddl(self._wire_schema(stage.emits[0] if stage.emits else stage.carries[0])) if typed else FRAME_DDL
        task: Body = partial(run_stage, self.ticket(stage.index))
        if stage.inlets and any({".", "`"} & set(name) for name in df.columns):
            # mapInArrow asks for columns by name, and takes names apart at dots and backticks.
            task = partial(rename_columns, tuple(df.columns), task)
            df = df.toDF(*[f"c{i}" for i in range(len(df.columns))])
        out = df.mapInArrow(task, _struct(ddl))
        if stage.leaves is Leaves.EXCHANGE:
            following = self.assignments[StageIndex(stage.index + 1)]
            exchanged = out.repartitionById(following.partitions, F.col("dest")).sortWithinPartitions(*FRAME_ORDER)
            out = self.limit.spaced(exchanged)
        return out

    def transform(self, segment: int) -> None:
        """Apply the transforms whose rows leave this segment, in the graph's order: one may read another's result."""
        graph = self.plan.graph
        for op in graph.of(Transform):
            feed = self.plan.feeds[op.name]
            ready = feed in self.results if isinstance(feed, str) else self.plan.wire(feed).segment == segment
            if op.name in self.results or not ready:
                continue
            result = apply_transform(op.name, graph.payloads[op.name][0], self.rows_of(feed), op.schema)
            if len(graph.consumers(op.ports[0])) > 1:  # read more than once: do not run it more than once
                result = self.epoch.keep(result)
            self.results[op.name] = result

    def rows_of(self, feed: WireId | str) -> DataFrame:
        """The plain rows of a transform, or of a wire at the end of its segment."""
        if isinstance(feed, str):
            return self.results[feed]
        segment = self.plan.wire(feed).segment
        df = self.leaving[segment]
        if self.plan.segment(segment)[-1].leaves is Leaves.TYPED:
            return df
        frames = self.limit.spaced(df.filter(F.col("wire") == feed))
        return frames.mapInArrow(decode_frames, _struct(to_ddl(self._wire_schema(feed))))

    def enter_segment(self, first: Stage, segment: int) -> DataFrame:
        """All that enters the first stage of a segment: results of transforms, and frames that passed them by."""
        inlets = [self.results[name] for name in first.inlets]
        if not first.takes_frames:
            return unite_inlets(inlets)
        wires = [int(wire) for wire in (*first.receives, *first.carries)]
        return unite_inlets(inlets, self.limit.spaced(self.leaving[segment - 1].filter(F.col("wire").isin(wires))))

    def _wire_schema(self, wire: WireId) -> pa.Schema:
        return self.plan.graph.schema_of(self.plan.wire(wire).port)


def apply_transform(name: str, function: Callable[[DataFrame], Any], rows: DataFrame, schema: pa.Schema) -> DataFrame:
    """Call a transform's function and hold its result to the declared schema."""
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
    return result if found.names == schema.names else result.select(*[_quoted(name) for name in schema.names])


def unite_inlets(inlets: Sequence[DataFrame], frames: DataFrame | None = None) -> DataFrame:
    """One DataFrame of all that enters a stage; the shapes are those of :mod:`midstream.engine.intake`."""
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
                (F.struct(*[_quoted(c) for c in part.columns]) if i == number else F.lit(None).cast(types[i])).alias(
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


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
