"""The local runtime: the same compiler, runner and coordinator in one process, without a JVM.

Tasks of a stage are interleaved at every slice by a seeded scheduler, which may also crash tasks and the driver, run
speculative attempts, repeat messages and give up whole runs of an epoch (:class:`Faults`). A seed replays exactly.
Users' unit tests run flows on it, and our simulations compare what it gives with an oracle.
"""

from __future__ import annotations

import posixpath
import random
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from midstream.change.changes import Changes, Request
from midstream.change.configuration import Configuration, first_configuration
from midstream.change.prepare import scheduler_of
from midstream.change.records import ChangeRecord
from midstream.change.restart import restored
from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    Accepted,
    AuditOrder,
    ChangeNoted,
    Commit,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    FromTask,
    Instruction,
    Received,
    Refused,
    Reject,
    Send,
    StageChange,
    Switch,
    TaskId,
    ToTask,
    WorkerId,
    WorkerJoined,
)
from midstream.engine.clock import Clock, SystemClock
from midstream.engine.frames import FRAME_ORDER
from midstream.engine.packing import pack_blobs
from midstream.engine.resources import Resources
from midstream.errors import FlowError, MidstreamError, ProtocolError
from midstream.flow.model import Graph, Sink, Transform
from midstream.flow.updates import Update
from midstream.ids import BINS, Epoch, PartitionId, Revision, Run, StageIndex
from midstream.metrics import EpochProgress, JobMetrics
from midstream.planner.change import Scheduler
from midstream.planner.stages import Leaves, Plan, compile_plan
from midstream.runtime.checkpoint import Checkpoint
from midstream.runtime.database import check_tables, claim_tables
from midstream.runtime.layouts import check_layouts
from midstream.runtime.local_data import LocalData, by_destination, require_local, source_epochs
from midstream.runtime.local_sinks import write
from midstream.runtime.local_tasks import Attempt, peer_of
from midstream.runtime.recorded import check_audit, keep_index, read_history
from midstream.runtime.reporting import epoch_progress, explain
from midstream.runtime.standing import Standing
from midstream.runtime.sweeping import Sweeper
from midstream.state.access import StateAccess

EAGERNESS = (0.3, 0.05, 0.01)
"""Chances, at each step of its epoch, that a change is requested now: at its beginning, or anywhere in it."""


@dataclass(frozen=True)
class Faults:
    """Chances of things going wrong, each per opportunity."""

    crash: float = 0.0
    """A task dies before its next slice; another attempt starts from the beginning."""
    speculate: float = 0.0
    """A second attempt of a task starts beside the first."""
    repeat: float = 0.0
    """A message to the coordinator arrives once more, at some later time."""
    give_up: float = 0.0
    """The driver gives up the run of an epoch and runs it again; tasks of the old run may go on for a while."""
    crash_driver: float = 0.0
    """The driver dies, at any step of an epoch and of its commit; another one goes on from the checkpoint."""
    lose: float = 0.0
    """A task is never told that it is to switch."""


@dataclass(frozen=True)
class ChangeAt:
    """A change that is requested at some moment of an epoch; a seed decides at which."""

    epoch: int
    updates: tuple[Update, ...]
    scheduler: str = "fries"

    @classmethod
    def of(cls, epoch: int, *updates: Update, scheduler: str = "fries") -> ChangeAt:
        """Make one."""
        return cls(epoch, updates, scheduler)


@dataclass(frozen=True)
class LocalRun:
    """What a run gave, besides what the sinks hold."""

    progress: tuple[EpochProgress, ...]
    metrics: JobMetrics
    revision: Revision
    story: tuple[str, ...]
    history: tuple[ChangeRecord, ...] = ()
    """The changes that were made."""
    audit: pa.Table | None = None
    """Which rows met which operator under which revision, if that was wanted."""


class _GivenUp(Exception):
    """The driver gives up the run of the epoch in progress."""


class _DriverCrashed(Exception):
    """The driver is dead; all it knew is gone, but for the checkpoint."""


