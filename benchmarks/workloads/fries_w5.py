"""W5 of the Fries paper: each payment goes two ways, to be judged by its customer's and by its merchant's payments.

::

                      ┌→ FD3, per customer → S1 (scale) → F3 (filter) ─┐
    payments → RE ────┤                                                ├→ SJ (self-join) → E1 (map) → sink
                      └→ F4 (filter) → FD4, per merchant ──────────────┘

RE passes payments on, and two operators read it, so that it is one-to-many, but one-to-one on each of its edges: a
change of FD3 or of FD4 alone need not begin at RE, a change of both must. SJ brings a payment's two halves together by
its number, so that at most one row comes out for each payment (``unique=True``): a change of E1 begins at E1.

The paper does not say what its S1, F3, F4 and E1 do. Here S1 scales the customer's score, F3 keeps payments that this
score makes worth a second look, F4 spares the merchant's detector the small ones, and E1 gives the verdict.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.workloads.fries_w1 import RECENT, FraudDetector, LinearModel, Model
from examples.fraud.payments import COLUMNS, FRAUD_RATE, Bank
from midstream import Flow, GeneratorSource
from midstream.flow.schedules import Indexes, Schedule
from midstream.flow.sinks import SinkTarget

__all__ = ["ALERT_AT", "LEAST_AMOUNT", "LEAST_SCORE", "MERCHANT_RECENT", "SCALE", "Scale", "flow", "oracle", "payments"]

MERCHANT_RECENT = 50
"""Payments that FD4 remembers of a merchant, as in the paper; FD3 remembers fewer of a customer."""
SCALE = 1.25
"""S1 multiplies the customer's score by this."""
LEAST_SCORE = 0.25
"""F3 keeps payments of at least this score, as S1 gives it."""
LEAST_AMOUNT = 20.0
"""F4 keeps payments of at least this amount."""
ALERT_AT = 0.5
"""E1 calls a payment a fraud if the mean of both scores is at least this."""

BY_USER = "payment bigint, user bigint, merchant bigint, amount double, event_time timestamp, p_user double"
BY_MERCHANT = "payment bigint, seen timestamp, p_merchant double"
VERDICT = (
    "payment bigint, user bigint, merchant bigint, amount double, event_time timestamp, p_user double, "
    "p_merchant double, p_fraud double, alert boolean"
)

Row = dict[str, Any]


def payments(bank: Bank, rate: Schedule | float, *, fraud_rate: float = FRAUD_RATE, **options: Any) -> GeneratorSource:
    """The bank's stream of payments, numbered.

    >>> [batch] = payments(Bank(), rate=1000).rows(0, 3, start_us=0)
    >>> batch["payment"].to_pylist(), batch.num_columns
    ([0, 1, 2], 14)
    """
    make = partial(_make, bank.payments(rate, fraud_rate=fraud_rate))
    return GeneratorSource(make, f"payment bigint, {COLUMNS}", rate, **options)


def flow(
    source: Any,
    sink: SinkTarget,
    model: Model | None = None,
    merchant_model: Model | None = None,
    *,
    recent: int = RECENT,
    merchant_recent: int = MERCHANT_RECENT,
    verdict: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None,
) -> Flow:
    """``source`` gives :func:`payments`; verdicts go to ``sink``. ``merchant_model`` is ``model`` unless it is given.

    A :class:`benchmarks.workloads.costs.CostlyModel` makes FD3 or FD4 as expensive as an experiment wants it, and
    :class:`benchmarks.workloads.costs.CostlyBatches` around :func:`judge` as ``verdict`` does so for E1.
    """
    model = model or LinearModel()
    by_user = FraudDetector(model, keep=_KEPT_BY_USER, gives="p_user", recent=recent)
    by_merchant = FraudDetector(
        merchant_model or model, keep=_KEPT_BY_MERCHANT, gives="p_merchant", recent=merchant_recent
    )

    flow = Flow("fries_w5")
    replicated = flow.source("payments", source).map_batches("RE", replicate)
    users = (
        replicated.key_by("by_user", "user")
        .process("FD3", by_user, returns=BY_USER, one_to_one=True)
        .map_batches("S1", Scale())
        .filter_batches("F3", is_worth_a_look)
    )
    merchants = (
        replicated.filter_batches("F4", is_large)
        .key_by("by_merchant", "merchant")
        .process("FD4", by_merchant, returns=BY_MERCHANT, one_to_one=True)
    )
    # Both halves carry the payment's time, so a half need not wait once the watermark has passed it.
    joined = users.key_by("users", "payment").join(
        "SJ", merchants.key_by("merchants", "payment"), within="0 seconds", right_time="seen", unique=True
    )
    joined.map_batches("E1", verdict or judge, returns=VERDICT).sink("verdicts", sink)
    return flow


