"""The walk of an epoch: segment by segment through its plan, and out to its sinks. Both runtimes follow it.

The walk decides the order of steps, and what reads what. An :class:`EpochEngine` carries the steps out: on Spark most
of them only describe what is to be computed, and jobs start when a sink reads; the local runtime does each at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from midstream.flow.model import Operator, Sink, Transform
from midstream.ids import WireId
from midstream.planner.stages import Leaves, Plan, Stage

__all__ = ["EpochEngine", "walk"]

R = TypeVar("R")
L = TypeVar("L")


class EpochEngine(Protocol[R, L]):
    """Runs the parts of a plan, for one run of an epoch.

    ``R`` is what a stage or an outlet reads, rows or frames; ``L`` is what a stage has left.
    """

    def run(self, stage: Stage, rows: R) -> L:
        """Run the first stage of a segment on all that enters it."""

    def run_next(self, stage: Stage, before: L) -> L:
        """Run another stage, on what the one before it has left, through an exchange."""

    def keep(self, left: L) -> L:
        """Have it computed once, in full, however often and however far it is read."""

    def frames(self, left: L, wires: Sequence[WireId]) -> R:
        """The frames of some wires."""

    def decoded(self, left: L, wire: WireId) -> R:
        """The rows in the frames of a wire."""

    def columns(self, left: L) -> R:
        """The rows of a stage that leaves plain columns."""

    def unite(self, inlets: Sequence[R], frames: R | None) -> R:
        """All that enters a segment, in the shape of :mod:`midstream.engine.intake`."""

    def transform(self, operator: Operator, rows: R, *, is_kept: bool) -> R:
        """What a transform makes of rows; kept if it is read more than once."""

    def drain(self, rows: R) -> None:
        """Have all of it computed, whoever reads it afterwards."""

    def write(self, sink: Operator, rows: R) -> None:
        """Write a sink."""

    def release(self) -> None:
        """Let go of what was kept."""


def walk(plan: Plan, engine: EpochEngine[R, L], rows: R) -> None:
    """Compute an epoch and write its sinks. ``rows`` is all that enters the first stage.

    1. In each segment, the stages run one behind the other.
    2. If its last stage leaves frames, they are kept: several readers pick from them, and a transform may stop early.
    3. The transforms whose rows leave the segment are called, before the next segment, which reads them.
    4. When all segments are through, sinks are written, those first that read every row. If none does, the rows are
       computed in full before a sink gets to see them: a sink's curiosity must not decide what the flow computes.
    5. What was kept is let go of, also when something fails.
    """
    way = _Way(plan, engine)
    try:
        for segment in range(plan.segments):
            # 1.
            first, *others = plan.segment(segment)
            left = engine.run(first, way.entering(first) if segment else rows)
            for stage in others:
                left = engine.run_next(stage, left)
            # 2.
            way.left.append(left if way.leaves_columns(segment) else engine.keep(left))
            # 3.
            way.transform()
        # 4.
        drains = {op.name: plan.graph.payloads[op.name].drains for op in plan.graph.of(Sink)}
        for sink in sorted(plan.graph.of(Sink), key=lambda op: not drains[op.name]):
            found = way.rows_of(plan.feeds[sink.name])
            if not drains[sink.name]:
                engine.drain(found)
            engine.write(sink, found)
    finally:
        # 5.
        engine.release()


class _Way(Generic[R, L]):
    """How far a walk has come: what segments have left, and what transforms have given."""

    def __init__(self, plan: Plan, engine: EpochEngine[R, L]) -> None:
        self._plan = plan
        self._engine = engine
        self.left: list[L] = []
        self._transformed: dict[str, R] = {}

    def leaves_columns(self, segment: int) -> bool:
        """Whether a segment ends with plain columns, for its one sink."""
        return self._plan.segment(segment)[-1].leaves is Leaves.TYPED

    def entering(self, first: Stage) -> R:
        """All that enters the first stage of the next segment: what transforms gave, and frames that passed them by."""
        inlets = [self._transformed[name] for name in first.inlets]
        frames = self._engine.frames(self.left[-1], (*first.receives, *first.carries)) if first.takes_frames else None
        return self._engine.unite(inlets, frames)

    def transform(self) -> None:
        """Call the transforms whose rows are there now, in the graph's order: one may read what another gave."""
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
        """The rows that an outlet reads: what a transform gave, or those of a wire at the end of its segment."""
        if isinstance(feed, str):
            return self._transformed[feed]
        segment = self._plan.wire(feed).segment
        if self.leaves_columns(segment):
            return self._engine.columns(self.left[segment])
        return self._engine.decoded(self.left[segment], feed)
