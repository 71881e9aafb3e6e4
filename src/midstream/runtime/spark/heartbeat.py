"""The body of ``foreachBatch``: runs an epoch on Spark until the driver has committed it.

:mod:`midstream.runtime.driver` decides. This module executes: Spark plans and sinks, cancelling, timers.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    ParseException,
    PySparkException,
    StreamingQueryException,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from midstream.change.change import Change
from midstream.change.prepare import PreparedChange
from midstream.change.trial import Changes, Request
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.savepoints import Savepoint
from midstream.checkpoint.sweeper import Sweeper, SweepThread
from midstream.control.messages import AuditOrder, Commit
from midstream.control.placement import ExecutorShare
from midstream.engine.collector import FRAME_BYTES
from midstream.errors import FlowError
from midstream.flow.knobs import knob_value
from midstream.flow.model import Graph
from midstream.ids import Epoch, ExecutorId, PartitionId
from midstream.metrics import EpochProgress, SweepStats
from midstream.observation import Observation
from midstream.runtime.control_desk import ControlDesk
from midstream.runtime.driver import Driver
from midstream.runtime.edge import EpochEntry, OpenRun
from midstream.runtime.migration_desk import MigrationDesk
from midstream.runtime.spark.anchors import Anchors
from midstream.runtime.spark.batch_size import BYTES_CONF, ROWS_CONF, BatchLimit, is_chosen_by_user, widest_of
from midstream.runtime.spark.control_plane import ControlPlane
from midstream.runtime.spark.epoch import SparkEngine
from midstream.runtime.spark.held_query import QueriesAhead
from midstream.runtime.spark.kafka import EpochNotes, check_topics
from midstream.runtime.spark.live_executors import live_executors
from midstream.runtime.spark.offset_log import OffsetLog, forget_settings
from midstream.runtime.spark.pace import Pacer, RowLimit, require_pace
from midstream.runtime.spark.queries import Queries, is_asking
from midstream.runtime.spark.side_calls import SideCalls
from midstream.runtime.spark.stage_columns import columns_for
from midstream.runtime.spark.transform_check import check_transforms
from midstream.runtime.spark.worker import RUN_PROPERTY, Whereabouts, run_property
from midstream.runtime.walk import walk

__all__ = ["Heartbeat"]

_log = logging.getLogger("midstream")

CANCEL_AGAIN_S = 0.1
INTERRUPT_AFTER_S = 1.0
ASK_S = 0.01
"""A query without rows waits about as long until it asks its sources again."""

# Set on the query's own copy of the session, so the user's settings stay as they are. Adaptive execution would merge
# or skip partitions whose reports the coordinator expects. The buffer towards Python takes a whole frame. Spark
# compares checksums of the output of a task's attempts, and aborts the job if they differ; our attempts produce the
# same rows, but may cut frames at other places.
QUERY_CONF = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "false",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "false",
}
BUFFER_CONF = "spark.sql.execution.python.udf.buffer.size"


class _Interrupted(BaseException):
    """Raised inside a sink's or a transform's function on the driver when an epoch exceeds its time limit."""


class Heartbeat:
    """Runs the epochs of a job. The driver's edge to Spark (:class:`midstream.runtime.edge.Edge`)."""

    def __init__(
        self,
        spark: SparkSession,
        changes: Changes,
        checkpoint: Checkpoint,
        control: ControlPlane,
        notes: EpochNotes,
        *,
        local_state: str | None,
        audit: str | None,
        on_commit: Callable[[EpochProgress, Observation], None],
        is_running: Callable[[], bool],
        queries: Queries,
        hand_over: Callable[[], None],
        trigger_us: int | None = None,
        row_limit: RowLimit | None = None,
    ) -> None:
        self._spark = spark
        self._queries = queries
        self._ahead = QueriesAhead(queries)
        self._newest: StreamingQuery | None = None
        """The query of the last hand-over."""
        self._hand_over = hand_over
        self._reading = changes.configuration.graph
        """The flow whose sources the query reads."""
        self._checkpoint = checkpoint
        self._control = control
        self._session: SparkSession | None = None
        """The query's own copy of the session, once it has run an epoch."""
        self._on_progress = on_commit
        self._at = Whereabouts(
            control.address,
            checkpoint.identity.job,
            checkpoint.blobs.location,
            checkpoint.states.location,
            local_state,
            checkpoint.durable,
            checkpoint.identity.copies,
            control.relays,
        )
        self._log = OffsetLog(checkpoint.spark_location)
        self._syncer = ThreadPoolExecutor(1, "midstream-sync") if checkpoint.durable else None
        self._synced: Future[None] | None = None
        self._background = ThreadPoolExecutor(1, "midstream-background")
        self._side_calls = SideCalls()
        self._user_limits = is_chosen_by_user(spark)
        self._limit = BatchLimit()
        self._widest_row = 0
        self._columns = columns_for(spark)
        self._anchors = Anchors(spark)
        self._entering: tuple[str, ...] = ()
        """The names of the columns that the query gives; known when it has run an epoch."""
        self._set: dict[str, str] = {}
        self._timer: threading.Timer | None = None
        self._guard = threading.Lock()
        self._computing: int | None = None
        """The thread that computes a run, as long as it may be interrupted."""
        order = None if audit is None else AuditOrder(audit, checkpoint.audit_location)
        self._trigger_us = trigger_us
        self._row_limit = row_limit
        self._changes = changes
        # An epoch that a change needs begins at once: a slow pace must not hold up those that wait behind it.
        self._pacer = Pacer(lambda: 0 if changes.needs_epoch else knob_value(self._knobs, "pace"), is_running)
        self._driver = Driver(changes, checkpoint, control, self, audit=order, on_commit=self._committed)
        self._notes = notes
        self._due: deque[Callable[[], None]] = deque()
        self._sweep_thread = SweepThread(self._driver.sweeper)
        control.listen(self._driver.hear)

    # ── epochs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def beat(self, rows: DataFrame, epoch: Epoch) -> None:
        """Run an epoch until it is committed. Raises :class:`~midstream.errors.JobFailed` if it cannot be."""
        began = time.monotonic()
        while self._due:
            self._due.popleft()()
        self._session = rows.sparkSession
        entry = self._log.entry(epoch)
        if self._syncer is not None:  # in parallel with the epoch, which takes longer
            self._synced = self._syncer.submit(self._log.sync, epoch)
        is_new = self._driver.run(epoch, entry, partial(self._compute, rows))
        self._knobs_may_differ()
        if is_new:  # the last one before a stop comes again if the stop fell into its wait
            self._pacer.wait(began)

    def between_epochs(self, do: Callable[[], None]) -> None:
        """Call this function before the next epoch begins, when no task of the job runs."""
        self._due.append(do)

    @property
    def _knobs(self) -> Mapping[str, int]:
        return self._changes.configuration.knobs

    def _knobs_may_differ(self) -> None:
        """Pass on the knobs that Spark and the sources use between epochs."""
        if self._row_limit is not None:
            self._row_limit.set(self._knobs.get("rows_per_epoch"))
        self._pacer.hurry()

    @property
    def hand_over_due(self) -> bool:
        """Whether the next epoch has other sources than the query."""
        return not self.reads(self._changes.configuration.graph)

    def next_query(self, on_epoch: Callable[[DataFrame, int], None]) -> StreamingQuery:
        """Start the query that reads the sources of the next epoch; the one before it has ended."""
        began = time.monotonic()
        graph = self._changes.configuration.graph
        self._session, self._set, self._entering = None, {}, ()
        with self._ahead.taken(graph) as held:
            self._reading = graph
            self._checkpoint.change_sources(graph.sources, log=None if held is None else held.log)
            self._log = OffsetLog(self._checkpoint.spark_location)
            query = self._queries.start(graph, on_epoch) if held is None else self._ahead.release(held, on_epoch)
        self._newest = query
        self._driver.changing.sources_exchanged(time.monotonic() - began)
        return query

    def sources_failed(self, error: BaseException) -> bool:
        """Whether a change is to blame for this failure to read sources, and is rolled back."""
        return self._driver.changing.sources_failed(error)

    def close_windows(self, schema: StructType) -> None:
        """Run one more epoch, which has no rows and closes all windows. Called when the query has ended.

        ``schema`` is that of the query's rows. Spark's log does not have this epoch: without its manifest it does not
        count, and Spark gives its number to other rows.
        """
        newest = self._checkpoint.newest_manifest()
        if newest is None:
            return  # no epoch, no window
        self._session = session = self._session or self._spark.newSession()
        rows = session.createDataFrame(session.sparkContext.parallelize([], 1), schema)
        entry = EpochEntry(time.time_ns() // 1000, "no rows", closing=True)
        self._driver.run(Epoch(newest.epoch + 1), entry, partial(self._compute, rows))

    def _compute(self, rows: DataFrame, run: OpenRun) -> None:
        plan = run.configuration.plan
        self._notes.run_begins(run.epoch)
        self._entering = self._entering or tuple(rows.columns)
        self._columns.begin()
        self._anchors.keep({each.partitions for each in run.configuration.assignments.values()})
        sticks = self._anchors.are_useful(self._driver.placement.seen())
        engine = SparkEngine(
            plan,
            run.epoch,
            run.run,
            run.configuration.assignments,
            self._at,
            self._columns,
            self._entering,
            self._limit,
            finished=self._control.finished,
            files=run.files,
            durable=self._checkpoint.durable,
            notes=self._notes,
            anchor=partial(self._anchors.of, rows.sparkSession) if sticks else lambda partitions: None,
        )
        with self._marked(run), self._interruptible():
            walk(plan, engine, rows, partial(self._driver.planned, run))

    def _committed(self, commit: Commit, progress: EpochProgress, seen: Observation) -> None:
        self._notes.committed(commit.epoch)
        if commit.widest_row:
            self._widest_row = widest_of(commit.widest_row, self._widest_row)
            self._limit = BatchLimit.of(self._widest_row, knob_value(self._knobs, "batch"))
        self._on_progress(progress, seen)
        if self._ahead.has_unwanted and not self.hand_over_due:  # its change was rolled back before
            self.meanwhile(self._ahead.drop_unwanted)

    @property
    def executors(self) -> tuple[ExecutorShare, ...]:
        """The executors and their parts of the job."""
        assignments = self._driver.changes.configuration.assignments
        return self._driver.placement.shares(assignments, live_executors(self._spark))

    @property
    def sweep_stats(self) -> SweepStats:
        """Statistics of the removal of files that nobody needs."""
        return self._driver.sweeper.stats

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: Request) -> PreparedChange:
        """Prepare a change as if it were requested now."""
        return self._driver.changing.check(request)

    def request(self, request: Request) -> Change:
        """Check a change and enact it as soon as possible. A change that does not fit is refused and recorded."""
        change = self._driver.changing.request(request)
        self._knobs_may_differ()
        return change

    @property
    def migrating(self) -> MigrationDesk:
        """Where migrations are requested."""
        return self._driver.migrating

    @property
    def controlling(self) -> ControlDesk:
        """Where control operations are requested."""
        return self._driver.controlling

    def savepoint(self, name: str, *, by: str, note: str | None) -> Savepoint:
        """Take a savepoint of the last committed epoch."""
        return self._driver.savepoint(name, by=by, note=note)

    def delete_savepoint(self, name: str) -> Savepoint:
        """Delete a savepoint."""
        return self._driver.delete_savepoint(name)

    def stopping(self) -> None:
        """The job is being stopped."""
        self._driver.stopping()
        self._pacer.end()

    def ended(self, why: str) -> None:
        """The job has ended; end its changes."""
        self._driver.ended(why)
        self._ahead.close()
        self._sweep_thread.close()
        self._background.shutdown(cancel_futures=True)
        self._side_calls.close()
        self._anchors.close()
        if self._row_limit is not None:
            self._row_limit.close()
        self._notes.close()
        if self._syncer is not None:
            self._syncer.shutdown()

    # ── the driver's edge ─────────────────────────────────────────────────────────────────────────────────────────

    def make_ready(self) -> None:
        """Set the settings that the query's own copy of the session lacks; each costs a call to the JVM."""
        session = self._session
        assert session is not None, "an epoch sets the session"
        if not self._set:
            forget_settings(session)
        wanted = {**QUERY_CONF, BUFFER_CONF: str(max(FRAME_BYTES, knob_value(self._knobs, "frame")))}
        if not self._user_limits:
            wanted |= self._limit.conf()
        for key, value in wanted.items():
            if self._set.get(key) != value:
                session.conf.set(key, value)
        self._set = wanted

    def is_lost(self, error: BaseException) -> bool:
        """Whether Spark failed to run its jobs, and no function or plan was wrong."""
        if isinstance(error, AnalysisException | ParseException | IllegalArgumentException):
            return False
        return isinstance(error, PySparkException) or hasattr(error, "java_exception")

    @contextlib.contextmanager
    def _marked(self, run: OpenRun) -> Iterator[None]:
        """Within this block, jobs that this thread starts belong to the run: tasks know it, and it can be cancelled by
        its tag.

        Each run has its own tag. Both hold for this thread, and for those that inherit from it.
        """
        context, tag = self._spark.sparkContext, self._tag(run)
        context.setLocalProperty(RUN_PROPERTY, run_property(run.epoch, run.run))
        context.addJobTag(tag)
        try:
            yield
        finally:
            context.removeJobTag(tag)
            context.setLocalProperty(RUN_PROPERTY, None)  # type: ignore[arg-type]  # None removes it

    def _tag(self, run: OpenRun) -> str:
        return f"midstream-{self._at.job}-{run.epoch}.{run.run}"

    def cancel(self, run: OpenRun, *, interrupt: bool = False) -> None:
        """Cancel a run, and return at once. The callback notices: its write fails.

        Between two jobs of a run there is nothing to cancel, so this repeats until the run is over. A user's function
        that keeps the callback busy on the driver has no job: with ``interrupt`` it is interrupted, once.
        """

        def cancel() -> None:
            began, wanted = time.monotonic(), interrupt
            while not run.is_over.is_set():
                self._spark.sparkContext.cancelJobsWithTag(self._tag(run))
                run.is_over.wait(CANCEL_AGAIN_S)
                if wanted and time.monotonic() - began >= INTERRUPT_AFTER_S:
                    wanted = False
                    self._interrupt(run)

        threading.Thread(target=cancel, name="cancel", daemon=True).start()

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Within this block, this thread may be interrupted."""
        me = threading.get_ident()
        self._computing = me
        try:
            yield
        finally:
            with self._guard:
                self._computing = None
                _raise_in(me, None)  # an interrupt that has not arrived by now must not arrive later

    def _interrupt(self, run: OpenRun) -> None:
        with self._guard:
            if self._computing is not None and not run.is_over.is_set():
                _raise_in(self._computing, _Interrupted)

    def start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        """Call ``then`` after ``seconds``; this replaces an earlier timer."""
        self.stop_timer()
        self._timer = threading.Timer(seconds, then)
        self._timer.daemon = True
        self._timer.start()

    def stop_timer(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def try_transforms(self, graph: Graph, names: Sequence[str]) -> None:
        """Check transforms with Spark's analyser."""
        check_transforms(graph, names, self._spark)

    def check_sinks(self, sinks: Graph) -> None:
        """Ask Kafka for the topics of its sinks."""
        check_topics(self._spark, sinks)

    def check_knobs(self, tuned: Mapping[str, int | None]) -> None:
        """Refuse what Spark has fixed."""
        require_pace(tuned.get("pace"), self._trigger_us)
        if tuned.get("batch") is not None and self._user_limits:
            raise FlowError(
                f"knob batch is taken: the session sets {ROWS_CONF} or {BYTES_CONF}, and midstream keeps that; leave "
                f"both out of the session's configuration to tune it"
            )

    def check_sources(self, graph: Graph, names: Sequence[str]) -> None:
        """Refuse DataFrames of others, and logs in which sources have no lines of their own."""
        self._queries.check(self._checkpoint.identity.sources, graph, names)

    def prepare_sources(self, graph: Graph) -> None:
        """Start the next query, up to where it needs its log."""
        self._ahead.prepare(graph)

    def settle_sources(self) -> None:
        """End a query that was started ahead in vain."""
        self._ahead.answered(is_needed=self.hand_over_due)

    def await_sources(self, seconds: float) -> bool:
        """Whether the newest query has begun an epoch, or found that there is nothing to read."""
        until, query = time.monotonic() + seconds, self._newest
        with contextlib.suppress(StreamingQueryException):  # the thread that waits for it knows better what to do
            while query is not None and self._session is None and is_asking(query):
                if time.monotonic() >= until:
                    return False
                query.awaitTermination(ASK_S)  # type: ignore[arg-type]  # it takes fractions
        return True

    def reads(self, graph: Graph) -> bool:
        """Compares with the flow for which the query was started."""
        return self._reading.reads_as(graph)

    def hand_over(self) -> None:
        """End the query; the job starts the next one when it has ended."""
        self._hand_over()

    def propose_places(self, partitions: int) -> dict[PartitionId, ExecutorId]:
        """Have Spark spread partitions anew, in small jobs. With a single executor there is nothing to spread; before
        the first epoch there is nothing to move."""
        executors = live_executors(self._spark)
        if len(executors) == 1:
            return {PartitionId(number): each for number in range(partitions) for each in executors}
        return {} if self._session is None else self._anchors.propose(self._session, partitions)

    def adopt_places(self, partitions: int) -> None:
        """Use the newest proposal."""
        self._anchors.adopt(partitions)

    def meanwhile(self, call: Callable[[], object]) -> None:
        """Call it in a thread; errors are only logged, because nothing depends on it."""
        self._background.submit(_logged, call)

    def aside(self, call: Callable[[], object], seconds: float, overdue: Callable[[], object]) -> None:
        """Call it in a thread that nobody waits for."""
        self._side_calls.make(call, seconds, overdue)

    def sweep(self, sweeper: Sweeper) -> None:
        """Sweep in a thread, during the next epochs."""
        self._sweep_thread.wake()

    def secure(self, run: OpenRun) -> None:
        """Sync Spark's log, which Spark does not do."""
        if self._synced is not None:
            self._synced.result()

    def at(self, step: str) -> None:
        """Nothing to do here: real processes are killed from outside."""


def _logged(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        _log.warning("work in the background failed; an epoch does it instead", exc_info=True)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Make another thread raise an error before its next step in Python; None cancels that."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
