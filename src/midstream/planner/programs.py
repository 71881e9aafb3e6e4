"""Stage programs: everything a worker needs to run a stage, linked and ready to store.

The planner's stage decides what runs where; linking adds the digests of the operators' functions and tables. A program
is itself a blob, so one digest is all that a task needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from midstream.flow.graph_format import CODEC
from midstream.flow.model import Graph, Operator, Sink, Source
from midstream.flow.spec import SinkTable
from midstream.ids import Digest, Revision, WireId
from midstream.planner.stages import Plan, Stage, Wire
from midstream.storage.blobs import Blob
from midstream.storage.documents import read_document, write_document

_WHAT = "a program of a stage in the checkpoint"


@dataclass(frozen=True)
class StateMigration:
    """A revision's function that transforms a key's state, see :class:`midstream.Update`."""

    revision: Revision
    function: Digest


@dataclass(frozen=True)
class StageProgram:
    """One stage, self-contained. Only the owners of bins are elsewhere (:mod:`.assignment`).

    ``inputs`` are the schemas of the rows each operator takes, one per input; ``event_times`` the columns from which
    the operators' latencies are measured; ``onward`` the wires that the next stage receives or carries.
    """

    stage: Stage
    operators: tuple[Operator, ...]
    wires: tuple[Wire, ...]
    schemas: Mapping[WireId, pa.Schema]
    inputs: Mapping[str, tuple[pa.Schema, ...]]
    event_times: Mapping[str, str]
    blobs: Mapping[str, Digest]
    onward: frozenset[WireId]
    combines: Mapping[WireId, Operator]
    """Wires that start here and lead to a single operator, which allows pre-aggregation of its rows."""
    tables: Mapping[WireId, Mapping[str, SinkTable]]
    """Written wires that start here: the tables of their sinks, by name. Rows for sinks without a table are dropped."""
    wanted: Mapping[WireId, int]
    """Wires that start here and lead to sinks which look at this many rows only."""
    migrations: Mapping[str, tuple[StateMigration, ...]]
    """The migrations of each operator's state from older revisions, oldest first."""
    has_event_times: bool = True
    """Whether any source of the flow has event times. If not, there is never a watermark."""

    def runs_of(self, name: str) -> tuple[object, ...]:
        """Everything that determines an operator's behaviour, except where its rows come from. If it is equal in two
        programs, the operator behaves alike in both."""
        return (
            replace(self.operator(name), inputs=()),
            self.inputs[name],
            self.blobs.get(name),
            self.migrations.get(name),
        )

    def digests_of(self, name: str) -> tuple[Digest, ...]:
        """The blobs of an operator: its function or table, if it has one, and its migrations."""
        own = (self.blobs[name],) if name in self.blobs else ()
        return (*own, *(step.function for step in self.migrations.get(name, ())))

    def digests(self) -> frozenset[Digest]:
        """The blobs of all operators."""
        return frozenset(digest for op in self.operators for digest in self.digests_of(op.name))

    def operator(self, name: str) -> Operator:
        """One of the operators."""
        return next(op for op in self.operators if op.name == name)

    @property
    def timed(self) -> dict[str, Source]:
        """The sources of this stage that have event times, from which watermarks are computed."""
        sources = ((op.name, op.spec) for op in self.operators if isinstance(op.spec, Source))
        return {name: source for name, source in sources if source.event_time is not None}

    def to_blob(self) -> Blob:
        """The program as a blob of the store. Equal programs have equal blobs."""
        return Blob.of(write_document(CODEC.encode(self, StageProgram)))

    @classmethod
    def from_bytes(cls, data: bytes) -> StageProgram:
        """Read a stored program; refuses one that another version of midstream wrote in another format."""
        fields = read_document(data, _WHAT)
        fields.pop("assignments", None)  # older programs named the owners of bins, too
        program: StageProgram = CODEC.decode(fields, cls, _WHAT)
        return program


def pack_blobs(graph: Graph) -> dict[str, Blob]:
    """Functions and tables of all operators, ready to store. Used by both runtimes, before :func:`link`."""
    packed = ((op.name, op.spec.packed(graph.payloads.get(op.name), op.name)) for op in graph)
    return {name: blob for name, blob in packed if blob is not None}


def link(
    plan: Plan,
    blobs: Mapping[str, Digest],
    migrations: Mapping[str, tuple[StateMigration, ...]],
) -> tuple[StageProgram, ...]:
    """One program per stage. ``blobs`` names the stored function or table of each operator that has one."""
    times = plan.graph.event_times
    has_event_times = any(source.event_time is not None for source in plan.graph.sources.values())
    programs = []
    for stage in plan.stages:
        operators = tuple(plan.graph[name] for name in stage.operators)
        touched = {*stage.receives, *stage.carries, *stage.emits}
        following = plan.stages[stage.index + 1] if stage.index + 1 < len(plan.stages) else None
        programs.append(
            StageProgram(
                stage=stage,
                operators=operators,
                wires=tuple(wire for wire in plan.wires if wire.id in touched),
                schemas={wire.id: plan.graph.schema_of(wire.port) for wire in plan.wires if wire.id in touched},
                inputs={op.name: _input_schemas(plan.graph, op) for op in operators},
                event_times={op.name: times[op.name] for op in operators if op.name in times},
                # A transform runs on the driver; workers must not load it.
                blobs={op.name: blobs[op.name] for op in operators if _has_blob(op, blobs)},
                onward=frozenset({*following.receives, *following.carries}) if following else frozenset(),
                combines=_combinable(plan, stage),
                tables=_tables(plan, stage),
                wanted=_wanted(plan, stage),
                migrations={op.name: migrations[op.name] for op in operators if op.name in migrations},
                has_event_times=has_event_times,
            )
        )
    return tuple(programs)


def _has_blob(op: Operator, blobs: Mapping[str, Digest]) -> bool:
    return op.name in blobs and not (op.spec.is_outlet or op.spec.reads_stream)


def _tables(plan: Plan, stage: Stage) -> dict[WireId, dict[str, SinkTable]]:
    written = [wire for wire in plan.wires if wire.id in stage.emits and wire.is_written]
    tables = {wire.id: {name: plan.graph[name].table for name in wire.consumers} for wire in written}
    return {wire: {name: table for name, table in found.items() if table is not None} for wire, found in tables.items()}


def _wanted(plan: Plan, stage: Stage) -> dict[WireId, int]:
    found = {}
    for wire in plan.wires:
        if wire.id in stage.emits and wire.target is None:
            specs = [plan.graph[name].spec for name in wire.consumers]
            counts = [spec.wanted for spec in specs if isinstance(spec, Sink) and spec.wanted is not None]
            if len(counts) == len(specs):
                found[wire.id] = max(counts)
    return found


def _combinable(plan: Plan, stage: Stage) -> dict[WireId, Operator]:
    found = {}
    for wire in plan.wires:
        consumers = [plan.graph[name] for name in wire.consumers]
        if wire.id in stage.emits and wire.key is not None and len(consumers) == 1:
            [consumer] = consumers
            if consumer.spec.combinable:
                found[wire.id] = consumer
    return found


def _input_schemas(graph: Graph, op: Operator) -> tuple[pa.Schema, ...]:
    """The schemas of an operator's inputs. An inlet takes the rows it emits: a transform's results enter a stage."""
    if op.spec.is_inlet:
        return (op.schema,)
    return tuple(graph.schema_of(port) for port in op.inputs)
