"""Card payments, a few of them frauds: what this example judges, and workload W1 of the Fries paper.

A :class:`Bank` is a small world of customers and merchants, the same for the same seed, and sells two things: what a
bank knows beforehand (:meth:`Bank.customers`, :meth:`Bank.merchants`, tables to look up) and its stream of payments
(:meth:`Bank.payments`). Customers and merchants follow Zipf's law, payments the rhythm of the day.

A fraud is a payment by somebody else than the customer. It tends to be large, at night, without the chip, far from the
customer's home and at merchants whose goods sell easily; no single sign gives it away, all of them together mostly do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream import GeneratorSource

__all__ = ["COLUMNS", "FRAUD_RATE", "Bank"]

COLUMNS = (
    "user bigint, card int, time timestamp_ntz, amount double, chip_use string, merchant bigint, "
    "city string, state string, zip string, mcc int, errors string, fraud boolean"
)
"""The twelve columns of a payment. ``time`` is the customer's clock; the source adds ``event_time``, when it is due."""

FRAUD_RATE = 0.001

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bank:
    """Customers, merchants and what happens between them.

    >>> [batch] = Bank().payments(rate=1000).rows(0, 3, start_us=0)
    >>> batch["time"].to_pylist()[0], batch["event_time"].cast("int64").to_pylist()
    (datetime.datetime(2026, 1, 1, 0, 0), [0, 1000, 2000])
    """

    users: int = 10_000
    merchants_per_city: int = 150
    skew: float = 0.9
    """Exponent of Zipf's law: 0 makes all alike."""
    seed: int = 0
    _world: _World = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_world", _World.of(self))

    def payments(
        self,
        rate: Any,
        *,
        fraud_rate: float = FRAUD_RATE,
        seed: int = 1,
        limit: int | None = None,
        max_rows_per_epoch: int | None = None,
        partitions: int = 2,
    ) -> GeneratorSource:
        """The stream of payments, ``rate`` a second, or by a schedule such as :class:`midstream.Step`.

        Another ``seed`` gives other payments in the same world.
        """
        return GeneratorSource(
            partial(_make, self, fraud_rate),
            COLUMNS,
            rate,
            seed=seed,
            limit=limit,
            max_rows_per_epoch=max_rows_per_epoch,
            partitions=partitions,
        )

    def customers(self) -> pa.Table:
        """One row per customer: ``user, home_city, usual_amount``."""
        world = self._world
        return pa.table(
            {
                "user": np.arange(self.users),
                "home_city": _CITY_NAMES.take(pa.array(world.home)),
                "usual_amount": world.spending * _TYPICAL_TICKET,
            }
        )

    def merchants(self) -> pa.Table:
        """One row per merchant: ``merchant, category, usual_ticket, risk`` (how easily its goods are sold on)."""
        world = self._world
        return pa.table(
            {
                "merchant": np.arange(len(world.category)),
                "category": _CATEGORY_NAMES.take(pa.array(world.category)),
                "usual_ticket": _TICKET[world.category] * world.price_level,
                "risk": _RISK[world.category],
            }
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers are sent four numbers, not the tables made from them.
        return Bank, (self.users, self.merchants_per_city, self.skew, self.seed)


# ── the world ─────────────────────────────────────────────────────────────────────────────────────────────────────

_CITIES: Sequence[tuple[str, str | None, str | None]] = (
    ("New York", "NY", "100"),
    ("Los Angeles", "CA", "900"),
    ("Chicago", "IL", "606"),
    ("Houston", "TX", "770"),
    ("Phoenix", "AZ", "850"),
    ("Philadelphia", "PA", "191"),
    ("San Diego", "CA", "921"),
    ("Seattle", "WA", "981"),
    ("Denver", "CO", "802"),
    ("Boston", "MA", "021"),
    ("Atlanta", "GA", "303"),
    ("Miami", "FL", "331"),
    ("ONLINE", None, None),
)
_ONLINE = len(_CITIES) - 1
_CITY_NAMES = pa.array([city for city, _, _ in _CITIES])
_STATES = pa.array([state for _, state, _ in _CITIES])

# MCC, name, usual ticket in dollars, risk, share of the merchants.
_CATEGORIES: Sequence[tuple[int, str, float, float, float]] = (
    (5411, "groceries", 45, 0.05, 0.22),
    (5812, "restaurant", 30, 0.05, 0.22),
    (5541, "service station", 35, 0.10, 0.14),
    (5912, "drug store", 25, 0.05, 0.12),
    (5311, "department store", 70, 0.20, 0.10),
    (4121, "taxi", 20, 0.05, 0.08),
    (5816, "digital goods", 40, 0.70, 0.05),
    (5732, "electronics", 90, 0.80, 0.04),
    (5944, "jewellery", 120, 0.90, 0.02),
    (4829, "money transfer", 110, 1.00, 0.01),
)
_MCC = np.array([mcc for mcc, *_ in _CATEGORIES], np.int32)
_CATEGORY_NAMES = pa.array([name for _, name, *_ in _CATEGORIES])
_TICKET = np.array([ticket for _, _, ticket, *_ in _CATEGORIES])
_RISK = np.array([risk for *_, risk, _ in _CATEGORIES])
_CATEGORY_SHARE = np.array([share for *_, share in _CATEGORIES])
_TYPICAL_TICKET = float(_TICKET @ _CATEGORY_SHARE)

_CHIP_USE = pa.array(["chip", "swipe", "online"])
_CHIP, _SWIPE, _NO_CARD = range(3)

_ERRORS = pa.array([None, "Insufficient Balance", "Bad PIN", "Technical Glitch", "Bad CVV"])
_NO_ERROR, _BAD_CVV = 0, 4

_FIRST_DAY = np.datetime64("2026-01-01", "us")
_HOUR_US = 3_600_000_000
_PAYMENTS_A_DAY = 2  # per customer
_VOLUME = np.array([1, 1, 1, 1, 1, 2, 4, 7, 9, 8, 8, 9, 11, 10, 8, 8, 9, 11, 12, 10, 8, 6, 4, 2], np.float64)
_VOLUME /= _VOLUME.sum()
_DAY = np.concatenate(([0.0], np.cumsum(_VOLUME)))  # share of the day's payments made before each full hour

_NIGHT_ENDS = 6
_AT_NIGHT = np.where(np.arange(24) < _NIGHT_ENDS, 8.0, 1.0)
_AT_NIGHT /= _AT_NIGHT @ _VOLUME  # the mean over all payments is 1, so the fraud rate is what was asked for


@dataclass(frozen=True)
class _World:
    """A bank's world as arrays. Arrays named after a customer's trait are by user, after a merchant's by merchant."""

    user_of_rank: Ints
    user_cdf: Floats
    home: Ints
    cards: Ints
    spending: Floats
    rank_cdf: Floats
    """Merchants of a city, by rank; a merchant's number is its city times the merchants of a city, plus its rank."""
    category: Ints
    price_level: Floats
    zip: pa.Array
    risky: Ints
    """Per city, the merchants that thieves like best."""

    @classmethod
    def of(cls, bank: Bank) -> _World:
        """Make it; takes a few milliseconds."""
        rng = np.random.default_rng((bank.seed, 0))
        cities, per_city = len(_CITIES), bank.merchants_per_city
        category = rng.choice(len(_CATEGORIES), cities * per_city, p=_CATEGORY_SHARE)
        by_risk = np.argsort(-_RISK[category].reshape(cities, per_city), axis=1, kind="stable")
        return cls(
            user_of_rank=rng.permutation(bank.users),
            user_cdf=_zipf(bank.users, bank.skew),
            home=rng.integers(0, _ONLINE, bank.users),
            cards=rng.integers(1, 5, bank.users),
            spending=np.exp(rng.normal(0.0, 0.4, bank.users)),
            rank_cdf=_zipf(per_city, bank.skew),
            category=category,
            price_level=np.exp(rng.normal(0.0, 0.2, cities * per_city)),
            zip=pa.array([zip and f"{zip}{rank % 100:02}" for _, _, zip in _CITIES for rank in range(per_city)]),
            risky=by_risk[:, : max(per_city // 12, 1)] + per_city * np.arange(cities)[:, None],
        )


def _zipf(count: int, skew: float) -> Floats:
    weights = np.arange(1, count + 1) ** -skew
    return np.asarray(np.cumsum(weights) / weights.sum())


# ── payments ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _make(bank: Bank, fraud_rate: float, indexes: Ints, rng: np.random.Generator) -> pa.RecordBatch:
    """All payments first as if they were honest; then the few frauds, over what was there."""
    world, n = bank._world, len(indexes)
    time_us, hour = _times(indexes, _PAYMENTS_A_DAY * bank.users)
    fraud = rng.random(n) < fraud_rate * _AT_NIGHT[hour]

    user = world.user_of_rank[_draw(world.user_cdf, rng.random(n))]
    chip = np.digitize(rng.random(n), (0.65, 0.80))
    away = rng.random(n) < 0.07
    city = np.where(away, rng.integers(0, _ONLINE, n), world.home[user])
    city[chip == _NO_CARD] = _ONLINE
    merchant = city * bank.merchants_per_city + _draw(world.rank_cdf, rng.random(n))
    size = rng.normal(0.0, 0.5, n)
    errors = np.digitize(rng.random(n), (0.985, 0.993, 0.996, 0.999))

    thefts = np.flatnonzero(fraud)
    if k := len(thefts):
        chip[thefts] = np.digitize(rng.random(k), (0.05, 0.30))
        city[thefts] = np.where(chip[thefts] == _NO_CARD, _ONLINE, rng.integers(0, _ONLINE, k))
        liked = world.risky[city[thefts], rng.integers(0, world.risky.shape[1], k)]
        any_other = city[thefts] * bank.merchants_per_city + _draw(world.rank_cdf, rng.random(k))
        merchant[thefts] = np.where(rng.random(k) < 0.85, liked, any_other)
        size[thefts] = rng.normal(1.6, 0.5, k)
        errors[thefts] = np.where(rng.random(k) < 0.3, _BAD_CVV, errors[thefts])

    category = world.category[merchant]
    amount = _TICKET[category] * world.price_level[merchant] * world.spending[user] * np.exp(size)
    columns: dict[str, Any] = {
        "user": user,
        "card": (1 + rng.random(n) * world.cards[user]).astype(np.int32),
        "time": _FIRST_DAY + time_us,
        "amount": np.round(amount, 2),
        "chip_use": _CHIP_USE.take(pa.array(chip)),
        "merchant": merchant,
        "city": _CITY_NAMES.take(pa.array(city)),
        "state": _STATES.take(pa.array(city)),
        "zip": world.zip.take(pa.array(merchant)),
        "mcc": _MCC[category],
        "errors": _ERRORS.take(pa.array(errors)),
        "fraud": fraud,
    }
    return pa.RecordBatch.from_pydict(columns)


def _times(indexes: Ints, payments_a_day: int) -> tuple[Ints, Ints]:
    """When payments are made, in µs since the first day, and the hour of the day. They rise with the index."""
    day, place = np.divmod(indexes, payments_a_day)
    within_us = np.interp(place / payments_a_day, _DAY, np.arange(25) * _HOUR_US).astype(np.int64)
    return day * (24 * _HOUR_US) + within_us, within_us // _HOUR_US


def _draw(cdf: Floats, uniform: Floats) -> Ints:
    """Draw from a distribution; the last sum may fall short of 1 by a rounding error."""
    return np.minimum(np.searchsorted(cdf, uniform, side="right"), len(cdf) - 1)
