"""A flow running on Spark: one Structured Streaming query whose ``foreachBatch`` is the heartbeat."""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from midstream.change.change import Change
from midstream.change.prepare import PreparedChange
from midstream.change.trial import Changes, Request
from midstream.checkpoint.change_records import whoami
from midstream.checkpoint.inspection import read_state
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.savepoints import Savepoint
from midstream.control.placement import ExecutorShare
from midstream.controllers.controller import Controller
from midstream.errors import JobFailed, MidstreamError
from midstream.flow.knobs import KNOBS
from midstream.flow.model import Graph
from midstream.ids import Epoch, Revision
from midstream.metrics import EpochProgress, JobMetrics
from midstream.observation import Observation, with_backlog
from midstream.runtime.changing_job import ChangingJob
from midstream.runtime.control_desk import ControlDesk
from midstream.runtime.controller_desk import ControllerDesk, attached
from midstream.runtime.edge import HandOverDue
from midstream.runtime.migration_desk import MigrationDesk
from midstream.runtime.notebook import card_of, keep_showing
from midstream.runtime.reporting import unexpected
from midstream.runtime.spark.control_plane import ControlPlane
from midstream.runtime.spark.executor_request import SparkExecutors
from midstream.runtime.spark.heartbeat import Heartbeat
from midstream.runtime.spark.kafka import EpochNotes
from midstream.runtime.spark.pace import RowLimit
from midstream.runtime.spark.queries import Queries
from midstream.runtime.steered_job import SteeredJob
from midstream.runtime.steering import JobSteering, SteeringThread
from midstream.runtime.table_refresher import TableRefresher
from midstream.runtime.watch import Watch, Watches

_log = logging.getLogger("midstream")

KEPT_PROGRESS = 100


class HttpInterface(Protocol):
    """The HTTP interface of a job, see :class:`midstream.server.serve.JobServer`."""

    url: str
    token: str

    def close(self) -> None:
        """Stop serving."""


