"""Chooses the strategy for a batch: the time of each strategy, estimated from measured costs.

A pilot (the first transactions of a batch, run serially) measures the cost of one transaction. If that is so low that
planning would not pay, the rest runs serially, too. Otherwise the dependencies are computed, and the estimates
compared:

- the schedule of each strategy is simulated (:mod:`.schedule_cost`) with the expected cost of each part;
- every stratum costs a barrier of the threads, every unit from a queue a few atomic steps, and so on. These costs are
  the :class:`Calibration`; :func:`midstream.txn.calibration.calibrate` measures them on a machine.

Evaluating more strategies takes time as well, so it stops as soon as one is nearly as fast as the threads allow. A
batch that is like the previous one (:class:`Shape`) runs with the same strategies, without an evaluation.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.errors import SchemaError
from midstream.txn import dependencies
from midstream.txn.dependencies import BatchLayout, Units
from midstream.txn.operations import Operations, chains, operations
from midstream.txn.prepared_batch import PreparedBatch
from midstream.txn.properties import Properties, measure
from midstream.txn.schedule_cost import depth_seconds, queue_seconds, strata_seconds, work_of
from midstream.txn.strategies import SERIAL, Aborts, Granularity, Strategy

__all__ = ["Calibration", "Decision", "Group", "Shape", "decide", "repeat"]

Array = npt.NDArray[Any]

UNEVEN = 1.03
"""Penalty on schedules without a queue: real transactions are less even than modelled, other processes interfere."""
GOOD = 1.08
"""A strategy that takes at most this multiple of the lower bound is good enough."""


@dataclass(frozen=True)
class Calibration:
    """Costs on a machine, in seconds. The defaults are those of an ordinary server.

    >>> Calibration.from_json(Calibration(meeting=1e-6).to_json()).meeting
    1e-06
    """

    start: float = 80e-6  # start the threads, and wait for them to finish
    meeting: float = 0.6e-6  # barrier of all threads at the end of a stratum
    wait: float = 0.06e-6  # per unit: check whether the units it needs are done
    queue: float = 0.15e-6  # per unit: take it from the queue, count down its dependents
    plan: float = 0.02e-6  # per key slot: dependencies of transactions
    join: float = 0.02e-6  # per key slot: find components
    operation: float = 0.08e-6  # per operation: compute its dependencies and its version, and settle it
    chain: float = 0.05e-6  # per operation: chains
    repair: float = 0.02e-6  # per operation: check whether it must be redone
    node: float = 0.4e-6  # per node and transaction: interpreted, serially
    column: float = 4e-6  # per node and stratum: interpreted, by columns

    def to_json(self) -> str:
        """JSON text."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Calibration:
        """The inverse of :meth:`to_json`. Missing costs have their defaults, so that older files can be read."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise SchemaError(f"a calibration must be JSON: {error}; {_REMEDY}") from error
        if not isinstance(found, dict):
            raise SchemaError(f"a calibration must be a JSON object of prices; found {type(found).__name__}; {_REMEDY}")
        names = [field.name for field in fields(Calibration)]
        for name, value in found.items():
            if name not in names:
                raise SchemaError(f"a calibration has no price {name!r}; it has: {', '.join(names)}; {_REMEDY}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
                raise SchemaError(
                    f"price {name!r} of a calibration must be in seconds, 0 to {MOST:g}; found {value!r}; {_REMEDY}"
                )
        return Calibration(**{name: float(value) for name, value in found.items()})


MOST = 1.0
_REMEDY = "create a new one with: midstream calibrate"


@dataclass(frozen=True)
class Group:
    """Transactions of a batch that share no key with the others, and the strategy for them."""

    members: Array
    strategy: Strategy
    units: Units | None
    why: str


@dataclass(frozen=True)
class Decision:
    """How to run a batch: as one group, or as several, one after the other."""

    groups: tuple[Group, ...]

    @property
    def text(self) -> str:
        """The choice and its reasons, one line per group."""
        return "\n".join(
            f"{group.strategy} for {len(group.members):,} transactions: {group.why}" for group in self.groups
        )

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategies to pass to :func:`repeat`."""
        return tuple(group.strategy for group in self.groups)


