"""Migrations: bins get other owners in small steps. How the moves are cut into steps is the *strategy*. Pure.

A strategy is a generator of steps. Every move is in exactly one of them, so a bin moves at most once, and when all
steps are made every bin has its new owner. ``send`` tells a generator what the step before has cost.

============ ================================================================================================
strategy     a step is
============ ================================================================================================
`sudden`     everything
`fluid`      one bin
`batched`    moves of which no two share a partition; as few steps as possible (:mod:`.disjoint_steps`)
`budgeted`   as much as fits a budget of time or bytes; what bytes cost is learnt from the steps before
============ ================================================================================================

:class:`Itinerary` makes assignments of steps. A stage has as many partitions as it has before or will have afterwards,
whichever is more, while its bins are on their way: partitions that come are there before their first bin, and those
that go leave with their last one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from midstream.ids import BinId, PartitionId, StageIndex
from midstream.planner.assignment import Assignment, Assignments
from midstream.planner.disjoint_steps import disjoint_steps

__all__ = [
    "BIN_BYTES",
    "BinMove",
    "Budget",
    "Itinerary",
    "StepCost",
    "StepStrategy",
    "Steps",
    "batched",
    "budgeted",
    "fluid",
    "moves_between",
    "steps_of",
    "sudden",
]


class StepStrategy(enum.StrEnum):
    """How the moves of a migration are cut into steps; see the module's table."""

    SUDDEN = "sudden"
    FLUID = "fluid"
    BATCHED = "batched"
    BUDGETED = "budgeted"


@dataclass(frozen=True, order=True)
class BinMove:
    """A bin of a stage goes from one partition to another."""

    stage: StageIndex
    bin: BinId
    giver: PartitionId
    taker: PartitionId


@dataclass(frozen=True)
class StepCost:
    """What a finished step has cost: what it moved, and how long its epoch took where others take ``steady_ms``."""

    bins: int
    bytes: int
    epoch_ms: float
    steady_ms: float

    @property
    def extra_ms(self) -> float:
        """What the step has added to its epoch."""
        return max(0.0, self.epoch_ms - self.steady_ms)


@dataclass(frozen=True)
class Budget:
    """What a step may add to its epoch: milliseconds, or bytes of state that are moved; or both."""

    ms: float | None = None
    bytes: int | None = None


Steps = Generator[tuple[BinMove, ...], StepCost | None, None]
"""The steps of a migration; ``send`` takes the cost of the step before."""

SizeOf = Callable[[BinMove], int]
"""Bytes of state that move with a bin."""


def moves_between(before: Assignments, after: Assignments) -> tuple[BinMove, ...]:
    """The bins whose owners differ, by stage and bin.

    >>> moves_between({StageIndex(1): Assignment(2, (0, 1))}, {StageIndex(1): Assignment(2, (1, 1))})
    (BinMove(stage=1, bin=0, giver=0, taker=1),)
    """
    return tuple(
        BinMove(stage, BinId(number), PartitionId(before[stage].owners[number]), PartitionId(wanted.owners[number]))
        for stage, wanted in sorted(after.items())
        for number in np.flatnonzero(before[stage].owner_array != wanted.owner_array).tolist()
    )


def sudden(moves: Sequence[BinMove]) -> Steps:
    """Everything at once."""
    if moves:
        yield tuple(moves)


def fluid(moves: Sequence[BinMove]) -> Steps:
    """One bin a step."""
    for move in moves:
        yield (move,)


def batched(moves: Sequence[BinMove], *, lax: bool = False) -> Steps:
    """Moves of which no two share a partition; the stages move side by side, because they share no task.

    With ``lax``, a partition may give one bin and take another one in the same step.

    >>> before, after = Assignment(4, (0, 0, 1, 1)), Assignment(4, (0, 2, 1, 3))
    >>> moves = moves_between({StageIndex(1): before}, {StageIndex(1): after})
    >>> [len(step) for step in batched(moves)]
    [2]
    """
    by_stage = []
    for stage in sorted({move.stage for move in moves}):
        own = [move for move in moves if move.stage == stage]
        steps = disjoint_steps([(move.giver, move.taker) for move in own], lax=lax)
        by_stage.append([[own[position] for position in step] for step in steps])
    for number in range(max(map(len, by_stage), default=0)):
        yield tuple(move for steps in by_stage if number < len(steps) for move in steps[number])


def steps_of(strategy: StepStrategy, moves: Sequence[BinMove], size_of: SizeOf, budget: Budget) -> Steps:
    """The steps of a strategy; only those of ``budgeted`` depend on sizes and budget."""
    match strategy:
        case StepStrategy.SUDDEN:
            return sudden(moves)
        case StepStrategy.FLUID:
            return fluid(moves)
        case StepStrategy.BATCHED:
            return batched(moves)
        case StepStrategy.BUDGETED:
            return budgeted(moves, size_of, budget)


