"""The decider on the driver: a pure state machine. Events in, instructions out; no sockets, no clock, no Spark.

States and transitions::

                 EpochOpened                 EpochSealed, whole → Commit
    ┌──────┐ ───────────────────► ┌─────────┐ ───────────────────────► ┌──────┐
    │ idle │                      │ running │                          │ idle │
    └──────┘ ◄─────────────────── └─────────┘ ───────────────────────► └──────┘
                 EpochAbandoned        ▲   │    EpochSealed, not whole → Reject
                                       └───┘
                        TaskStarted, TaskFinished, TaskFailed, ChangeBegun, SwitchRequested, Reached, Exhausted,
                        ControlBegun, Handled

Messages of tasks are legal in every state, because tasks outlive the runs they belong to: outside their run they are
refused, which fences them. Driver events in the wrong state are errors, which list the most recent events.

The coordinator itself only fences and dispatches. Its :class:`RunBook` has what is known about the run; whatever is
done to its tasks while they run is an :class:`Operation`, and the coordinator holds a list of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from midstream.control.messages import (
    Accepted,
    ChangeBegun,
    Commit,
    ControlBegun,
    ControlNoted,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    Event,
    FromRelay,
    FromTask,
    FromWorker,
    GiveUpRun,
    Handled,
    Instruction,
    JobEnding,
    OperationMessage,
    Posted,
    Prefetched,
    PrefetchNoted,
    PrefetchWanted,
    Received,
    Refused,
    Release,
    Said,
    Send,
    Stay,
    TaskFailed,
    TaskFinished,
    TaskId,
    TaskOrder,
    TaskStarted,
    WorkerId,
    WorkerJoined,
    WorkerReleased,
)
from midstream.control.operations.aligned import Aligned
from midstream.control.operations.fast import Fast
from midstream.control.operations.operation import Operation
from midstream.control.operations.switching import Switching
from midstream.control.prefetching import Prefetching
from midstream.control.relayed import behind, relay_of
from midstream.control.run_book import Attempts, Place, RunBook
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.errors import ProtocolError
from midstream.ids import ExecutorId, StageIndex

STORY_LENGTH = 50
MOST_WORKERS = 10_000
"""Workers that are remembered. Spark ends those that idle with a signal that cannot be handled, so they do not say that
they leave; if there are too many, those that were silent longest are forgotten."""


class Coordinator:
    """Decides what tasks run and whether an epoch is whole.

    >>> from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex
    >>> coordinator = Coordinator()
    >>> coordinator.handle(EpochOpened(Epoch(7), Run(0), Revision(1), (Digest("ab"),)))
    []
    >>> task = TaskId(Epoch(7), Run(0), StageIndex(0), PartitionId(0), attempt=12)
    >>> [sent] = coordinator.handle(Received(b"peer", TaskStarted(task)))
    >>> sent.message
    TaskOrder(revision=1, program='ab', times=EpochTimes(clock=0, ...), lineages={}, change=None, ...)
    >>> late = TaskId(Epoch(6), Run(0), StageIndex(0), PartitionId(0), attempt=3)
    >>> [sent] = coordinator.handle(Received(b"old", TaskStarted(late)))
    >>> sent.message.reason
    'epoch 6.0 is over; epoch 7.0 is running'
    """

    def __init__(self) -> None:
        self._book: RunBook | None = None
        self._operations: list[Operation] = []
        self._workers: dict[WorkerId, bytes] = {}
        """Where each worker listens; the one heard from last comes last."""
        self._prefetching = Prefetching()
        self._ending = False
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)

    def finished(self, stage: StageIndex) -> int:
        """How many partitions of a stage have finished in the run in progress."""
        return 0 if self._book is None else self._book.attempts.finished_of[stage]

    @property
    def failures(self) -> tuple[TaskFailed, ...]:
        """Failures of the user's code in the run in progress, in the order they were reported."""
        return tuple(self._book.failures) if self._book else ()

    @property
    def workers(self) -> frozenset[WorkerId]:
        """Worker processes that hold functions open."""
        return frozenset(self._workers)

    def workers_at(self, peer: bytes) -> list[tuple[WorkerId, bytes]]:
        """The workers that listen there, or behind that relay, and where."""
        return [(worker, at) for worker, at in self._workers.items() if at == peer or relay_of(at) == peer]

    @property
    def executors(self) -> frozenset[ExecutorId]:
        """Executors whose workers have joined. A lost one stays among them, because nobody reports its loss."""
        return self._prefetching.executors

    @property
    def story(self) -> tuple[str, ...]:
        """The most recent events, oldest first, as one line each."""
        return tuple(self._story)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event, change state, and return the instructions that follow."""
        self._story.append(line_of(event))
        match event:
            case Received(peer, message):
                return self._from_peer(peer, message)
            case EpochOpened():
                if self._book is not None:
                    raise self._lost(event, f"{self._book} is still running")
                self._book = RunBook(event)
                self._operations += _controls(event.controls, self._book.attempts)
                for operation in self._operations:
                    operation.on_begun({})
                return [*self._prefetching.opened(event)]
            case PrefetchWanted(requests):
                if self._book is not None:
                    self._book.opened = msgspec.structs.replace(self._book.opened, prefetch=requests)
                return [*self._prefetching.want(requests)]
            case ChangeBegun() | ControlBegun():
                return self._begin(event)
            case EpochSealed():
                return [self._seal(self._current(event))]
            case EpochAbandoned():
                self._current(event)
                self._close()
                return []
            case JobEnding():
                self._ending = True
                return [Send(peer, Release()) for peer in self._workers.values()]

    # ── driver events ─────────────────────────────────────────────────────────────────────────────────────────────

    def _current(self, event: EpochSealed | EpochAbandoned) -> RunBook:
        book = self._book
        if book is None:
            raise self._lost(event, "no epoch is running")
        if (book.opened.epoch, book.opened.run) != (event.epoch, event.run):
            raise self._lost(event, f"{book} is running")
        return book

    def _begin(self, event: ChangeBegun | ControlBegun) -> list[Instruction]:
        """Begin an operation. Nothing to do if no epoch is running: the next one begins with it."""
        book = self._book
        if book is None:
            return []
        for operation in self._operations:
            if why := operation.excludes(event):
                raise self._lost(event, why)
        begun: Operation
        if isinstance(event, ControlBegun):
            begun = Fast(event.order, book.attempts)
        else:
            begun = Switching(event, book.attempts, book.opened.partitions)
        self._operations.append(begun)
        listening = {task: self._workers[at] for task, at in book.workers.items() if at in self._workers}
        return begun.on_begun(listening)

    def _seal(self, book: RunBook) -> Instruction:
        verdict = book.seal()
        if isinstance(verdict, Commit):
            for operation in self._operations:
                verdict = operation.on_run_over(verdict)
        self._close()
        return verdict

    def _close(self) -> None:
        self._book = None
        self._operations.clear()

    def _lost(self, event: Event, found: str) -> ProtocolError:
        story = "\n  ".join(self._story)
        return ProtocolError(f"{line_of(event)} makes no sense now: {found}. Events before it:\n  {story}")

    # ── messages of tasks ─────────────────────────────────────────────────────────────────────────────────────────

    def _from_peer(self, peer: bytes, message: FromTask) -> list[Instruction]:
        if isinstance(message, FromRelay):
            return [instruction for said in message.said for instruction in self._from_relay(peer, said)]
        return self._from_worker(peer, message) if isinstance(message, FromWorker) else self._from_task(peer, message)

    def _from_worker(self, peer: bytes, message: FromWorker) -> list[Instruction]:
        if isinstance(message, WorkerJoined):
            self._hear_of(message.worker, peer)
            # A worker that joins while the job ends has missed its release, and the driver waits for it to leave.
            more = [Send(peer, Release())] if self._ending else self._prefetching.heard_of(message.worker, peer)
            return [Send(peer, Accepted()), *more, *self._tell_again(message.worker, peer)]
        if isinstance(message, WorkerReleased):
            # What a relay says of a worker that it has lost may come when that one has joined elsewhere.
            if relay_of(peer) is None or self._workers.get(message.worker) == peer:
                self._workers.pop(message.worker, None)
                self._prefetching.left(message.worker)
            return []
        return [PrefetchNoted(message)] if isinstance(message, Prefetched) else [Send(peer, Accepted())]

    def _from_task(
        self, peer: bytes, message: TaskStarted | TaskFinished | TaskFailed | OperationMessage | Handled
    ) -> list[Instruction]:
        book = self._book
        if book is None or not book.is_of(message.task):  # messages are taken only from tasks of the run in progress
            return [] if isinstance(message, Posted) else [Send(peer, _refusal(book, message.task))]
        match message:
            case TaskStarted(worker=worker):
                more = []
                if worker is not None and (at := self._workers.get(worker)) is not None:
                    self._hear_of(worker, at)
                    more = self._prefetching.heard_of(worker, at)
                return [Send(peer, self._order(book, message)), *more]
            case TaskFinished():
                book.finish(message)
            case TaskFailed():
                book.fail(message)
            case Handled(task, report):
                return self._handled([(task.stage, task.partition)], report)
            case _:
                return self._to_operation(peer, message)
        instructions: list[Instruction] = [Send(peer, Accepted())]
        if isinstance(message, TaskFailed) and (message.operation or message.revision == book.opened.on_trial):
            instructions.append(GiveUpRun(book.opened.epoch, book.opened.run))
        for operation in self._operations:
            instructions += operation.on_task_ended(message)
        self._drop_what_is_over(instructions)
        return instructions

    def _from_relay(self, peer: bytes, said: Said) -> list[Instruction]:
        """What one worker behind a relay has said, or the same from several tasks, at little cost for each."""
        book, message = self._book, said.message
        if not said.tasks or not isinstance(message, Handled):
            # The relay has answered already what asks for an answer.
            heard = self._from_peer(behind(peer, said.worker), message)
            return [each for each in heard if not (isinstance(each, Send) and isinstance(each.message, Accepted))]
        if book is None or not book.is_of(message.task):
            return []
        return self._handled([(stage, partition) for stage, partition, _ in said.tasks], message.report)

    def _handled(self, places: Sequence[Place], report: ControlReport) -> list[Instruction]:
        for operation in self._operations:
            if (instructions := operation.on_handled(places, report)) is not None:
                self._drop_what_is_over(instructions)
                return [*instructions]
        return []

    def _tell_again(self, worker: WorkerId, peer: bytes) -> list[Instruction]:
        """What a worker's task may not have heard, because it died with the relay that the worker had joined."""
        task = None if self._book is None else self._book.at_work.get(worker)
        if task is None:
            return []
        return [told for operation in self._operations for told in operation.on_heard_again(task, peer)]

    def _hear_of(self, worker: WorkerId, peer: bytes) -> None:
        self._workers.pop(worker, None)
        self._workers[worker] = peer
        if len(self._workers) > MOST_WORKERS:
            del self._workers[next(iter(self._workers))]

    def _order(self, book: RunBook, started: TaskStarted) -> TaskOrder | Refused:
        answer = book.start(started)
        if isinstance(answer, TaskOrder):
            for operation in self._operations:
                answer = operation.on_task_started(started.task, answer)
        return answer

    def _drop_what_is_over(self, instructions: Sequence[Instruction]) -> None:
        if any(isinstance(each, ControlNoted) for each in instructions):
            self._operations = [operation for operation in self._operations if not operation.is_over]

    def _to_operation(self, peer: bytes, message: OperationMessage) -> list[Instruction]:
        for operation in self._operations:
            if (instructions := operation.on_message(peer, message)) is not None:
                self._drop_what_is_over(instructions)
                return [*instructions]
        return [] if isinstance(message, Posted) else [Send(peer, Stay())]


