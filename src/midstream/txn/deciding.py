"""Which strategy for which batch: the time that each would take, estimated from what was measured.

The first transactions of a batch, run one after the other, tell what one costs. Where that is so little that planning
would not pay, the rest follows in the same way. Otherwise the dependencies are looked at, and the estimates compared:

- whatever the threads, the longest way through the dependencies has to be gone one unit after the other;
- every stratum costs a meeting of the threads, every unit taken from a queue a few atomic steps, and so on: these
  prices are the :class:`Calibration`, and :func:`midstream.txn.calibrating.calibrate` measures them on a machine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.errors import SchemaError
from midstream.txn import planning
from midstream.txn.operations import chains, operations
from midstream.txn.planning import Layout, Units
from midstream.txn.preparing import Prepared
from midstream.txn.properties import Properties, longest_way, measure
from midstream.txn.strategies import SERIAL, Strategy

__all__ = ["Calibration", "Decision", "Group", "decide"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Calibration:
    """What things cost on a machine, in seconds. The defaults are those of an ordinary server.

    >>> Calibration.from_json(Calibration(meeting=1e-6).to_json()).meeting
    1e-06
    """

    start: float = 80e-6  # let threads begin, and wait for their end
    meeting: float = 0.6e-6  # of all threads at the end of a stratum
    wait: float = 0.06e-6  # per unit: see whether what it needs is done
    queue: float = 0.15e-6  # per unit: take it from the queue, count down its dependents
    plan: float = 0.02e-6  # per key slot: dependencies of transactions
    join: float = 0.02e-6  # per key slot: find components
    operation: float = 0.08e-6  # per operation: its dependencies, its version, and settling it
    chain: float = 0.05e-6  # per operation: chains
    repair: float = 0.02e-6  # per operation: look whether it has to be redone
    node: float = 0.4e-6  # per node and transaction: interpreted, one after the other
    column: float = 4e-6  # per node and stratum: interpreted, by columns

    def to_json(self) -> str:
        """Text to store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Calibration:
        """What :meth:`to_json` stored."""
        try:
            found = json.loads(text)
            known = {field.name for field in fields(Calibration)}
            return Calibration(**{name: float(value) for name, value in found.items() if name in known})
        except (ValueError, TypeError, AttributeError) as error:
            raise SchemaError(f"this is no calibration: {error}; make one with: midstream calibrate") from error


@dataclass(frozen=True)
class Group:
    """Transactions of a batch that share no key with the others, and how they are to be run."""

    members: Array
    strategy: Strategy
    units: Units | None
    why: str


@dataclass(frozen=True)
class Decision:
    """How to run a batch: one group, or several, one after the other."""

    groups: tuple[Group, ...]

    @property
    def text(self) -> str:
        """What was chosen and why, a line per group."""
        return "\n".join(
            f"{group.strategy} for {len(group.members):,} transactions: {group.why}" for group in self.groups
        )


@dataclass(frozen=True)
class _Estimate:
    strategy: Strategy
    seconds: float
    units: Units | None = None


