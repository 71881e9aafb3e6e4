"""The third part of :mod:`benchmarks.control_scale`: real connections, straight to the driver or through relays."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq

from benchmarks.control_scale_alone import BEGUN, ORDER, SOURCE, run_of, tasks, worker
from midstream.control.channel import Address, Client
from midstream.control.messages import (
    ChangeNoted,
    ControlBegun,
    ControlNoted,
    Event,
    FromRelay,
    Handle,
    Handled,
    Instruction,
    Reached,
    RelayJoined,
    Said,
    Switch,
    SwitchRequested,
    TaskStarted,
    ToWorkers,
    WorkerJoined,
)
from midstream.control.relay import Relay
from midstream.control.relayed import JointReports, unfold
from midstream.engine.control_order import ControlReport
from midstream.ids import Origin
from midstream.runtime.spark.control_plane import ControlPlane

PROCESSES, ENDPOINTS_EACH = 8, 128
"""Most processes with endpoints, and how many one has before there is another."""
RELAY_PROCESSES, RELAYS_EACH = 2, 16
WORKERS_PER_RELAY = 32
FAST_OPERATIONS = 5
PATIENCE_S = 100.0
SOCKETS_EACH = 8
"""Sockets of libzmq for an endpoint's two clients, with those that tell them of their connections."""
ROUND_TRIPS = 2_000


def relays(address: Address, count: int, told: Connection) -> None:
    """A process with some relays. Says where they listen, and when asked how much CPU time it has used."""
    logging.basicConfig(level=logging.INFO)  # a relay that ends says why
    opened = [Relay(address, worker(tasks(SOURCE, 1)[0]), PATIENCE_S) for _ in range(count)]
    told.send([relay.address for relay in opened])
    while told.recv() == "cpu":
        told.send(time.process_time())
    for relay in opened:
        relay.close()


def endpoints(address: Address, lifelines: Sequence[Address], mine: range, count: int, told: Connection) -> None:
    """A process with some of the endpoints: each joins, starts its task, and answers what it is told.

    Where there are relays, ``lifelines`` are their addresses, and an endpoint's requests have a connection of their
    own to the driver, as those of workers.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_EACH * len(mine) + 8)
    first, ends = tasks(SOURCE, count), []
    for number in mine:  # one by one: the server closes strangers if there are very many
        task = first[number]
        requests = lifeline = Client(address, timeout=PATIENCE_S, context=context)
        if lifelines:
            lifeline = Client(lifelines[number // WORKERS_PER_RELAY], timeout=PATIENCE_S, context=context)
        lifeline.request(WorkerJoined(worker(task)))
        requests.request(TaskStarted(task, worker(task)))
        ends.append((lifeline, requests))
    told.send("ready")
    for _ in range(FAST_OPERATIONS + 1):
        for lifeline, requests in ends:
            match lifeline.receive(PATIENCE_S):
                case Handle(task, order):
                    lifeline.post(Handled(task, ControlReport(order.number, ("FM",))))
                case Switch(task, change):
                    requests.request(SwitchRequested(task, change.revision, {Origin(-1): 5}))
                    requests.post(Reached(task, change.revision, change.heads))
                case unexpected:
                    raise AssertionError(f"an endpoint was told {unexpected!r}")
        told.send("answered")
    told.recv()
    for lifeline, requests in ends:
        lifeline.close()
        requests.close()
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


def sockets(count: int, *, through_relays: bool = False, with_workers: bool = True) -> dict[str, float]:
    """Fast operations and one change of all tasks: milliseconds until complete, and the driver's CPU time for it.

    Of fast operations the median is given, with the CPU time of a relay. Without workers, relays are stand-ins.
    """
    context = multiprocessing.get_context("spawn")
    plane, finish = ControlPlane("127.0.0.1"), Finish()
    plane.listen(finish.hear)
    plane.tell(run_of(count))
    relaying: list[tuple[Any, Connection]] = []
    running: list[tuple[Any, Connection]] = []
    lifelines: list[Address] = []
    try:
        if through_relays and with_workers:
            wanted = -(-count // WORKERS_PER_RELAY)
            for part in _parts(wanted, RELAY_PROCESSES, RELAYS_EACH):
                relaying.append(_start(context, relays, plane.address, len(part)))
            for process, here in relaying:
                lifelines += _heard(process, here)
        if not with_workers:
            running.append(_start(context, stand_ins, plane.address, count))
        for mine in _parts(count, PROCESSES, ENDPOINTS_EACH) if with_workers else ():
            running.append(_start(context, endpoints, plane.address, lifelines, mine, count))
        _all_say(running, "ready")
        until = time.monotonic() + PATIENCE_S
        while len(plane._coordinator.workers) < count:  # what relays hand on may arrive a moment later
            if time.monotonic() > until:
                raise TimeoutError(f"only {len(plane._coordinator.workers)} of {count} endpoints have joined")
            time.sleep(0.01)
        orders = [msgspec.structs.replace(ORDER, number=number + 1) for number in range(FAST_OPERATIONS)]
        events: list[tuple[str, Event]] = [("fast", ControlBegun(order)) for order in orders]
        events.append(("change", msgspec.structs.replace(BEGUN, followers={})))
        found: dict[str, list[float]] = {}
        for name, event in events:
            relays_cpu = _cpu(relaying)
            began, cpu = time.perf_counter(), time.process_time()
            finish.hear(plane.tell(event))
            finish.wait()
            found.setdefault(f"{name}_ms", []).append(1000 * (time.perf_counter() - began))
            found.setdefault(f"{name}_cpu_ms", []).append(1000 * (time.process_time() - cpu))
            _all_say(running, "answered")
            if lifelines:
                spent = 1000 * (_cpu(relaying) - relays_cpu) / len(lifelines)
                found.setdefault(f"{name}_relay_cpu_ms", []).append(spent)
        for process, here in [*running, *relaying]:
            here.send("leave")
            process.join(PATIENCE_S)
        return {name: round(statistics.median(values), 2) for name, values in found.items()}
    finally:
        for process, _ in [*running, *relaying]:
            process.terminate()
        plane.close()


def stand_ins(address: Address, count: int, told: Connection) -> None:
    """A process with a connection to the driver for each relay of a tree. What a relay decides is real; its workers are
    not there: their answers are, at once. Their requests go over the relay's connection, which costs the driver the
    same."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_EACH * -(-count // WORKERS_PER_RELAY) + 8)
    first, links = tasks(SOURCE, count), []
    for mine in (first[start : start + WORKERS_PER_RELAY] for start in range(0, count, WORKERS_PER_RELAY)):
        links.append(link := Client(address, timeout=PATIENCE_S, context=context))
        link.request(RelayJoined(worker(mine[0])))
        link.post(FromRelay(tuple(Said(number, WorkerJoined(worker(task))) for number, task in enumerate(mine))))
        for task in mine:
            link.request(TaskStarted(task, worker(task)))
    told.send("ready")
    for _ in range(FAST_OPERATIONS + 1):
        for link in links:
            packet, reports = link.receive(PATIENCE_S), JointReports()
            assert isinstance(packet, ToWorkers)
            reports.told(packet)
            for number, message in unfold(packet):
                if isinstance(message, Handle):
                    reports.heard(number, Handled(message.task, ControlReport(message.order.number, ("FM",))), now=0.0)
                elif isinstance(message, Switch):
                    change = message.change
                    link.request(SwitchRequested(message.task, change.revision, {Origin(-1): 5}))
                    link.post(Reached(message.task, change.revision, change.heads))
            if (answers := reports.take(now=0.0)) is not None:
                link.post(answers)
        told.send("answered")
    told.recv()
    for link in links:
        link.close()
    context.term()


