"""A changed script is deployed: what runs becomes what the script now says, and totals go on.

python deploying.py

Here both states of the script are functions. The same from the shell, which can show the difference first:

midstream run deploying.py:first --serve --checkpoint out/shop
midstream deploy shop deploying.py:second --plan
midstream deploy shop deploying.py:second
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream import Flow, GeneratorSource, MemorySink, NoopSink, agg, local_session

PATIENCE_S = 60.0


def sales(rate: float, **options: Any) -> GeneratorSource:
    """Sales of a few shops; some are returned, and have a negative price."""

    def make(index: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
        returned = rng.random(len(index)) < 0.05
        cents = rng.integers(100, 10_000, len(index))
        return {"shop": rng.integers(0, 20, len(index)), "cents": np.where(returned, -cents, cents)}

    return GeneratorSource(make, "shop bigint, cents bigint", rate, **options)


def first(source: Any = None, out: Any = None) -> Flow:
    """The script as it is: what each shop has sold so far, and its commission of a tenth."""
    flow = Flow("shop")
    sold = flow.source("sales", source or sales(rate=5_000))
    billed = sold.map("commission", lambda row: {**row, "fee": row["cents"] // 10}, adds="fee bigint")
    totals = billed.key_by("by shop", "shop").aggregate(
        "totals", n=agg.count(), cents=agg.sum("cents"), fee=agg.sum("fee")
    )
    totals.sink("out", out or NoopSink())
    return flow


def second(source: Any = None, out: Any = None) -> Flow:
    """The script as it will be: what was returned is no sale, and the commission is an eighth."""
    flow = Flow("shop")
    sold = flow.source("sales", source or sales(rate=5_000)).where("sold", "cents > 0")
    billed = sold.map("commission", lambda row: {**row, "fee": row["cents"] // 8}, adds="fee bigint")
    totals = billed.key_by("by shop", "shop").aggregate(
        "totals", n=agg.count(), cents=agg.sum("cents"), fee=agg.sum("fee")
    )
    totals.sink("out", out or NoopSink())
    return flow


def main(spark: Any = None) -> list[dict[str, Any]]:
    """Run it, on ``spark`` if given, else on a session of its own; gives back the last totals of each shop."""
    source, out, session = sales(rate=5_000), MemorySink(), spark or local_session("local[2]")
    try:
        with first(source, out).start(session, checkpoint=tempfile.mkdtemp(prefix="midstream-shop-")) as job:
            job.await_epoch(3, PATIENCE_S)
            changed = second(source, out)
            print(job.explain_deployment(changed))
            change = job.deploy(changed, note="what was returned is no sale")
            assert change is not None, "the scripts differ"
            print(f"{change.require(PATIENCE_S).outcome} as revision {change.revision}")
            print("left to deploy:", job.explain_deployment(changed))
            job.await_epoch(job.metrics.epochs + 3, PATIENCE_S)
        last = job.progress[-1].epoch  # the epoch after that was given up at the end
    finally:
        if spark is None:
            session.stop()
    totals: dict[int, dict[str, Any]] = {}
    for epoch, table in sorted(out.tables.items()):
        if epoch <= last:
            totals.update((row["shop"], row) for row in table.to_pylist())
    for row in sorted(totals.values(), key=lambda row: row["shop"])[:5]:
        eur, fee = row["cents"] / 100, row["fee"] / 100
        print(f"shop {row['shop']}: {row['n']:,} sales, {eur:,.2f} EUR, commission {fee:,.2f} EUR")
    return list(totals.values())


if __name__ == "__main__":
    main()
