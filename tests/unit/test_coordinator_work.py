"""A message costs the coordinator the same with few tasks as with many: nothing looks at all of them.

Measured as CPU time of this thread, so that other work on the machine hardly shows: with 32 times as many tasks, a look
at all of them for each message takes 32 times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.control_scale_alone import Begin, a_change, a_fast_operation, order_bytes, us_per_message
from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    ControlBegun,
    ControlNoted,
    EpochOpened,
    Handle,
    Handled,
    Instruction,
    Received,
    Send,
    TaskId,
    TaskStarted,
    WorkerId,
    WorkerJoined,
)
from midstream.control.operations.fast import Fast
from midstream.control.run_book import Place
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex

FEW, MANY = 64, 2048


@pytest.mark.parametrize("begin", [a_change, a_fast_operation])
def test_a_message_costs_the_same_with_many_tasks(begin: Begin):
    few, many = us_per_message(begin, FEW), us_per_message(begin, MANY)
    assert many < 6 * few, f"{few:.1f} µs with {FEW} tasks, {many:.1f} µs with {MANY}"


def test_an_order_is_as_long_with_many_tasks():
    (few, few_whole), (many, many_whole) = order_bytes(16), order_bytes(256)
    assert many / 256 < 1.5 * few / 16
    assert many_whole / 256 > 5 * few_whole / 16, (
        "what it would be with the lineage of all bins: else this says nothing"
    )


def test_operations_that_are_over_cost_nothing(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    on_handled = Fast.on_handled

    def counted(self: Fast, places: Sequence[Place], report: ControlReport) -> list[Instruction] | None:
        asked.append(1)
        return on_handled(self, places, report)

    monkeypatch.setattr(Fast, "on_handled", counted)
    coordinator, worker = Coordinator(), WorkerId("host", 1)
    task = TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(0), 1)
    coordinator.handle(EpochOpened(task.epoch, task.run, Revision(1), (Digest("p"),)))
    coordinator.handle(Received(b"lifeline", WorkerJoined(worker)))
    coordinator.handle(Received(b"task", TaskStarted(task, worker)))
    for number in range(1, 51):
        order = ControlOrder(number, "NoOp", ControlMode.FAST, Digest("ab"), ("a",), (StageIndex(0),), "")
        assert len(coordinator.handle(ControlBegun(order))) == 1
        [noted] = coordinator.handle(Received(b"lifeline", Handled(task, ControlReport(number, ("a",)))))
        assert noted == ControlNoted(number, (ControlReport(number, ("a",)),), 0)
    assert len(asked) == 50
    assert coordinator.handle(Received(b"lifeline", Handled(task, ControlReport(7, ("a",))))) == []  # said twice


def test_a_task_whose_worker_is_heard_of_late_is_asked_as_well():
    coordinator = Coordinator()
    tasks = [TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(each), each) for each in range(2)]
    workers = [WorkerId("host", each) for each in range(2)]
    coordinator.handle(EpochOpened(Epoch(0), Run(0), Revision(1), (Digest("p"),)))
    coordinator.handle(Received(b"0", WorkerJoined(workers[0])))
    for task, worker in zip(tasks, workers, strict=True):
        coordinator.handle(Received(b"task", TaskStarted(task, worker)))
    order = ControlOrder(1, "NoOp", ControlMode.FAST, Digest("ab"), ("a",), (StageIndex(0),), "")
    assert coordinator.handle(ControlBegun(order)) == [Send(b"0", Handle(tasks[0], order))]
    assert Send(b"1", Handle(tasks[1], order)) in coordinator.handle(Received(b"1", WorkerJoined(workers[1])))
    report = ControlReport(1, ("a",))
    assert coordinator.handle(Received(b"0", Handled(tasks[0], report))) == []
    assert coordinator.handle(Received(b"1", Handled(tasks[1], report))) == [ControlNoted(1, (report, report), 0)]