_KEPT_BY_USER = {name: name for name in ("payment", "user", "merchant", "amount", "event_time")}
_KEPT_BY_MERCHANT = {"payment": "payment", "seen": "event_time"}


def replicate(payments: pa.RecordBatch) -> pa.RecordBatch:
    """The payments as they are: that two operators read them is what makes two of each."""
    return payments


@dataclass(frozen=True)
class Scale:
    """S1: scores times a factor, at most 1."""

    factor: float = SCALE

    def __call__(self, scores: pa.RecordBatch) -> pa.RecordBatch:
        """Scale the customer's scores."""
        scaled = pc.min_element_wise(pc.multiply(scores["p_user"], self.factor), 1.0)
        return scores.set_column(scores.schema.get_field_index("p_user"), "p_user", scaled)


def is_worth_a_look(scores: pa.RecordBatch) -> pa.Array:
    """Whether each customer's score reaches :data:`LEAST_SCORE`."""
    return pc.greater_equal(scores["p_user"], LEAST_SCORE)


def is_large(payments: pa.RecordBatch) -> pa.Array:
    """Whether each payment's amount reaches :data:`LEAST_AMOUNT`."""
    return pc.greater_equal(payments["amount"], LEAST_AMOUNT)


def judge(joined: pa.RecordBatch) -> pa.RecordBatch:
    """The mean of both scores, and whether it reaches :data:`ALERT_AT`."""
    mean = pc.divide(pc.add(joined["p_user"], joined["p_merchant"]), 2.0)
    kept = [name for name in joined.schema.names if name != "seen"]
    columns = [*(joined[name] for name in kept), mean, pc.greater_equal(mean, ALERT_AT)]
    return pa.RecordBatch.from_arrays(columns, [*kept, "p_fraud", "alert"])


def oracle(
    payments: Iterable[Row],
    model: Model | None = None,
    merchant_model: Model | None = None,
    *,
    recent: int = RECENT,
    merchant_recent: int = MERCHANT_RECENT,
) -> list[Row]:
    """The verdicts, in the order of the payments, which must be that of the stream."""
    model = model or LinearModel()
    merchant_model = merchant_model or model
    of_users: dict[int, deque[Row]] = defaultdict(lambda: deque(maxlen=recent))
    of_merchants: dict[int, deque[Row]] = defaultdict(lambda: deque(maxlen=merchant_recent))
    verdicts = []
    for payment in payments:
        user, merchant = of_users[payment["user"]], of_merchants[payment["merchant"]]
        user.append(payment)
        p_user = min(model(list(user)) * SCALE, 1.0)
        if payment["amount"] < LEAST_AMOUNT:
            continue
        merchant.append(payment)
        p_merchant = merchant_model(list(merchant))
        if p_user >= LEAST_SCORE:
            mean = (p_user + p_merchant) / 2
            kept = {name: payment[name] for name in ("payment", "user", "merchant", "amount", "event_time")}
            scores = {"p_user": p_user, "p_merchant": p_merchant, "p_fraud": mean, "alert": mean >= ALERT_AT}
            verdicts.append(kept | scores)
    return verdicts


def _make(payments: GeneratorSource, indexes: Indexes, rng: np.random.Generator) -> pa.RecordBatch:
    made = payments.make(indexes, rng)
    assert isinstance(made, pa.RecordBatch)
    return made.add_column(0, "payment", pa.array(indexes))
