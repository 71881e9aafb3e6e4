"""map: exactly one row for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from midstream.data.rows import from_rows
from midstream.data.schema import conform
from midstream.engine.bad_rows import batch_step, tolerant_rows
from midstream.engine.failure import failed, row_at
from midstream.engine.steps import ONLY, OperatorStep, call_on_rows
from midstream.errors import SchemaError
from midstream.flow.model import Operator
from midstream.flow.spec import Form, OnError
from midstream.operators.function import FunctionMethods, FunctionSpec
from midstream.operators.rows import BatchFunction, RowFunction

if TYPE_CHECKING:
    from midstream.operators.stream import Stream


@dataclass(frozen=True)
class Map(FunctionSpec):
    """Each row gives exactly one row."""

    kind: ClassVar[str] = "map"
    declares_columns: ClassVar[bool] = True

    def step(self, operator: Operator, function: Callable[..., Any]) -> OperatorStep:
        """See :func:`map_step`."""
        return map_step(operator, self, function)


def map_step(operator: Operator, spec: Map, function: Callable[..., Any]) -> OperatorStep:
    """The step of a map."""
    what = f"map {operator.name!r}"

    def rows(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        results = call_on_rows(operator, function, batch)
        try:
            return {ONLY: from_rows(results, operator.schema, what)}
        except SchemaError as error:
            raise failed(operator.name, error, row_at(batch, error.row_index)) from error

    def assemble(_: pa.RecordBatch, answers: list[Any]) -> Mapping[str, pa.RecordBatch]:
        return {ONLY: from_rows(answers, operator.schema, what)}

    def batches(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        result = conform(function(batch), operator.schema, what)
        if result.num_rows != batch.num_rows:
            raise SchemaError(
                f"{what} returned {result.num_rows} rows for {batch.num_rows}; map_batches gives exactly one row for "
                f"each. Use filter_batches or flat_map_batches to give fewer or more"
            )
        return {ONLY: result}

    if spec.form is Form.BATCHES:
        return batch_step(operator, batches)
    return rows if operator.on_error is OnError.FAIL else tolerant_rows(operator, function, assemble)


class MapMethods(FunctionMethods):
    """Add a map to a stream."""

    def map(
        self,
        name: str,
        function: RowFunction,
        *,
        returns: str | None = None,
        adds: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Each row gives exactly one row."""
        return self._function(name, Map(Form.ROWS), function, returns, adds, on_error)

    def map_batches(
        self,
        name: str,
        function: BatchFunction,
        *,
        returns: str | None = None,
        adds: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Each slice of rows gives as many rows, in the same order; the number is checked."""
        return self._function(name, Map(Form.BATCHES), function, returns, adds, on_error)
