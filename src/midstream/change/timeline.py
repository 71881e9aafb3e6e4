"""The timeline of a job, from the records of its changes: the revisions it has run, and the updates of each operator.

Pure. Restarts and reverts both use it, so that they mean the same by "revision 3".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from midstream.change.advice import never_sent
from midstream.change.configuration import FIRST_REVISION
from midstream.checkpoint.change_records import ChangeRecord, Outcome, RewireRecord, UpdateRecord
from midstream.ids import Revision
from midstream.planner.programs import StateMigration

__all__ = [
    "Course",
    "RevisionStep",
    "courses",
    "ended",
    "in_force",
    "known_revisions",
    "listed",
    "migrations_of",
    "rewound",
    "settled",
]

LISTED = 10
"""Most revisions that a message lists."""


@dataclass(frozen=True)
class RevisionStep:
    """An update of an operator, and the change that it was part of."""

    record: ChangeRecord
    update: UpdateRecord


@dataclass(frozen=True)
class Course:
    """The updates of one operator, oldest first; there is at least one."""

    steps: tuple[RevisionStep, ...]

    @property
    def first(self) -> UpdateRecord:
        """The oldest update; it records what the operator ran before."""
        return self.steps[0].update

    @property
    def newest(self) -> RevisionStep:
        """The update in force."""
        return self.steps[-1]

    @property
    def changed_columns(self) -> bool:
        """Whether changes altered the operator's columns. If not, the flow determines them."""
        return any(step.update.returns != step.update.returned for step in self.steps)


def in_force(records: Iterable[ChangeRecord]) -> list[ChangeRecord]:
    """The changes that were applied; pending ones count as applied. Migrations make no revision, and are left out.

    >>> in_force([ChangeRecord(1, Revision(2), 0.0, "ann@host", "fries", (), "", Outcome.ROLLED_BACK)])
    []
    """
    return [
        record for record in records if record.outcome in (Outcome.APPLIED, Outcome.PENDING) and not record.migration
    ]


def courses(records: Iterable[ChangeRecord]) -> dict[str, Course]:
    """The updates of each operator since the script alone was last in force, and since the operator was added."""
    found: dict[str, list[RevisionStep]] = {}
    for record in records:
        if record.drops:
            found.clear()
        for edit in record.plan_edits:
            if not isinstance(edit, RewireRecord):
                found.pop(edit.operator, None)  # another operator from here on, or none
        for update in record.updates:
            found.setdefault(update.operator, []).append(RevisionStep(record, update))
    return {operator: Course(tuple(steps)) for operator, steps in found.items()}


def migrations_of(records: Iterable[ChangeRecord]) -> dict[str, tuple[StateMigration, ...]]:
    """All migrations that state may need, by operator, oldest first. They outlive the functions they came with."""
    found: dict[str, tuple[StateMigration, ...]] = {}
    for record in records:
        for update in record.updates:
            if update.migrate is not None:
                step = StateMigration(record.revision, update.migrate)
                found[update.operator] = (*found.get(update.operator, ()), step)
    return found


def known_revisions(records: Iterable[ChangeRecord]) -> dict[Revision, str]:
    """The revisions whose functions are known, with descriptions; none from before ``changes="drop"``."""
    known = {FIRST_REVISION: "the script"}
    for record in in_force(records):
        if record.drops:
            known = {record.revision: "the script, by changes='drop'"}
        else:
            known[record.revision] = _described(record)
    return known


def listed(known: Mapping[Revision, str]) -> str:
    """The revisions as text for a message; of very many, the first one and the newest.

    >>> listed({Revision(1): "the script", Revision(2): "FM: score"})
    '1 (the script), 2 (FM: score)'
    """
    texts = [f"{revision} ({what})" for revision, what in known.items()]
    if len(texts) > LISTED + 1:
        texts = [texts[0], "…", *texts[-LISTED:]]
    return ", ".join(texts)


def settled(
    records: Iterable[ChangeRecord], committed: Revision | None
) -> tuple[list[ChangeRecord], ChangeRecord | None]:
    """The records of a job whose driver has ended, with their known outcomes; and the change that goes on trial.

    ``committed`` is the revision of the last committed epoch. A change on trial that is older was applied; the driver
    died before it could record that. Changes after the one on trial were never sent to a task. Nor was one whose
    revision is lower than that of an earlier change: it was waiting to be prepared again. Migrations stay as they are:
    they have an order of their own.
    """
    found: list[ChangeRecord] = []
    pending: ChangeRecord | None = None
    highest = FIRST_REVISION
    for record in records:
        if record.migration is not None:
            found.append(record)
            continue
        if record.drops and record.outcome is not Outcome.REWOUND and pending is not None:
            _replace(found, _taken_off(pending, committed, "changes='drop' left it out"))
            pending = None
        if record.outcome is Outcome.PENDING:
            if pending is not None or record.revision < highest:
                record = msgspec.structs.replace(record, outcome=Outcome.REFUSED, error=never_sent("the driver ended"))
            elif committed is not None and record.revision < committed:
                record = msgspec.structs.replace(record, outcome=Outcome.APPLIED, error=None)
            else:
                pending = record
        if record.outcome is not Outcome.REFUSED:
            highest = max(highest, record.revision)
        found.append(record)
    return found, pending


def ended(records: Iterable[ChangeRecord], committed: Revision | None, why: str) -> list[ChangeRecord]:
    """The records as in :func:`settled`, but the change that would go on trial again ends instead."""
    found, pending = settled(records, committed)
    if pending is not None:
        _replace(found, _taken_off(pending, committed, why))
    return found


def rewound(records: Iterable[ChangeRecord], revision: Revision, why: str) -> list[ChangeRecord]:
    """The records of a job that goes back to the end of an epoch under ``revision``: later changes no longer count.

    >>> later = ChangeRecord(1, Revision(2), 0.0, "ann@host", "fries", (), "", Outcome.APPLIED)
    >>> [str(record.outcome) for record in rewound([later], Revision(1), "to epoch 3")]
    ['rewound']
    """
    return [
        msgspec.structs.replace(record, outcome=Outcome.REWOUND, error=why)
        if record.outcome in (Outcome.APPLIED, Outcome.PENDING) and record.revision > revision
        else record
        for record in records
    ]


def _taken_off(pending: ChangeRecord, committed: Revision | None, why: str) -> ChangeRecord:
    """The record of a change on trial that is not continued.

    If it was in effect in a committed epoch, it was applied: its rows and the state that it migrated stay. If not, it
    has left no trace.
    """
    if committed is not None and pending.revision <= committed:
        return msgspec.structs.replace(pending, outcome=Outcome.APPLIED, error=None)
    return msgspec.structs.replace(pending, outcome=Outcome.ROLLED_BACK, error=why)


def _replace(records: list[ChangeRecord], record: ChangeRecord) -> None:
    records[[each.number for each in records].index(record.number)] = record


def _described(record: ChangeRecord) -> str:
    what = ", ".join(map(str, record.edits))
    text = "; ".join(part for part in (record.note, what) if part)
    return f"{text}, pending" if record.outcome is Outcome.PENDING else text
