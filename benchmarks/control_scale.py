"""How the control plane grows with the number of tasks (Chi's figure 9), in three parts.

*Alone*: the coordinator hears all messages of a change that takes effect within a run, and all answers to a fast
control operation, from tasks that exist only as their messages. *Orders*: the bytes that tasks of a stage with state
are sent when they start, beside what they would be if each got the lineage of the whole stage. *Sockets*: the real
channel and the real control plane; each endpoint is a client with a connection of its own, encrypted as always, in a
few processes. One fast operation, and one change, goes to all of them.

All endpoints share the cores of this machine with the driver, so the time until an operation is complete says little
about a cluster; what decides there is the driver's CPU time, which is measured apart. Messages go straight from the
driver to each task: there are no relays.

    python -m benchmarks.control_scale [--quick] [--plot FILE]
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks.report import arguments, closing_line, table
from midstream import Flow, ListSource, NoopSink, Update
from midstream.change.change import Change
from midstream.change.configuration import first_configuration
from midstream.change.prepare import PreparedChange, prepare
from midstream.checkpoint.change_records import ChangeRecord
from midstream.control.channel import Address, Client
from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    ChangeBegun,
    ChangeNoted,
    ControlBegun,
    ControlNoted,
    EpochOpened,
    Event,
    Exhausted,
    Handle,
    Handled,
    Instruction,
    Reached,
    Received,
    Send,
    Switch,
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
from midstream.runtime.spark.control_plane import ControlPlane
from midstream.state.files import FileRef
from midstream.state.lineage import Lineage
from midstream.storage.blobs import BlobStore

TASKS = (64, 256, 1_024, 4_096, 8_192)
ENDPOINTS = (1, 8, 64, 512, 2_048, 8_192)
PROCESSES = 4
WORKERS_PER_EXECUTOR = 8
EPOCHS_KEPT, BINS_TOUCHED, BINS = 10, 4, 16_384
PATIENCE_S = 120.0
SOCKETS_EACH = 4
"""Sockets of libzmq for a client, with those that tell it of its connection."""
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


# ── real sockets ──────────────────────────────────────────────────────────────────────────────────────────────────────


def endpoints(address: Address, mine: Sequence[int], count: int, told: Connection) -> None:
    """A process with some of the endpoints: each joins, starts its task, and answers what it is told."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_EACH * len(mine) + 8)
    clients, first = [], tasks(SOURCE, count)
    for task in (first[number] for number in mine):  # one by one: the server closes strangers if there are very many
        clients.append(client := Client(address, timeout=PATIENCE_S, context=context))
        client.request(WorkerJoined(worker(task)))
        client.request(TaskStarted(task, worker(task)))
    told.send("ready")
    for _ in range(2):
        for client in clients:
            match client.receive(PATIENCE_S):
                case Handle(task, order):
                    client.post(Handled(task, ControlReport(order.number, ("FM",))))
                case Switch(task, change):
                    client.request(SwitchRequested(task, change.revision, {Origin(-1): 5}))
                    client.post(Reached(task, change.revision, change.heads))
                case unexpected:
                    raise AssertionError(f"an endpoint was told {unexpected!r}")
        told.send("answered")
    told.recv()
    for client in clients:
        client.close()
    context.term()


class Finish:
    """Hears what the coordinator tells the driver, and knows when an operation is complete."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def hear(self, instructions: Sequence[Instruction]) -> None:
        """Called by the channel's thread."""
        for each in instructions:
            if isinstance(each, ControlNoted) or (isinstance(each, ChangeNoted) and each.in_effect):
                self._done.set()

    def wait(self) -> None:
        """Until the operation that is under way is complete."""
        if not self._done.wait(PATIENCE_S):
            raise TimeoutError(f"an operation was not complete after {PATIENCE_S:.0f} s")
        self._done.clear()


