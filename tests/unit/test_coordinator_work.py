"""A message costs the coordinator the same with few tasks as with many: nothing looks at all of them.

Measured as CPU time of this thread, so that other work on the machine hardly shows: with 32 times as many tasks, a look
at all of them for each message takes 32 times as long.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from midstream import Flow, ListSource, NoopSink, Update
from midstream.change.change import Change
from midstream.change.configuration import first_configuration
from midstream.change.prepare import PreparedChange, prepare
from midstream.checkpoint.change_records import ChangeRecord
from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    ChangeBegun,
    ChangeNoted,
    ControlBegun,
    EpochOpened,
    Event,
    Exhausted,
    Handled,
    Reached,
    Received,
    SwitchRequested,
    TaskFinished,
    TaskId,
    TaskStarted,
    WorkerId,
    WorkerJoined,
)
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.ids import Digest, Epoch, ExecutorId, Origin, PartitionId, Revision, Run, StageIndex
from midstream.storage.blobs import BlobStore

FEW, MANY = 64, 2048
SOURCE, BEHIND = StageIndex(0), StageIndex(1)
BEGUN = ChangeBegun(Revision(2), (Digest("c"), Digest("d")), {SOURCE: ("FM",)}, {BEHIND: ("MC",)})
ORDER = ControlOrder(1, "Look", ControlMode.FAST, Digest("ab"), ("FM",), (SOURCE,), "")


def tasks(stage: StageIndex, count: int) -> list[TaskId]:
    return [TaskId(Epoch(0), Run(0), stage, PartitionId(each), 2 * each + stage) for each in range(count)]


def worker(task: TaskId) -> WorkerId:
    return WorkerId("host", task.partition, ExecutorId(str(task.partition % 8)))


def opened(count: int) -> tuple[Coordinator, list[TaskId]]:
    """A run, all of whose source tasks have started; and the later tasks."""
    coordinator = Coordinator()
    places = {BEHIND: {PartitionId(each): ExecutorId(str(each % 8)) for each in range(count)}}
    coordinator.handle(
        EpochOpened(Epoch(0), Run(0), Revision(1), (Digest("a"), Digest("b")), {BEHIND: count}, places=places)
    )
    for task in tasks(SOURCE, count):
        coordinator.handle(Received(b"%d" % task.partition, WorkerJoined(worker(task))))
        coordinator.handle(Received(b"task", TaskStarted(task, worker(task))))
    return coordinator, tasks(SOURCE, count)


@cache
def prepared_change() -> PreparedChange:
    """Any: what the driver notes of a change does not depend on it."""
    flow = Flow("work")
    flow.source("in", ListSource([[]], "n bigint")).map("FM", same).sink("out", NoopSink())
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(folder, durable=False)
        before = first_configuration(flow.graph, store, 1)
        return prepare(before, [Update("FM", other)], store, revision=Revision(2))


def same(row: Any) -> Any:
    return row


def other(row: Any) -> Any:
    return {**row, "n": 2}


def a_change(count: int) -> tuple[Callable[[Event], object], Iterator[Event]]:
    """All messages of a change that takes effect within a run, as they come to the driver."""
    coordinator, sources = opened(count)
    prepared = prepared_change()
    change = Change(prepared, ChangeRecord(1, Revision(2), 0.0, "ann@host", "fries", (), ""), time.monotonic)
    coordinator.handle(BEGUN)

    def heard(event: Event) -> None:
        for noted in coordinator.handle(event):
            if isinstance(noted, ChangeNoted):
                change.note(noted.what, str(noted.task), noted.operators, in_effect=noted.in_effect)

    def messages() -> Iterator[Event]:
        for task in sources:
            yield Received(b"task", SwitchRequested(task, Revision(2), {Origin(-1): 5}))
            yield Received(b"task", Reached(task, Revision(2), ("FM",)))
            yield Received(b"task", Exhausted(task, Revision(2)))
        for task in sources:
            yield Received(b"task", TaskFinished(task, (), {}, {}, {}))
        for task in tasks(BEHIND, count):
            yield Received(b"task", TaskStarted(task, worker(task)))
            yield Received(b"task", Reached(task, Revision(2), ("MC",)))
        for task in tasks(BEHIND, count):
            yield Received(b"task", TaskFinished(task, (), {}, {}, {}))
        assert change.delay_ms is not None
        assert len(change.events) == 6 * count

    return heard, messages()


def a_fast_operation(count: int) -> tuple[Callable[[Event], object], Iterator[Event]]:
    """All answers of tasks to a fast control operation."""
    coordinator, sources = opened(count)
    assert len(coordinator.handle(ControlBegun(ORDER))) == count
    return coordinator.handle, (Received(b"task", Handled(task, ControlReport(1, ("FM",)))) for task in sources)


def us_per_message(begin: Callable[[int], tuple[Callable[[Event], object], Iterator[Event]]], count: int) -> float:
    """Of the quickest of three rounds."""
    taken = []
    for _ in range(3):
        heard, messages = begin(count)
        gc.collect()
        gc.disable()
        try:
            began, number = time.thread_time_ns(), 0
            for number, message in enumerate(messages, 1):  # noqa: B007
                heard(message)
            taken.append((time.thread_time_ns() - began) / 1000 / number)
        finally:
            gc.enable()
    return min(taken)


@pytest.mark.parametrize("begin", [a_change, a_fast_operation])
def test_a_message_costs_the_same_with_many_tasks(
    begin: Callable[[int], tuple[Callable[[Event], object], Iterator[Event]]],
):
    few, many = us_per_message(begin, FEW), us_per_message(begin, MANY)
    assert many < 6 * few, f"{few:.1f} µs with {FEW} tasks, {many:.1f} µs with {MANY}"
