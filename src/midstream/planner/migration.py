"""Migrations: bins get other owners in small steps. How the moves are cut into steps is the *strategy*. Pure.

A strategy is a generator of steps. Every move is in exactly one of them, so a bin moves at most once, and when all
steps are made every bin has its new owner. ``send`` tells a generator what the step before has cost.

============ ================================================================================================
strategy     a step is
============ ================================================================================================
`sudden`     everything
`fluid`      one bin
`batched`    moves of which no two share a partition; as few steps as possible (:mod:`.disjoint_steps`)
`budgeted`   as much as fits a budget of time or bytes; what bytes cost is learnt from the steps before, and what
             is loaded ahead is free at first. Now and then nothing, to learn what epochs take without moves
============ ================================================================================================

:class:`Itinerary` makes assignments of steps. A stage has as many partitions as it has before or will have afterwards,
whichever is more, while its bins are on their way: new partitions start before they get their first bin, and old ones
go with their last bin.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from midstream.ids import BinId, PartitionId, StageIndex
from midstream.planner.assignment import Assignment, Assignments
from midstream.planner.disjoint_steps import disjoint_steps
from midstream.planner.division import after_division
from midstream.planner.step_budget import StepBudget
from midstream.planner.step_cost import Budget, StepCost

__all__ = [
    "BIN_BYTES",
    "BinMove",
    "Itinerary",
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
"""The cost of a bin in addition to its bytes, as bytes: its files are opened, its positions are written."""
GROWTH = 2.0
"""Largest ratio of a step to the one before: what small steps tell need not hold for large ones."""


def budgeted(moves: Sequence[BinMove], size_of: SizeOf, budget: Budget) -> Steps:
    """As much a step as fits the budget, and one bin at least.

    The first step is one bin, from which the price of a byte is learnt; each step may be twice as large as the one
    before. Some are empty: their epochs tell what epochs take without moves. What is learnt, and how:
    :mod:`.step_budget`. Large bins come first, so that small ones are left for the end.
    """
    waiting = sorted(moves, key=lambda move: (-size_of(move), move))
    load = 0.0
    learnt = StepBudget(budget)
    while waiting:
        grown, largest = GROWTH * load, learnt.largest_load()
        allowed = min(grown, largest)
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
        if cost is not None:
            learnt.learn(load, cost, was_limited=largest < grown)
        while waiting and learnt.wants_pause:
            cost = yield ()
            if cost is None:
                break
            learnt.learn(0.0, cost)


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
            if is_there:  # bins are divided or united when all of them are where they are to be
                found[stage] = after_division(now[stage], wanted)
                continue
            partitions = max(now[stage].partitions, wanted.partitions)
            found[stage] = replace(now[stage], partitions=partitions, owners=reached)
        return found
