"""State moves while it is used: visits are numbered in two partitions, then in four, then in two again.

python moving_state.py

Each visitor's visits are numbered 1, 2, 3 and so on. If a row met an owner that lacks what an earlier row left, a
number would be missing or given twice.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream import Flow, GeneratorSource, MemorySink, NoopSink, State, local_session

VISITORS = 5_000
BUDGET = "16 MB"
"""What a step may move. Steps begin with one bin and at most double; in bytes, they do not depend on how fast the
machine is, so 128 bins take eight epochs. Without a budget, steps are as small as keeps epochs about as short as they
were."""
PATIENCE_S = 300.0


def visits(rate: float, **options: Any) -> GeneratorSource:
    """Visits of people, some of whom come far more often than others."""

    def make(index: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
        return {"visitor": (VISITORS * rng.random(len(index)) ** 3).astype(np.int64)}

    return GeneratorSource(make, "visitor bigint", rate, **options)


def number(visitor: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    """Give a visit its number."""
    state.set(state.get(0) + 1)
    return {"visitor": visitor, "number": state.get()}


def build(source: Any, out: Any) -> Flow:
    """Visits with their numbers go to ``out``."""
    flow = Flow("visits")
    numbered = flow.source("visits", source).key_by("by visitor", "visitor")
    numbered.process("number", number, returns="visitor bigint, number bigint", one_to_one=True).sink("out", out)
    return flow


def misnumbered(rows: Iterable[dict[str, Any]]) -> list[int]:
    """The visitors whose numbers have a gap, or one twice."""
    found: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        found[row["visitor"]].append(row["number"])
    return [visitor for visitor, numbers in found.items() if sorted(numbers) != list(range(1, len(numbers) + 1))]


def main(spark: Any = None) -> list[int]:
    """Run it, on ``spark`` if given, else on a session of its own; gives back the visitors with wrong numbers."""
    out, session = MemorySink(), spark or local_session("local[2]")
    flow = build(visits(rate=5_000), out)
    try:
        with flow.start(session, checkpoint=tempfile.mkdtemp(prefix="midstream-visits-"), partitions=2) as job:
            job.await_epoch(3, PATIENCE_S)
            for partitions in (4, 2):
                migration = job.rescale(partitions, budget=BUDGET, note="an example").require(PATIENCE_S)
                epochs = [step.epoch for step in migration.steps]
                print(
                    f"{partitions} partitions: {migration.progress.bins_done} bins moved in {len(epochs)} steps, "
                    f"within epochs {epochs[0]} to {epochs[-1]}"
                )
                for stage in job.assignment():
                    print(f"  {stage.name}: {', '.join(f'{each.bins} bins' for each in stage.partitions)}")
            job.await_epoch(job.metrics.epochs + 3, PATIENCE_S)
        last = job.progress[-1].epoch  # the epoch after that was given up at the end
    finally:
        if spark is None:
            session.stop()
    rows = [row for epoch, table in out.tables.items() if epoch <= last for row in table.to_pylist()]
    wrong = misnumbered(rows)
    print(f"{len(rows):,} visits are numbered; of {len(wrong)} visitors a number is missing or given twice")
    return wrong


def flow() -> Flow:
    """For the command line: ``midstream run moving_state.py:flow --serve`` and ``midstream rescale visits 4``."""
    return build(visits(rate=5_000), NoopSink())


if __name__ == "__main__":
    main()
