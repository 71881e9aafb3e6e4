"""A flow running on Spark: one Structured Streaming query whose ``foreachBatch`` is the heartbeat."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from midstream.control.messages import Commit, EpochAbandoned, EpochOpened, EpochSealed
from midstream.engine.collector import FRAME_BYTES
from midstream.errors import CheckpointError, JobFailed, MidstreamError
from midstream.flow.model import Graph, Sink
from midstream.flow.sinks import SinkTarget
from midstream.ids import BINS, Digest, Epoch, Revision, Run
from midstream.metrics import EpochProgress, JobMetrics
from midstream.planner.stages import Plan
from midstream.runtime.batching import BatchLimit, is_chosen_by_user
from midstream.runtime.checkpoint import Checkpoint
from midstream.runtime.control_plane import ControlPlane
from midstream.runtime.epoch import compile_epoch
from midstream.runtime.looking import read_state
from midstream.runtime.reporting import epoch_progress, explain, unexpected
from midstream.runtime.sinks import write_sinks
from midstream.runtime.standing import Standing
from midstream.runtime.sweeping import Sweeper
from midstream.runtime.worker import Ticket, Whereabouts

KEPT_PROGRESS = 100

# Set on the query's own copy of the session, so the user's settings stay as they are. Adaptive execution would merge
# or skip partitions that the coordinator expects to hear from. The buffer towards Python takes a whole frame.
QUERY_CONF = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.python.udf.buffer.size": str(FRAME_BYTES),
}


class JobStatus(enum.StrEnum):
    """Where a job is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    """By :meth:`Job.stop`."""
    FINISHED = "finished"
    """Everything available was processed (trigger ``"available-now"``)."""
    FAILED = "failed"


@dataclass(frozen=True)
class Configuration:
    """What the job runs: a compiled plan, its stored programs, and who owns which bin."""

    plan: Plan
    programs: tuple[Digest, ...]
    revision: Revision
    partitions: int

    @property
    def bins(self) -> tuple[int, ...]:
        """Which partition of a stage owns each bin."""
        return tuple(b % self.partitions for b in range(BINS))


