"""Assignments are sent once to each process for each step of a migration."""

from __future__ import annotations

import pytest

from midstream.control.coordinator import Coordinator
from midstream.control.messages import EpochOpened, Received, Send, TaskId, TaskOrder, TaskStarted
from midstream.errors import ProtocolError
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex
from midstream.planner.assignment import Assignment, Assignments, pack_assignments, spread
from midstream.runtime.known_assignments import KnownAssignments

STAGE = StageIndex(1)
EVEN: Assignments = {STAGE: spread(2, bins=4)}
MOVED: Assignments = {STAGE: Assignment(3, (2, 1, 0, 1))}


class Job:
    """A coordinator, and one process of tasks."""

    def __init__(self) -> None:
        self.coordinator = Coordinator()
        self.known = KnownAssignments()
        self.epoch = 0

    def open(self, assignments: Assignments) -> None:
        owners = pack_assignments(assignments)
        self.epoch += 1
        opened = EpochOpened(
            Epoch(self.epoch),
            Run(self.epoch),
            Revision(1),
            (Digest("ab"),),
            assignments=owners.digest,
            owners=owners.data,
        )
        self.coordinator = Coordinator()
        self.coordinator.handle(opened)

    def start(self, known: KnownAssignments) -> TaskOrder:
        task = TaskId(Epoch(self.epoch), Run(self.epoch), StageIndex(0), PartitionId(0), attempt=1)
        [sent] = self.coordinator.handle(Received(b"peer", TaskStarted(task, assignments=known.digest)))
        assert isinstance(sent, Send)
        assert isinstance(sent.message, TaskOrder)
        return sent.message

    def learn(self) -> TaskOrder:
        order = self.start(self.known)
        self.known = self.known.under(order)
        return order


def test_a_process_is_sent_owners_with_the_first_order_that_has_others() -> None:
    job = Job()
    job.open(EVEN)
    assert job.learn().owners is not None
    assert job.known.assignments == EVEN
    before = job.known
    job.open(EVEN)
    assert job.learn().owners is None
    assert job.known is before, "what was computed for them stays"
    job.open(MOVED)
    assert job.learn().owners is not None
    assert job.known.assignments == MOVED


def test_an_order_that_answers_another_question_is_not_guessed_at() -> None:
    job = Job()
    job.open(EVEN)
    job.learn()
    order = job.start(job.known)
    with pytest.raises(ProtocolError, match="its process knows '' only"):
        KnownAssignments().under(order)