@dataclass(frozen=True)
class Shape:
    """Properties of a batch that are known without planning it, enough to tell whether it is like another."""

    transactions: int
    kinds: tuple[float, ...]  # share of each
    keys: int  # number of distinct keys; few if some keys are popular
    cost: float
    abort_ratio: float

    @staticmethod
    def of(batch: PreparedBatch, cost: float, abort_ratio: float) -> Shape:
        """The shape of a batch, given the measurements of the pilot."""
        shares = np.bincount(batch.kinds, minlength=len(batch.program.types)) / max(1, len(batch))
        keys = sum(len(known.used()) for known in batch.known)
        return Shape(len(batch), tuple(shares.tolist()), keys, cost, abort_ratio)

    def is_like(self, other: Shape) -> bool:
        """Whether a strategy that suits one suits the other.

        >>> shape = Shape(1000, (0.3, 0.7), 500, 1e-6, 0.01)
        >>> shape.is_like(Shape(1050, (0.3, 0.7), 510, 1.2e-6, 0.02))
        True
        >>> shape.is_like(Shape(1000, (0.0, 1.0), 500, 1e-6, 0.01))
        False
        """
        return (
            _near(self.transactions, other.transactions, 1.25)
            and _near(self.keys, other.keys, 1.1)
            and _near(self.cost, other.cost, 1.5)
            and abs(self.abort_ratio - other.abort_ratio) <= 0.05
            and max(abs(a - b) for a, b in zip(self.kinds, other.kinds, strict=True)) <= 0.05
        )


def _near(a: float, b: float, factor: float) -> bool:
    return a <= b * factor and b <= a * factor


@dataclass(frozen=True)
class _Estimate:
    strategy: Strategy
    seconds: float
    units: Units | None = None


def decide(
    batch: PreparedBatch,
    layout: BatchLayout,
    members: Array,
    *,
    cost: float,
    abort_ratio: float,
    threads: int,
    calibration: Calibration,
) -> Decision:
    """Choose how to run some transactions, given the measured cost of one and the share that aborts."""
    model = _Model(batch, layout, cost, abort_ratio, threads, calibration)
    return Decision(tuple(model.groups(members)))


def repeat(
    batch: PreparedBatch, layout: BatchLayout, members: Array, strategies: tuple[Strategy, ...], why: str
) -> Decision:
    """Run transactions like those of another batch: as one group, or with a strategy of its own for the largest
    component.
    """
    if len(strategies) == 1:
        return Decision((Group(members, strategies[0], None, why),))
    deep, others = _split(batch, members, dependencies.components(batch, layout, members))
    return Decision((Group(deep, strategies[0], None, why), Group(others, strategies[1], None, why)))


def _split(batch: PreparedBatch, members: Array, parts: Units) -> tuple[Array, Array]:
    """The transactions of the largest component, and the others."""
    largest = int(np.diff(parts.starts).argmax())
    inside = np.zeros(len(batch), np.bool_)
    inside[parts.members[parts.starts[largest] : parts.starts[largest + 1]]] = True
    return members[inside[members]], members[~inside[members]]


