"""Reverts: the updates that undo all changes since a revision, for a job that is running or stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from midstream.change.configuration import FIRST_REVISION, Configuration
from midstream.change.knob_records import recorded_knobs, undone_knobs, untuned
from midstream.change.plan_records import Load, loaded_payload, steps_towards, undone_plan
from midstream.change.timeline import Course, courses, ended, in_force, known_revisions, listed
from midstream.checkpoint.change_records import (
    NOT_STORED,
    ChangeRecord,
    InsertRecord,
    Outcome,
    PlanRecord,
    RewireRecord,
    TuneRecord,
    UpdateRecord,
)
from midstream.checkpoint.retention import KEPT_REVISIONS
from midstream.errors import CheckpointError, FlowError
from midstream.flow.edits import Edit, Redraw, Tune, Update
from midstream.flow.model import Graph, Operator
from midstream.flow.plan_steps import Step
from midstream.ids import Digest, Revision
from midstream.planner.change_plan import Scheduler
from midstream.storage.blobs import BlobStore

__all__ = ["TakenBack", "Undoing", "reachable_revisions", "taken_back", "undoing"]

Migrate = Mapping[str, Callable[[Any, Any], None]]


@dataclass(frozen=True)
class _Back:
    """One operator at the revision to go back to, and its changes since."""

    function: Digest
    returns: str | None
    """The columns that it had; None if no change has altered them since."""
    newest: UpdateRecord
    layout: int
    """The current layout of its state; see :func:`_layouts`."""
    migrated_by: ChangeRecord | None
    """The change that migrated the state last, if the function to go back to has another layout."""

    @classmethod
    def of(cls, course: Course, number: int) -> _Back | None:
        """How an operator gets back to a change; None if nothing has changed since."""
        since = Course(tuple(step for step in course.steps if step.record.number > number))
        if not since.steps:
            return None
        layouts = _layouts(course)
        layout = layouts[-1]
        is_same = layout == layouts[len(course.steps) - len(since.steps)]
        migrated = [step.record for step in since.steps if step.update.migrate is not None]
        return cls(
            function=since.first.before,
            returns=since.first.returned if since.changed_columns else None,
            newest=since.newest.update,
            layout=layout,
            migrated_by=None if is_same else migrated[-1],
        )

    @property
    def is_there(self) -> bool:
        """Whether the operator already runs that function, with those columns and its own layout of state."""
        is_same = self.function == self.newest.function and self.returns in (None, self.newest.returns)
        return is_same and self.migrated_by is None


def _layouts(course: Course) -> list[int]:
    """The layout of an operator's state before its first update and after each one, named by the change that made it.

    A migration that comes with an earlier function restores that function's layout.
    """
    layouts, known = [0], {course.first.before: 0}
    for step in course.steps:
        update, layout = step.update, layouts[-1]
        if update.migrate is not None:
            is_back = update.function in known and update.function != update.before
            layout = known[update.function] if is_back else step.record.number
        known[update.function] = layout
        layouts.append(layout)
    return layouts


@dataclass(frozen=True)
class Undoing:
    """The edits that lead back to a revision, and where their functions are stored.

    ``number`` is the change that led to the revision, 0 for the script; ``migrated`` has the layouts from which the
    updates migrate state back, by operator. ``steps`` undo changes of the plan, with what ``load`` gets for operators
    that come back. While a revert waits for its turn, earlier changes may fail or get another revision: :meth:`again`
    returns what is left to undo. ``tunes`` sets knobs back.
    """

    revision: Revision
    number: int
    updates: tuple[Update, ...]
    stored: Mapping[str, Digest]
    migrated: Mapping[str, int]
    steps: tuple[Step, ...] = ()
    load: Load | None = None
    tunes: tuple[Tune, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits of the revert."""
        return (*([Redraw(self.steps)] if self.steps else []), *self.updates, *self.tunes)

    def again(self, records: Iterable[ChangeRecord], graph: Graph) -> Undoing:
        """The same, given the outcomes known now; ``records`` are those of the changes before the revert, and ``graph``
        is what they lead to.

        Runs none of the user's code. Raises :class:`FlowError` if nothing is left to undo, the change to the revision
        failed, or state is not in the layout that ``migrate=`` was written for.
        """
        records = list(records)
        target = next((record for record in records if record.number == self.number), None)
        if target is not None and target.outcome not in (Outcome.APPLIED, Outcome.PENDING):
            raise _no_revision(self.revision, records, target)
        given = {update.operator: update for update in self.updates}
        back = _way_back(records, self.number)
        if strangers := sorted(set(back) - set(given)):
            raise FlowError(
                f"{', '.join(strangers)} changed while the way back to revision {self.revision} was being prepared; "
                f"revert again"
            )
        since = _since(records, self.number)
        undone, tunes = undone_plan(since), untuned(since)
        assert self.load is not None
        steps = steps_towards(graph, undone, self.load)
        _require_work(back, self.revision, steps, tunes)
        updates = tuple(self._again(given[operator], each) for operator, each in back.items())
        stored = {operator: each.function for operator, each in back.items()}
        return replace(self, updates=updates, stored={**_returning(undone), **stored}, steps=steps, tunes=tunes)

    def _again(self, update: Update, back: _Back) -> Update:
        migrate, now = update.migrate, back.migrated_by
        expected = self.migrated.get(update.operator)
        if now is None and expected is not None:
            migrate = None  # the migration that it undoes has been rolled back
        elif now is not None and back.layout != expected:
            raise FlowError(
                f"an earlier change has failed, so the state of {update.operator!r} is in the layout of revision "
                f"{now.revision}, which migrate= was not written for. "
                f"Revert to revision {self.revision} again, with a migrate= for that layout"
            )
        return replace(update, migrate=migrate, returns=None if update.returns is None else back.returns)


