"""The changes of a job: what it runs now, which change is on trial, which ones wait, and how each one ends.

One change is on its way at a time. It is *on trial* from the moment it is enacted until every operator that it updates
has met rows in epochs that began under it and are committed, or :data:`TRIAL_EPOCHS` such epochs are.

If a run fails meanwhile, the question is who is to blame:

* A run that began under an older revision: not the change, unless one of its functions failed. The epoch is run again,
  wholly under the change, which may well be the fix.
* Nobody's function (a worker was lost): the epoch is run again, :data:`LOSSES_BEFORE_BLAME` times.
* Otherwise the change. It is rolled back: the job runs the epoch again with what it ran before, under yet another
  revision. What was committed under the change stays; so if that includes state in a new layout, there is no way back.

No threads, no Spark: the driver calls in with a lock held, and does what the answers say.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from midstream.change.advice import after_roll_back, after_stop, never_sent
from midstream.change.change import Change, TrialProgress
from midstream.change.configuration import Configuration
from midstream.change.prepare import PreparedChange, prepare, store_updates
from midstream.change.restart import Pending
from midstream.change.revert import Undoing
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import ChangeRecord, Outcome
from midstream.control.messages import ChangeNoted, Commit
from midstream.errors import MidstreamError
from midstream.flow.edits import Update
from midstream.ids import Digest, Epoch, Revision
from midstream.planner.change_plan import Scheduler
from midstream.storage.blobs import BlobStore

__all__ = ["LOSSES_BEFORE_BLAME", "TRIAL_EPOCHS", "Changes", "Request", "RunFailure"]

TRIAL_EPOCHS = 10
"""Most epochs that a change is on trial for, if an operator that it updates meets no rows."""
LOSSES_BEFORE_BLAME = 2
"""How often an epoch is run again under a change when a run was lost through nobody's function."""


@dataclass(frozen=True)
class Request:
    """A change as it was asked for."""

    updates: tuple[Update, ...]
    scheduler: Scheduler
    by: str
    stored: Mapping[str, Digest] = field(default_factory=dict)
    """Functions that are in the store already, by operator."""
    migrates: Mapping[str, Digest] = field(default_factory=dict)
    """Migrations that are in the store already, by operator."""
    time_limit_s: float | None = None
    """How long an epoch may take from when the change takes effect in it, as long as it is on trial."""
    preflight: bool = True
    """Whether new functions are called on a few real rows, on the driver, before anything is sent."""
    note: str | None = None
    back_to: Undoing | None = None
    """For a revert: what it undoes, which depends on how the changes before it end."""


@dataclass(frozen=True)
class RunFailure:
    """Why a run of an epoch failed."""

    why: str
    revisions: frozenset[Revision] = frozenset()
    """The revisions under which functions failed in tasks."""
    is_lost: bool = False
    """Nobody's function failed: Spark lost a worker, or could not run its tasks."""
    is_overdue: bool = False
    """The time limit of the change on trial was reached."""
    operator: str | None = None
    """The operator whose function failed, if one did."""


