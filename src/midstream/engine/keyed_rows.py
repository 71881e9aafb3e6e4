"""Helpers of keyed operators: refuse null keys and times, find the keys of rows, and find state that is due."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.key_space import KeySpace
from midstream.engine.aggregation.runs import Integers
from midstream.engine.bad_rows import FAR
from midstream.engine.failure import failed, row_at
from midstream.errors import SchemaError, StateError
from midstream.flow.model import Operator
from midstream.state.integers import integer_bytes
from midstream.state.keys import DistinctKeys, Namespace, distinct_keys
from midstream.state.task import TaskState

__all__ = ["checked_times", "ended_by", "found_keys", "refuse_nulls"]


def refuse_nulls(operator: Operator, batch: pa.RecordBatch, columns: Sequence[str], use: str) -> None:
    """Raise :class:`OperatorFailed` if one of the columns, needed as ``use``, has a null."""
    for name in columns:
        column = batch.column(name)
        if column.null_count:
            row = int(pc.index(column.is_null(), True).as_py())
            error = SchemaError(
                f"column {name!r} is null, which cannot be {use}. Filter such rows out before this operator, or "
                f"replace the null in a map",
                column=name,
            )
            raise failed(operator.name, error, row_at(batch, row))


def checked_times(operator: Operator, batch: pa.RecordBatch, column: str) -> Integers:
    """The event times of rows, in microseconds since 1970."""
    refuse_nulls(operator, batch, [column], "an event time")
    times: Integers = batch.column(column).view(pa.int64()).to_numpy()
    if len(times) and (times.min() <= -FAR or times.max() >= FAR):
        row = int(np.flatnonzero((times <= -FAR) | (times >= FAR))[0])
        error = SchemaError(f"column {column!r} is {times[row]} microseconds from 1970, too far for an event time")
        raise failed(operator.name, error, None)  # without the row: Python cannot represent its time
    return times


def found_keys(
    operator: Operator, batch: pa.RecordBatch, columns: Sequence[str], what: str, space: KeySpace
) -> DistinctKeys:
    """The distinct keys of a batch; the error for a key that is refused shows its row."""
    try:
        return distinct_keys(batch, columns, what, space=space)
    except StateError as error:
        raise failed(operator.name, error, row_at(batch, error.fields.get("row_index"))) from error


def ended_by(state: TaskState, namespace: Namespace, watermark: int | None) -> dict[bytes, bytes]:
    """All entries with times up to the watermark, in all bins of a task. The cost is linear in the result."""
    if watermark is None:
        return {}
    stop = integer_bytes(watermark + 1)
    found: dict[bytes, bytes] = {}
    for number in state.occupied(namespace, stop):
        found.update(state.scan(number, namespace, stop=stop))
    return found
