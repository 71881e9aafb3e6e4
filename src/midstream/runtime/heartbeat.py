"""What happens in ``foreachBatch``: an epoch is run, until it is committed; and changes take effect meanwhile.

Two kinds of threads meet here. Spark's callback runs epochs; users' threads change what is run. One lock keeps them
apart at the few moments that count: when a run is opened, when it is sealed and committed, when it has failed, and when
a change is requested. It is not held while Spark computes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from midstream.change.changes import Changes, Request
from midstream.change.configuration import Configuration
from midstream.change.handle import Change
from midstream.change.prepare import Prepared
from midstream.change.trying import Samples, try_updates
from midstream.control.messages import (
    AuditOrder,
    ChangeNoted,
    Commit,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    GiveUpRun,
    Instruction,
)
from midstream.engine.collector import FRAME_BYTES
from midstream.errors import CheckpointError, MidstreamError
from midstream.flow.model import Sink
from midstream.flow.sinks import SinkTarget
from midstream.ids import Epoch, Run
from midstream.metrics import EpochProgress, SweepStats
from midstream.planner.change import Scheduler
from midstream.runtime.batching import BatchLimit, is_chosen_by_user
from midstream.runtime.checkpoint import Checkpoint
from midstream.runtime.control_plane import ControlPlane
from midstream.runtime.epoch import compile_epoch
from midstream.runtime.offset_log import forget_settings
from midstream.runtime.recorded import keep_index
from midstream.runtime.reporting import epoch_progress, explain
from midstream.runtime.sinks import write_sinks
from midstream.runtime.standing import Standing
from midstream.runtime.sweeping import Sweeper, SweepThread
from midstream.runtime.worker import Ticket, Whereabouts

__all__ = ["Heartbeat"]

_log = logging.getLogger("midstream")

CANCEL_AGAIN_S = 0.1

# Set on the query's own copy of the session, so the user's settings stay as they are. Adaptive execution would merge
# or skip partitions that the coordinator expects to hear from. The buffer towards Python takes a whole frame.
QUERY_CONF = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.python.udf.buffer.size": str(FRAME_BYTES),
}


class _RunAgain(Exception):
    """The run was given up for a change; the epoch is to be run once more."""


@dataclass(frozen=True)
class _Open:
    """The run in progress."""

    epoch: Epoch
    run: Run
    configuration: Configuration
    standing: Standing
    is_over: threading.Event


class Heartbeat:
    """Runs the epochs of a job."""

    def __init__(
        self,
        spark: SparkSession,
        changes: Changes,
        checkpoint: Checkpoint,
        control: ControlPlane,
        *,
        local_state: str | None,
        audit: str | None,
        on_commit: Callable[[EpochProgress], None],
    ) -> None:
        self.changes = changes
        self._spark = spark
        self._checkpoint = checkpoint
        self._control = control
        self._on_commit = on_commit
        self._at = Whereabouts(
            control.address, checkpoint.identity.job, checkpoint.blobs.location, checkpoint.states.location, local_state
        )
        self._audit = None if audit is None else AuditOrder(audit, checkpoint.audit_location)
        self._standing: Standing | None = None  # known when Spark says with which epoch it goes on
        self._sweeper = Sweeper(checkpoint)
        self._sweep_thread = SweepThread(self._sweeper)
        self._samples = Samples()
        self._user_limits = is_chosen_by_user(spark)
        self._limit = BatchLimit()
        self._set: dict[str, str] = {}
        self._run = Run(0)
        self._lock = threading.RLock()
        self._open: _Open | None = None
        self._wants_replay = False
        self._time_is_up: str | None = None
        self._timer: threading.Timer | None = None
        self.is_stopping = False
        control.listen(self._from_coordinator)

    # ── epochs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def beat(self, rows: DataFrame, epoch: Epoch) -> None:
        """Run an epoch until it is committed. Raises :class:`~midstream.errors.JobFailed` if it cannot be."""
        while True:
            try:
                return self._try(rows, epoch)
            except _RunAgain:
                continue

    def _try(self, rows: DataFrame, epoch: Epoch) -> None:
        began = time.perf_counter()
        self._configure(rows.sparkSession)
        opened = self._begin(epoch)
        try:
            with self._cancellable(opened):
                self._compute(opened, rows)
        except BaseException as error:
            self._failed(opened, error)
            raise _RunAgain from None
        with self._lock:
            opened.is_over.set()
            if self._wants_replay:  # it came when there was nothing left to cancel
                self._open = None
                self._control.abandon(EpochAbandoned(epoch, opened.run))
                raise _RunAgain
            # The epoch is whole only if Spark and the coordinator agree; then its manifest is written, then Spark
            # commits.
            commit = self._control.seal(EpochSealed(epoch, opened.run))
            self._commit(opened, commit, 1000 * (time.perf_counter() - began))

    def _compute(self, opened: _Open, rows: DataFrame) -> None:
        configuration = opened.configuration
        frames = compile_epoch(
            configuration.plan,
            rows,
            lambda stage: Ticket(self._at, opened.epoch, opened.run, stage),
            configuration.partitions,
            self._limit,
        )
        try:
            write_sinks(self._targets(configuration), frames.sinks, opened.epoch)
        finally:
            frames.release()

    @contextlib.contextmanager
    def _cancellable(self, opened: _Open) -> Iterator[None]:
        """What this thread has Spark do here can be cancelled by its tag, and nothing else: each run has its own."""
        context, tag = self._spark.sparkContext, self._tag(opened.epoch, opened.run)
        context.addJobTag(tag)
        try:
            yield
        finally:
            context.removeJobTag(tag)

    def _tag(self, epoch: Epoch, run: Run) -> str:
        return f"midstream-{self._at.job}-{epoch}.{run}"

    def _begin(self, epoch: Epoch) -> _Open:
        with self._lock:
            standing = self._stand_before(epoch)
            configuration, run = self.changes.configuration, self._run
            self._run = Run(run + 1)
            self._wants_replay, self._time_is_up = False, None
            opened = _Open(epoch, run, configuration, standing, threading.Event())
            self._control.open(
                EpochOpened(
                    epoch=epoch,
                    run=run,
                    revision=configuration.revision,
                    programs=configuration.programs,
                    bins=configuration.bins,
                    lineages=standing.by_stage(configuration.plan),
                    clock=time.time_ns() // 1000,
                    watermarks=standing.watermarks,
                    on_trial=self.changes.opened(epoch),
                    audit=self._audit,
                    live=tuple(sorted(self.changes.live())),
                )
            )
            self._open = opened
            self._start_timer()
            return opened

    def _failed(self, opened: _Open, error: BaseException) -> None:
        """Returns if the epoch is to be run again, else raises."""
        with self._lock:
            opened.is_over.set()
            failures = self._control.abandon(EpochAbandoned(opened.epoch, opened.run))
            self._open = None
            self._stop_timer()
            if self._wants_replay and not self.is_stopping:
                return
            failed = explain(opened.configuration.graph.name, opened.epoch, error, failures)
            if not self.is_stopping:
                with contextlib.suppress(CheckpointError, OSError):  # what failed matters more than its record
                    self._checkpoint.keep_journal(opened.epoch, opened.run, self._control.journal())
                    self._sweeper.after_failure()
                if self.changes.failed(self._time_is_up or str(failed), opened.configuration):
                    return
        raise failed from None

    def _commit(self, opened: _Open, commit: Commit, duration_ms: float) -> None:
        now = time.time()
        ended_with = self.changes.run_of(commit, opened.configuration)
        standing = opened.standing.after(commit)
        if self._audit is not None:
            keep_index(self._audit.location, commit.epoch, commit.audits)
        self._checkpoint.commit(standing.manifest(commit, ended_with.programs, ended_with.bins, committed_at=now))
        self._open = None
        self._stop_timer()
        self._standing = standing
        self.changes.committed(commit, opened.configuration)
        self._samples = self._samples.after(commit)
        if commit.widest_row:
            self._limit = BatchLimit.of(commit.widest_row)
        self._sweep(standing)
        self._on_commit(epoch_progress(ended_with.plan, commit, now, duration_ms))

    def _configure(self, session: SparkSession) -> None:
        """Set what the query's own copy of the session lacks; each setting costs a call to the JVM."""
        if not self._set:
            forget_settings(session)
        wanted = QUERY_CONF if self._user_limits else {**QUERY_CONF, **self._limit.conf()}
        for key, value in wanted.items():
            if self._set.get(key) != value:
                session.conf.set(key, value)
        self._set = wanted

    def _stand_before(self, epoch: Epoch) -> Standing:
        """What the epoch goes on from. Read only after a start; from then on the job knows."""
        if self._standing is None or self._standing.epoch != epoch - 1:
            graph = self.changes.configuration.graph
            self._standing = Standing.of(graph, self._checkpoint.manifest_before(epoch))
            self._sweep(self._standing)
        return self._standing

    def _sweep(self, standing: Standing) -> None:
        """Let what nobody needs from here on be removed, beside the epochs to come."""
        self._sweeper.after(standing, live=self.changes.live(), samples=self._samples.files())
        self._sweep_thread.wake()

    @property
    def sweep(self) -> SweepStats:
        """What became of files that nobody needs."""
        return self._sweeper.stats

    @staticmethod
    def _targets(configuration: Configuration) -> Mapping[str, SinkTarget]:
        graph = configuration.graph
        return {op.name: graph.payloads[op.name] for op in graph.of(Sink)}

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: Request) -> Prepared:
        """What a change would be, if it were requested now."""
        with self._lock:
            return self.changes.check(request)

    def request(self, request: Request) -> Change:
        """Check a change and let it take effect as soon as it can. What does not fit is refused, and put on record."""
        with self._checkpoint.blobs.holds.preparing():  # until what it stores is on record
            return self._request(request)

    def _request(self, request: Request) -> Change:
        began = time.perf_counter()
        try:
            prepared = self.check(request)
            if request.is_tried_before:
                # The user's code may take its time; epochs go on meanwhile.
                with self._sampled() as samples:
                    for note in try_updates(prepared, samples, self._checkpoint.blobs, self._checkpoint.states):
                        _log.info("%s", note)
        except MidstreamError as error:
            with self._lock:
                self.changes.refuse(request, error)
            raise
        with self._lock:
            if not self.changes.is_current(prepared):
                prepared = self.changes.check(request)
            change = self.changes.request(request, prepared, 1000 * (time.perf_counter() - began))
            if self.changes.on_trial is change:
                self._enact(change)
            return change

    @contextlib.contextmanager
    def _sampled(self) -> Iterator[Samples]:
        """The newest samples. Inside, the files of state that belong to them stay."""
        with contextlib.ExitStack() as stack:
            with self._lock:
                samples = self._samples
                stack.enter_context(self._sweeper.holding(samples.files()))
            yield samples

    def _enact(self, change: Change) -> None:
        prepared = change.prepared
        if self._open is None:
            change.note("no epoch is running; the next one begins under it", in_effect=True)
        elif prepared.plan.scheduler is Scheduler.REPLAY:
            change.note("the running epoch is cancelled", in_effect=False)
            self._wants_replay = True
            self._cancel(self._open)
        elif prepared.from_next_epoch:
            change.note("waits for the next epoch", in_effect=False)
        else:
            self.changes.began()
            self._from_coordinator(self._control.begin(prepared.begun))
            self._start_timer()

    def ended(self, why: str) -> None:
        """The job is over; so are its changes."""
        with self._lock:
            self._stop_timer()
            self.changes.abandon(why)
        self._sweep_thread.close()

    def _from_coordinator(self, instructions: Sequence[Instruction]) -> None:
        """Called by the channel's thread, too, which must not wait: so without the lock."""
        for instruction in instructions:
            match instruction:
                case ChangeNoted():
                    self.changes.noted(instruction)
                case GiveUpRun(epoch, run):
                    opened = self._open
                    if opened is not None and (opened.epoch, opened.run) == (epoch, run):
                        self._cancel(opened)
                case _:
                    pass

    def _cancel(self, opened: _Open) -> None:
        """Cancel a run, and return at once. The callback notices: its write fails.

        Between two jobs of a run there is nothing to cancel, so it is done again until the run is over.
        """

        def cancel() -> None:
            while not opened.is_over.is_set():
                self._spark.sparkContext.cancelJobsWithTag(self._tag(opened.epoch, opened.run))
                opened.is_over.wait(CANCEL_AGAIN_S)

        threading.Thread(target=cancel, name="cancel", daemon=True).start()

    # ── time limits ───────────────────────────────────────────────────────────────────────────────────────────────

    def _start_timer(self) -> None:
        """An epoch on trial has so much time, from when the change takes effect in it."""
        change = self.changes.on_trial
        if change is not None and change.time_limit_s is not None:
            self._timer = threading.Timer(change.time_limit_s, self._give_up, (change, self._open))
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, change: Change, opened: _Open) -> None:
        with self._lock:
            if self._open is not opened or self.changes.on_trial is not change:
                return
            self._time_is_up = (
                f"epoch {opened.epoch} was not done within the time limit of {change.time_limit_s:g} s after the "
                f"change took effect in it"
            )
            self._cancel(opened)
