"""Partials: what some rows of some keys have come to, and how the partials of a key become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.aggregation.runs import Integers, Runs, order_by, runs_of, starts_where
from midstream.engine.aggregation.totals import Totals, TotalsOf

__all__ = [
    "Partials",
    "Tally",
    "by_key",
    "by_key_and_time",
    "by_session",
    "codes_of",
    "joined",
    "of_sessions",
    "session_runs",
    "session_starts",
    "with_times",
]

_COMPACT_BYTES = 1 << 25
_COMPACT_LEAST = 1 << 12


@dataclass(frozen=True)
class Partials:
    """Totals of keys (the same key may occur several times) and, with windows, of times within keys."""

    keys: pa.Array
    """Stored keys."""
    times: tuple[Integers, ...]
    totals: Totals

    def __len__(self) -> int:
        return len(self.keys)


class Tally:
    """The partials of a task: takes those of each block, and combines them whenever they have doubled.

    So it holds in proportion to the keys touched, not to the rows, and a partial takes part in few combinations.
    """

    def __init__(self, totals: TotalsOf, combine: Callable[[Partials], Partials]) -> None:
        self._totals = totals
        self._combine = combine
        self._parts: list[Partials] = []
        self._size = 0
        self._least = max(_COMPACT_LEAST, _COMPACT_BYTES // totals.width)
        self._limit = self._least

    def add(self, partials: Partials) -> None:
        """Take the partials of a block."""
        self._parts.append(partials)
        self._size += len(partials)
        if self._size > self._limit:
            self._parts = [self._combined()]
            self._size = len(self._parts[0])
            self._limit = max(self._least, 2 * self._size)

    def __len__(self) -> int:
        """How many partials are held."""
        return self._size

    def take(self) -> Partials | None:
        """All of it, combined; nothing when there were no rows."""
        return self._combined() if self._parts else None

    def _combined(self) -> Partials:
        return self._combine(joined(self._totals, self._parts))


def joined(totals: TotalsOf, parts: Sequence[Partials]) -> Partials:
    """One part behind the other."""
    if len(parts) == 1:
        return parts[0]
    return Partials(
        pa.concat_arrays([part.keys for part in parts]),
        tuple(np.concatenate(times) for times in zip(*(part.times for part in parts), strict=True)),
        totals.joined([part.totals for part in parts]),
    )


def by_key(totals: TotalsOf) -> Callable[[Partials], Partials]:
    """Combines what has one key."""

    def combine(partials: Partials) -> Partials:
        codes, count = codes_of(partials.keys)
        runs = runs_of(codes, count)
        firsts = runs.order[runs.starts]
        return Partials(partials.keys.take(pa.array(firsts)), (), totals.combined(partials.totals, runs))

    return combine


def by_key_and_time(totals: TotalsOf) -> Callable[[Partials], Partials]:
    """Combines what has one key and one time."""

    def combine(partials: Partials) -> Partials:
        codes, count = codes_of(partials.keys, *partials.times)
        runs = runs_of(codes, count)
        firsts = runs.order[runs.starts]
        times = tuple(time[firsts] for time in partials.times)
        return Partials(partials.keys.take(pa.array(firsts)), times, totals.combined(partials.totals, runs))

    return combine


def by_session(totals: TotalsOf, gap: int) -> Callable[[Partials], Partials]:
    """Combines what has one key and is less than a gap apart; the times are the first and the last of a session."""

    def combine(partials: Partials) -> Partials:
        return of_sessions(totals, partials, session_runs(partials, gap))

    return combine


def of_sessions(totals: TotalsOf, partials: Partials, runs: Runs) -> Partials:
    """What each run of sessions comes to together."""
    first, last = partials.times
    firsts = runs.order[runs.starts]  # runs are ordered by their sessions' firsts
    lasts = np.maximum.reduceat(last[runs.order], runs.starts)
    keys = partials.keys.take(pa.array(firsts))
    return Partials(keys, (first[firsts], lasts), totals.combined(partials.totals, runs))


def session_runs(sessions: Partials, gap: int) -> Runs:
    """Which sessions are really one, because less than a gap lies between them."""
    first, last = sessions.times
    codes, count = codes_of(sessions.keys)
    order = np.argsort(first, kind="stable")
    order = order[order_by(codes[order], count)]
    code, begin, end = codes[order], first[order], last[order]
    return Runs(order, session_starts(code, begin, _furthest(code, end), gap))


def session_starts(code: Integers, begin: Integers, furthest: Integers, gap: int) -> Integers:
    """Where sessions begin among what is ordered by key and time; ``furthest`` is how far a key has come by then."""
    differs = (code[1:] != code[:-1]) | (begin[1:] - furthest[:-1] >= gap)
    return starts_where(differs, len(code))


def _furthest(code: Integers, end: Integers) -> Integers:
    """The largest end so far within each code; codes ascend."""
    ends, rank = np.unique(end, return_inverse=True)
    # A later code outdoes all ranks of the one before, so one running maximum serves all.
    floor = code * len(ends)
    return ends[np.maximum.accumulate(floor + rank) - floor]


def codes_of(keys: pa.Array, *times: Integers) -> tuple[Integers, int]:
    """A number for each element, equal exactly where key and times are, without gaps; and how many there are."""
    encoded = keys.dictionary_encode()
    return with_times(_indices(encoded), len(encoded.dictionary), *times)


def with_times(codes: Integers, count: int, *times: Integers) -> tuple[Integers, int]:
    """Codes that differ by times too."""
    for time in times:
        if not len(time) or time.min() == time.max():
            continue
        encoded = pa.array(time).dictionary_encode()
        pairs = pa.array(codes * len(encoded.dictionary) + _indices(encoded)).dictionary_encode()
        codes, count = _indices(pairs), len(pairs.dictionary)
    return codes, count


def _indices(encoded: pa.DictionaryArray) -> npt.NDArray[np.int64]:
    found: Integers = encoded.indices.to_numpy().astype(np.int64)
    return found
