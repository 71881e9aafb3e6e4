"""Explains a migration to the user before it is made: steps, bytes, predicted time, and which bins move where."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.change.migration_goal import moment_of
from midstream.change.migration_request import MigrationRequest
from midstream.drawing.figures import size_text
from midstream.drawing.migration_picture import StageMoves, migration_to_svg, migration_to_text
from midstream.ids import BinId, PartitionId, StageIndex
from midstream.planner.assignment import Assignment, Assignments
from midstream.planner.division import in_words
from midstream.planner.migration import (
    BIN_BYTES,
    BinMove,
    SizeOf,
    moves_between,
    steps_of,
)
from midstream.planner.reassignment import unique_names
from midstream.planner.stages import Plan
from midstream.planner.step_cost import StepCost

__all__ = ["MigrationExplanation", "explained"]

BYTES_PER_S = 100e6
"""Bytes of state that a taker is assumed to load in a second until that is measured."""


@dataclass(frozen=True)
class MigrationExplanation:
    """The effect that a migration would have. ``epoch_ms`` is the steady time of an epoch, if known."""

    request: MigrationRequest
    stages: tuple[StageMoves, ...]
    steps: tuple[tuple[int, int], ...]
    """Bins and bytes of each step, as far as they can be foreseen."""
    epoch_ms: float | None
    bytes_per_s: float = BYTES_PER_S

    @property
    def bins(self) -> int:
        """Number of bins that move."""
        return sum(bins for bins, _ in self.steps)

    @property
    def bytes(self) -> int:
        """Bytes of their state."""
        return sum(size for _, size in self.steps)

    @property
    def longest_ms(self) -> float:
        """Milliseconds that the largest step is expected to add to its epoch if its takers have loaded nothing
        ahead."""
        return max((1000 * _load(*step) / self.bytes_per_s for step in self.steps), default=0.0)

    @property
    def seconds(self) -> float | None:
        """How long it is expected to take: an epoch a step, and the time to load state; None if no epoch was run."""
        if self.epoch_ms is None:
            return None
        return len(self.steps) * self.epoch_ms / 1000 + sum(_load(*step) for step in self.steps) / self.bytes_per_s

    def to_svg(self) -> str:
        """A picture of how many bins move from which partition to which."""
        return migration_to_svg(self.stages)

    def _repr_svg_(self) -> str:
        """How a notebook shows it."""
        return self.to_svg()

    def __str__(self) -> str:
        request = self.request
        steps = "1 step" if len(self.steps) == 1 else f"{len(self.steps)} steps"
        lines = [migration_to_text(self.stages), "", f"{request.strategy} migration in {steps}:"]
        if request.spreads:
            lines.append("  one more spreads partitions over executors anew")
        lines += [f"  {line}" for stage in self.stages for line in in_words(stage.before, stage.after)]
        lines.append(f"  moves {self.bins} bins with about {size_text(self.bytes)} of state")
        largest = max(self.steps, default=(0, 0))
        lines.append(
            f"  the largest step moves {largest[0]} bins; it adds about {self.longest_ms:,.0f} ms to its epoch"
            + (", less if its takers load the state ahead, as planned" if request.prewarm else "")
        )
        if self.seconds is not None:
            lines.append(f"  takes about {self.seconds:,.1f} s, at {self.epoch_ms:,.0f} ms an epoch")
        if request.is_scheduled:
            lines.append(f"  begins with {moment_of(request)}")
        return "\n".join(lines)


def explained(
    plan: Plan,
    request: MigrationRequest,
    before: Assignments,
    after: Assignments,
    size_of: SizeOf,
    epoch_ms: float | None,
) -> MigrationExplanation:
    """Explain a migration. The steps of a budget are those of a machine that loads :data:`BYTES_PER_S`, or has loaded
    all ahead if that is asked for."""
    names = {stage: name for name, stage in unique_names(plan).items()}
    stages = tuple(
        StageMoves(names[stage], before[stage], wanted, _sizes(stage, wanted, size_of))
        for stage, wanted in sorted(after.items())
        if before[stage] != wanted
    )
    moves = moves_between(before, after)
    steps = _foreseen(moves, request, size_of, epoch_ms)
    return MigrationExplanation(request, stages, steps, epoch_ms)


def _foreseen(
    moves: tuple[BinMove, ...], request: MigrationRequest, size_of: SizeOf, epoch_ms: float | None
) -> tuple[tuple[int, int], ...]:
    steps, found = steps_of(request.strategy, moves, size_of, request.budget), list[tuple[int, int]]()
    cost: StepCost | None = None
    try:
        while True:
            step = steps.send(cost)
            size = sum(map(size_of, step))
            if step:  # not one that is there to measure
                found.append((len(step), size))
            if epoch_ms is not None:
                load_ms = 0.0 if request.prewarm else 1000 * _load(len(step), size) / BYTES_PER_S
                cost = StepCost(len(step), size, epoch_ms + load_ms, epoch_ms, epoch_ms, request.prewarm)
    except StopIteration:
        return tuple(found) or ((0, 0),)


def _sizes(stage: StageIndex, assignment: Assignment, size_of: SizeOf) -> list[float] | None:
    sizes = [
        float(size_of(BinMove(stage, BinId(number), PartitionId(0), PartitionId(0))))
        for number in range(assignment.bins)
    ]
    return sizes if any(sizes) else None


def _load(bins: int, size: int) -> float:
    return size + bins * BIN_BYTES
