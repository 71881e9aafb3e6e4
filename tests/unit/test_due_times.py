"""Latencies of rows by their schedule, against what is counted row by row."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.due_times import CALM, Latencies, Timeline
from midstream.flow.schedules import Constant
from midstream.metrics import EpochProgress


def epoch(number: int, committed_at: float, rows: int) -> EpochProgress:
    return EpochProgress(number, 1, committed_at, 100.0, (), rows, rows)


def test_a_row_waits_from_its_due_time_to_the_commit_of_its_epoch() -> None:
    timeline = Timeline()
    timeline.add([epoch(0, 11.0, 2), epoch(1, 12.0, 0), epoch(2, 14.0, 3)])
    timeline.add([epoch(1, 99.0, 7), epoch(2, 14.0, 3)])  # known
    assert timeline.rows == 5
    found = timeline.latencies(Constant(1), 10_000_000, 0)
    assert found.due.tolist() == [10, 11, 12, 13, 14]
    assert found.waited.tolist() == [1, 0, 2, 1, 0]
    assert timeline.latencies(Constant(1), 10_000_000, 1, 2).due.tolist() == []
    assert timeline.latencies(Constant(1), 10_000_000, 2).waited.tolist() == [2, 1, 0]
    assert timeline.latencies(Constant(1), 10_000_000, 3).waited.tolist() == []


def test_time_without_a_commit_is_counted_from_the_commit_before() -> None:
    timeline = Timeline()
    for at in (10.0, 11.0, 14.0, 14.5):
        timeline.append(1, at)
    assert timeline.gaps(0).tolist() == [1.0, 3.0, 0.5]
    assert timeline.gaps(2).tolist() == [3.0, 0.5]


def test_an_epoch_that_was_missed_is_an_error() -> None:
    timeline = Timeline()
    timeline.add([epoch(0, 11.0, 2)])
    with pytest.raises(ValueError, match="epoch 2 follows 0"):
        timeline.add([epoch(2, 14.0, 3)])


def test_rows_weigh_and_buckets_are_a_quarter_of_a_second() -> None:
    due = np.array([0.0, 0.1, 0.2, 0.3, 0.6, 0.61])
    found = Latencies(due, np.array([1.0, 1.0, 3.0, 1.0, 5.0, 5.0]))
    assert [start for start, _ in found.buckets()] == [0.0, 0.25, 0.5]
    assert [p99 for _, p99 in found.buckets()] == pytest.approx([2.96, 1.0, 5.0])
    assert (found.max(), found.quantile(0.5)) == (5.0, 2.0)
    assert found.before(0.3).waited.tolist() == [1, 1, 3]


def test_a_job_is_calm_after_the_last_bucket_above_the_bar() -> None:
    due = np.array([0, 0.25, 0.5, 0.75, 1, 1.25])
    found = Latencies(due, np.array([1.0, 2.0, 1.0, 2.0, CALM, 1.0]))
    assert found.calm_since(1.0) == 1.0
    assert found.calm_since(2.0) == 0.0
    assert found.before(1.0).calm_since(1.0) is None
    assert found.before(0.0).calm_since(1.0) is None
