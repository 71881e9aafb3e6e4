"""The stage runner: pushes the rows of one task through the operators of one stage.

It decodes its input, cuts it into slices, pushes each slice depth first through all operators, and collects the output.
A slice passes through the whole stage before the next one starts, so it meets every operator under one revision. The
runner knows neither Spark nor sockets: it takes batches, yields batches, and returns a report at the end.

During a change there are two revisions. Each has its own DAG, which may have operators that the other lacks. Chunks
carry their revision and pass through the DAG of that revision. Only the heads of the change choose the revision
themselves: the old one until the task's switch, the new one from then on, and their output carries it downstream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.times import EpochTimes
from midstream.engine.aggregation.combiner import Combiner
from midstream.engine.audit_recorder import Recorder
from midstream.engine.bad_rows import FAR
from midstream.engine.clock import Clock
from midstream.engine.collector import Collector
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlReport
from midstream.engine.file_outlets import FileOutlets
from midstream.engine.frames import FrameKind, encode_rows
from midstream.engine.intake import Carried, ControlArrival, IntakeEntry, Rows, entries_on, units
from midstream.engine.nodes import OperatorNode, in_order, node_of, version_of
from midstream.engine.parts import Parts, combiner_of
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.engine.task_controls import TaskControls
from midstream.flow.knobs import knob_value
from midstream.ids import BinId, InputPosition, Origin, PartitionId, Revision, StageIndex, WireId
from midstream.metrics import OperatorStats
from midstream.planner.assignment import Assignments
from midstream.planner.programs import StageProgram
from midstream.planner.stages import Wire
from midstream.state.task import TaskState

SAMPLE_ROWS = 3


@dataclass(frozen=True)
class StageReport:
    """What a task did.

    ``received`` and ``sent`` count the rows on the wires that connect this stage with its neighbours, ``emitted`` the
    rows put on each wire that starts here. ``event_times`` holds the latest event time of each source that had rows,
    ``widest_row`` the mean bytes per row of the input batch of plain columns with the widest rows.
    """

    operators: tuple[OperatorStats, ...]
    received: dict[WireId, int]
    sent: dict[WireId, int]
    emitted: dict[WireId, int]
    event_times: dict[str, int]
    widest_row: int
    samples: dict[str, bytes]
    """The first rows that each operator took, encoded; only partition 0 collects them."""
    bin_rows: dict[StageIndex, bytes]
    """See :attr:`.Collector.bin_rows`."""
    controls: tuple[ControlReport, ...] = ()
    """The results of control operations that began with the task."""


@dataclass(frozen=True)
class RevisedStage:
    """A stage under the revision that a change leads to, and the heads of the change."""

    revision: Revision
    program: StageProgram
    heads: frozenset[str]


class StageRunner:
    """Runs one stage in one task. Used once."""

    def __init__(
        self,
        program: StageProgram,
        resources: Resources,
        *,
        partition: PartitionId,
        assignments: Assignments,
        revision: Revision,
        clock: Clock,
        sizer: SliceSizer,
        times: EpochTimes,
        states: Mapping[str, TaskState],
        outlets: FileOutlets,
        recorder: Recorder | None = None,
        knobs: Mapping[str, int] | None = None,
        flushed: Collection[str] = (),
        elsewhere: Callable[[str, Collection[BinId]], pa.Table] | None = None,
    ) -> None:
        knobs = knobs or {}
        self._program = program
        self._assignments = assignments
        self._recorder = recorder
        self._outlets = outlets
        self._wanted = dict(program.wanted)
        self._is_first = partition == 0
        self._samples = self._is_first
        self._revision = revision
        self._clock = clock
        self._sizer = sizer
        self._collector = Collector(
            program.stage.leaves,
            partition,
            StageIndex(program.stage.index + 1),
            assignments,
            frame_bytes=knob_value(knobs, "frame"),
            held_bytes=knob_value(knobs, "held_output"),
        )
        self._key_sample = knob_value(knobs, "key_sample")
        self._combiners: dict[tuple[Wire, Revision], Combiner] = {}
        self._received: Counter[WireId] = Counter()
        self._sources = program.timed
        self._event_times: dict[str, int] = {}
        self._widest_row = 0
        here = assignments.get(program.stage.index)
        self._parts = Parts(
            program,
            resources,
            states,
            times,
            revision,
            divided=() if here is None else here.divided,
            united=() if here is None else here.united,
            elsewhere=elsewhere,
            flushed=frozenset(flushed),
        )
        self._nodes: dict[str, OperatorNode] = {}
        for op in program.operators:
            self._nodes[op.name] = node_of(op, revision, self._key_sample)
            self._nodes[op.name].versions[revision] = version_of(op, self._parts)
        self._position: Counter[Origin] = Counter()
        self._revised: RevisedStage | None = None
        self._switch_at: InputPosition | None = None
        self._head_revision = revision
        self._reached: list[str] = []
        self._controls: TaskControls | None = None
        self.is_finishing = False
        """All input is taken. End-of-epoch output uses one revision, so switching is no longer allowed."""
        self.at_work_under = revision
        """The revision of the rows being processed, which is to blame for a failure."""

    @property
    def nodes(self) -> Mapping[str, OperatorNode]:
        """The operators at work, for handlers of control operations."""
        return self._nodes

    def take_part(self, controls: TaskControls) -> None:
        """Take part in control operations. Before :meth:`run`."""
        self._controls = controls
        self._samples = True

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def position(self) -> InputPosition:
        """The task's progress in its input."""
        return dict(self._position)

    @property
    def is_exhausted(self) -> bool:
        """Whether all input is taken and there is no end-of-epoch output, so that no user function runs any more."""
        return self.is_finishing and all(
            version.work.flush is None and (version.work.finish is None or version.work.is_quiet)
            for node in self._nodes.values()
            for version in node.versions.values()
        )

    def prepare(self, revised: RevisedStage) -> None:
        """Get ready for chunks of a revision. The heads stay with the old revision until :meth:`switch`."""
        self._revised = revised
        self.at_work_under = revised.revision  # if a function cannot be loaded
        parts = self._parts.under(revised.program, revised.revision)
        before = {op.name for op in self._program.operators}
        for op in revised.program.operators:
            is_same = op.name in before and revised.program.runs_of(op.name) == self._program.runs_of(op.name)
            node = self._nodes.setdefault(op.name, node_of(op, self._revision, self._key_sample))
            known = node.versions[self._revision] if is_same else None
            version = version_of(op, parts, None if known is None else known.work)
            node.versions[revised.revision] = known if known is not None and known == version else version
            # Also if only its readers changed: that is where a row meets a change of the plan.
            node.is_updated = node.versions[revised.revision] is not known
        self._nodes = {name: self._nodes[name] for name in in_order(self._program, revised.program)}
        self.at_work_under = self._revision

    def switch(self, at: InputPosition | None = None) -> None:
        """Let the heads switch: now, or at the position where an earlier attempt of the task switched."""
        assert self._revised is not None, "prepare() comes first"
        self._switch_at = self.position if at is None else dict(at)

    def stay(self) -> None:
        """Undo :meth:`prepare`: no rows of that revision arrive here, and none are emitted at the end."""
        assert self._switch_at is None, "it has switched"
        self._revised = None

    def newly_reached(self) -> tuple[str, ...]:
        """Updated operators that rows of the new revision have reached since the last call."""
        reached, self._reached = self._reached, []
        return tuple(reached)

    def _decide(self, origin: Origin) -> None:
        """Choose the revision under which the heads take the next slice."""
        at = self._switch_at
        if at is not None and self._revised is not None and self._position[origin] >= at.get(origin, 0):
            self._head_revision = self._revised.revision
        else:
            self._head_revision = self._revision

    def _until_switch(self, origin: Origin, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Cut a batch at the switch, if its position is known beforehand and lies within the batch."""
        at = None if self._switch_at is None else self._switch_at.get(origin, 0) - self._position[origin]
        if at is not None and 0 < at < batch.num_rows:
            yield batch.slice(0, at)
            batch = batch.slice(at)
        yield batch

    # ── the work ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """Process all input. After every slice, yields the batches that are ready to leave, possibly none.

        Between slices a caller may do other work: interleave tasks, or receive messages.
        """
        controls = self._controls
        if controls is not None and controls.enters(ControlMode.IN_BAND):
            yield self._sweep(controls, ControlMode.IN_BAND)
        for unit in units(self._program, batches):
            if isinstance(unit, Carried):
                self._received[unit.header.wire] += unit.header.rows
                self._collector.pass_on(unit)
                continue
            if isinstance(unit, ControlArrival):
                assert controls is not None, "frames of control operations come only if the task's order has some"
                if controls.arrive(unit) is ControlMode.IN_BAND:
                    yield self._sweep(controls, ControlMode.IN_BAND)
                continue
            if unit.wire is not None:
                self._received[unit.wire] += unit.batch.num_rows
            elif unit.batch.num_rows:
                self._widest_row = max(self._widest_row, unit.batch.nbytes // unit.batch.num_rows)
            for part in self._until_switch(unit.origin, unit.batch):
                for piece in self._sizer.cut(part):
                    self._take(unit, piece)
                    yield self._collector.take()
        # In the graph's order, so that operators take the final output of those upstream before they finish themselves.
        self.is_finishing = True
        self._decide_at_end()
        for node in self._nodes.values():
            yield from self._finish(node)
        self._empty_combiners()
        if controls is not None:
            controls.require_all()
            yield self._sweep(controls, ControlMode.BLOCKING)
        yield self._collector.finish()

    def _sweep(self, controls: TaskControls, mode: ControlMode) -> list[pa.RecordBatch]:
        """Run handlers of control operations, and send their messages on behind all rows that were taken before."""
        if mode is ControlMode.IN_BAND:  # at the end, all of this is done
            for node in self._nodes.values():
                for _ in self._flush(node):
                    pass
            self._empty_combiners()
        if (payload := controls.sweep(mode)) is not None:
            self._collector.tell_all(payload, self._revision)
        return self._collector.take()

    def _empty_combiners(self) -> None:
        combiners, self._combiners = self._combiners, {}
        for (wire, revision), combiner in combiners.items():
            combiner.finish()
            self._collect(wire, combiner, revision)

    def _take(self, unit: Rows, piece: pa.RecordBatch) -> None:
        """Push one slice through the stage."""
        began = self._clock.stopwatch_ns()
        self._decide(unit.origin)
        for entry in self._entries(unit):
            if unit.kind is FrameKind.PARTIALS:
                self._push_partials(entry, piece)
            else:
                self._push(entry, piece, self._revision if unit.revision is None else unit.revision)
        self._position[unit.origin] += piece.num_rows
        self._sizer.observe(rows=piece.num_rows, elapsed_ns=self._clock.stopwatch_ns() - began)

    def _entries(self, unit: Rows) -> tuple[IntakeEntry, ...]:
        """Where rows enter the DAG of their revision."""
        revised = self._revised
        if revised is None or unit.wire is None or unit.revision != revised.revision:
            return unit.entries
        return entries_on(revised.program, unit.wire)

    def _decide_at_end(self) -> None:
        if self._revised is not None and self._switch_at is not None:
            self._head_revision = self._revised.revision

    def _finish(self, node: OperatorNode) -> Iterator[list[pa.RecordBatch]]:
        """Push an operator's end-of-epoch output. It does not result from a single row, so it uses the new revision
        unless the operator is a head that has not switched."""
        for _ in self._flush(node):
            yield self._collector.take()
        revision = self._revision
        if self._revised is not None:
            revision = self._head_revision if node.name in self._revised.heads else self._revised.revision
        version = node.versions.get(revision)
        finish = None if version is None else version.work.finish
        if finish is not None:
            self.at_work_under = revision
            for results in self._timed(node, finish()):
                self._hand_on(node, results, revision)
                yield self._collector.take()

    def _flush(self, node: OperatorNode) -> Iterator[None]:
        """Push the pending results of rows that the operator took under its latest revision; yields after each part."""
        version = node.versions.get(node.latest)
        flush = None if version is None else version.work.flush
        if flush is not None:
            for results in self._timed(node, flush()):
                self._hand_on(node, results, node.latest)
                yield

    def report(self) -> StageReport:
        """The report of the task; complete once :meth:`run` is exhausted."""
        return StageReport(
            operators=tuple(node.stats() for node in self._nodes.values()),
            received=dict(self._received),
            sent={wire: n for wire, n in self._collector.sent.items() if wire in self._program.onward},
            emitted=dict(self._collector.emitted),
            event_times=self._event_times,
            widest_row=self._widest_row,
            samples={
                name: encode_rows(node.sample).to_pybytes()
                for name, node in (self._nodes if self._is_first else {}).items()
                if node.sample is not None and (name in self._program.blobs or name in self._program.stage.inlets)
            },
            bin_rows=self._collector.bin_rows,
            controls=() if self._controls is None else self._controls.reports(),
        )

    def _push(self, entry: IntakeEntry, batch: pa.RecordBatch, revision: Revision) -> None:
        """Push rows through one operator and, depth first, through its readers. Ends because the graph is acyclic."""
        node = self._nodes[entry.operator]
        if self._revised is not None:
            revision = self._enter(node, revision)
        if self._recorder is not None:
            self._recorder.note(entry.operator, batch, revision)
        if self._samples and node.sample is None:
            node.sample = batch.slice(0, SAMPLE_ROWS)
        node.rows_in += batch.num_rows
        self.at_work_under = revision
        step = node.versions[revision].work.entries[entry.side]
        began = self._clock.stopwatch_ns()
        results = step(batch)
        if node.keys is not None:
            node.keys.note(batch, began)
        node.note_slice(self._clock.stopwatch_ns() - began)
        if entry.operator in self._sources:
            self._note_event_time(node, batch)
        self._hand_on(node, results, revision)

    def _enter(self, node: OperatorNode, revision: Revision) -> Revision:
        """The revision under which a node takes rows during a change."""
        assert self._revised is not None
        if node.name in self._revised.heads:
            revision = self._head_revision
        if revision != node.latest:
            for _ in self._flush(node):
                pass
            node.latest = revision
            if node.is_updated:
                self._reached.append(node.name)
        return revision

    def _timed(
        self, node: OperatorNode, results: Iterator[Mapping[str, pa.RecordBatch]]
    ) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """The same results; the time to compute each is charged to the operator."""
        while True:
            began = self._clock.stopwatch_ns()
            found = next(results, None)
            node.note_slice(self._clock.stopwatch_ns() - began)
            if found is None:
                return
            yield found

    def _push_partials(self, entry: IntakeEntry, batch: pa.RecordBatch) -> None:
        """Push partial aggregates from senders into an operator, which emits nothing before the end."""
        node = self._nodes[entry.operator]
        node.rows_in += pc.sum(batch.column("rows")).as_py()
        take = node.versions[node.latest].work.take_partials
        assert take is not None, f"{entry.operator!r} was sent partials"
        began = self._clock.stopwatch_ns()
        take(batch)
        node.note_slice(self._clock.stopwatch_ns() - began)

    def _send(self, wire: Wire, rows: pa.RecordBatch, revision: Revision) -> None:
        """Put rows on a wire, pre-aggregated if that is possible and worthwhile; or write them to files."""
        if wire.is_written:
            self._collector.emitted[wire.id] += rows.num_rows
            self._outlets.write(wire.id, rows)
            return
        if (wanted := self._wanted.get(wire.id)) is not None:
            self._wanted[wire.id] = max(0, wanted - rows.num_rows)
            self._collector.emitted[wire.id] += rows.num_rows - min(rows.num_rows, wanted)
            rows = rows.slice(0, wanted)
            if not rows.num_rows:
                return
        revised = self._revised
        program = self._program if revised is None or revision != revised.revision else revised.program
        consumer = program.combines.get(wire.id)
        if consumer is None:
            self._collector.add(wire, rows, revision)
            return
        if (wire, revision) not in self._combiners:
            assert wire.target is not None, "rows with a key have a stage to go to"
            space = self._assignments[wire.target].space
            self._combiners[wire, revision] = combiner_of(consumer, program.schemas[wire.id], space)
        combiner = self._combiners[wire, revision]
        combiner.add(rows)
        self._collect(wire, combiner, revision)

    def _collect(self, wire: Wire, combiner: Combiner, revision: Revision) -> None:
        for rows in combiner.rows():
            self._collector.add(wire, rows, revision)
        for partials in combiner.partials():
            self._collector.add_partials(wire, partials, revision)

    def _hand_on(self, node: OperatorNode, results: Mapping[str, pa.RecordBatch], revision: Revision) -> None:
        version = node.versions[revision]
        for branch, result in results.items():
            if not result.num_rows:
                continue
            if branch in node.late:
                node.rows_late += result.num_rows
            elif branch in node.aside:
                node.errors += result.num_rows
            else:
                node.rows_out += result.num_rows
                if version.event_time is not None:
                    self._note_ages(node, result, version.event_time)
            for consumer in version.consumers[branch]:
                self._push(consumer, result, revision)
            for wire in version.wires[branch]:
                self._send(wire, result, revision)

    def _note_event_time(self, node: OperatorNode, batch: pa.RecordBatch) -> None:
        source = self._sources[node.name]
        assert source.event_time is not None, "only sources with event times are timed"
        times = batch.column(source.event_time).view(pa.int64())
        latest = pc.max(times).as_py()
        limit = FAR if source.max_ahead_us is None else min(self._parts.times.clock + source.max_ahead_us, FAR)
        if latest is not None and latest > limit:
            believable = times.filter(pc.less_equal(times, limit))
            node.rows_ahead += len(times) - times.null_count - len(believable)
            latest = pc.max(believable).as_py()
        if latest is not None:
            self._event_times[node.name] = max(latest, self._event_times.get(node.name, latest))

    def _note_ages(self, node: OperatorNode, batch: pa.RecordBatch, column: str) -> None:
        """Record the ages of the oldest and the newest row for the whole slice: exact at the extremes, and cheap."""
        extremes = pc.min_max(batch.column(column).cast(pa.int64()))
        now, half = self._clock.wall_us(), batch.num_rows / 2
        for key, weight in (("min", int(half + 0.5)), ("max", int(half))):
            due = extremes[key].as_py()
            if due is not None and weight:
                node.ages_ms.append(((now - due) / 1000, weight))
