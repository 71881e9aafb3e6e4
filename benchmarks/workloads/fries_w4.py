"""W4 of the Fries paper: a payment is judged by what its customer and what its merchant has seen lately.

::

    groups → F1 (filter) → U2 (unnest) ─┬→ FD1, per customer ─┬→ combine → F2 (filter) → sink
                                        └→ FD2, per merchant ─┘

A row of the source is a group: several payments of one customer. U2 is one-to-many and feeds both detectors, so a
change of FD1 alone must begin at U2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.workloads.fries_w1 import RECENT, FraudDetector, LinearModel, Model
from examples.fraud.payments import Bank
from midstream import Flow, GeneratorSource
from midstream.flow.schedules import Indexes, Schedule
from midstream.flow.sinks import SinkTarget

__all__ = ["ALERT_AT", "LEAST_TOTAL", "flow", "groups", "oracle"]

MAX_GROUP = 4
LEAST_TOTAL = 50.0
"""F1 keeps groups of at least this sum."""
ALERT_AT = 0.5
"""F2 keeps payments of at least this mean score."""

PAYMENT = (
    "payment: bigint, time: timestamp_ntz, amount: double, chip_use: string, merchant: bigint, city: string, "
    "errors: string, fraud: boolean"
)
UNNESTED = "user bigint, " + PAYMENT.replace(":", "") + ", event_time timestamp"
BY_USER = "payment bigint, user bigint, merchant bigint, amount double, event_time timestamp, p_user double"
BY_MERCHANT = "payment bigint, seen timestamp, p_merchant double"

Row = dict[str, Any]


def groups(bank: Bank, rate: Schedule | float, *, fraud_rate: float = 0.05, **options: Any) -> GeneratorSource:
    """The stream of groups, of one to four payments each: ``user, payments``.

    >>> [batch] = groups(Bank(), rate=1000).rows(0, 2, start_us=0)
    >>> batch.schema.names, [payment["payment"] for payment in batch["payments"].to_pylist()[1]]
    (['user', 'payments', 'event_time'], [4, 5, 6])
    """
    make = partial(_make, bank.payments(rate, fraud_rate=fraud_rate))
    return GeneratorSource(make, f"user bigint, payments array<struct<{PAYMENT}>>", rate, **options)


def flow(source: Any, sink: SinkTarget, model: Model | None = None, recent: int = RECENT) -> Flow:
    """``source`` gives :func:`groups`; payments that both detectors together find suspicious go to ``sink``."""
    model = model or LinearModel()
    by_user = FraudDetector(model, keep=_KEPT_BY_USER, gives="p_user", recent=recent)
    by_merchant = FraudDetector(model, keep=_KEPT_BY_MERCHANT, gives="p_merchant", recent=recent)

    flow = Flow("fries_w4")
    kept = flow.source("groups", source).filter_batches("F1", is_large)
    payments = kept.flat_map_batches("U2", unnest, returns=UNNESTED)
    users = payments.key_by("by_user", "user").process("FD1", by_user, returns=BY_USER, one_to_one=True)
    merchants = payments.key_by("by_merchant", "merchant").process(
        "FD2", by_merchant, returns=BY_MERCHANT, one_to_one=True
    )
    # Both verdicts carry the payment's time, so a verdict need not wait once the watermark has passed it.
    verdicts = users.key_by("users", "payment").join(
        "combine", merchants.key_by("merchants", "payment"), within="0 seconds", right_time="seen"
    )
    verdicts.filter_batches("F2", is_suspicious).sink("alerts", sink)
    return flow


_KEPT_BY_USER = {name: name for name in ("payment", "user", "merchant", "amount", "event_time")}
_KEPT_BY_MERCHANT = {"payment": "payment", "seen": "event_time"}


def is_large(groups: pa.RecordBatch) -> pa.Array:
    """Whether each group's payments add up to :data:`LEAST_TOTAL`."""
    payments = groups["payments"]
    amounts = pc.list_flatten(payments).field("amount").to_numpy()
    totals = np.bincount(pc.list_parent_indices(payments).to_numpy(), amounts, minlength=len(payments))
    return pa.array(totals >= LEAST_TOTAL)


def unnest(groups: pa.RecordBatch) -> pa.RecordBatch:
    """One row for each payment of each group."""
    parents, payments = pc.list_parent_indices(groups["payments"]), pc.list_flatten(groups["payments"])
    names = [field.name for field in payments.type]
    columns = [groups["user"].take(parents), *payments.flatten(), groups["event_time"].take(parents)]
    return pa.RecordBatch.from_arrays(columns, ["user", *names, "event_time"])


def is_suspicious(verdicts: pa.RecordBatch) -> pa.Array:
    """Whether the mean of both scores reaches :data:`ALERT_AT`."""
    return pc.greater_equal(pc.divide(pc.add(verdicts["p_user"], verdicts["p_merchant"]), 2.0), ALERT_AT)


def oracle(groups: Iterable[Row], model: Model | None = None, recent: int = RECENT) -> list[Row]:
    """The alerts, in the order of the payments. Takes groups in the order of the stream."""
    model = model or LinearModel()
    histories: dict[tuple[str, int], list[Row]] = defaultdict(list)
    alerts = []
    for group in groups:
        if sum(payment["amount"] for payment in group["payments"]) < LEAST_TOTAL:
            continue
        for payment in group["payments"]:
            scores = []
            for whose in (("user", group["user"]), ("merchant", payment["merchant"])):
                histories[whose].append(payment)
                scores.append(model(histories[whose][-recent:]))
            if sum(scores) / 2 >= ALERT_AT:
                alerts.append(
                    {
                        "payment": payment["payment"],
                        "user": group["user"],
                        "merchant": payment["merchant"],
                        "amount": payment["amount"],
                        "event_time": group["event_time"],
                        "p_user": scores[0],
                        "p_merchant": scores[1],
                        "seen": group["event_time"],
                    }
                )
    return alerts


def _make(payments: GeneratorSource, indexes: Indexes, rng: np.random.Generator) -> pa.RecordBatch:
    """Payments as the bank makes them, in groups; all of a group are its first one's customer's."""
    numbers = (indexes[:, None] * MAX_GROUP + np.arange(MAX_GROUP)).ravel()
    sizes = rng.integers(1, MAX_GROUP, len(indexes), endpoint=True)
    made = payments.make(numbers, rng)
    assert isinstance(made, pa.RecordBatch)
    fields = {"payment": pa.array(numbers)} | {name: made[name] for name in _TAKEN}
    taken = np.tile(np.arange(MAX_GROUP), len(indexes)) < np.repeat(sizes, MAX_GROUP)
    values = pa.StructArray.from_arrays([*fields.values()], [*fields]).filter(pa.array(taken))
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    columns = [
        made["user"].take(pa.array(np.arange(0, len(numbers), MAX_GROUP))),
        pa.ListArray.from_arrays(pa.array(offsets), values),
    ]
    return pa.RecordBatch.from_arrays(columns, ["user", "payments"])


_TAKEN = ("time", "amount", "chip_use", "merchant", "city", "errors", "fraud")
