"""The changes of a job: its current configuration, the change on trial, the queue behind it, and their outcomes.

One change is in progress at a time. It is *on trial* from the moment it is enacted until every operator that it updates
has processed rows in committed epochs that began under it, or until :data:`TRIAL_EPOCHS` such epochs are committed.

If a run fails during the trial, the cause decides:

* The run began under an older revision, and no function of the change failed: the epoch is run again, entirely under
  the change, which may well be the fix.
* No function failed (a worker was lost): the epoch is run again, :data:`LOSSES_BEFORE_BLAME` times.
* Otherwise the change is to blame, and is rolled back: the job runs the epoch again with what it ran before, under
  another new revision. What was committed under the change stays; so after state was migrated, there is no way back.

No threads, no Spark: the driver calls these methods with a lock held, and acts on their results.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from midstream.change.advice import after_roll_back, after_stop, never_sent
from midstream.change.change import Change, TrialProgress
from midstream.change.configuration import Configuration
from midstream.change.prepare import PreparedChange, prepare, store_edits
from midstream.change.restart import Pending
from midstream.change.revert import Undoing
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import ChangeRecord, Outcome
from midstream.control.messages import ChangeNoted, Commit
from midstream.errors import MidstreamError
from midstream.flow.edits import Edit
from midstream.ids import Digest, Epoch, Revision
from midstream.planner.assignment import Assignments
from midstream.planner.change_plan import Scheduler
from midstream.storage.blobs import BlobStore

__all__ = ["LOSSES_BEFORE_BLAME", "TRIAL_EPOCHS", "Changes", "Request", "RunFailure"]

TRIAL_EPOCHS = 10
"""Most epochs that a change is on trial for, if an operator that it updates processes no rows."""
LOSSES_BEFORE_BLAME = 2
"""How often an epoch is run again under a change after a run that failed although no function did."""
PLAN_SHOWN = 500
"""Most characters of its edits in the record of a refused change."""


@dataclass(frozen=True)
class Request:
    """A change as the user requested it."""

    edits: tuple[Edit, ...]
    scheduler: Scheduler
    by: str
    stored: Mapping[str, Digest] = field(default_factory=dict)
    """Functions that are in the store already, by operator."""
    migrates: Mapping[str, Digest] = field(default_factory=dict)
    """Migrations that are in the store already, by operator."""
    states: Mapping[str, Digest] = field(default_factory=dict)
    """Initial states that are in the store already, by operator."""
    time_limit_s: float | None = None
    """Seconds that an epoch on trial may take, counted from when the change takes effect in it."""
    preflight: bool = True
    """Whether new functions are called on a few real rows, on the driver, before anything is sent."""
    note: str | None = None
    deploys: bool = False
    """Whether the edits make the job run what a script says."""
    back_to: Undoing | None = None
    """For a revert: what it undoes, which depends on the outcomes of earlier changes."""


@dataclass(frozen=True)
class RunFailure:
    """Why a run of an epoch failed."""

    why: str
    revisions: frozenset[Revision] = frozenset()
    """The revisions under which functions failed in tasks."""
    is_lost: bool = False
    """No function failed: Spark lost a worker, or could not run its tasks."""
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
    """Operators that have processed rows in these epochs."""
    losses: int = 0
    """Runs under it since the last commit that failed although no function did."""
    is_committed: bool = False
    """Whether a committed epoch ran under it, in whole or in part."""
    is_flushed: bool = False
    """Whether the epoch before the change itself, in which operators emitted all that they held, is committed."""


@dataclass(frozen=True)
class _Queued:
    change: Change
    request: Request


class Changes:
    """The changes of a job; see the module's docstring."""

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
        """The configuration of an epoch that begins now."""
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

    @property
    def in_progress(self) -> tuple[Change, ...]:
        """The change on trial, and those that wait, in their order."""
        on_trial = () if self._trial is None else (self._trial.change,)
        return (*on_trial, *(queued.change for queued in tuple(self._queue)))

    @property
    def needs_epoch(self) -> bool:
        """Whether a change waits for an epoch: to take effect, or for the end of the trial before it."""
        return bool(self._queue) or (self._trial is not None and not self._trial.epochs)

    def store(self, request: Request) -> Request:
        """Pack and store a change's functions. Runs the user's code, so it is called without the job's lock."""
        stored = store_edits(
            self.newest(),
            request.edits,
            self._store,
            stored=request.stored,
            migrates=request.migrates,
            states=request.states,
        )
        return replace(request, stored=stored.functions, migrates=stored.migrations, states=stored.states)

    def live(self) -> frozenset[Digest]:
        """The blobs of all configurations that can run without another request: the current one, the one that a
        roll-back would restore, and those of the changes that wait."""
        configurations = [self.configuration, *(queued.change.prepared.after for queued in self._queue)]
        if self._trial is not None:
            configurations += [self._trial.change.prepared.before, self._trial.change.prepared.after]
        return frozenset().union(*(configuration.digests() for configuration in configurations))

    def check(self, request: Request) -> PreparedChange:
        """Prepare a change as if it were requested now. Stores programs, but changes nothing; needs no lock."""
        return self._prepare(self.newest(), request)

    def is_current(self, prepared: PreparedChange) -> bool:
        """Whether nothing has changed since this was prepared."""
        return prepared.before is self.newest() and prepared.after.revision > self._highest

    def newest(self) -> Configuration:
        """The configuration once all changes that wait have taken effect."""
        queue = tuple(self._queue)
        if queue:
            return queue[-1].change.prepared.after
        return self.configuration if self._trial is None else self._trial.change.prepared.after

    def request(
        self,
        request: Request,
        prepared: PreparedChange,
        preparation_ms: float,
        sync: Callable[[], None] = lambda: None,
    ) -> Change:
        """Take a checked change; it waits if another one is in progress. The caller enacts what is ready.

        Its record is not on disk before :meth:`secure`, which calls ``sync`` first, to have its blobs there unless they
        are.
        """
        record = ChangeRecord(
            number=self._log.next_number(),
            revision=prepared.after.revision,
            requested_at=self._wall(),
            by=request.by,
            scheduler=str(request.scheduler),
            edits=prepared.edits,
            plan=prepared.describe(),
            preparation_ms=round(preparation_ms, 3),
            configuration=prepared.after.document.digest,
            note=request.note,
            time_limit_s=request.time_limit_s,
            deployed=request.deploys,
        )
        self._log.owe(record, sync)
        self._highest = Revision(prepared.after.revision)
        change = Change(prepared, record, self._stopwatch)
        if self._trial is None:
            self._put_on_trial(change)
        else:
            self._queue.append(_Queued(change, request))
        return change

    def secure(self) -> None:
        """Have all records on disk. Without them, nothing that ran under a change may be committed."""
        self._log.secure()

    def refuse(self, request: Request, error: Exception) -> None:
        """Record that a change was refused."""
        record = ChangeRecord(
            number=self._log.next_number(),
            revision=self.configuration.revision,
            requested_at=self._wall(),
            by=request.by,
            scheduler=str(request.scheduler),
            edits=(),
            plan=", ".join(str(getattr(edit, "operator", edit)) for edit in request.edits)[:PLAN_SHOWN],
            outcome=Outcome.REFUSED,
            error=str(error),
        )
        self._log.keep(record)

    def resume(self, pending: Pending) -> Change:
        """Continue with a change that was on trial when the driver died."""
        change = Change(pending.prepared, pending.record, self._stopwatch)
        self._highest = Revision(max(self._highest, change.revision))
        self._trial = _Trial(change, is_committed=pending.is_committed, is_flushed=pending.is_flushed)
        change.begins()
        self.configuration = pending.prepared.first
        self._tell_progress(self._trial)
        return change

    def _put_on_trial(self, change: Change) -> None:
        self._trial = _Trial(change)
        change.begins()
        self.configuration = change.prepared.first
        self._tell_progress(self._trial)

    # ── assignments ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_reassigning(self) -> bool:
        """Whether a change in progress moves bins, or adds or removes a stage with bins."""
        changes = [*(queued.change for queued in self._queue), *([] if self._trial is None else [self._trial.change])]
        return any(_reassigns(change.prepared) for change in changes)

    def reassign(self, assignments: Assignments) -> None:
        """Give bins these owners from the next epoch on, whatever the job runs. Called before an epoch begins.

        A roll-back keeps them, and so does a change that waits: it is prepared for other functions only. Nothing is
        stored: that comes before the manifest that names them.
        """
        if self._trial is None:
            self.configuration = self.configuration.with_assignments(assignments)
            return
        trial = self._trial
        prepared = trial.change.prepared.with_assignments(self.configuration.plan, assignments)
        trial.change.relink(prepared)
        self.configuration = prepared.after if trial.is_flushed else prepared.first

    # ── events of the run ─────────────────────────────────────────────────────────────────────────────────────────

    def opened(self, epoch: Epoch) -> Revision | None:
        """An epoch begins with :attr:`configuration`; returns the revision on trial."""
        trial = self._trial
        if trial is None:
            return None
        if self.configuration.flushed:
            names = ", ".join(self.configuration.flushed)
            trial.change.note(f"epoch {epoch} is the last one of {names}: it emits all that is held open")
            return trial.change.revision
        trial.change.took_effect_in(epoch)
        trial.change.note(f"epoch {epoch} begins under it", in_effect=True)
        return trial.change.revision

    def noted(self, noted: ChangeNoted) -> None:
        """The coordinator reports an event of a change."""
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
        trial.losses = 0
        if opened.flushed:
            trial.is_flushed = True
            self.configuration = trial.change.prepared.after
            return
        trial.is_committed = True
        if opened.revision != commit.revision:
            return
        trial.epochs += 1
        trial.met.update(stats.operator for stats in commit.operators if stats.rows_in)
        if trial.epochs >= TRIAL_EPOCHS or not self._unmet(trial):
            self._settle(trial.change)
        else:
            self._tell_progress(trial)

    def failed(self, failure: RunFailure, opened: Configuration) -> bool:
        """A run that began with ``opened`` has failed; returns whether to run the epoch again, with or without changes.

        This terminates: each True uses something up. The next run is under the change instead of the old revision, or
        one more loss is counted, or no change is on trial any more. So an epoch that always fails fails the job.
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
                change.note("the run failed, but no function did; it runs again")
                return True
        if trial.is_committed and any(update.migrate for update in change.record.updates):
            change.note(f"failed, and cannot be rolled back because state was migrated: {failure.why}")
            return False
        self._highest = Revision(self._highest + 1)
        self.configuration = change.prepared.before.as_revision(self._highest).store(self._store)
        self._trial = None
        advice = after_roll_back(failure, change.record.new_functions, self._highest, is_committed=trial.is_committed)
        has_effect = trial.is_committed or trial.is_flushed
        outcome = Outcome.REVERTED if has_effect else Outcome.ROLLED_BACK
        self._end(change, outcome, f"{failure.why}\n\n{advice}")
        self._next()
        return True

    def abandon(self, why: str) -> None:
        """The job ends: end all changes that are in progress.

        The change on trial stays pending in the log, and a restart continues with it.
        """
        trial, self._trial = self._trial, None
        if trial is not None:
            self._end(trial.change, Outcome.PENDING, after_stop(why))
        while self._queue:
            self._end(self._queue.popleft().change, Outcome.REFUSED, never_sent(why))

    def _unmet(self, trial: _Trial) -> tuple[str, ...]:
        """Updated operators that have processed no rows. Operators that Catalyst runs count no rows, and removed ones
        have none."""
        graph = trial.change.prepared.after.graph
        return tuple(
            name
            for name in trial.change.plan.updated
            if name not in trial.met and name in graph and not graph[name].spec.is_outlet
        )

    def _tell_progress(self, trial: _Trial) -> None:
        trial.change.progressed(TrialProgress(trial.epochs, TRIAL_EPOCHS, self._unmet(trial)))

    def _end(self, change: Change, outcome: Outcome, error: str | None = None) -> None:
        change.end(outcome, error, self._log.keep, self._wall())

    def _settle(self, change: Change) -> None:
        self._trial = None
        if self.configuration.initial:  # committed epochs have it in their state
            self.configuration = replace(self.configuration, initial={})
        self._end(change, Outcome.APPLIED)
        self._next()

    def _next(self) -> None:
        """Put the next change of the queue on trial."""
        self._prepare_anew()
        if self._queue:
            self._put_on_trial(self._queue.popleft().change)

    def _prepare_anew(self) -> None:
        """Prepare the queue again, if an earlier change on which it was prepared was rolled back, or bins have moved.

        The whole queue at once, so that the log and :meth:`newest` never include a failed change. A change that no
        longer fits is refused.
        """
        base, waiting = self.configuration, tuple(self._queue)
        self._queue.clear()
        for queued in waiting:
            change = queued.change
            if change.prepared.before != base:
                try:
                    prepared = self._relinked(base, change.prepared)
                    prepared = prepared or self._prepare(base, queued.request, change.record.number)
                except MidstreamError as error:
                    self._end(change, Outcome.REFUSED, str(error))
                    continue
                self._highest = max(self._highest, prepared.after.revision)
                self._log.keep(change.replan(prepared))
            base = change.prepared.after
            self._queue.append(queued)

    def _relinked(self, base: Configuration, prepared: PreparedChange) -> PreparedChange | None:
        """A change with the current owners; None if more than the owners has changed since it was prepared."""
        if _reassigns(prepared) or prepared.before.with_assignments(base.assignments) != base:
            return None
        return replace(prepared.with_assignments(base.plan, base.assignments), before=base)

    def _prepare(self, base: Configuration, request: Request, number: int | None = None) -> PreparedChange:
        """Prepare a change. ``number`` is given if the log has it already; what a revert undoes is then found again."""
        if request.back_to is not None:
            records = [record for record in self._log.records() if number is None or record.number < number]
            undone = request.back_to.again(records, base.graph)
            request = replace(request, edits=undone.edits, stored=undone.stored)
        return prepare(
            base,
            request.edits,
            self._store,
            revision=Revision(max(self._highest, base.revision) + 1),
            scheduler=request.scheduler,
            stored=request.stored,
            migrates=request.migrates,
            states=request.states,
        )


def _reassigns(prepared: PreparedChange) -> bool:
    return prepared.before.assignments != prepared.after.assignments
