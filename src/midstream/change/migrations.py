"""The migrations of a job: what they do in each epoch, and their outcomes.

A migration gives bins other owners in small steps. Owners are independent of functions, so migrations and changes do
not wait for each other; a step is made when an epoch begins, and holds for the whole of it:

1. :meth:`Migrations.begin`: an epoch begins. If the last step is committed, and nothing speaks against another one, the
   job's configuration gets its assignments (:meth:`.Changes.reassign`).
2. :meth:`Migrations.committed`: the epoch is committed. Its manifest names the assignments. So all that has to be known
   about a migration is in its record: where the bins are to be.
3. :meth:`Migrations.failed`: the run has failed, but no function did. The epoch runs again with the step,
   :data:`LOSSES_BEFORE_UNDOING` times; then the step is undone, and the migration ends.

One migration is running at a time. Others wait for it to end, or for their epoch or event time
(:mod:`.migration_schedule`). Edits of a change that
move bins exclude migrations: neither begins while the other is in progress. No step is made while the change on trial
moves bins or stages itself.

No threads, no Spark: the driver calls these methods with its lock held.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection

import msgspec

from midstream.change.bin_bytes import BinBytes
from midstream.change.migration import Migration, MigrationControl, MigrationProgress
from midstream.change.migration_goal import (
    described,
    edit_of,
    goal_documents,
    is_scheduled,
    lenient_goal,
    record_of,
    stages_of,
    targets_of,
)
from midstream.change.migration_request import MigrationRequest
from midstream.change.migration_schedule import MigrationSchedule
from midstream.change.running_migration import PATIENCE, NoWarming, OpenStep, RunningMigration, Warming
from midstream.change.trial import Changes, RunFailure
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import ChangeRecord, MigrationRecord, Outcome, StepRecord
from midstream.checkpoint.committed_state import CommittedState
from midstream.errors import FlowError, MidstreamError
from midstream.flow.edits import Divide, Move, Reassignment, Rescale
from midstream.ids import Epoch, StageIndex
from midstream.planner.assignment import Assignment, Assignments, DividedBin
from midstream.planner.carried_assignments import under_plan
from midstream.planner.change_plan import Scheduler
from midstream.planner.division import with_wires
from midstream.planner.migration import Itinerary, StepStrategy, fluid
from midstream.planner.reassignment import goal_of, stages_named, unique_names
from midstream.planner.stages import Plan
from midstream.planner.step_cost import Budget, StepCost

__all__ = ["LOSSES_BEFORE_UNDOING", "Migrations"]

LOSSES_BEFORE_UNDOING = 2
"""How often an epoch is run again with a new step after runs that failed although no function did."""
STEADY_EPOCHS = 20
"""Number of newest epochs without a step whose median is the steady time of an epoch."""


class Migrations:
    """The migrations of a job; see the module's docstring. Those that were in progress when the driver died go on."""

    def __init__(
        self,
        changes: Changes,
        log: ChangeLog,
        control: MigrationControl,
        *,
        next_epoch: Epoch,
        warming: Warming | None = None,
        stopwatch: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._changes = changes
        self._log = log
        self._control = control
        self._warming: Warming = warming or NoWarming()
        self._stopwatch = stopwatch
        self._wall = wall
        self._running: RunningMigration | None = None
        self._step: OpenStep | None = None
        self._spreading: set[int] = set()
        """Those that give partitions other executors, by their numbers."""
        self._sizes = BinBytes()
        """When the one that is running began."""
        self._steady: deque[float] = deque(maxlen=STEADY_EPOCHS)
        self._recent: deque[float] = deque(maxlen=STEADY_EPOCHS)
        waiting = [
            Migration(msgspec.structs.replace(record, error=None), control, stopwatch)
            for record in log.records()
            if record.migration is not None and record.outcome is Outcome.PENDING
        ]
        for migration in waiting:
            migration.note("goes on after a restart of the driver")
        self.schedule = MigrationSchedule(changes, waiting, next_epoch)

    # ── inspection ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def steady_ms(self) -> float | None:
        """How long an epoch takes without a step, if that is known."""
        return statistics.median(self._steady) if self._steady else None

    def goal(self, request: MigrationRequest) -> tuple[dict[StageIndex, Assignment], dict[StageIndex, Assignment]]:
        """The assignments before and after a migration, if nothing else happens meanwhile. Raises
        :class:`FlowError` if it does not fit. Changes nothing."""
        plan, now = self._plan, dict(self._changes.newest().assignments)
        for earlier in self.schedule.before(request):
            if not earlier.plan.target:
                now = lenient_goal(plan, now, earlier.record.edits)
            else:
                now.update(targets_of(plan, earlier.plan.first if earlier.plan.is_reversed else earlier.plan.target))
        return now, goal_of(plan, now, request.edits, or_same=request.spreads)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, request: MigrationRequest) -> Migration:
        """Take a migration. It begins with the next epoch, or waits for its time or its turn. Raises
        :class:`FlowError` and changes nothing if it cannot be."""
        self.schedule.require_possible(request)
        before, after = self.goal(request)
        bins = Itinerary(after).count_left(before)
        plan = described(self._plan, before, after, request.strategy, spreads=request.spreads)
        migration = Migration(self._record(request, plan), self._control, self._stopwatch)
        if request.spreads:
            self._spreading.add(migration.number)
        self._log.keep(migration.record)
        self.schedule.add(migration)
        migration.progressed(MigrationProgress(bins=bins, is_waiting_for=self.schedule.why_waiting(migration)))
        return migration

    def refuse(self, request: MigrationRequest, error: Exception) -> None:
        """Record that a migration was refused."""
        record = self._record(request, f"{request.strategy} migration")
        self._log.keep(msgspec.structs.replace(record, outcome=Outcome.REFUSED, error=str(error)))

    def _record(self, request: MigrationRequest, plan: str) -> ChangeRecord:
        return ChangeRecord(
            number=self._log.next_number(),
            revision=self._changes.configuration.revision,
            requested_at=self._wall(),
            by=request.by,
            scheduler=str(Scheduler.EPOCH),
            edits=tuple(map(record_of, request.edits)),
            plan=plan,
            note=request.note,
            migration=MigrationRecord(
                str(request.strategy),
                request.prewarm,
                request.budget.ms,
                request.budget.bytes,
                request.at_epoch,
                request.at_time,
            ),
        )

    def cancel(self, migration: Migration) -> None:
        """Make no more steps."""
        running = self._running
        if running is not None and running.migration is migration:
            running.is_cancelled = True
            if self._step is None:
                self._end_running(Outcome.STOPPED, "cancelled")
        elif self.schedule.withdraw(migration):
            migration.end(Outcome.STOPPED, "cancelled before it began", self._log.keep)

    def reverse(self, migration: Migration) -> Migration | MigrationRequest:
        """Turn a running migration round; for one that has ended, return the request for its reversal."""
        self._follow_plan()
        running = self._running
        if running is not None and running.migration is migration:
            migration.revise(self._log.keep, is_reversed=not migration.plan.is_reversed)
            migration.note("is reversed" if migration.plan.is_reversed else "goes forward again")
            running.target = targets_of(self._plan, goal_documents(migration.plan))
            running.lay_out(self._changes.configuration.assignments, self._sizes)
            if self._step is None and Itinerary(running.target).is_over(self._changes.configuration.assignments):
                self._arrived()
            return migration
        if not migration.is_over or not migration.plan.first:
            raise FlowError(
                f"migration {migration.number} ({migration.record.subjects}) has not moved anything, so there is "
                f"nothing to reverse; cancel it"
            )
        plan = migration.plan
        edits: list[Reassignment] = []
        for name, assignment in ((name, Assignment.from_document(found)) for name, found in plan.first.items()):
            edits += [Rescale(assignment.partitions, name), Move(dict(enumerate(assignment.owners)), name)]
            made = Assignment.from_document(plan.target[name]).divided if name in plan.target else ()
            edits += [
                Divide(each.join, bin=each.home, into=into, spread=each.spread)
                for each in (*made, *assignment.divided)
                if (into := _shares_after(each, made, assignment.divided)) is not None
            ]
        budget = Budget(plan.budget_ms, plan.budget_bytes)
        note = f"back to before migration {migration.number}"
        by = migration.record.by
        return MigrationRequest(tuple(edits), by, StepStrategy(plan.strategy), budget, plan.prewarm, note=note)

    # ── events of the run ─────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, epoch: Epoch, committed: CommittedState) -> None:
        """An epoch begins, perhaps not for the first time: gives the configuration the assignments of the next step."""
        self.schedule.next_epoch = Epoch(epoch + 1)
        if self._step is not None:
            return  # the epoch runs again with its step
        self._follow_plan()
        if self.schedule.is_frozen(epoch):
            return
        if self._changes.is_reassigning:
            self._tell_waiting("a change that moves bins is in progress")
            return
        began = self._stopwatch()
        if self._running is None:
            self._start_next(epoch, committed)
        if self._running is not None:
            self._make_step(self._running, epoch, committed, began)
        else:
            self._warm_ahead(epoch)

    def _warm_ahead(self, epoch: Epoch) -> None:
        """Have state loaded for a migration that is prepared for an epoch soon, so that its first step need not
        wait."""
        soon = self.schedule.next_prepared(epoch, within=PATIENCE)
        if soon is None:
            return
        configuration = self._changes.configuration
        now = configuration.assignments
        self._warming.want(now, (lenient_goal(configuration.plan, now, soon.record.edits),))

    def _make_step(self, running: RunningMigration, epoch: Epoch, committed: CommittedState, began: float) -> None:
        """Make the next step, unless its takers are to load state first."""
        configuration = self._changes.configuration
        itinerary = Itinerary(running.target)
        if running.planned is None:
            if running.spreads or not itinerary.count_left(configuration.assignments):
                running.planned = ()  # partitions come, go, or get other executors
            else:
                running.planned = running.next_step()
                running.is_pausing = not running.planned
            running.waits_anew()
        if running.is_pausing:
            self._tell_progress(running, "an epoch without moves, to compare")
            return
        now, moves = configuration.assignments, running.planned
        then = itinerary.after_step(now, moves)
        if any(then[stage].divided != now[stage].divided for stage in running.target):
            if self._changes.in_progress:  # which was prepared for a flow whose bins are divided as they are now
                self._tell_progress(running, "the change in progress")
                return
            try:
                with_wires(configuration.plan, then)
            except FlowError as error:
                self._end_running(Outcome.STOPPED, str(error))
                return
        is_loaded = running.migration.plan.prewarm and self._is_warm(running, now, then, committed)
        if running.migration.plan.prewarm and not is_loaded:
            if running.wait_once_more(self._warming.cold(now, {**now, **running.target})):
                self._tell_progress(running, "takers that load state")
                return
            running.migration.note(f"{len(moves)} bins move although their state is not loaded yet")
        moved = sum(map(self._sizes, moves))
        self._step = OpenStep(epoch, moves, configuration.plan, now, moved, 0.0, running.waited, is_loaded)
        self._warming.flip(now, then)
        self._changes.reassign(then)
        self._step.step_ms = 1000 * (self._stopwatch() - began)
        running.migration.took_effect_in(epoch)

    def _is_warm(
        self, running: RunningMigration, now: Assignments, then: Assignments, committed: CommittedState
    ) -> bool:
        """Have state loaded for the next step and for all that is left; return whether the step's is there."""
        self._warming.want(now, (then, {**now, **running.target}))
        return self._warming.are_warm(now, then, committed)

    def committed(self, epoch: Epoch, epoch_ms: float, read: int | None = None) -> None:
        """An epoch is committed after ``epoch_ms``; its tasks read ``read`` bytes of state from the checkpoint."""
        self.schedule.next_epoch = Epoch(epoch + 1)
        self._recent.append(epoch_ms)
        step, self._step = self._step, None
        if step is None:
            self._steady.append(epoch_ms)
            self._end_pause(epoch_ms)
            return
        self._follow_plan()
        running = self._running
        if running is None:  # the flow lacks its stages as of this epoch
            return
        steady = self.steady_ms or 0.0
        running.cost = StepCost(
            len(step.moves), step.bytes, epoch_ms, steady, max(self._steady, default=0.0), step.is_loaded
        )
        if running.steps_left is not None and not running.spreads:
            running.steps_left -= 1
        running.planned, running.patience, running.spreads = None, PATIENCE, False
        done = StepRecord(
            epoch,
            len(step.moves),
            step.bytes,
            round(epoch_ms, 3),
            round(steady, 3),
            round(step.step_ms, 3),
            step.waited,
            read,
        )
        running.migration.note(f"epoch {epoch} is committed: {len(step.moves)} bins have moved")
        self._tell_progress(running, None, done)
        if Itinerary(running.target).is_over(self._changes.configuration.assignments):
            self._arrived()
        elif running.is_cancelled:
            self._end_running(Outcome.STOPPED, "cancelled")

    def _end_pause(self, epoch_ms: float) -> None:
        running = self._running
        if running is not None and running.is_pausing:
            running.cost = StepCost(0, 0, epoch_ms, self.steady_ms or 0.0)
            running.planned, running.is_pausing = None, False

    def failed(self, failure: RunFailure) -> bool:
        """A run has failed. Returns whether to run the epoch again because of a step, with it or without it.

        This terminates: each True counts one more loss, or undoes the step and ends its migration.
        """
        step, running = self._step, self._running
        if step is None or running is None or not failure.is_lost:
            return False
        if step.losses < LOSSES_BEFORE_UNDOING:
            step.losses += 1
            running.migration.note(f"a run of epoch {step.epoch} failed, but no function did; it runs again")
            return True
        now = self._changes.configuration
        self._changes.reassign(under_plan(step.plan, step.before, now.plan, now.assignments))
        self._step = None
        running.migration.note(f"the step of epoch {step.epoch} is undone")
        self._end_running(
            Outcome.STOPPED,
            f"the step of epoch {step.epoch}, which moved {len(step.moves)} bins, was undone because runs with it "
            f"failed {1 + LOSSES_BEFORE_UNDOING} times: {failure.why}",
        )
        return True

    def abandon(self, why: str) -> None:
        """The job ends. Migrations stay pending in the log, and a restart goes on with them."""
        for migration in self.schedule.pending:
            migration.end(Outcome.PENDING, f"{why}; a start with the same checkpoint goes on with it", self._log.keep)
        self._running, self._step = None, None
        self.schedule.clear()

    # ── the running one ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _plan(self) -> Plan:
        return self._changes.configuration.plan

    def _start_next(self, epoch: Epoch, committed: CommittedState) -> None:
        """Start what is due, if anything is."""
        while self._running is None and (due := self.schedule.next_due(epoch, committed)) is not None:
            self._start(due, committed)

    def _start(self, migration: Migration, committed: CommittedState) -> None:
        now = self._changes.configuration.assignments
        edits = [edit_of(record) for record in migration.record.edits]
        spreads = migration.number in self._spreading
        self._spreading.discard(migration.number)
        if not migration.plan.target:
            try:
                goal = goal_of(self._plan, now, edits, or_same=spreads)
            except MidstreamError as error:
                migration.end(Outcome.REFUSED, str(error), self._log.keep)
                return
            names = {stage: name for name, stage in unique_names(self._plan).items()}
            named = {stage for edit in edits for stage in stages_named(self._plan, edit.stage)} if spreads else set()
            moved = [stage for stage in goal if goal[stage] != now[stage] or stage in named]
            migration.revise(
                self._log.keep,
                first={names[stage]: now[stage].to_document() for stage in moved},
                target={names[stage]: goal[stage].to_document() for stage in moved},
            )
        documents = goal_documents(migration.plan)
        if not targets_of(self._plan, documents):
            migration.end(Outcome.STOPPED, "the flow has none of its stages any more", self._log.keep)
            return
        running = RunningMigration(
            migration, stages_of(self._plan, migration.plan), targets_of(self._plan, documents), fluid(()), 0
        )
        if is_scheduled(migration.plan) and not migration.steps:
            running.patience = 0  # it takes effect exactly then
        running.spreads = spreads
        self._running, self.schedule.running = running, migration
        if spreads:
            self._warming.spread(running.target)
        elif Itinerary(running.target).is_over(now):  # the driver died before it could say so
            self._arrived()
            return
        self._sizes = BinBytes(committed, self._plan)
        running.lay_out(self._changes.configuration.assignments, self._sizes)
        self._tell_progress(running, None)

    def _is_in_step_with_plan(self, running: RunningMigration) -> bool:
        return running.stages == stages_of(self._plan, running.migration.plan)

    def _follow_plan(self) -> None:
        """A change may have renumbered the stages, or removed some, since the running migration was last looked at."""
        running = self._running
        if running is None or self._is_in_step_with_plan(running):
            return
        plan = running.migration.plan
        running.stages = stages_of(self._plan, plan)
        running.target = targets_of(self._plan, goal_documents(plan))
        if not running.target:
            self._end_running(Outcome.STOPPED, "the flow has none of its stages any more")
            return
        self._sizes = self._sizes.in_plan(self._plan)
        running.lay_out(self._changes.configuration.assignments, self._sizes)

    def _arrived(self) -> None:
        assert self._running is not None
        outcome = Outcome.REVERTED if self._running.migration.plan.is_reversed else Outcome.APPLIED
        self._end_running(outcome, None)

    def _end_running(self, outcome: Outcome, error: str | None) -> None:
        assert self._running is not None
        migration, self._running, self.schedule.running = self._running.migration, None, None
        self._warming.want(self._changes.configuration.assignments, ())
        migration.end(outcome, error, self._log.keep)

    # ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell_waiting(self, why: str) -> None:
        if self._running is not None:
            self._tell_progress(self._running, why)

    def _tell_progress(self, running: RunningMigration, why: str | None, step: StepRecord | None = None) -> None:
        migration, before = running.migration, running.migration.progress
        first = targets_of(self._plan, migration.plan.first)
        bins = Itinerary(targets_of(self._plan, migration.plan.target)).count_left(first)
        left = Itinerary(running.target).left(self._changes.configuration.assignments)
        bytes_left = sum(map(self._sizes, left))
        bytes_done = before.bytes_done + (0 if step is None else step.bytes)
        steps_left = running.steps_left
        if steps_left is None and step is not None and step.bins:
            steps_left = -(-len(left) // step.bins)
        pace = statistics.median(self._recent) / 1000 if self._recent else None
        migration.progressed(
            msgspec.structs.replace(
                before,
                bins=bins,
                bins_done=bins - len(left),
                bytes=bytes_done + bytes_left,
                bytes_done=bytes_done,
                steps_done=before.steps_done + (step is not None),
                steps_left=steps_left if left else 0,
                left_s=None if pace is None or steps_left is None else steps_left * pace,
                is_waiting_for=why,
            ),
            step,
        )


def _shares_after(each: DividedBin, now: Collection[DividedBin], wanted: Collection[DividedBin]) -> int | None:
    """How many shares a bin is to have, if that is another number."""
    if (each in now) == (each in wanted):
        return None
    return len(each.bins) if each in wanted else 1