def _controls(orders: Sequence[ControlOrder], attempts: Attempts) -> list[Operation]:
    """The control operations that begin with a run."""
    aligned = [order for order in orders if order.mode is not ControlMode.FAST]
    fast = [order for order in orders if order.mode is ControlMode.FAST]
    return [*([Aligned(aligned)] if aligned else []), *(Fast(order, attempts) for order in fast)]


def _refusal(book: RunBook | None, task: TaskId) -> Refused:
    running = "no epoch is running" if book is None else f"{book} is running"
    return Refused(f"epoch {task.epoch}.{task.run} is over; {running}")


def line_of(event: Event) -> str:
    """An event in one line."""
    match event:
        case Received(_, message):
            if isinstance(message, FromRelay):
                return f"FromRelay({len(message.said)} messages)"
            about = message.worker if isinstance(message, FromWorker) else message.task
            return f"{type(message).__name__}({about})"
        case ControlBegun(order):
            return f"ControlBegun(operation {order.number})"
        case ChangeBegun(revision):
            return f"ChangeBegun(revision {revision})"
        case PrefetchWanted(requests):
            return f"PrefetchWanted({len(requests)} requests)"
        case JobEnding():
            return "JobEnding"
        case _:
            return f"{type(event).__name__}(epoch {event.epoch}.{event.run})"