def undoing(
    records: Iterable[ChangeRecord],
    revision: Revision,
    current: Configuration,
    store: BlobStore,
    migrate: Migrate | None = None,
) -> Undoing:
    """The updates that lead a running job back to ``revision``; they undo changes in progress, too.

    ``current`` is what the job runs once those have taken effect. Loads functions, so the user's code runs here. Raises
    :class:`FlowError` if there is no way back, or nothing to undo.
    """
    records = list(records)
    number = _number_of(revision, records)
    since = _since(records, number)
    undone, tunes = undone_plan(since), untuned(since)
    loaded: dict[tuple[str, Digest], Any] = {}

    def load(op: Operator, digest: Digest) -> Any:
        """Each object once: later nothing of the user's may run."""
        if (op.name, digest) not in loaded:
            loaded[op.name, digest] = _loaded(op, digest, revision, store)
        return loaded[op.name, digest]

    steps = steps_towards(current.graph, undone, load)
    back = {name: each for name, each in _way_back(records, number).items() if name in current.graph}
    for operator, each in back.items():
        if each.function == NOT_STORED:
            raise _not_stored(operator, revision)
    _require_work(back, revision, steps, tunes)
    _require_stored(back, revision, records, store)
    given = dict(migrate or {})
    _check_steps(given, back)
    updates = []
    for operator, each in back.items():
        spec = current.graph[operator].spec
        function = load(current.graph[operator], each.function)
        if spec.divides:
            function = function[0]
        returns = each.returns if spec.declares_columns else None
        updates.append(Update(operator, function, migrate=given.get(operator), returns=returns))
    return Undoing(
        revision,
        number,
        tuple(updates),
        stored={**_returning(undone), **{operator: each.function for operator, each in back.items()}},
        migrated={name: each.layout for name, each in back.items() if each.migrated_by is not None},
        steps=steps,
        load=load,
        tunes=tunes,
    )


def _since(records: Iterable[ChangeRecord], number: int) -> list[ChangeRecord]:
    """The changes in force after a change."""
    return [record for record in in_force(records) if record.number > number]


