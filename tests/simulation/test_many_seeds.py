"""Hundreds of seeds of the simulation, of all kinds of flows. `make simulate` runs thousands."""

from __future__ import annotations

import pytest

from tests.simulation.run import KINDS, run_seed

SEEDS = {"stateless": 15, "keyed": 15, "changes": 8, "transactions": 15}
"""In a block. Flows that are changed have many more rows than others, because it takes these to find anything."""


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", range(8))
def test_seeds_hold(kind: str, block: int) -> None:
    seeds = SEEDS[kind]
    rows = sum(run_seed(1000 + seed, kind) for seed in range(seeds * block, seeds * (block + 1)))
    assert rows > 0
