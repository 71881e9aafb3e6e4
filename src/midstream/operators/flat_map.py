"""flat_map: any number of rows for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from midstream.data.rows import from_rows, to_rows
from midstream.data.schema import Declared, conform
from midstream.engine.bad_rows import batch_step, tolerant_rows
from midstream.engine.failure import USER_ERRORS, failed, row_at
from midstream.engine.steps import ONLY, OperatorStep
from midstream.errors import SchemaError
from midstream.flow.model import Operator
from midstream.flow.spec import Contract, Form, OnError
from midstream.operators.function import FunctionMethods, FunctionSpec
from midstream.operators.rows import BatchFunction, Row

if TYPE_CHECKING:
    from midstream.operators.stream import Stream


@dataclass(frozen=True)
class FlatMap(FunctionSpec):
    """Emits any number of rows per row."""

    kind: ClassVar[str] = "flat_map"
    declares_columns: ClassVar[bool] = True

    @property
    def contract(self) -> Contract:
        """The function may return any number of rows."""
        return Contract.ONE_TO_MANY

    def step(self, operator: Operator, function: Callable[..., Any]) -> OperatorStep:
        """See :func:`flat_map_step`."""
        return flat_map_step(operator, self, function)


def flat_map_step(operator: Operator, spec: FlatMap, function: Callable[..., Any]) -> OperatorStep:
    """The step of a flat_map."""
    what = f"flat_map {operator.name!r}"

    def rows(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        results: list[Any] = []
        ends: list[int] = []  # per input row, the number of results up to and including it
        try:
            for row in to_rows(batch):
                results.extend(_rows_of(function(row), what))
                ends.append(len(results))
        except USER_ERRORS as error:
            raise failed(operator.name, error, row_at(batch, len(ends))) from error
        try:
            return {ONLY: from_rows(results, operator.schema, what)}
        except SchemaError as error:
            at = error.row_index  # among the results
            guilty = None if at is None else next(i for i, end in enumerate(ends) if at < end)
            raise failed(operator.name, error, row_at(batch, guilty)) from error

    def all_of(row: dict[str, Any]) -> list[Any]:
        return list(_rows_of(function(row), what))

    def assemble(_: pa.RecordBatch, answers: list[Any]) -> Mapping[str, pa.RecordBatch]:
        return {ONLY: from_rows([row for answer in answers for row in answer], operator.schema, what)}

    def batches(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        return {ONLY: conform(function(batch), operator.schema, what)}

    if spec.form is Form.BATCHES:
        return batch_step(operator, batches)
    return rows if operator.on_error is OnError.FAIL else tolerant_rows(operator, all_of, assemble)


def _rows_of(result: Any, what: str) -> Any:
    # A dict is iterable, too, and would yield its column names: the likeliest mistake with this operator.
    if result is None or isinstance(result, dict | str):
        raise SchemaError(
            f"{what} must return an iterable of rows (a list, or yield them), found {type(result).__name__}"
        )
    return result


class FlatMapMethods(FunctionMethods):
    """Add a flat_map to a stream."""

    def flat_map(
        self,
        name: str,
        function: Callable[[Row], Iterable[Row]],
        *,
        returns: Declared | None = None,
        adds: Declared | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Call the function on each row; it returns any number of rows, and may be a generator."""
        return self._function(name, FlatMap(Form.ROWS), function, returns, adds, on_error)

    def flat_map_batches(
        self,
        name: str,
        function: BatchFunction,
        *,
        returns: Declared | None = None,
        adds: Declared | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Call the function on each slice of rows; it returns any number of rows."""
        return self._function(name, FlatMap(Form.BATCHES), function, returns, adds, on_error)
