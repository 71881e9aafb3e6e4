"""Relays with real connections and processes: they are killed and stopped, strangers come, jobs share a host."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from midstream.control.channel import Address, Client
from midstream.control.messages import (
    ControlBegun,
    ControlNoted,
    EpochOpened,
    FromTask,
    Handle,
    Handled,
    Instruction,
    TaskFinished,
    TaskId,
    TaskOrder,
    TaskStarted,
    WorkerId,
    WorkerJoined,
    WorkerReleased,
)
from midstream.control.relay import Relay
from midstream.control.relay_file import RelayFile
from midstream.control.relayed import relay_of
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.errors import ChannelError
from midstream.ids import Digest, Epoch, ExecutorId, PartitionId, Revision, Run, StageIndex
from midstream.runtime.spark import control_plane
from midstream.runtime.spark.control_plane import ControlPlane
from midstream.runtime.spark.lifeline import Lifeline
from midstream.runtime.spark.worker import Whereabouts, _Worker

LONG = 60.0  # seconds; only a failing test waits this long

# A worker with a task. It says what happens to it, and answers an operation when it is told to on its standard input.
WORKER = """
import base64, os, pickle, sys
from midstream.control import channel
from midstream.control.messages import Handle, Handled, TaskStarted, WorkerId, WorkerReleased
from midstream.engine.control_order import ControlReport
from midstream.ids import ExecutorId
from midstream.runtime.spark import lifeline

address, folder, task = pickle.loads(base64.b64decode(sys.argv[1]))
channel._HEARTBEAT_EVERY, channel._HEARTBEAT_LIMIT = 50, 1_000
lifeline.RELAY_S = lifeline.ANSWER_S = 0.5
name, may_answer = WorkerId("host", os.getpid(), ExecutorId("1")), False
requests = channel.Client(address)
mine = lifeline.Lifeline(address, name, 10.0, folder)
for message in mine.messages(lambda: (requests.request(TaskStarted(task, name)), print("joined", flush=True))):
    print(type(message).__name__, flush=True)
    may_answer = may_answer or bool(sys.stdin.readline())
    mine.post(Handled(message.task, ControlReport(message.order.number, ("m",))))
