"""Random migrations for cases of simulations: any strategy, at any time, some cancelled, some reversed."""

from __future__ import annotations

import random

from midstream import Move, Rescale
from midstream.ids import BINS
from midstream.planner.migration import StepStrategy
from midstream.testing import MigrateAt


def random_migrations(rng: random.Random, epochs: int) -> list[MigrateAt]:
    """A few migrations of every stage. What cannot be, because there is nothing to move, is refused, and no more."""
    found = []
    for _ in range(rng.randint(1, 3)):
        epoch = rng.randrange(max(1, epochs - 1))
        edits: list[Move | Rescale] = [Rescale(rng.randint(1, 5))]
        if rng.random() < 0.3:
            edits = [Move(dict.fromkeys(rng.sample(range(BINS), 64), 0))]
        found.append(
            MigrateAt.of(
                epoch,
                *edits,
                strategy=rng.choice([*StepStrategy, "sudden", "budgeted"]),
                prewarm=rng.random() < 0.5,
                at=rng.choice((None, None, epoch + 2)),
                queue=rng.random() < 0.7,
                cancel=rng.choice((None, None, epoch + 1)),
                reverse=rng.choice((None, None, epoch + 2)),
                if_possible=True,
            )
        )
    return found
