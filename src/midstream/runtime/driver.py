"""The driver of a job's epochs and changes: what to run, whether it counts, and what follows from a failure.

Both runtimes use it, so that simulations run what production runs. It knows neither Spark nor sockets: a runtime
computes the epochs, says what became of them, and lends it a control plane and a few hands (:class:`Edge`).

An epoch goes through these steps (:meth:`Driver.run`)::

    begin ──► the runtime computes, sinks write ──► commit: sealed, manifest written, counted
      │                      │                         │
      │                      └──► failed ◄─────────────┘ not whole, or given up meanwhile
      │                             └──► run again, or the job fails
      └──► None: the epoch has a manifest already, so nothing is owed (a crash came before Spark's own commit)

Two kinds of threads meet here: the runtime's, which runs epochs, and users', which request changes. A lock keeps them
apart at the few moments that count. It is not held while an epoch is computed, nor while code of the user's runs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from midstream.change.change import Change
from midstream.change.configuration import Configuration
from midstream.change.preflight import Samples, changed_transforms, run_preflight
from midstream.change.prepare import PreparedChange
from midstream.change.trial import Changes, Request, RunFailure
from midstream.checkpoint.audit_files import keep_index
from midstream.checkpoint.committed_state import CommittedState
from midstream.checkpoint.location import Checkpoint, Manifest
from midstream.checkpoint.sink_files import SinkFolders
from midstream.checkpoint.sweeper import Sweeper
from midstream.control.messages import (
    AuditOrder,
    ChangeNoted,
    Commit,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    Event,
    GiveUpRun,
    Instruction,
    Reject,
    TaskFailed,
)
from midstream.errors import CheckpointError, MidstreamError, ProtocolError
from midstream.flow.model import Graph, Sink
from midstream.ids import Epoch, Run
from midstream.metrics import EpochProgress
from midstream.planner.change_plan import Scheduler
from midstream.runtime.epoch_phases import EpochMoments, phases_of
from midstream.runtime.reporting import cause_of, epoch_progress, explain
from midstream.storage.table_files import SinkFile

__all__ = ["BatchEntry", "Control", "Driver", "DriverCrashed", "Edge", "OpenRun"]

_log = logging.getLogger("midstream")


class DriverCrashed(Exception):
    """Raised by tests in place of the death of this process: nothing follows from it here."""


class Control(Protocol):
    """The coordinator, as the driver speaks to it."""

    def tell(self, event: Event) -> Sequence[Instruction]:
        """Have the coordinator take an event and send what it has for tasks; gives what the driver must know."""

    @property
    def failures(self) -> tuple[TaskFailed, ...]:
        """The failures that tasks of the run in progress have reported."""

    def journal(self) -> bytes:
        """The events of the newest run."""


class Edge(Protocol):
    """What only the runtime can do."""

    def make_ready(self) -> None:
        """A run of an epoch is about to begin."""

    def is_lost(self, error: BaseException) -> bool:
        """Whether a run that failed so was lost through no function, as when Spark cannot run its jobs."""

    def cancel(self, run: OpenRun, *, interrupt: bool = False) -> None:
        """Make the runtime stop computing this run, soon; it reports a failure then. Returns at once.

        ``interrupt`` includes functions of the user's that run on the driver.
        """

    def start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        """Call ``then`` after so many seconds, instead of what was to be called before."""

    def stop_timer(self) -> None:
        """Call nothing."""

    def try_transforms(self, graph: Graph, names: Sequence[str]) -> None:
        """Call transforms on no rows; raises :class:`~midstream.errors.FlowError` if one cannot work."""

    def sweep(self, sweeper: Sweeper) -> None:
        """Have the sweeper remove what is due, now or beside the epochs to come."""

    def secure(self, run: OpenRun) -> None:
        """Have what the engine's own log says of this run on disk, because a manifest is about to refer to it."""

    def at(self, step: str) -> None:
        """The driver is at this step of a commit. For tests, which may make it crash there."""


@dataclass(frozen=True)
class BatchEntry:
    """What the engine's own log says of an epoch; the same in every try, also after a restart."""

    clock: int
    """When the epoch was planned, in microseconds since 1970."""
    offsets: str = ""
    """Identifies the rows of the epoch."""
    closing: bool = False
    """Whether the epoch closes what is open; it has no rows, and is the job's last."""


