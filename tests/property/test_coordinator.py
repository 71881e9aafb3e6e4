"""The coordinator against a cluster at its worst: tasks crash, retry, speculate, repeat themselves, speak out of turn
and outlive their runs, in any order. The test plays Spark and the tasks; the oracle knows what truly happened.
"""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    Accepted,
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
    TaskFailure,
    TaskFinished,
    TaskId,
    TaskOrder,
    TaskStarted,
    ToTask,
)
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex, WireId
from midstream.metrics import OperatorStats
from tests.examples import examples

STAGES, PARTITIONS = 3, 2
PLACES = [(stage, partition) for stage in range(STAGES) for partition in range(PARTITIONS)]
# Wire 0 goes from stage 0 to stage 1; wire 1 from stage 0 to stage 2, carried through stage 1.
ENDS = {0: (0, 1), 1: (0, 2)}

places = st.sampled_from(PLACES)


def rows_of(stage: int, partition: int) -> tuple[dict[WireId, int], dict[WireId, int]]:
    """What any attempt of a partition receives and sends: attempts are replays of one another.

    Each wire has twelve rows; partition 0 of a stage handles 5 of them on arrival and 7 on departure.
    """
    arriving, leaving = (5, 7) if partition == 0 else (7, 5)
    received = {WireId(wire): arriving for wire, (first, last) in ENDS.items() if first < stage <= last}
    sent = {WireId(wire): leaving for wire, (first, last) in ENDS.items() if first <= stage < last}
    return received, sent


def report(task: TaskId, lost: int = 0) -> TaskFinished:
    """A task's true report, or one in which ``lost`` rows went missing on the way in."""
    received, sent = rows_of(task.stage, task.partition)
    received = {wire: n - lost for wire, n in received.items()}
    # Powers of a base larger than any count of attempts: a sum tells how often each place was counted.
    rows = 1000 ** (PLACES.index((task.stage, task.partition)) % PARTITIONS)
    # The time it took tells which attempt was counted.
    stats = OperatorStats(f"stage {task.stage}", rows_in=rows, busy_us=task.attempt)
    return TaskFinished(task, (stats,), received, sent, sent)


def counts(operators: tuple[OperatorStats, ...]) -> dict[tuple[str, str], int]:
    rows = {(stats.operator, "rows"): stats.rows_in for stats in operators}
    return rows | {(stats.operator, "busy"): stats.busy_us for stats in operators}


