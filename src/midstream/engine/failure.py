"""The one place that turns exceptions of the user's code into an error with the row that caused it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from midstream.data.rows import to_rows
from midstream.errors import OperatorFailed

T = TypeVar("T")

# Exceptions that user code may raise. A function that calls sys.exit() fails its row like any other.
USER_ERRORS = (Exception, SystemExit)
MAX_ROW_TEXT = 2_000
_OURS = str(Path(__file__).resolve().parent.parent) + os.sep  # with os.sep: a package `midstream_app` is not ours


def user_traceback(error: BaseException) -> str:
    """The traceback starting at the user's first frame; earlier frames of midstream are left out."""
    frames = list(traceback.extract_tb(error.__traceback__))
    while frames and frames[0].filename.startswith(_OURS):
        frames.pop(0)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def failed(operator: str, error: BaseException, row: dict[str, Any] | None) -> OperatorFailed:
    """The error to raise if the user's code failed, on a given row or on none in particular."""
    where = f" on the row {row!r:.{MAX_ROW_TEXT}}" if row is not None else ""
    return OperatorFailed(
        f"operator {operator!r} failed{where}: {type(error).__name__}: {error}",
        operator=operator,
        error=f"{type(error).__name__}: {error}",
        row=row,
        user_traceback=user_traceback(error),
    )


def row_at(batch: pa.RecordBatch, index: int | None) -> dict[str, Any] | None:
    """One row of a batch, converted again: a function may have changed the dict it was given. None without an index."""
    return None if index is None else to_rows(batch.slice(index, 1))[0]


def call_on_batch(operator: str, function: Callable[[pa.RecordBatch], T], batch: pa.RecordBatch) -> T:
    """Call a batch function; if it raises, find the row that caused it."""
    try:
        return function(batch)
    except OperatorFailed:
        raise
    except USER_ERRORS as error:
        raise failed(operator, error, _blame(function, batch, error)) from error


def _blame(
    function: Callable[[pa.RecordBatch], Any], batch: pa.RecordBatch, error: BaseException
) -> dict[str, Any] | None:
    """Halve the batch until one row is left on which the function still raises the same kind of error.

    The task has failed already, so calling the function again does no harm; at most 2·log2(rows) calls.
    """
    while batch.num_rows > 1:
        middle = batch.num_rows // 2
        for half in (batch.slice(0, middle), batch.slice(middle)):
            if _raises(function, half, type(error)):
                batch = half
                break
        else:
            return None  # only a combination of rows fails
    return row_at(batch, 0) if batch.num_rows else None


def _raises(function: Callable[[pa.RecordBatch], Any], batch: pa.RecordBatch, kind: type[BaseException]) -> bool:
    try:
        function(batch)
    except kind:
        return True
    except USER_ERRORS:
        return False
    return False
