"""What all forms of ``aggregate`` share: what they were given, what they refuse, and how they emit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.schema import columns_of
from midstream.data.times import EpochTimes
from midstream.engine.aggregation.blocks import BLOCK
from midstream.engine.aggregation.runs import Integers
from midstream.engine.aggregation.totals import Totals, TotalsOf
from midstream.engine.bad_rows import FAR, Aside, Screen
from midstream.engine.failure import failed, row_at
from midstream.engine.operators.base import ONLY
from midstream.errors import SchemaError, StateError
from midstream.flow.model import Aggregate, Operator
from midstream.state.key_arrays import decode_keys
from midstream.state.keys import DistinctKeys, decode_key, distinct_keys
from midstream.state.task import TaskState

__all__ = ["Aggregating", "checked_times", "found_keys", "refuse_nulls"]


@dataclass(frozen=True)
class Aggregating:
    """An aggregate in a task, whatever its windows."""

    operator: Operator
    spec: Aggregate
    takes: pa.Schema
    state: TaskState
    times: EpochTimes
    totals: TotalsOf

    @property
    def what(self) -> str:
        """The operator as errors name it."""
        return f"aggregate {self.operator.name!r}"

    @property
    def time(self) -> str:
        """The column of event times; windows are over one."""
        assert self.spec.time is not None, "windows are over a time"
        return self.spec.time

    @cached_property
    def needed(self) -> list[str]:
        """The columns that are worth keeping of rows."""
        time = [self.spec.time] if self.spec.time is not None and self.spec.window is not None else []
        return list(dict.fromkeys([*self.spec.keys, *time, *self.totals.inputs]))

    @cached_property
    def screen(self) -> Screen:
        """Keeps bad rows out, if they have somewhere to go."""
        times = () if self.spec.window is None else (self.time,)
        return Screen(Aside(self.operator), self.spec.keys, times)

    @cached_property
    def key_schema(self) -> pa.Schema:
        """The key columns."""
        return columns_of(self.takes, self.spec.keys)

    def times_of(self, batch: pa.RecordBatch) -> Integers:
        """The event times of rows whose keys and times are all there."""
        refuse_nulls(self.operator, batch, self.spec.keys, "a key")
        return checked_times(self.operator, batch, self.time)

    def emitted(
        self, keys: pa.Array, totals: Totals, bounds: Sequence[Integers] = ()
    ) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """The results of stored keys and, with windows, of starts and ends; a block at a time."""
        if not len(keys):
            return
        results = self.totals.results(totals, lambda index: decode_key(keys[index].as_py(), self.key_schema))
        moment = self.takes.field(self.spec.time).type if bounds else None
        windows = [pa.array(bound).view(moment) for bound in bounds]
        columns = [*decode_keys(keys, self.key_schema), *windows, *results]
        batch = pa.RecordBatch.from_arrays(columns, schema=self.operator.schema)
        for start in range(0, batch.num_rows, BLOCK):
            yield {ONLY: batch.slice(start, BLOCK)}


def refuse_nulls(operator: Operator, batch: pa.RecordBatch, columns: Sequence[str], use: str) -> None:
    """Keys and times must be there."""
    for name in columns:
        column = batch.column(name)
        if column.null_count:
            row = int(pc.index(column.is_null(), True).as_py())
            error = SchemaError(
                f"column {name!r} is null, which cannot be {use}. Filter such rows out before, or give them a value "
                f"of their own in a map",
                column=name,
            )
            raise failed(operator.name, error, row_at(batch, row))


def checked_times(operator: Operator, batch: pa.RecordBatch, column: str) -> Integers:
    """The event times of rows, in microseconds since 1970."""
    refuse_nulls(operator, batch, [column], "an event time")
    times: Integers = batch.column(column).view(pa.int64()).to_numpy()
    if len(times) and (times.min() <= -FAR or times.max() >= FAR):
        row = int(np.flatnonzero((times <= -FAR) | (times >= FAR))[0])
        error = SchemaError(f"column {column!r} is {times[row]} microseconds from 1970, too far away to be a time")
        raise failed(operator.name, error, None)  # as a Python object the row could not be shown
    return times


def found_keys(operator: Operator, batch: pa.RecordBatch, columns: Sequence[str], what: str) -> DistinctKeys:
    """The distinct keys of a batch; one that is refused is shown with its row."""
    try:
        return distinct_keys(batch, columns, what)
    except StateError as error:
        raise failed(operator.name, error, row_at(batch, error.fields.get("row_index"))) from error
