"""The local runtime: the same compiler, runner and coordinator in one process, without a JVM.

Tasks of a stage are interleaved at every slice by a seeded scheduler, which may also crash tasks and the driver, run
speculative attempts, repeat messages and give up whole runs of an epoch (:class:`Faults`). A seed replays exactly.
Users' unit tests run flows on it, and our simulations compare what it gives with an oracle.
"""

from __future__ import annotations

import posixpath
import random
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    Assignment,
    Commit,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    FromTask,
    Received,
    Refused,
    Reject,
    Send,
    TaskFailed,
    TaskId,
    TaskStarted,
    ToTask,
)
from midstream.engine.clock import Clock, SystemClock
from midstream.engine.frames import FRAME_ORDER
from midstream.engine.program import link
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.errors import Fenced, FlowError, MidstreamError, OperatorFailed, ProtocolError
from midstream.flow.model import Graph, Sink, Transform
from midstream.ids import BINS, Digest, Epoch, PartitionId, Revision, Run, StageIndex
from midstream.metrics import EpochProgress, JobMetrics
from midstream.planner.stages import Leaves, Plan, compile_plan
from midstream.runtime.checkpoint import Checkpoint
from midstream.runtime.layouts import check_layouts
from midstream.runtime.local_data import LocalData, by_destination, require_local, source_epochs
from midstream.runtime.local_sinks import write
from midstream.runtime.packing import pack_blobs
from midstream.runtime.reporting import epoch_progress, explain, failure_of
from midstream.runtime.standing import Standing
from midstream.runtime.sweeping import Sweeper
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess

MAX_SLICE = 64


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


@dataclass(frozen=True)
class LocalRun:
    """What a run gave, besides what the sinks hold."""

    progress: tuple[EpochProgress, ...]
    metrics: JobMetrics
    revision: Revision
    story: tuple[str, ...]


class _GivenUp(Exception):
    """The driver gives up the run of the epoch in progress."""


class _DriverCrashed(Exception):
    """The driver is dead; all it knew is gone, but for the checkpoint."""


