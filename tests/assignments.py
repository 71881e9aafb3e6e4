"""Assignments as moves and rescaling will leave them: other numbers of partitions per stage, some that own nothing."""

from __future__ import annotations

import random

from midstream.flow.model import Graph
from midstream.ids import BINS, StageIndex
from midstream.planner.assignment import Assignment
from midstream.planner.stages import compile_plan


def uneven(graph: Graph, seed: int, *, bins: int = BINS) -> dict[StageIndex, Assignment]:
    """A random assignment for each stage behind an exchange."""
    rng = random.Random(seed)
    found = {}
    for stage in compile_plan(graph).exchanged:
        partitions = rng.randint(1, 5)
        owning = rng.sample(range(partitions), rng.randint(1, partitions))
        found[stage] = Assignment(partitions, tuple(rng.choice(owning) for _ in range(bins)))
    return found