def sockets(count: int) -> dict[str, float]:
    """One fast operation and one change of all tasks: milliseconds until complete, and the driver's CPU time for it."""
    context = multiprocessing.get_context("spawn")
    plane, finish = ControlPlane("127.0.0.1"), Finish()
    plane.listen(finish.hear)
    plane.tell(run_of(count))
    running = []
    try:
        for number in range(min(PROCESSES, count)):
            here, there = context.Pipe()
            mine = range(number, count, min(PROCESSES, count))
            process = context.Process(target=endpoints, args=(plane.address, mine, count, there), daemon=True)
            process.start()
            there.close()
            running.append((process, here))
        _all_say(running, "ready")
        found = {}
        change = msgspec.structs.replace(BEGUN, followers={})
        for name, event in (("fast", ControlBegun(ORDER)), ("change", change)):
            began, cpu = time.perf_counter(), time.process_time()
            finish.hear(plane.tell(event))
            finish.wait()
            found[f"{name}_ms"] = round(1000 * (time.perf_counter() - began), 2)
            found[f"{name}_cpu_ms"] = round(1000 * (time.process_time() - cpu), 2)
            _all_say(running, "answered")
        for process, here in running:
            here.send("leave")
            process.join(PATIENCE_S)
        return found
    finally:
        for process, _ in running:
            process.terminate()
        plane.close()


def _all_say(running: Sequence[tuple[Any, Connection]], wanted: str) -> None:
    for process, here in running:
        if not here.poll(PATIENCE_S) or here.recv() != wanted:
            raise TimeoutError(f"process {process.pid} with endpoints did not say that it is {wanted}")


# ── the report ────────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    options = arguments(__doc__ or "").parse_args()
    counts, ends = (TASKS[:3], ENDPOINTS[:4]) if options.quick else (TASKS, ENDPOINTS)
    rounds = 1 if options.quick else 3
    alone = {
        name: {count: us_per_message(begin, count) for count in counts}
        for name, begin in (("change", a_change), ("fast", a_fast_operation))
    }
    sizes = {count: order_bytes(count) for count in counts}
    found: dict[int, dict[str, float]] = {}
    for count in ends:
        try:
            several = [sockets(count) for _ in range(1 if count > 1_000 else rounds)]
        except (TimeoutError, EOFError) as error:  # more than this machine, or its limits, can hold
            print(f"{count:,} endpoints could not be measured: {type(error).__name__}: {error}")
            break
        found[count] = {key: round(statistics.median(each[key] for each in several), 2) for key in several[0]}
    table(
        "The coordinator alone: CPU time of a message, and bytes of an order",
        ("tasks", "change", "fast operation", "an order", "with the whole lineage"),
        [
            (
                f"{count:,}",
                f"{alone['change'][count]} µs",
                f"{alone['fast'][count]} µs",
                f"{sizes[count][0] / count:,.0f} B",
                f"{sizes[count][1] / count:,.0f} B more",
            )
            for count in counts
        ],
    )
    table(
        "The channel: until all tasks are done, and the driver's CPU time",
        ("endpoints", "fast operation", "CPU", "change", "CPU"),
        [(f"{count:,}", *(f"{value:,.1f} ms" for value in each.values())) for count, each in _shown(found)],
    )
    if options.plot:
        _plot(options.plot, alone, found)
    last, few, many = ends[-1], counts[0], counts[-1]
    largest = found.get(last, {})
    figures: dict[str, Any] = {
        f"completion_{last}_ms": largest.get("fast_ms"),
        f"driver_cpu_{last}_ms": largest.get("fast_cpu_ms"),
        f"change_{last}_ms": largest.get("change_ms"),
        f"change_cpu_{last}_ms": largest.get("change_cpu_ms"),
        "work_growth": max(round(each[many] / each[few], 2) for each in alone.values()),
        "order_bytes": {count: round(size / count) for count, (size, _) in sizes.items()},
        "whole_lineage_bytes": {count: round(size / count) for count, (_, size) in sizes.items()},
        "coordinator_us": alone,
        "sockets": found,
        "relays": 0,
    }
    closing_line("control_scale", figures, quick=options.quick)


def _shown(found: dict[int, dict[str, float]]) -> list[tuple[int, dict[str, float]]]:
    order = ("fast_ms", "fast_cpu_ms", "change_ms", "change_cpu_ms")
    return [(count, {key: each[key] for key in order}) for count, each in found.items()]


def _plot(path: Path, alone: dict[str, dict[int, float]], found: dict[int, dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for name, values in alone.items():
        left.plot(list(values), list(values.values()), "o-", label=name)
    left.set_ylim(0, 1.5 * max(value for values in alone.values() for value in values.values()))
    left.set_xscale("log", base=2)
    left.set_xlabel("tasks")
    left.set_ylabel("µs of the coordinator for a message")
    for key, label in (("fast_ms", "fast operation: complete"), ("fast_cpu_ms", "fast operation: driver's CPU")):
        right.plot(list(found), [each[key] for each in found.values()], "o-", label=label)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xlabel("endpoints with connections of their own")
    right.set_ylabel("ms")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
