"""Keyed state in a page: what customers spend, what merchants take per second, and who pays too often.

midstream run examples.spending:flow --for 20 --checkpoint out/spending
midstream state out/spending spent 7          # one customer, while it runs or after
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream import ConsoleSink, Flow, GeneratorSource, NoopSink, State, agg, tumbling

PAYMENT = "user bigint, merchant bigint, amount double"
ALERT = "user bigint, payments int, eur double"


def payments(rate: float, users: int = 10_000, **options: Any) -> GeneratorSource:
    """Payments of customers, some of whom pay far more often than others. The source adds ``event_time``."""

    def make(index: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
        user = (users * rng.random(len(index)) ** 3).astype(np.int64)
        merchant = rng.integers(0, 200, len(index))
        return {"user": user, "merchant": merchant, "amount": np.round(rng.exponential(40.0, len(index)), 2)}

    return GeneratorSource(make, PAYMENT, rate, **options)


class Hurry:
    """Reports a customer who makes five payments or more within a second, once that second is over."""

    def __call__(self, user: int, row: dict[str, Any], state: State) -> None:
        """Note a payment; the first one of a second sets a timer for its end."""
        if not state.list("recent"):
            state.event_timer(row["event_time"] + timedelta(seconds=1))
        state.list("recent").append(row["amount"])

    def on_timer(self, user: int, time: Any, state: State) -> dict[str, Any] | None:
        """The second is over: report it or not, and begin anew."""
        amounts = list(state.list("recent"))
        state.clear()
        return {"user": user, "payments": len(amounts), "eur": sum(amounts)} if len(amounts) >= 5 else None


def build(source: GeneratorSource, alerts: Any, turnover: Any) -> Flow:
    """Alerts of hurried customers and the turnover of merchants, each to a sink."""
    flow = Flow("spending")
    paid = flow.source("payments", source, delay="200 ms")
    customers = paid.key_by("by customer", "user")
    customers.process("hurry", Hurry(), returns=ALERT, one_to_one=True).sink("alerts", alerts)
    customers.aggregate(
        "spent", n=agg.count(), eur=agg.sum("amount"), largest=agg.max("amount"), recent=agg.last("amount", 3)
    ).sink("totals", NoopSink())
    seconds = paid.key_by("by merchant", "merchant").aggregate(
        "turnover", window=tumbling("1 second"), n=agg.count(), eur=agg.sum("amount")
    )
    seconds.sink("per second", turnover)
    return flow


def flow() -> Flow:
    """For the command line."""
    return build(payments(rate=10_000), ConsoleSink(limit=5), NoopSink())
