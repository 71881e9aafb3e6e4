"""The driver of a job's epochs and changes: what to run, whether it counts, and what to do after a failure.

Both runtimes use it, so that simulations run what production runs. It knows neither Spark nor sockets: a runtime
computes the epochs, reports their results, and provides a control plane and an :class:`Edge`.

An epoch goes through these steps (:meth:`Driver.run`)::

    begin ──► the runtime computes, sinks write ──► commit: sealed, manifest written, counted
      │                      │                         │
      │                      └──► failed ◄─────────────┘ not whole, or given up meanwhile
      │                             └──► run again, or the job fails
      └──► None: the epoch has a manifest already, so nothing is owed (a crash came before Spark's own commit)

Two kinds of threads meet here: the runtime's, which runs epochs, and users', which request changes. A lock protects
the short critical sections. It is not held while an epoch is computed, nor while the user's code runs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from midstream.change.change import Change
from midstream.change.configuration import Configuration
from midstream.change.initial_state import rows_of_state
from midstream.change.migrations import Migrations
from midstream.change.preflight import Samples
from midstream.change.savepoint import savepoint_of
from midstream.change.trial import Changes, RunFailure
from midstream.checkpoint.audit_files import keep_index
from midstream.checkpoint.bin_measures import BinMeasures
from midstream.checkpoint.committed_state import CommittedState
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.checkpoint.savepoints import Savepoint
from midstream.checkpoint.sweeper import Sweeper
from midstream.control.messages import (
    AuditOrder,
    ChangeNoted,
    Commit,
    ControlNoted,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    Event,
    GiveUpRun,
    Instruction,
    PrefetchNoted,
    PrefetchRequest,
    PrefetchWanted,
    Reject,
    TaskFailed,
)
from midstream.control.placement import Placement, require_possible
from midstream.errors import CheckpointError, MidstreamError, ProtocolError
from midstream.flow.knobs import knobs_of_tasks
from midstream.ids import Digest, Epoch, ExecutorId, PartitionId, Run
from midstream.metrics import EpochProgress
from midstream.observation import Observation
from midstream.runtime.change_desk import ChangeDesk
from midstream.runtime.claimed_sinks import ClaimedSinks
from midstream.runtime.control_desk import ControlDesk
from midstream.runtime.edge import Control, Edge, EpochEntry, HandOverDue, OpenRun, ProcessEnded
from midstream.runtime.epoch_phases import EpochMoments, phases_of
from midstream.runtime.executor_warming import ExecutorWarming
from midstream.runtime.migration_desk import MigrationDesk
from midstream.runtime.observer import Observer
from midstream.runtime.reporting import cause_of, epoch_progress, explain
from midstream.state.files import Author, FileKind
from midstream.storage.blobs import Blob

__all__ = ["Driver"]

_log = logging.getLogger("midstream")


class Driver:
    """Runs a job's epochs and enacts its changes; see the module's docstring."""

    def __init__(
        self,
        changes: Changes,
        checkpoint: Checkpoint,
        control: Control,
        edge: Edge,
        *,
        audit: AuditOrder | None,
        on_commit: Callable[[Commit, EpochProgress, Observation], None],
        wall: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.changes = changes
        self._checkpoint = checkpoint
        self._control = control
        self._edge = edge
        self._audit = audit
        self._on_commit = on_commit
        self._wall = wall
        self._stopwatch = stopwatch
        self.samples = Samples()
        """Rows that operators met in the last epoch, and the state of their keys."""
        self.measures = BinMeasures()
        """The weights of the bins of all stages, after the newest epoch of this driver."""
        self.committed: CommittedState | None = None
        """The state after the last committed epoch; known once the runtime begins its first epoch."""
        self._sources = changes.configuration.graph.sources
        """The sources whose progress is known: their event times lead to the watermark."""
        self.placement = Placement()
        newest = checkpoint.newest_manifest()
        self._sinks = ClaimedSinks(changes.configuration.graph, checkpoint, newest, at=edge.at)
        self.sweeper = Sweeper(checkpoint, self._sinks.folders)
        self._found = Epoch(-1) if newest is None else newest.epoch
        """The newest epoch that has a manifest from before this start."""
        self._lock = threading.RLock()
        self.changing = ChangeDesk(self, self._lock, checkpoint, edge, self._sinks, stopwatch=stopwatch)
        self.migrating = MigrationDesk(self, self._lock)
        self.migrations = Migrations(
            changes,
            checkpoint.changes,
            self.migrating,
            next_epoch=Epoch(self._found + 1),
            warming=ExecutorWarming(self.placement, edge, self.prefetch),
            stopwatch=stopwatch,
            wall=wall,
        )
        self.controlling = ControlDesk(self, self._lock, checkpoint, edge)
        self._stored_owners: Blob | None = None
        """The assignments that the newest manifest of this driver names."""
        self._ended: float | None = None
        """When the last epoch was committed, in this life of the driver."""
        self._next_run = Run(0)
        self._open: OpenRun | None = None
        self._wants_replay = False
        self._overdue: str | None = None
        self.is_stopping = False
        """Whether the job is being stopped; then no more requests are taken."""
        self._warned_of: set[str] = set()
        self._observer = Observer(checkpoint.identity.job)
        self.controlling.resume(newest)

    # ── epochs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, epoch: Epoch, entry: EpochEntry, compute: Callable[[OpenRun], None]) -> bool:
        """Run an epoch until it is committed; False if it was already, before this start.

        Raises :class:`~midstream.errors.JobFailed` if it cannot be, and :class:`HandOverDue` if it has other sources
        than ``compute`` reads: then the epoch has to be planned again.

        ``compute`` returns when a run is computed and all its sinks are written.
        """
        first_began: float | None = None
        while True:
            began = self._stopwatch()
            self._edge.make_ready()
            run = self.begin(epoch, entry)
            if run is None:
                return False
            first_began = run.began if first_began is None else first_began
            try:
                compute(run)
            except ProcessEnded:
                raise
            except BaseException as error:
                self._failed(run, error, is_lost=self._edge.is_lost(error))
                continue
            if self._commit(run, 1000 * (self._stopwatch() - began), first_began):
                return True

    def planned(self, run: OpenRun) -> None:
        """The runtime has planned a run, and begins to compute it."""
        run.planned.append(self._wall())

    def begin(self, epoch: Epoch, entry: EpochEntry) -> OpenRun | None:
        """Open a run of an epoch; None if the epoch is committed already, so that there is nothing to compute."""
        with self._lock:
            if epoch <= self._found and (manifest := self._adoptable(epoch, entry)) is not None:
                _log.info("epoch %s was committed before the job was started again", epoch)
                self.committed = CommittedState.of(
                    self.changes.configuration.graph, manifest, self._checkpoint.identity.bins
                )
                self._sweep(self.committed)
                return None
            if not self._edge.reads(self.changes.configuration.graph):
                raise HandOverDue(f"epoch {epoch} has other sources")
            if epoch <= self._found:
                self.controlling.taken_back(epoch)
            committed = self._committed_before(epoch)
            self.migrations.begin(epoch, committed)
            configuration = self._sinks.writable(self.changes.configuration)
            controls = self.controlling.begin(configuration.plan)
            committed = self._with_initial_state(committed, configuration, epoch)
            run = OpenRun(epoch, self._next_run, entry, configuration, committed, self._wall())
            self._next_run = Run(run.run + 1)
            self._wants_replay, self._overdue = False, None
            self._control.tell(
                EpochOpened(
                    epoch=epoch,
                    run=run.run,
                    revision=configuration.revision,
                    programs=configuration.programs,
                    partitions={stage: each.partitions for stage, each in configuration.assignments.items()},
                    lineages=committed.by_stage(configuration.plan),
                    clock=entry.clock,
                    watermarks=committed.watermarks,
                    on_trial=self.changes.opened(epoch),
                    audit=self._audit,
                    live=tuple(sorted(self._live())),
                    closing=entry.closing,
                    places=self.placement.places,
                    prefetch=self.placement.requests,
                    controls=controls,
                    knobs=knobs_of_tasks(configuration.knobs),
                    flushed=configuration.flushed,
                    assignments=configuration.owners.digest,
                    owners=configuration.owners.data,
                )
            )
            self._open = run
            self.start_time_limit()
            if configuration.owners != self._stored_owners:  # of a step; the manifest will name them
                self._edge.meanwhile(lambda: self._checkpoint.blobs.put(configuration.owners))
            return run

    def _commit(self, run: OpenRun, duration_ms: float, first_began: float) -> bool:
        """The runtime has computed a run and written its sinks. False if the epoch must be run again nevertheless.

        The order makes an epoch count exactly once: nothing that follows from the epoch happens before 5, and all that
        the manifest refers to exists before it.

        1. A run that was given up meanwhile is not committed, although it finished.
        2. The coordinator agrees that the epoch is whole. From now on its tasks are fenced.
        3. The index of the histories for the auditor is written.
        4. The engine's own log of the epoch is on disk, without which nobody would know the manifest's rows; and so is
           the record of a change that was requested meanwhile.
        5. The manifest is written. From now on the epoch counts, whatever happens.
        6. The files of sinks, which the manifest names, are put in place. After an interruption the next start does it.
        7. Changes, migrations and control operations are notified, before anything that depends on whether one is
           still in progress.
        8. Files that are no longer needed are removed: after 5, which decides what is superseded, and after 7, which
           decides what the job can still go back to.
        9. Users are notified last, because their code may fail.
        """
        computed = self._wall()
        with self._lock:
            # 1.
            if self._wants_replay or self._overdue is not None:  # too late to cancel anything
                self._failed(run, MidstreamError(self._overdue or "the run is cancelled"))
                return False
            self._edge.at("computed")
            # 2.
            [commit] = self._control.tell(EpochSealed(run.epoch, run.run))
            if isinstance(commit, Reject):
                self._over(run)
                error = ProtocolError(f"epoch {run.epoch} is not whole although it was computed: {commit.reason}")
                self._judge(run, error, (), is_lost=True)
                return False
            assert isinstance(commit, Commit), commit
            # 3.
            if self._audit is not None:
                keep_index(self._audit.location, commit.epoch, commit.audits)
            self._edge.at("sealed")
            # 4.
            self._edge.secure(run)
            self.changes.secure()
            # 5.
            now = self._wall()
            ended_with = self.changes.run_of(commit, run.configuration)
            if ended_with.owners != self._stored_owners:
                self._checkpoint.blobs.put(ended_with.owners)
            committed = run.committed.after(commit)
            manifest = committed.manifest(
                commit,
                ended_with.programs,
                ended_with.document.digest,
                ended_with.owners.digest,
                committed_at=now,
                offsets=run.entry.offsets,
                files=self._sinks.by_location(ended_with.graph, {**commit.files, **run.files}),
                closing=run.entry.closing,
                controls=self.controlling.completed_in(commit),
            )
            self._checkpoint.commit(manifest)
            self._edge.at("manifest written")
            self._stored_owners = ended_with.owners
            self._over(run)
            self.committed = committed
            # 6.
            self._sinks.publish(manifest.epoch, manifest.files)
            self._edge.at("published")
            # 7.
            self.changes.committed(commit, run.configuration)
            self.migrations.committed(commit.epoch, duration_ms, commit.state_read)
            self.controlling.committed(commit)
            # 8.
            self.samples = self.samples.after(commit)
            owners = ended_with.assignments
            self.measures = self.measures.after(commit, committed, ended_with.plan, owners, duration_ms / 1000)
            self.placement.committed(commit)
            self._sweep(committed)
            self._edge.at("counted")
            # 9.
            ended = self._wall()
            planned = run.planned[0] if run.planned else computed
            times = EpochMoments(self._ended, first_began, run.began, planned, computed, ended)
            self._ended = ended
            phases = phases_of(times, commit.spans)
            progress = epoch_progress(ended_with.plan, commit, now, duration_ms, phases, run.entry.read)
            seen = self._observer.after(ended_with.graph, commit, progress, committed, run.entry.clock)
            is_on_trial = self.changes.on_trial is not None
            self._on_commit(commit, progress, msgspec.structs.replace(seen, is_on_trial=is_on_trial))
            self._warn_of_times_ahead(commit)
            self.hand_over_if_due()
            return True

    def _warn_of_times_ahead(self, commit: Commit) -> None:
        """Warn once for each source, so that users learn why windows do not close."""
        for stats in commit.operators:
            if stats.rows_ahead and stats.operator not in self._warned_of:
                self._warned_of.add(stats.operator)
                _log.warning(
                    "source %r: the event times of %s row(s) of epoch %s are further ahead of the clock than max_ahead "
                    "allows; such rows are processed, but do not move the watermark",
                    stats.operator,
                    stats.rows_ahead,
                    commit.epoch,
                )

    def replay(self) -> None:
        """Give up the run in progress, if there is one, and run its epoch again."""
        with self._lock:
            if self._open is not None:
                self._wants_replay = True
                self._edge.cancel(self._open)

    def _failed(self, run: OpenRun, error: BaseException, *, is_lost: bool = False) -> None:
        """A run has failed. Returns if the epoch must be run again, else raises :class:`~midstream.errors.JobFailed`.

        ``is_lost``: no function caused the error, unless a task has reported one.
        """
        with self._lock:
            failures = self._control.failures
            self._control.tell(EpochAbandoned(run.epoch, run.run))
            self._over(run)
            if self._wants_replay and not self.is_stopping:
                self.controlling.given_up()
                return
            self._judge(run, error, failures, is_lost=is_lost)

    def _judge(
        self, run: OpenRun, error: BaseException, failures: tuple[TaskFailed, ...], *, is_lost: bool = False
    ) -> None:
        """Returns if the epoch must be run again, else raises."""
        failed = explain(run.configuration.graph.name, run.epoch, error, failures)
        if not self.is_stopping:
            if self._overdue is None and self.controlling.failed(failures, is_lost=is_lost):
                return
            with contextlib.suppress(CheckpointError, OSError):  # the failure matters more than its journal
                self._checkpoint.journals.keep(run.epoch, run.run, self._control.journal())
                self.sweeper.after_failure()
            failure = RunFailure(
                self._overdue or cause_of(failed),
                frozenset(each.revision for each in failures),
                is_lost=is_lost and not failures,
                is_overdue=self._overdue is not None,
                operator=failed.fields.get("operator"),
            )
            if self.migrations.failed(failure) or self.changes.failed(failure, run.configuration):
                return
        # A failure that a task reported includes its traceback; others (of a sink, a transform) keep theirs.
        raise failed from (None if failures else error)

    def _over(self, run: OpenRun) -> None:
        run.is_over.set()
        self._open = None
        self._edge.stop_timer()

    def _committed_before(self, epoch: Epoch) -> CommittedState:
        """The state from which the epoch continues. Read from the checkpoint only after a start."""
        graph = self.changes.configuration.graph
        if self.committed is None or self.committed.epoch != epoch - 1 or self._sources != graph.sources:
            self._sources = graph.sources
            bins = self._checkpoint.identity.bins
            self.committed = CommittedState.of(graph, self._checkpoint.manifest_before(epoch), bins)
            if epoch < self._found:
                self._require_state(epoch, self.committed)
            self._sweep(self.committed)
        return self.committed

    def _with_initial_state(
        self, committed: CommittedState, configuration: Configuration, epoch: Epoch
    ) -> CommittedState:
        """Write the states that inserted operators begin with, as files of this run; they count with its commit."""
        files = {}
        for name in committed.lacks(configuration.initial):
            rows = rows_of_state(self._checkpoint.blobs.get(configuration.initial[name]))
            author = Author(name, epoch, self._next_run, PartitionId(0), 0)
            files[name] = self._checkpoint.states.write(rows, FileKind.DELTA, author)
        return committed.beginning_with(files) if files else committed

    def _sweep(self, committed: CommittedState) -> None:
        """Have everything removed that is no longer needed."""
        self.sweeper.after(committed, live=self._live(), samples=self.samples.files())
        self._edge.sweep(self.sweeper)

    def _live(self) -> frozenset[Digest]:
        """The blobs of all that can run without another request."""
        return self.changes.live() | self.controlling.live()

    def _adoptable(self, epoch: Epoch, entry: EpochEntry) -> Manifest | None:
        """The manifest of an epoch that was committed before this start, for the same rows.

        Sinks were written before the manifest, so nothing is left to do: running the epoch again could only make sinks
        and state differ, if the script, a function or a pending change differs now. For other rows (the engine's
        log was lost, and the epoch planned again) the manifest does not count.
        """
        manifest = self._checkpoint.manifest(epoch)
        if manifest is None or manifest.offsets != entry.offsets:
            return None
        return self._checkpoint.without_forgotten(manifest)

    def _require_state(self, epoch: Epoch, committed: CommittedState) -> None:
        """Refuse an engine's log that is further back than a crash can explain, if the state of that time was swept."""
        entries = (entry for lineage in committed.lineages.values() for entry in lineage.entries)
        if missing := self._checkpoint.states.lacks(entry.file for entry in entries):
            raise CheckpointError(
                f"Spark's log in the checkpoint {self._checkpoint.location!r} continues with epoch {epoch}, but state "
                f"was committed up to epoch {self._found}, and {len(missing)} file(s) that epoch {epoch} needs are "
                f"gone, such as {missing[0]!r}. Restore the folder {self._checkpoint.identity.spark!r} as it was after "
                f"epoch {self._found}"
            )

    # ── the coordinator ───────────────────────────────────────────────────────────────────────────────────────────

    def hand_over_if_due(self) -> None:
        """Have the engine read the sources of the next epoch if they differ from the current ones; between two
        epochs."""
        if self._open is None and not self._edge.reads(self.changes.configuration.graph):
            self._edge.hand_over()

    def hear(self, instructions: Sequence[Instruction]) -> None:
        """The coordinator has made a decision. Called by the channel's thread, which must not wait: no lock."""
        for instruction in instructions:
            match instruction:
                case ChangeNoted():
                    self.changes.noted(instruction)
                case ControlNoted():
                    opened = self._open
                    self.controlling.noted(instruction, None if opened is None else opened.epoch)
                case PrefetchNoted(report):
                    self.placement.noted(report)
                    if report.error is not None and not self._is_swept(report.epoch):
                        _log.warning("executor %s could not load ahead: %s", report.worker.executor, report.error)
                case GiveUpRun(epoch, run):
                    opened = self._open
                    if opened is not None and (opened.epoch, opened.run) == (epoch, run):
                        self._edge.cancel(opened)
                case _:
                    pass

    def _is_swept(self, epoch: Epoch) -> bool:
        """Whether files of the state after an epoch may be gone, because it is not one of the newest two."""
        return self.committed is not None and epoch < self.committed.epoch - 1

    # ── placement ─────────────────────────────────────────────────────────────────────────────────────────────────

    def propose_places(self, partitions: int) -> Mapping[PartitionId, ExecutorId]:
        """Where partitions would be if they were spread anew over the current executors; empty if they do not stick to
        executors. Takes as long as a few small jobs, and holds no lock."""
        return self._edge.propose_places(partitions)

    def prefetch(self, requests: Sequence[PrefetchRequest]) -> None:
        """Have executors load bins ahead, beginning now, until the next call: these requests replace all earlier ones.

        They are repeated with each epoch, so that bases follow what is committed. :attr:`placement` has their progress.
        An executor that does not exist yet is asked as soon as one of its workers has run a task. When partitions there
        own the bins, or the bins are no longer wanted, call again without them: executors then keep what they own, and
        free the rest after some epochs.
        """
        requests = tuple(requests)
        with self._lock:
            for request in requests:
                require_possible(request, self.changes.configuration.assignments)
            self.placement.wanted(requests)
            self.hear(self._control.tell(PrefetchWanted(requests)))

    # ── control operations ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_running(self) -> bool:
        """Whether a run is open."""
        return self._open is not None

    def tell(self, event: Event) -> None:
        """Have the coordinator handle an event, and carry out its instructions."""
        self.hear(self._control.tell(event))

    def wall(self) -> float:
        """Seconds since 1970."""
        return self._wall()

    # ── savepoints ────────────────────────────────────────────────────────────────────────────────────────────────

    def savepoint(self, name: str, *, by: str, note: str | None) -> Savepoint:
        """Take a savepoint of the last committed epoch, while epochs go on."""
        with self._checkpoint.blobs.holds.preparing(), contextlib.ExitStack() as stack:
            with self._lock:
                self.require_not_stopping()
                manifest = self._checkpoint.newest_manifest()
                committed = CommittedState.of(self.changes.configuration.graph, manifest)
                stack.enter_context(self.sweeper.holding(committed.files()))
            savepoint = savepoint_of(self._checkpoint, manifest, name, by=by, note=note)
            self.sweeper.pin(savepoint)
            return savepoint

    def delete_savepoint(self, name: str) -> Savepoint:
        """Delete a savepoint; what only it needs is removed with the next sweep."""
        deleted = self._checkpoint.savepoints.delete(name)
        self.sweeper.unpin(name)
        return deleted

    # ── time limits, and the end ──────────────────────────────────────────────────────────────────────────────────

    def start_time_limit(self) -> None:
        """Start the time limit of an epoch on trial, when the change takes effect in it."""
        change, run = self.changes.on_trial, self._open
        if change is not None and run is not None and change.time_limit_s is not None:
            self._edge.start_timer(change.time_limit_s, lambda: self._time_is_up(change, run))

    def _time_is_up(self, change: Change, run: OpenRun) -> None:
        with self._lock:
            if self._open is not run or self.changes.on_trial is not change:
                return
            self._overdue = (
                f"epoch {run.epoch} was not done within the time limit of {change.time_limit_s:g} s after the change "
                f"took effect in it"
            )
            self._edge.cancel(run, interrupt=True)

    def stopping(self) -> None:
        """The job is being stopped: failures no longer count, and no more changes are taken."""
        with self._lock:
            self.is_stopping = True
            if self._open is not None and self._open.entry.closing:  # other epochs end with their query
                self._edge.cancel(self._open)

    def require_not_stopping(self) -> None:
        """Refuse a request when the job is being stopped."""
        if self.is_stopping:
            raise MidstreamError(
                f"job {self.changes.configuration.graph.name!r} is stopping, so it cannot be changed; start the flow "
                f"again with the same checkpoint"
            )

    def ended(self, why: str) -> None:
        """The job has ended; end its changes."""
        with self._lock:
            self._edge.stop_timer()
            self.changes.abandon(why)
            self.migrations.abandon(why)
            self.controlling.abandon(why)
