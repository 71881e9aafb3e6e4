"""The auditor: was every source row processed wholly before or wholly after each change?

In audit mode a job records its data operations: which source row was processed by which operator, under which revision.
From that history and the list of changes, :func:`decide` determines whether it is conflict-serialisable (sections 4.2
and 4.3 of the Fries paper): whether the rows could have been processed one after another, with every change made at one
moment between two of them. If not, it names a row that proves it.

Figure 2 of the paper: revision 2 changed FM and MC. Row 17 had passed FM when FM changed, but reached MC after MC had
changed.

>>> history = [
...     OperatorSeen(16, "FM", Revision(1)), OperatorSeen(16, "MC", Revision(1)),
...     OperatorSeen(17, "FM", Revision(1)), OperatorSeen(17, "MC", Revision(2)),
...     OperatorSeen(18, "FM", Revision(2)), OperatorSeen(18, "MC", Revision(2)),
... ]
>>> verdict = decide(history, {Revision(2): ["FM", "MC"]})
>>> verdict.serialisable
False
>>> print(verdict)
not serialisable: 1 of 3 rows saw a mixture of revisions.
row 17 passed 'FM' under revision 1 and 'MC' under revision 2; revision 2 changed both

How it decides: a row that was processed by operator o under revision r comes after all changes up to r that updated o,
and before all later ones. Changes are ordered by revision, whether or not they have operators in common: a row that saw
a later change but not an earlier one saw a configuration that the job never had. Rows do not conflict with each other,
so every cycle in the precedence graph of rows and changes has a row between a change and one that is not later. So
there is a cycle exactly if some row comes after one change and before the same or an earlier one.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.errors import FlowError, SchemaError
from midstream.ids import Revision

__all__ = ["OperatorSeen", "RecordedHistory", "Verdict", "Witness", "decide"]

_Integers = npt.NDArray[np.int64]
_NEVER = np.iinfo(np.int64).min
_ALWAYS = np.iinfo(np.int64).max
_COLUMNS = ("row", "operator", "revision")


@dataclass(frozen=True)
class OperatorSeen:
    """A data operation: the source row for which it was done, the operator, and the operator's revision."""

    row: Hashable
    operator: str
    revision: Revision


@dataclass(frozen=True, eq=False)
class RecordedHistory:
    """A history in columns, one entry per operation; real histories have millions.

    ``rows`` and ``operators`` are indexes into ``row_ids`` and ``names``.
    """

    rows: _Integers
    operators: _Integers
    revisions: _Integers
    row_ids: Sequence[Any]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, history: Iterable[OperatorSeen] | pa.Table) -> RecordedHistory:
        """A history from operations, or from a table with the columns ``row``, ``operator`` and ``revision``.

        >>> table = pa.table({"row": [7, 7, 9], "operator": ["FM", "MC", "FM"], "revision": [1, 1, 1]})
        >>> len(RecordedHistory.of(table)), RecordedHistory.of(table).names
        (3, ('FM', 'MC'))
        """
        return _from_table(history) if isinstance(history, pa.Table) else _from_operations(history)

    def operation(self, index: int) -> OperatorSeen:
        """One entry."""
        row = self.row_ids[self.rows[index]]
        return OperatorSeen(
            row.as_py() if isinstance(row, pa.Scalar) else row,
            self.names[self.operators[index]],
            Revision(int(self.revisions[index])),
        )


@dataclass(frozen=True)
class Witness:
    """Two operations of one source row that contradict each other.

    ``before`` came before the change ``missed``, which updated its operator; ``after`` came after the change ``met``,
    which updated its operator and is the same or a later change.
    """

    before: OperatorSeen
    after: OperatorSeen
    missed: Revision
    met: Revision

    def __str__(self) -> str:
        row, before, after = self.before.row, self.before, self.after
        if before.operator == after.operator:
            return (
                f"row {row} passed {before.operator!r} under revision {before.revision} and again under revision "
                f"{after.revision}; revision {self.missed} changed it"
            )
        passed = f"row {row} passed {before.operator!r} under revision {before.revision} and {after.operator!r} under"
        if self.missed == self.met:
            return f"{passed} revision {after.revision}; revision {self.met} changed both"
        return (
            f"{passed} revision {after.revision}; but revision {self.missed} changed the one before revision "
            f"{self.met} changed the other"
        )


@dataclass(frozen=True)
class Verdict:
    """The result of an audit. ``violations`` counts the source rows that saw a mixture, ``witness`` is one example."""

    operations: int
    rows: int
    violations: int
    witness: Witness | None

    @property
    def serialisable(self) -> bool:
        """Whether every row was processed wholly before or wholly after each change."""
        return self.witness is None

    def __str__(self) -> str:
        if self.witness is None:
            return (
                f"serialisable: {self.operations:,} operations of {self.rows:,} rows, none with a mixture of revisions."
            )
        return (
            f"not serialisable: {self.violations:,} of {self.rows:,} rows saw a mixture of revisions.\n{self.witness}"
        )


