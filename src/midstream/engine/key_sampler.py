"""Finds the keys with the most rows in a task, from a few rows of each slice.

Counting all rows would cost as much as a cheap operator does. So at most 32 rows of a slice are looked at, chosen
evenly at random, and each stands for its share of the slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from midstream.metrics import HeavyKeys

__all__ = ["KeySampler"]

LOOKED_AT = 32
"""Most rows of a slice that are looked at."""
HELD = 512
"""Most keys that are counted at a time."""
TEXT = 80
"""Most characters of a key's text; longer keys that begin alike count as one."""


class KeySampler:
    """Of one key_by in one task. The same rows in the same slices give the same counts.

    >>> sampler = KeySampler(["k"])
    >>> sampler.note(pa.record_batch({"k": ["a", "b", "a"]}))
    >>> sampler.found().counts
    {"'a'": 2, "'b'": 1}
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._counts: dict[str, float] = {}
        self._rows = 0
        self._missed = 0.0
        self._random = np.random.default_rng(7)

    def note(self, batch: pa.RecordBatch) -> None:
        """Look at some rows of a slice."""
        rows = batch.num_rows
        if not rows:
            return
        columns = [batch.column(name) for name in self._columns]
        weight = 1.0
        if rows > LOOKED_AT:
            chosen = pa.array(self._random.integers(0, rows, LOOKED_AT))
            columns = [column.take(chosen) for column in columns]
            weight = rows / LOOKED_AT
        self._rows += rows
        counts = self._counts
        for values in zip(*(column.to_pylist() for column in columns), strict=True):
            key = ", ".join(map(repr, values))[:TEXT]
            counts[key] = counts.get(key, 0.0) + weight
        if len(counts) > HELD:
            self._shrink()

    def found(self) -> HeavyKeys:
        """The heaviest keys so far."""
        counts = {key: round(count) for key, count in self._counts.items()}
        return HeavyKeys.of(counts, self._rows, round(self._missed))

    def _shrink(self) -> None:
        """Take as much from all counts as makes half of them nothing (Misra and Gries)."""
        ordered = sorted(self._counts.values())
        least = ordered[len(ordered) // 2]
        self._missed += least
        self._counts = {key: count - least for key, count in self._counts.items() if count > least}
