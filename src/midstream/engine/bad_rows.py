"""Bad rows of operators with ``on_error="branch"``: which rows they are, why, and how the other rows continue.

Whether a row is bad does not depend on other rows, so it does not matter how rows are cut into slices. A row function
is called once per row. If a batch function raises, it is called on halves of the slice, until the rows that it cannot
handle are isolated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.rows import to_rows
from midstream.engine.failure import MAX_ROW_TEXT, USER_ERRORS, call_on_batch, failed
from midstream.engine.steps import OperatorStep
from midstream.errors import OperatorFailed
from midstream.flow.model import Operator
from midstream.flow.spec import ERRORS, OnError
from midstream.state.keys import MAX_KEY, key_sizes

__all__ = [
    "FAR",
    "ErrorsBranch",
    "Reasons",
    "Screen",
    "batch_step",
    "by_halves",
    "checked_rows",
    "merged",
    "reason_of",
    "tolerant_rows",
    "without",
]

T = TypeVar("T")
Results = Mapping[str, pa.RecordBatch]
Reasons = dict[int, str]
"""Why rows of a batch are bad, by their positions in it."""

FAR = 1 << 62
"""Microseconds, 146,000 years: arithmetic on times further from 1970 could overflow."""


def reason_of(error: BaseException) -> str:
    """The text of an error on the errors branch: bounded, and valid for Arrow."""
    detail = getattr(error, "fields", {}).get("detail")  # without the row number, which depends on slices
    try:
        text = f"{type(error).__name__}: {error if detail is None else detail}"
    except Exception:  # a user's __str__ may raise
        text = type(error).__name__
    return text[:MAX_ROW_TEXT].encode(errors="replace").decode()


def by_halves(count: int, attempt: Callable[[int, int], T]) -> tuple[list[T], dict[int, BaseException]]:
    """The results of an attempt for ``count`` rows, in as few parts as needed to leave out the rows it raises for.

    Attempts are on ranges from start to stop, in order: one succeeds before the next begins.

    >>> by_halves(4, lambda start, stop: [10 // (n - 2) for n in range(start, stop)])
    ([[-5, -10], [10]], {2: ZeroDivisionError('integer division or modulo by zero')})
    """
    results: list[T] = []
    errors: dict[int, BaseException] = {}
    pending = [(0, count)]
    while pending:
        start, stop = pending.pop()
        try:
            results.append(attempt(start, stop))
        except (OperatorFailed, MemoryError):  # not caused by a row
            raise
        except USER_ERRORS as error:
            if stop - start <= 1:
                if stop == start:
                    raise
                errors[start] = error
                continue
            middle = (start + stop) // 2
            pending += [(middle, stop), (start, middle)]
    return results, errors


def merged(parts: Sequence[Results]) -> Results:
    """The results of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    branches: dict[str, list[pa.RecordBatch]] = {}
    for part in parts:
        for branch, rows in part.items():
            branches.setdefault(branch, []).append(rows)
    return {branch: rows[0] if len(rows) == 1 else pa.concat_batches(rows) for branch, rows in branches.items()}


@dataclass(frozen=True)
class ErrorsBranch:
    """The errors branch of one input of an operator."""

    operator: Operator
    branch: str = ERRORS

    def rows(self, batch: pa.RecordBatch, reasons: Reasons) -> Results:
        """The bad rows of a batch, in its order; empty if there are none."""
        if not reasons:
            return {}
        places = sorted(reasons)
        columns = batch.take(pa.array(places, pa.int64())).columns
        texts = pa.array([reasons[place] for place in places], pa.string())
        schema = self.operator.spec.errors_schema(batch.schema)
        return {self.branch: pa.RecordBatch.from_arrays([*columns, texts], schema=schema)}

    def keys(self, keys: Sequence[Mapping[str, Any]], reasons: Sequence[str], takes: pa.Schema) -> Results:
        """Errors that have a key but no row; ``takes`` is the schema that a row would have."""
        schema = self.operator.spec.errors_schema(takes)
        columns = [pa.array([key.get(column.name) for key in keys], column.type) for column in takes]
        return {self.branch: pa.RecordBatch.from_arrays([*columns, pa.array(reasons, pa.string())], schema=schema)}


def without(batch: pa.RecordBatch, reasons: Reasons) -> pa.RecordBatch:
    """The other rows of a batch."""
    if not reasons:
        return batch
    return batch.take(pa.array(np.delete(np.arange(batch.num_rows), list(reasons))))


@dataclass(frozen=True)
class Screen:
    """Finds rows without a usable key or time, before an operator sees them.

    With ``on_error="fail"`` it finds none: the operator itself refuses them. ``times`` are columns of event times;
    ``present`` are columns that are needed for something else, each with its use.
    """

    branch: ErrorsBranch
    keys: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=dict)
    max_key: int | None = MAX_KEY

    @property
    def is_on(self) -> bool:
        """Whether bad rows leave by the errors branch."""
        return self.branch.operator.on_error is OnError.BRANCH

    def __call__(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Results]:
        """The good rows, and the bad ones by branch."""
        if not (reasons := self.reasons(batch)):
            return batch, {}
        return without(batch, reasons), self.branch.rows(batch, reasons)

    def reasons(self, batch: pa.RecordBatch) -> Reasons:
        """Why rows are bad; the first reason found for each."""
        found: Reasons = {}
        if not self.is_on:
            return found
        for name in self.keys:
            _note_nulls(found, batch, name, "a key")
        if self.keys and self.max_key is not None:
            self._note_long(found, batch, self.max_key)
        for name in self.times:
            _note_nulls(found, batch, name, "an event time")
            _note_far(found, batch, name)
        for name, use in self.present.items():
            _note_nulls(found, batch, name, use)
        return found

    def _note_long(self, found: Reasons, batch: pa.RecordBatch, most: int) -> None:
        sizes = key_sizes(batch, self.keys)
        if sizes is None:
            return
        for place in np.flatnonzero(sizes > most).tolist():
            text = f"the key ({', '.join(self.keys)}) takes {sizes[place]} bytes; at most {most} are allowed"
            found.setdefault(place, f"StateError: {text}")


def _note_nulls(found: Reasons, batch: pa.RecordBatch, name: str, use: str) -> None:
    column = batch.column(name)
    if column.null_count:
        for place in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            found.setdefault(place, f"SchemaError: column {name!r} is null, which cannot be {use}")


def _note_far(found: Reasons, batch: pa.RecordBatch, name: str) -> None:
    times = _instants(batch.column(name))
    if len(times) and (times.min() <= -FAR or times.max() >= FAR):
        for place in np.flatnonzero((times <= -FAR) | (times >= FAR)).tolist():
            text = f"column {name!r} is {times[place]} microseconds from 1970, too far for an event time"
            found.setdefault(place, f"SchemaError: {text}")


def _instants(column: pa.Array) -> npt.NDArray[np.int64]:
    times: npt.NDArray[np.int64] = pc.fill_null(column.view(pa.int64()), 0).to_numpy()
    return times


# ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def batch_step(operator: Operator, step: Callable[[pa.RecordBatch], Results]) -> OperatorStep:
    """The step of a batch function; ``step`` raises if the function cannot handle a batch."""

    def failing(batch: pa.RecordBatch) -> Results:
        return call_on_batch(operator.name, step, batch)

    branch = ErrorsBranch(operator)

    def tolerant(batch: pa.RecordBatch) -> Results:
        def attempt(start: int, stop: int) -> Results:
            return step(batch.slice(start, stop - start))

        parts, errors = _blamed(operator, batch.num_rows, attempt)
        return {**merged(parts), **branch.rows(batch, {place: reason_of(error) for place, error in errors.items()})}

    return failing if operator.on_error is OnError.FAIL else tolerant


def tolerant_rows(
    operator: Operator,
    function: Callable[[dict[str, Any]], Any],
    assemble: Callable[[pa.RecordBatch, list[Any]], Results],
) -> OperatorStep:
    """The step of a row function whose bad rows are set aside.

    ``assemble`` builds results from rows and the function's answers; it raises if an answer is invalid.
    """
    branch = ErrorsBranch(operator)

    def step(batch: pa.RecordBatch) -> Results:
        rows, reasons = checked_rows(operator, batch)
        places: list[int] = []
        answers: list[Any] = []
        for place, row in rows:
            try:
                answers.append(function(row))
            except MemoryError as error:
                raise failed(operator.name, error, None) from error
            except USER_ERRORS as error:
                reasons[place] = reason_of(error)
            else:
                places.append(place)
        kept = without(batch, reasons)

        def attempt(start: int, stop: int) -> Results:
            return assemble(kept.slice(start, stop - start), answers[start:stop])

        parts, errors = _blamed(operator, len(answers), attempt) if answers else ([], {})
        reasons.update((places[place], reason_of(error)) for place, error in errors.items())
        return {**merged(parts), **branch.rows(batch, reasons)}

    return step


def checked_rows(operator: Operator, batch: pa.RecordBatch) -> tuple[list[tuple[int, dict[str, Any]]], Reasons]:
    """The rows of a batch as dicts, with their positions; and the rows that Python cannot represent."""
    try:
        return list(enumerate(to_rows(batch))), {}
    except USER_ERRORS:
        pass

    def attempt(start: int, stop: int) -> list[tuple[int, dict[str, Any]]]:
        return list(enumerate(to_rows(batch.slice(start, stop - start)), start))

    parts, errors = _blamed(operator, batch.num_rows, attempt)
    return [row for part in parts for row in part], {place: reason_of(error) for place, error in errors.items()}


def _blamed(
    operator: Operator, count: int, attempt: Callable[[int, int], T]
) -> tuple[list[T], dict[int, BaseException]]:
    """:func:`by_halves`, where an error that no row causes fails the operator."""
    try:
        return by_halves(count, attempt)
    except OperatorFailed:
        raise
    except USER_ERRORS as error:
        raise failed(operator.name, error, None) from error
