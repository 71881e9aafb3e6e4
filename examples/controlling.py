"""A control program over a running stream: how many rows each operator takes, and samples of them, live.

python controlling.py

It starts a small job and asks it what its operators see: a few times fast, of the tasks that are at work, and then
blocking, of the state that all tasks have at the end of an epoch. The job was started without knowing of either. The
same from the shell:

midstream run controlling.py:flow --serve
midstream control orders controlling.py:Look
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream import ControlContext, ControlOperation, Flow, GeneratorSource, NoopSink, State, local_session

PATIENCE_S = 60.0
LOOKS = 5


def orders(index: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
    """Orders of a few shops."""
    return {"shop": rng.integers(0, 20, len(index)), "cents": rng.integers(100, 10_000, len(index))}


def turnover(shop: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    """Add an order to the turnover of its shop."""
    state.set(state.get(0) + row["cents"])
    return {"shop": shop, "cents": state.get()}


def flow() -> Flow:
    """Orders with tax, and the turnover of each shop."""
    built = Flow("orders")
    source = built.source("orders", GeneratorSource(orders, "shop bigint, cents bigint", rate=5_000))
    taxed = source.with_columns("taxed", cents="CAST(cents + cents / 5 AS BIGINT)")
    taxed.key_by("by shop", "shop").process("turnover", turnover, returns="shop bigint, cents bigint").sink(
        "out", NoopSink()
    )
    return built


class Look(ControlOperation):
    """How many rows each operator has taken in this epoch so far, and one of them."""

    mode = "fast"

    def complete(self, ctx: ControlContext) -> dict[str, Any]:
        """What this operator has seen in this task."""
        return {ctx.operator: {"rows": ctx.stats.rows_in, "tasks": 1, "samples": ctx.sample[:1]}}


class Richest(ControlOperation):
    """The shop with the largest turnover, by the state that tasks keep at the end of an epoch."""

    mode = "blocking"

    def prepare(self, graph: Any) -> dict[str, Any]:
        """Only one operator has something to say."""
        return {"turnover": None}

    def complete(self, ctx: ControlContext) -> tuple[int, int] | None:
        """The largest of this task."""
        return max(((state.get(), shop) for shop, state in ctx.state.items()), default=None)

    def merge(self, one: Any, other: Any) -> Any:
        """The larger one."""
        return max(one, other)


def main(spark: Any = None) -> dict[str, Any]:
    """Run it, on ``spark`` if given, else on a session of its own; gives back what was seen."""
    session = spark or local_session("local[2]")
    rows: dict[str, int] = {}
    try:
        with flow().start(session, checkpoint=tempfile.mkdtemp(prefix="midstream-orders-")) as job:
            job.await_epoch(2, PATIENCE_S)
            for _ in range(LOOKS):
                for operator, seen in (job.control(Look()).result(PATIENCE_S) or {}).items():
                    rows[operator] = rows.get(operator, 0) + seen["rows"]
                    print(f"{operator:>9}: {seen['rows']:>6} rows in {seen['tasks']} task(s) {seen['samples'][:1]}")
            cents, shop = job.control(Richest()).result(PATIENCE_S)
            print(f"shop {shop} is ahead with {cents / 100:,.2f} EUR")
    finally:
        if spark is None:
            session.stop()
    return {"rows": rows, "richest": shop}


if __name__ == "__main__":
    main()
