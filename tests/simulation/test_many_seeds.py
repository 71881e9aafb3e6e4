"""Hundreds of seeds of the simulation, of all kinds of flows. `make simulate` runs thousands."""

from __future__ import annotations

import pytest

from tests.simulation.run import KINDS, run_seed

SEEDS = 15


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", range(8))
def test_seeds_hold(kind: str, block: int) -> None:
    rows = sum(run_seed(1000 + seed, kind) for seed in range(SEEDS * block, SEEDS * (block + 1)))
    assert rows > 0
