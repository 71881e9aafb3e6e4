"""The changes of a job: what it runs now, which change is on trial, which ones wait, and how each one ends.

One change is on its way at a time. It is *on trial* from the moment it is enacted until an epoch that began under it is
committed; if a run fails meanwhile that had to do with it, it is rolled back: the job runs the epoch again with what it
ran before, under yet another revision. What was committed under a revision on trial stays; so if that includes state in
a new layout, there is no way back.

No threads, no Spark: the runtimes call in with a lock held, and do what the answers say.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from midstream.change.configuration import Configuration
from midstream.change.handle import Change
from midstream.change.log import ChangeLog
from midstream.change.prepare import Prepared, prepare
from midstream.change.records import ChangeRecord, Outcome
from midstream.change.restart import Pending
from midstream.control.messages import ChangeNoted, Commit
from midstream.data.blobs import BlobStore
from midstream.errors import MidstreamError
from midstream.flow.updates import Update
from midstream.ids import Digest, Epoch, Revision
from midstream.planner.change import Scheduler

__all__ = ["Changes", "Request"]


@dataclass(frozen=True)
class Request:
    """A change as it was asked for."""

    updates: tuple[Update, ...]
    scheduler: Scheduler
    by: str
    stored: Mapping[str, Digest] = field(default_factory=dict)
    """Functions that are in the store already, by operator."""
    time_limit_s: float | None = None
    """How long an epoch may take from when the change takes effect in it, as long as it is on trial."""
    is_tried_before: bool = True
    """Whether new functions are called on a few real rows, on the driver, before anything is sent."""
    note: str | None = None


@dataclass
class _Trial:
    change: Change
    is_begun: bool = False
    """The run in progress has been told of it."""
    is_committed: bool = False
    """An epoch in part of which it was in effect is committed."""


@dataclass(frozen=True)
class _Queued:
    change: Change
    request: Request


class Changes:
    """See the module's text."""

    def __init__(
        self,
        configuration: Configuration,
        store: BlobStore,
        log: ChangeLog,
        *,
        stopwatch: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.configuration = configuration
        """What an epoch that begins now runs."""
        self._store = store
        self._log = log
        self._stopwatch = stopwatch
        self._wall = wall
        self._trial: _Trial | None = None
        self._queue: deque[_Queued] = deque()
        self._highest = max([configuration.revision, *(record.revision for record in log.records())])

    @property
    def on_trial(self) -> Change | None:
        """The change that can still be rolled back."""
        return None if self._trial is None else self._trial.change

    def live(self) -> frozenset[Digest]:
        """The blobs of all that can be run without another request: the configuration, the one that a change on trial
        would go back to, and what waits for its turn."""
        configurations = [self.configuration, *(queued.change.prepared.after for queued in self._queue)]
        if self._trial is not None:
            configurations.append(self._trial.change.prepared.before)
        return frozenset().union(*(configuration.digests() for configuration in configurations))

    def check(self, request: Request) -> Prepared:
        """What a change would be, if it were requested now. Stores functions, but changes nothing."""
        return self._prepare(self._newest(), request)

    def is_current(self, prepared: Prepared) -> bool:
        """Whether nothing has changed since this was checked."""
        return prepared.before is self._newest() and prepared.after.revision > self._highest

    def _newest(self) -> Configuration:
        return self._queue[-1].change.prepared.after if self._queue else self.configuration

    def request(self, request: Request, prepared: Prepared, preparation_ms: float) -> Change:
        """Take a change that was checked; it waits if another one is on its way. The caller enacts what is ready."""
        record = ChangeRecord(
            number=self._log.next_number(),
            revision=prepared.after.revision,
            requested_at=self._wall(),
            by=request.by,
            scheduler=str(request.scheduler),
            updates=prepared.updates,
            plan=prepared.describe(),
            preparation_ms=round(preparation_ms, 3),
            note=request.note,
        )
        self._log.keep(record)
        self._highest = Revision(prepared.after.revision)
        change = Change(prepared, record, self._stopwatch, request.time_limit_s)
        if self._trial is None:
            self._enact(change)
        else:
            self._queue.append(_Queued(change, request))
        return change

    def refuse(self, request: Request, error: Exception) -> None:
        """Put on record that a change was not taken."""
        record = ChangeRecord(
            number=self._log.next_number(),
            revision=self.configuration.revision,
            requested_at=self._wall(),
            by=request.by,
            scheduler=str(request.scheduler),
            updates=(),
            plan=", ".join(str(getattr(update, "operator", update)) for update in request.updates),
            outcome=Outcome.REFUSED,
            error=str(error),
        )
        self._log.keep(record)

    def resume(self, pending: Pending) -> Change:
        """Go on with a change that was on trial when the driver died."""
        change = Change(pending.prepared, pending.record, self._stopwatch)
        self._highest = Revision(max(self._highest, change.revision))
        self._trial = _Trial(change, is_committed=pending.is_committed)
        self.configuration = pending.prepared.after
        return change

    def _enact(self, change: Change) -> None:
        self._trial = _Trial(change)
        self.configuration = change.prepared.after

    # ── what happens to it ────────────────────────────────────────────────────────────────────────────────────────

    def began(self) -> None:
        """The run in progress has been told of the change on trial."""
        assert self._trial is not None
        self._trial.is_begun = True

    def opened(self, epoch: Epoch) -> Revision | None:
        """An epoch begins with :attr:`configuration`; gives the revision on trial."""
        trial = self._trial
        if trial is None:
            return None
        trial.is_begun = True
        trial.change.took_effect_in(epoch)
        trial.change.note(f"epoch {epoch} begins under it", in_effect=True)
        return trial.change.revision

    def noted(self, noted: ChangeNoted) -> None:
        """The coordinator has something to tell of a change."""
        trial = self._trial
        if trial is None or trial.change.revision != noted.revision:
            return
        task = None if noted.task is None else str(noted.task)
        trial.change.note(noted.what, task, noted.operators, in_effect=noted.in_effect)
        if noted.task is not None:
            trial.change.took_effect_in(noted.task.epoch)

    def run_of(self, commit: Commit, opened: Configuration) -> Configuration:
        """The configuration that a committed epoch ended with."""
        trial = self._trial
        is_new = trial is not None and commit.revision == trial.change.revision
        return self.configuration if is_new else opened

    def committed(self, commit: Commit, opened: Configuration) -> None:
        """An epoch that began with ``opened`` is committed."""
        trial = self._trial
        if trial is None or commit.revision != trial.change.revision:
            return
        if opened.revision == commit.revision:
            self._settle(trial.change)
        else:
            trial.is_committed = True

    def failed(self, why: str, opened: Configuration) -> bool:
        """A run that began with ``opened`` has failed. Whether the epoch is to be run again, without the change."""
        trial = self._trial
        if trial is None or not (trial.is_begun or opened.revision == trial.change.revision):
            return False
        if trial.is_committed and any(update.migrate for update in trial.change.record.updates):
            return False
        before = trial.change.prepared.before
        self._highest = Revision(self._highest + 1)
        self.configuration = before.as_revision(self._highest)
        self._trial = None
        self._end(trial.change, Outcome.ROLLED_BACK, why)
        self._next()
        return True

    def abandon(self, why: str) -> None:
        """The job ends: nothing that is on its way will come to its end here."""
        trial, self._trial = self._trial, None
        if trial is not None:
            if trial.is_committed:
                self._end(trial.change, Outcome.APPLIED)
            else:
                # It stays pending in the log: a restart goes on with it.
                trial.change.end(Outcome.PENDING, why)
        while self._queue:
            self._end(self._queue.popleft().change, Outcome.REFUSED, why)

    def _end(self, change: Change, outcome: Outcome, error: str | None = None) -> None:
        self._log.keep(change.final(outcome, error))
        change.end(outcome, error)

    def _settle(self, change: Change) -> None:
        self._trial = None
        self._end(change, Outcome.APPLIED)
        self._next()

    def _next(self) -> None:
        """Enact the next one that waits and still fits; the one before it may have been rolled back meanwhile."""
        while self._queue and self._trial is None:
            queued = self._queue.popleft()
            change = queued.change
            if change.prepared.before != self.configuration:
                try:
                    prepared = self._prepare(self.configuration, queued.request)
                except MidstreamError as error:
                    self._end(change, Outcome.REFUSED, str(error))
                    continue
                self._highest = prepared.after.revision
                self._log.keep(change.replan(prepared))
            self._enact(change)

    def _prepare(self, base: Configuration, request: Request) -> Prepared:
        return prepare(
            base,
            request.updates,
            self._store,
            revision=Revision(max(self._highest, base.revision) + 1),
            scheduler=request.scheduler,
            stored=request.stored,
        )