BIN_BYTES = 64 * 1024
"""What a bin costs in addition to its bytes, as bytes: its files are opened, its positions are written."""
GROWTH = 2.0
"""Largest ratio of a step to the one before: what is learnt from small steps need not hold for large ones."""
MEMORY = 0.3
"""Weight of the newest step among those from which the price of a byte is learnt."""
CAUTION = 2.5
"""This multiple of how far epochs usually are from what was expected is left of a budget, so that few exceed it."""
LEAST_SHARE = 0.25
"""The least share of a budget that is used, however much epochs vary."""
CATCHING_UP = 1.5
"""An epoch that exceeds its expected time by this factor is catching up with rows, and gets less to move."""


def budgeted(moves: Sequence[BinMove], size_of: SizeOf, budget: Budget) -> Steps:
    """As much a step as fits the budget, and one bin at least.

    The first step is one bin, from which the price of a byte is learnt; each step may be twice as large as the one
    before. While epochs take longer than the budget explains, rows have piled up, and steps are smaller in proportion.
    Large bins come first: what is left for the end is small.
    """
    waiting = sorted(moves, key=lambda move: (-size_of(move), move))
    load = 0.0
    price = _Price()
    cost: StepCost | None = None
    while waiting:
        allowed = _allowed(budget, load, price, cost)
        step = [waiting.pop(0) if not load else waiting.pop()]  # learn from the largest; then at least the smallest
        moved = size_of(step[0])
        kept: list[BinMove] = []
        for move in waiting:
            more, count = size_of(move), len(step) + 1
            fits = moved + more + count * BIN_BYTES <= allowed and (
                budget.bytes is None or moved + more <= budget.bytes
            )
            (step if fits else kept).append(move)
            moved += more * fits
        waiting = kept
        load = moved + len(step) * BIN_BYTES
        cost = yield tuple(step)
        if cost is not None and cost.steady_ms > 0:
            price.learn(load, cost.extra_ms)


@dataclass
class _Price:
    """What a byte adds to its epoch, and how far epochs are from that, as far as steps have told."""

    _cost: float = 0.0
    _load: float = 0.0
    _deviation_ms: float = 0.0

    def load_for(self, ms: float) -> float:
        """The load that adds at most so much to nearly every epoch; infinite if none has cost anything."""
        price = self._cost / self._load if self._load else 0.0
        usable = max(LEAST_SHARE * ms, ms - CAUTION * self._deviation_ms)
        return usable / price if price else math.inf

    def learn(self, load: float, extra_ms: float) -> None:
        """Take the newest step. Least squares: what large steps tell is less of an accident."""
        if self._load:
            surprise = abs(extra_ms - self._cost / self._load * load)
            self._deviation_ms += MEMORY * (surprise - self._deviation_ms)
        self._cost = MEMORY * extra_ms * load + (1 - MEMORY) * self._cost
        self._load = MEMORY * load * load + (1 - MEMORY) * self._load


def _allowed(budget: Budget, load: float, price: _Price, cost: StepCost | None) -> float:
    """The largest load of the next step."""
    if not load:
        return 0.0
    allowed = GROWTH * load
    if budget.ms is None or cost is None or cost.steady_ms <= 0:
        return allowed
    allowed = min(allowed, price.load_for(budget.ms))
    wanted = cost.steady_ms + budget.ms
    if cost.epoch_ms > CATCHING_UP * wanted:
        allowed *= wanted / cost.epoch_ms
    return allowed


@dataclass
class Itinerary:
    """The assignments of a migration, step by step; see the module's docstring.

    >>> before, after = {StageIndex(1): Assignment(1, (0, 0))}, {StageIndex(1): Assignment(2, (0, 1))}
    >>> itinerary = Itinerary(after)
    >>> itinerary.after_step(before, moves_between(before, after)) == after
    True
    """

    target: Assignments

    def left(self, now: Assignments) -> tuple[BinMove, ...]:
        """The moves that are still to be made."""
        return moves_between(now, self.target)

    def count_left(self, now: Assignments) -> int:
        """How many moves are still to be made."""
        pairs = ((now[stage].owner_array, wanted.owner_array) for stage, wanted in self.target.items())
        return sum(int(np.count_nonzero(one != other)) for one, other in pairs)

    def is_over(self, now: Assignments) -> bool:
        """Whether the target is reached."""
        return all(now[stage] == wanted for stage, wanted in self.target.items())

    def after_step(self, now: Assignments, step: Collection[BinMove]) -> dict[StageIndex, Assignment]:
        """All assignments of the job after a step."""
        owners = {stage: list(now[stage].owners) for stage in self.target}
        for move in step:
            owners[move.stage][move.bin] = move.taker
        found = dict(now)
        for stage, wanted in self.target.items():
            reached = tuple(owners[stage])
            is_there = reached == wanted.owners
            partitions = wanted.partitions if is_there else max(now[stage].partitions, wanted.partitions)
            found[stage] = Assignment(partitions, reached)
        return found
