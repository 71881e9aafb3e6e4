"""map: emits exactly one row per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.rows import from_rows
from midstream.data.schema import Declared, conform
from midstream.engine.bad_rows import batch_step, tolerant_rows
from midstream.engine.failure import failed, row_at
from midstream.engine.steps import ONLY, OperatorStep, call_on_rows
from midstream.errors import SchemaError
from midstream.flow.model import Operator
from midstream.flow.spec import Form, OnError, Spec
from midstream.operators.function import FunctionMethods, FunctionSpec
from midstream.operators.rows import BatchFunction, RowFunction

if TYPE_CHECKING:
    from midstream.operators.stream import Stream


@dataclass(frozen=True)
class Map(FunctionSpec):
    """Emits exactly one row per row."""

    kind: ClassVar[str] = "map"
    declares_columns: ClassVar[bool] = True

    adds: bool = False
    """Whether the user declared only the columns that the function appends to those of its input."""
    keeps: tuple[str, ...] = ()
    """Columns that the function must not change: the key of operators with state behind it. This is checked."""

    def kept(self, columns: tuple[str, ...]) -> tuple[str, ...] | None:
        """A function that only adds columns leaves the others alone."""
        return columns if self.adds else None

    def keeping(self, columns: tuple[str, ...]) -> Spec:
        """Check in tasks that the function leaves these columns alone."""
        return replace(self, keeps=columns)

    def step(self, operator: Operator, function: Callable[..., Any]) -> OperatorStep:
        """See :func:`map_step`."""
        return map_step(operator, self, function)


def map_step(operator: Operator, spec: Map, function: Callable[..., Any]) -> OperatorStep:
    """The step of a map."""
    what = f"map {operator.name!r}"

    def rows(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        results = call_on_rows(operator, function, batch)
        try:
            return assemble(batch, results)
        except SchemaError as error:
            raise failed(operator.name, error, row_at(batch, error.row_index)) from error

    def assemble(batch: pa.RecordBatch, answers: list[Any]) -> Mapping[str, pa.RecordBatch]:
        return {ONLY: unchanged(batch, from_rows(answers, operator.schema, what))}

    def unchanged(batch: pa.RecordBatch, result: pa.RecordBatch) -> pa.RecordBatch:
        for name in spec.keeps:
            _check_kept(name, batch.column(name), result.column(name), what)
        return result

    def batches(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        result = conform(function(batch), operator.schema, what)
        if result.num_rows != batch.num_rows:
            raise SchemaError(
                f"{what} returned {result.num_rows} rows for {batch.num_rows}; map_batches must return exactly one row "
                f"for each. Use filter_batches or flat_map_batches to return fewer or more"
            )
        return {ONLY: unchanged(batch, result)}

    if spec.form is Form.BATCHES:
        return batch_step(operator, batches)
    return rows if operator.on_error is OnError.FAIL else tolerant_rows(operator, function, assemble)


def _check_kept(name: str, before: pa.Array, after: pa.Array, what: str) -> None:
    """Refuse another value in a column of the key; its row would not be in the task that owns the key."""
    if after.equals(before):
        return
    differs = pc.fill_null(pc.not_equal(before, after), False)
    differs = pc.or_(differs, pc.not_equal(pc.is_null(before), pc.is_null(after)))
    place = pc.index(differs, True).as_py()
    raise SchemaError(
        f"{what} changed {name!r} from {before[place].as_py()!r:.60} to {after[place].as_py()!r:.60}; operators "
        f"behind it keep state by this column, so with adds= it must stay as it is. Put the map before the key_by",
        column=name,
        row_index=place,
    )


class MapMethods(FunctionMethods):
    """Add a map to a stream."""

    @overload
    def map(self, name: str, function: RowFunction, *, adds: Declared, on_error: str = "fail") -> Self: ...

    @overload
    def map(
        self, name: str, function: RowFunction, *, returns: Declared | None = None, on_error: str = "fail"
    ) -> Stream: ...

    def map(
        self,
        name: str,
        function: RowFunction,
        *,
        returns: Declared | None = None,
        adds: Declared | None = None,
        on_error: str = "fail",
    ) -> Any:
        """Call the function on each row; it returns exactly one row."""
        return self._function(name, Map(Form.ROWS, adds is not None), function, returns, adds, on_error)

    @overload
    def map_batches(self, name: str, function: BatchFunction, *, adds: Declared, on_error: str = "fail") -> Self: ...

    @overload
    def map_batches(
        self, name: str, function: BatchFunction, *, returns: Declared | None = None, on_error: str = "fail"
    ) -> Stream: ...

    def map_batches(
        self,
        name: str,
        function: BatchFunction,
        *,
        returns: Declared | None = None,
        adds: Declared | None = None,
        on_error: str = "fail",
    ) -> Any:
        """Call the function on each slice of rows; it returns as many rows in the same order. The number is checked."""
        return self._function(name, Map(Form.BATCHES, adds is not None), function, returns, adds, on_error)
