"""GS, GrepSum of the MorphStream paper: read some keys, write their mean to another.

Plain; *windowed*, where most events only write and some sum up what was written lately; *non-deterministic*, where the
key to write is only known when the others have been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from benchmarks.workloads.shared_tables import popular, rounds_for, spin
from midstream.txn import Batch, Program, Table, transaction

__all__ = ["Knobs", "batches", "plain", "wandering", "windowed"]

records = Table("records", key="bigint", value="bigint", default=100)
measured = Table("measured", key="bigint", value="double", default=1.0)


@dataclass(frozen=True)
class Knobs:
    """The paper's, with its defaults. ``cost`` is in microseconds per written value."""

    keys: int = 10_000
    skew: float = 0.2
    aborts: float = 0.01
    length: int = 1
    cost: float = 10.0
    reads: int = 2
    interval: int = 10_240
    window: int = 1_000
    every: int = 100  # one event in this number reads windows
    wandering: float = 0.1  # share of events whose key is only known while running
    seed: int = 1


def _columns(knobs: Knobs) -> dict[str, str]:
    names = [f"w{step}" for step in range(knobs.length)]
    names += [f"r{step}_{read}" for step in range(knobs.length) for read in range(knobs.reads)]
    return dict.fromkeys((*names, "rounds"), "bigint") | {"valid": "boolean"}


def plain(knobs: Knobs) -> Program:
    """``length`` means of ``reads`` keys each, all or nothing. The events say how much functions cost, if anything."""

    @transaction
    def grep_sum(t: Any, e: Any) -> None:
        t.require(e.valid, "not valid")
        for step in range(knobs.length):
            mean = sum(t.read(records, e[f"r{step}_{read}"]) for read in range(knobs.reads)) // knobs.reads
            if knobs.cost:
                mean = t.floor(t.call(spin, mean * 1.0, e.rounds))
            t.write(records, e[f"w{step}"], mean)

    return Program.of(grep_sum.trace(_columns(knobs)))


def windowed(knobs: Knobs) -> Program:
    """Type 0 writes, type 1 sums up windows of the keys that it reads."""

    @transaction
    def update(t: Any, e: Any) -> None:
        value = t.read(measured, e.w0) + 1.0
        t.write(measured, e.w0, t.call(spin, value, e.rounds) if knobs.cost else value)

    @transaction
    def query(t: Any, e: Any) -> dict[str, Any]:
        total = sum(t.window(measured, e[f"r0_{read}"], knobs.window, "sum") for read in range(knobs.reads))
        return {"total": total}

    return Program.of(update.trace(_columns(knobs)), query.trace(_columns(knobs)))


@numba.njit
def _target(total: int, keys: int) -> int:
    return total * 31 % keys


def wandering(knobs: Knobs) -> Program:
    """Type 0 is plain; type 1 writes the sum to a key that follows from it."""
    (plain_type,) = plain(knobs).types

    @transaction
    def wander(t: Any, e: Any) -> None:
        total = sum(t.read(records, e[f"r0_{read}"]) for read in range(knobs.reads))
        value = t.floor(t.call(spin, total * 1.0, e.rounds)) if knobs.cost else total
        t.write(records, t.key(_target, total, knobs.keys), value % 1000)

    return Program.of(plain_type, wander.trace(_columns(knobs)))


def batches(knobs: Knobs, sort: str = "plain") -> Iterator[Batch]:
    """Punctuation intervals without end, for ``plain``, ``windowed`` or ``wandering``.

    >>> len(next(batches(Knobs(interval=50, reads=3))).columns)
    7
    """
    rng = np.random.default_rng(knobs.seed)
    start = 0
    while True:
        size = knobs.interval
        columns: dict[str, Any] = {
            name: popular(rng, knobs.keys, size, knobs.skew)
            for name in _columns(knobs)
            if name not in ("valid", "rounds")
        }
        columns["rounds"] = np.full(size, rounds_for(knobs.cost))
        columns["valid"] = rng.random(size) >= knobs.aborts
        columns["timestamp"] = np.arange(start, start + size)
        kinds = np.zeros(size, np.int8)
        if sort == "windowed":
            kinds[knobs.every - 1 :: knobs.every] = 1
        elif sort == "wandering":
            kinds[rng.random(size) < knobs.wandering] = 1
        yield Batch.of(columns, order_by="timestamp", kinds=kinds)
        start += size
