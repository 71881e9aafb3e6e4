"""The local runtime: the same compiler, runner and coordinator in one process, without a JVM.

Tasks of a stage are interleaved at every slice by a seeded scheduler, which may also crash tasks and the driver, run
speculative attempts, repeat messages and give up whole runs of an epoch (:class:`Faults`). A seed replays exactly.
Users' unit tests run flows on it, and our simulations compare what it gives with an oracle.
"""

from __future__ import annotations

import contextlib
import posixpath
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from midstream.change.changes import Changes, Request
from midstream.change.configuration import Configuration, first_configuration
from midstream.change.prepare import Prepared, scheduler_of
from midstream.change.records import ChangeRecord
from midstream.change.restart import restored
from midstream.control.coordinator import Coordinator
from midstream.control.journal import Journal
from midstream.control.messages import (
    Accepted,
    AuditOrder,
    ChangeBegun,
    Commit,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    Event,
    FromTask,
    Instruction,
    Received,
    Refused,
    Reject,
    Send,
    StageChange,
    Switch,
    TaskFailed,
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
from midstream.planner.stages import Leaves, Plan, compile_plan
from midstream.runtime.checkpoint import Checkpoint
from midstream.runtime.database import check_tables, claim_tables
from midstream.runtime.driver import BatchEntry, Driver, OpenRun
from midstream.runtime.layouts import check_layouts
from midstream.runtime.local_data import LocalData, by_destination, require_local, source_epochs
from midstream.runtime.local_sinks import write
from midstream.runtime.local_tasks import Attempt, peer_of
from midstream.runtime.recorded import check_audit, read_history
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


class _Cancelled(Exception):
    """The run in progress is cancelled."""


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
    durable: bool = False,
) -> LocalRun:
    """Run a validated graph over all epochs of its sources. See :func:`midstream.testing.run_local`."""
    if type(partitions) is not int or not 1 <= partitions <= BINS:
        raise FlowError(
            f"partitions={partitions!r}: give a whole number from 1 to {BINS}, the number of bins of a key space"
        )
    require_local(graph)
    check_audit(graph, audit)
    epochs = source_epochs(graph)
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
    ) as runtime:
        newest = runtime.checkpoint.newest_manifest()
        for epoch, rows in enumerate(epochs, 0 if newest is None else newest.epoch + 1):
            runtime.run_epoch(Epoch(epoch), rows)
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
    changes: Sequence[ChangeAt] = (),
    audit: str | None = None,
    durable: bool = False,
) -> Iterator[_Runtime]:
    """All that runs epochs of a graph, until the end of the block."""
    blobs = pack_blobs(graph)
    with tempfile.TemporaryDirectory(prefix="midstream-local-") as folder:
        location = Checkpoint.look(checkpoint or posixpath.join(folder, "checkpoint"), graph, durable=durable)
        check_layouts(compile_plan(graph), location)
        check_tables(graph, location.identity.job)
        location.claim()
        with contextlib.ExitStack() as undo:
            undo.callback(location.release)
            graph = claim_tables(graph, location.identity.job)
            first = first_configuration(graph, location.blobs, partitions, blobs)
            bases = posixpath.join(folder, "bases")
            access = StateAccess(location.identity.job, location.states.location, bases, durable)
            runtime = _Runtime(first, location, access, random.Random(seed), faults, clock, changes, audit)
            undo.pop_all()  # from here on the runtime lets go of it
        try:
            yield runtime
        finally:
            runtime.close()


class _Control:
    """A coordinator that is called directly (:class:`midstream.runtime.driver.Control`)."""

    def __init__(self, enact: Callable[[Sequence[Instruction]], None]) -> None:
        self.coordinator = Coordinator()
        self._journal = Journal()
        self._enact = enact

    def open(self, event: EpochOpened) -> None:
        self.tell(event)

    def begin(self, event: ChangeBegun) -> Sequence[Instruction]:
        self._enact(instructions := self.tell(event))
        return instructions

    def seal(self, event: EpochSealed) -> Commit:
        [verdict] = self.tell(event)
        if isinstance(verdict, Reject):
            raise ProtocolError(f"epoch {event.epoch} is not whole: {verdict.reason}")
        assert isinstance(verdict, Commit)
        return verdict

    def abandon(self, event: EpochAbandoned) -> tuple[TaskFailed, ...]:
        failures = self.coordinator.failures
        self.tell(event)
        return failures

    def journal(self) -> bytes:
        return self._journal.to_bytes()

    def tell(self, event: Event) -> list[Instruction]:
        self._journal.append(event)
        return self.coordinator.handle(event)