def _returning(undone: Iterable[PlanRecord]) -> dict[str, Digest]:
    """The digests of what the operators that come back run."""
    return {
        edit.operator: edit.function
        for edit in undone
        if isinstance(edit, InsertRecord) and edit.function != NOT_STORED
    }


def _loaded(op: Operator, digest: Digest, revision: Revision, store: BlobStore) -> Any:
    try:
        return loaded_payload(op, store.get(digest))
    except CheckpointError:
        raise
    except Exception as error:  # a user's module may raise anything when it is imported
        raise FlowError(
            f"what {op.name!r} ran at revision {revision} can no longer be loaded: {type(error).__name__}: "
            f"{error}. Bring back what it needs, or update the operator to something else"
        ) from error


@dataclass(frozen=True)
class TakenBack:
    """All records after the revert of a job that is not running; ``changed`` are those to write.

    ``record`` is None if the job would run that revision anyway.
    """

    records: tuple[ChangeRecord, ...]
    changed: tuple[ChangeRecord, ...]
    record: ChangeRecord | None


def taken_back(
    records: Sequence[ChangeRecord],
    revision: Revision,
    committed: Revision | None,
    store: BlobStore,
    migrates: Mapping[str, Digest],
    *,
    by: str,
    now: float,
    how: str,
) -> TakenBack:
    """Decide how the next start of a job runs what it ran at ``revision``.

    Uses only the records and ``committed``, the revision of the last committed epoch; loads and writes nothing. A
    change that was in progress when the driver died ends here. ``migrates`` are stored functions.
    """
    note = f"back to revision {revision}, {how}"
    settled = ended(records, committed, f"{by} reverted it: {note}")
    number = _number_of(revision, settled)
    back = _way_back(settled, number)
    undone = undone_plan(_since(settled, number))
    knobs = undone_knobs(_since(settled, number))
    if all(each.is_there for each in back.values()):
        back = {}
    ran = courses(record for record in in_force(settled) if record.number <= number)
    for operator, each in back.items():
        if each.function == NOT_STORED and operator in ran:
            raise _not_stored(operator, revision)
    _require_stored(back, revision, settled, store)
    _check_steps(migrates, back)
    changed = [after for before, after in zip(records, settled, strict=True) if before != after]
    if not (back or undone or knobs or any(record.outcome is Outcome.ROLLED_BACK for record in changed)):
        return TakenBack(tuple(settled), tuple(changed), None)
    highest = max([committed or FIRST_REVISION, *(record.revision for record in settled)])
    record = ChangeRecord(
        number=max((record.number for record in settled), default=0) + 1,
        revision=Revision(highest + 1),
        requested_at=now,
        by=by,
        scheduler=str(Scheduler.EPOCH),
        edits=(
            *undone,
            *(_update_back(operator, each, migrates.get(operator), settled) for operator, each in back.items()),
            *([TuneRecord(knobs, {name: recorded_knobs(settled).get(name) for name in knobs})] if knobs else []),
        ),
        plan=f"while the job was not running: it starts with what revision {revision} ran",
        outcome=Outcome.APPLIED,
        note=note,
    )
    return TakenBack((*settled, record), (*changed, record), record)


def _update_back(operator: str, back: _Back, migrate: Digest | None, records: Iterable[ChangeRecord]) -> UpdateRecord:
    same = [
        update
        for record in records
        for update in record.updates
        if (update.operator, update.function) == (operator, back.function)
    ]
    found = same[-1] if same else None
    return UpdateRecord(
        operator=operator,
        label="its first function" if found is None else found.label,
        function=back.function,
        source="" if found is None else found.source,
        before=back.newest.function,
        returns=back.newest.returns if back.returns is None else back.returns,
        returned=back.newest.returns,
        migrate=migrate,
    )


