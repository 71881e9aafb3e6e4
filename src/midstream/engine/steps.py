"""What the runner expects of an operator, and what operators share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from midstream.data.rows import to_rows
from midstream.engine.failure import USER_ERRORS, failed, row_at
from midstream.flow.model import Operator

ONLY = ""
"""The branch of an operator that has a single output port."""


class OperatorStep(Protocol):
    """An operator at work in a task: a slice in, a slice per branch out."""

    def __call__(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Process one slice. Raises :class:`midstream.errors.OperatorFailed` when the user's code fails."""


@dataclass(frozen=True)
class AtWork:
    """An operator in place in a task.

    ``entries`` holds one step per input of the operator. ``take_partials`` takes what senders have added up already, if
    they may do so. ``flush`` gives what follows from rows that were taken but had to wait; called before rows of
    another revision come, and at the end. ``finish`` is called once, behind the last row of the task:
    what a keyed operator has to say at the end of an epoch (closed windows, fired timers, running totals). ``note`` is
    what people who look at the operator should know of how it worked. ``is_quiet``: at the end it only writes what it
    knows; it emits nothing and calls no function of the user's.
    """

    entries: tuple[OperatorStep, ...]
    finish: Callable[[], Iterator[Mapping[str, pa.RecordBatch]]] | None = None
    take_partials: OperatorStep | None = None
    flush: Callable[[], Iterator[Mapping[str, pa.RecordBatch]]] | None = None
    note: Callable[[], str] | None = None
    is_quiet: bool = False


def call_on_rows(operator: Operator, function: Callable[[dict[str, Any]], Any], batch: pa.RecordBatch) -> list[Any]:
    """One result per row; a failure names its row."""
    results: list[Any] = []
    add = results.append
    try:
        for row in to_rows(batch):
            add(function(row))
    except USER_ERRORS as error:
        raise failed(operator.name, error, row_at(batch, len(results))) from error
    return results
