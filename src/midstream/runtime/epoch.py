"""Compiles one epoch into one Spark plan: ``mapInArrow`` per stage, one exchange between neighbours.

Called afresh for every epoch, inside ``foreachBatch``. Only DataFrames are made here; the sinks start the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from midstream.engine.frames import FRAME_ORDER, FRAME_SCHEMA
from midstream.engine.intake import FRAME_COLUMN, INLET_COLUMN, inlet_column
from midstream.errors import SchemaError
from midstream.flow.model import Transform
from midstream.flow.schema import from_spark, to_ddl, type_name
from midstream.ids import StageIndex, WireId
from midstream.planner.stages import Leaves, Plan, Stage
from midstream.runtime.worker import Body, Ticket, decode_frames, rename_columns, run_stage

FRAME_DDL = to_ddl(FRAME_SCHEMA)
TicketFor = Callable[[StageIndex], Ticket]


@dataclass
class EpochFrames:
    """An epoch's DataFrames: one per sink, and those that must be kept until all sinks are done."""

    sinks: dict[str, DataFrame] = field(default_factory=dict)
    kept: list[DataFrame] = field(default_factory=list)

    def release(self) -> None:
        """Free what was kept."""
        for df in self.kept:
            df.unpersist()


def compile_epoch(plan: Plan, rows: DataFrame, ticket: TicketFor, partitions: int) -> EpochFrames:
    """The DataFrame of every sink, for the rows of one epoch (united as :func:`unite_inlets` does)."""
    epoch = EpochFrames()
    results: dict[str, DataFrame] = {}  # of transforms
    leaving: dict[int, DataFrame] = {}  # what leaves each segment
    df = rows
    for segment in range(plan.segments):
        stages = plan.segment(segment)
        if segment:
            df = _enter_segment(stages[0], leaving[segment - 1], results)
        for stage in stages:
            df = _run(plan, stage, df, ticket, partitions)
        if stages[-1].leaves is Leaves.FRAMES:
            df = df.persist()
            epoch.kept.append(df)
        leaving[segment] = df
        _transform(plan, segment, leaving, results, epoch)
    for name, feed in plan.feeds.items():
        if not isinstance(plan.graph[name].spec, Transform):
            epoch.sinks[name] = results[feed] if isinstance(feed, str) else _outlet(plan, feed, leaving)
    return epoch


def _run(plan: Plan, stage: Stage, df: DataFrame, ticket: TicketFor, partitions: int) -> DataFrame:
    typed = stage.leaves is Leaves.TYPED
    ddl = to_ddl(_wire_schema(plan, stage.emits[0] if stage.emits else stage.carries[0])) if typed else FRAME_DDL
    task: Body = partial(run_stage, ticket(stage.index))
    if any({".", "`"} & set(name) for name in df.columns):
        # mapInArrow asks for columns by name, and takes names apart at dots and backticks.
        task = partial(rename_columns, tuple(df.columns), task)
        df = df.toDF(*[f"c{i}" for i in range(len(df.columns))])
    out = df.mapInArrow(task, ddl)
    if stage.leaves is Leaves.EXCHANGE:
        out = out.repartitionById(partitions, F.col("dest")).sortWithinPartitions(*FRAME_ORDER)
    return out


def _transform(
    plan: Plan, segment: int, leaving: Mapping[int, DataFrame], results: dict[str, DataFrame], epoch: EpochFrames
) -> None:
    """Apply the transforms whose rows leave this segment, in the graph's order: one may read another's result."""
    for op in plan.graph.of(Transform):
        feed = plan.feeds[op.name]
        ready = feed in results if isinstance(feed, str) else plan.wires[feed].segment == segment
        if op.name in results or not ready:
            continue
        rows = results[feed] if isinstance(feed, str) else _outlet(plan, feed, leaving)
        result = apply_transform(op.name, plan.graph.payloads[op.name][0], rows, op.schema)
        if len(plan.graph.consumers(op.ports[0])) > 1:  # read more than once: do not run it more than once
            result = result.persist()
            epoch.kept.append(result)
        results[op.name] = result


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


def _outlet(plan: Plan, wire: WireId, leaving: Mapping[int, DataFrame]) -> DataFrame:
    segment = plan.wires[wire].segment
    df = leaving[segment]
    if plan.segment(segment)[-1].leaves is Leaves.TYPED:
        return df
    return df.filter(F.col("wire") == wire).mapInArrow(decode_frames, to_ddl(_wire_schema(plan, wire)))


def _enter_segment(first: Stage, before: DataFrame, results: Mapping[str, DataFrame]) -> DataFrame:
    inlets = [results[name] for name in first.inlets]
    if not first.takes_frames:
        return unite_inlets(inlets)
    passing = before.filter(F.col("wire").isin([int(wire) for wire in (*first.receives, *first.carries)]))
    return unite_inlets(inlets, passing)


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


def _wire_schema(plan: Plan, wire: WireId) -> pa.Schema:
    return plan.graph.schema_of(plan.wires[wire].port)