def run_graph(
    graph: Graph,
    *,
    partitions: int = 2,
    seed: int = 0,
    faults: Faults | None = None,
    clock: Clock | None = None,
    checkpoint: str | None = None,
    changes: Sequence[ChangeAt] = (),
    audit: str | None = None,
) -> LocalRun:
    """Run a validated graph over all epochs of its sources. See :func:`midstream.testing.run_local`."""
    if type(partitions) is not int or not 1 <= partitions <= BINS:
        raise FlowError(
            f"partitions={partitions!r}: give a whole number from 1 to {BINS}, the number of bins of a key space"
        )
    require_local(graph)
    check_audit(graph, audit)
    epochs = source_epochs(graph)
    blobs = pack_blobs(graph)
    with tempfile.TemporaryDirectory(prefix="midstream-local-") as folder:
        location = Checkpoint.look(checkpoint or posixpath.join(folder, "checkpoint"), graph)
        check_layouts(compile_plan(graph), location)
        check_tables(graph, location.identity.job)
        location.claim()
        try:
            graph = claim_tables(graph, location.identity.job)
        except BaseException:
            location.release()
            raise
        first = first_configuration(graph, location.blobs, partitions, blobs)
        access = StateAccess(location.identity.job, location.states.location, posixpath.join(folder, "bases"))
        runtime = _Runtime(first, location, access, random.Random(seed), faults, clock, changes, audit)
        try:
            newest = location.newest_manifest()
            for epoch, rows in enumerate(epochs, 0 if newest is None else newest.epoch + 1):
                runtime.run_epoch(Epoch(epoch), rows)
        finally:
            runtime.close()
        return runtime.result()