def _way_back(records: Iterable[ChangeRecord], number: int) -> dict[str, _Back]:
    """What the operators that have been in the flow since a change ran at that time; for the others see
    :func:`undone_plan`."""
    records = list(records)
    found = {operator: _Back.of(course, number) for operator, course in courses(in_force(records)).items()}
    came = {edit.operator for edit in undone_plan(_since(records, number)) if not isinstance(edit, RewireRecord)}
    return {operator: each for operator, each in found.items() if each is not None and operator not in came}


def _number_of(revision: Revision, records: Sequence[ChangeRecord]) -> int:
    """The change that led to a revision, 0 for the script; raises if what ran then is not known."""
    if revision in known_revisions(records):
        return 0 if revision == FIRST_REVISION else next(r.number for r in in_force(records) if r.revision == revision)
    # The record of a refused change has the revision that ran at the time.
    gone = (Outcome.REFUSED, Outcome.REWOUND)
    found = next((r for r in records if r.revision == revision and r.outcome not in gone), None)
    if revision == FIRST_REVISION or (found is not None and found.outcome is Outcome.APPLIED):
        raise FlowError(
            f"the job was started with changes='drop' after revision {revision}, so what ran then is no longer known; "
            f"update the operators one by one instead. It can go back to "
            f"{listed(known_revisions(records))}"
        )
    raise _no_revision(revision, records, found)


def _no_revision(revision: Revision, records: Iterable[ChangeRecord], found: ChangeRecord | None) -> FlowError:
    known = listed(known_revisions(records))
    if found is None:
        return FlowError(f"there is no revision {revision} to go back to; the job has run {known}")
    return FlowError(
        f"there is no revision {revision} to go back to: that change ({', '.join(found.operators)}) was "
        f"{found.outcome}. The job has run {known}"
    )


def _require_work(
    back: Mapping[str, _Back], revision: Revision, steps: Sequence[Step] = (), tunes: Sequence[Tune] = ()
) -> None:
    if not (steps or tunes) and all(each.is_there for each in back.values()):
        raise FlowError(f"the job runs what it ran at revision {revision}; there is nothing to revert")


def reachable_revisions(records: Sequence[ChangeRecord], is_stored: Callable[[Digest], bool]) -> dict[Revision, str]:
    """The revisions whose functions are all still stored, with a description of each."""
    return {
        revision: what
        for revision, what in known_revisions(records).items()
        if all(
            each.function != NOT_STORED and is_stored(each.function)
            for each in _way_back(records, _number_of(revision, records)).values()
        )
        and all(map(is_stored, _returning(undone_plan(_since(records, _number_of(revision, records)))).values()))
    }


def _require_stored(
    back: Mapping[str, _Back], revision: Revision, records: Sequence[ChangeRecord], store: BlobStore
) -> None:
    gone = [name for name, each in back.items() if each.function != NOT_STORED and not store.has(each.function)]
    if gone:
        raise FlowError(
            f"what {', '.join(map(repr, gone))} ran at revision {revision} is no longer stored: only the functions of "
            f"the newest {KEPT_REVISIONS} applied changes are kept. The job can go back to "
            f"{listed(reachable_revisions(records, store.has))}; or update the operator by hand"
        )


def _not_stored(operator: str, revision: Revision) -> FlowError:
    return FlowError(
        f"transform {operator!r} had a function at revision {revision} that is not stored; update it by hand: "
        f"job.update(Update({operator!r}, …))"
    )


def _check_steps(steps: Mapping[str, Any], back: Mapping[str, _Back]) -> None:
    if strangers := sorted(set(steps) - set(back)):
        raise FlowError(f"migrate= names {', '.join(strangers)}; the revert affects {', '.join(back) or 'none'}")
    for operator, each in back.items():
        if each.migrated_by is not None and operator not in steps:
            raise FlowError(
                f"the state of {operator!r} was migrated by revision {each.migrated_by.revision}, so its old function "
                f"could not read it; pass a migration back: migrate={{{operator!r}: function(key, state)}}, or "
                f"midstream revert … --migrate {operator}=MODULE:FUNCTION"
            )
