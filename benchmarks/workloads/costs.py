"""What makes an operator as expensive as an experiment wants it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.workloads.fries_w1 import Model

__all__ = ["CostlyModel"]


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
        while time.thread_time_ns() < until:
            pass
        return score
