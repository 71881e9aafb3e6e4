"""The decider on the driver: a pure state machine. Events in, instructions out; no sockets, no clock, no Spark.

State and what moves it::

                 EpochOpened                 EpochSealed, whole → Commit
    ┌──────┐ ───────────────────► ┌─────────┐ ───────────────────────► ┌──────┐
    │ idle │                      │ running │                          │ idle │
    └──────┘ ◄─────────────────── └─────────┘ ───────────────────────► └──────┘
                 EpochAbandoned        ▲   │    EpochSealed, not whole → Reject
                                       └───┘
                        TaskStarted, TaskFinished, TaskFailed, ChangeBegun, Applied, Reached, Exhausted

Messages of tasks are legal in every state, because tasks outlive the runs they belong to: outside their run they are
refused, which fences them. Driver events in the wrong state are errors, told with the story of what came before.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from midstream.control.messages import (
    Accepted,
    Applied,
    ChangeBegun,
    ChangeNoted,
    Commit,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    Event,
    Exhausted,
    FromTask,
    GiveUpRun,
    Instruction,
    JobEnding,
    Reached,
    Received,
    Refused,
    Reject,
    Release,
    Send,
    StateChange,
    Stay,
    Switch,
    TaskFailed,
    TaskFinished,
    TaskId,
    TaskOrder,
    TaskStarted,
    WorkerId,
    WorkerJoined,
    WorkerReleased,
)
from midstream.control.operations.switching import Attempts, ChangeInRun, Place
from midstream.data.times import END_OF_TIME, EpochTimes, Watermarks
from midstream.errors import ProtocolError
from midstream.ids import Revision, StageIndex, WireId
from midstream.metrics import merge

STORY_LENGTH = 50


@dataclass
class _RunningTask:
    """What is known of the run in progress."""

    opened: EpochOpened
    # Per stage and partition, the reports of all attempts that finished. The first one is counted. Attempts are replays
    # of one another, so it hardly matters which of them Spark kept; but it need not be the first.
    finished: dict[Place, list[TaskFinished]] = field(default_factory=dict)
    attempts: Attempts = field(default_factory=Attempts)
    workers: dict[TaskId, WorkerId | None] = field(default_factory=dict)
    failures: list[TaskFailed] = field(default_factory=list)
    change: ChangeInRun | None = None
    # Decided when the first task with state asks, and then the same for all of them.
    watermarks: Watermarks | None = None

    @property
    def revision(self) -> Revision:
        """The one that the next epoch begins with."""
        return self.opened.revision if self.change is None else self.change.begun.revision

    @property
    def on_trial(self) -> Revision | None:
        """The revision that can still be rolled back."""
        return self.opened.on_trial if self.change is None else self.change.begun.revision

    def times(self, stage: StageIndex) -> EpochTimes:
        """The times that a task of this stage is told.

        Tasks with state stand behind an exchange, so all sources have been read and reported when the first one asks.
        Others may start earlier, and have no use for the epoch's own watermark.
        """
        before = self.opened.watermarks
        now = before
        if self.opened.lineages.get(stage):
            if self.watermarks is None:
                self.watermarks = self.seen()
            now = self.watermarks
        watermark = END_OF_TIME if self.opened.closing else now.watermark
        return EpochTimes(self.opened.clock, before.watermark, watermark)

    def seen(self) -> Watermarks:
        """The watermarks with all event times that were reported."""
        latest: dict[str, int] = {}
        for reports in self.finished.values():
            for source, time in reports[0].event_times.items():
                latest[source] = max(time, latest.get(source, time))
        return self.opened.watermarks.after(latest, self.opened.clock)


class Coordinator:
    """Decides what tasks run and whether an epoch is whole.

    >>> from midstream.ids import Digest, Epoch, PartitionId, Revision, Run
    >>> coordinator = Coordinator()
    >>> coordinator.handle(EpochOpened(Epoch(7), Run(0), Revision(1), (Digest("ab"),)))
    []
    >>> task = TaskId(Epoch(7), Run(0), StageIndex(0), PartitionId(0), attempt=12)
    >>> [sent] = coordinator.handle(Received(b"peer", TaskStarted(task)))
    >>> sent.message
    TaskOrder(revision=1, program='ab', times=EpochTimes(clock=0, ...), lineages={}, change=None, ...)
    >>> late = TaskId(Epoch(6), Run(0), StageIndex(0), PartitionId(0), attempt=3)
    >>> [sent] = coordinator.handle(Received(b"old", TaskStarted(late)))
    >>> sent.message.reason
    'epoch 6.0 is over; epoch 7.0 is running'
    """

    def __init__(self) -> None:
        self._running: _RunningTask | None = None
        self._workers: dict[WorkerId, bytes] = {}
        self._ending = False
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)

    @property
    def is_idle(self) -> bool:
        """Whether no run is in progress."""
        return self._running is None

    @property
    def failures(self) -> tuple[TaskFailed, ...]:
        """Failures of the user's code in the run in progress, in the order they were reported."""
        return tuple(self._running.failures) if self._running else ()

    @property
    def workers(self) -> frozenset[WorkerId]:
        """Worker processes that hold functions open."""
        return frozenset(self._workers)

    @property
    def story(self) -> tuple[str, ...]:
        """The most recent events, oldest first, as one line each."""
        return tuple(self._story)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event, change state, say what must be done about it."""
        self._story.append(line_of(event))
        match event:
            case Received(peer, message):
                return self._from_task(peer, message)
            case EpochOpened():
                if self._running is not None:
                    raise self._lost(event, f"{_name(self._running.opened)} is still running")
                self._running = _RunningTask(event)
                return []
            case ChangeBegun():
                return self._begin(event)
            case EpochSealed():
                return [self._seal(self._current(event))]
            case EpochAbandoned():
                self._current(event)
                self._running = None
                return []
            case JobEnding():
                self._ending = True
                return [Send(peer, Release()) for peer in self._workers.values()]

    # ── driver events ─────────────────────────────────────────────────────────────────────────────────────────────

    def _current(self, event: EpochSealed | EpochAbandoned) -> _RunningTask:
        running = self._running
        if running is None:
            raise self._lost(event, "no epoch is running")
        if (running.opened.epoch, running.opened.run) != (event.epoch, event.run):
            raise self._lost(event, f"{_name(running.opened)} is running")
        return running

    def _begin(self, event: ChangeBegun) -> list[Instruction]:
        """Nothing when no epoch is running: the next one begins with the new revision."""
        running = self._running
        if running is None:
            return []
        if running.change is not None:
            raise self._lost(event, f"the change to revision {running.revision} is in progress")
        change = ChangeInRun(event, running.attempts, running.opened.partitions)
        running.change = change
        told: list[Instruction] = []
        for task, stage_change in change.to_tell():
            worker = running.workers[task]
            if worker is not None and worker in self._workers:
                told.append(Send(self._workers[worker], Switch(task, stage_change)))
        noted = ChangeNoted(event.revision, None, f"told {len(told)} running task(s)", (), change.in_effect)
        return [*told, noted]

    def _seal(self, running: _RunningTask) -> Instruction:
        opened, reports = running.opened, [reports[0] for reports in running.finished.values()]
        self._running = None
        if problem := _incomplete(running):
            return Reject(opened.epoch, problem)
        operators = merge(report.operators for report in sorted(reports, key=lambda report: report.task))
        emitted: Counter[WireId] = Counter()
        for report in reports:
            emitted.update(report.emitted)
        states: dict[str, tuple[StateChange, ...]] = {}
        samples: dict[str, bytes] = {}
        for report in reports:
            samples.update(report.samples)
            for operator, change in report.states.items():
                states[operator] = (*states.get(operator, ()), change)
        return Commit(
            epoch=opened.epoch,
            revision=running.revision,
            operators=operators,
            tasks=len(reports),
            emitted=dict(emitted),
            states=states,
            watermarks=running.watermarks or running.seen(),
            widest_row=max((report.widest_row for report in reports), default=0),
            switches=() if running.change is None else running.change.points,
            audits=tuple(sorted(report.audit for report in reports if report.audit is not None)),
            samples=samples,
        )

    def _lost(self, event: Event, found: str) -> ProtocolError:
        story = "\n  ".join(self._story)
        return ProtocolError(f"{line_of(event)} makes no sense now: {found}. What came before:\n  {story}")

    # ── messages of tasks ─────────────────────────────────────────────────────────────────────────────────────────

    def _from_task(self, peer: bytes, message: FromTask) -> list[Instruction]:
        if isinstance(message, WorkerJoined):
            self._workers[message.worker] = peer
            # A worker that joins while the job ends has missed its release, and the driver waits for it to leave.
            return [Send(peer, Accepted()), Send(peer, Release())] if self._ending else [Send(peer, Accepted())]
        if isinstance(message, WorkerReleased):
            self._workers.pop(message.worker, None)
            return []
        running = self._running
        if refusal := _fence(running, message.task):
            return [] if isinstance(message, Reached | Exhausted) else [Send(peer, refusal)]
        assert running is not None  # _fence refuses everything while idle
        place = (message.task.stage, message.task.partition)
        match message:
            case TaskStarted(task, worker):
                return [Send(peer, _order(running, task, worker))]
            case Applied():
                return _apply(running, peer, message)
            case Reached(task, revision, operators):
                return _reach(running, task, revision, operators)
            case Exhausted(task, revision):
                return _exhaust(running, task, revision)
            case TaskFinished(task):
                running.finished.setdefault(place, []).append(message)
                running.attempts.over.add(task)
                running.attempts.finished.add(place)
                return [Send(peer, Accepted()), *_finish(running, task)]
            case TaskFailed(task):
                running.failures.append(message)
                running.attempts.over.add(task)
                if message.revision == running.on_trial:
                    return [Send(peer, Accepted()), GiveUpRun(running.opened.epoch, running.opened.run)]
        return [Send(peer, Accepted())]


def _order(running: _RunningTask, task: TaskId, worker: WorkerId | None) -> TaskOrder | Refused:
    opened, place = running.opened, (task.stage, task.partition)
    if task.stage >= len(opened.programs):
        return Refused(f"the plan has {len(opened.programs)} stages; there is no {task.stage}")
    attempts = running.attempts.started.setdefault(place, set())
    change, switch_at = None, None
    if running.change is not None:
        switch_at = running.change.start(place, is_first=not attempts)
        change = running.change.stage_change(task.stage) if running.change.is_known_at(place) else None
    attempts.add(task)
    running.workers[task] = worker
    return TaskOrder(
        revision=opened.revision,
        program=opened.programs[task.stage],
        times=running.times(task.stage),
        lineages=opened.lineages.get(task.stage, {}),
        change=change,
        switch_at=switch_at,
        audit=opened.audit,
        live=opened.live if running.change is None else (*opened.live, *running.change.begun.live),
    )


def _apply(running: _RunningTask, peer: bytes, asked: Applied) -> list[Instruction]:
    change, place = running.change, (asked.task.stage, asked.task.partition)
    if change is None or change.begun.revision != asked.revision or not change.apply(place, asked.position):
        return [Send(peer, Stay())]
    heads = change.stage_change(asked.task.stage).heads
    return [Send(peer, Accepted()), ChangeNoted(asked.revision, asked.task, "switched", heads, change.in_effect)]


def _reach(running: _RunningTask, task: TaskId, revision: Revision, operators: tuple[str, ...]) -> list[Instruction]:
    change = running.change
    if change is None or change.begun.revision != revision:
        return []
    change.reach((task.stage, task.partition))
    return [ChangeNoted(revision, task, "reached", operators, change.in_effect)]


def _exhaust(running: _RunningTask, task: TaskId, revision: Revision) -> list[Instruction]:
    change = running.change
    if change is None or change.begun.revision != revision:
        return []
    change.exhaust((task.stage, task.partition))
    return [ChangeNoted(revision, task, "has no rows left", (), change.in_effect)]


def _finish(running: _RunningTask, task: TaskId) -> list[Instruction]:
    change = running.change
    if change is None:
        return []
    change.finish((task.stage, task.partition))
    return [ChangeNoted(change.begun.revision, task, "finished", (), change.in_effect)]


def _fence(running: _RunningTask | None, task: TaskId) -> Refused | None:
    """A task may speak only while its own run is in progress."""
    name = f"epoch {task.epoch}.{task.run}"
    if running is None:
        return Refused(f"{name} is over; no epoch is running")
    if (task.epoch, task.run) != (running.opened.epoch, running.opened.run):
        return Refused(f"{name} is over; {_name(running.opened)} is running")
    return None


def _incomplete(running: _RunningTask) -> str | None:
    """Why the epoch is not whole, or ``None``.

    Spark has told us that all its tasks succeeded. Two things are checked on top: every partition that started has
    reported, and on every wire a stage received the rows that the stage before sent. Where several attempts of a
    partition finished with different counts (a function that is not deterministic), any of them may be the one that
    counts, so the two sides need only be able to agree.
    """
    if silent := sorted(set(running.attempts.started) - set(running.finished)):
        shown = ", ".join(f"stage {stage} partition {partition}" for stage, partition in silent[:5])
        return f"{len(silent)} started partition(s) never reported: {shown}"
    sent, received = _Ranges(), _Ranges()
    for (stage, _), reports in running.finished.items():
        sent.add(stage + 1, [report.sent for report in reports])
        received.add(stage, [report.received for report in reports])
    for at, wire in sorted(sent.low.keys() | received.low.keys()):
        (fewest, most), (least, greatest) = sent.of(at, wire), received.of(at, wire)
        if most < least or greatest < fewest:
            return f"stage {at} received {_span(least, greatest)} of {_span(fewest, most)} rows on wire {wire}"
    return None


class _Ranges:
    """By stage and wire: the fewest and the most rows, over all choices of one finished attempt per partition."""

    def __init__(self) -> None:
        self.low: Counter[tuple[int, WireId]] = Counter()
        self.high: Counter[tuple[int, WireId]] = Counter()

    def add(self, stage: int, attempts: list[dict[WireId, int]]) -> None:
        """Add one partition."""
        for wire in {wire for counts in attempts for wire in counts}:
            counts = [counts.get(wire, 0) for counts in attempts]
            self.low[stage, wire] += min(counts)
            self.high[stage, wire] += max(counts)

    def of(self, stage: int, wire: WireId) -> tuple[int, int]:
        """The range of one wire."""
        return self.low[stage, wire], self.high[stage, wire]


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _name(opened: EpochOpened) -> str:
    return f"epoch {opened.epoch}.{opened.run}"


def line_of(event: Event) -> str:
    """An event in one line."""
    match event:
        case Received(_, message):
            about = message.worker if isinstance(message, WorkerJoined | WorkerReleased) else message.task
            return f"{type(message).__name__}({about})"
        case ChangeBegun(revision):
            return f"ChangeBegun(revision {revision})"
        case JobEnding():
            return "JobEnding"
        case _:
            return f"{type(event).__name__}(epoch {event.epoch}.{event.run})"
