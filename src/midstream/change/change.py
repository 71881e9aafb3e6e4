"""The user's handle on a requested change: its progress and its outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from midstream.change.prepare import PreparedChange
from midstream.checkpoint.change_records import ChangeEvent, ChangeRecord, Outcome
from midstream.errors import ChangeFailed
from midstream.ids import Epoch, Revision
from midstream.planner.change_plan import ChangePlan

__all__ = ["Change", "ChangeTimes", "TrialProgress"]


@dataclass(frozen=True)
class TrialProgress:
    """Progress of a change's trial.

    It ends once no operator is ``unmet``, or after ``at_most`` committed epochs.
    """

    epochs: int
    """Committed epochs that began under the change."""
    at_most: int
    unmet: tuple[str, ...]
    """Updated operators that have processed no rows in these epochs."""


@dataclass(frozen=True)
class ChangeTimes:
    """The life of a change in times. Lengths are in milliseconds, and None until they are known."""

    requested_at: float
    """In seconds since 1970, like all moments here."""
    preparation_ms: float
    """Time to check, store and try its functions."""
    waited_ms: float | None
    """Time that it waited behind earlier changes."""
    delay_ms: float | None
    """Time from the request until the change was in effect in every task."""
    trial_ms: float | None
    """Time from the beginning of the trial until its end."""
    ended_at: float | None

    @classmethod
    def of(cls, record: ChangeRecord) -> ChangeTimes:
        """The times in a record."""
        return cls(
            record.requested_at,
            record.preparation_ms,
            record.waited_ms,
            record.delay_ms,
            record.trial_ms,
            record.ended_at,
        )


class Change:
    """A change of a job, in progress or ended. Made by :meth:`midstream.Job.update`, ``deploy`` and ``revert``.

    All methods may be called from any thread::

        change = job.update(Update("score", better_score))
        if change.wait(60) is not Outcome.APPLIED:
            print(change.error)
    """

    def __init__(self, prepared: PreparedChange, record: ChangeRecord, stopwatch: Callable[[], float]) -> None:
        self._prepared: PreparedChange | None = prepared
        self._plan = prepared.plan
        self._record = record
        self._events = list(record.events)
        """All events. The record gets them only when it is read, because each task adds two or three."""
        self._trial: TrialProgress | None = None
        self._stopwatch = stopwatch
        self._began = stopwatch()
        self._on_trial_since: float | None = None
        self._is_over = False
        self._moved = threading.Condition()

    def __repr__(self) -> str:
        return f"Change(revision {self.revision}, {self._record.subjects}: {self.outcome})"

    @property
    def revision(self) -> Revision:
        """The revision that this change leads to."""
        return self._record.revision

    @property
    def plan(self) -> ChangePlan:
        """The operators that change together, and where the change begins."""
        return self._plan

    @property
    def prepared(self) -> PreparedChange:
        """The prepared change, dropped when this one has ended: users may keep handles long after that."""
        assert self._prepared is not None, f"{self!r} has ended"
        return self._prepared

    @property
    def record(self) -> ChangeRecord:
        """Its record in the history, up to now."""
        with self._moved:
            return self._up_to_date()

    @property
    def outcome(self) -> Outcome:
        """Pending, applied, rolled back, reverted or refused."""
        return self._record.outcome

    @property
    def trial(self) -> TrialProgress | None:
        """Progress of its trial; None while it waits for an earlier change."""
        return self._trial

    @property
    def time_limit_s(self) -> float | None:
        """Seconds that an epoch on trial may take, counted from when the change takes effect in it."""
        return self._record.time_limit_s

    @property
    def delay_ms(self) -> float | None:
        """Milliseconds from the request until it was in effect; None if it is not in effect yet."""
        return self._record.delay_ms

    @property
    def met(self) -> str | None:
        """Whether it met running tasks or fell between two epochs, in plain words; None if it is not in effect yet."""
        return self.record.met

    @property
    def events(self) -> tuple[ChangeEvent, ...]:
        """The events of the change, task by task."""
        return self.record.events

    @property
    def error(self) -> str | None:
        """Why it was rolled back or refused."""
        return self._record.error

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait until the outcome is known, and return it; pending if the time runs out or the job ends first.

        Applied means that its trial is over: epochs that ran entirely under it are committed. Does not raise if the
        change failed: see :attr:`outcome` and :attr:`error`, or use :meth:`require`.
        """
        with self._moved:
            self._moved.wait_for(lambda: self._is_over, timeout)
        return self.outcome

    def wait_effect(self, timeout: float | None = None) -> float | None:
        """Wait until it is in effect in every task, or has failed; return :attr:`delay_ms`."""
        with self._moved:
            self._moved.wait_for(lambda: self.delay_ms is not None or self._is_over, timeout)
        return self.delay_ms

    def require(self, timeout: float | None = None) -> Change:
        """Wait until it is applied; raises :class:`~midstream.errors.ChangeFailed` if it is not."""
        if self.wait(timeout) is not Outcome.APPLIED:
            raise ChangeFailed(
                f"the change to revision {self.revision} ({self._record.subjects}) is {self.outcome}"
                + (f": {self.error}" if self.error else ""),
                outcome=str(self.outcome),
                revision=self.revision,
            )
        return self

    @property
    def times(self) -> ChangeTimes:
        """When it was requested, and how long it was prepared, waited, needed to take effect, and was on trial."""
        return ChangeTimes.of(self._record)

    # ── called by the job ─────────────────────────────────────────────────────────────────────────────────────────

    def note(
        self, what: str, task: str | None = None, operators: tuple[str, ...] = (), *, in_effect: bool = False
    ) -> None:
        """Add an event to the record. Called from several threads."""
        at_ms = round(1000 * (self._stopwatch() - self._began), 3)
        with self._moved:
            self._events.append(ChangeEvent(at_ms, what, task, operators))
            if in_effect and self._record.delay_ms is None:
                self._set(delay_ms=at_ms)

    def begins(self) -> None:
        """It is this change's turn: no earlier one is in progress."""
        with self._moved:
            self._on_trial_since = self._stopwatch()
            self._set(waited_ms=round(1000 * (self._on_trial_since - self._began), 3))

    def took_effect_in(self, epoch: Epoch) -> None:
        """Record the first epoch in which it is in effect."""
        with self._moved:
            if self._record.epoch is None:
                self._set(epoch=epoch)

    def progressed(self, trial: TrialProgress) -> None:
        """Its trial has begun or advanced."""
        with self._moved:
            self._trial = trial
            self._moved.notify_all()

    def relink(self, prepared: PreparedChange) -> None:
        """Replace the prepared change: the same one, with other owners of bins."""
        with self._moved:
            self._prepared = prepared

    def replan(self, prepared: PreparedChange) -> ChangeRecord:
        """Replace the prepared change, because what it was prepared on has changed; return the record."""
        with self._moved:
            self._prepared, self._plan = prepared, prepared.plan
            self._set(
                revision=prepared.after.revision,
                edits=prepared.edits,
                plan=prepared.describe(),
                configuration=prepared.after.document.digest,
            )
            return self._up_to_date()

    def end(self, outcome: Outcome, error: str | None, keep: Callable[[ChangeRecord], None], at: float) -> None:
        """End the change at this time. The record is kept before waiting threads wake up: they may read the history
        next."""
        with self._moved:
            since = self._on_trial_since
            ended = msgspec.structs.replace(
                self._up_to_date(),
                outcome=outcome,
                error=error,
                ended_at=None if outcome is Outcome.PENDING else at,
                trial_ms=None if since is None else round(1000 * (self._stopwatch() - since), 3),
            )
            keep(ended)
            self._record = ended
            self._is_over = True
            self._prepared = None
            self._moved.notify_all()

    def _up_to_date(self) -> ChangeRecord:
        """The record with all events. The caller holds the lock."""
        if len(self._record.events) < len(self._events):
            self._record = msgspec.structs.replace(self._record, events=tuple(self._events))
        return self._record

    def _set(self, **fields: object) -> None:
        """Update the record. The caller holds the lock: otherwise one of two concurrent updates could be lost."""
        self._record = msgspec.structs.replace(self._record, **fields)
        self._moved.notify_all()
