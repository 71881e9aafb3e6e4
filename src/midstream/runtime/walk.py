"""The walk of an epoch: segment by segment through its plan, and out to its sinks. Both runtimes follow it.

The walk decides the order of steps, and what reads what. An :class:`EpochEngine` executes the steps: on Spark most
of them only describe what to compute, and jobs start when a sink reads; the local runtime executes each at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import pyarrow as pa

from midstream.flow.model import Operator, Sink, Transform
from midstream.flow.spec import Delivery
from midstream.ids import WireId
from midstream.planner.stages import Leaves, Plan, Stage, Wire

__all__ = ["EpochEngine", "walk"]

R = TypeVar("R")
L = TypeVar("L")


class EpochEngine(Protocol[R, L]):
    """Runs the parts of a plan, for one run of an epoch.

    ``R`` is the input of a stage or an outlet, rows or frames; ``L`` is the output of a stage.
    """

    def run(self, stage: Stage, rows: R) -> L:
        """Run the first stage of a segment on all its input."""

    def run_next(self, stage: Stage, before: L) -> L:
        """Run another stage on the output of the one before it, through an exchange."""

    def keep(self, left: L) -> L:
        """Compute it once, in full, however often and however much of it is read."""

    def frames(self, left: L, wires: Sequence[WireId]) -> R:
        """The frames of some wires."""

    def decoded(self, left: L, wire: WireId) -> R:
        """The rows in the frames of a wire."""

    def columns(self, left: L) -> R:
        """The rows of a stage that leaves plain columns."""

    def unite(self, inlets: Sequence[R], frames: R | None) -> R:
        """All input of a segment, in the shape of :mod:`midstream.engine.intake`."""

    def transform(self, operator: Operator, rows: R, *, is_kept: bool) -> R:
        """Apply a transform to rows; keep the result if it is read more than once."""

    def collect(self, left: L, wires: Sequence[WireId]) -> Mapping[WireId, pa.Table]:
        """Compute all of it in one job, and return the rows of some wires."""

    def drain(self, rows: R) -> None:
        """Compute all rows, whether or not anything reads them."""

    def is_computed(self, stage: Stage) -> bool:
        """Whether every task of a stage has finished; False if that is not known."""

    def reads_in_turn(self, sink: Operator, stage: Stage) -> bool:
        """Whether a sink reads one partition of a stage's output after the other. Its input should be computed
        beforehand; otherwise partitions are computed one after the other, too."""

    def give(self, sink: Operator, rows: pa.Table) -> None:
        """Pass rows to a sink on the driver."""

    def table(self, rows: R, schema: pa.Schema) -> pa.Table:
        """All rows, on the driver."""

    def write_files(self, sink: Operator, rows: R) -> None:
        """Write rows that no stage emits to the files of a sink."""

    def write(self, sinks: Sequence[tuple[Operator, R]]) -> None:
        """Pass rows to sinks that read them in their own way, all at the same time."""

    def release(self) -> None:
        """Free what was kept."""


def walk(plan: Plan, engine: EpochEngine[R, L], rows: R, planned: Callable[[], None] = lambda: None) -> None:
    """Compute an epoch and write its sinks. ``rows`` is the input of the first stage.

    ``planned`` is called when everything is described, before the first job that the walk itself starts.

    1. In each segment, the stages run one behind the other. Tasks write the rows of file sinks themselves.
    2. The segment's output is kept if a transform or a sink reads it as a DataFrame.
    3. The transforms that read the segment's output are called, before the next segment, which reads their results.
    4. After the last segment, every segment whose output has no such reader is computed: one job each, which returns
       the rows of sinks on the driver.
    5. Sinks that read the result of a transform are written.
    6. Sinks that read a DataFrame get it, from what is kept. If a segment has a single reader, that is its only job,
       unless it reads one partition after the other; rows that it did not read are computed now, because what a flow
       computes must not depend on what a sink reads.
    7. What was kept is released, also after a failure.
    """
    progress = _Progress(plan, engine)
    try:
        for segment in range(plan.segments):
            # 1.
            first, *others = plan.segment(segment)
            left = engine.run(first, progress.entering(first) if segment else rows)
            for stage in others:
                left = engine.run_next(stage, left)
            # 2.
            progress.left.append(engine.keep(left) if progress.readers(segment) else left)
            # 3.
            progress.transform()
        planned()
        # 4.
        computed = [progress.compute(segment) for segment in range(plan.segments)]
        # 5.
        sinks = plan.graph.of(Sink)
        for sink in sinks:
            if isinstance(feed := plan.feeds[sink.name], str):
                progress.write_transformed(sink, feed)
        # 6.
        progress.write_frames([sink for sink in sinks if progress.reads_frame(sink)], computed)
    finally:
        # 7.
        engine.release()


class _Progress(Generic[R, L]):
    """The progress of a walk: the outputs of segments and transforms so far."""

    def __init__(self, plan: Plan, engine: EpochEngine[R, L]) -> None:
        self._plan = plan
        self._engine = engine
        self.left: list[L] = []
        self._transformed: dict[str, R] = {}

    def leaves_columns(self, segment: int) -> bool:
        """Whether a segment ends with plain columns, for its one sink."""
        return self._plan.segment(segment)[-1].leaves is Leaves.TYPED

    def leaving(self, segment: int) -> list[Wire]:
        """The wires on which rows leave a segment for its outlets."""
        last = self._plan.segment(segment)[-1]
        ids = {*last.emits, *last.carries}
        return [wire for wire in self._plan.wires if wire.id in ids and wire.target is None and not wire.is_written]

    def reads_frame(self, sink: Operator) -> bool:
        """Whether a sink reads a segment's output as a DataFrame."""
        return sink.delivery is Delivery.FRAME and not isinstance(self._plan.feeds[sink.name], str)

    def readers(self, segment: int) -> list[str]:
        """The readers of a segment's output as a DataFrame: transforms, sinks, and later segments as one."""
        graph = self._plan.graph
        names = [name for wire in self.leaving(segment) for name in wire.consumers]
        found = [name for name in names if graph[name].delivery is None or self.reads_frame(graph[name])]
        later = segment + 1 < self._plan.segments and self._plan.segment(segment + 1)[0].takes_frames
        return [*found, *(["a later segment"] if later else [])]

    def compute(self, segment: int) -> bool:
        """Compute a segment's output, unless its readers do; return whether it is now computed in full."""
        graph, last = self._plan.graph, self._plan.segment(segment)[-1]
        wanted: dict[WireId, list[Operator]] = {}
        for wire in self.leaving(segment):
            for name in wire.consumers:
                if graph[name].delivery is Delivery.ROWS:
                    wanted.setdefault(wire.id, []).append(graph[name])
        writes = any(wire.is_written and wire.segment == segment for wire in self._plan.wires)
        readers = self.readers(segment)
        if readers and not wanted and not (writes and last.leaves is not Leaves.TYPED):
            return False
        found = self._engine.collect(self.left[segment], list(wanted))
        for number, sinks in wanted.items():
            for sink in sinks:
                self._engine.give(sink, found[number])
        return True

    def write_transformed(self, sink: Operator, feed: str) -> None:
        """Write a sink that reads the result of a transform."""
        rows = self._transformed[feed]
        match sink.delivery:
            case Delivery.TASKS:
                self._engine.write_files(sink, rows)
            case Delivery.ROWS:
                self._engine.give(sink, self._engine.table(rows, sink.schema))
            case Delivery.NONE:
                self._engine.drain(rows)
            case Delivery.FRAME:
                self._engine.drain(rows)
                self._engine.write([(sink, rows)])

    def write_frames(self, sinks: Sequence[Operator], computed: list[bool]) -> None:
        """Pass sinks their DataFrames, then compute the rows that they did not read."""
        by_segment: dict[int, list[Operator]] = {}
        for sink in sinks:
            feed = self._plan.feeds[sink.name]
            assert not isinstance(feed, str)
            by_segment.setdefault(self._plan.wire(feed).segment, []).append(sink)
        for segment, readers in by_segment.items():
            left, last = self.left[segment], self._plan.segment(segment)[-1]
            in_turn = any(self._engine.reads_in_turn(sink, last) for sink in readers)
            if not computed[segment] and (in_turn or len(self.readers(segment)) > 1):
                self._engine.collect(left, [])
                computed[segment] = True
            self._engine.write([(sink, self.rows_of(self._plan.feeds[sink.name])) for sink in readers])
            if not computed[segment] and not self._engine.is_computed(last):
                self._engine.collect(left, [])

    def entering(self, first: Stage) -> R:
        """The input of the first stage of the next segment: outputs of transforms, and frames that bypassed them."""
        inlets = [self._transformed[name] for name in first.inlets]
        frames = self._engine.frames(self.left[-1], (*first.receives, *first.carries)) if first.takes_frames else None
        return self._engine.unite(inlets, frames)

    def transform(self) -> None:
        """Call the transforms whose input is available now, in the graph's order: one may read another's output."""
        graph, feeds = self._plan.graph, self._plan.feeds
        for op in graph.of(Transform):
            if op.name not in self._transformed and self._is_there(feeds[op.name]):
                is_kept = len(graph.consumers(op.ports[0])) > 1
                self._transformed[op.name] = self._engine.transform(op, self.rows_of(feeds[op.name]), is_kept=is_kept)

    def _is_there(self, feed: WireId | str) -> bool:
        if isinstance(feed, str):
            return feed in self._transformed
        return self._plan.wire(feed).segment < len(self.left)

    def rows_of(self, feed: WireId | str) -> R:
        """The rows that an outlet reads: a transform's output, or those of a wire at the end of its segment."""
        if isinstance(feed, str):
            return self._transformed[feed]
        segment = self._plan.wire(feed).segment
        if self.leaves_columns(segment):
            return self._engine.columns(self.left[segment])
        return self._engine.decoded(self.left[segment], feed)
