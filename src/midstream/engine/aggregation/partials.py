"""Partials: aggregates of some rows of some keys, and how the partials of a key are combined."""

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
    """Totals of keys (a key may occur several times) and, with windows, of times within keys."""

    keys: pa.Array
    """Stored keys."""
    times: tuple[Integers, ...]
    totals: Totals

    def __len__(self) -> int:
        return len(self.keys)


class Tally:
    """The partials of a task: takes those of each block, and combines them whenever their number has doubled.

    So memory is proportional to the keys touched, not to the rows, and each partial is combined only a few times.
    """

    def __init__(self, totals: TotalsOf, combine: Callable[[Partials], Partials]) -> None:
        self._totals = totals
        self._combine = combine
        self._parts: list[Partials] = []
        self._size = 0
        self._least = max(_COMPACT_LEAST, _COMPACT_BYTES // totals.width)
        self._limit = self._least

    def add(self, partials: Partials) -> None:
        """Add the partials of a block."""
        self._parts.append(partials)
        self._size += len(partials)
        if self._size > self._limit:
            self._parts = [self._combined()]
            self._size = len(self._parts[0])
            self._limit = max(self._least, 2 * self._size)

    def __len__(self) -> int:
        """The number of partials held."""
        return self._size

    def take(self) -> Partials | None:
        """All partials, combined; None if there were no rows."""
        return self._combined() if self._parts else None

    def _combined(self) -> Partials:
        return self._combine(joined(self._totals, self._parts))


def joined(totals: TotalsOf, parts: Sequence[Partials]) -> Partials:
    """The parts concatenated."""
    if len(parts) == 1:
        return parts[0]
    return Partials(
        pa.concat_arrays([part.keys for part in parts]),
        tuple(np.concatenate(times) for times in zip(*(part.times for part in parts), strict=True)),
        totals.joined([part.totals for part in parts]),
    )


def by_key(totals: TotalsOf) -> Callable[[Partials], Partials]:
    """Combines partials with the same key."""

    def combine(partials: Partials) -> Partials:
        codes, count = codes_of(partials.keys)
        runs = runs_of(codes, count)
        firsts = runs.order[runs.starts]
        return Partials(partials.keys.take(pa.array(firsts)), (), totals.combined(partials.totals, runs))

    return combine


def by_key_and_time(totals: TotalsOf) -> Callable[[Partials], Partials]:
    """Combines partials with the same key and time."""

    def combine(partials: Partials) -> Partials:
        codes, count = codes_of(partials.keys, *partials.times)
        runs = runs_of(codes, count)
        firsts = runs.order[runs.starts]
        times = tuple(time[firsts] for time in partials.times)
        return Partials(partials.keys.take(pa.array(firsts)), times, totals.combined(partials.totals, runs))

    return combine


def by_session(totals: TotalsOf, gap: int) -> Callable[[Partials], Partials]:
    """Combines partials with the same key that are less than a gap apart; the times are a session's first and last."""

    def combine(partials: Partials) -> Partials:
        return of_sessions(totals, partials, session_runs(partials, gap))

    return combine


def of_sessions(totals: TotalsOf, partials: Partials, runs: Runs) -> Partials:
    """The combination of each run of sessions."""
    first, last = partials.times
    firsts = runs.order[runs.starts]  # sessions in a run are ordered by their start
    lasts = np.maximum.reduceat(last[runs.order], runs.starts)
    keys = partials.keys.take(pa.array(firsts))
    return Partials(keys, (first[firsts], lasts), totals.combined(partials.totals, runs))


def session_runs(sessions: Partials, gap: int) -> Runs:
    """Runs of sessions that are really one, because less than a gap lies between them."""
    first, last = sessions.times
    codes, count = codes_of(sessions.keys)
    order = np.argsort(first, kind="stable")
    order = order[order_by(codes[order], count)]
    code, begin, end = codes[order], first[order], last[order]
    return Runs(order, session_starts(code, begin, _furthest(code, end), gap))


def session_starts(code: Integers, begin: Integers, furthest: Integers, gap: int) -> Integers:
    """Where sessions begin, in order of key and time; ``furthest`` is the latest end of the key so far."""
    differs = (code[1:] != code[:-1]) | (begin[1:] - furthest[:-1] >= gap)
    return starts_where(differs, len(code))


def _furthest(code: Integers, end: Integers) -> Integers:
    """The largest end so far within each code; codes ascend."""
    ends, rank = np.unique(end, return_inverse=True)
    # A later code exceeds all ranks of the previous one, so a single running maximum is enough.
    floor = code * len(ends)
    return ends[np.maximum.accumulate(floor + rank) - floor]


def codes_of(keys: pa.Array, *times: Integers) -> tuple[Integers, int]:
    """A number per element, without gaps, equal exactly if key and times are; and their count."""
    encoded = keys.dictionary_encode()
    return with_times(_indices(encoded), len(encoded.dictionary), *times)


def with_times(codes: Integers, count: int, *times: Integers) -> tuple[Integers, int]:
    """Codes that also distinguish times."""
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
