"""The local runtime: the same compiler, runner and coordinator in one process, without a JVM.

Tasks of a stage are interleaved at every slice by a seeded scheduler, which may also crash tasks and the driver, run
speculative attempts, repeat messages and give up whole runs of an epoch (:class:`Faults`). A seed replays exactly.
Users' unit tests run flows on it, and our simulations compare its results with an oracle.
"""

from __future__ import annotations

import contextlib
import posixpath
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import pyarrow as pa

from midstream.change.configuration import Configuration, configuration_left, configuration_of, first_configuration
from midstream.change.trial import Changes
from midstream.checkpoint.audit_files import check_audit, read_history
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.sweeper import Sweeper
from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    Accepted,
    AuditOrder,
    Commit,
    FromTask,
    Prefetched,
    PrefetchRequest,
    Received,
    Refused,
    Send,
    StageChange,
    SwitchRequested,
    TaskId,
    ToTask,
    WorkerJoined,
)
from midstream.control.placement import Placement
from midstream.engine.clock import Clock, SystemClock
from midstream.engine.control_order import ControlOrder
from midstream.engine.resources import Resources
from midstream.errors import FlowError, JobFailed, MidstreamError
from midstream.flow.model import Graph
from midstream.ids import Epoch, ExecutorId, PartitionId, StageIndex
from midstream.metrics import EpochProgress, JobMetrics
from midstream.observation import Observation
from midstream.planner.assignment import Assignments, check_partitions
from midstream.planner.carried_assignments import carried
from midstream.planner.programs import pack_blobs
from midstream.runtime import job_start
from midstream.runtime.driver import Driver
from midstream.runtime.edge import DriverCrashed, EpochEntry, HandOverDue, OpenRun
from midstream.runtime.local.control import LocalControl
from midstream.runtime.local.data import LocalData, check_transforms, cut_epochs, require_local
from midstream.runtime.local.engine import LocalEngine
from midstream.runtime.local.exchange import StageInput
from midstream.runtime.local.executors import LocalExecutors, check_executors
from midstream.runtime.local.mail import Mail
from midstream.runtime.local.run import ChangeAt, ControlAt, Faults, LocalRun, MigrateAt
from midstream.runtime.local.source_log import SourceLog
from midstream.runtime.local.stage import StageTasks, thinned
from midstream.runtime.local.tasks import Attempt, peer_of
from midstream.runtime.local.wishes import RequestRefused, Wishes
from midstream.runtime.walk import walk
from midstream.state.access import StateAccess

SUSPICION = 5
"""Factor by which a second attempt starts more often if the first has switched: it must switch at the same row."""
FULL_RUNS = 4
"""Runs of an epoch in which faults have their full probability; see :class:`Faults`."""
_NO_KNOBS = {
    "rows_per_epoch": "all epochs are cut before the run; give the GeneratorSource max_rows_per_epoch=",
    "batch": "the local runtime has no JVM that hands rows over",
}


class _Cancelled(Exception):
    """The run in progress is cancelled."""


class _RunLost(Exception):
    """The run in progress has failed, but no function has."""


def run_graph(
    graph: Graph,
    *,
    partitions: int = 2,
    seed: int = 0,
    faults: Faults | None = None,
    clock: Clock | None = None,
    checkpoint: str | None = None,
    changes: Sequence[ChangeAt | MigrateAt | ControlAt] = (),
    audit: str | None = None,
    durable: bool = False,
    close_windows: bool = False,
    assignments: Assignments | None = None,
    bins: int | None = None,
    executors: int = 1,
) -> LocalRun:
    """Run a validated graph over all epochs of its sources. See :func:`midstream.testing.run_local`.

    ``assignments`` overrides ``partitions`` for some stages: it has the owner of each bin.
    """
    if bins is None and assignments:
        bins = next(iter(assignments.values())).bins
    check_executors(executors)
    require_local(graph)
    check_audit(graph, audit)
    with runtime_of(
        graph,
        partitions=partitions,
        seed=seed,
        faults=faults,
        clock=clock,
        checkpoint=checkpoint,
        changes=changes,
        audit=audit,
        durable=durable,
        assignments=assignments,
        bins=bins,
        executors=executors,
    ) as runtime:
        runtime.run_all(close_windows=close_windows)
    return runtime.result


