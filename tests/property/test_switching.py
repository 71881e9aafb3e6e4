"""Attempts of a partition come, go, ask and finish; all that finish have switched at the same row, or nowhere.

What a task says at its end it says under the new revision if it knows of the change. So all that finish know, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    Accepted,
    ChangeBegun,
    Commit,
    EpochOpened,
    EpochSealed,
    FromTask,
    Received,
    Send,
    Switch,
    SwitchRequested,
    TaskFailed,
    TaskFailure,
    TaskFinished,
    TaskId,
    TaskOrder,
    TaskStarted,
    ToTask,
    WorkerId,
    WorkerJoined,
)
from midstream.ids import Digest, Epoch, Origin, PartitionId, Revision, Run, StageIndex
from tests.examples import examples

ROWS = 10
ORIGIN = Origin(-1)
NOWHERE = ROWS + 1


@dataclass
class Attempt:
    """A task as the runtimes run it. ``switch`` is the row at which it switches."""

    task: TaskId
    knows: bool
    switch: int = NOWHERE
    at: int = 0
    is_told: bool = False
    has_asked: bool = False

    @property
    def ending(self) -> tuple[int, bool]:
        """What decides about all that it gives: where it switches, and the revision at its end."""
        return self.switch, self.knows


class Partition(RuleBasedStateMachine):
    """One partition of a stage, which hosts a head or stands behind one."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator()
        self.running: list[Attempt] = []
        self.finished: list[tuple[int, bool]] = []
        self.heads: dict[StageIndex, tuple[str, ...]] = {}
        self.started = 0
        self.has_begun = False

    @initialize(hosts_head=st.booleans())
    def open(self, hosts_head: bool) -> None:
        self.heads = {StageIndex(0): ("FM",)} if hosts_head else {}
        self.coordinator.handle(EpochOpened(Epoch(0), Run(0), Revision(1), (Digest("old"),)))

    @rule()
    def start(self) -> None:
        self.started += 1
        task = TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(0), self.started)
        worker = WorkerId("host", self.started)
        self.coordinator.handle(Received(str(worker).encode(), WorkerJoined(worker)))
        assignment = self.say(TaskStarted(task, worker))
        assert isinstance(assignment, TaskOrder)
        switch = NOWHERE if assignment.switch_at is None else assignment.switch_at.get(ORIGIN, 0)
        self.running.append(Attempt(task, assignment.change is not None, switch))

    @precondition(lambda self: not self.has_begun)
    @rule()
    def begin(self) -> None:
        self.has_begun = True
        told = self.coordinator.handle(ChangeBegun(Revision(2), (Digest("new"),), self.heads, {}))
        tasks = {each.message.task for each in told if isinstance(each, Send) and isinstance(each.message, Switch)}
        for attempt in self.running:
            attempt.is_told = attempt.task in tasks

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rows=st.integers(1, ROWS))
    def work(self, data: st.DataObject, rows: int) -> None:
        attempt = self.some(data)
        attempt.at = min(ROWS, attempt.at + rows)

    @precondition(lambda self: any(attempt.is_told and not attempt.has_asked for attempt in self.running))
    @rule(data=st.data(), repeats=st.booleans())
    def ask(self, data: st.DataObject, repeats: bool) -> None:
        attempt = data.draw(st.sampled_from([each for each in self.running if each.is_told and not each.has_asked]))
        attempt.has_asked = True
        asked = SwitchRequested(attempt.task, Revision(2), {ORIGIN: attempt.at})
        answer = self.say(asked)
        if isinstance(answer, Accepted):
            attempt.switch, attempt.knows = attempt.at, True
        if repeats:
            assert self.say(asked) == answer

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        attempt = self.some(data)
        self.running.remove(attempt)
        self.say(TaskFinished(attempt.task, (), {}, {}, {}))
        self.finished.append(attempt.ending)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), says_so=st.booleans())
    def die(self, data: st.DataObject, says_so: bool) -> None:
        attempt = self.some(data)
        self.running.remove(attempt)
        if says_so:
            self.say(TaskFailed(attempt.task, TaskFailure("FM", "boom", None, ""), Revision(1)))

    @invariant()
    def all_that_finished_are_alike(self) -> None:
        assert len(set(self.finished)) <= 1

    @invariant()
    def those_that_run_can_still_be_alike(self) -> None:
        """One that knows of the change, or was told that it must stay, cannot change its mind any more."""
        decided = {attempt.ending for attempt in self.running if attempt.knows or attempt.has_asked}
        assert len(decided | set(self.finished)) <= 1

    def teardown(self) -> None:
        if self.finished:
            [commit] = self.coordinator.handle(EpochSealed(Epoch(0), Run(0)))
            assert isinstance(commit, Commit)
            assert commit.revision == (2 if self.has_begun else 1)
            for point in commit.switches:
                wanted = NOWHERE if point.position is None else point.position.get(ORIGIN, 0)
                assert self.finished[0][0] == wanted

    def some(self, data: st.DataObject) -> Attempt:
        return data.draw(st.sampled_from(self.running))

    def say(self, message: FromTask) -> ToTask:
        answers = self.coordinator.handle(Received(b"task", message))
        return next(each.message for each in answers if isinstance(each, Send))


TestPartition = Partition.TestCase
TestPartition.settings = examples(100, stateful_step_count=20)
