"""distinct: the first row of each key passes, the others vanish.

With ``within_us`` a key is remembered until the watermark has come that far beyond the time of its first row: it is
forgotten at the end of that epoch, and the next row of the key passes again. State holds the keys, and then a mark for
each under the time at which it is to be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.times import EpochTimes
from midstream.engine.aggregation.runs import Integers
from midstream.engine.bad_rows import Aside, Screen
from midstream.engine.keyed_rows import checked_times, ended_by, found_keys, refuse_nulls
from midstream.engine.steps import ONLY, AtWork
from midstream.flow.model import Distinct, Operator
from midstream.state.key_arrays import split_timers, timer_keys
from midstream.state.keys import Namespace
from midstream.state.task import TaskState

__all__ = ["distinct_at_work"]


def distinct_at_work(
    operator: Operator, spec: Distinct, takes: pa.Schema, state: TaskState, times: EpochTimes
) -> AtWork:
    """A distinct in place in a task."""
    form = _DistinctStep(operator, spec, state, times)
    return AtWork((form.take,), form.finish, is_quiet=True)


class _DistinctStep:
    """Keys that were met in this epoch are remembered here; state is asked once for each, and told at the end."""

    def __init__(self, operator: Operator, spec: Distinct, state: TaskState, times: EpochTimes) -> None:
        self._operator = operator
        self._spec = spec
        self._state = state
        self._times = times
        self._screen = Screen(Aside(operator), spec.keys, () if spec.time is None else (spec.time,))
        self._met: set[bytes] = set()
        self._new: dict[bytes, int] = {}
        """The keys whose first row was in this epoch, and when it is time to forget them."""

    def take(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """The rows of a slice that are the first of their keys."""
        batch, aside = self._screen(batch)
        refuse_nulls(self._operator, batch, self._spec.keys, "a key")
        forget = self._forget_at(batch)
        keys = found_keys(self._operator, batch, self._spec.keys, f"distinct {self._operator.name!r}")
        candidates = keys.stored.to_pylist()
        unmet = sorted(key for key in candidates if key not in self._met)
        self._met.update(unmet)
        stored = self._state.get_many(unmet)
        new = {key for key, value in zip(unmet, stored, strict=True) if value is None}
        if not new:
            return aside
        rows = keys.first_row[[key in new for key in candidates]]
        self._new.update(zip((key for key in candidates if key in new), forget[rows].tolist(), strict=True))
        return {ONLY: batch if len(rows) == batch.num_rows else batch.take(pa.array(rows)), **aside}

    def finish(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Remember what was new, and forget what is due. Emits nothing."""
        watermark = self._times.watermark if self._spec.within_us is not None else None
        due = list(ended_by(self._state, Namespace.EXPIRY, watermark))
        if due:
            self._state.delete_many(due)
            self._state.delete_many(split_timers(pa.array(due, pa.binary()))[1].to_pylist())
        kept = {key: time for key, time in self._new.items() if watermark is None or time > watermark}
        keys = sorted(kept)
        self._state.put_many(keys, [b""] * len(keys))
        if self._spec.within_us is not None and keys:
            times = np.fromiter((kept[key] for key in keys), np.int64, len(keys))
            marks = timer_keys(pa.array(keys, pa.binary()), Namespace.EXPIRY, times)
            ordered = marks.take(pc.sort_indices(marks)).to_pylist()
            self._state.put_many(ordered, [b""] * len(ordered))
        yield from ()

    def _forget_at(self, batch: pa.RecordBatch) -> Integers:
        if self._spec.within_us is None or self._spec.time is None:
            return np.zeros(batch.num_rows, np.int64)
        return checked_times(self._operator, batch, self._spec.time) + self._spec.within_us
