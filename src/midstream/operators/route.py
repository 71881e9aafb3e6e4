"""route: sends each row to exactly one branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.bad_rows import batch_step, tolerant_rows
from midstream.engine.failure import failed, row_at
from midstream.engine.steps import OperatorStep, call_on_rows
from midstream.errors import FlowError, SchemaError
from midstream.flow.functions import check_callable, refuse_timers
from midstream.flow.model import Operator, Port
from midstream.flow.spec import ERRORS, Form, OnError
from midstream.flow.validate import check_name
from midstream.operators.branches import Branches
from midstream.operators.filter import one_per_row
from midstream.operators.function import FunctionSpec
from midstream.operators.rows import Row, StreamRows


@dataclass(frozen=True)
class Route(FunctionSpec):
    """Sends each row to exactly one branch."""

    kind: ClassVar[str] = "route"

    branches: tuple[str, ...]

    def kept(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """All columns stay as they are."""
        return columns

    @property
    def outputs(self) -> tuple[str, ...]:
        """The branches, in the user's order."""
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


class RouteMethods(StreamRows):
    """Add a route to a stream."""

    def route(
        self, name: str, function: Callable[[Row], str], *, branches: Sequence[str], on_error: str = "fail"
    ) -> Branches:
        """Send each row to the branch whose name the function returns: ``routed["branch"]``.

        With ``on_error="branch"`` bad rows leave at ``routed.errors()``.
        """
        return self._route(name, Form.ROWS, function, branches, on_error)

    def route_batches(
        self, name: str, function: Callable[[pa.RecordBatch], Any], *, branches: Sequence[str], on_error: str = "fail"
    ) -> Branches:
        """Like :meth:`route`, for a function that returns one branch name per row, as an array."""
        return self._route(name, Form.BATCHES, function, branches, on_error)

    def _route(self, name: str, form: Form, function: Any, branches: Sequence[str], on_error: str) -> Branches:
        what = f"route {check_name(name, 'route')!r}"
        if isinstance(branches, str) or not branches:
            raise FlowError(
                f"{what}: branches must be a sequence of names, e.g. branches=('low', 'high'), found {branches!r}"
            )
        if len(set(branches)) < len(branches):
            raise FlowError(f"{what}: the branches {list(branches)} must be different")
        for branch in branches:
            check_name(branch, f"{what}, branch")
        if on_error == OnError.BRANCH and ERRORS in branches:
            raise FlowError(f"{what}: with on_error='branch' the branch for bad rows is {ERRORS!r}; rename yours")
        spec = Route(form, tuple(branches))
        check_callable(function, name, *spec.function_takes)
        refuse_timers(function, name)
        added = self._flow._add(name, spec, (self._port,), self.schema, function, on_error)
        return Branches(name, {branch: added._branch(Port(name, branch)) for branch in branches})