class _Runtime:
    def __init__(
        self,
        first: Configuration,
        checkpoint: Checkpoint,
        access: StateAccess,
        rng: random.Random,
        faults: Faults | None,
        clock: Clock | None,
        changes: Sequence[ChangeAt],
        audit: str | None,
    ) -> None:
        self.resources = Resources(checkpoint.blobs)
        self.access = access
        self.rng = rng
        self.faults = faults or Faults()
        self.clock = clock or SystemClock()
        self._first = first
        self._checkpoint = checkpoint
        self._audit = None if audit is None else AuditOrder(audit, checkpoint.audit_location)
        self._attempts = 0
        self._zombies: list[Attempt] = []
        self._echoes: list[FromTask] = []
        self._switches: dict[bytes, Switch] = {}
        self._progress: list[EpochProgress] = []
        self._metrics = JobMetrics()
        self._wanted = deque(sorted(changes, key=lambda each: each.epoch))
        self._eagerness = rng.choice(EAGERNESS)
        self._epoch = Epoch(0)
        self._start_driver()

    def _start_driver(self) -> None:
        """A driver that knows nothing yet. Tasks of the one before it reach nobody any more."""
        self.coordinator = Coordinator()
        self._run = Run(0)
        self._standing: Standing | None = None
        self._sweeper = Sweeper(self._checkpoint.states)
        self._echoes.clear()
        self._switches.clear()
        newest = self._checkpoint.newest_manifest()
        log, store = self._checkpoint.changes, self._checkpoint.blobs
        restart = restored(self._first, store, log, None if newest is None else newest.revision)
        self._changes = Changes(restart.configuration, store, log, wall=lambda: self.clock.wall_us() / 1e6)
        if restart.pending is not None:
            self._changes.resume(restart.pending)

    def close(self) -> None:
        for attempt in self._zombies:
            attempt.close()
        self._changes.abandon("the run is over")
        self.resources.close()
        self.access.close()
        self._checkpoint.release()

    def result(self) -> LocalRun:
        return LocalRun(
            progress=tuple(self._progress),
            metrics=self._metrics,
            revision=self._changes.configuration.revision,
            story=self.coordinator.story,
            history=tuple(self._checkpoint.changes.records()),
            audit=None if self._audit is None else read_history(self._audit.location),
        )

    @property
    def plan(self) -> Plan:
        """Of the epoch in progress."""
        return self._opened.plan

    # ── one epoch ─────────────────────────────────────────────────────────────────────────────────────────────────

    def run_epoch(self, epoch: Epoch, rows: Mapping[str, LocalData]) -> None:
        """Until it is committed, as Spark would: after a crash of the driver, the epoch it was in is run again."""
        while True:
            try:
                return self._run_epoch(epoch, rows)
            except _DriverCrashed:
                self._start_driver()
            except _GivenUp:
                continue

    def _run_epoch(self, epoch: Epoch, rows: Mapping[str, LocalData]) -> None:
        self._epoch = epoch
        self._maybe_crash_driver()
        self._maybe_change()
        opened = self._opened = self._changes.configuration
        if self._standing is None:
            self._standing = Standing.of(opened.graph, self._checkpoint.manifest_before(epoch))
            self._sweeper.after(self._standing)
        run = self._run
        self._run = Run(run + 1)
        self.coordinator.handle(
            EpochOpened(
                epoch=epoch,
                run=run,
                revision=opened.revision,
                programs=opened.programs,
                bins=opened.bins,
                lineages=self._standing.by_stage(opened.plan),
                clock=self.clock.wall_us(),
                watermarks=self._standing.watermarks,
                on_trial=self._changes.opened(epoch),
                audit=self._audit,
            )
        )
        try:
            self._compute(epoch, run, rows)
        except _DriverCrashed:
            raise
        except _GivenUp:
            self.coordinator.handle(EpochAbandoned(epoch, run))
            raise
        except Exception as error:
            failures = self.coordinator.failures
            self.coordinator.handle(EpochAbandoned(epoch, run))
            # A failure that a task reported brings its traceback; others (of a sink, a transform) keep theirs.
            failed = explain(opened.graph.name, epoch, error, failures)
            if self._changes.failed(str(failed), opened):
                raise _GivenUp from None
            raise failed from (None if failures else error)
        [verdict] = self.coordinator.handle(EpochSealed(epoch, run))
        if isinstance(verdict, Reject):
            raise ProtocolError(f"epoch {epoch} is not whole: {verdict.reason}")
        assert isinstance(verdict, Commit)
        self._commit(verdict, self._standing.after(verdict))

    def _commit(self, commit: Commit, standing: Standing) -> None:
        now = self.clock.wall_us() / 1e6
        ended_with = self._changes.run_of(commit, self._opened)
        progress = epoch_progress(ended_with.plan, commit, now, 0.0)
        self._maybe_crash_driver()
        if self._audit is not None:
            keep_index(self._audit.location, commit.epoch, commit.audits)
        self._checkpoint.commit(standing.manifest(commit, ended_with.programs, ended_with.bins, committed_at=now))
        # A crash from here on leaves a manifest of an epoch that is run again.
        self._maybe_crash_driver()
        self._standing = standing
        self._changes.committed(commit, self._opened)
        self._sweeper.after(standing)
        self._maybe_crash_driver()
        self._progress.append(progress)
        self._metrics = self._metrics.after(progress)
        self._maybe_change(certainly=True)

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _maybe_change(self, *, certainly: bool = False) -> None:
        """Request a change whose epoch it is, now or at a later step; when the epoch is over, certainly."""
        while self._wanted and self._wanted[0].epoch <= self._epoch and (certainly or self._chance(self._eagerness)):
            self._request(self._wanted.popleft())

    def _request(self, wanted: ChangeAt) -> None:
        request = Request(tuple(wanted.updates), scheduler_of(wanted.scheduler), by="test")
        prepared = self._changes.check(request)
        change = self._changes.request(request, prepared, 0.0)
        if self._changes.on_trial is not change or self.coordinator.is_idle:
            return
        if prepared.plan.scheduler is Scheduler.REPLAY:
            raise _GivenUp
        if not prepared.from_next_epoch:
            self._enact(self.coordinator.handle(prepared.begun))
            self._changes.began()

    def _enact(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(peer, Switch() as switch) if not self._chance(self.faults.lose):
                    self._switches[peer] = switch
                case ChangeNoted():
                    self._changes.noted(instruction)
                case _:
                    pass

    def told(self, task: TaskId) -> StageChange | None:
        """The change that a task is told of; it may take its time to arrive."""
        peer = peer_of(WorkerId("local", task.attempt))
        if peer not in self._switches or self.rng.random() < 0.5:
            return None
        return self._switches.pop(peer).change

    def _compute(self, epoch: Epoch, run: Run, rows: Mapping[str, LocalData]) -> None:
        plan = self.plan
        results: dict[str, LocalData] = dict(rows)
        leaving: dict[int, LocalData] = {}
        for segment in range(plan.segments):
            stages = plan.segment(segment)
            first = stages[0]
            inlets = [results[name] for name in first.inlets]
            frames = leaving[segment - 1].of_wires({*first.receives, *first.carries}) if first.takes_frames else None
            data = LocalData.united(inlets, frames)
            for stage in stages:
                data = self._run_stage(epoch, run, stage.index, data)
                if stage.leaves is Leaves.EXCHANGE:
                    data = by_destination(data, self._opened.partitions, FRAME_ORDER, self.rng)
            leaving[segment] = data
            self._transform(segment, leaving, results)
        for name, feed in plan.feeds.items():
            if isinstance(plan.graph[name].spec, Sink):
                table = (results[feed] if isinstance(feed, str) else self._outlet(feed, leaving)).table(
                    plan.graph[name].schema
                )
                write(plan.graph.payloads[name], table, epoch)
                self._maybe_give_up()
                self._maybe_crash_driver()

    def _outlet(self, wire: Any, leaving: Mapping[int, LocalData]) -> LocalData:
        segment = self.plan.wires[wire].segment
        typed = self.plan.segment(segment)[-1].leaves is Leaves.TYPED
        return leaving[segment] if typed else leaving[segment].of_wires({wire}).decoded()

    def _transform(self, segment: int, leaving: Mapping[int, LocalData], results: dict[str, LocalData]) -> None:
        graph = self.plan.graph
        for op in graph.of(Transform):
            feed = self.plan.feeds[op.name]
            ready = feed in results if isinstance(feed, str) else self.plan.wires[feed].segment == segment
            if op.name in results or not ready:
                continue
            rows = results[feed] if isinstance(feed, str) else self._outlet(feed, leaving)
            _, local = graph.payloads[op.name]
            results[op.name] = rows.transformed(op.name, local, graph.schema_of(op.inputs[0]), op.schema)

    # ── one stage ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _run_stage(self, epoch: Epoch, run: Run, stage: StageIndex, data: LocalData) -> LocalData:
        """Interleave the stage's tasks until every partition has finished once."""
        results: dict[int, list[pa.RecordBatch]] = {}
        active = [self._attempt(epoch, run, stage, p, data) for p in range(len(data.partitions))]
        try:
            while len(results) < len(data.partitions):
                self._maybe_give_up()
                self._maybe_crash_driver()
                self._maybe_change()
                self._disturb()
                attempt = self.rng.choice(active)
                partition = attempt.task.partition
                if self._chance(self.faults.crash):
                    active.remove(attempt)
                    attempt.close()
                    if not any(other.task.partition == partition for other in active) and partition not in results:
                        active.append(self._attempt(epoch, run, stage, partition, data))
                    continue
                if self._chance(self.faults.speculate):
                    active.append(self._attempt(epoch, run, stage, partition, data))
                if (output := attempt.step()) is not None:
                    active.remove(attempt)
                    results.setdefault(partition, output)
        finally:
            self._zombies += active  # also when the run is given up: its tasks do not know that yet
        return LocalData([results[p] for p in range(len(data.partitions))])

    def _attempt(self, epoch: Epoch, run: Run, stage: StageIndex, partition: int, data: LocalData) -> Attempt:
        self._attempts += 1
        task = TaskId(epoch, run, stage, PartitionId(partition), self._attempts)
        return Attempt(self, task, data.partitions[partition])

    def say(self, message: FromTask, to: Coordinator) -> ToTask:
        """Deliver a message; the answer comes back at once. It may be delivered again later, to no one's benefit."""
        if to is not self.coordinator:
            return Refused("the driver is gone")
        if self._chance(self.faults.repeat):
            self._echoes.append(message)
        # A worker that listens is known by its own name, as on Spark.
        peer = peer_of(message.worker) if isinstance(message, WorkerJoined) else b"task"
        instructions = self.coordinator.handle(Received(peer, message))
        self._enact(instructions)
        answers = [each.message for each in instructions if isinstance(each, Send) and each.peer == peer]
        return answers[0] if answers else Accepted()

    def _disturb(self) -> None:
        """Let the past speak: repeated messages, and tasks that nobody waits for any more."""
        if self._echoes and self.rng.random() < 0.5:
            echo = self._echoes.pop(self.rng.randrange(len(self._echoes)))
            self._enact(self.coordinator.handle(Received(b"echo", echo)))
        if self._zombies:
            zombie = self.rng.choice(self._zombies)
            try:
                ended = zombie.step() is not None
            except MidstreamError:  # fenced, or its state is no longer there
                ended = True
            if ended:
                self._zombies.remove(zombie)

    def _maybe_crash_driver(self) -> None:
        if self._chance(self.faults.crash_driver):
            raise _DriverCrashed

    def _maybe_give_up(self) -> None:
        if self._chance(self.faults.give_up):
            raise _GivenUp

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability
