"""where: keeps the rows for which a condition is true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import pyarrow as pa

from midstream.engine.bad_rows import batch_step
from midstream.engine.steps import ONLY, OperatorStep
from midstream.errors import FlowError
from midstream.expressions.compiler import condition_of
from midstream.expressions.constants import name_text
from midstream.flow.model import Operator
from midstream.operators.columns import ColumnsMethods, ColumnsSpec


@dataclass(frozen=True)
class Where(ColumnsSpec):
    """Keeps the rows for which a condition is true; null counts as false."""

    kind: ClassVar[str] = "where"

    condition: str = "TRUE"

    def columns_of(self, takes: pa.Schema, what: str) -> Sequence[tuple[str, str]]:
        """The columns of the input."""
        return [(name, name_text(name)) for name in takes.names]

    def schema_of(self, takes: pa.Schema, what: str) -> pa.Schema:
        """The input's columns, if the condition can be computed over them."""
        condition_of(self.condition, takes, what)
        return takes

    def payload_of(self, given: Any, what: str) -> str:
        """A text, or a boolean."""
        if not isinstance(given, str | bool):
            raise FlowError(
                f"{what}: the condition must be SQL text like 'eur > 100', found {type(given).__name__} {given!r:.60}; "
                f"for a Python function use filter"
            )
        return given if isinstance(given, str) else str(given).upper()

    def with_payload(self, payload: Any) -> Self:
        """Another condition."""
        return replace(self, condition=payload)

    @property
    def payload(self) -> str:
        """Its condition."""
        return self.condition

    def kept_as(self, column: str) -> str:
        """All columns stay."""
        return column

    def step(self, operator: Operator, takes: pa.Schema) -> OperatorStep:
        """The operator's step in a task."""
        condition = condition_of(self.condition, takes, f"where {operator.name!r}")

        def kept(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
            return {ONLY: batch.filter(condition(batch))}

        return batch_step(operator, kept)


class WhereMethods(ColumnsMethods):
    """Add a where to a stream."""

    def where(self, name: str, condition: str | bool, *, on_error: str = "fail") -> Self:
        """Keep the rows for which an SQL condition is true, on whole slices of rows.

        :param on_error: as in :meth:`select`.

        >>> from midstream import Flow, ListSource, MemorySink
        >>> from midstream.testing import run_local
        >>> flow, out = Flow("sales"), MemorySink()
        >>> sales = flow.source("sales", ListSource([[{"eur": 3}, {"eur": 150}, {"eur": None}]], "eur int"))
        >>> sales.where("big", "eur > 100").sink("out", out)
        >>> _ = run_local(flow)
        >>> out.rows
        [{'eur': 150}]
        """
        return self._columns(name, Where(), condition, on_error)
