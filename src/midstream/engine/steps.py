"""The interface between the runner and an operator, and helpers that operators share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from midstream.data.rows import to_rows
from midstream.engine.failure import USER_ERRORS, failed, row_at
from midstream.flow.model import Operator
from midstream.state.keyed_states import KeyedStates

ONLY = ""
"""The branch of an operator that has a single output port."""


class OperatorStep(Protocol):
    """One step of an operator: takes a slice, returns a slice per branch."""

    def __call__(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Process one slice. Raises :class:`midstream.errors.OperatorFailed` when the user's code fails."""


@dataclass(frozen=True)
class OperatorInTask:
    """An operator in a task.

    ``entries`` holds one step per input of the operator. ``take_partials`` takes the partial aggregates of senders, if
    the operator is combinable. ``flush`` yields the pending results of rows taken so far; it is called before rows of
    another revision arrive, and at the end. ``finish`` is called once, after the last row of the task, and yields the
    end-of-epoch output of a keyed operator (closed windows, fired timers, running totals). ``note`` returns a remark
    for users on how the operator ran. ``is_quiet``: ``finish`` only persists state: no output, no user code. ``keyed``
    gives the state of all keys after ``finish``, if control operations can reach it.
    """

    entries: tuple[OperatorStep, ...]
    finish: Callable[[], Iterator[Mapping[str, pa.RecordBatch]]] | None = None
    take_partials: OperatorStep | None = None
    flush: Callable[[], Iterator[Mapping[str, pa.RecordBatch]]] | None = None
    note: Callable[[], str] | None = None
    is_quiet: bool = False
    keyed: Callable[[], KeyedStates] | None = None


def call_on_rows(operator: Operator, function: Callable[[dict[str, Any]], Any], batch: pa.RecordBatch) -> list[Any]:
    """Call a function on each row; returns one result per row. A failure names the row."""
    results: list[Any] = []
    add = results.append
    try:
        for row in to_rows(batch):
            add(function(row))
    except USER_ERRORS as error:
        raise failed(operator.name, error, row_at(batch, len(results))) from error
    return results
