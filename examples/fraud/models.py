"""The functions inside the flow's operators: two trained models, their combination, and the verdict.

All of them are batch functions: Arrow in, Arrow out, and numpy where scikit-learn wants it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from .payments import Bank

ALERT_AT = 0.75
REMEMBERED = 50_000
"""Past payments that a model by likeness keeps: twice as many cost twice the time for each new one."""

Matrix = npt.NDArray[np.float64]
Features = Callable[[pa.RecordBatch], Matrix]


class FraudModel:
    """A trained classifier as an operator's function: adds the probability of fraud as the column ``gives``.

    The classifier travels as bytes and is loaded in :meth:`open`, which midstream calls once in each worker process.
    """

    def __init__(self, classifier: Any, features: Features, gives: str) -> None:
        self._trained = pickle.dumps(classifier)
        self._features = features
        self._gives = gives

    def open(self) -> None:
        """Load the classifier."""
        self._classifier = pickle.loads(self._trained)

    def __call__(self, batch: pa.RecordBatch, version: int | None = None) -> pa.RecordBatch:
        """Score a slice of payments; ``version``, if there is one, goes with them."""
        probability = self._classifier.predict_proba(self._features(batch))[:, 1]
        scored = batch.append_column(self._gives, pa.array(probability))
        return scored if version is None else with_version(scored, "fm", version)


def with_version(batch: pa.RecordBatch, column: str, version: int) -> pa.RecordBatch:
    """Note on each payment which version of an operator it has met."""
    return batch.append_column(column, pa.repeat(pa.scalar(version, pa.int32()), batch.num_rows))


@dataclass(frozen=True)
class FirstOpinion:
    """FM: the model of merchants, and its version."""

    model: FraudModel

    def open(self) -> None:
        """Load the classifier."""
        self.model.open()

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Score a slice of payments."""
        return self.model(batch, 1)


@dataclass(frozen=True)
class Combine:
    """The weighted mean of several opinions, as the column ``p_fraud``.

    >>> combine = Combine({"p_customer": 0.4, "p_merchant": 0.6})
    >>> combine(pa.record_batch({"p_customer": [0.5], "p_merchant": [1.0]})).to_pylist()
    [{'p_customer': 0.5, 'p_merchant': 1.0, 'p_fraud': 0.8, 'mc': 1}]
    """

    weights: Mapping[str, float]
    version: int = 1
    forgets: tuple[str, ...] = ()
    """Opinions that nobody downstream knows."""

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Combine the opinions on a slice of payments."""
        p_fraud = sum(weight * batch[column].to_numpy() for column, weight in self.weights.items())
        known = batch.append_column("p_fraud", pa.array(p_fraud)).drop_columns(list(self.forgets))
        return with_version(known, "mc", self.version)


def judge(batch: pa.RecordBatch) -> pa.Array:
    """Name the branch of each payment. A payment that met half a change must not exist: it would have its own."""
    verdict = pc.if_else(pc.greater_equal(batch["p_fraud"], ALERT_AT), "alert", "pass")
    return pc.if_else(pc.equal(batch["fm"], batch["mc"]), verdict, "mixture")


def customer_features(batch: pa.RecordBatch) -> Matrix:
    """What tells a customer from a thief: how much, how far from home, when, how, and whether it went smoothly."""
    return _matrix(
        pc.ln(pc.divide(batch["amount"], batch["usual_amount"])),
        pc.not_equal(batch["city"], batch["home_city"]),
        pc.hour(batch["time"]),
        pc.equal(batch["chip_use"], "chip"),
        pc.equal(batch["chip_use"], "online"),
        pc.is_valid(batch["errors"]),
    )


def merchant_features(batch: pa.RecordBatch) -> Matrix:
    """What is unusual at this merchant: the size of the ticket, for goods that are easily sold on, at such an hour."""
    return _matrix(
        pc.ln(pc.divide(batch["amount"], batch["usual_ticket"])),
        batch["risk"],
        pc.hour(batch["time"]),
        pc.equal(batch["chip_use"], "chip"),
        pc.equal(batch["chip_use"], "online"),
        pc.equal(pc.fill_null(batch["errors"], ""), "Bad CVV"),
    )


def _matrix(*columns: pa.Array) -> Matrix:
    return np.column_stack([column.cast(pa.float64()).to_numpy(zero_copy_only=False) for column in columns])


@dataclass(frozen=True)
class Models:
    """The opinions on a payment, and one that comes later."""

    customer: FraudModel
    merchant: FraudModel
    second_opinion: FraudModel


def train(payments: int = 100_000, fraud_rate: float = 0.02, *, by_likeness: bool = False) -> Models:
    """Train on a labelled history, which takes about a second. Frauds are more frequent in it, to learn more.

    Decision trees need less than a microsecond for a payment. With ``by_likeness``, the model of merchants is one of
    those that need tens: it looks for the most similar payments of the past, and how many of them were frauds.
    """
    bank = Bank()
    # Another seed than the live stream's: models must not know the payments they will be asked about.
    labelled = bank.payments(rate=1, fraud_rate=fraud_rate, seed=2).rows(0, payments, start_us=0)
    table = pa.Table.from_batches(labelled)
    for key, profiles in (("user", bank.customers()), ("merchant", bank.merchants())):
        table = table.join(profiles, key, use_threads=False)  # threads would change the order, and so the models
    [history] = table.combine_chunks().to_batches()
    merchant = _fit(_tree(), history, merchant_features, "p_merchant")
    if by_likeness:
        likeness = make_pipeline(StandardScaler(), KNeighborsClassifier(20, algorithm="kd_tree"))
        merchant = _fit(likeness, history.slice(0, REMEMBERED), merchant_features, "p_merchant")
    return Models(
        _fit(_tree(), history, customer_features, "p_customer"),
        merchant,
        _fit(_tree(depth=12), history, merchant_features, "p_merchant_2"),
    )


def _tree(depth: int = 8) -> Any:
    return DecisionTreeClassifier(max_depth=depth, min_samples_leaf=20, random_state=0)


def _fit(classifier: Any, history: pa.RecordBatch, features: Features, gives: str) -> FraudModel:
    classifier.fit(features(history), history["fraud"].to_numpy(zero_copy_only=False))
    return FraudModel(classifier, features, gives)