mine.post(WorkerReleased(name))
mine.close()
print("over", flush=True)
sys.stdin.read()  # Spark keeps the process
"""


def order_of(number: int) -> ControlOrder:
    return ControlOrder(number, "Look", ControlMode.FAST, Digest("ab"), ("m",), (StageIndex(0),), "")


class Driver:
    """A control plane with a run, and what it tells the driver."""

    def __init__(self) -> None:
        self.plane = ControlPlane("127.0.0.1")
        self.plane.listen(self.hear)
        self.plane.tell(EpochOpened(Epoch(0), Run(0), Revision(1), (Digest("a"),)))
        self.noted: list[ControlNoted] = []
        self._done = threading.Event()

    def hear(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, ControlNoted):
                self.noted.append(each)
                self._done.set()

    def knows(self, workers: int) -> None:
        """Wait until it has heard of as many workers: a relay tells them that they have joined before it tells it."""
        changed, known = self.plane._changed, self.plane._coordinator
        with changed:
            assert changed.wait_for(lambda: len(known.workers) >= workers, LONG)

    def ask(self, number: int = 1) -> None:
        self._done.clear()
        self.hear(self.plane.tell(ControlBegun(order_of(number))))

    def wait(self) -> ControlNoted:
        assert self._done.wait(LONG), "the operation is not complete"
        return self.noted[-1]

    def relayed(self) -> int:
        """How many workers are behind relays."""
        return sum(relay_of(at) is not None for at in self.plane._coordinator._workers.values())


@pytest.fixture
def driver() -> Iterator[Driver]:
    found = Driver()
    yield found
    found.plane.close()


def task_of(partition: int, attempt: int = 0) -> TaskId:
    return TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(partition), attempt)


Process = subprocess.Popen[str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Address, int], Process]]:
    """Starts a worker that has joined; the first one of a job is the relay."""
    with contextlib.ExitStack() as stack:

        def begin(address: Address, partition: int) -> Process:
            packed = base64.b64encode(pickle.dumps((address, str(tmp_path), task_of(partition)))).decode()
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER, packed],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            says(process, "joined")
            return process

        yield begin


def says(process: Process, *expected: str) -> None:
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in expected] == list(expected)


def answer(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write("answer\n")
    process.stdin.flush()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_operation_is_completed_although_the_relay_dies_or_stops_between_telling_and_answers(
    driver: Driver, start: Callable[[Address, int], Process], how: signal.Signals
) -> None:
    relay, *others = [start(driver.plane.address, partition) for partition in range(3)]
    driver.knows(3)
    driver.ask()
    for process in (relay, *others):
        says(process, "Handle")
    assert driver.relayed() == 3
    relay.send_signal(how)
    for process in others:
        answer(process)  # into a connection that leads nowhere
        says(process, "joined", "Handle")
    with Client(driver.plane.address) as spark:  # runs the third task again, elsewhere
        order = spark.request(TaskStarted(task_of(0, attempt=1), WorkerId("host", 1)))
        assert isinstance(order, TaskOrder)
        assert [each.number for each in order.controls] == [1]
        spark.post(Handled(task_of(0, attempt=1), ControlReport(1, ("m",))))
        assert [len(driver.wait().reports), driver.wait().missed] == [3, 0]
    assert len(driver.noted) == 1
    assert driver.relayed() == (3 if how is signal.SIGKILL else 1), "a relay that stands still cannot be replaced"
    relay.kill()


def test_answers_of_all_workers_come_through_the_relay(
    driver: Driver, start: Callable[[Address, int], Process]
) -> None:
    processes = [start(driver.plane.address, partition) for partition in range(4)]
    driver.knows(4)
    driver.ask()
    for process in processes:
        says(process, "Handle")
        answer(process)
    assert len(driver.wait().reports) == 4
    assert any("FromRelay" in line for line in driver.plane._coordinator.story)
    assert not any(line.startswith("Handled") for line in driver.plane._coordinator.story)
    driver.plane.close()
    for process in processes:
        says(process, "over")


def test_a_relay_of_a_driver_that_is_gone_ends_and_so_do_its_workers(
    driver: Driver, start: Callable[[Address, int], Process]
) -> None:
    processes = [start(driver.plane.address, partition) for partition in range(2)]
    driver.plane._server.close()  # without a word
    for process in processes:
        assert process.wait(LONG) == 1
        assert process.stdout is not None
        assert process.stdout.read() == "", "it has not joined anywhere"


class Listener:
    """A lifeline in a thread of this process."""

    def __init__(self, address: Address, number: int, folder: str | None) -> None:
        self.joined = threading.Event()
        self.name = WorkerId("host", number, ExecutorId("1"))
        self.lifeline = Lifeline(address, self.name, 10.0, folder)
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()
        assert self.joined.wait(LONG)

    def _listen(self) -> None:
        with contextlib.closing(self.lifeline):
            for _ in self.lifeline.messages(self.joined.set):
                pass
            self.lifeline.post(WorkerReleased(self.name))


def test_the_end_of_a_job_reaches_all_workers_and_comes_back(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "RELEASE_TIMEOUT_S", 10 * LONG)
    listeners = [Listener(driver.plane.address, number, str(tmp_path)) for number in range(3)]
    relay = listeners[0].lifeline._relay
    assert relay is not None
    gone = Client(relay.address)
    gone.request(WorkerJoined(WorkerId("host", 9)))
    gone.close()  # as Spark ends a worker: it says nothing
    driver.plane.close()
    for listener in listeners:
        listener.thread.join(LONG)
        assert not listener.thread.is_alive()
    relay._thread.join(LONG)
    assert not relay._thread.is_alive(), "it ends with the job"
    assert not driver.plane._coordinator.workers


def test_an_answer_arrives_before_the_end_of_its_task_and_is_given_again_when_it_is_asked_for_again(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    folder = str(tmp_path)
    worker = _Worker(Whereabouts(driver.plane.address, "job", folder, folder, str(tmp_path / "own"), relays=True))
    with driver.plane._changed:  # the relay hands on that it has joined
        assert driver.plane._changed.wait_for(lambda: driver.plane._coordinator.workers, LONG)
    worker.ask(TaskStarted(task_of(0), worker.name))
    driver.ask()
    answer = Handled(task_of(0), ControlReport(1, ("m",)))
    worker._post(answer)
    worker.ask(TaskFinished(task_of(0), (), {}, {}, {}))
    assert (len(driver.wait().reports), driver.noted[0].missed) == (1, 0)
    story = [line.partition("(")[0] for line in driver.plane._coordinator.story]
    assert story.index("Handled") < story.index("TaskFinished"), "straight to the driver, not only through the relay"
    again: list[FromTask] = []
    worker._handle(Handle(task_of(0), order_of(1)), again.append)
    assert again == [answer]
    driver.plane.close()


def test_where_there_can_be_no_relay_the_driver_tells_workers_itself(
    driver: Driver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "midstream"):
        listener = Listener(driver.plane.address, 1, str(tmp_path / "missing"))
    assert [record.message for record in caplog.records if "there is no relay: " in record.message] != []
    assert len(caplog.records) == 1
    assert driver.relayed() == 0
    driver.plane.close()
    listener.thread.join(LONG)


def test_a_stranger_is_refused_by_a_relay(driver: Driver) -> None:
    with Relay(driver.plane.address, WorkerId("host", 1), LONG) as relay:
        public, secret = zmq.curve_keypair()
        stranger = replace(relay.address, client_public=public, client_secret=secret)
        with Client(stranger, timeout=LONG) as client, pytest.raises(ChannelError, match="refused this client's key"):
            client.request(WorkerJoined(WorkerId("host", 2)))
        with Client(relay.address, timeout=LONG) as client:
            client.request(WorkerJoined(WorkerId("host", 3)))
            listener = Client(relay.address, timeout=LONG)
            listener.request(WorkerJoined(WorkerId("host", 4)))
            listener.close()
    driver.plane.close()
    assert WorkerId("host", 2) not in driver.plane._coordinator.workers


def test_two_jobs_on_one_host_do_not_mix(driver: Driver, tmp_path: Path) -> None:
    other = Driver()
    listeners = [Listener(each.plane.address, number, str(tmp_path)) for number, each in enumerate((driver, other))]
    relays = [each.lifeline._relay for each in listeners]
    assert relays[0] is not None
    assert relays[1] is not None
    assert relays[0].address.endpoint != relays[1].address.endpoint
    mixed = replace(other.plane.address, endpoint=relays[0].address.endpoint, server_key=relays[0].address.server_key)
    with Client(mixed, timeout=LONG) as client, pytest.raises(ChannelError, match="refused this client's key"):
        client.request(WorkerJoined(WorkerId("host", 2)))
    for each, listener in zip((driver, other), listeners, strict=True):
        assert each.relayed() == 1
        each.plane.close()
        listener.thread.join(LONG)


def test_one_process_is_the_relay_and_its_file_holds_no_secret(driver: Driver, tmp_path: Path) -> None:
    address = driver.plane.address
    (one, other), old = (RelayFile(str(tmp_path), address) for _ in range(2)), replace(address, server_key=b"old")
    earlier = RelayFile(str(tmp_path), old)
    assert earlier.claim()
    assert one.claim()
    assert not os.path.exists(earlier.path), "of an earlier start of the job"
    assert not other.claim()
    assert other.address() is None
    listens = replace(address, endpoint="tcp://127.0.0.1:5000", server_key=b"s" * 40)
    one.publish(listens)
    assert other.address() == listens
    content = Path(one.path).read_bytes()
    assert address.client_secret not in content
    assert os.stat(one.path).st_mode & 0o077 == 0
    one.release()
    assert other.address() is None
    assert other.claim()
    other.release()
    earlier.release()
    Path(one.path).write_bytes(b"\xff{")
    assert one.address() is None