class JobStatus(enum.StrEnum):
    """Where a job is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    """By :meth:`Job.stop`."""
    FINISHED = "finished"
    """Everything available was processed (trigger ``"available-now"``)."""
    FAILED = "failed"


class Job(ChangingJob, SteeredJob):
    """A running flow. Made by :meth:`midstream.Flow.start`; all methods may be called from any thread.

    Usable as a context manager, which stops the job at the end::

        with flow.start(spark, checkpoint="…") as job:
            job.await_epoch(10)
    """

    def __init__(
        self,
        spark: SparkSession,
        changes: Changes,
        checkpoint: Checkpoint,
        control: ControlPlane,
        notes: EpochNotes,
        *,
        local_state: str | None = None,
        audit: str | None = None,
        queries: Queries,
        trigger_us: int | None = None,
        row_limit: RowLimit | None = None,
        controllers: Sequence[Controller] = (),
    ) -> None:
        self._spark = spark
        self._queries = queries
        self._checkpoint = checkpoint
        self._control = control
        self._changes = changes
        self._heartbeat = Heartbeat(
            spark,
            changes,
            checkpoint,
            control,
            notes,
            local_state=local_state,
            audit=audit,
            on_commit=self._committed,
            is_running=self._is_query_active,
            queries=queries,
            hand_over=self._hand_over,
            trigger_us=trigger_us,
            row_limit=row_limit,
        )
        self._query: StreamingQuery | None = None
        self._server: HttpInterface | None = None
        self._refresher: TableRefresher | None = None
        self._stopping = False
        self._over = threading.Event()
        self._exception: JobFailed | None = None
        self._progress: deque[EpochProgress] = deque(maxlen=KEPT_PROGRESS)
        self._metrics = JobMetrics()
        self._changed = threading.Condition()
        self._watches = Watches(self._with_backlog)
        self._controllers = attached(ControllerDesk(JobSteering(self)), controllers)
        self._steering_thread = SteeringThread(self._controllers, self._watches.watch)

    # ── inspection ────────────────────────────────────────────────────────────────────────────────────────────────

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
        """The running flow, with its current functions."""
        return self._changes.configuration.graph

    @property
    def revision(self) -> Revision:
        """The revision of its current configuration; every change makes the next one."""
        return self._changes.configuration.revision

    @property
    def knobs(self) -> dict[str, int | None]:
        """The value of every knob, in microseconds, bytes or rows; None for no limit. See :class:`midstream.Tune`."""
        tuned = self._changes.configuration.knobs
        return {name: tuned.get(name, knob.default) for name, knob in KNOBS.items()}

    @property
    def on_trial(self) -> Change | None:
        """The change in progress, which can still be rolled back, if there is one."""
        return self._changes.on_trial

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes in progress: the one on trial, and those that wait for it, in their order."""
        return self._changes.in_progress

    @property
    def server(self) -> HttpInterface | None:
        """Its HTTP interface (``url`` and ``token``), if it was started with ``serve=``."""
        return self._server

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
        return msgspec.structs.replace(self._metrics, sweep=self._heartbeat.sweep_stats)

    @property
    def executors(self) -> tuple[ExecutorShare, ...]:
        """The executors that Spark has now, and which partitions each ran in the last epoch, with how many bins.

        Where partitions stick to executors, this is also where their state is.
        """
        return self._heartbeat.executors

    @property
    def cores(self) -> int:
        """How many tasks Spark can run at a time now."""
        try:
            return int(self._spark.sparkContext.defaultParallelism)
        except Exception:  # Spark has ended
            return 1

    @property
    def executor_manager(self) -> SparkExecutors | None:
        """Asks the cluster manager for executors; None where that is not known to work."""
        return SparkExecutors.of(self._spark, self._heartbeat.between_epochs)

    @property
    def observation(self) -> Observation | None:
        """The observation of the last committed epoch since this start; None before the first."""
        return self._watches.last

    def watch(self) -> Watch:
        """An iterator of observations: one for each epoch that is committed from now on, until the job ends.

        It never holds up the job. A reader that falls more than 100 epochs behind loses the oldest, and
        ``watch.dropped`` counts them. Leave it with ``close()``, or use it in a ``with`` block::

            for seen in job.watch():
                print(seen.epoch, seen.rows_per_s, max(seen.operators, key=lambda each: each.busy_share).operator)
        """
        return self._watches.watch()

    def _with_backlog(self, seen: Observation) -> Observation:
        """What Spark reports about sources that are behind. Asked in the reader's thread, because it takes
        milliseconds."""
        query, inlets = self._query, self._changes.configuration.plan.stages[0].inlets
        if query is None or self._over.is_set():
            return seen
        try:
            reported = query.lastProgress
            found = [] if reported is None else [dict(each.metrics or {}) for each in reported.sources]
        except Exception:  # the query has ended, or Spark has
            return seen
        return with_backlog(seen, dict(zip(inlets, found, strict=True)) if len(found) == len(inlets) else {})

    def state(self, operator: str) -> DataFrame:
        """The committed state of an operator as a DataFrame: its key columns, and the state of each key.

        For an aggregate these are its totals so far; for a process everything that its function remembers, values as
        text; for a table that transactions share, its keys and values.
        ``midstream state`` shows the same, also for a job that is not running.
        """
        table = read_state(self._checkpoint.location, operator)
        return self._spark.createDataFrame(table)

    @property
    def exception(self) -> JobFailed | None:
        """Why the job failed, if it did."""
        return self._exception

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.status}, epochs={self._metrics.epochs})"

    def _repr_html_(self) -> str:
        """How a notebook shows it: its flow, its figures and its last changes, as they are now."""
        return card_of(self).to_html()

    def display(self, every: float = 1.0) -> None:
        """In a notebook: show the job below this cell, and keep the display up to date until the job ends.

        :param every: the least number of seconds between two updates, which come only after epochs.
        """
        keep_showing(self, every)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, request: Request) -> PreparedChange:
        return self._heartbeat.check(request)

    def _take(self, request: Request) -> Change:
        return self._heartbeat.request(request)

    @property
    def _migrating(self) -> MigrationDesk:
        return self._heartbeat.migrating

    @property
    def _controlling(self) -> ControlDesk:
        return self._heartbeat.controlling

    @property
    def _steering(self) -> ControllerDesk:
        return self._controllers

    def _begin_steering(self) -> None:
        self._steering_thread.begin()

    # ── savepoints ────────────────────────────────────────────────────────────────────────────────────────────────

    def savepoint(self, name: str, *, note: str | None = None, by: str | None = None) -> Savepoint:
        """Give the last committed epoch a name, and keep all that a restart from there needs until it is deleted.

        :func:`midstream.fork` begins a new job there, :func:`midstream.rewind` lets this one go back to it once it is
        stopped. Epochs go on meanwhile.

        :param name: such as ``"before tuning"``; not taken yet, and no number.
        :param note: the reason, for people.
        :param by: who takes it; default: the user of this process.
        """
        self._require_running()
        return self._heartbeat.savepoint(name, by=by or whoami(), note=note)

    def savepoints(self) -> list[Savepoint]:
        """All savepoints of this job, oldest epoch first."""
        return self._checkpoint.savepoints.all()

    def delete_savepoint(self, name: str) -> Savepoint:
        """Delete a savepoint. What only it needs is removed from the checkpoint with one of the next epochs."""
        self._require_running()
        return self._heartbeat.delete_savepoint(name)

    def _require_running(self) -> None:
        if self._over.is_set():
            raise MidstreamError(
                f"job {self.name!r} is {self.status}, so it cannot be changed; start the flow again with the same "
                f"checkpoint"
            )

    # ── waiting and stopping ──────────────────────────────────────────────────────────────────────────────────────

    def await_epoch(self, count: int, timeout: float | None = None) -> bool:
        """Wait until ``count`` epochs are committed since this start; False if the time runs out or the job ends first.

        Raises :class:`~midstream.errors.JobFailed` if the job failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._metrics.epochs >= count or self._over.is_set(), timeout)
        if self._exception is not None:
            raise self._exception
        return self._metrics.epochs >= count

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the job ends; False if the time runs out. Raises :class:`~midstream.errors.JobFailed`."""
        ended = self._over.wait(timeout)
        if self._exception is not None:
            raise self._exception
        return ended

    def stop(self) -> None:
        """Stop now. The epoch in progress is given up; a restart runs it again. Harmless when repeated."""
        if self._query is None:
            raise MidstreamError(f"job {self.name!r} has not been started")
        if not self._over.is_set():
            self._stopping = True
            self._heartbeat.stopping()
            self._end_query()
        self._over.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end_query(self) -> None:
        if self._query is not None:
            self._query.stop()

    def _hand_over(self) -> None:
        """End the query of now from a thread: this one may be the query's own, or a user's. A later query goes on."""
        if (query := self._query) is not None:
            threading.Thread(target=_end, args=(query,), name="midstream-hand-over", daemon=True).start()

    def _is_query_active(self) -> bool:
        query = self._query
        try:
            return query is None or query.isActive
        except Exception:  # Spark has ended
            return False

    # ── the heartbeat ─────────────────────────────────────────────────────────────────────────────────────────────

    def started(
        self, query: StreamingQuery, server: HttpInterface | None = None, refresher: TableRefresher | None = None
    ) -> None:
        """Called once, by :func:`midstream.runtime.spark.start.start`."""
        self._query, self._server, self._refresher = query, server, refresher
        self._end_if_outdated(query)
        if self._controllers.controllers:
            self._begin_steering()
        if refresher is not None:
            refresher.start()
        threading.Thread(target=self._watch, args=(query,), name="midstream-job", daemon=True).start()

    def _watch(self, query: StreamingQuery) -> None:
        """Wait for the last query to end, for whatever reason, and release everything."""
        try:
            self._await_queries(query)
        except Exception as error:
            self._fail(error)
        if self._refresher is not None:
            self._refresher.stop()
        try:
            self._heartbeat.ended(f"job {self.name!r} has ended")
            self._control.close()
        finally:
            if self._server is not None:
                self._server.close()  # changes have ended, so no request waits for one
            self._checkpoint.release()
            self._watches.end()
            self._steering_thread.end()
            with self._changed:
                self._over.set()
                self._changed.notify_all()

    def _await_queries(self, query: StreamingQuery | None) -> None:
        """Wait for a query and for those that sources are handed over to; then close windows, if that is wanted."""
        while query is not None:
            failure = None
            try:
                query.awaitTermination()
            except Exception as error:
                failure = error
            query = self._next_query(failure)
            if query is None and self._queries.schema is not None and not self._stopping and self._exception is None:
                try:
                    self._heartbeat.close_windows(self._queries.schema)
                except HandOverDue:  # a change has come since the query ended
                    query = self._next_query(None)

    def _next_query(self, failure: Exception | None) -> StreamingQuery | None:
        """The query that continues with other sources, if there is to be one; ``failure`` is why the last one ended, or
        None.

        A change whose sources cannot be read is rolled back, which makes another hand-over due.
        """
        while not self._stopping and self._exception is None:
            if not self._heartbeat.hand_over_due:
                if failure is None:
                    return None
                if not self._heartbeat.sources_failed(failure):  # Spark's error; ours, if there is one, is clearer
                    self._fail(failure)
                    return None
            try:
                return self._started_next()
            except Exception as error:
                failure = error
        return None

    def _started_next(self) -> StreamingQuery:
        self._query = query = self._heartbeat.next_query(self.on_epoch)
        self._end_if_outdated(query)
        return query

    def _end_if_outdated(self, query: StreamingQuery) -> None:
        """End a query that is the newest one since just now. stop() or a hand-over may have met the one before it."""
        if self._stopping or self._heartbeat.hand_over_due:
            _end(query)

    def on_epoch(self, rows: DataFrame, epoch: int) -> None:
        """The callback that Spark calls for every micro-batch.

        Only a short error of our own may leave: Spark matches the text of a Py4J error with a recursive regular
        expression, and dies on a long one.
        """
        try:
            self._heartbeat.beat(rows, Epoch(epoch))
        except HandOverDue:
            raise RuntimeError(
                f"midstream: epoch {epoch} of job {self.name} is planned again with other sources"
            ) from None
        except BaseException as error:
            self._fail(error, Epoch(epoch))
            raise RuntimeError(f"midstream: epoch {epoch} of job {self.name} failed") from None

    def _committed(self, progress: EpochProgress, seen: Observation) -> None:
        self._watches.put(seen)
        with self._changed:
            self._progress.append(progress)
            self._metrics = self._metrics.after(progress)
            self._changed.notify_all()

    def _fail(self, error: BaseException, epoch: Epoch | None = None) -> None:
        with self._changed:
            # An epoch that is cut off by stop() fails too, but that is no failure of the job.
            if self._exception is None and not self._stopping:
                read = self._progress[-1].offsets if self._progress else {}
                self._exception = error if isinstance(error, JobFailed) else unexpected(self.name, epoch, error, read)
            self._changed.notify_all()


def _end(query: StreamingQuery) -> None:
    try:
        query.stop()
    except Exception:  # Spark has ended, or the query takes longer than Spark's limit for that
        _log.warning("a query did not end at once", exc_info=True)
