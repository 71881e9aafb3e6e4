"""The record of one run of an epoch: the attempts that started and ended, their reports, and whether it is whole.

Pure. The coordinator opens a book for each run and enters every report; operations read only its :class:`Attempts`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from midstream.control.messages import (
    Commit,
    EpochOpened,
    Places,
    Refused,
    Reject,
    StateChange,
    TaskFailed,
    TaskFinished,
    TaskId,
    TaskOrder,
    TaskStarted,
    WorkerId,
)
from midstream.data.times import END_OF_TIME, EpochTimes, Watermarks
from midstream.ids import BinId, ExecutorId, PartitionId, StageIndex, WireId
from midstream.metrics import merge
from midstream.planner.assignment import unpack_assignments
from midstream.state.lineage_shares import LineageShares
from midstream.storage.table_files import SinkFile

__all__ = ["Attempts", "Place", "RunBook"]

Place = tuple[StageIndex, PartitionId]
"""A partition of a stage: what all its attempts share."""


@dataclass
class Attempts:
    """The attempts of a run, by place: those that started, and the places where one has finished."""

    started: dict[Place, set[TaskId]] = field(default_factory=dict)
    over: set[TaskId] = field(default_factory=set)
    """Attempts that finished or failed. Killed ones are not included: nobody reports them."""
    finished: set[Place] = field(default_factory=set)
    finished_of: Counter[StageIndex] = field(default_factory=Counter)
    """By stage: how many of its places have finished."""

    def finish(self, task: TaskId) -> None:
        """An attempt has finished."""
        place = (task.stage, task.partition)
        self.over.add(task)
        if place not in self.finished:
            self.finished.add(place)
            self.finished_of[task.stage] += 1

    def alive(self, place: Place) -> set[TaskId]:
        """Attempts that may still be running."""
        return self.started.get(place, set()) - self.over

    def places(self, stage: StageIndex) -> list[Place]:
        """The places of a stage at which an attempt has started."""
        return sorted(place for place in self.started if place[0] == stage)


@dataclass
class RunBook:
    """What is known about a run. Used by the coordinator, from the run's opening until it is sealed or abandoned."""

    opened: EpochOpened
    attempts: Attempts = field(default_factory=Attempts)
    workers: dict[TaskId, WorkerId] = field(default_factory=dict)
    """The worker of each attempt, if it can be notified of changes."""
    at_work: dict[WorkerId, TaskId] = field(default_factory=dict)
    """The attempt that each worker began last: it runs one after the other."""
    failures: list[TaskFailed] = field(default_factory=list)
    # Per place, the reports of all attempts that finished. The first one counts. Attempts are replays of one
    # another, so it hardly matters that Spark may have kept another one.
    _finished: dict[Place, list[TaskFinished]] = field(default_factory=dict)
    # Decided when the first task with state asks; the same for all others.
    _watermarks: Watermarks | None = None
    _shares: dict[StageIndex, LineageShares] = field(default_factory=dict)
    _by_executor: dict[StageIndex, dict[ExecutorId, tuple[PartitionId, ...]]] = field(default_factory=dict)
    _told: set[tuple[StageIndex, WorkerId]] = field(default_factory=set)
    """The workers that know what ran beside a stage's tasks."""

    def __str__(self) -> str:
        return f"epoch {self.opened.epoch}.{self.opened.run}"

    def is_of(self, task: TaskId) -> bool:
        """Whether a task belongs to this run. Others are fenced."""
        return (task.epoch, task.run) == (self.opened.epoch, self.opened.run)

    def start(self, started: TaskStarted) -> TaskOrder | Refused:
        """An attempt has started; returns its order, to which an operation may add."""
        opened, task, worker = self.opened, started.task, started.worker
        if task.stage >= len(opened.programs):
            return Refused(f"the plan has {len(opened.programs)} stages; there is no stage {task.stage}")
        self.attempts.started.setdefault((task.stage, task.partition), set()).add(task)
        if worker is not None:
            self.workers[task] = worker
            self.at_work[worker] = task
        return TaskOrder(
            revision=opened.revision,
            program=opened.programs[task.stage],
            times=self._times(task.stage),
            lineages=self._lineages(task),
            audit=opened.audit,
            live=opened.live,
            beside=self._beside(task, worker),
            awaited=self._awaited(task, worker),
            knobs=opened.knobs,
            flushed=opened.flushed,
            assignments=opened.assignments,
            owners=None if started.assignments == opened.assignments else opened.owners,
        )

    def _lineages(self, task: TaskId) -> dict[str, bytes]:
        """The state that a task begins with, for its own bins only: so the size of all orders together does not grow
        with the number of tasks."""
        lineages = self.opened.lineages.get(task.stage, {})
        if not lineages or not self.opened.owners:
            return lineages
        if (shares := self._shares.get(task.stage)) is None:
            assignment = unpack_assignments(self.opened.owners).get(task.stage)
            if assignment is None:
                return lineages
            shares = self._shares[task.stage] = LineageShares(lineages, assignment)
        return shares.of(task.partition)

    def _beside(self, task: TaskId, worker: WorkerId | None) -> tuple[PartitionId, ...] | None:
        """The partitions of a task's stage that ran on its executor in the epoch before: only the first task of each
        worker is told, because a worker acts on it once in an epoch."""
        if self.opened.places is None or worker is None or not worker.executor:
            return None
        if (task.stage, worker) in self._told:
            return None
        self._told.add((task.stage, worker))
        if (by_executor := self._by_executor.get(task.stage)) is None:
            found: dict[ExecutorId, list[PartitionId]] = {}
            for partition, executor in sorted(self.opened.places.get(task.stage, {}).items()):
                found.setdefault(executor, []).append(partition)
            by_executor = {executor: tuple(partitions) for executor, partitions in found.items()}
            self._by_executor[task.stage] = by_executor
        return by_executor.get(worker.executor, ())

    def _awaited(self, task: TaskId, worker: WorkerId | None) -> tuple[BinId, ...]:
        """The bins that a task's executor prefetches for its stage."""
        if worker is None:
            return ()
        wanted = (each for each in self.opened.prefetch if (each.executor, each.stage) == (worker.executor, task.stage))
        return tuple(sorted({number for request in wanted for number in request.bins}))

    def finish(self, report: TaskFinished) -> None:
        """An attempt has finished."""
        place = (report.task.stage, report.task.partition)
        self._finished.setdefault(place, []).append(report)
        self.attempts.finish(report.task)

    def fail(self, report: TaskFailed) -> None:
        """An attempt has failed in the user's code."""
        self.failures.append(report)
        self.attempts.over.add(report.task)

    def seal(self) -> Commit | Reject:
        """The commit, to which an operation may add; or the reason why the epoch is not whole."""
        opened, reports = self.opened, [reports[0] for reports in self._finished.values()]
        if problem := self._problem():
            return Reject(opened.epoch, problem)
        operators = merge(report.operators for report in sorted(reports, key=lambda report: report.task))
        emitted: Counter[WireId] = Counter()
        states: defaultdict[str, list[StateChange]] = defaultdict(list)
        samples: dict[str, bytes] = {}
        files: defaultdict[str, list[SinkFile]] = defaultdict(list)
        spans: dict[StageIndex, tuple[float, float]] = {}
        bin_rows: defaultdict[StageIndex, list[bytes]] = defaultdict(list)
        busy_us: dict[StageIndex, dict[PartitionId, int]] = {}
        places: Places = {}
        for report in reports:
            worker = self.workers.get(report.task)
            if worker is not None and worker.executor:
                places.setdefault(report.task.stage, {})[report.task.partition] = worker.executor
            for sink, written in report.files.items():
                files[sink] += written
            first, last = spans.get(report.task.stage, (report.began_at, report.ended_at))
            spans[report.task.stage] = min(first, report.began_at), max(last, report.ended_at)
            for stage, packed in report.bin_rows.items():
                bin_rows[stage].append(packed)
            worked = sum(stats.busy_us for stats in report.operators)
            busy_us.setdefault(report.task.stage, {})[report.task.partition] = worked
            emitted.update(report.emitted)
            samples.update(report.samples)
            for operator, change in report.states.items():
                states[operator].append(change)
        return Commit(
            epoch=opened.epoch,
            revision=opened.revision,
            operators=operators,
            tasks=len(reports),
            emitted=dict(emitted),
            states={operator: tuple(changes) for operator, changes in states.items()},
            watermarks=self._watermarks or self._seen(),
            widest_row=max((report.widest_row for report in reports), default=0),
            audits=tuple(sorted(report.audit for report in reports if report.audit is not None)),
            samples=samples,
            files={sink: tuple(written) for sink, written in files.items()},
            spans=spans,
            bin_rows={stage: tuple(packed) for stage, packed in bin_rows.items()},
            busy_us=busy_us,
            places=places,
            state_read=sum(report.state_read for report in reports),
            worker_memory=max((report.memory for report in reports), default=0),
        )

    def _times(self, stage: StageIndex) -> EpochTimes:
        """The times for a task of this stage.

        Tasks with state are behind an exchange, so all sources have been read and reported when the first one asks.
        Other tasks may start earlier, and do not need the epoch's own watermark.
        """
        before = self.opened.watermarks
        now = before
        if self.opened.lineages.get(stage):
            if self._watermarks is None:
                self._watermarks = self._seen()
            now = self._watermarks
        watermark = END_OF_TIME if self.opened.closing else now.watermark
        return EpochTimes(self.opened.clock, before.watermark, watermark)

    def _seen(self) -> Watermarks:
        """The watermarks after all event times reported so far."""
        latest: dict[str, int] = {}
        for reports in self._finished.values():
            for source, time in reports[0].event_times.items():
                latest[source] = max(time, latest.get(source, time))
        return self.opened.watermarks.after(latest, self.opened.clock)

    def _problem(self) -> str | None:
        """Why the epoch is not whole, or ``None``.

        Spark has reported that all its tasks succeeded. Two more things are checked: every partition that started has
        reported, and on every wire a stage received the rows that the stage before sent. If several attempts of a
        partition finished with different counts (a function that is not deterministic), any of them may be the one
        that counts, so it is enough that the two sides can agree.
        """
        if silent := sorted(set(self.attempts.started) - set(self._finished)):
            shown = ", ".join(f"stage {stage} partition {partition}" for stage, partition in silent[:5])
            return f"{len(silent)} started partition(s) never reported: {shown}"
        sent, received = _Ranges(), _Ranges()
        for (stage, _), reports in self._finished.items():
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
