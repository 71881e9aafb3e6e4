"""The stage runner: pushes the rows of one task through the operators of one stage.

It decodes what enters, cuts it into slices, pushes each slice through all operators depth first, and collects what
leaves. A slice goes through the whole stage before the next one starts, so it meets every operator under one
revision. The runner knows neither Spark nor sockets: batches in, batches out, and a report at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.times import EpochTimes
from midstream.engine.clock import Clock
from midstream.engine.collector import Collector
from midstream.engine.combiner import Combiner
from midstream.engine.frames import FrameKind
from midstream.engine.intake import Carried, Entry, entries_of, units
from midstream.engine.operators.base import AtWork
from midstream.engine.operators.registry import Parts, at_work
from midstream.engine.program import StageProgram
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.flow.model import LATE, LATE_RIGHT, Operator, Route
from midstream.ids import PartitionId, Revision, WireId
from midstream.metrics import Histogram, OperatorStats
from midstream.planner.stages import Wire
from midstream.state.task import TaskState


@dataclass(frozen=True)
class StageReport:
    """What a task did.

    ``received`` and ``sent`` count the rows on the wires that connect this stage with its neighbours, ``emitted`` those
    put on each wire that starts here. ``event_times`` holds the latest event time of each source that gave rows,
    ``widest_row`` the bytes of a row that entered as plain columns, in the batch in which they were widest.
    """

    operators: tuple[OperatorStats, ...]
    received: dict[WireId, int]
    sent: dict[WireId, int]
    emitted: dict[WireId, int]
    event_times: dict[str, int]
    widest_row: int


@dataclass
class _Node:
    """An operator in place: its work, who reads each of its branches, and what it has done so far."""

    name: str
    work: AtWork
    event_time: str | None
    late: frozenset[str]
    consumers: dict[str, tuple[Entry, ...]]
    wires: dict[str, tuple[Wire, ...]]
    rows_in: int = 0
    rows_out: int = 0
    rows_late: int = 0
    slices: int = 0
    busy_ns: int = 0
    slowest_ns: int = 0
    ages_ms: list[tuple[float, int]] = field(default_factory=list)

    def note_slice(self, took_ns: int) -> None:
        self.slices += 1
        self.busy_ns += took_ns
        self.slowest_ns = max(self.slowest_ns, took_ns)

    def stats(self) -> OperatorStats:
        return OperatorStats(
            operator=self.name,
            rows_in=self.rows_in,
            rows_out=self.rows_out,
            rows_late=self.rows_late,
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
        times: EpochTimes,
        states: Mapping[str, TaskState],
    ) -> None:
        self._program = program
        self._revision = revision
        self._clock = clock
        self._sizer = sizer
        self._collector = Collector(program.stage.leaves, partition, bins)
        self._combiners: dict[tuple[Wire, Revision], Combiner] = {}
        self._received: Counter[WireId] = Counter()
        self._sources = program.timed
        self._event_times: dict[str, int] = {}
        self._widest_row = 0
        parts = Parts(program, resources, states, times, revision)
        self._nodes = {op.name: _node(op, parts) for op in program.operators}

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
            elif unit.batch.num_rows:
                self._widest_row = max(self._widest_row, unit.batch.nbytes // unit.batch.num_rows)
            revision = self._revision if unit.revision is None else unit.revision
            for piece in self._sizer.cut(unit.batch):
                began = self._clock.stopwatch_ns()
                for entry in unit.entries:
                    if unit.kind is FrameKind.PARTIALS:
                        self._push_partials(entry, piece)
                    else:
                        self._push(entry, piece, revision)
                self._sizer.observe(rows=piece.num_rows, elapsed_ns=self._clock.stopwatch_ns() - began)
                yield self._collector.take()
        # In the graph's order, so that what one operator says at the end is heard by those behind it before theirs.
        for node in self._nodes.values():
            if node.work.finish is not None:
                for results in self._timed(node, node.work.finish()):
                    self._hand_on(node, results, self._revision)
                    yield self._collector.take()
        for (wire, revision), combiner in self._combiners.items():
            combiner.finish()
            self._collect(wire, combiner, revision)
        yield self._collector.finish()

    def report(self) -> StageReport:
        """What was done; meaningful once :meth:`run` is exhausted."""
        return StageReport(
            operators=tuple(node.stats() for node in self._nodes.values()),
            received=dict(self._received),
            sent={wire: n for wire, n in self._collector.sent.items() if wire in self._program.onward},
            emitted=dict(self._collector.emitted),
            event_times=self._event_times,
            widest_row=self._widest_row,
        )

    def _push(self, entry: Entry, batch: pa.RecordBatch, revision: Revision) -> None:
        """Through one operator and then, depth first, through all that read it. Ends because the graph is acyclic."""
        node = self._nodes[entry.operator]
        node.rows_in += batch.num_rows
        step = node.work.entries[entry.side]
        began = self._clock.stopwatch_ns()
        results = step(batch)
        node.note_slice(self._clock.stopwatch_ns() - began)
        if entry.operator in self._sources:
            self._note_event_time(entry.operator, batch)
        self._hand_on(node, results, revision)

    def _timed(
        self, node: _Node, results: Iterator[Mapping[str, pa.RecordBatch]]
    ) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """The same results; the time it took to make each is the operator's."""
        while True:
            began = self._clock.stopwatch_ns()
            found = next(results, None)
            node.note_slice(self._clock.stopwatch_ns() - began)
            if found is None:
                return
            yield found

    def _push_partials(self, entry: Entry, batch: pa.RecordBatch) -> None:
        """Into an operator that takes what senders have added up. It has nothing to say before the end."""
        node = self._nodes[entry.operator]
        node.rows_in += pc.sum(batch.column("rows")).as_py()
        assert node.work.take_partials is not None, f"{entry.operator!r} was sent partials"
        began = self._clock.stopwatch_ns()
        node.work.take_partials(batch)
        node.note_slice(self._clock.stopwatch_ns() - began)

    def _send(self, wire: Wire, rows: pa.RecordBatch, revision: Revision) -> None:
        """Put rows on a wire, added up before if that is possible and pays."""
        consumer = self._program.combines.get(wire.id)
        if consumer is None:
            self._collector.add(wire, rows, revision)
            return
        if (wire, revision) not in self._combiners:
            self._combiners[wire, revision] = Combiner(consumer, self._program.schemas[wire.id])
        combiner = self._combiners[wire, revision]
        combiner.add(rows)
        self._collect(wire, combiner, revision)

    def _collect(self, wire: Wire, combiner: Combiner, revision: Revision) -> None:
        for rows in combiner.rows():
            self._collector.add(wire, rows, revision)
        for partials in combiner.partials():
            self._collector.add_partials(wire, partials, revision)

    def _hand_on(self, node: _Node, results: Mapping[str, pa.RecordBatch], revision: Revision) -> None:
        for branch, result in results.items():
            if not result.num_rows:
                continue
            if branch in node.late:
                node.rows_late += result.num_rows
            else:
                node.rows_out += result.num_rows
                if node.event_time is not None:
                    self._note_ages(node, result, node.event_time)
            for consumer in node.consumers[branch]:
                self._push(consumer, result, revision)
            for wire in node.wires[branch]:
                self._send(wire, result, revision)

    def _note_event_time(self, source: str, batch: pa.RecordBatch) -> None:
        latest = pc.max(batch.column(self._sources[source])).cast(pa.int64()).as_py()
        if latest is not None:
            self._event_times[source] = max(latest, self._event_times.get(source, latest))

    def _note_ages(self, node: _Node, batch: pa.RecordBatch, column: str) -> None:
        """The oldest and the newest row stand for their slice: exact at the extremes, and cheap."""
        extremes = pc.min_max(batch.column(column).cast(pa.int64()))
        now, half = self._clock.wall_us(), batch.num_rows / 2
        for key, weight in (("min", int(half + 0.5)), ("max", int(half))):
            due = extremes[key].as_py()
            if due is not None and weight:
                node.ages_ms.append(((now - due) / 1000, weight))


def _node(operator: Operator, parts: Parts) -> _Node:
    program = parts.program
    # Not the inlets: a transform of this stage that reads another one has had its rows in Catalyst already.
    here = [op for op in program.operators if op.name not in program.stage.inlets]
    return _Node(
        name=operator.name,
        work=at_work(operator, parts),
        event_time=program.event_times.get(operator.name),
        late=frozenset() if isinstance(operator.spec, Route) else frozenset({LATE, LATE_RIGHT}),
        consumers={port.branch: entries_of(port, here) for port in operator.ports},
        wires={
            port.branch: tuple(
                wire for wire in program.wires if wire.port == port and wire.origin == program.stage.index
            )
            for port in operator.ports
        },
    )