def decide(
    history: Iterable[OperatorSeen] | pa.Table | RecordedHistory, changes: Mapping[Revision, Collection[str]]
) -> Verdict:
    """Decide whether a history is conflict-serialisable, given the operators that each revision updated.

    The history must be complete: an operation that was not recorded cannot reveal a violation. A million operations
    take a fraction of a second.

    >>> met = pa.table({"row": [7, 8, 7], "operator": ["FMX", "FMX", "FMX"], "revision": [1, 1, 2]})
    >>> print(decide(met, {Revision(2): {"FMX"}}).witness)
    row 7 passed 'FMX' under revision 1 and again under revision 2; revision 2 changed it
    >>> print(decide(met, {Revision(2): {"FMY"}}))
    serialisable: 3 operations of 2 rows, none with a mixture of revisions.
    """
    recorded = history if isinstance(history, RecordedHistory) else RecordedHistory.of(history)
    met, missed = _bounds(recorded, _changes_of(changes, recorded.names))
    last_met = np.full(len(recorded.row_ids), _NEVER)
    first_missed = np.full(len(recorded.row_ids), _ALWAYS)
    np.maximum.at(last_met, recorded.rows, met)
    np.minimum.at(first_missed, recorded.rows, missed)
    mixed = last_met >= first_missed
    mixed_rows = mixed[recorded.rows]
    witness = _witness(recorded, met, missed, int(np.argmax(mixed_rows))) if mixed_rows.any() else None
    rows = int(np.count_nonzero(np.bincount(recorded.rows, minlength=1)))
    return Verdict(len(recorded), rows, int(np.count_nonzero(mixed)), witness)


def _changes_of(changes: Mapping[Revision, Collection[str]], names: Sequence[str]) -> list[_Integers]:
    """The revisions that updated each operator, ascending."""
    for revision, operators in changes.items():
        if isinstance(operators, str):
            raise FlowError(
                f"revision {revision} must have a collection of operators; found the string {operators!r}. Use e.g. "
                f"[{operators!r}]"
            )
    ordered = sorted(changes)
    return [np.array([revision for revision in ordered if name in changes[revision]], np.int64) for name in names]


def _bounds(recorded: RecordedHistory, changed: list[_Integers]) -> tuple[_Integers, _Integers]:
    """For each operation, the last change of its operator before it, and the first after it."""
    met = np.full(len(recorded), _NEVER)
    missed = np.full(len(recorded), _ALWAYS)
    for operator, revisions in enumerate(changed):
        if len(revisions):
            at = np.flatnonzero(recorded.operators == operator)
            place = np.searchsorted(revisions, recorded.revisions[at], side="right")
            met[at] = np.concatenate(([_NEVER], revisions))[place]
            missed[at] = np.concatenate((revisions, [_ALWAYS]))[place]
    return met, missed


def _witness(recorded: RecordedHistory, met: _Integers, missed: _Integers, found: int) -> Witness:
    """The evidence for the row of operation ``found``; with one change only, if one is enough to prove it."""
    at = np.flatnonzero(recorded.rows == recorded.rows[found])
    both = np.intersect1d(met[at], missed[at])
    if len(both):
        before, after = at[missed[at] == both[0]][0], at[met[at] == both[0]][0]
    else:
        before, after = at[np.argmin(missed[at])], at[np.argmax(met[at])]
    return Witness(
        recorded.operation(int(before)),
        recorded.operation(int(after)),
        Revision(int(missed[before])),
        Revision(int(met[after])),
    )


def _from_operations(operations: Iterable[OperatorSeen]) -> RecordedHistory:
    rows: dict[Hashable, int] = {}
    names: dict[str, int] = {}
    found = [
        (rows.setdefault(each.row, len(rows)), names.setdefault(each.operator, len(names)), int(each.revision))
        for each in operations
    ]
    columns = np.array(found, np.int64).reshape(-1, 3)
    return RecordedHistory(columns[:, 0], columns[:, 1], columns[:, 2], tuple(rows), tuple(names))


def _from_table(table: pa.Table) -> RecordedHistory:
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise SchemaError(
            f"a history needs the columns {', '.join(map(repr, _COLUMNS))}; {missing[0]!r} is missing, found "
            f"{', '.join(map(repr, table.column_names)) or 'none'}"
        )
    for name in _COLUMNS:
        if table.column(name).null_count:
            raise SchemaError(f"column {name!r} of a history has nulls; every operation needs a row and a revision")
    rows, row_ids = _numbered(table.column("row"))
    operators, names = _numbered(table.column("operator"))
    revisions = pc.cast(table.column("revision"), pa.int64()).to_numpy()
    return RecordedHistory(rows, operators, revisions, row_ids, tuple(str(name) for name in names))


def _numbered(column: pa.ChunkedArray) -> tuple[_Integers, Sequence[Any]]:
    """The values as numbers, and the value of each number."""
    if pa.types.is_nested(column.type):  # Arrow cannot dictionary-encode lists and structs
        numbers: dict[str, int] = {}
        values: list[Any] = []
        codes = []
        for value in column.to_pylist():
            code = numbers.setdefault(repr(value), len(numbers))
            if code == len(values):
                values.append(value)
            codes.append(code)
        return np.array(codes, np.int64), values
    encoded = column.combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    elif len(pc.unique(encoded.dictionary)) != len(encoded.dictionary):
        encoded = encoded.dictionary_decode().dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary
