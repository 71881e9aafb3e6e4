"""What all forms of ``aggregate`` share: what they were given, what they refuse, and how they emit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from midstream.data.key_space import KeySpace
from midstream.data.schema import columns_of
from midstream.data.times import EpochTimes
from midstream.engine.aggregation.blocks import BLOCK
from midstream.engine.aggregation.runs import Integers
from midstream.engine.aggregation.totals import Totals, TotalsOf
from midstream.engine.bad_rows import ErrorsBranch, Screen
from midstream.engine.keyed_rows import checked_times, refuse_nulls
from midstream.engine.steps import ONLY
from midstream.flow.model import Operator
from midstream.state.key_arrays import decode_keys
from midstream.state.keys import decode_key
from midstream.state.task import TaskState

__all__ = ["Aggregating"]


@dataclass(frozen=True)
class Aggregating:
    """An aggregate in a task, whatever its windows."""

    operator: Operator
    keys: tuple[str, ...]
    over: str | None
    """The column of event times that its windows are over; None without windows."""
    takes: pa.Schema
    state: TaskState
    times: EpochTimes
    totals: TotalsOf

    @property
    def space(self) -> KeySpace:
        """The key space of its stored keys."""
        return self.state.space

    @property
    def what(self) -> str:
        """The operator as errors name it."""
        return f"aggregate {self.operator.name!r}"

    @property
    def time(self) -> str:
        """The column of event times; windows are over one."""
        assert self.over is not None, "windows are over a time"
        return self.over

    @cached_property
    def needed(self) -> list[str]:
        """The columns that are worth keeping of rows."""
        time = () if self.over is None else (self.over,)
        return list(dict.fromkeys([*self.keys, *time, *self.totals.inputs]))

    @cached_property
    def screen(self) -> Screen:
        """Keeps bad rows out, if they have somewhere to go."""
        return Screen(ErrorsBranch(self.operator), self.keys, () if self.over is None else (self.over,))

    @cached_property
    def key_schema(self) -> pa.Schema:
        """The key columns."""
        return columns_of(self.takes, self.keys)

    def times_of(self, batch: pa.RecordBatch) -> Integers:
        """The event times of rows whose keys and times are all there."""
        refuse_nulls(self.operator, batch, self.keys, "a key")
        return checked_times(self.operator, batch, self.time)

    def _key(self, stored: bytes) -> tuple[Any, ...]:
        return decode_key(stored, self.key_schema, self.space)

    def emitted(
        self, keys: pa.Array, totals: Totals, bounds: Sequence[Integers] = ()
    ) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """The results of stored keys and, with windows, of starts and ends; a block at a time."""
        if not len(keys):
            return
        results = self.totals.results(totals, lambda index: self._key(keys[index].as_py()))
        moment = self.takes.field(self.time).type if bounds else None
        windows = [pa.array(bound).view(moment) for bound in bounds]
        columns = [*decode_keys(keys, self.key_schema, self.space), *windows, *results]
        batch = pa.RecordBatch.from_arrays(columns, schema=self.operator.schema)
        for start in range(0, batch.num_rows, BLOCK):
            yield {ONLY: batch.slice(start, BLOCK)}
