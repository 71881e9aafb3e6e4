"""What makes an operator as expensive as an experiment wants it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from benchmarks.workloads.fries_w1 import Model

__all__ = ["CostlyBatches", "CostlyModel"]


@dataclass(frozen=True)
class CostlyModel:
    """Scores as ``model`` does, and uses ``cost_us`` microseconds of a core for each payment, its own work included.

    Time on a core, not on the clock: two such models that share a core take twice as long, as real ones would.

    >>> from benchmarks.workloads.fries_w1 import LinearModel
    >>> CostlyModel(LinearModel(), cost_us=50)([{"amount": 9.0, "city": "Boston", "chip_use": "swipe", "errors": None}])
    0.4
    """

    model: Model
    cost_us: float

    def open(self) -> None:
        """Prepare the model, if it asks for that."""
        prepare = getattr(self.model, "open", None)
        if prepare is not None:
            prepare()

    def __call__(self, payments: Sequence[dict[str, Any]]) -> float:
        """Score the last payment."""
        until = time.thread_time_ns() + self.cost_us * 1000
        score = self.model(payments)
        _work_until(until)
        return score


@dataclass(frozen=True)
class CostlyBatches:
    """The same batch function, at ``cost_us`` microseconds of a core for each row.

    >>> CostlyBatches(len, cost_us=10)(pa.record_batch({"a": [1, 2, 3]}))
    3
    """

    function: Callable[[pa.RecordBatch], Any]
    cost_us: float

    def __call__(self, batch: pa.RecordBatch) -> Any:
        """Call it."""
        until = time.thread_time_ns() + batch.num_rows * self.cost_us * 1000
        found = self.function(batch)
        _work_until(until)
        return found


def _work_until(until: float) -> None:
    while time.thread_time_ns() < until:
        pass
