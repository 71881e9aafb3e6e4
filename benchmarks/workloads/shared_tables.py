"""What the workloads of transactions have in common: popular keys, costly functions, and the oracle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from midstream.txn import Batch, Program
from midstream.txn.serial import SerialTables, TransactionOutcome, run_serially

__all__ = ["oracle", "popular", "rounds_for", "spin"]

Array = npt.NDArray[Any]


@numba.njit(nogil=True)
def spin(value: float, rounds: int) -> float:
    """Keep a core busy, and give back the value: a function of the user's that costs something."""
    x = 1.0
    for _ in range(rounds):
        x = x * 1.0000001 + 1e-9
    return value + (x - x)


@cache
def rounds_for(microseconds: float) -> int:
    """How many rounds of :func:`spin` take that long on this machine."""
    if not microseconds:
        return 0
    spin(1.0, 10)
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        spin(1.0, 1_000_000)
        best = min(best, time.thread_time() - began)
    return max(1, round(microseconds * 1e-6 / (best / 1_000_000)))


def popular(rng: np.random.Generator, keys: int, size: int | tuple[int, ...], skew: float) -> Array:
    """Keys whose popularity falls with their rank to the power of ``skew``; 0 makes all alike. Ranks are shuffled.

    >>> np.bincount(popular(np.random.default_rng(1), 3, 1000, 5.0)).max() > 900
    np.True_
    """
    weights = np.arange(1, keys + 1, dtype=float) ** -skew
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(size))
    return np.random.default_rng(0).permutation(keys)[np.minimum(ranks, keys - 1)]


def oracle(program: Program, batches: Sequence[Batch]) -> tuple[list[list[TransactionOutcome]], SerialTables]:
    """What must come out of each batch, and the tables afterwards: one transaction after the other, on dictionaries."""
    tables = SerialTables()
    outcomes = []
    for batch in batches:
        columns = {name: column.tolist() for name, column in batch.columns.items()}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        events = zip(batch.timestamps.tolist(), batch.kinds.tolist(), rows, strict=True)
        outcomes.append(run_serially(program.types, events, tables))
    return outcomes, tables
