"""W1 of the Fries paper: payments → FD → sink. FD scores each payment by the recent ones of its customer.

The model is what experiments swap while the flow runs; :class:`LinearModel` is cheap and exact, :class:`TrainedModel`
is one of the trees that ``examples.fraud`` trains.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from midstream import Flow
from midstream.flow.sinks import SinkTarget

__all__ = ["RECENT", "FraudDetector", "LinearModel", "Model", "TrainedModel", "flow", "oracle"]

RECENT = 10
"""Payments that FD remembers of a customer; 50 in the paper's cost experiment."""

VERDICT = "user bigint, amount double, fraud boolean, event_time timestamp, p_fraud double"

Row = dict[str, Any]


class Model(Protocol):
    """How likely the last of these payments is a fraud, from 0 to 1. They are in the order they were made."""

    def __call__(self, payments: Sequence[Row]) -> float:
        """Score the last payment."""


@dataclass(frozen=True)
class LinearModel:
    """A weighted sum of signs: much more than usual, in another city than before, without the chip, with an error.

    >>> LinearModel()([{"amount": 90.0, "city": "ONLINE", "chip_use": "online", "errors": None}])
    0.4
    """

    excess: float = 0.3
    moved: float = 0.2
    no_chip: float = 0.4
    failed: float = 0.1

    def __call__(self, payments: Sequence[Row]) -> float:
        """Score the last payment."""
        *before, last = payments
        usual = sum(payment["amount"] for payment in payments) / len(payments)
        signs = (
            (self.excess, last["amount"] > 2 * usual),
            (self.moved, bool(before) and last["city"] != before[-1]["city"]),
            (self.no_chip, last["chip_use"] != "chip"),
            (self.failed, last["errors"] is not None),
        )
        return sum((weight for weight, found in signs if found), 0.0)


class TrainedModel:
    """A batch model as a :class:`Model`, e.g. ``TrainedModel(examples.fraud.models.train().customer)``.

    Where that one would look up a customer's profile, this one takes it from the recent payments.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def open(self) -> None:
        """Load the model, once in each worker process."""
        self._model.open()

    def __call__(self, payments: Sequence[Row]) -> float:
        """Score the last payment."""
        cities = [payment["city"] for payment in payments]
        amounts = [payment["amount"] for payment in payments]
        profile = {"home_city": max(cities, key=cities.count), "usual_amount": sum(amounts) / len(amounts)}
        known = {name: pa.array([value], _TYPES.get(name)) for name, value in (payments[-1] | profile).items()}
        scored: pa.RecordBatch = self._model(pa.RecordBatch.from_pydict(known))
        return float(scored.column(scored.num_columns - 1)[0].as_py())


_TYPES = {"errors": pa.string()}  # mostly null, and Arrow cannot tell the type of nothing but nulls
_SIGNS = ("amount", "city", "chip_use", "errors", "time")


class FraudDetector:
    """Remembers a key's most recent payments, and gives a model's score of each payment as the column ``gives``.

    ``keep`` says what goes along: the result's columns, and which columns of the payment they are.
    """

    def __init__(self, model: Model, *, keep: Mapping[str, str], gives: str = "p_fraud", recent: int = RECENT) -> None:
        self._model = model
        self._keep = dict(keep)
        self._gives = gives
        self._recent = recent

    def open(self) -> None:
        """Prepare the model, if it asks for that."""
        prepare: Callable[[], None] | None = getattr(self._model, "open", None)
        if prepare is not None:
            prepare()

    def __call__(self, key: Any, payment: Row, state: Any) -> Row:
        """Score a payment."""
        recent = state.list("recent")
        recent.append({name: payment[name] for name in _SIGNS})
        recent.trim(self._recent)
        return {name: payment[column] for name, column in self._keep.items()} | {self._gives: self._model([*recent])}


def flow(source: Any, sink: SinkTarget, model: Model | None = None, recent: int = RECENT) -> Flow:
    """``source`` gives the payments of a :class:`examples.fraud.payments.Bank`; scores go to ``sink``."""
    kept = {name: name for name in ("user", "amount", "fraud", "event_time")}
    detector = FraudDetector(model or LinearModel(), keep=kept, recent=recent)
    flow = Flow("fries_w1")
    payments = flow.source("payments", source)
    scored = payments.key_by("by_user", "user").process("FD", detector, returns=VERDICT, one_to_one=True)
    scored.sink("scores", sink)
    return flow


def oracle(payments: Iterable[Row], model: Model | None = None, recent: int = RECENT) -> list[Row]:
    """One score per payment, of payments in the order they were made; the model is all that this shares with FD."""
    model = model or LinearModel()
    histories: dict[int, deque[Row]] = defaultdict(lambda: deque(maxlen=recent))
    scores = []
    for payment in payments:
        history = histories[payment["user"]]
        history.append(payment)
        verdict = {name: payment[name] for name in ("user", "amount", "fraud", "event_time")}
        scores.append({**verdict, "p_fraud": model(list(history))})
    return scores
