"""filter: keeps the rows for which the function returns true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import pyarrow as pa

from midstream.engine.bad_rows import batch_step, tolerant_rows
from midstream.engine.steps import ONLY, OperatorStep, call_on_rows
from midstream.errors import SchemaError
from midstream.flow.model import Operator
from midstream.flow.spec import Form, OnError
from midstream.operators.function import FunctionMethods, FunctionSpec
from midstream.operators.rows import Row


@dataclass(frozen=True)
class Filter(FunctionSpec):
    """Keeps the rows for which the function returns true."""

    kind: ClassVar[str] = "filter"

    def kept(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """All columns stay as they are."""
        return columns

    def step(self, operator: Operator, function: Callable[..., Any]) -> OperatorStep:
        """See :func:`filter_step`."""
        return filter_step(operator, self, function)


def filter_step(operator: Operator, spec: Filter, function: Callable[..., Any]) -> OperatorStep:
    """The step of a filter."""

    def is_kept(row: dict[str, Any]) -> bool:
        return bool(function(row))  # inside the guarded call, because bool() of an array may raise

    def rows(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        return kept(batch, call_on_rows(operator, is_kept, batch))

    def kept(batch: pa.RecordBatch, keep: list[Any]) -> Mapping[str, pa.RecordBatch]:
        return {ONLY: batch if all(keep) else batch.filter(pa.array(keep, pa.bool_()))}

    def batches(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        # Null counts as false.
        return {ONLY: batch.filter(one_per_row(function(batch), batch, pa.bool_(), f"filter {operator.name!r}"))}

    if spec.form is Form.BATCHES:
        return batch_step(operator, batches)
    return rows if operator.on_error is OnError.FAIL else tolerant_rows(operator, is_kept, kept)


def one_per_row(answer: Any, batch: pa.RecordBatch, wanted: pa.DataType, what: str) -> pa.Array:
    """A function's result as an array of one value per row. Raises :class:`SchemaError` if it is anything else."""
    if isinstance(answer, pa.ChunkedArray):
        answer = answer.combine_chunks()
    try:
        array = answer if isinstance(answer, pa.Array) else pa.array(answer)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise SchemaError(f"{what} must return one {wanted} per row, found {type(answer).__name__}: {error}") from error
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if not (array.type.equals(wanted) or (pa.types.is_string(wanted) and pa.types.is_large_string(array.type))):
        raise SchemaError(f"{what} must return one {wanted} per row, found an array of {array.type}")
    if len(array) != batch.num_rows:
        raise SchemaError(f"{what} returned {len(array)} values for {batch.num_rows} rows; it must return one per row")
    return array.cast(wanted)


class FilterMethods(FunctionMethods):
    """Add a filter to a stream."""

    def filter(self, name: str, function: Callable[[Row], bool], *, on_error: str = "fail") -> Self:
        """Keep the rows for which the function returns a true value."""
        return cast(Self, self._function(name, Filter(Form.ROWS), function, on_error=on_error))

    def filter_batches(self, name: str, function: Callable[[pa.RecordBatch], Any], *, on_error: str = "fail") -> Self:
        """Keep the rows for which the function's result, a boolean array, is true."""
        return cast(Self, self._function(name, Filter(Form.BATCHES), function, on_error=on_error))
