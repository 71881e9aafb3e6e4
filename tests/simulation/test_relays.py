"""Operations over relays that die at any moment: the coordinator, what relays decide, and workers as they behave, in a
random order of deliveries. Whatever dies with a relay is told or said again, so every operation is completed, and no
task runs its handlers twice.

A check is worth what it catches: a coordinator that tells a worker nothing when it joins again must be caught often.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec
import pytest

from midstream.control.coordinator import Coordinator
from midstream.control.journal import Journal, read, replay
from midstream.control.messages import (
    Accepted,
    ChangeBegun,
    ChangeNoted,
    ControlBegun,
    ControlNoted,
    EpochOpened,
    Event,
    FromTask,
    Handle,
    Handled,
    Instruction,
    Received,
    Send,
    Stay,
    Switch,
    SwitchRequested,
    TaskFinished,
    TaskId,
    TaskStarted,
    ToTask,
    ToWorkers,
    WorkerId,
    WorkerJoined,
)
from midstream.control.relayed import JointReports, Message, by_relay, unfold
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.ids import Digest, Epoch, ExecutorId, Origin, PartitionId, Revision, Run, StageIndex
from midstream.runtime.recent_answers import RecentAnswers

STAGE = StageIndex(0)
EXECUTORS, WORKERS_EACH = 2, 3
OPERATIONS = 3
SEEDS = range(300)


@dataclass
class RelayModel:
    """A relay: what it decides is real, its connections are queues."""

    name: bytes
    reports: JointReports = field(default_factory=JointReports)
    workers: dict[int, WorkerModel] = field(default_factory=dict)
    down: deque[ToTask] = field(default_factory=deque)
    up: deque[FromTask] = field(default_factory=deque)


@dataclass
class WorkerModel:
    """A worker with one task: handlers run once, answers that are asked for again are given again."""

    task: TaskId
    worker: WorkerId
    relay: RelayModel | None = None
    number: int = 0
    is_joined: bool = False
    is_over: bool = False
    inbox: deque[ToTask] = field(default_factory=deque)
    answers: RecentAnswers = field(default_factory=RecentAnswers)
    ran: Counter[int] = field(default_factory=Counter)
    has_switched: bool = False


class World:
    """One run of an epoch; the schedule follows from the seed."""

    def __init__(self, seed: int, coordinator: Coordinator) -> None:
        self.random = random.Random(seed)
        self.coordinator = coordinator
        self.journal = Journal()
        self.now = 0.0
        self.made = 0
        self.relays: dict[bytes, RelayModel] = {}
        self.elected: dict[ExecutorId, RelayModel] = {}
        self.noted: list[ControlNoted] = []
        self.in_effect = False
        programs = (Digest("a"),)
        self.event(EpochOpened(Epoch(0), Run(0), Revision(1), programs))
        self.workers = []
        for number in range(EXECUTORS * WORKERS_EACH):
            task = TaskId(Epoch(0), Run(0), STAGE, PartitionId(number), number)
            name = WorkerId("host", number, ExecutorId(str(number // WORKERS_EACH)))
            self.workers.append(worker := WorkerModel(task, name))
            self.join(worker)
            self.event(Received(b"direct", TaskStarted(task, name)))

    def event(self, event: Event) -> list[ToTask]:
        """The coordinator takes an event; its messages are on their way. Returns the answers to direct requests."""
        self.journal.append(event)
        instructions = self.coordinator.handle(event)
        self.noted += [each for each in instructions if isinstance(each, ControlNoted)]
        self.in_effect |= any(isinstance(each, ChangeNoted) and each.in_effect for each in instructions)
        answers: list[ToTask] = []
        for peer, message in by_relay(each for each in instructions if isinstance(each, Send)):
            if isinstance(message, ToWorkers):
                if (relay := self.relays.get(peer)) is not None:
                    relay.down.append(message)
            elif peer == b"direct":
                answers.append(message)
            elif not isinstance(message, Accepted):
                self.workers[int(peer)].inbox.append(message)
        return answers

    def join(self, worker: WorkerModel) -> None:
        """At the relay of the executor, which may be a new one, or at the driver."""
        worker.is_joined = True
        worker.inbox.clear()
        if self.random.random() < 0.2:
            worker.relay = None
            self.event(Received(b"%d" % worker.task.partition, WorkerJoined(worker.worker)))
            return
        executor = worker.worker.executor
        if executor not in self.elected:
            self.made += 1
            relay = self.elected[executor] = RelayModel(b"relay %d" % self.made)
            self.relays[relay.name] = relay
        worker.relay = relay = self.elected[executor]
        worker.number = len(relay.workers) + 1
        relay.workers[worker.number] = worker
        relay.reports.heard(worker.number, WorkerJoined(worker.worker), self.now)

    def say(self, worker: WorkerModel, message: Message) -> None:
        """By the lifeline; it is lost if there is none at the moment."""
        if worker.relay is not None and worker.is_joined:
            worker.relay.reports.heard(worker.number, message, self.now)
        elif worker.is_joined:
            self.event(Received(b"%d" % worker.task.partition, message))

    def act(self, *, in_peace: bool) -> bool:
        """Something that may happen now happens. Returns whether anything could."""
        self.now += self.random.choice([0.0, 0.0005, 0.003])
        can: list[tuple[str, RelayModel | WorkerModel]] = []
        for relay in self.relays.values():
            can += [("down", relay)] * bool(relay.down) + [("up", relay)] * bool(relay.up)
            can += [("take", relay)] * (relay.reports.wait(self.now) is not None)
            can += [] if in_peace else [("kill", relay)]
        for worker in self.workers:
            can += [("work", worker)] * bool(worker.inbox) + [("join", worker)] * (not worker.is_joined)
        if not can:
            return False
        what, who = self.random.choice(can)
        if what == "kill" and self.random.random() < 0.7:  # rather seldom
            return True
        getattr(self, what)(who)
        return True

    def down(self, relay: RelayModel) -> None:
        packet = relay.down.popleft()
        assert isinstance(packet, ToWorkers)
        relay.reports.told(packet)
        for number, message in unfold(packet):
            relay.workers[number].inbox.append(message)

    def take(self, relay: RelayModel) -> None:
        if (packet := relay.reports.take(self.now)) is not None:
            relay.up.append(packet)

    def up(self, relay: RelayModel) -> None:
        self.event(Received(relay.name, relay.up.popleft()))

    def kill(self, relay: RelayModel) -> None:
        del self.relays[relay.name]
        for executor, elected in list(self.elected.items()):
            if elected is relay:
                del self.elected[executor]
        for worker in relay.workers.values():
            if worker.relay is relay:
                worker.relay, worker.is_joined = None, False

    def work(self, worker: WorkerModel) -> None:
        told = worker.inbox.popleft()
        if isinstance(told, Handle):
            answer = worker.answers.to(told)
            if answer is None:
                worker.ran[told.order.number] += 1
                answer = Handled(told.task, ControlReport(told.order.number, ("m",), b"%d" % self.random.randrange(2)))
                worker.answers.keep(answer, self.now)
            self.say(worker, answer)
        elif isinstance(told, Switch) and not worker.has_switched:
            [answered] = self.event(
                Received(b"direct", SwitchRequested(told.task, told.change.revision, {Origin(-1): 5}))
            )
            assert isinstance(answered, Accepted | Stay)
            worker.has_switched = True


def run(seed: int, coordinator: Coordinator) -> World:
    """Operations and a change begin while relays die; then there is peace, and everything is delivered."""
    world = World(seed, coordinator)
    orders = [
        ControlOrder(number, "Look", ControlMode.FAST, Digest("ab"), ("m",), (STAGE,), "")
        for number in range(1, OPERATIONS + 1)
    ]
    events: list[Event] = [ControlBegun(each) for each in orders]
    events.append(ChangeBegun(Revision(2), (Digest("b"),), {STAGE: ("m",)}, {}))
    world.random.shuffle(events)
    for event in events:
        for _ in range(world.random.randrange(40)):
            world.act(in_peace=False)
        world.event(event)
    for _ in range(60):
        world.act(in_peace=False)
    while world.act(in_peace=True):
        pass
    return world


def problems(world: World) -> list[str]:
    """What is not as it must be, once everything is delivered."""
    found = []
    if (twice := sum(count > 1 for worker in world.workers for count in worker.ran.values())) != 0:
        found.append(f"{twice} task(s) have run handlers twice")
    complete = Counter(noted.number for noted in world.noted)
    if complete != Counter(range(1, OPERATIONS + 1)):
        found.append(f"operations are complete: {dict(complete)}")
    if any(noted.missed for noted in world.noted):
        found.append("tasks that are at work were missed")
    ran = Counter(number for worker in world.workers for number in worker.ran)
    if any(len(noted.reports) != ran[noted.number] for noted in world.noted):
        found.append("there are not as many reports as tasks that have run handlers")
    if not world.in_effect:
        found.append("the change is not in effect")
    return found


def test_operations_over_relays_that_die_are_completed_and_nothing_is_done_twice():
    for seed in SEEDS:
        world = run(seed, Coordinator())
        assert problems(world) == [], f"seed {seed}"
        rebuilt = replay(read(world.journal.to_bytes()))
        assert rebuilt.story == world.coordinator.story
        assert rebuilt.workers == world.coordinator.workers


class Forgetful(Coordinator):
    """Tells a worker that joins again nothing of what is in progress."""

    def _tell_again(self, worker: WorkerId, peer: bytes) -> list[Instruction]:
        return []


def test_without_telling_again_operations_wait_for_messages_that_have_died():
    caught = sum(bool(problems(run(seed, Forgetful()))) for seed in SEEDS)
    assert caught >= 0.5 * len(SEEDS), f"caught in {caught} of {len(SEEDS)} runs"


@pytest.mark.parametrize("seed", range(20))
def test_a_task_that_ends_while_its_answer_is_on_the_way_has_answered(seed: int):
    """Its report goes straight to the coordinator, and the answer before it."""
    world = World(seed, Coordinator())
    while world.act(in_peace=True):  # all have joined
        pass
    order = ControlOrder(1, "Look", ControlMode.FAST, Digest("ab"), ("m",), (STAGE,), "")
    world.event(ControlBegun(order))
    while not any(worker.ran for worker in world.workers):
        world.act(in_peace=True)
    [worker] = [worker for worker in world.workers if worker.ran]
    for answer in worker.answers.on_the_way(worker.task, world.now):
        assert world.event(Received(b"direct", answer)) == []
    world.event(Received(b"direct", TaskFinished(worker.task, (), {}, {}, {})))
    while world.act(in_peace=True):
        pass
    assert [(noted.missed, len(noted.reports)) for noted in world.noted] == [(0, len(world.workers))]
    assert msgspec.msgpack.decode(world.journal.to_bytes())