def decide(
    batch: Prepared,
    layout: Layout,
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


@dataclass(frozen=True)
class _Model:
    batch: Prepared
    layout: Layout
    cost: float
    abort_ratio: float
    threads: int
    calibration: Calibration

    def groups(self, members: Array) -> list[Group]:
        serial = len(members) * self.cost
        # Twice what it should take: a pilot on cold caches makes transactions look dearer than they are.
        price = self.calibration
        overhead = 2 * (price.start + self.slots(members) * (price.plan + price.join))
        if self.batch.program.interpreted:
            return [self.interpreted(members)]
        if self.threads == 1 or serial * (1 - 1 / self.threads) <= overhead:
            why = (
                f"{_time(self.cost)} each, {_time(serial)} in all; to plan and to start {self.threads} threads "
                f"takes {_time(overhead)}"
            )
            return [Group(members, SERIAL, None, why)]
        return self.planned(members)

    def planned(self, members: Array) -> list[Group]:
        """Dependencies are worth a look."""
        parts = planning.components(self.batch, self.layout, members)
        sizes = np.diff(parts.starts)
        fair = len(members) / self.threads
        largest = int(sizes.max())
        best = self.best(members, parts)
        rest = len(members) - largest
        # A component above the fair share of a thread, and enough beside it: each may have a strategy of its own.
        if fair * 1.1 < largest and rest * self.cost > 4 * self.calibration.start:
            chosen = int(sizes.argmax())
            inside = np.zeros(len(self.batch), np.bool_)
            inside[parts.members[parts.starts[chosen] : parts.starts[chosen + 1]]] = True
            deep, others = self.best(members[inside[members]], None), self.best(members[~inside[members]], None)
            if deep.seconds + others.seconds < best.seconds * 0.95:
                return [
                    self.explained(members[inside[members]], deep, "the largest component, "),
                    self.explained(members[~inside[members]], others, "shares no key with the group above, "),
                ]
        return [self.explained(members, best)]

    def best(self, members: Array, parts: Units | None) -> _Estimate:
        """The fastest strategy for transactions, by estimate."""
        units = planning.transactions(self.batch, self.layout, members)
        parts = parts or planning.components(self.batch, self.layout, members)
        estimates = [_Estimate(SERIAL, len(members) * self.cost), *self.whole(members, units, parts)]
        best = min(estimates, key=lambda estimate: estimate.seconds)
        ideal = len(members) * self.cost / self.threads
        # Versions can shorten the way where whole transactions wait for each other, and only there.
        if best.seconds > ideal * 1.15 and not self.layout.late.any():
            best = min([best, *self.on_versions(members)], key=lambda estimate: estimate.seconds)
        return best

    def whole(self, members: Array, units: Units, parts: Units) -> list[_Estimate]:
        price, count = self.calibration, len(units)
        widths = np.diff(units.strata[0])
        rounds = int(np.ceil(widths / self.threads).sum())
        way = max(count / self.threads, units.depth)
        planned = price.start + self.slots(members) * price.plan
        joined = price.start + self.slots(members) * price.join
        largest = int(np.diff(parts.starts).max())
        return [
            _Estimate(Strategy("strata"), planned + rounds * self.cost + units.depth * price.meeting, units),
            _Estimate(Strategy("depth"), planned + way * (self.cost + price.wait) + _uneven(widths, self), units),
            _Estimate(Strategy("queue"), planned + way * (self.cost + price.queue), units),
            _Estimate(
                Strategy("queue", "component"),
                joined + max(largest, count / self.threads) * self.cost + len(parts) / self.threads * price.queue,
            ),
        ]

    def on_versions(self, members: Array) -> list[_Estimate]:
        price = self.calibration
        estimates = []
        steps = self.layout.steps[self.batch.kinds[members]]
        count = int(steps.sum())
        each = self.cost * len(members) / max(1, count)
        for aborts in ("eager", "lazy"):
            found = operations(self.batch, self.layout, members, waiting=aborts == "eager")
            base = price.start + count * price.operation
            if aborts == "lazy":
                # What aborted and what had read it runs again, one after the other; how much that is, is a guess.
                again = min(1.0, self.abort_ratio * 4)
                base += count * price.repair + again * len(members) * self.cost
            way = max(count / self.threads, found.units.depth)
            rounds = int(np.ceil(np.diff(found.units.strata[0]) / self.threads).sum())
            chained, _ = chains(found)
            longest = longest_way(chained.starts, chained.before, chained.needed)
            chain_way = max(count / self.threads, longest)
            estimates += [
                _Estimate(Strategy("queue", "operation", aborts), base + way * (each + price.queue)),
                _Estimate(
                    Strategy("strata", "operation", aborts), base + rounds * each + found.units.depth * price.meeting
                ),
                _Estimate(
                    Strategy("queue", "chain", aborts),
                    base + count * price.chain + chain_way * each + len(chained) / self.threads * price.queue,
                ),
            ]
        return estimates

    def interpreted(self, members: Array) -> Group:
        """Python functions hold Python's lock, so threads do not help; columns do where strata are wide."""
        units = planning.transactions(self.batch, self.layout, members)
        nodes = max(len(kind.nodes) for kind in self.batch.program.types)
        saved = min(self.cost * 0.8, nodes * self.calibration.node)
        columns = len(members) * (self.cost - saved) + units.depth * nodes * self.calibration.column
        serial = len(members) * self.cost
        why = (
            f"Python functions; {units.depth:,} strata, {_time(serial)} one after the other, "
            f"{_time(columns)} by columns"
        )
        if columns < serial:
            return Group(members, Strategy("strata"), units, why)
        return Group(members, SERIAL, None, why)

    def explained(self, members: Array, best: _Estimate, prefix: str = "") -> Group:
        units = best.units or planning.transactions(self.batch, self.layout, members)
        found = measure(self.batch, self.layout, members, units, cost=self.cost, abort_ratio=self.abort_ratio)
        serial = len(members) * self.cost
        why = f"{prefix}{describe(found)}; {_time(best.seconds)} expected, {_time(serial)} one after the other"
        return Group(members, best.strategy, best.units, why)

    def slots(self, members: Array) -> int:
        return int(self.layout.slots[self.batch.kinds[members]].sum())


def _uneven(widths: Array, model: _Model) -> float:
    """Depth first, the threads' shares of a stratum are fixed: on narrow strata one waits for the other."""
    narrow = int((widths < model.threads).sum())
    return narrow * model.calibration.meeting


def describe(found: Properties) -> str:
    """Properties as a phrase."""
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