class Job:
    """A running flow. Made by :meth:`midstream.Flow.start`; all methods may be called from any thread.

    Usable as a context manager, which stops the job at the end::

        with flow.start(spark, checkpoint="…") as job:
            job.await_epoch(10)
    """

    def __init__(
        self,
        spark: SparkSession,
        configuration: Configuration,
        checkpoint: Checkpoint,
        control: ControlPlane,
        local_state: str | None,
    ) -> None:
        self._spark = spark
        self._configuration = configuration
        self._checkpoint = checkpoint
        self._control = control
        self._at = Whereabouts(
            control.address, checkpoint.identity.job, checkpoint.blobs.location, checkpoint.states.location, local_state
        )
        self._standing: Standing | None = None  # known when Spark says with which epoch it goes on
        self._sweeper = Sweeper(checkpoint.states)
        self._user_limits = is_chosen_by_user(spark)
        self._limit = BatchLimit()
        self._set: dict[str, str] = {}
        self._query: StreamingQuery | None = None
        self._stopping = False
        self._over = threading.Event()
        self._exception: JobFailed | None = None
        self._run = Run(0)
        self._progress: deque[EpochProgress] = deque(maxlen=KEPT_PROGRESS)
        self._metrics = JobMetrics()
        self._changed = threading.Condition()

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        """The flow's name."""
        return self.graph.name

    @property
    def id(self) -> str:
        """The job's identity; kept in its checkpoint, so it survives restarts."""
        return self._checkpoint.identity.job

    @property
    def graph(self) -> Graph:
        """The flow that runs."""
        return self._configuration.plan.graph

    @property
    def status(self) -> JobStatus:
        """Where the job is in its life."""
        if self._exception is not None:
            return JobStatus.FAILED
        if self._over.is_set():
            return JobStatus.STOPPED if self._stopping else JobStatus.FINISHED
        return JobStatus.RUNNING if self._metrics.epochs else JobStatus.STARTING

    @property
    def progress(self) -> tuple[EpochProgress, ...]:
        """The most recent epochs, newest last."""
        return tuple(self._progress)

    @property
    def metrics(self) -> JobMetrics:
        """Totals since this start."""
        return self._metrics

    def state(self, operator: str) -> DataFrame:
        """The committed state of an operator as a DataFrame: its key columns, and what it holds of each key.

        Of an aggregate these are its totals so far, of a process all that its function remembers, values as text.
        ``midstream state`` shows the same, also of a job that is not running.
        """
        table = read_state(self._checkpoint.location, operator)
        return self._spark.createDataFrame(table)

    @property
    def exception(self) -> JobFailed | None:
        """Why the job failed, if it did."""
        return self._exception

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.status}, epochs={self._metrics.epochs})"

    # ── waiting and stopping ──────────────────────────────────────────────────────────────────────────────────────

    def await_epoch(self, count: int, timeout: float | None = None) -> bool:
        """Wait until ``count`` epochs are committed since this start; false if the time is up or the job ended first.

        Raises :class:`~midstream.errors.JobFailed` when the job failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._metrics.epochs >= count or self._over.is_set(), timeout)
        if self._exception is not None:
            raise self._exception
        return self._metrics.epochs >= count

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the job has ended; false if the time is up. Raises :class:`~midstream.errors.JobFailed`."""
        ended = self._over.wait(timeout)
        if self._exception is not None:
            raise self._exception
        return ended

    def stop(self) -> None:
        """Stop now. The epoch in progress is given up; a restart runs it again. Harmless when repeated."""
        query = self._query
        if query is None:
            raise MidstreamError(f"job {self.name!r} has not been started")
        if not self._over.is_set():
            self._stopping = True
            query.stop()
        self._over.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── the heartbeat ─────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, query: StreamingQuery) -> None:
        """Tell the job which query carries it. Called once, by :func:`midstream.runtime.start.start`."""
        self._query = query
        threading.Thread(target=self._watch, args=(query,), name="midstream-job", daemon=True).start()

    def _watch(self, query: StreamingQuery) -> None:
        """See the query end, by whatever cause, and leave nothing behind."""
        try:
            query.awaitTermination()
        except Exception as error:  # Spark's account of the failure; ours, if there is one, says it better
            self._fail(error)
        try:
            self._control.close()
        finally:
            self._checkpoint.release()
            with self._changed:
                self._over.set()
                self._changed.notify_all()

    def on_epoch(self, rows: DataFrame, batch_id: int) -> None:
        """What Spark calls for every micro-batch.

        No error but a short one of our own may leave: Spark matches the text of a Py4J error with a recursive regular
        expression, and dies of a long one.
        """
        try:
            self._run_epoch(rows, Epoch(batch_id))
        except BaseException as error:
            self._fail(error, Epoch(batch_id))
            raise RuntimeError(f"midstream: epoch {batch_id} of job {self.name} failed") from None

    def _run_epoch(self, rows: DataFrame, epoch: Epoch) -> None:
        began = time.perf_counter()
        self._configure(rows.sparkSession)
        configuration, run = self._configuration, self._run
        self._run = Run(run + 1)
        standing = self._stand_before(epoch)
        opened = EpochOpened(
            epoch=epoch,
            run=run,
            revision=configuration.revision,
            programs=configuration.programs,
            bins=configuration.bins,
            lineages=standing.by_stage(configuration.plan),
            clock=time.time_ns() // 1000,
            watermarks=standing.watermarks,
        )
        self._control.open(opened)
        try:
            frames = compile_epoch(
                configuration.plan,
                rows,
                lambda stage: Ticket(self._at, epoch, run, stage),
                configuration.partitions,
                self._limit,
            )
            try:
                write_sinks(self._targets, frames.sinks, epoch)
            finally:
                frames.release()
        except BaseException as error:
            failures = self._control.abandon(EpochAbandoned(epoch, run))
            if not self._stopping:
                with contextlib.suppress(CheckpointError, OSError):  # what failed matters more than its record
                    self._checkpoint.keep_journal(epoch, run, self._control.journal())
            raise explain(self.name, epoch, error, failures) from None
        # The epoch is whole only if Spark and the coordinator agree; then its manifest is written, then Spark commits.
        commit = self._control.seal(EpochSealed(epoch, run))
        self._commit(commit, standing.after(commit), 1000 * (time.perf_counter() - began))

    def _configure(self, session: SparkSession) -> None:
        """Set what the query's own copy of the session lacks; each setting costs a call to the JVM."""
        wanted = QUERY_CONF if self._user_limits else {**QUERY_CONF, **self._limit.conf()}
        for key, value in wanted.items():
            if self._set.get(key) != value:
                session.conf.set(key, value)
        self._set = wanted

    def _stand_before(self, epoch: Epoch) -> Standing:
        """What the epoch goes on from. Read only after a start; from then on the job knows."""
        if self._standing is None or self._standing.epoch != epoch - 1:
            self._standing = Standing.of(self.graph, self._checkpoint.manifest_before(epoch))
            self._sweeper.after(self._standing)
        return self._standing

    @property
    def _targets(self) -> Mapping[str, SinkTarget]:
        return {op.name: self.graph.payloads[op.name] for op in self.graph.of(Sink)}

    def _commit(self, commit: Commit, standing: Standing, duration_ms: float) -> None:
        now = time.time()
        progress = epoch_progress(self._configuration.plan, commit, now, duration_ms)
        self._checkpoint.commit(
            standing.manifest(commit, self._configuration.programs, self._configuration.bins, committed_at=now)
        )
        self._standing = standing
        if commit.widest_row:
            self._limit = BatchLimit.of(commit.widest_row)
        self._sweeper.after(standing)
        with self._changed:
            self._progress.append(progress)
            self._metrics = self._metrics.after(progress)
            self._changed.notify_all()

    def _fail(self, error: BaseException, epoch: Epoch | None = None) -> None:
        with self._changed:
            # An epoch that is cut off by stop() fails too, but that is no failure of the job.
            if self._exception is None and not self._stopping:
                self._exception = error if isinstance(error, JobFailed) else unexpected(self.name, epoch, error)
            self._changed.notify_all()
