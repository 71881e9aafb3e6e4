"""Ways to run a batch: how the dependency graph is explored, what runs as one, and when aborts are dealt with."""

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

    ``exploration``: ``serial``, one transaction after the other; ``strata``, all units that depend on nothing, then all
    that depend on these only, and so on; ``depth``, every thread has its share of each stratum and waits only for what
    a unit needs; ``queue``, whatever is ready. ``partitions`` is S-Store's.

    ``granularity``: what a thread takes on as one. Operations and chains (all operations on a key) work on versions;
    whole transactions and components (transactions that share keys, directly or not) work in place, and know whether
    they abort before they write.

    ``aborts``, on versions: ``eager``, a write waits for the checks of its transaction; ``lazy``, it does not, and when
    all has been explored, what failed is taken back and what had read it is redone; ``redo``, TStream's: the whole
    batch again, without those that failed, until nothing more fails.

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
        """Whether it keeps a version for every write, rather than working in place."""
        return self.granularity in ("operation", "chain")


SERIAL = Strategy("serial")
S_STORE = Strategy("partitions")
"""As S-Store does it: each thread owns a part of the keys, and runs the transactions on it one after the other, in the
order of their timestamps. One that touches several parts waits for its turn in each of them, and all of them wait for
it. It works in place, and decides on aborts before it writes, so nothing is ever undone."""
T_STREAM = Strategy("queue", "chain", "redo")
"""As TStream does it: all operations on a key are a chain, which one thread runs in the order of timestamps; chains run
in parallel, and those that need each other's values in a circle become one. Conditions do not hold back the writes of
their transaction: when some fail, the whole batch is done again without these transactions, until nothing changes."""

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
"""All strategies that the engine chooses from."""
