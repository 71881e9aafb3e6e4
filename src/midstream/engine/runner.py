"""The stage runner: pushes the rows of one task through the operators of one stage.

It decodes what enters, cuts it into slices, pushes each slice through all operators depth first, and collects what
leaves. A slice goes through the whole stage before the next one starts, so it meets every operator under one
revision. The runner knows neither Spark nor sockets: batches in, batches out, and a report at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.clock import Clock
from midstream.engine.collector import Collector
from midstream.engine.intake import Carried, units
from midstream.engine.operators.base import Step
from midstream.engine.operators.registry import step_of
from midstream.engine.program import StageProgram
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.flow.model import Operator
from midstream.ids import PartitionId, Revision, WireId
from midstream.metrics import Histogram, OperatorStats
from midstream.planner.stages import Wire


@dataclass(frozen=True)
class StageReport:
    """What a task did.

    ``received`` and ``sent`` count the rows on the wires that connect this stage with its neighbours, ``emitted`` those
    put on each wire that starts here.
    """

    operators: tuple[OperatorStats, ...]
    received: dict[WireId, int]
    sent: dict[WireId, int]
    emitted: dict[WireId, int]


@dataclass
class _Node:
    """An operator in place: its step, who reads each of its branches, and what it has done so far."""

    name: str
    step: Step
    event_time: str | None
    consumers: dict[str, tuple[str, ...]]
    wires: dict[str, tuple[Wire, ...]]
    rows_in: int = 0
    rows_out: int = 0
    slices: int = 0
    busy_ns: int = 0
    slowest_ns: int = 0
    ages_ms: list[tuple[float, int]] = field(default_factory=list)

    def stats(self) -> OperatorStats:
        return OperatorStats(
            operator=self.name,
            rows_in=self.rows_in,
            rows_out=self.rows_out,
            slices=self.slices,
            busy_us=self.busy_ns // 1000,
            slowest_slice_us=self.slowest_ns // 1000,
            latency_ms=Histogram.of(self.ages_ms),
        )


class StageRunner:
    """Runs one stage in one task. Used once."""

    def __init__(
        self,
        program: StageProgram,
        resources: Resources,
        *,
        partition: PartitionId,
        revision: Revision,
        bins: Sequence[int],
        clock: Clock,
        sizer: SliceSizer,
    ) -> None:
        self._program = program
        self._revision = revision
        self._clock = clock
        self._sizer = sizer
        self._collector = Collector(program.stage.leaves, partition, bins)
        self._received: Counter[WireId] = Counter()
        self._nodes = {op.name: _node(op, program, resources) for op in program.operators}

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """Process all input. Yields after every slice what is ready to leave, which may be nothing.

        The pauses between slices are where a caller may do other things: interleave tasks, or listen.
        """
        for unit in units(self._program, batches):
            if isinstance(unit, Carried):
                self._received[unit.header.wire] += unit.header.rows
                self._collector.pass_on(unit)
                continue
            if unit.wire is not None:
                self._received[unit.wire] += unit.batch.num_rows
            revision = self._revision if unit.revision is None else unit.revision
            for piece in self._sizer.cut(unit.batch):
                began = self._clock.stopwatch_ns()
                for name in unit.operators:
                    self._push(name, piece, revision)
                self._sizer.observe(rows=piece.num_rows, elapsed_ns=self._clock.stopwatch_ns() - began)
                yield self._collector.take()
        yield self._collector.finish()

    def report(self) -> StageReport:
        """What was done; meaningful once :meth:`run` is exhausted."""
        return StageReport(
            operators=tuple(node.stats() for node in self._nodes.values()),
            received=dict(self._received),
            sent={wire: n for wire, n in self._collector.sent.items() if wire in self._program.onward},
            emitted=dict(self._collector.emitted),
        )

    def _push(self, name: str, batch: pa.RecordBatch, revision: Revision) -> None:
        """Through one operator and then, depth first, through all that read it. Ends because the graph is acyclic."""
        node = self._nodes[name]
        began = self._clock.stopwatch_ns()
        results = node.step(batch)
        took = self._clock.stopwatch_ns() - began
        node.slices += 1
        node.rows_in += batch.num_rows
        node.busy_ns += took
        node.slowest_ns = max(node.slowest_ns, took)
        for branch, result in results.items():
            if not result.num_rows:
                continue
            node.rows_out += result.num_rows
            if node.event_time is not None:
                self._note_ages(node, result, node.event_time)
            for consumer in node.consumers[branch]:
                self._push(consumer, result, revision)
            for wire in node.wires[branch]:
                self._collector.add(wire, result, revision)

    def _note_ages(self, node: _Node, batch: pa.RecordBatch, column: str) -> None:
        """The oldest and the newest row stand for their slice: exact at the extremes, and cheap."""
        extremes = pc.min_max(batch.column(column).cast(pa.int64()))
        now, half = self._clock.wall_us(), batch.num_rows / 2
        for key, weight in (("min", int(half + 0.5)), ("max", int(half))):
            due = extremes[key].as_py()
            if due is not None and weight:
                node.ages_ms.append(((now - due) / 1000, weight))


def _node(operator: Operator, program: StageProgram, resources: Resources) -> _Node:
    # Not the inlets: a transform of this stage that reads another one has had its rows in Catalyst already.
    here = set(program.stage.operators) - set(program.stage.inlets)
    return _Node(
        name=operator.name,
        step=step_of(operator, program, resources),
        event_time=program.event_times.get(operator.name),
        consumers={
            port.branch: tuple(op.name for op in program.operators if port in op.inputs and op.name in here)
            for port in operator.ports
        },
        wires={
            port.branch: tuple(
                wire for wire in program.wires if wire.port == port and wire.origin == program.stage.index
            )
            for port in operator.ports
        },
    )
