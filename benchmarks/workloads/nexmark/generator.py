"""The three streams of NEXMark, over one sequence of event numbers.

Of fifty events in a row the first is a person, the next three are auctions and the others bids, whatever the rate. So
each stream knows from a number alone which people and auctions exist by then, and needs nothing of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream import Constant, GeneratorSource
from midstream.flow.schedules import Indexes, Schedule

__all__ = ["AUCTION", "BID", "LARGE", "PERSON", "SMALL", "House", "Share", "Streams"]

PERSON = "id bigint, name string, email string, credit_card string, city string, state string"
AUCTION = (
    "id bigint, item string, description string, initial_bid bigint, reserve bigint, lasts_us bigint, seller bigint, "
    "category int"
)
BID = "auction bigint, bidder bigint, price bigint, channel string, url string"
"""Prices are in cents. The source of each stream adds ``event_time``; an auction ends ``lasts_us`` after it."""

FIRST_ID = 1000
FIRST_CATEGORY, CATEGORIES = 10, 5
ROUND = 50
"""Events in a row that hold one person, three auctions and 46 bids."""

Ints = npt.NDArray[np.int64]


class Streams(NamedTuple):
    """The sources of one auction house."""

    persons: Any
    auctions: Any
    bids: Any


@dataclass(frozen=True)
class Share(Schedule):
    """When the events of one kind are due: those at the places ``first``, … ``first + count − 1`` of every round.

    >>> auctions = Share(Constant(50), first=1, count=3)
    >>> auctions.time_of(np.array([0, 2, 3])).tolist(), auctions.count_until(1_000_000)
    ([20000, 60000, 1020000], 3)
    """

    every: Schedule
    first: int
    count: int

    def count_until(self, elapsed_us: int) -> int:
        """How many events of this kind are due in [0, elapsed_us)."""
        return self.among(self.every.count_until(elapsed_us))

    def time_of(self, indexes: Indexes) -> Indexes:
        """When each of these events is due."""
        rounds, place = np.divmod(np.asarray(indexes, np.int64), self.count)
        return self.every.time_of(rounds * ROUND + self.first + place)

    @property
    def total(self) -> int | None:
        """How many events of this kind there are in all; ``None`` when they never end."""
        return None if self.every.total is None else self.among(self.every.total)

    def among(self, events: int) -> int:
        """How many of the first ``events`` are of this kind."""
        rounds, rest = divmod(events, ROUND)
        return rounds * self.count + min(max(rest - self.first, 0), self.count)


@dataclass(frozen=True)
class House:
    """How people behave; the defaults are the benchmark's.

    >>> bids = House().streams(rate=50).bids
    >>> [batch] = bids.rows(0, 1, start_us=0)
    >>> batch["event_time"].cast("int64").to_pylist()
    [80000]
    """

    hot_auctions: int = 2
    """One bid in this number is not for the hot auction of the moment, but for any of those in flight."""
    hot_sellers: int = 4
    hot_bidders: int = 4
    in_flight: int = 100
    """Auctions that get bids; the hot one changes after as many."""
    active: int = 1000
    """People who bid and sell: the newest ones."""
    longest_us: int = 2_000_000
    """Auctions last up to so long."""

    def streams(
        self,
        rate: Schedule | float,
        *,
        seed: int = 1,
        limit: int | None = None,
        max_rows_per_epoch: int | None = None,
        partitions: int = 2,
    ) -> Streams:
        """The sources. ``rate``, ``limit`` and ``max_rows_per_epoch`` are for events of all kinds together."""
        schedule = rate if isinstance(rate, Schedule) else Constant(rate)

        def stream(number: int, make: Any, returns: str, first: int, count: int) -> GeneratorSource:
            share = Share(schedule, first, count)
            return GeneratorSource(
                partial(make, self),
                returns,
                share,
                seed=3 * seed + number,
                limit=limit and max(share.among(limit), 1),
                max_rows_per_epoch=max_rows_per_epoch and max(share.among(max_rows_per_epoch), 1),
                partitions=partitions,
            )

        return Streams(
            stream(0, _persons, PERSON, 0, 1), stream(1, _auctions, AUCTION, 1, 3), stream(2, _bids, BID, 4, 46)
        )


SMALL = House(in_flight=10, active=20, longest_us=8_000_000)
"""For tests: at 100 events a second, auctions close while the stream runs and people bid for several of them."""
LARGE = House()


# ── people ────────────────────────────────────────────────────────────────────────────────────────────────────────

_FIRST_NAMES = pa.array(["Ada", "Ben", "Chen", "Dora", "Emil", "Fatima", "Greta", "Hugo", "Ines", "Jun", "Kofi"])
_LAST_NAMES = pa.array(["Abel", "Brandt", "Costa", "Dogan", "Evans", "Fischer", "Garcia", "Haddad", "Ito", "Kaya"])
_CITIES = pa.array(["Portland", "Boise", "Seattle", "Phoenix", "Laramie", "Fresno", "Oakland", "Tucson"])
_STATES = pa.array(["OR", "ID", "WA", "AZ", "WY", "CA", "CA", "AZ"])


def _persons(house: House, indexes: Indexes, rng: np.random.Generator) -> dict[str, Any]:
    n = len(indexes)
    first, last = _any_of(_FIRST_NAMES, n, rng), _any_of(_LAST_NAMES, n, rng)
    city = pa.array(rng.integers(0, len(_CITIES), n))
    card = pa.array(rng.integers(10**15, 10**16, n)).cast(pa.string())
    return {
        "id": FIRST_ID + indexes,
        "name": pc.binary_join_element_wise(first, last, " "),
        "email": pc.binary_join_element_wise(first, pc.binary_join_element_wise(last, "example.org", "@"), "."),
        "credit_card": card,
        "city": _CITIES.take(city),
        "state": _STATES.take(city),
    }


# ── auctions ──────────────────────────────────────────────────────────────────────────────────────────────────────

_ITEMS = pa.array(["lamp", "globe", "clock", "violin", "atlas", "kettle", "easel", "abacus"])
_DESCRIPTIONS = pa.array([f"{state}, {age}" for state in ("as new", "used", "worn") for age in ("old", "recent")])


def _auctions(house: House, indexes: Indexes, rng: np.random.Generator) -> dict[str, Any]:
    n, newest_person = len(indexes), indexes // 3
    hot = rng.integers(0, house.hot_sellers, n) > 0
    seller = np.where(hot, _hot(newest_person, house.active // 10), _recent(newest_person, house.active, rng))
    initial = _prices(n, rng)
    return {
        "id": FIRST_ID + indexes,
        "item": _any_of(_ITEMS, n, rng),
        "description": _any_of(_DESCRIPTIONS, n, rng),
        "initial_bid": initial,
        "reserve": initial + _prices(n, rng),
        "lasts_us": rng.integers(1, house.longest_us, n, endpoint=True),
        "seller": FIRST_ID + seller,
        "category": (FIRST_CATEGORY + rng.integers(0, CATEGORIES, n)).astype(np.int32),
    }


# ── bids ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_CHANNELS = pa.array(["web", "app", "phone", "partner"])
_URLS = pa.array([f"https://auctions.example.org/item/{number}" for number in range(1000)])


def _bids(house: House, indexes: Indexes, rng: np.random.Generator) -> dict[str, Any]:
    n, rounds = len(indexes), indexes // 46
    newest_auction, newest_person = 3 * rounds + 2, rounds
    hot = rng.integers(0, house.hot_auctions, n) > 0
    auction = np.where(hot, _hot(newest_auction, house.in_flight), _recent(newest_auction, house.in_flight, rng))
    hot = rng.integers(0, house.hot_bidders, n) > 0
    # The hot bidder is not the hot seller, once there are two people.
    hot_bidder = np.minimum(_hot(newest_person, house.active // 10) + 1, newest_person)
    return {
        "auction": FIRST_ID + auction,
        "bidder": FIRST_ID + np.where(hot, hot_bidder, _recent(newest_person, house.active, rng)),
        "price": _prices(n, rng),
        "channel": _any_of(_CHANNELS, n, rng),
        "url": _any_of(_URLS, n, rng),
    }


def _hot(newest: Ints, turn: int) -> Ints:
    """The one that is hot when this is the newest; another one's turn comes after ``turn`` of them."""
    return newest // max(turn, 1) * max(turn, 1)


def _recent(newest: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Any of the newest ``count``."""
    return newest - rng.integers(0, np.minimum(newest + 1, count))


def _prices(n: int, rng: np.random.Generator) -> Ints:
    """From one dollar to a million, each magnitude as likely as the others; in cents."""
    return np.rint(10 ** (2 + 6 * rng.random(n))).astype(np.int64)


def _any_of(values: pa.Array, n: int, rng: np.random.Generator) -> pa.Array:
    return values.take(pa.array(rng.integers(0, len(values), n)))
