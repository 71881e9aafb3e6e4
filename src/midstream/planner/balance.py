"""Targets for migrations: assignments that balance the weights of bins. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from midstream.errors import FlowError
from midstream.planner.assignment import Assignment

__all__ = ["ACCEPTED", "balanced", "drained", "imbalance"]

ACCEPTED = 1.1
"""Largest ratio of the heaviest partition to the mean that counts as balanced."""
CLOSE_ENOUGH = 1.02
"""At or below this ratio, another move is not worth it."""
LEAST = 0.1
"""Least weight of a bin, as a share of the mean, when bins are dealt out: a bin that is empty now may get keys."""


def imbalance(assignment: Assignment, weights: Sequence[float]) -> float:
    """The weight of the heaviest partition over the mean of all; 1 if there is nothing to weigh.

    >>> imbalance(Assignment(2, (0, 0, 1, 1)), [3.0, 3.0, 1.0, 1.0])
    1.5
    """
    loads = _loads(assignment, weights)
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def balanced(assignment: Assignment, weights: Sequence[float]) -> Assignment:
    """An assignment whose partitions have about the same weight, with few moves.

    Bins go from the heaviest partition to the lightest, always the bin that evens out the two best; if none does, two
    bins are exchanged. If that ends above :data:`ACCEPTED`, all bins are dealt out anew, the heaviest first, to the
    lightest partition; owners stay where that does no harm. No bin is divided, so one that is heavier than the mean
    decides what is possible.

    >>> balanced(Assignment(2, (0, 0, 0, 1)), [1.0, 1.0, 1.0, 1.0]).owners
    (1, 0, 0, 1)
    """
    _check(assignment, weights)
    evened = _evened(assignment, weights)
    if imbalance(evened, weights) <= ACCEPTED:
        return evened
    dealt = _dealt(assignment, weights)
    return min((evened, dealt), key=lambda each: imbalance(each, weights))


def drained(assignment: Assignment, partitions: Collection[int], weights: Sequence[float] | None = None) -> Assignment:
    """An assignment in which these partitions own nothing: each of their bins goes to the lightest of the others, the
    heaviest bins first. The number of partitions stays.

    >>> drained(Assignment(3, (0, 1, 2, 1)), [1]).owners
    (0, 0, 2, 2)
    """
    weights = [1.0] * assignment.bins if weights is None else weights
    _check(assignment, weights)
    least = LEAST * sum(weights) / assignment.bins or 1.0
    weights = [max(least, weight) for weight in weights]
    loads = _loads(assignment, weights)
    others = [each for each in range(assignment.partitions) if each not in set(partitions)]
    if not others:
        raise FlowError(
            f"all {assignment.partitions} partitions would be drained, and nobody would own their bins; leave one out"
        )
    owners = list(assignment.owners)
    leaving = [number for number, owner in enumerate(owners) if owner in set(partitions)]
    for number in sorted(leaving, key=lambda each: -weights[each]):
        taker = min(others, key=lambda each: (loads[each], each))
        owners[number] = taker
        loads[taker] += weights[number]
    return replace(assignment, owners=tuple(owners))


def _check(assignment: Assignment, weights: Sequence[float]) -> None:
    if len(weights) != assignment.bins:
        raise FlowError(f"{len(weights)} weights for {assignment.bins} bins: give one for each bin")
    if any(not 0 <= weight < float("inf") for weight in weights):
        raise FlowError("a weight of a bin must be a number from 0 on, and finite")


def _loads(assignment: Assignment, weights: Sequence[float]) -> list[float]:
    loads = [0.0] * assignment.partitions
    for number, owner in enumerate(assignment.owners):
        loads[owner] += weights[number]
    return loads


def _evened(assignment: Assignment, weights: Sequence[float]) -> Assignment:
    """Moves and exchanges between the heaviest and the lightest partition. Each makes the heavier of the two lighter,
    and there are at most as many as bins, so this ends."""
    owners, loads = list(assignment.owners), _loads(assignment, weights)
    mean = sum(loads) / len(loads)
    held: list[set[int]] = [set() for _ in loads]
    for number, owner in enumerate(owners):
        if weights[number]:
            held[owner].add(number)
    for _ in owners:
        heavy = max(range(len(loads)), key=lambda each: (loads[each], -each))
        light = min(range(len(loads)), key=lambda each: (loads[each], each))
        if loads[heavy] <= CLOSE_ENOUGH * mean:
            break
        gap = loads[heavy] - loads[light]
        swap = _best(held[heavy], held[light], weights, gap)
        if swap is None:
            break
        given, back = swap
        for moving, source, sink in ((given, heavy, light), (back, light, heavy)):
            if moving is not None:
                owners[moving] = sink
                held[source].discard(moving)
                held[sink].add(moving)
                loads[source] -= weights[moving]
                loads[sink] += weights[moving]
    return replace(assignment, owners=tuple(owners))


def _best(
    heavy: Collection[int], light: Collection[int], weights: Sequence[float], gap: float
) -> tuple[int, int | None] | None:
    """The bin that evens out two partitions best, or two bins to exchange, or None if neither helps."""
    movable = [number for number in heavy if weights[number] < gap]
    if movable:
        number = min(movable, key=lambda each: (abs(gap / 2 - weights[each]), each))
        if gap / 4 <= weights[number] <= gap * 3 / 4:
            return number, None
    pairs = (
        [
            (abs(gap / 2 - (weights[one] - weights[other])), one, other)
            for one in heavy
            for other in light
            if 0 < weights[one] - weights[other] < gap
        ]
        if len(heavy) * len(light) <= 4096
        else []
    )
    single = min(((abs(gap / 2 - weights[each]), each, None) for each in movable), default=None)
    pair = min(pairs, default=None)
    best = min((each for each in (single, pair) if each is not None), key=lambda each: each[0], default=None)
    return None if best is None else (best[1], best[2])


def _dealt(assignment: Assignment, weights: Sequence[float]) -> Assignment:
    owners, loads = list(assignment.owners), [0.0] * assignment.partitions
    mean = sum(weights) / assignment.partitions
    for number in sorted(range(assignment.bins), key=lambda each: (-weights[each], each)):
        owner, weight = owners[number], weights[number]
        if not weight:
            continue
        lightest = min(range(len(loads)), key=lambda each: (loads[each], each))
        stays = loads[owner] + weight <= max(mean, loads[lightest] + weight)
        taker = owner if stays else lightest
        owners[number] = taker
        loads[taker] += weight
    return replace(assignment, owners=tuple(owners))