def hop_ms() -> float:
    """Half of a round trip from another process to the driver and back: median of many."""
    context = multiprocessing.get_context("spawn")
    plane = ControlPlane("127.0.0.1")
    try:
        process, here = _start(context, round_trips, plane.address)
        found: float = _heard(process, here)
        process.join(PATIENCE_S)
    finally:
        plane.close()
    return round(found / 2, 3)


def round_trips(address: Address, told: Connection) -> None:
    """A process with one client that asks again and again: milliseconds from request to answer."""
    name, taken = worker(tasks(SOURCE, 1)[0]), []
    with Client(address, timeout=PATIENCE_S) as client:
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            client.request(WorkerJoined(name))
            taken.append(1000 * (time.perf_counter() - began))
    told.send(statistics.median(taken))


def modelled_ms(driver_cpu_ms: float, relay_cpu_ms: float, hop: float) -> float:
    """Until a fast operation is complete where every worker and every relay has a core of its own: all of the driver's
    work, one after the other, a relay's fan-out and merging, and four hops: to the relay, to its last worker, and
    back."""
    return round(driver_cpu_ms + relay_cpu_ms + 4 * hop, 2)


def _parts(count: int, most: int, each: int) -> list[range]:
    """The numbers below ``count`` in about equal parts: one for every ``each``, and at most so many."""
    parts = min(most, -(-count // each))
    edges = [count * part // parts for part in range(parts + 1)]
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def _start(context: Any, work: Any, *args: Any) -> tuple[Any, Connection]:
    here, there = context.Pipe()
    process = context.Process(target=work, args=(*args, there), daemon=True)
    process.start()
    there.close()
    return process, here


def _heard(process: Any, here: Connection) -> Any:
    if not here.poll(PATIENCE_S):
        raise TimeoutError(f"process {process.pid} has said nothing for {PATIENCE_S:.0f} s")
    return here.recv()


def _cpu(relaying: Sequence[tuple[Any, Connection]]) -> float:
    for _, here in relaying:
        here.send("cpu")
    return float(sum(_heard(process, here) for process, here in relaying))


def _all_say(running: Sequence[tuple[Any, Connection]], wanted: str) -> None:
    for process, here in running:
        if (said := _heard(process, here)) != wanted:
            raise TimeoutError(f"process {process.pid} with endpoints said {said!r}, not {wanted!r}")