@dataclass(frozen=True)
class _Model:
    batch: PreparedBatch
    layout: BatchLayout
    cost: float
    abort_ratio: float
    threads: int
    calibration: Calibration

    def groups(self, members: Array) -> list[Group]:
        serial = len(members) * self.cost
        # Doubled, because a pilot on cold caches makes transactions look more expensive than they are.
        price = self.calibration
        overhead = 2 * (price.start + self.slots(members) * (price.plan + price.join))
        if self.batch.program.interpreted:
            return [self.interpreted(members)]
        if self.threads == 1 or serial * (1 - 1 / self.threads) <= overhead:
            why = (
                f"{_time(self.cost)} each, {_time(serial)} in all; planning and starting {self.threads} threads "
                f"takes {_time(overhead)}"
            )
            return [Group(members, SERIAL, None, why)]
        return self.planned(members)

    def planned(self, members: Array) -> list[Group]:
        """Groups chosen after computing the dependencies."""
        best = self.best(members)
        if self.is_good(best, members):
            return [self.explained(members, best)]
        parts = dependencies.components(self.batch, self.layout, members)
        largest = int(np.diff(parts.starts).max())
        rest = len(members) - largest
        # If a component exceeds the fair share of a thread, and enough is left beside it, each gets its own strategy.
        if largest * self.threads > len(members) * 1.1 and rest * self.cost > 4 * self.calibration.start:
            inner, outer = _split(self.batch, members, parts)
            deep, others = self.best(inner), self.best(outer)
            if deep.seconds + others.seconds < best.seconds * 0.95:
                return [
                    self.explained(inner, deep, "the largest component, "),
                    self.explained(outer, others, "shares no key with the group above, "),
                ]
        return [self.explained(members, best)]

    def best(self, members: Array) -> _Estimate:
        """The fastest strategy for some transactions, by estimate."""
        best = _least([_Estimate(SERIAL, len(members) * self.cost), *self.whole(members)])
        if self.is_good(best, members):
            return best
        best = _least([best, self.by_component(members)])
        # Versions shorten the critical path only where whole transactions wait for each other.
        if self.layout.late.any():
            return best
        aborts: tuple[Aborts, ...] = ("eager", "lazy")
        for way in aborts:
            if self.is_good(best, members) or not self.may_beat(best, members, way):
                break
            best = _least([best, *self.on_versions(members, way)])
        return best

    def is_good(self, best: _Estimate, members: Array) -> bool:
        return best.seconds <= GOOD * len(members) * self.cost / self.threads + self.calibration.start

    def may_beat(self, best: _Estimate, members: Array, aborts: Aborts) -> bool:
        """Whether versions could save more time than evaluating them takes."""
        price, count = self.calibration, self.steps(members)
        look = count * (price.operation + price.chain)
        least = self.versions_base(members, aborts) + len(members) * self.cost / self.threads
        return best.seconds - least > look

    def whole(self, members: Array) -> list[_Estimate]:
        price = self.calibration
        units = dependencies.transactions(self.batch, self.layout, members)
        work = self.work(members)[members]
        planned = price.start + self.slots(members) * price.plan
        return [
            _Estimate(
                Strategy("strata"), planned + UNEVEN * strata_seconds(units, work, self.threads, price.meeting), units
            ),
            _Estimate(
                Strategy("depth"), planned + UNEVEN * depth_seconds(units, work, self.threads, price.wait), units
            ),
            _Estimate(Strategy("queue"), planned + queue_seconds(units, work, self.threads, price.queue), units),
        ]

    def by_component(self, members: Array) -> _Estimate:
        price = self.calibration
        parts = dependencies.components(self.batch, self.layout, members)
        joined = price.start + self.slots(members) * price.join
        seconds = queue_seconds(parts, work_of(parts, self.work(members)), self.threads, price.queue)
        return _Estimate(Strategy("queue", "component"), joined + seconds)

    def on_versions(self, members: Array, aborts: Aborts) -> list[_Estimate]:
        price = self.calibration
        found = operations(self.batch, self.layout, members, waiting=aborts == "eager")
        work = self.step_work(members, found, aborts)
        base = self.versions_base(members, aborts)
        estimates = self.explored(found.units, work, base, "operation", aborts)
        chained, _ = chains(found)
        return estimates + self.explored(chained, work, base + len(work) * price.chain, "chain", aborts)

    def explored(
        self, units: Units, work: Array, base: float, granularity: Granularity, aborts: Aborts
    ) -> list[_Estimate]:
        price, each, threads = self.calibration, work_of(units, work), self.threads
        return [
            _Estimate(
                Strategy("strata", granularity, aborts),
                base + UNEVEN * strata_seconds(units, each, threads, price.meeting),
            ),
            _Estimate(
                Strategy("depth", granularity, aborts), base + UNEVEN * depth_seconds(units, each, threads, price.wait)
            ),
            _Estimate(Strategy("queue", granularity, aborts), base + queue_seconds(units, each, threads, price.queue)),
        ]

    def versions_base(self, members: Array, aborts: Aborts) -> float:
        """The cost of versions regardless of the schedule; with lazy aborts, including wasted work."""
        price, count = self.calibration, self.steps(members)
        base = price.start + count * price.operation
        if aborts == "eager":
            return base
        # Aborted transactions and their readers run again, serially; their number is a guess.
        again = min(1.0, self.abort_ratio * 4)
        return base + count * price.repair + again * len(members) * self.cost

    def work(self, members: Array) -> Array:
        """Seconds by transaction: the measured cost, distributed by the content of each type."""
        by_kind = 1 + self.layout.work.sum(axis=1)
        share: Array = by_kind[self.batch.kinds]
        seconds: Array = share * (self.cost * len(members) / share[members].sum())
        return seconds

    def step_work(self, members: Array, found: Operations, aborts: Aborts) -> Array:
        """Seconds by operation. With eager aborts, writes of aborted transactions do nothing; with lazy ones, all their
        work.
        """
        steps = np.arange(len(found.owners)) - found.starts[found.owners]
        share: Array = self.layout.work[self.batch.kinds[found.owners], steps]
        done = 1.0 if aborts == "eager" else max(0.05, 1 - self.abort_ratio)
        seconds: Array = share * (self.cost * len(members) / (max(1.0, share[found.units.members].sum()) * done))
        return seconds

    def interpreted(self, members: Array) -> Group:
        """Python functions hold the GIL, so threads do not help; columns help where strata are wide."""
        units = dependencies.transactions(self.batch, self.layout, members)
        nodes = max(len(kind.nodes) for kind in self.batch.program.types)
        saved = min(self.cost * 0.8, nodes * self.calibration.node)
        columns = len(members) * (self.cost - saved) + units.depth * nodes * self.calibration.column
        serial = len(members) * self.cost
        why = f"Python functions; {units.depth:,} strata, {_time(serial)} serially, {_time(columns)} by columns"
        if columns < serial:
            return Group(members, Strategy("strata"), units, why)
        return Group(members, SERIAL, None, why)

    def explained(self, members: Array, best: _Estimate, prefix: str = "") -> Group:
        units = best.units or dependencies.transactions(self.batch, self.layout, members)
        found = measure(self.batch, self.layout, members, units, cost=self.cost, abort_ratio=self.abort_ratio)
        serial = len(members) * self.cost
        why = f"{prefix}{describe(found)}; {_time(best.seconds)} expected, {_time(serial)} serially"
        return Group(members, best.strategy, best.units, why)

    def slots(self, members: Array) -> int:
        return int(self.layout.slots[self.batch.kinds[members]].sum())

    def steps(self, members: Array) -> int:
        return int(self.layout.steps[self.batch.kinds[members]].sum())


def _least(estimates: list[_Estimate]) -> _Estimate:
    return min(estimates, key=lambda estimate: estimate.seconds)


def describe(found: Properties) -> str:
    """The properties as a phrase."""
    return (
        f"{_time(found.cost)} each, {found.depth:,} strata, {found.temporal:,} temporal, "
        f"{found.parametric:,} parametric and {found.logical:,} logical dependencies, skew {found.skew:.1f}, "
        f"{found.abort_ratio:.0%} aborts"
    )


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
