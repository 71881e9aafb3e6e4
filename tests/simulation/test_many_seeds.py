"""Hundreds of seeds of the simulation, of all kinds of flows. `make simulate` runs thousands."""

from __future__ import annotations

import pytest

from tests.simulation.run import KINDS, run_seed

SEEDS = {"stateless": 15, "keyed": 15, "changes": 8, "switching": 4, "transactions": 15, "controls": 6}
"""Seeds in a block. Flows with changes have many more rows than others, because fewer would find nothing."""


def rows_of(kind: str, block: int) -> int:
    """Run a block of seeds; return their number of rows."""
    seeds = SEEDS[kind]
    return sum(run_seed(1000 + seed, kind) for seed in range(seeds * block, seeds * (block + 1)))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.slow) for block in range(2, 8))])
def test_seeds_hold(kind: str, block: int) -> None:
    assert rows_of(kind, block) > 0


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8, 15))
def test_more_seeds_of_changes_hold(block: int) -> None:
    assert rows_of("changes", block) > 0
