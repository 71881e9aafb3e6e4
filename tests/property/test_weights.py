"""Weights of bins against sums that are computed bin by bin."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.data.key_space import pack_counts, unpack_counts
from midstream.ids import BinId, PartitionId, StageIndex
from midstream.planner.assignment import Assignment
from midstream.planner.weights import HALF_LIFE_S, BinWeights, StageEpoch
from tests.examples import examples

STAGE = StageIndex(1)


@examples(200)
@given(st.sampled_from([1, 16, 256, 4096]), st.data())
def test_packed_counts_are_those_that_were_packed(bins, data):
    counts = np.zeros(bins, np.int64)
    largest = data.draw(st.sampled_from([1, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**50]))
    for number in data.draw(st.lists(st.integers(0, bins - 1), max_size=3 * bins if bins < 300 else 40)):
        counts[number] = data.draw(st.integers(0, largest))
    packed = pack_counts(counts)
    assert unpack_counts(packed, bins).tolist() == counts.tolist()
    assert len(packed) <= 1 + 8 * bins


def epoch_of(draw, bins: int) -> StageEpoch:
    partitions = draw(st.integers(1, 5))
    owners = tuple(draw(st.integers(0, partitions - 1)) for _ in range(bins))
    rows = np.array([draw(st.sampled_from([0, 0, 1, 10, 1000])) for _ in range(bins)], np.float64)
    busy = {PartitionId(number): draw(st.floats(0, 10)) for number in range(partitions) if draw(st.booleans())}
    return StageEpoch(Assignment(partitions, owners), rows, busy, rows * 2, rows * 3)


@examples(200)
@given(st.data())
def test_the_work_of_a_partition_is_that_of_its_bins(data):
    epoch = epoch_of(data.draw, data.draw(st.sampled_from([1, 4, 16])))
    shared = epoch.busy_by_bin()
    assert (shared >= 0).all()
    for number in range(epoch.assignment.partitions):
        own = list(epoch.assignment.owned_by(PartitionId(number)))
        busy = epoch.busy_s.get(PartitionId(number), 0.0) if own else 0.0
        assert math.isclose(sum(shared[bin_id] for bin_id in own), busy, abs_tol=1e-9)
        total = sum(epoch.rows[bin_id] for bin_id in own)
        for bin_id in own:
            expected = busy / len(own) if total == 0 else busy * epoch.rows[bin_id] / total
            assert math.isclose(shared[bin_id], expected, abs_tol=1e-9)


@examples(100)
@given(st.data())
def test_smoothed_weights_are_means_in_which_older_epochs_count_less(data):
    bins = data.draw(st.sampled_from([1, 4]))
    history = [
        (epoch_of(data.draw, bins), data.draw(st.floats(0.01, 60.0))) for _ in range(data.draw(st.integers(1, 6)))
    ]
    weights = BinWeights()
    for epoch, seconds in history:
        weights = weights.after({STAGE: epoch}, seconds)
    found = weights[STAGE]
    ages = [sum(seconds for _, seconds in history[index + 1 :]) for index in range(len(history))]
    counts = [seconds * 0.5 ** (age / HALF_LIFE_S) for (_, seconds), age in zip(history, ages, strict=True)]
    for bin_id in range(bins):
        rates = [epoch.rows[bin_id] / seconds for epoch, seconds in history]
        expected = sum(rate * count for rate, count in zip(rates, counts, strict=True)) / sum(counts)
        assert math.isclose(found.rows_per_s[bin_id], expected, rel_tol=1e-6, abs_tol=1e-6)
    newest = history[-1][0]
    assert found.keys.tolist() == newest.keys.tolist()
    assert found.nbytes.tolist() == newest.nbytes.tolist()
    owned = (newest.assignment.owned_by(PartitionId(number)) for number in range(newest.assignment.partitions))
    assert math.isclose(sum(found.of(each)[1] for each in owned), found.busy.sum(), abs_tol=1e-9)
    assert found.of([BinId(0)])[0] == pytest.approx(found.rows_per_s[0])
