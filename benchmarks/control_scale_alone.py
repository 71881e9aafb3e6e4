"""The first two parts of :mod:`benchmarks.control_scale`: the coordinator alone, and the bytes of orders."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec

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
    Send,
    SwitchRequested,
    TaskFinished,
    TaskId,
    TaskOrder,
    TaskStarted,
    WorkerId,
    WorkerJoined,
)
from midstream.data.key_space import KeySpace
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.ids import BinId, Digest, Epoch, ExecutorId, Origin, PartitionId, Revision, Run, StageIndex
from midstream.planner.assignment import pack_assignments, spread
from midstream.state.files import FileRef
from midstream.state.lineage import Lineage
from midstream.storage.blobs import BlobStore

WORKERS_PER_EXECUTOR = 8
EPOCHS_KEPT, BINS_TOUCHED, BINS = 10, 4, 16_384
SOURCE, BEHIND = StageIndex(0), StageIndex(1)
BEGUN = ChangeBegun(Revision(2), (Digest("c"), Digest("d")), {SOURCE: ("FM",)}, {BEHIND: ("MC",)})
ORDER = ControlOrder(1, "Look", ControlMode.FAST, Digest("ab"), ("FM",), (SOURCE,), "")
Begin = Callable[[int], tuple[Callable[[Event], object], Iterator[Event]]]


# ── the coordinator alone ─────────────────────────────────────────────────────────────────────────────────────────────


def tasks(stage: StageIndex, count: int) -> list[TaskId]:
    """One attempt of each partition."""
    return [TaskId(Epoch(0), Run(0), stage, PartitionId(each), 2 * each + stage) for each in range(count)]


def worker(task: TaskId) -> WorkerId:
    """Each task runs in a process of its own."""
    return WorkerId("host", task.partition, ExecutorId(str(task.partition // WORKERS_PER_EXECUTOR)))


def run_of(count: int) -> EpochOpened:
    """A run with as many tasks before an exchange as behind it."""
    places = {BEHIND: {task.partition: worker(task).executor for task in tasks(BEHIND, count)}}
    return EpochOpened(Epoch(0), Run(0), Revision(1), (Digest("a"), Digest("b")), {BEHIND: count}, places=places)


def started(count: int) -> tuple[Coordinator, list[TaskId]]:
    """A run, all of whose first tasks have started."""
    coordinator, first = Coordinator(), tasks(SOURCE, count)
    coordinator.handle(run_of(count))
    for task in first:
        coordinator.handle(Received(b"%d" % task.partition, WorkerJoined(worker(task))))
        coordinator.handle(Received(b"task", TaskStarted(task, worker(task))))
    return coordinator, first


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
    """The old version."""
    return row


def other(row: Any) -> Any:
    """The new one."""
    return {**row, "n": 2}


def a_change(count: int) -> tuple[Callable[[Event], object], Iterator[Event]]:
    """All messages of a change that takes effect within a run, and what takes them, with the driver's notes."""
    coordinator, sources = started(count)
    record = ChangeRecord(1, Revision(2), 0.0, "ann@host", "fries", (), "")
    change = Change(prepared_change(), record, time.monotonic)
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
    """All answers of tasks to a fast control operation, and what takes them."""
    coordinator, sources = started(count)
    told = coordinator.handle(ControlBegun(ORDER))
    assert len(told) == count
    return coordinator.handle, (Received(b"task", Handled(task, ControlReport(1, ("FM",)))) for task in sources)


def us_per_message(begin: Begin, count: int, rounds: int = 3) -> float:
    """CPU time of a message, in the quickest of some rounds."""
    taken = []
    for _ in range(rounds):
        heard, events = begin(count)
        gc.collect()
        gc.disable()
        try:
            began, number = time.thread_time_ns(), 0
            for event in events:
                heard(event)
                number += 1
            taken.append((time.thread_time_ns() - began) / 1000 / number)
        finally:
            gc.enable()
    return round(min(taken), 2)


# ── the bytes of orders ───────────────────────────────────────────────────────────────────────────────────────────────


def order_bytes(count: int) -> tuple[int, int]:
    """Bytes of all orders of a stage's tasks, and of the lineage of the stage times the number of tasks."""
    space, assignment = KeySpace(BINS), spread(count, BINS)
    lineage = Lineage.start("count", BINS)
    for epoch in range(EPOCHS_KEPT):
        deltas = []
        for each in range(count):
            bins = assignment.owned_by(PartitionId(each))[:BINS_TOUCHED]
            digest = f"{epoch}-{each}".rjust(16, "-").encode()
            name = f"count/{epoch:010d}-0-{each}-{each}-delta-{digest.hex()[-16:]}.arrow"
            deltas.append(FileRef(name, 1000, digest, 3 * len(bins), space.pack(map(BinId, bins)), (3,) * len(bins)))
        lineage = lineage.after(Epoch(epoch), deltas)
    blob, whole = pack_assignments({BEHIND: assignment}), lineage.encode()
    coordinator = Coordinator()
    opened = run_of(count)
    coordinator.handle(
        msgspec.structs.replace(opened, lineages={BEHIND: {"count": whole}}, assignments=blob.digest, owners=blob.data)
    )
    total = 0
    for task in tasks(BEHIND, count):
        [sent] = coordinator.handle(Received(b"task", TaskStarted(task, worker(task), blob.digest)))
        assert isinstance(sent, Send)
        assert isinstance(sent.message, TaskOrder)
        total += len(msgspec.msgpack.encode(sent.message))
    return total, count * len(whole)