class Cluster(RuleBasedStateMachine):
    """Spark and its tasks, as the coordinator hears them."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator()
        self.epoch, self.run = Epoch(0), Run(0)
        self.open = False
        self.attempts = 0
        self.alive: list[TaskId] = []  # attempts that may still speak, of any run
        self.forget()

    def forget(self) -> None:
        self.started: set[tuple[int, int]] = set()
        self.reports: dict[tuple[int, int], list[TaskFinished]] = {}
        self.failed: list[TaskId] = []

    # ── the driver ────────────────────────────────────────────────────────────────────────────────────────────────

    @initialize()
    def begin(self) -> None:
        self.open_run()

    @precondition(lambda self: not self.open)
    @rule()
    def open_run(self) -> None:
        programs = tuple(Digest(f"{self.epoch}.{self.run}.{stage}") for stage in range(STAGES))
        event = EpochOpened(self.epoch, self.run, Revision(self.epoch), programs, {StageIndex(1): PARTITIONS})
        assert self.coordinator.handle(event) == []
        self.open = True
        self.forget()
        for ghost in self.alive[-1:]:  # the latest attempt may not know yet that its run is over
            self.say_started(ghost)
            self.finish(ghost, lost=0)

    @precondition(lambda self: self.open)
    @rule()
    def abandon(self) -> None:
        assert self.coordinator.handle(EpochAbandoned(self.epoch, self.run)) == []
        self.open, self.run = False, Run(self.run + 1)

    @precondition(lambda self: self.open)
    @rule()
    def seal(self) -> None:
        """Spark says the epoch is done, which may be wrong: the coordinator must find out."""
        [verdict] = self.coordinator.handle(EpochSealed(self.epoch, self.run))
        if self.whole:
            assert isinstance(verdict, Commit), verdict
            self.check_counts(verdict)
            self.epoch, self.run = Epoch(self.epoch + 1), Run(0)
        else:
            assert isinstance(verdict, Reject), verdict
            self.run = Run(self.run + 1)
        self.open = False

    @precondition(lambda self: self.open)
    @rule(
        spared=st.none() | places,
        unlucky=st.none() | places,
        lost=st.sampled_from([1, -1]),
        again=st.lists(st.tuples(places, st.sampled_from([0, 0, 1, -1])), max_size=3),
    )
    def the_epoch_comes_to_its_end(
        self,
        spared: tuple[int, int] | None,
        unlucky: tuple[int, int] | None,
        lost: int,
        again: list[tuple[tuple[int, int], int]],
    ) -> None:
        """Chance alone would hardly ever bring it there. A place may not be run at all, lose rows, or run again."""
        rest = [(place, lost * (place == unlucky)) for place in PLACES if place not in self.reports and place != spared]
        for place, missing in rest + again:
            task = self.attempt(place)
            self.say_started(task)
            self.finish(task, missing)
        self.seal()

    @property
    def whole(self) -> bool:
        """Every started partition reported, and what was sent into each stage on each wire was received there."""
        if not self.started <= self.reports.keys():
            return False
        for stage, wire in itertools.product(range(1, STAGES), ENDS):
            sent = self.totals([[r.sent.get(WireId(wire), 0) for r in rs] for rs in self.at(stage - 1)])
            received = self.totals([[r.received.get(WireId(wire), 0) for r in rs] for rs in self.at(stage)])
            if max(sent) < min(received) or max(received) < min(sent):
                return False
        return True

    def at(self, stage: int) -> list[list[TaskFinished]]:
        return [reports for (at, _), reports in self.reports.items() if at == stage]

    @staticmethod
    def totals(choices: list[list[int]]) -> list[int]:
        """The sum for every choice of one finished attempt per partition."""
        return [sum(choice) for choice in itertools.product(*(set(each) for each in choices))]

    def check_counts(self, commit: Commit) -> None:
        """One attempt per partition, never none, never two."""
        assert (commit.epoch, commit.revision) == (self.epoch, Revision(self.epoch))
        assert commit.tasks == len(self.reports)
        rows: Counter[tuple[str, str]] = Counter()
        wires: Counter[WireId] = Counter()
        for finished, *_ in self.reports.values():
            rows.update(counts(finished.operators))
            wires.update(finished.emitted)
        assert counts(commit.operators) == rows
        assert commit.emitted == wires

    # ── tasks ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(place=places, heard=st.booleans())
    def a_task_starts(self, place: tuple[int, int], heard: bool) -> None:
        """A first, retried, speculative or recomputed attempt; its start may be heard later, or never."""
        task = self.attempt(place)
        if heard:
            self.say_started(task)

    def attempt(self, place: tuple[int, int]) -> TaskId:
        self.attempts += 1
        task = TaskId(self.epoch, self.run, StageIndex(place[0]), PartitionId(place[1]), self.attempts)
        self.alive.append(task)
        return task

    def say_started(self, task: TaskId) -> None:
        answer = self.say(task, TaskStarted(task))
        if self.current(task):
            program = Digest(f"{self.epoch}.{self.run}.{task.stage}")
            assert answer == TaskOrder(Revision(self.epoch), program)
            self.started.add((task.stage, task.partition))

    def finish(self, task: TaskId, lost: int) -> None:
        finished = report(task, lost)
        answer = self.say(task, finished)
        if self.current(task):
            assert answer == Accepted()
            self.reports.setdefault((task.stage, task.partition), []).append(finished)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), lost=st.sampled_from([0, 0, 0, 0, 0, 1, -1]))
    def some_task_finishes(self, data: st.DataObject, lost: int) -> None:
        """For the first time or again, of this run or of one that is over, before or after its start was heard."""
        self.finish(data.draw(st.sampled_from(self.alive), label="task"), lost)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def some_start_is_heard_late_or_again(self, data: st.DataObject) -> None:
        self.say_started(data.draw(st.sampled_from(self.alive), label="task"))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def some_task_fails(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.alive), label="task")
        answer = self.say(task, TaskFailed(task, TaskFailure("f", "error", None, "")))
        if self.current(task):
            assert answer == Accepted()
            self.failed.append(task)
            assert [report.task for report in self.coordinator.failures] == self.failed

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def some_task_is_killed(self, data: st.DataObject) -> None:
        self.alive.remove(data.draw(st.sampled_from(self.alive), label="task"))

    def current(self, task: TaskId) -> bool:
        return self.open and (task.epoch, task.run) == (self.epoch, self.run)

    def say(self, task: TaskId, message: FromTask) -> ToTask:
        """Every message gets exactly one answer, to the task that spoke; a stale task gets nothing but a refusal."""
        peer = str(task.attempt).encode()
        [instruction] = self.coordinator.handle(Received(peer, message))
        assert isinstance(instruction, Send)
        assert instruction.peer == peer
        assert isinstance(instruction.message, Refused) is not self.current(task)
        return instruction.message


TestCluster = Cluster.TestCase
TestCluster.settings = examples(100, stateful_step_count=30)