@contextlib.contextmanager
def runtime_of(
    graph: Graph,
    *,
    partitions: int = 2,
    seed: int = 0,
    faults: Faults | None = None,
    clock: Clock | None = None,
    checkpoint: str | None = None,
    changes: Sequence[ChangeAt | MigrateAt | ControlAt] = (),
    audit: str | None = None,
    durable: bool = False,
    assignments: Assignments | None = None,
    bins: int | None = None,
    executors: int = 1,
) -> Iterator[_Runtime]:
    """A runtime for epochs of a graph, until the end of the block."""
    blobs = pack_blobs(graph)
    with tempfile.TemporaryDirectory(prefix="midstream-local-") as folder:
        folder_of_job = checkpoint or posixpath.join(folder, "checkpoint")
        location = Checkpoint.look(folder_of_job, graph, bins=bins, durable=durable)
        check_partitions(partitions, location.identity.bins)
        free_folders = job_start.check(graph, location)
        location.claim()
        with contextlib.ExitStack() as undo:
            undo.callback(location.release)
            graph = job_start.claim(graph, location, free_folders)
            newest = location.newest_manifest()
            before = None if newest is None else configuration_left(newest, location.blobs)
            bins = location.identity.bins
            first = first_configuration(graph, location.blobs, partitions, blobs, assignments, before, bins)
            bases = posixpath.join(folder, "bases")
            access = StateAccess(location.identity.copies, location.states.location, bases, durable)
            rng = random.Random(seed)
            hosts = LocalExecutors(executors, access, clock or SystemClock(), rng)
            runtime = _Runtime(first, location, hosts, rng, faults, clock, changes, audit)
            undo.pop_all()  # from now on the runtime releases it
        try:
            yield runtime
        finally:
            runtime.close()