@dataclass
class _Trial:
    change: Change
    epochs: int = 0
    """Committed epochs that began under it."""
    met: set[str] = field(default_factory=set)
    """Operators that have met rows in these epochs."""
    losses: int = 0
    """Runs under it that were lost through nobody's function, since the last commit."""
    is_committed: bool = False
    """An epoch in all or part of which it was in effect is committed."""


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

    def store(self, request: Request) -> Request:
        """Pack and store what a change brings. The user's code runs here, so it is called without the job's lock."""
        stored = store_updates(
            self.newest().graph, request.updates, self._store, stored=request.stored, migrates=request.migrates
        )
        return replace(request, stored=stored.functions, migrates=stored.migrations)

    def live(self) -> frozenset[Digest]:
        """The blobs of all that can be run without another request: the configuration, the one that a change on trial
        would go back to, and what waits for its turn."""
        configurations = [self.configuration, *(queued.change.prepared.after for queued in self._queue)]
        if self._trial is not None:
            configurations.append(self._trial.change.prepared.before)
        return frozenset().union(*(configuration.digests() for configuration in configurations))

    def check(self, request: Request) -> PreparedChange:
        """What a change would be, if it were requested now. Stores programs, but changes nothing; needs no lock."""
        return self._prepare(self.newest(), request)

    def is_current(self, prepared: PreparedChange) -> bool:
        """Whether nothing has changed since this was checked."""
        return prepared.before is self.newest() and prepared.after.revision > self._highest

    def newest(self) -> Configuration:
        """What the job runs once all changes that wait have taken effect."""
        queue = tuple(self._queue)
        return queue[-1].change.prepared.after if queue else self.configuration

    def request(self, request: Request, prepared: PreparedChange, preparation_ms: float) -> Change:
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
            time_limit_s=request.time_limit_s,
        )
        self._log.keep(record)
        self._highest = Revision(prepared.after.revision)
        change = Change(prepared, record, self._stopwatch)
        if self._trial is None:
            self._put_on_trial(change)
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
        self._tell_progress(self._trial)
        return change

    def _put_on_trial(self, change: Change) -> None:
        self._trial = _Trial(change)
        self.configuration = change.prepared.after
        self._tell_progress(self._trial)

    # ── what happens to it ────────────────────────────────────────────────────────────────────────────────────────

    def opened(self, epoch: Epoch) -> Revision | None:
        """An epoch begins with :attr:`configuration`; gives the revision on trial."""
        trial = self._trial
        if trial is None:
            return None
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
        trial.is_committed, trial.losses = True, 0
        if opened.revision != commit.revision:
            return
        trial.epochs += 1
        trial.met.update(stats.operator for stats in commit.operators if stats.rows_in)
        if trial.epochs >= TRIAL_EPOCHS or not self._unmet(trial):
            self._settle(trial.change)
        else:
            self._tell_progress(trial)

    def failed(self, failure: RunFailure, opened: Configuration) -> bool:
        """A run that began with ``opened`` has failed. Whether the epoch is to be run again, with or without a change.

        Each answer of True leaves less that may be tried: a run under the change instead of one before it, one loss
        more, or no change on trial any more. So an epoch that always fails fails the job in the end.
        """
        trial = self._trial
        if trial is None:
            return False
        change = trial.change
        if not (failure.is_overdue or change.revision in failure.revisions):
            if opened.revision != change.revision:
                change.note(f"the run under revision {opened.revision} failed; it runs again under this one")
                return True
            if failure.is_lost and trial.losses < LOSSES_BEFORE_BLAME:
                trial.losses += 1
                change.note("the run was lost through no function; it runs again")
                return True
        if trial.is_committed and any(update.migrate for update in change.record.updates):
            change.note(f"failed, and cannot be rolled back because state was migrated: {failure.why}")
            return False
        self._highest = Revision(self._highest + 1)
        self.configuration = change.prepared.before.as_revision(self._highest)
        self._trial = None
        advice = after_roll_back(failure, change.record.operators, self._highest, is_committed=trial.is_committed)
        outcome = Outcome.REVERTED if trial.is_committed else Outcome.ROLLED_BACK
        self._end(change, outcome, f"{failure.why}\n\n{advice}")
        self._next()
        return True

    def abandon(self, why: str) -> None:
        """The job ends: nothing that is on its way will come to its end here.

        The change on trial stays pending in the log, and a restart goes on with it.
        """
        trial, self._trial = self._trial, None
        if trial is not None:
            self._end(trial.change, Outcome.PENDING, after_stop(why))
        while self._queue:
            self._end(self._queue.popleft().change, Outcome.REFUSED, never_sent(why))

    def _unmet(self, trial: _Trial) -> tuple[str, ...]:
        """Updated operators that have met no rows. What a transform meets is not counted: Catalyst runs it."""
        graph = trial.change.prepared.after.graph
        return tuple(
            name for name in trial.change.plan.updated if name not in trial.met and not graph[name].spec.divides
        )

    def _tell_progress(self, trial: _Trial) -> None:
        trial.change.progressed(TrialProgress(trial.epochs, TRIAL_EPOCHS, self._unmet(trial)))

    def _end(self, change: Change, outcome: Outcome, error: str | None = None) -> None:
        change.end(outcome, error, self._log.keep)

    def _settle(self, change: Change) -> None:
        self._trial = None
        self._end(change, Outcome.APPLIED)
        self._next()

    def _next(self) -> None:
        """Put the next one that waits on trial."""
        self._prepare_anew()
        if self._queue:
            self._put_on_trial(self._queue.popleft().change)

    def _prepare_anew(self) -> None:
        """What waits was prepared on top of what was to come before it, which may have been rolled back meanwhile.

        All of it at once, so that the log and :meth:`newest` never tell of a change that has failed. What no longer
        fits is refused.
        """
        base, waiting = self.configuration, tuple(self._queue)
        self._queue.clear()
        for queued in waiting:
            change = queued.change
            if change.prepared.before != base:
                try:
                    prepared = self._prepare(base, queued.request, change.record.number)
                except MidstreamError as error:
                    self._end(change, Outcome.REFUSED, str(error))
                    continue
                self._highest = prepared.after.revision
                self._log.keep(change.replan(prepared))
            base = change.prepared.after
            self._queue.append(queued)

    def _prepare(self, base: Configuration, request: Request, number: int | None = None) -> PreparedChange:
        """Prepare a change; of one that is in the log already, by its number, what it undoes is found anew."""
        if request.back_to is not None:
            records = [record for record in self._log.records() if number is None or record.number < number]
            undone = request.back_to.again(records)
            request = replace(request, updates=undone.updates, stored=undone.stored)
        return prepare(
            base,
            request.updates,
            self._store,
            revision=Revision(max(self._highest, base.revision) + 1),
            scheduler=request.scheduler,
            stored=request.stored,
            migrates=request.migrates,
        )
