"""How long events wait, by the epochs that Spark tells of."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

pytest.importorskip("pyspark")

from benchmarks.waits import moments, steady_waits


class Query:
    """Tells of one more epoch each time that it is waited for; they begin one second apart and take half of one."""

    def __init__(self, epochs: int) -> None:
        self.recentProgress: list[dict[str, Any]] = []
        self._left, self._begins = epochs, time.time()

    @property
    def isActive(self) -> bool:
        return self._left > 0

    def exception(self) -> None:
        return None

    def awaitTermination(self, seconds: float) -> None:
        if self._left:
            at = datetime.fromtimestamp(self._begins + len(self.recentProgress), UTC).isoformat()
            rows = {"numInputRows": 5, "timestamp": at, "durationMs": {"triggerExecution": 500}}
            self.recentProgress.append(rows)
            self._left -= 1


def test_it_waits_for_two_epochs_however_long_they_take() -> None:
    waits = steady_waits(Query(6), warm_up_s=0.01, seconds=0.01)  # type: ignore[arg-type]
    assert (round(waits.max()), round(waits.min())) == (1500, 501)


def test_a_query_that_ends_too_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 epochs instead of 2"):
        steady_waits(Query(2), warm_up_s=0.01, seconds=0.01)  # type: ignore[arg-type]


def test_epochs_without_rows_do_not_count() -> None:
    assert moments([{"numInputRows": 0, "timestamp": "2026-01-01T00:00:00Z", "durationMs": {}}]) == []
