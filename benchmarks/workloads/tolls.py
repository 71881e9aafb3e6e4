"""TP, toll processing: per road segment the average speed and the number of distinct cars, and from these the toll.

In two groups, as in 8.2.3 of the MorphStream paper: a few segments that most reports come from and many of which are
bad, and many quiet ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.workloads.shared_tables import popular, rounds_for, spin
from midstream.txn import Batch, Program, Table, transaction

__all__ = ["Knobs", "batches", "program"]

CARS = 1_000_000

segments = Table(
    "segments",
    key="bigint",
    value="speeds double, reports bigint, cars bigint",
    default={"speeds": 0.0, "reports": 0, "cars": 0},
)
seen = Table("seen", key="bigint", value="boolean", default=False)


@dataclass(frozen=True)
class Knobs:
    """The paper's, with its defaults. ``cost`` is in microseconds per written value; ``hot`` is the first group."""

    segments: int = 1_000
    skew: float = 0.2
    aborts: float = 0.01
    cost: float = 10.0
    interval: int = 40_960
    hot: float = 0.0
    seed: int = 1


def program(cost: float) -> Program:
    """A report of a car's speed on a segment. The events say how much functions cost, if anything."""

    @transaction
    def report(t: Any, e: Any) -> dict[str, Any]:
        t.require(e.speed >= 0.0, "broken speedometer")
        known = t.read(seen, e.segment * CARS + e.car)
        now = t.read(segments, e.segment)
        speeds = t.call(spin, now.speeds + e.speed, e.rounds) if cost else now.speeds + e.speed
        reports, cars = now.reports + 1, now.cars + t.where(known, 0, 1)
        t.write(segments, e.segment, {"speeds": speeds, "reports": reports, "cars": cars})
        t.write(seen, e.segment * CARS + e.car, True)
        crowd = t.max(cars - 50, 0)
        return {"toll": t.where(speeds / reports < 40.0, 2.0 * crowd * crowd, 0.0)}

    columns = {"segment": "bigint", "car": "bigint", "speed": "double", "rounds": "bigint"}
    return Program.of(report.trace(columns))


def batches(knobs: Knobs) -> Iterator[Batch]:
    """Punctuation intervals without end.

    >>> len(next(batches(Knobs(interval=70))))
    70
    """
    rng = np.random.default_rng(knobs.seed)
    start = 0
    while True:
        size = knobs.interval
        hot = rng.random(size) < knobs.hot
        segment = np.where(hot, rng.integers(0, 2, size), popular(rng, knobs.segments, size, knobs.skew) + 2)
        speed = rng.uniform(20.0, 120.0, size).round(1)
        bad = rng.random(size) < np.where(hot, 0.5, knobs.aborts)
        speed[bad] = -1.0
        columns = {
            "timestamp": np.arange(start, start + size),
            "segment": segment,
            "car": rng.integers(0, 2_000, size),
            "speed": speed,
            "rounds": np.full(size, rounds_for(knobs.cost)),
        }
        yield Batch.of(columns, order_by="timestamp")
        start += size