class _Runtime:
    """The driver's edge (:class:`midstream.runtime.edge.Edge`) to tasks in this process."""

    def __init__(
        self,
        first: Configuration,
        checkpoint: Checkpoint,
        executors: LocalExecutors,
        rng: random.Random,
        faults: Faults | None,
        clock: Clock | None,
        changes: Sequence[ChangeAt | MigrateAt | ControlAt],
        audit: str | None,
    ) -> None:
        self.resources = Resources(checkpoint.blobs)
        self.executors = executors
        self.rng = rng
        self.faults = faults or Faults()
        self.clock = clock or SystemClock()
        self._first = first
        self.checkpoint = checkpoint
        newest = checkpoint.newest_manifest()
        self._found = Epoch(0) if newest is None else Epoch(newest.epoch + 1)
        """The first epoch that is not committed before this run."""
        self._audit = None if audit is None else AuditOrder(audit, checkpoint.audit_location)
        self._attempts = 0
        self._zombies: list[Attempt] = []
        self._switched: set[TaskId] = set()
        self._progress: list[EpochProgress] = []
        self._metrics = JobMetrics()
        self._observations: list[Observation] = []
        self._wishes = Wishes(changes, rng)
        self._epoch = Epoch(0)
        self._runs = 0
        self._is_cancelled = False
        self._timer: Callable[[], None] | None = None
        # The counterpart of Spark's log of offsets: it survives the driver.
        self._log: dict[Epoch, EpochEntry] = {}
        self._sources = SourceLog(first.graph, checkpoint)
        self._is_hand_over_due = False
        self.result: LocalRun
        self._start_driver()

    def _start_driver(self) -> None:
        """Start a driver without any knowledge. Tasks of the previous driver can no longer reach one."""
        self._mail = Mail(self.faults, self.rng, self._chance)
        self._control = LocalControl(self._mail.deliver)
        self._timer = None
        newest = self.checkpoint.newest_manifest()
        log, store = self.checkpoint.changes, self.checkpoint.blobs
        first = self._first
        if newest is not None and newest.epoch >= self._found:  # of this run, so its bins stay where they are
            left = configuration_of(newest, store)
            first = first.with_assignments(
                carried(left.plan, left.assignments, first.plan, first.partitions, first.bins)
            )
        restart = job_start.restart(first, self.checkpoint)
        changes = Changes(restart.configuration, store, log, wall=self._wall)
        if restart.pending is not None:
            changes.resume(restart.pending)
        self._sources.settle(changes.configuration.graph)
        self._is_hand_over_due = False
        self._driver = Driver(
            changes,
            self.checkpoint,
            self._control,
            self,
            audit=self._audit,
            on_commit=self._committed,
            wall=self._wall,
            stopwatch=lambda: 0.0,
        )

    def _wall(self) -> float:
        return self.clock.wall_us() / 1e6

    @property
    def coordinator(self) -> Coordinator:
        """The current driver's coordinator."""
        return self._control.coordinator

    def close(self) -> None:
        for attempt in self._zombies:
            attempt.close()
        self._driver.ended("the run is over")
        self.resources.close()
        self.executors.close()
        self.checkpoint.release()
        self.result = LocalRun(
            progress=tuple(self._progress),
            observations=tuple(self._observations),
            metrics=msgspec.structs.replace(self._metrics, sweep=self._driver.sweeper.stats),
            revision=self._driver.changes.configuration.revision,
            story=self.coordinator.story,
            history=tuple(self.checkpoint.changes.records()),
            controls=tuple(self._driver.controlling.records()),
            audit=None if self._audit is None else read_history(self._audit.location),
        )

    # ── one epoch ─────────────────────────────────────────────────────────────────────────────────────────────────

    def run_all(self, *, close_windows: bool = False) -> None:
        """Run epochs until all sources have ended."""
        for epoch, rows in self._sources:
            self.run_epoch(epoch, rows)
            if self._is_hand_over_due:
                self._hand_over()
        if close_windows:
            newest = self.checkpoint.newest_manifest()
            self.run_epoch(Epoch(0 if newest is None else newest.epoch + 1), self._sources.nothing(), closing=True)

    def run_epoch(self, epoch: Epoch, rows: Mapping[str, LocalData], *, closing: bool = False) -> None:
        """Run an epoch until it is committed, as Spark would: after a crash of the driver, its epoch is run again.

        If it has other sources, it is planned again, and not run if these have no rows.
        """
        self._epoch = epoch
        log = self._sources.number
        entry = self._log.setdefault(epoch, EpochEntry(self.clock.wall_us(), f"rows of epoch {epoch}", closing))
        self._runs = 0
        while True:
            if log != self._sources.number:
                log = self._sources.number
                newest = self.checkpoint.newest_manifest()
                planned = self._sources.nothing() if closing else self._sources.rows(epoch)
                if planned is None or (newest is not None and newest.epoch >= epoch):
                    return self._wishes.maybe_request(self._driver, epoch, None)
                rows = planned
                what = f"rows of epoch {epoch} in log {log}"
                entry = self._log[epoch] = EpochEntry(self.clock.wall_us(), what, closing)
            try:
                self._driver.run(epoch, entry, partial(self._compute, rows))
                return self._wishes.maybe_request(self._driver, epoch, None)
            except RequestRefused as refused:
                raise refused.error from None
            except HandOverDue:
                self._hand_over()
            except DriverCrashed:
                self._start_driver()
            except JobFailed as failed:
                if not isinstance(failed.__cause__, _RunLost):
                    raise
                self._driver.ended(str(failed))  # nothing is wrong with the flow, so its user starts it again
                self._start_driver()

    def _hand_over(self) -> None:
        """Read the sources of the next epoch from now on. The driver may crash at any step; the next one completes
        it."""
        self._is_hand_over_due = False
        try:
            self._maybe_crash_driver()
            self._sources.exchange(self._driver.changes.configuration.graph, self.at)
            self._driver.changing.sources_exchanged(0.0)
        except DriverCrashed:
            self._start_driver()

    def _committed(self, commit: Commit, progress: EpochProgress, seen: Observation) -> None:
        self._observations.append(seen)
        self._progress.append(progress)
        self._metrics = self._metrics.after(progress)

    # ── the driver's edge ─────────────────────────────────────────────────────────────────────────────────────────

    def make_ready(self) -> None:
        """Faults and changes may happen before a run begins."""
        self._runs += 1
        self._is_cancelled = False
        self._maybe_crash_driver()
        self._wishes.begin(self._driver, self._epoch)

    def is_lost(self, error: BaseException) -> bool:
        """Whether a fault caused it."""
        return isinstance(error, _RunLost)

    def cancel(self, run: OpenRun, *, interrupt: bool = False) -> None:
        """Cancel the run at its next step."""
        self._is_cancelled = True

    def start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        """Note the timer. Time does not pass by itself here: a fault decides when it is up."""
        self._timer = then

    def stop_timer(self) -> None:
        """Stop the timer."""
        self._timer = None

    def try_transforms(self, graph: Graph, names: Sequence[str]) -> None:
        """Call their local functions."""
        check_transforms(graph, names)

    def check_sinks(self, sinks: Graph) -> None:
        """Refuse those that only Spark can write."""
        require_local(sinks)

    def check_sources(self, graph: Graph, names: Sequence[str]) -> None:
        """Refuse those that only Spark can read, and those without end."""
        for name in names:
            next(cut_epochs(name, graph.payloads.get(name)), None)

    def prepare_sources(self, graph: Graph) -> None:
        """Nothing here takes time."""

    def settle_sources(self) -> None:
        """Nothing was prepared."""

    def await_sources(self, seconds: float) -> bool:
        """They are at hand."""
        return True

    def reads(self, graph: Graph) -> bool:
        """Compares with the flow whose rows are planned."""
        return self._sources.reading.reads_as(graph)

    def hand_over(self) -> None:
        """Nothing to do: the sources are exchanged before the next epoch is planned."""
        self._is_hand_over_due = True

    def check_knobs(self, tuned: Mapping[str, int | None]) -> None:
        """Refuse what does not exist here. ``pace`` is taken: time does not pass by itself."""
        for name, why in _NO_KNOBS.items():
            if tuned.get(name) is not None:
                raise FlowError(f"knob {name} is for Spark: {why}")

    def propose_places(self, partitions: int) -> Mapping[PartitionId, ExecutorId]:
        """Choose anew."""
        return self.executors.propose(partitions)

    def adopt_places(self, partitions: int) -> None:
        """Use the newest proposal."""
        self.executors.adopt(partitions)

    def meanwhile(self, call: Callable[[], object]) -> None:
        """Call it at once, so that a seed replays exactly."""
        call()

    def aside(self, call: Callable[[], object], seconds: float, overdue: Callable[[], object]) -> None:
        """Call it at once, so that a seed replays exactly."""
        call()

    def sweep(self, sweeper: Sweeper) -> None:
        """Sweep at once, so that a seed replays exactly."""
        sweeper.sweep()

    def secure(self, run: OpenRun) -> None:
        """Nothing to do: the log is in memory, and survives every fault."""

    def at(self, step: str) -> None:
        """The driver may crash at any step."""
        self._maybe_crash_driver()

    # ── an attempt's world (:class:`midstream.runtime.local.tasks.World`) ────────────────────────────────────────────

    def told(self, task: TaskId, chance: float) -> StageChange | None:
        """The change for a task, if its message arrives now; it may arrive later."""
        return self._mail.told(task, chance)

    def asked(self, task: TaskId, chance: float) -> Sequence[ControlOrder]:
        """The fast control operations for a task, if their messages arrive now; they may arrive later."""
        return self._mail.asked(task, chance)

    def say(self, message: FromTask, to: Coordinator) -> ToTask:
        """Deliver a message and return the answer. The message may be delivered again later, without effect."""
        if to is not self.coordinator:
            return Refused("the driver is gone")
        self._mail.maybe_keep(message)
        # A worker that listens is identified by its own name, as on Spark.
        peer = peer_of(message.worker) if isinstance(message, WorkerJoined) else b"task"
        instructions = self._control.tell(Received(peer, message))
        self._driver.hear(instructions)
        answers = [each.message for each in instructions if isinstance(each, Send) and each.peer == peer]
        answer = answers[0] if answers else Accepted()
        if isinstance(message, SwitchRequested) and isinstance(answer, Accepted):
            self._switched.add(message.task)
        return answer

    # ── tasks ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _compute(self, rows: Mapping[str, LocalData], run: OpenRun) -> None:
        plan = run.configuration.plan
        engine = LocalEngine(
            plan,
            run.epoch,
            run.configuration.assignments,
            self.rng,
            run_tasks=partial(self._run_tasks, run),
            is_output_lost=lambda: self._chance(self.faults.lose_output),
            on_written=self._pause,
            files=run.files,
            durable=self.checkpoint.durable,
        )
        united = LocalData.united([rows[name] for name in plan.stages[0].inlets], None)
        walk(plan, engine, united, partial(self._driver.planned, run))

    def _pause(self) -> None:
        self._maybe_give_up()
        self._maybe_crash_driver()

    def _run_tasks(
        self, run: OpenRun, stage: StageIndex, data: StageInput, wanted: Sequence[int]
    ) -> dict[int, list[pa.RecordBatch]]:
        """Interleave tasks of a stage until each requested partition has finished once."""

        def launch(of: StageIndex, partition: int, batches: Sequence[pa.RecordBatch]) -> Attempt:
            self._attempts += 1
            assignment = run.configuration.assignments.get(of)
            executor = self.executors.of(None if assignment is None else assignment.partitions, partition)
            task = TaskId(run.epoch, run.run, of, PartitionId(partition), self._attempts)
            self._mail.starts(task, executor)
            return Attempt(self, executor, task, batches)

        tasks = StageTasks(stage, data, wanted, launch)
        try:
            while not tasks.are_done:
                self._pause()
                self._wishes.maybe_request(self._driver, self._epoch, stage)
                self._disturb()
                attempt = self.rng.choice(tasks.active)
                if self._chance(thinned(self._runs, FULL_RUNS) * self.faults.lose_executor):
                    self._lose_executor(tasks)
                    continue
                rarely = tasks.thinned(attempt)
                if self._chance(rarely * self.faults.crash):
                    tasks.crash(attempt)
                    continue
                if self._chance(rarely * self.faults.lose_output) and tasks.lose_input(attempt):
                    continue
                if self._chance(self.faults.speculate * (SUSPICION if attempt.task in self._switched else 1)):
                    tasks.speculate(attempt)
                tasks.step(attempt)
        finally:
            self._zombies += tasks.active  # also if the run is given up: its tasks do not know that yet
        return tasks.results

    def _lose_executor(self, tasks: StageTasks) -> None:
        """One executor is lost, and another one joins."""
        lost = self.rng.choice(self.executors.all)
        self.executors.replace(lost)  # first, because the attempts that die with it start again elsewhere at once
        tasks.lose_executor(lost)
        for zombie in [each for each in self._zombies if each.executor is lost]:
            zombie.close()
            self._zombies.remove(zombie)
        lost.wipe()

    def _disturb(self) -> None:
        """Deliver repeated messages, and advance tasks of runs that are over."""
        if (echo := self._mail.maybe_repeat()) is not None:
            self._driver.hear(self._control.tell(Received(b"echo", echo)))
        if self._zombies:
            zombie = self.rng.choice(self._zombies)
            try:
                ended = zombie.step() is not None
            except MidstreamError:  # fenced, or its state is gone
                ended = True
            if ended:
                self._zombies.remove(zombie)
        self._load_ahead()

    def prefetch(self, requests: Sequence[PrefetchRequest]) -> None:
        """Have executors load ahead."""
        self._driver.prefetch(requests)

    @property
    def placement(self) -> Placement:
        """The current driver's book of executors."""
        return self._driver.placement

    def _load_ahead(self) -> None:
        """Deliver a message to an executor, or let one load a portion, if there are any."""
        for executor in [each for each in self.executors.all if each.inbox or each.prefetcher.has_work.is_set()]:
            if executor.inbox and self.rng.random() < 0.5:
                executor.prefetcher.take(executor.inbox.pop(self.rng.randrange(len(executor.inbox))))
            if self.rng.random() < 0.5:
                done = executor.prefetcher.step()
                if isinstance(done, Prefetched):
                    self._driver.hear(self._control.tell(Received(b"executor", done)))

    def _maybe_crash_driver(self) -> None:
        if self._chance(thinned(self._runs, FULL_RUNS) * self.faults.crash_driver):
            raise DriverCrashed

    def _maybe_give_up(self) -> None:
        rarely = thinned(self._runs, FULL_RUNS)
        if self._chance(rarely * self.faults.give_up):
            self._driver.replay()
        if self._timer is not None and self._chance(rarely * self.faults.overdue):
            self._timer()
        if self._chance(rarely * self.faults.lose_run):
            raise _RunLost("no worker is available")
        if self._is_cancelled:
            raise _Cancelled

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability
