"""What operators share that call a function of the user's on rows and keep no state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import AtWork, OperatorStep
from midstream.flow.functions import check_callable, refuse_timers
from midstream.flow.model import Operator
from midstream.flow.spec import Form, Spec


@dataclass(frozen=True)
class FunctionSpec(TaskSpec):
    """An operator that calls a function on each row, or on each slice of rows."""

    is_updatable: ClassVar[bool] = True
    is_tried: ClassVar[bool] = True

    form: Form

    @abstractmethod
    def step(self, operator: Operator, function: Callable[..., Any]) -> OperatorStep:
        """Its step in a task."""

    def at_work(self, operator: Operator, parts: Parts) -> AtWork:
        """Load the function."""
        return AtWork((self.step(operator, parts.function(operator)),))

    @property
    def function_takes(self) -> tuple[str, ...]:
        """A row or a slice."""
        return ("a dict (one row)" if self.form is Form.ROWS else "a pyarrow.RecordBatch",)

    def replaced(self, function: Any, local: Any, operator: str, what: str) -> tuple[Spec, Any]:
        """Another function, called as the one before it was."""
        check_callable(function, operator, *self.function_takes)
        refuse_timers(function, operator)
        return self, function