@dataclass(frozen=True)
class OpenRun:
    """A run in progress. It is over when it is committed or has failed."""

    epoch: Epoch
    run: Run
    entry: BatchEntry
    configuration: Configuration
    committed: CommittedState
    began: float
    """In seconds since 1970."""
    planned: list[float] = field(default_factory=list, compare=False)
    """When it began to compute what was planned, once that is known."""
    files: dict[str, tuple[SinkFile, ...]] = field(default_factory=dict, compare=False)
    """By sink: files that were staged outside of stages, behind a transform."""
    is_over: threading.Event = field(default_factory=threading.Event, compare=False)


class Driver:
    """See the module's text."""

    def __init__(
        self,
        changes: Changes,
        checkpoint: Checkpoint,
        control: Control,
        edge: Edge,
        *,
        audit: AuditOrder | None,
        on_commit: Callable[[Commit, EpochProgress], None],
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
        self.sweeper = Sweeper(checkpoint)
        self._samples = Samples()
        self._committed: CommittedState | None = None  # known when the runtime says with which epoch it goes on
        newest = checkpoint.newest_manifest()
        self._folders = SinkFolders(_tables(changes.configuration.graph), durable=checkpoint.durable)
        if newest is not None:
            self._folders.recover(newest.epoch, newest.files)
        self._found = Epoch(-1) if newest is None else newest.epoch
        """The newest epoch that has a manifest from before this start."""
        self._ended: float | None = None
        """When the last epoch was committed, in this life of the driver."""
        self._next_run = Run(0)
        self._lock = threading.RLock()
        self._open: OpenRun | None = None
        self._wants_replay = False
        self._overdue: str | None = None
        self._is_stopping = False
        self._warned_of: set[str] = set()

    # ── epochs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, epoch: Epoch, entry: BatchEntry, compute: Callable[[OpenRun], None]) -> None:
        """Run an epoch until it is committed. Raises :class:`~midstream.errors.JobFailed` if it cannot be.

        ``compute`` returns when a run is computed and all its sinks are written.
        """
        first_began: float | None = None
        while True:
            began = self._stopwatch()
            self._edge.make_ready()
            run = self.begin(epoch, entry)
            if run is None:
                return
            first_began = run.began if first_began is None else first_began
            try:
                compute(run)
            except DriverCrashed:
                raise
            except BaseException as error:
                self._failed(run, error, is_lost=self._edge.is_lost(error))
                continue
            if self._commit(run, 1000 * (self._stopwatch() - began), first_began):
                return

    def planned(self, run: OpenRun) -> None:
        """The runtime knows what it has to compute for a run, and begins to."""
        run.planned.append(self._wall())

    def begin(self, epoch: Epoch, entry: BatchEntry) -> OpenRun | None:
        """Open a run of an epoch; None if the epoch is committed already, so that there is nothing to compute."""
        with self._lock:
            if epoch <= self._found and (manifest := self._adoptable(epoch, entry)) is not None:
                _log.info("epoch %s was committed before the job was started again", epoch)
                self._committed = CommittedState.of(self.changes.configuration.graph, manifest)
                self._sweep(self._committed)
                return None
            committed = self._committed_before(epoch)
            configuration = self.changes.configuration
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
                    live=tuple(sorted(self.changes.live())),
                    closing=entry.closing,
                )
            )
            self._open = run
            self._start_timer()
            return run

    def _commit(self, run: OpenRun, duration_ms: float, first_began: float) -> bool:
        """The runtime has computed a run and written its sinks. False if the epoch is to be run again all the same.

        The order is what makes an epoch exactly once: nothing that follows from the epoch happens before 5, and all
        that the manifest refers to is there before it.

        1. A run that was given up meanwhile is not committed, although it came to its end.
        2. The coordinator agrees that the epoch is whole. From here on its tasks are fenced.
        3. The index of what tasks recorded for the auditor is written.
        4. The engine's own log of the epoch is on disk: without it, the manifest would speak of rows that nobody knows.
        5. The manifest is written. From here on the epoch counts, whatever happens.
        6. The files of sinks, which the manifest names, are put in place. If that is cut short, the next start does it.
        7. The changes learn of it, before anything that depends on whether one is still on trial.
        8. What nobody needs any more is removed: after 5, which says what is superseded, and after 7, which says what
           can still be gone back to.
        9. Users are told, last, because their code may fail.
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
            # 5.
            now = self._wall()
            ended_with = self.changes.run_of(commit, run.configuration)
            committed = run.committed.after(commit)
            manifest = committed.manifest(
                commit,
                ended_with.programs,
                ended_with.assignments,
                committed_at=now,
                offsets=run.entry.offsets,
                files={**commit.files, **run.files},
                closing=run.entry.closing,
            )
            self._checkpoint.commit(manifest)
            self._edge.at("manifest written")
            self._over(run)
            self._committed = committed
            # 6.
            self._folders.publish(manifest.epoch, manifest.files)
            self._edge.at("published")
            # 7.
            self.changes.committed(commit, run.configuration)
            # 8.
            self._samples = self._samples.after(commit)
            self._sweep(committed)
            self._edge.at("counted")
            # 9.
            ended = self._wall()
            planned = run.planned[0] if run.planned else computed
            times = EpochMoments(self._ended, first_began, run.began, planned, computed, ended)
            self._ended = ended
            phases = phases_of(times, commit.spans)
            self._on_commit(commit, epoch_progress(ended_with.plan, commit, now, duration_ms, phases))
            self._warn_of_times_ahead(commit)
            return True

    def _warn_of_times_ahead(self, commit: Commit) -> None:
        """Once for each source: windows that never close should not be a riddle."""
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
        """A run has failed. Returns if the epoch is to be run again, else raises :class:`~midstream.errors.JobFailed`.

        ``is_lost`` says that the error is no function's, if no task has reported one.
        """
        with self._lock:
            failures = self._control.failures
            self._control.tell(EpochAbandoned(run.epoch, run.run))
            self._over(run)
            if self._wants_replay and not self._is_stopping:
                return
            self._judge(run, error, failures, is_lost=is_lost)

    def _judge(
        self, run: OpenRun, error: BaseException, failures: tuple[TaskFailed, ...], *, is_lost: bool = False
    ) -> None:
        """Returns if the epoch is to be run again, else raises."""
        failed = explain(run.configuration.graph.name, run.epoch, error, failures)
        if not self._is_stopping:
            with contextlib.suppress(CheckpointError, OSError):  # what failed matters more than its record
                self._checkpoint.keep_journal(run.epoch, run.run, self._control.journal())
                self.sweeper.after_failure()
            failure = RunFailure(
                self._overdue or cause_of(failed),
                frozenset(each.revision for each in failures),
                is_lost=is_lost and not failures,
                is_overdue=self._overdue is not None,
                operator=failed.fields.get("operator"),
            )
            if self.changes.failed(failure, run.configuration):
                return
        # A failure that a task reported brings its traceback; others (of a sink, a transform) keep theirs.
        raise failed from (None if failures else error)

    def _over(self, run: OpenRun) -> None:
        run.is_over.set()
        self._open = None
        self._edge.stop_timer()

    def _committed_before(self, epoch: Epoch) -> CommittedState:
        """What the epoch goes on from. Read only after a start; from then on the job knows."""
        if self._committed is None or self._committed.epoch != epoch - 1:
            graph = self.changes.configuration.graph
            self._committed = CommittedState.of(graph, self._checkpoint.manifest_before(epoch))
            if epoch < self._found:
                self._require_state(epoch, self._committed)
            self._sweep(self._committed)
        return self._committed

    def _sweep(self, committed: CommittedState) -> None:
        """Let what nobody needs from here on be removed."""
        self.sweeper.after(committed, live=self.changes.live(), samples=self._samples.files())
        self._edge.sweep(self.sweeper)

    def _adoptable(self, epoch: Epoch, entry: BatchEntry) -> Manifest | None:
        """The manifest of an epoch that was committed before this start, for the same rows.

        Sinks were written before the manifest, so nothing is owed: to run the epoch again could only make sinks and
        state differ, if the script, a function or a pending change is another one now. For other rows (the engine's
        log was lost, and the epoch planned anew) the manifest says nothing.
        """
        manifest = self._checkpoint.manifest(epoch)
        if manifest is None or manifest.offsets != entry.offsets:
            return None
        return manifest

    def _require_state(self, epoch: Epoch, committed: CommittedState) -> None:
        """The engine's log leads back further than a crash can; the state of that time may have been swept."""
        entries = (entry for lineage in committed.lineages.values() for entry in lineage.entries)
        if missing := self._checkpoint.states.lacks(entry.file for entry in entries):
            raise CheckpointError(
                f"Spark's log in the checkpoint {self._checkpoint.location!r} goes on with epoch {epoch}, but state "
                f"was committed up to epoch {self._found}, and {len(missing)} file(s) that epoch {epoch} needs are "
                f"gone, such as {missing[0]!r}. Restore the folder 'spark' as it was after epoch {self._found}"
            )

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: Request) -> PreparedChange:
        """What a change would be, if it were requested now."""
        return self.changes.check(self.changes.store(request))

    def request(self, request: Request) -> Change:
        """Check a change and let it take effect as soon as it can. What does not fit is refused, and put on record."""
        with self._checkpoint.blobs.holds.preparing():  # until what it stores is on record
            return self._request(request)

    def _request(self, request: Request) -> Change:
        began = self._stopwatch()
        try:
            # All that the user's code has a part in comes first, without the lock; epochs go on meanwhile.
            request = self.changes.store(request)
            prepared = self.changes.check(request)
            if request.preflight:
                self._try(prepared)
            while True:
                with self._lock:
                    self._require_not_stopping()
                    if self.changes.is_current(prepared):
                        return self._take(request, prepared, 1000 * (self._stopwatch() - began))
                prepared = self.changes.check(request)  # another change came first
        except MidstreamError as error:
            with self._lock:
                if not self._is_stopping:
                    self.changes.refuse(request, error)
            raise

    def _try(self, prepared: PreparedChange) -> None:
        self._edge.try_transforms(prepared.after.graph, changed_transforms(prepared))
        with contextlib.ExitStack() as stack:
            with self._lock:
                samples = self._samples
                stack.enter_context(self.sweeper.holding(samples.files()))
            for note in run_preflight(prepared, samples, self._checkpoint.blobs, self._checkpoint.states):
                _log.info("%s", note)

    def _take(self, request: Request, prepared: PreparedChange, preparation_ms: float) -> Change:
        change = self.changes.request(request, prepared, preparation_ms)
        if self.changes.on_trial is change:
            self._enact(change)
        return change

    def _enact(self, change: Change) -> None:
        prepared = change.prepared
        if self._open is None:
            change.note("no epoch is running; the next one begins under it", in_effect=True)
        elif prepared.plan.scheduler is Scheduler.REPLAY:
            change.note("the running epoch is cancelled")
            self.replay()
        elif prepared.from_next_epoch:
            change.note("waits for the next epoch")
        else:
            self.hear(self._control.tell(prepared.begun))
            self._start_timer()

    def hear(self, instructions: Sequence[Instruction]) -> None:
        """The coordinator has decided something. Called by the channel's thread, which must not wait: no lock."""
        for instruction in instructions:
            match instruction:
                case ChangeNoted():
                    self.changes.noted(instruction)
                case GiveUpRun(epoch, run):
                    opened = self._open
                    if opened is not None and (opened.epoch, opened.run) == (epoch, run):
                        self._edge.cancel(opened)
                case _:
                    pass

    # ── time limits, and the end ──────────────────────────────────────────────────────────────────────────────────

    def _start_timer(self) -> None:
        """An epoch on trial has so much time, from when the change takes effect in it."""
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
        """The job is being stopped: failures are no longer anybody's fault, and no change is taken any more."""
        with self._lock:
            self._is_stopping = True
            if self._open is not None and self._open.entry.closing:  # others end with their query
                self._edge.cancel(self._open)

    def _require_not_stopping(self) -> None:
        if self._is_stopping:
            raise MidstreamError(
                f"job {self.changes.configuration.graph.name!r} is stopping, so it cannot be changed; start the flow "
                f"again with the same checkpoint"
            )

    def ended(self, why: str) -> None:
        """The job is over; so are its changes."""
        with self._lock:
            self._edge.stop_timer()
            self.changes.abandon(why)


def _tables(graph: Graph) -> dict[str, str]:
    """Where each file sink of a flow writes."""
    specs = {op.name: op.spec for op in graph.of(Sink)}
    return {
        name: spec.table.location for name, spec in specs.items() if isinstance(spec, Sink) and spec.table is not None
    }
