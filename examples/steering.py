"""A control plane of one's own: a policy in a page of code gives a stage more partitions when rows come faster.

python steering.py

Orders come four times as fast after a few seconds. ``ByRate`` looks at the job after each epoch and proposes as many
partitions as the rate calls for, once three epochs agree; ``Pace`` only advises. At the end, the proposals of each are
printed, with their reasons and outcomes. Ready-made policies and the same from the shell:

midstream run steering.py:flow --serve
midstream attach orders AutoScale --set 'between=(1, 4)'
midstream attach orders steering.py:ByRate --set rows_per_s=1500 --advise
midstream proposals orders
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream import (
    Controller,
    Flow,
    GeneratorSource,
    NoopSink,
    Pace,
    Proposal,
    Rescale,
    Situation,
    State,
    Step,
    local_session,
)

PATIENCE_S = 60.0
SURGE = Step(((0, 800), (4, 3_200)))


@dataclass(frozen=True)
class ByRate(Controller):
    """One partition for every so many rows per second."""

    rows_per_s: float = 1_000.0
    most: int = 4
    patience: int = 3

    def first(self) -> tuple[float, ...]:
        """The rates of the last epochs."""
        return ()

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        """As many partitions as the slowest of the last epochs calls for, if that is more than there are."""
        if seen.in_progress is not None:
            return (), ()
        rates = (*memory, seen.observation.rows_per_s)[-self.patience :]
        [stage] = seen.stages
        wanted = min(self.most, math.ceil(min(rates) / self.rows_per_s))
        if len(rates) < self.patience or wanted <= stage.partitions:
            return (), rates
        why = f"rows come at {min(rates):.0f} a second"
        return (Proposal(Rescale(wanted), why, {"rows/s": min(rates)}, {"strategy": "sudden"}),), ()


def orders(index: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
    """Orders of a few shops."""
    return {"shop": rng.integers(0, 200, len(index)), "cents": rng.integers(100, 10_000, len(index))}


def turnover(shop: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    """Add an order to the turnover of its shop."""
    state.set(state.get(0) + row["cents"])
    return {"shop": shop, "cents": state.get()}


def flow() -> Flow:
    """Orders, and the turnover of each shop."""
    built = Flow("orders")
    source = built.source("orders", GeneratorSource(orders, "shop bigint, cents bigint", rate=SURGE))
    totals = source.key_by("by shop", "shop").process("turnover", turnover, returns="shop bigint, cents bigint")
    totals.sink("out", NoopSink())
    return built


def main(spark: Any = None) -> dict[str, Any]:
    """Run it, on ``spark`` if given, else on a session of its own; gives back what was proposed."""
    session = spark or local_session("local[2]")
    try:
        checkpoint = tempfile.mkdtemp(prefix="midstream-orders-")
        with flow().start(session, checkpoint=checkpoint, partitions=1, controllers=[ByRate()]) as job:
            job.attach(Pace(latency="2 s"), advise=True)
            with job.watch() as watch:
                for seen in watch:
                    [stage] = job.assignment()
                    has_grown = len(stage.partitions) > 1 and not job.migrations
                    if has_grown or seen.observed_at > job.controllers[0].attached_at + PATIENCE_S:
                        break
            for each in job.proposals():
                print(f"epoch {each.epoch:>3} {each.controller:>7}: {each.operation}, {each.reason}: {each.outcome}")
            partitions = len(job.assignment()[0].partitions)
            by = [record.by for record in job.history()]
    finally:
        if spark is None:
            session.stop()
    return {"partitions": partitions, "by": by}


if __name__ == "__main__":
    main()
