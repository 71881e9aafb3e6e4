"""route: each row to exactly one branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.bad_rows import batch_step, tolerant_rows
from midstream.engine.failure import failed, row_at
from midstream.engine.steps import OperatorStep, call_on_rows
from midstream.errors import SchemaError
from midstream.flow.model import Operator
from midstream.flow.spec import Form, OnError
from midstream.operators.filter import one_per_row
from midstream.operators.function import FunctionSpec


@dataclass(frozen=True)
class Route(FunctionSpec):
    """Each row goes to exactly one branch."""

    kind: ClassVar[str] = "route"

    branches: tuple[str, ...]

    @property
    def outputs(self) -> tuple[str, ...]:
        """One for each branch."""
        return self.branches

    def step(self, operator: Operator, function: Callable[..., Any]) -> OperatorStep:
        """See :func:`route_step`."""
        return route_step(operator, self, function)


def route_step(operator: Operator, spec: Route, function: Callable[..., Any]) -> OperatorStep:
    """The step of a route."""
    number = {branch: i for i, branch in enumerate(spec.branches)}
    names = pa.array(spec.branches, pa.string())
    what = f"route {operator.name!r}"

    def unknown(answer: Any) -> SchemaError:
        return SchemaError(f"{what} chose {answer!r}; its branches are {', '.join(spec.branches)}")

    def rows(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        answers = call_on_rows(operator, function, batch)
        try:
            return split(batch, np.array([number[answer] for answer in answers], dtype=np.int64))
        except (KeyError, TypeError):  # TypeError: an answer that cannot even be hashed
            guilty = next(i for i, answer in enumerate(answers) if not isinstance(answer, str) or answer not in number)
            raise failed(operator.name, unknown(answers[guilty]), row_at(batch, guilty)) from None

    def known(row: dict[str, Any]) -> int:
        answer = function(row)
        if not isinstance(answer, str) or answer not in number:
            raise unknown(answer)
        return number[answer]

    def numbered(batch: pa.RecordBatch, choice: list[Any]) -> Mapping[str, pa.RecordBatch]:
        return split(batch, np.array(choice, np.int64))

    def batches(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        answers = one_per_row(function(batch), batch, pa.string(), what)
        choice = pc.index_in(answers, value_set=names)
        if choice.null_count:
            raise unknown(answers.filter(pc.is_null(choice))[0].as_py())
        return split(batch, choice.to_numpy(zero_copy_only=False))

    def split(batch: pa.RecordBatch, choice: Any) -> Mapping[str, pa.RecordBatch]:
        masks = ((branch, choice == i) for branch, i in number.items())
        return {branch: batch.filter(pa.array(mask)) for branch, mask in masks if mask.any()}

    if spec.form is Form.BATCHES:
        return batch_step(operator, batches)
    return rows if operator.on_error is OnError.FAIL else tolerant_rows(operator, known, numbered)
