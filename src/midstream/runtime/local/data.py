"""Data between tasks of the local runtime: record batches by partition, in the same shapes as on Spark."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.schema import conform
from midstream.engine.frames import FRAME_SCHEMA, decode_rows, frames_of
from midstream.engine.intake import FRAME_COLUMN, INLET_COLUMN, inlet_column
from midstream.errors import FlowError, MidstreamError, SchemaError, SourceError
from midstream.flow.delta_source import DeltaSource, TableReader
from midstream.flow.kafka_sink import KafkaSink
from midstream.flow.model import Graph, Operator, Sink, Source, Transform
from midstream.flow.sources import GeneratorSource, ListSource
from midstream.ids import WireId


@dataclass(frozen=True)
class LocalData:
    """The local counterpart of a DataFrame: batches, by partition."""

    partitions: Sequence[Sequence[pa.RecordBatch]]

    def __len__(self) -> int:
        return len(self.partitions)

    def of(self, partition: int) -> Sequence[pa.RecordBatch]:
        """The batches of one partition."""
        return self.partitions[partition]

    @classmethod
    def united(cls, inlets: Sequence[LocalData], frames: LocalData | None) -> LocalData:
        """All input of a stage, in the shape of :mod:`midstream.engine.intake`; the partitions are concatenated."""
        parts = [*inlets] if frames is None else [*inlets, frames]
        if len(parts) == 1:
            return parts[0]
        names = [inlet_column(i) for i in range(len(inlets))] + ([] if frames is None else [FRAME_COLUMN])
        types = [part.struct_type() for part in parts]
        return cls(
            [
                [_mixed(batch, number, names, types) for batch in partition]
                for number, part in enumerate(parts)
                for partition in part.partitions
            ]
        )

    def struct_type(self) -> pa.DataType:
        """The type of a row, as a struct; that of a frame if there is no row."""
        schema = next((batch.schema for partition in self.partitions for batch in partition), FRAME_SCHEMA)
        return pa.struct(list(schema))

    def of_wires(self, wires: Iterable[WireId]) -> LocalData:
        """Frames of these wires only."""
        wanted = pa.array(sorted(wires), pa.int32())
        return LocalData(
            [
                [batch.filter(pc.is_in(batch.column("wire"), value_set=wanted)) for batch in partition]
                for partition in self.partitions
            ]
        )

    def decoded(self) -> LocalData:
        """The rows inside frames."""
        return LocalData(
            [[decode_rows(p) for batch in partition for _, p in frames_of(batch)] for partition in self.partitions]
        )

    def table(self, schema: pa.Schema) -> pa.Table:
        """All rows."""
        return pa.Table.from_batches([batch for partition in self.partitions for batch in partition], schema)


def _mixed(batch: pa.RecordBatch, number: int, names: Sequence[str], types: Sequence[pa.DataType]) -> pa.RecordBatch:
    rows = batch.num_rows
    columns = [batch.to_struct_array() if i == number else pa.nulls(rows, kind) for i, kind in enumerate(types)]
    return pa.RecordBatch.from_arrays([pa.array([number] * rows, pa.int32()), *columns], [INLET_COLUMN, *names])


def by_destination(frames: LocalData, partitions: int, order: Sequence[str], rng: random.Random) -> LocalData:
    """An exchange: send every frame to its destination and sort there. Frames arrive in any order, as on Spark."""
    batches = [batch for partition in frames.partitions for batch in partition]
    rng.shuffle(batches)
    table = pa.Table.from_batches(batches, FRAME_SCHEMA).sort_by([(column, "ascending") for column in order])
    return LocalData([table.filter(pc.equal(table.column("dest"), dest)).to_batches() for dest in range(partitions)])


def require_local(graph: Graph) -> None:
    """Refuse transforms and sinks that only Spark can run."""
    for op in graph.of(Sink):
        if isinstance(graph.payloads.get(op.name), KafkaSink):
            raise FlowError(
                f"sink {op.name!r} is a KafkaSink, which needs Spark; on the local runtime use a MemorySink"
            )
    for op in graph.of(Transform):
        _local_function(graph, op)


def _local_function(graph: Graph, op: Operator) -> Callable[[pa.Table], Any]:
    _, local = graph.payloads[op.name]
    if local is None:
        raise FlowError(
            f"transform {op.name!r} needs Spark. To run it on the local runtime, pass local=, a function that "
            f"does the same on a pyarrow.Table"
        )
    function: Callable[[pa.Table], Any] = local
    return function


def transform(graph: Graph, op: Operator, rows: LocalData) -> LocalData:
    """Apply a transform's local function to rows, and check the result against the declared schema."""
    result = _local_function(graph, op)(rows.table(graph.schema_of(op.inputs[0])))
    if not isinstance(result, pa.Table):
        raise SchemaError(f"transform {op.name!r}: local must return a pyarrow.Table, found {type(result).__name__}")
    return LocalData([[conform(result, op.schema, f"transform {op.name!r}, local")]])


def check_transforms(graph: Graph, names: Iterable[str]) -> None:
    """Call these transforms on empty tables. Raises :class:`FlowError` if one cannot work."""
    for name in names:
        try:
            transform(graph, graph[name], LocalData([[]]))
        except MidstreamError:
            raise
        except Exception as error:
            raise FlowError(
                f"transform {name!r} fails on an empty table of its input's columns: {type(error).__name__}: {error}"
            ) from error


def source_epochs(graph: Graph) -> Iterator[Mapping[str, LocalData]]:
    """The rows of every source, epoch by epoch; none from a source that has ended."""
    cuts = {op.name: list(cut_epochs(op.name, graph.payloads[op.name])) for op in graph.of(Source)}
    for epoch in range(max(map(len, cuts.values()))):
        yield {name: LocalData(epochs[epoch] if epoch < len(epochs) else [[]]) for name, epochs in cuts.items()}


def cut_epochs(name: str, source: Any) -> Iterator[list[list[pa.RecordBatch]]]:
    """The rows of a source, epoch by epoch, in partitions."""
    match source:
        case ListSource():
            for epoch in range(len(source.epochs)):
                yield [[source.batches(epoch, partition)] for partition in range(source.partitions)]
        case GeneratorSource():
            if source.total is None:
                raise SourceError(
                    f"source {name!r} never ends; on the local runtime its GeneratorSource needs a limit="
                )
            size = source.max_rows_per_epoch or source.total
            for start in range(0, source.total, size):
                ranges = source.split(start, min(start + size, source.total))
                yield [list(source.rows(*each, start_us=0)) for each in ranges]
        case DeltaSource():
            reader = TableReader(source)
            newest, at = reader.newest(), reader.begin()
            while (end := reader.advance(at, newest, source.max_files_per_epoch)) != at:
                files = reader.files_between(at, end)
                yield [list(source.rows(share)) for share in source.shares(files)] or [[]]
                at = end
        case _:
            raise SourceError(
                f"source {name!r} is a DataFrame, which needs Spark; on the local runtime use a ListSource, a "
                f"GeneratorSource or a DeltaSource"
            )
