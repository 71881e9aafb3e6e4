"""Base classes of stateless operators that call a user's function on rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from midstream.data.schema import Declared, ddl_of, parse_ddl, to_ddl
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import OperatorInTask, OperatorStep
from midstream.errors import FlowError
from midstream.flow.functions import check_callable, refuse_timers
from midstream.flow.model import Operator
from midstream.flow.spec import Form, Spec
from midstream.flow.validate import check_name
from midstream.operators.rows import StreamRows

if TYPE_CHECKING:
    from midstream.operators.stream import Stream


@dataclass(frozen=True)
class FunctionSpec(TaskSpec):
    """An operator that calls a function on each row, or on each slice of rows."""

    is_updatable: ClassVar[bool] = True
    has_preflight: ClassVar[bool] = True

    form: Form

    @abstractmethod
    def step(self, operator: Operator, function: Callable[..., Any]) -> OperatorStep:
        """The operator's step in a task."""

    def instantiate(self, operator: Operator, parts: Parts) -> OperatorInTask:
        """Load the function."""
        return OperatorInTask((self.step(operator, parts.function(operator)),))

    @property
    def function_takes(self) -> tuple[str, ...]:
        """The function takes a row or a slice."""
        return ("a dict (one row)" if self.form is Form.ROWS else "a pyarrow.RecordBatch",)

    def replaced(self, function: Any, local: Any, operator: str, what: str) -> tuple[Spec, Any]:
        """Replace the function by one with the same arguments."""
        check_callable(function, operator, *self.function_takes)
        refuse_timers(function, operator)
        return self, function


class FunctionMethods(StreamRows):
    """Base of the methods that add such an operator to a stream."""

    def _function(
        self,
        name: str,
        spec: FunctionSpec,
        function: Any,
        returns: Declared | None = None,
        adds: Declared | None = None,
        on_error: str = "fail",
    ) -> Stream:
        name = check_name(name, "operator")
        check_callable(function, name, *spec.function_takes)
        refuse_timers(function, name)
        schema = self._returned(name, returns, adds)
        return self._flow._add(name, spec, (self._port,), schema, function, on_error)

    def _returned(self, name: str, returns: Declared | None, adds: Declared | None) -> pa.Schema:
        if adds is None:
            return self.schema if returns is None else parse_ddl(returns)
        if returns is not None:
            raise FlowError(f"operator {name!r}: give returns= (all columns) or adds= (the new ones), not both")
        return parse_ddl(f"{to_ddl(self.schema)}, {ddl_of(adds)}")
