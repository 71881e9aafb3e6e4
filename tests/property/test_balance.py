"""Targets of migrations by weight: even where that is possible, with few moves, and no bin on drained partitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import FlowError
from midstream.planner.assignment import Assignment, spread
from midstream.planner.balance import ACCEPTED, balanced, drained, imbalance


def moves(before: Assignment, after: Assignment) -> int:
    return sum(old != new for old, new in zip(before.owners, after.owners, strict=True))


def zipf(bins: int, exponent: float, order: list[int]) -> list[float]:
    return [1000.0 / (1 + rank) ** exponent for rank in order]


@given(st.permutations(range(256)), st.floats(0.0, 1.2), st.integers(2, 8))
def test_zipf_bins_are_balanced_to_a_tenth_if_no_bin_exceeds_the_mean(order, exponent: float, partitions: int):
    weights = zipf(256, exponent, order)
    before = spread(partitions)
    after = balanced(before, weights)
    assert after.partitions == partitions
    mean = sum(weights) / partitions
    if max(weights) <= mean:
        assert imbalance(after, weights) <= ACCEPTED
    else:
        assert imbalance(after, weights) <= max(max(weights) / mean, ACCEPTED) * 1.0001
    assert imbalance(after, weights) <= imbalance(before, weights)


@given(st.integers(0, 255), st.floats(0.4, 0.9), st.integers(3, 8))
def test_a_bin_with_more_than_a_share_gets_a_partition_of_its_own(hot: int, share: float, partitions: int):
    weights = [(1 - share) / 255] * 256
    weights[hot] = share
    after = balanced(spread(partitions), weights)
    assert [number for number, owner in enumerate(after.owners) if owner == after.owners[hot]] == [hot]
    assert imbalance(after, weights) == pytest.approx(share * partitions)


@given(st.permutations(range(256)), st.integers(2, 8))
def test_few_bins_move(order, partitions: int):
    """Dealing out all bins anew would move most of them."""
    weights = zipf(256, 0.8, order)
    assert moves(spread(partitions), balanced(spread(partitions), weights)) <= 64


@given(st.lists(st.floats(0, 100), min_size=8, max_size=8), st.integers(1, 3))
def test_balancing_never_makes_weights_less_even(weights: list[float], partitions: int):
    before = spread(partitions, bins=8)
    assert imbalance(balanced(before, weights), weights) <= imbalance(before, weights) * 1.0001


def test_an_even_assignment_stays():
    assert balanced(spread(4), [1.0] * 256) == spread(4)
    assert balanced(spread(4), [0.0] * 256) == spread(4)


@given(st.data())
def test_drained_partitions_own_nothing_and_the_others_keep_what_they_had(data: st.DataObject):
    partitions = data.draw(st.integers(2, 6))
    before = Assignment(partitions, tuple(data.draw(st.integers(0, partitions - 1)) for _ in range(64)))
    leaving = data.draw(st.sets(st.integers(0, partitions - 1), min_size=1, max_size=partitions - 1))
    after = drained(before, leaving)
    assert after.partitions == partitions
    assert not leaving & set(after.owners)
    assert all(new == old for old, new in zip(before.owners, after.owners, strict=True) if old not in leaving)


def test_not_all_partitions_can_be_drained():
    with pytest.raises(FlowError, match="all 2 partitions would be drained, and nobody would own their bins"):
        drained(spread(2), [0, 1])


@pytest.mark.parametrize("weights", [[1.0] * 3, [float("nan")] * 4, [-1.0] * 4, [float("inf")] * 4])
def test_invalid_weights_are_refused(weights: list[float]):
    with pytest.raises(FlowError, match=r"weights? (for 4 bins|of a bin must be)"):
        balanced(spread(2, bins=4), weights)
