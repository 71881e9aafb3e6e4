"""Sorted runs: the in-memory rows of one side of a join, searched by key and instant in bulk.

A slice becomes a run by sorting it. Runs of similar size are merged, so their number is logarithmic in the number of
slices, and each row is moved that many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["SortedRun", "SortedRuns", "expand"]

_Integers = npt.NDArray[np.int64]
_Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SortedRun:
    """Rows sorted by key and instant (a point in time). Keys are numbers assigned by the task.

    >>> batch = pa.record_batch({"name": ["a", "b", "c"]})
    >>> run = SortedRun.of(batch, keys=np.array([1, 0, 1]), instants=np.array([50, 10, 30]))
    >>> run.taken().column("name").to_pylist()
    ['b', 'c', 'a']
    >>> probe = SortedRun.of(batch.slice(0, 2), keys=np.array([1, 2]), instants=np.array([42, 42]))
    >>> [bounds.tolist() for bounds in run.partners_of(probe, reach=8)]
    [[2, 3], [3, 3]]
    """

    batch: pa.RecordBatch
    instants: _Integers
    """The distinct instants, ascending."""
    codes: _Integers
    """Key times the number of instants plus the instant's rank; ascending. One per row, like the fields below."""
    rows: _Integers
    """The position of each row in the batch."""
    matched: _Booleans
    """The rows that have found a partner while in memory; the only mutable part of a run."""

    @classmethod
    def of(cls, batch: pa.RecordBatch, keys: _Integers, instants: _Integers) -> SortedRun:
        """Sort the rows of a batch, given the key and the instant of each."""
        distinct, ranks = np.unique(instants, return_inverse=True)
        codes = keys * len(distinct) + ranks
        rows = np.argsort(codes, kind="stable")
        return cls(batch, distinct, codes[rows], rows, np.zeros(len(rows), np.bool_))

    @classmethod
    def merged(cls, runs: Sequence[SortedRun]) -> SortedRun:
        """Several runs merged into one."""
        if len(runs) == 1:
            return runs[0]
        instants = _distinct(np.concatenate([run.instants for run in runs]))
        codes = np.concatenate(
            [run.keys * len(instants) + np.searchsorted(instants, run.instants)[run.ranks] for run in runs]
        )
        order = np.argsort(codes, kind="stable")
        starts = np.cumsum([0, *(run.batch.num_rows for run in runs[:-1])])
        return cls(
            pa.concat_batches([run.batch for run in runs]),
            instants,
            codes[order],
            np.concatenate([run.rows + start for run, start in zip(runs, starts, strict=True)])[order],
            np.concatenate([run.matched for run in runs])[order],
        )

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def keys(self) -> _Integers:
        """The key of each row."""
        return self.codes // max(len(self.instants), 1)

    @cached_property
    def ranks(self) -> _Integers:
        """The index of each row's instant among the distinct ones."""
        return self.codes % max(len(self.instants), 1)

    @property
    def times(self) -> _Integers:
        """The instant of each row."""
        return self.instants[self.ranks]

    def firsts(self, width: int = 1) -> _Integers:
        """The positions where a new key, or a new range of instants of this width, begins."""
        ranges = (self.instants // width)[self.ranks]
        new = (self.keys[1:] != self.keys[:-1]) | (ranges[1:] != ranges[:-1])
        return np.concatenate((np.zeros(min(len(self), 1), np.int64), np.flatnonzero(new) + 1))

    def partners_of(self, other: SortedRun, reach: int) -> tuple[_Integers, _Integers]:
        """The range of partners in this run for each row of another run; starts and stops ascend."""
        first = np.searchsorted(self.instants, other.instants - reach)
        behind = np.searchsorted(self.instants, other.instants + reach, side="right")
        keys = other.keys * len(self.instants)
        # `behind` may be the number of instants; the code is then the lowest possible code of the next key.
        return (
            np.searchsorted(self.codes, keys + first[other.ranks]),
            np.searchsorted(self.codes, keys + behind[other.ranks]),
        )

    def mark(self, starts: _Integers, stops: _Integers) -> None:
        """Mark the rows in these ranges as having a partner. Starts and stops ascend; ranges may overlap."""
        starts = np.maximum(starts, np.concatenate((starts[:1], stops[:-1])))
        _, found = expand(starts, np.maximum(stops - starts, 0))
        self.matched[found] = True

    def part(self, chosen: _Booleans) -> SortedRun:
        """A run of some of the rows."""
        return SortedRun(self.batch, self.instants, self.codes[chosen], self.rows[chosen], self.matched[chosen])

    def taken(self) -> pa.RecordBatch:
        """The rows themselves, in order."""
        return self.batch.take(pa.array(self.rows))


@dataclass
class SortedRuns:
    """Runs of geometrically decreasing sizes."""

    schema: pa.Schema
    _runs: list[SortedRun] = field(default_factory=list)

    def add(self, run: SortedRun) -> None:
        """Add a run, and merge runs that have reached similar sizes."""
        tail = 1
        size = len(run)
        while tail <= len(self._runs) and len(self._runs[-tail]) <= 2 * size:
            size += len(self._runs[-tail])
            tail += 1
        at = len(self._runs) - (tail - 1)
        self._runs[at:] = [SortedRun.merged([*self._runs[at:], run])]

    def all(self) -> SortedRun:
        """All rows as one run."""
        if not self._runs:
            nothing = np.empty(0, np.int64)
            self._runs = [SortedRun.of(pa.RecordBatch.from_pylist([], self.schema), nothing, nothing)]
        self._runs = [SortedRun.merged(self._runs)]
        return self._runs[0]

    def __iter__(self) -> Iterator[SortedRun]:
        return iter(self._runs)


def _distinct(runs: _Integers) -> _Integers:
    """Distinct values. Unlike ``np.unique``, which hashes, a stable sort merges the sorted runs in one pass."""
    merged = np.sort(runs, kind="stable")
    is_first = np.ones(len(merged), np.bool_)
    is_first[1:] = merged[1:] != merged[:-1]
    return merged[is_first]


def expand(starts: _Integers, counts: _Integers) -> tuple[_Integers, _Integers]:
    """The elements of many ranges: for each, the index of its range, and its value.

    >>> [each.tolist() for each in expand(np.array([5, 0, 8]), np.array([2, 0, 1]))]
    [[0, 0, 2], [5, 6, 8]]
    """
    owners = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    return owners, np.arange(len(owners)) + (starts - ends + counts)[owners]
