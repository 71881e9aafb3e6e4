"""Ways to run a batch: how the dependency graph is explored, the unit of work, and when aborts are handled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FIXED", "SERIAL", "S_STORE", "T_STREAM", "Aborts", "Exploration", "Granularity", "Strategy"]

Exploration = Literal["serial", "strata", "depth", "queue", "partitions"]
Granularity = Literal["operation", "chain", "transaction", "component"]
Aborts = Literal["eager", "lazy", "redo"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a batch.

    ``exploration``: ``serial``, one transaction after the other; ``strata``, first all units without dependencies, then
    all units that depend only on these, and so on; ``depth``, every thread has its share of each stratum and waits only
    for the units that a unit needs; ``queue``, whichever unit is ready. ``partitions`` is S-Store's.

    ``granularity``: the unit of work of a thread. Operations and chains (all operations on a key) work on versions.
    Whole transactions and components (transactions that share keys, directly or not) work in place, and know whether
    they abort before they write.

    ``aborts``, on versions: ``eager``, a write waits for the checks of its transaction; ``lazy``, it does not: at the
    end, failed transactions are undone and their readers are redone; ``redo``, TStream's: the whole batch runs again
    without the failed transactions, until no more fail.

    >>> str(Strategy("queue", "operation", "lazy")), str(SERIAL)
    ('queue/operation/lazy', 'serial')
    """

    exploration: Exploration
    granularity: Granularity = "transaction"
    aborts: Aborts = "eager"

    def __str__(self) -> str:
        if self.exploration in ("serial", "partitions"):
            return self.exploration
        if self.on_versions:
            return f"{self.exploration}/{self.granularity}/{self.aborts}"
        return f"{self.exploration}/{self.granularity}"

    @property
    def on_versions(self) -> bool:
        """Whether it keeps a version of every write instead of working in place."""
        return self.granularity in ("operation", "chain")


SERIAL = Strategy("serial")
S_STORE = Strategy("partitions")
"""S-Store's: each thread owns a partition of the keys, and runs its transactions serially, in timestamp order. A
transaction that touches several partitions waits for its turn in each of them, and all of them wait for it. It works in
place, and decides on aborts before it writes, so nothing is ever undone."""
T_STREAM = Strategy("queue", "chain", "redo")
"""TStream's: all operations on a key form a chain, which one thread runs in timestamp order. Chains run in parallel;
chains that need each other's values in a cycle become one. Conditions do not hold back the writes of their transaction:
if some fail, the whole batch runs again without these transactions, until nothing changes."""

_EXPLORATIONS: tuple[Exploration, ...] = ("strata", "depth", "queue")

FIXED: tuple[Strategy, ...] = (
    SERIAL,
    *(Strategy(exploration, "transaction") for exploration in _EXPLORATIONS),
    Strategy("queue", "component"),
    *(
        Strategy(exploration, granularity, aborts)
        for exploration in _EXPLORATIONS
        for granularity in ("operation", "chain")
        for aborts in ("eager", "lazy")
    ),
)
"""All strategies from which the engine chooses."""
