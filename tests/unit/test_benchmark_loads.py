"""How benchmarks find the load that they want, and what they say of a job before and after it is relieved."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from benchmarks.control import PACE_MS, Cost, _line
from benchmarks.due_times import Latencies
from benchmarks.relief import Full, Relieved
from benchmarks.skew import EVEN, HOT_KEY, PARTNERS, RIGHT, hot_bins, slower, users_of, window_us
from midstream import Step
from midstream.data.hashing import bins_of, hash_columns


def test_the_rate_of_a_load_follows_from_two_rates():
    cost = Cost(fixed_ms=100.0, row_ms=0.01)
    points = [(rate, cost.fixed_ms + cost.row_ms * rate * PACE_MS / 1000) for rate in (5_000.0, 20_000.0)]
    found = _line(*points)
    assert (found.fixed_ms, found.row_ms) == pytest.approx((100.0, 0.01))
    rate = found.rate_at(0.9)
    assert found.fixed_ms + found.row_ms * rate * PACE_MS / 1000 == pytest.approx(0.9 * PACE_MS)


def test_rows_that_cost_nothing_to_speak_of_give_a_rate_all_the_same():
    assert _line((5_000, 120.0), (20_000, 110.0)).rate_at(0.9) > 20_000


def test_what_a_relief_comes_to():
    def seen(waited: float) -> Latencies:
        return Latencies(np.arange(4.0), np.full(4, waited))

    full = (Full(1.8, 1000.0, 800.0, 10_000.0), Full(1.0, 800.0, 500.0, 12_500.0))
    job = Relieved(full, 9_000.0, (seen(2.0), seen(0.5)), 0)
    assert job.throughput_gain == pytest.approx(0.25)
    assert job.latency_change() == job.latency_change(0.99) == -0.75


def test_patterns_have_the_shares_that_they_say():
    keys = 1_000
    index = np.arange(10 * keys, dtype=np.int64)
    assert np.mean(users_of(index, keys, HOT_KEY[9]) == 0) == pytest.approx(0.9, abs=0.01)
    pattern = hot_bins(keys)
    bins = bins_of(hash_columns(_batch(users_of(index, keys, pattern)), ("user",)))
    assert np.mean(bins % 2 == 0) == pytest.approx(0.9, abs=0.03)
    assert sum(key == EVEN for key in pattern) == len(pattern) / 5


@pytest.mark.parametrize("rate", [2_000.0, 9_000.0, 200_000.0])
def test_a_row_of_the_left_stream_has_as_many_partners_at_all_rates(rate: float):
    schedule = Step(((0.0, rate / 10), (8.0, rate)))
    per_window = slower(schedule).steps[-1][1] * window_us(schedule) / 1e6
    assert per_window == pytest.approx(PARTNERS, rel=0.02)
    assert slower(schedule).steps[-1][1] * RIGHT == pytest.approx(rate)


def _batch(users: npt.NDArray[np.int64]) -> pa.RecordBatch:
    return pa.record_batch({"user": pa.array(users)})
