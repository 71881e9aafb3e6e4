"""Finds the keys with the most rows in a task, from a few rows of each slice.

Counting all rows would cost as much as a cheap operator does. So at most 32 rows of a slice are sampled, evenly at
random, which takes 20 microseconds; after the first few slices of a task, only one slice every 10 ms is sampled. Each
row stands for its share of those that came since the last look.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from midstream.flow.knobs import knob_value
from midstream.metrics import HeavyKeys

__all__ = ["LOOKED_AT", "KeySampler"]

LOOKED_AT = knob_value({}, "key_sample")
"""Most rows of a slice that are looked at, unless the knob ``key_sample`` says otherwise."""
FIRST_LOOKS = 4
"""Slices at the beginning of a task that are all sampled."""
BETWEEN_LOOKS_NS = 10_000_000
HELD = 512
"""Most keys counted at a time."""
TEXT = 80
"""Most characters of a key's text; longer keys with the same beginning count as one."""


class KeySampler:
    """Samples the keys of one key_by in one task.

    >>> sampler = KeySampler(["k"])
    >>> sampler.note(pa.record_batch({"k": ["a", "b", "a"]}), now_ns=0)
    >>> sampler.found().counts
    {"'a'": 2, "'b'": 1}
    """

    def __init__(self, columns: Sequence[str], looked_at: int = LOOKED_AT) -> None:
        self._columns = tuple(columns)
        self._looked_at = looked_at
        self._counts: dict[str, float] = {}
        self._rows = 0
        self._unseen = 0
        """Rows since the last look."""
        self._looks = 0
        self._next_ns = 0
        self._missed = 0.0
        self._random = np.random.default_rng(7)

    def note(self, batch: pa.RecordBatch, now_ns: int) -> None:
        """Note a slice, and perhaps sample some of its rows. ``now_ns`` never goes back."""
        rows = batch.num_rows
        self._rows += rows
        self._unseen += rows
        if not rows or (now_ns < self._next_ns and self._looks >= FIRST_LOOKS):
            return
        self._looks += 1
        self._next_ns = now_ns + BETWEEN_LOOKS_NS
        columns = [batch.column(name) for name in self._columns]
        if rows > self._looked_at:
            chosen = pa.array(self._random.integers(0, rows, self._looked_at))
            columns = [column.take(chosen) for column in columns]
        weight = self._unseen / min(rows, self._looked_at)
        self._unseen = 0
        counts = self._counts
        for values in zip(*(column.to_pylist() for column in columns), strict=True):
            key = ", ".join(map(repr, values))[:TEXT]
            counts[key] = counts.get(key, 0.0) + weight
        if len(counts) > HELD:
            self._shrink()

    def found(self) -> HeavyKeys:
        """The heaviest keys so far. Rows since the last look are taken to be like those before."""
        scale = self._rows / max(1, self._rows - self._unseen)
        counts = {key: round(scale * count) for key, count in self._counts.items()}
        return HeavyKeys.of(counts, self._rows, round(scale * self._missed))

    def _shrink(self) -> None:
        """Reduce all counts by as much as brings half of them to zero (Misra and Gries)."""
        ordered = sorted(self._counts.values())
        least = ordered[len(ordered) // 2]
        self._missed += least
        self._counts = {key: count - least for key, count in self._counts.items() if count > least}