class _SeededSizer(SliceSizer):
    """Slices of random length: results must not depend on where slices end."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        super().__init__(rows=rng.randint(1, MAX_SLICE))

    def observe(self, *, rows: int, elapsed_ns: int) -> None:
        self.rows = self._rng.randint(1, MAX_SLICE)


def run_graph(
    graph: Graph,
    *,
    partitions: int = 2,
    seed: int = 0,
    faults: Faults | None = None,
    clock: Clock | None = None,
    checkpoint: str | None = None,
) -> LocalRun:
    """Run a validated graph over all epochs of its sources. See :func:`midstream.testing.run_local`."""
    if type(partitions) is not int or not 1 <= partitions <= BINS:
        raise FlowError(
            f"partitions={partitions!r}: give a whole number from 1 to {BINS}, the number of bins of a key space"
        )
    require_local(graph)
    epochs = source_epochs(graph)
    plan = compile_plan(graph)
    blobs = pack_blobs(graph)
    with tempfile.TemporaryDirectory(prefix="midstream-local-") as folder:
        location = Checkpoint.look(checkpoint or posixpath.join(folder, "checkpoint"), graph)
        check_layouts(plan, location)
        location.claim()
        digests = {name: location.blobs.put(blob) for name, blob in blobs.items()}
        programs = tuple(location.blobs.put(program.to_blob()) for program in link(plan, digests))
        access = StateAccess(location.identity.job, location.states.location, posixpath.join(folder, "bases"))
        runtime = _Runtime(plan, programs, location, access, partitions, random.Random(seed), faults, clock)
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
        plan: Plan,
        programs: tuple[Digest, ...],
        checkpoint: Checkpoint,
        access: StateAccess,
        partitions: int,
        rng: random.Random,
        faults: Faults | None,
        clock: Clock | None,
    ) -> None:
        self.plan = plan
        self.resources = Resources(checkpoint.blobs)
        self.access = access
        self.rng = rng
        self.faults = faults or Faults()
        self.clock = clock or SystemClock()
        self._programs = programs
        self._checkpoint = checkpoint
        self._bins = tuple(b % partitions for b in range(BINS))
        self._partitions = partitions
        self._attempts = 0
        self._zombies: list[_Attempt] = []
        self._echoes: list[FromTask] = []
        self._progress: list[EpochProgress] = []
        self._metrics = JobMetrics()
        self._start_driver()

    def _start_driver(self) -> None:
        """A driver that knows nothing yet. Tasks of the one before it reach nobody any more."""
        self.coordinator = Coordinator()
        self._run = Run(0)
        self._standing: Standing | None = None
        self._sweeper = Sweeper(self._checkpoint.states)
        self._echoes.clear()

    def close(self) -> None:
        for attempt in self._zombies:
            attempt.close()
        self.resources.close()
        self.access.close()
        self._checkpoint.release()

    def result(self) -> LocalRun:
        return LocalRun(tuple(self._progress), self._metrics, Revision(1), self.coordinator.story)

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
        self._maybe_crash_driver()
        if self._standing is None:
            self._standing = Standing.of(self.plan.graph, self._checkpoint.manifest_before(epoch))
            self._sweeper.after(self._standing)
        run = self._run
        self._run = Run(run + 1)
        self.coordinator.handle(
            EpochOpened(
                epoch=epoch,
                run=run,
                revision=Revision(1),
                programs=self._programs,
                bins=self._bins,
                lineages=self._standing.by_stage(self.plan),
                clock=self.clock.wall_us(),
                watermarks=self._standing.watermarks,
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
            raise explain(self.plan.graph.name, epoch, error, failures) from (None if failures else error)
        [verdict] = self.coordinator.handle(EpochSealed(epoch, run))
        if isinstance(verdict, Reject):
            raise ProtocolError(f"epoch {epoch} is not whole: {verdict.reason}")
        assert isinstance(verdict, Commit)
        self._commit(verdict, self._standing.after(verdict))

    def _commit(self, commit: Commit, standing: Standing) -> None:
        now = self.clock.wall_us() / 1e6
        progress = epoch_progress(self.plan, commit, now, 0.0)
        self._maybe_crash_driver()
        self._checkpoint.commit(standing.manifest(commit, self._programs, self._bins, committed_at=now))
        # A crash from here on leaves a manifest of an epoch that is run again.
        self._maybe_crash_driver()
        self._standing = standing
        self._sweeper.after(standing)
        self._maybe_crash_driver()
        self._progress.append(progress)
        self._metrics = self._metrics.after(progress)

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
                    data = by_destination(data, self._partitions, FRAME_ORDER, self.rng)
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

    def _attempt(self, epoch: Epoch, run: Run, stage: StageIndex, partition: int, data: LocalData) -> _Attempt:
        self._attempts += 1
        task = TaskId(epoch, run, stage, PartitionId(partition), self._attempts)
        return _Attempt(self, task, data.partitions[partition])

    def say(self, message: FromTask, to: Coordinator) -> ToTask:
        """Deliver a message; the answer comes back at once. It may be delivered again later, to no one's benefit."""
        if to is not self.coordinator:
            return Refused("the driver is gone")
        if self._chance(self.faults.repeat):
            self._echoes.append(message)
        [answer] = self.coordinator.handle(Received(b"task", message))
        assert isinstance(answer, Send)
        return answer.message

    def _disturb(self) -> None:
        """Let the past speak: repeated messages, and tasks that nobody waits for any more."""
        if self._echoes and self.rng.random() < 0.5:
            echo = self._echoes.pop(self.rng.randrange(len(self._echoes)))
            self.coordinator.handle(Received(b"echo", echo))
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


class _Attempt:
    """One attempt of a task, advanced a slice at a time."""

    def __init__(self, runtime: _Runtime, task: TaskId, batches: Sequence[pa.RecordBatch]) -> None:
        self.task = task
        self._runtime = runtime
        self._coordinator = runtime.coordinator
        self._output: list[pa.RecordBatch] = []
        self._steps = self._work(batches)

    def step(self) -> list[pa.RecordBatch] | None:
        """Advance; the output once the task has finished, else ``None``. Raises :class:`Fenced` when refused."""
        return self._output if next(self._steps, True) else None

    def close(self) -> None:
        """Die, wherever it is."""
        self._steps.close()

    def _work(self, batches: Sequence[pa.RecordBatch]) -> Generator[bool]:
        runtime = self._runtime
        assignment = self._ask(TaskStarted(self.task))
        assert isinstance(assignment, Assignment)
        yield False
        run: TaskRun | None = None
        try:
            run = TaskRun(
                self.task,
                assignment,
                runtime.resources,
                runtime.access,
                clock=runtime.clock,
                sizer=_SeededSizer(runtime.rng),
            )
            for ready in run.run(batches):
                self._output += ready
                yield False
            report = run.finish()
            yield False  # its changes are written, but nobody knows yet
        except OperatorFailed as error:
            self._ask(TaskFailed(self.task, failure_of(error)))
            raise
        finally:
            if run is not None:
                run.close()
        self._ask(report)

    def _ask(self, message: FromTask) -> ToTask:
        answer = self._runtime.say(message, self._coordinator)
        if isinstance(answer, Refused):
            raise Fenced(answer.reason)
        return answer