class _Runtime:
    """The driver's edge (:class:`midstream.runtime.driver.Edge`) to tasks in this process."""

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
        self.checkpoint = checkpoint
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
        self._is_cancelled = False
        # What Spark's log of offsets would say: it survives the driver.
        self._log: dict[Epoch, BatchEntry] = {}
        self.result: LocalRun
        self._start_driver()

    def _start_driver(self) -> None:
        """A driver that knows nothing yet. Tasks of the one before it reach nobody any more."""
        self._control = _Control(self._deliver)
        self._echoes.clear()
        self._switches.clear()
        newest = self.checkpoint.newest_manifest()
        log, store = self.checkpoint.changes, self.checkpoint.blobs
        restart = restored(self._first, store, log, None if newest is None else newest.revision)
        changes = Changes(restart.configuration, store, log, wall=self._wall)
        if restart.pending is not None:
            changes.resume(restart.pending)
        self._driver = Driver(
            changes,
            self.checkpoint,
            self._control,
            self,
            audit=self._audit,
            on_commit=self._committed,
            wall=self._wall,
        )

    def _wall(self) -> float:
        return self.clock.wall_us() / 1e6

    @property
    def coordinator(self) -> Coordinator:
        """The one of the driver that is alive."""
        return self._control.coordinator

    def close(self) -> None:
        for attempt in self._zombies:
            attempt.close()
        self._driver.ended("the run is over")
        self.resources.close()
        self.access.close()
        self.checkpoint.release()
        self.result = LocalRun(
            progress=tuple(self._progress),
            metrics=self._metrics,
            revision=self._driver.changes.configuration.revision,
            story=self.coordinator.story,
            history=tuple(self.checkpoint.changes.records()),
            audit=None if self._audit is None else read_history(self._audit.location),
        )

    @property
    def plan(self) -> Plan:
        """Of the epoch in progress."""
        return self._open.configuration.plan

    # ── one epoch ─────────────────────────────────────────────────────────────────────────────────────────────────

    def run_epoch(self, epoch: Epoch, rows: Mapping[str, LocalData]) -> None:
        """Until it is committed, as Spark would: after a crash of the driver, the epoch it was in is run again."""
        self._epoch = epoch
        entry = self._log.setdefault(epoch, BatchEntry(self.clock.wall_us(), f"rows of epoch {epoch}"))
        while True:
            try:
                if self._run_epoch(epoch, entry, rows):
                    return self._maybe_change(certainly=True)
            except _DriverCrashed:
                self._start_driver()

    def _run_epoch(self, epoch: Epoch, entry: BatchEntry, rows: Mapping[str, LocalData]) -> bool:
        """Whether the epoch is committed now."""
        self._maybe_crash_driver()
        self._maybe_change()
        run = self._driver.begin(epoch, entry)
        if run is None:
            return True
        self._open, self._is_cancelled = run, False
        try:
            self._compute(run, rows)
        except _DriverCrashed:
            raise
        except Exception as error:
            self._driver.failed(run, error)
            return False
        return self._driver.commit(run, 0.0)

    def _committed(self, commit: Commit, progress: EpochProgress) -> None:
        self._progress.append(progress)
        self._metrics = self._metrics.after(progress)

    # ── the driver's hands ────────────────────────────────────────────────────────────────────────────────────────

    def cancel(self, run: OpenRun, *, interrupt: bool = False) -> None:
        """It is noticed at the next step."""
        self._is_cancelled = True

    def start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        """Time does not pass by itself here."""

    def stop_timer(self) -> None:
        """There is none."""

    def preflight(self, prepared: Prepared) -> None:
        """There is nothing here that the driver could not try itself."""

    def secure(self, run: OpenRun) -> None:
        """The log is in memory, and survives whatever happens here."""

    def at(self, step: str) -> None:
        """A driver may crash anywhere."""
        self._maybe_crash_driver()

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _maybe_change(self, *, certainly: bool = False) -> None:
        """Request a change whose epoch it is, now or at a later step; when the epoch is over, certainly."""
        while self._wanted and self._wanted[0].epoch <= self._epoch and (certainly or self._chance(self._eagerness)):
            wanted = self._wanted.popleft()
            request = Request(wanted.updates, scheduler_of(wanted.scheduler), by="test", is_tried_before=False)
            self._driver.request(request)

    def _deliver(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(peer, Switch() as switch) if not self._chance(self.faults.lose):
                    self._switches[peer] = switch
                case _:
                    pass

    def told(self, task: TaskId) -> StageChange | None:
        """The change that a task is told of; it may take its time to arrive."""
        peer = peer_of(WorkerId("local", task.attempt))
        if peer not in self._switches or self.rng.random() < 0.5:
            return None
        return self._switches.pop(peer).change

    def _compute(self, run: OpenRun, rows: Mapping[str, LocalData]) -> None:
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
                data = self._run_stage(run.epoch, run.run, stage.index, data)
                if stage.leaves is Leaves.EXCHANGE:
                    data = by_destination(data, run.configuration.partitions, FRAME_ORDER, self.rng)
            leaving[segment] = data
            self._transform(segment, leaving, results)
        for name, feed in plan.feeds.items():
            if isinstance(plan.graph[name].spec, Sink):
                table = (results[feed] if isinstance(feed, str) else self._outlet(feed, leaving)).table(
                    plan.graph[name].schema
                )
                write(plan.graph.payloads[name], table, run.epoch)
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
        instructions = self._control.tell(Received(peer, message))
        self._deliver(instructions)
        self._driver.hear(instructions)
        answers = [each.message for each in instructions if isinstance(each, Send) and each.peer == peer]
        return answers[0] if answers else Accepted()

    def _disturb(self) -> None:
        """Let the past speak: repeated messages, and tasks that nobody waits for any more."""
        if self._echoes and self.rng.random() < 0.5:
            echo = self._echoes.pop(self.rng.randrange(len(self._echoes)))
            instructions = self._control.tell(Received(b"echo", echo))
            self._deliver(instructions)
            self._driver.hear(instructions)
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
            self._driver.replay()
        if self._is_cancelled:
            raise _Cancelled

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability
