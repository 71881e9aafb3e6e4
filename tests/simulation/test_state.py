"""State under everything that can happen to it, against a dict. More: ``python -m tests.simulation.state_world``."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.simulation.state_world import world

pytestmark = pytest.mark.long


@given(st.randoms(use_true_random=False), st.integers(1, 10))
@examples(30)
def test_state_equals_what_was_committed(rng: random.Random, steps: int):
    assert world(rng, steps).lineages


@pytest.mark.parametrize("block", range(4))
def test_seeds_hold(block):
    for seed in range(5 * block, 5 * block + 5):
        assert world(random.Random(seed), steps=40).lineages[-1].epoch >= 0, f"seed {seed}"


def test_a_long_life_keeps_few_files():
    lived = world(random.Random(7), steps=150)
    assert lived.lineages[-1].epoch > 50
    assert max(len(lineage.entries) for lineage in lived.lineages) < 40
    assert any(entry.complete for lineage in lived.lineages for entry in lineage.entries)
    assert any(not entry.complete and not entry.single for lineage in lived.lineages for entry in lineage.entries)


def test_a_seed_replays_exactly():
    first, second = world(random.Random(3), steps=30), world(random.Random(3), steps=30)
    assert (first.story, first.truths, first.lineages) == (second.story, second.truths, second.lineages)
