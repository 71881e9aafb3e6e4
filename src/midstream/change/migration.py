"""The user's handle on a migration: its progress, its outcome, and how to cancel or reverse it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from midstream.checkpoint.change_records import ChangeEvent, ChangeRecord, MigrationRecord, Outcome, StepRecord
from midstream.errors import ChangeFailed

__all__ = ["Migration", "MigrationControl", "MigrationProgress"]

KEPT_EVENTS = 200
KEPT_STEPS = 1000


class MigrationProgress(msgspec.Struct, frozen=True):
    """The progress of a migration. Finished steps are committed: a crash does not take them back.

    ``steps`` is the number of steps left, as far as the strategy knows: that of ``budgeted`` depends on what the next
    ones cost. ``left_s`` is the time that they will take at the pace of the last epochs; None: not known yet.
    """

    bins: int = 0
    bins_done: int = 0
    bytes: int = 0
    bytes_done: int = 0
    steps_done: int = 0
    steps_left: int | None = None
    left_s: float | None = None
    is_waiting_for: str | None = None
    """Why no bin moves at present: an epoch to come, an earlier migration, a change, takers that load state."""

    @property
    def share(self) -> float:
        """The finished share, from 0 to 1.

        >>> MigrationProgress(bins=8, bins_done=2).share
        0.25
        """
        return self.bins_done / self.bins if self.bins else 0.0


class MigrationControl(Protocol):
    """The driver's interface for handles."""

    def cancel_migration(self, migration: Migration) -> None:
        """Make no more steps."""

    def reverse_migration(self, migration: Migration) -> Migration:
        """Go back to where the bins were."""


@dataclass(frozen=True)
class _Now:
    record: ChangeRecord
    progress: MigrationProgress = field(default_factory=MigrationProgress)
    steps: tuple[StepRecord, ...] = ()
    is_over: bool = False


class Migration:
    """A migration of a job, in progress or ended. Made by :meth:`midstream.Job.migrate`, ``rescale``, ``rebalance``
    and ``drain``.

    All methods may be called from any thread::

        migration = job.rescale(8)
        print(migration.progress)
        migration.require()  # until every bin is where it should be
    """

    def __init__(self, record: ChangeRecord, control: MigrationControl, stopwatch: Callable[[], float]) -> None:
        self._now = _Now(record)
        self._control = control
        self._stopwatch = stopwatch
        self._began = stopwatch()
        self._moved = threading.Condition()

    def __repr__(self) -> str:
        progress = self.progress
        return f"Migration({self.record.subjects}: {self.outcome}, {progress.bins_done} of {progress.bins} bins)"

    @property
    def number(self) -> int:
        """Its number in the history."""
        return self.record.number

    @property
    def record(self) -> ChangeRecord:
        """Its record in the history, up to now."""
        return self._now.record

    @property
    def plan(self) -> MigrationRecord:
        """How it is made: strategy, where the bins were, and where they are to be."""
        found = self.record.migration
        assert found is not None
        return found

    @property
    def outcome(self) -> Outcome:
        """Pending, applied, stopped, reverted (it was reversed) or refused."""
        return self.record.outcome

    @property
    def progress(self) -> MigrationProgress:
        """Its progress."""
        return self._now.progress

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The committed steps in this life of the driver, with what each has cost; the newest ones, if very many."""
        return self._now.steps

    @property
    def events(self) -> tuple[ChangeEvent, ...]:
        """Its events, in order."""
        return self.record.events

    @property
    def error(self) -> str | None:
        """Why it stopped or was refused."""
        return self.record.error

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait until it has ended, and return the outcome; pending if the time runs out or the job ends first: a
        restart goes on with it."""
        with self._moved:
            self._moved.wait_for(lambda: self._now.is_over, timeout)
        return self.outcome

    def wait_step(self, count: int, timeout: float | None = None) -> bool:
        """Wait until this number of steps is committed; return whether it is."""
        with self._moved:
            self._moved.wait_for(lambda: self.progress.steps_done >= count or self._now.is_over, timeout)
        return self.progress.steps_done >= count

    def require(self, timeout: float | None = None) -> Migration:
        """Wait until every bin is where it should be; raises :class:`~midstream.errors.ChangeFailed` otherwise."""
        if self.wait(timeout) is not Outcome.APPLIED:
            raise ChangeFailed(
                f"migration {self.number} ({self.record.subjects}) is {self.outcome}"
                + (f": {self.error}" if self.error else ""),
                outcome=str(self.outcome),
                revision=self.record.revision,
            )
        return self

    def cancel(self) -> None:
        """Make no more steps: the bins stay where they are. The step of an epoch in progress is still made. Harmless if
        it has ended."""
        self._control.cancel_migration(self)

    def reverse(self) -> Migration:
        """Bring the bins back to where they were when it began, in steps of the same strategy.

        One that is running turns round, and its outcome will be "reverted". One that has ended is followed by another
        migration, which is returned.
        """
        return self._control.reverse_migration(self)

    # ── called by the job ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._now.is_over

    def note(self, what: str) -> None:
        """Add an event to the record."""
        at_ms = round(1000 * (self._stopwatch() - self._began), 3)
        events = (*self.events, ChangeEvent(at_ms, what))[-KEPT_EVENTS:]
        self._set(record=msgspec.structs.replace(self.record, events=events))

    def revise(self, keep: Callable[[ChangeRecord], None], **fields: object) -> None:
        """Change its plan, and store the record."""
        record = msgspec.structs.replace(self.record, migration=msgspec.structs.replace(self.plan, **fields))
        keep(record)
        self._set(record=record)

    def progressed(self, progress: MigrationProgress, step: StepRecord | None = None) -> None:
        """Note how far it has come: a step is committed."""
        steps = self.steps if step is None else (*self.steps, step)[-KEPT_STEPS:]
        self._set(progress=progress, steps=steps)

    def took_effect_in(self, epoch: int) -> None:
        """The first epoch in which bins have moved."""
        if self.record.epoch is None:
            at_ms = round(1000 * (self._stopwatch() - self._began), 3)
            self._set(record=msgspec.structs.replace(self.record, epoch=epoch, delay_ms=at_ms))

    def end(self, outcome: Outcome, error: str | None, keep: Callable[[ChangeRecord], None]) -> None:
        """End it. The record is kept before waiting threads wake up: they may read the history next."""
        progress = self.progress
        plan = msgspec.structs.replace(self.plan, steps=self.steps, bins=progress.bins_done, bytes=progress.bytes_done)
        ended = msgspec.structs.replace(self.record, outcome=outcome, error=error, migration=plan)
        keep(ended)
        self._set(record=ended, is_over=True)

    def _set(self, **fields: object) -> None:
        with self._moved:
            self._now = replace(self._now, **fields)  # type: ignore[arg-type]  # fields of _Now
            self._moved.notify_all()
