"""distinct: passes the first row of each key and drops the others.

With ``within_us`` a key is forgotten at the end of the epoch in which the watermark gets that far past the time of the
key's first row; the next row of the key passes again. State holds the keys and, with ``within_us``, an expiry mark for
each key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.durations import duration
from midstream.data.schema import columns_of
from midstream.data.times import EpochTimes
from midstream.engine.aggregation.runs import Integers
from midstream.engine.bad_rows import ErrorsBranch, Screen
from midstream.engine.initial_rows import fitted, replay, require_unique
from midstream.engine.keyed_rows import checked_times, ended_by, found_keys, refuse_nulls
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import ONLY, OperatorInTask
from midstream.errors import FlowError
from midstream.flow.model import Operator
from midstream.flow.spec import InputChange
from midstream.flow.validate import check_name
from midstream.operators.rows import KeyedRows
from midstream.state.contents import in_namespace, keys_of
from midstream.state.key_arrays import decode_keys, split_timers, timer_keys
from midstream.state.keys import Namespace
from midstream.state.task import TaskState


@dataclass(frozen=True)
class Distinct(TaskSpec):
    """Passes the first row of each key; with ``within_us`` the key is forgotten that long after that row's ``time``."""

    kind: ClassVar[str] = "distinct"
    is_stateful: ClassVar[bool] = True

    keys: tuple[str, ...]
    time: str | None = None
    within_us: int | None = None

    def kept(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """All columns stay as they are."""
        return columns

    @property
    def keyed_by(self) -> tuple[str, ...]:
        """The key columns."""
        return self.keys

    def check_input(self, change: InputChange) -> None:
        """The key columns must stay the same, and the event time if keys expire."""
        change.require(self.keys if self.time is None else (*self.keys, self.time))

    def instantiate(self, operator: Operator, parts: Parts) -> OperatorInTask:
        """See :func:`instantiate_distinct`."""
        return instantiate_distinct(operator, self, parts.takes(operator)[0], parts.state(operator), parts.times)

    def load_initial(
        self, operator: Operator, takes: Sequence[pa.Schema], table: pa.Table, state: TaskState, clock: int
    ) -> None:
        """Keys that were seen; with ``within``, and the time of the first row of each."""
        what = f"distinct {operator.name!r}"
        needed = dict.fromkeys([*self.keys, *(() if self.time is None else (self.time,))])
        rows = fitted(table, [takes[0].field(name) for name in needed], what)
        require_unique(rows, self.keys, what)
        replay(instantiate_distinct(operator, self, takes[0], state, EpochTimes(clock)), rows, takes[0], what)

    def shown_state(self, operator: Operator, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        """The keys that were seen."""
        schema = columns_of(takes[0], self.keys)
        keys = keys_of(in_namespace(rows, Namespace.VALUE))
        return pa.Table.from_arrays(decode_keys(keys, schema), schema=schema)


def instantiate_distinct(
    operator: Operator, spec: Distinct, takes: pa.Schema, state: TaskState, times: EpochTimes
) -> OperatorInTask:
    """Build a distinct in a task."""
    form = _DistinctStep(operator, spec, state, times)
    return OperatorInTask((form.take,), form.finish, is_quiet=True)


class _DistinctStep:
    """Remembers the keys of this epoch in memory; state is read once per key, and written at the end."""

    def __init__(self, operator: Operator, spec: Distinct, state: TaskState, times: EpochTimes) -> None:
        self._operator = operator
        self._spec = spec
        self._state = state
        self._times = times
        self._screen = Screen(ErrorsBranch(operator), spec.keys, () if spec.time is None else (spec.time,))
        self._met: set[bytes] = set()
        self._new: dict[bytes, int] = {}
        """The keys whose first row was in this epoch, and the times at which they expire."""

    def take(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Pass the rows of a slice that are the first of their keys."""
        batch, bad = self._screen(batch)
        refuse_nulls(self._operator, batch, self._spec.keys, "a key")
        forget = self._forget_at(batch)
        keys = found_keys(
            self._operator, batch, self._spec.keys, f"distinct {self._operator.name!r}", self._state.space
        )
        candidates = keys.stored.to_pylist()
        unmet = sorted(key for key in candidates if key not in self._met)
        self._met.update(unmet)
        stored = self._state.get_many(unmet)
        new = {key for key, value in zip(unmet, stored, strict=True) if value is None}
        if not new:
            return bad
        rows = keys.first_row[[key in new for key in candidates]]
        self._new.update(zip((key for key in candidates if key in new), forget[rows].tolist(), strict=True))
        return {ONLY: batch if len(rows) == batch.num_rows else batch.take(pa.array(rows)), **bad}

    def finish(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Store the new keys and delete the expired ones. Emits nothing."""
        watermark = self._times.watermark if self._spec.within_us is not None else None
        due = list(ended_by(self._state, Namespace.EXPIRY, watermark))
        if due:
            self._state.delete_many(due)
            _, expired = split_timers(pa.array(due, pa.binary()), self._state.space)
            self._state.delete_many(expired.to_pylist())
        kept = {key: time for key, time in self._new.items() if watermark is None or time > watermark}
        keys = sorted(kept)
        self._state.put_many(keys, [b""] * len(keys))
        if self._spec.within_us is not None and keys:
            times = np.fromiter((kept[key] for key in keys), np.int64, len(keys))
            marks = timer_keys(pa.array(keys, pa.binary()), Namespace.EXPIRY, times, self._state.space)
            ordered = marks.take(pc.sort_indices(marks)).to_pylist()
            self._state.put_many(ordered, [b""] * len(ordered))
        yield from ()

    def _forget_at(self, batch: pa.RecordBatch) -> Integers:
        if self._spec.within_us is None or self._spec.time is None:
            return np.zeros(batch.num_rows, np.int64)
        return checked_times(self._operator, batch, self._spec.time) + self._spec.within_us


class DistinctMethods(KeyedRows):
    """Add a distinct to a keyed stream."""

    def distinct(
        self, name: str, *, within: str | None = None, time: str | None = None, on_error: str = "fail"
    ) -> Self:
        """Keep only the first row of each key.

        :param within: forget a key when the watermark is this far past the key's first row, so that state stays
            bounded.
        :param on_error: as in :meth:`aggregate`.

        >>> from midstream import Flow, ListSource, MemorySink
        >>> from midstream.testing import run_local
        >>> flow, out = Flow("visits"), MemorySink()
        >>> visits = flow.source("visits", ListSource([[{"user": "ann"}, {"user": "bob"}], [{"user": "ann"}]],
        ...                                           "user string"))
        >>> visits.key_by("by_user", "user").distinct("first").sink("out", out)
        >>> _ = run_local(flow)
        >>> sorted(row["user"] for row in out.rows)
        ['ann', 'bob']
        """
        what = f"distinct {check_name(name, 'distinct')!r}"
        if within is None:
            if time is not None:
                raise FlowError(f"{what}: time={time!r} needs within=; add that, or leave out time=")
            spec = Distinct(self.keys)
            return cast(Self, self._flow._add(name, spec, (self._port,), self.schema, on_error=on_error))
        spec = Distinct(self.keys, self._time(time, what), duration(within, f"{what}: within"))
        return cast(Self, self._flow._add(name, spec, (self._port,), self.schema, on_error=on_error))
