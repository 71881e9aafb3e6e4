"""The stage runner inside a Spark task: what ``mapInArrow`` calls in a Python worker.

The closure that Spark ships is this module's function and a :class:`Ticket`; everything else is fetched by digest.
A Python worker runs many tasks, one after the other, so connections, functions and slice sizes are kept per process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyspark import SparkFiles, TaskContext

from midstream.control.channel import Address, Client
from midstream.control.messages import (
    FromTask,
    Handle,
    Handled,
    Prefetch,
    Refused,
    Switch,
    TaskFailed,
    TaskFinished,
    TaskId,
    ToTask,
    WorkerId,
    WorkerReleased,
)
from midstream.engine.clock import Clock, SystemClock
from midstream.engine.control_handlers import loaded
from midstream.engine.control_order import ControlOrder
from midstream.engine.file_outlets import FileOutlets
from midstream.engine.frames import decode_rows, encode_rows, frames_of
from midstream.engine.parts import preload
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.errors import ChannelError, CheckpointError, ControlError, Fenced
from midstream.flow.spec import SinkTable
from midstream.ids import BinId, Digest, Epoch, PartitionId, Run, StageIndex, WireId
from midstream.runtime.attempt import run_attempt
from midstream.runtime.handler_watch import HandlerWatch
from midstream.runtime.known_assignments import KnownAssignments
from midstream.runtime.prefetcher import Portion, Prefetcher
from midstream.runtime.recent_answers import RecentAnswers
from midstream.runtime.spark.executor_name import executor_of_this_process
from midstream.runtime.spark.frozen_modules import Settled
from midstream.runtime.spark.lifeline import Lifeline
from midstream.runtime.switch_lock import SwitchLock
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess
from midstream.state.lineage import Lineage
from midstream.state.local_folder import own_local_folder
from midstream.state.retirement import Retirement
from midstream.storage.blobs import BlobStore

LOW_PRIORITY = 10
"""Niceness of the thread that loads ahead."""
REST = 2.0
"""After each portion, that thread rests for this multiple of its time, so that it has a third of a core at most."""
GAP_S = 0.5
"""How long it waits for a moment without a task in this process: they would share Python's lock."""
# A lost connection is noticed at once; this limit is for a driver that is very busy.
PATIENCE_S = 60.0
SWITCH_INTERVAL_S = 0.0005
UNHANDLED = 100
"""Most messages that are kept, the newest ones, for a task that has not begun to work."""
RUN_PROPERTY = "midstream.run"
"""The local property of Spark with the epoch and run that a job belongs to."""

Body = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""A function for ``mapInArrow`` to call in a task."""


@dataclass(frozen=True)
class Whereabouts:
    """Where to find a job's coordinator, its functions and its state.

    ``copies`` is the owner of the copies of state that workers keep: the job, on its present timeline.
    ``local_state`` is a folder on the worker's own disk for its copy of state; None leaves the choice to Spark.
    ``durable``: before a task reports its files, they can survive a loss of power. ``relays``: what workers are told of
    changes goes through relays, see :mod:`midstream.runtime.spark.lifeline`.
    """

    address: Address
    job: str
    blobs: str
    state: str
    local_state: str | None = None
    durable: bool = True
    copies: str | None = None
    relays: bool = False


@dataclass(frozen=True)
class Ticket:
    """What a task gets with its closure. Without ``run`` it is the same in every epoch, and a property has the run."""

    at: Whereabouts
    stage: StageIndex
    run: tuple[Epoch, Run] | None = None


def run_property(epoch: Epoch, run: Run) -> str:
    """The value of :data:`RUN_PROPERTY` in the thread that starts jobs of a run."""
    return f"{int(epoch)}.{int(run)}"


def run_stage(ticket: Ticket, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run one task, in this worker process."""
    context = TaskContext.get()
    assert context is not None, "run_stage is called by Spark, inside a task"
    epoch, run = ticket.run or _run_of(context)
    task = TaskId(epoch, run, ticket.stage, PartitionId(context.partitionId()), context.taskAttemptId())
    with contextlib.closing(run_attempt(task, _worker_for(ticket.at), batches)) as pauses:
        for ready in pauses:
            yield from ready


def _run_of(context: TaskContext) -> tuple[Epoch, Run]:
    found = context.getLocalProperty(RUN_PROPERTY)
    if found is None:
        raise Fenced(f"this task belongs to no run: the job that started it has no property {RUN_PROPERTY!r}")
    epoch, run = found.split(".")
    return Epoch(int(epoch)), Run(int(run))


def rename_columns(names: Sequence[str], run: Body, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run with the columns' own names, which Spark cannot handle."""
    return run(batch.rename_columns(list(names)) for batch in batches)


HOLD_S = 0.05
"""How long :func:`tell_executor` holds its core."""


def tell_executor(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Report where this partition is: its number, and the executor.

    All of these tasks take about the same time, so that cores become free in turn and executors get equal numbers of
    them.
    """
    context = TaskContext.get()
    assert context is not None, "tell_executor is called by Spark, inside a task"
    for _ in batches:
        pass
    time.sleep(HOLD_S)
    found = {"partition": [context.partitionId()], "executor": [executor_of_this_process()]}
    yield pa.RecordBatch.from_pydict(found, pa.schema([("partition", pa.int32()), ("executor", pa.string())]))


def decode_frames(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decode frames of one wire to plain columns, for a transform or a sink."""
    for batch in batches:
        for _, payload in frames_of(batch):
            yield decode_rows(payload)


def stage_files(
    table: SinkTable, schema: pa.Schema, epoch: Epoch, durable: bool, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write rows that no stage emits to files of a sink; yields the names of the staged files."""
    context = TaskContext.get()
    assert context is not None, "stage_files is called by Spark, inside a task"
    wire, partition = WireId(0), PartitionId(context.partitionId())
    outlets = FileOutlets({wire: {"": table}}, {wire: schema}, epoch=epoch, partition=partition, durable=durable)
    with contextlib.closing(outlets):
        for batch in batches:
            outlets.write(wire, batch.cast(schema))
        files = outlets.finish().get("", ())
    yield pa.RecordBatch.from_pylist(
        [{"staged": file.staged, "name": file.name, "rows": file.rows, "size": file.size} for file in files],
        pa.schema([("staged", pa.string()), ("name", pa.string()), ("rows", pa.int64()), ("size", pa.int64())]),
    )


def pack_portions(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pack each batch into one value, so that the driver can fetch batches, not rows."""
    for batch in batches:
        yield pa.record_batch({"portion": pa.array([encode_rows(batch).to_pybytes()], pa.binary())})


class _Worker:
    """What this process keeps for one start of a job. A :class:`~midstream.runtime.attempt.TaskHost`."""

    def __init__(self, at: Whereabouts) -> None:
        self._address = at.address
        self._client = Client(at.address, timeout=PATIENCE_S)
        self._end: ControlError | None = None
        self._sizers: dict[Digest, SliceSizer] = {}
        self.resources = Resources(BlobStore(at.blobs))
        # Spark removes its own folder when the application ends, and with it our copy of the state.
        local = at.local_state or os.path.join(SparkFiles.getRootDirectory(), "midstream-state")
        own = own_local_folder(local, at.job)
        self.state = StateAccess(at.copies or at.job, at.state, own, at.durable)
        self.retirement = Retirement()
        self.known = KnownAssignments()
        self.clock: Clock = SystemClock()
        self.name = WorkerId(socket.gethostname(), os.getpid(), executor_of_this_process())
        self._prefetcher = Prefetcher(self.state, self.name, self.clock)
        self._background: threading.Thread | None = None
        self._over = threading.Event()
        self._has_no_task = threading.Event()
        self._has_no_task.set()
        self._guard = threading.Lock()
        self._watch = HandlerWatch(partial(_report_overdue, at.address))
        # A process runs one task at a time. A message may arrive before its task starts.
        self._at_work: tuple[TaskId, SwitchLock] | None = None
        self._told: Switch | None = None
        self._unhandled: list[Handle] = []
        self._lifeline = Lifeline(at.address, self.name, PATIENCE_S, own if at.relays else None)
        self._answers = RecentAnswers()
        # Where there are relays, answers to control operations go through them, whichever thread gives them.
        self._post = self._answer if at.relays else self._client.post
        self._post_from_lifeline = self._answer if at.relays else self._lifeline.post
        self._listens = threading.Event()
        pa.array([0])  # pyarrow imports pandas at its first conversion: that must not happen inside the first slice
        # The listener thread must not wait long for a busy task to let it run.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        threading.Thread(target=self._listen, args=(at.address,), name="midstream-lifeline", daemon=True).start()
        self._listens.wait(PATIENCE_S)  # otherwise a change could not reach the tasks of this process

    def ask(self, message: FromTask) -> ToTask:
        if self._end is not None:  # also if the driver is there again: a function fails when it is closed under a task
            raise self._end
        try:
            if isinstance(message, TaskFinished | TaskFailed):
                for handled in self._answers.on_the_way(message.task, time.monotonic()):
                    self._client.post(handled)
            answer = self._client.request(message)
        except ChannelError as error:
            end: Exception | None = self._end  # the other thread may have set it meanwhile
            raise end or error from None
        if isinstance(answer, Refused):
            raise Fenced(f"the coordinator refused {type(message).__name__}: {answer.reason}")
        return answer

    def _answer(self, message: FromTask) -> None:
        if isinstance(message, Handled):
            self._answers.keep(message, time.monotonic())
            self._lifeline.post(message)
        else:
            self._client.post(message)

    @contextlib.contextmanager
    def attending(self, task: TaskId, work: TaskRun) -> Iterator[SwitchLock]:
        """Within this block, the task is notified of changes."""
        self._prefetcher.task_begins(task.epoch)
        lock = SwitchLock(work, self.ask, self._post, threading.Lock())
        with self._guard:
            self._at_work = (task, lock)
            if self._told is not None and self._told.task == task:
                lock.tell(self._told.change, self._post)
            for told in self._unhandled:
                if told.task == task:
                    lock.handle(told.order, self._post)
            self._unhandled.clear()
        self._has_no_task.clear()
        try:
            with lock:
                yield lock
        finally:
            self._has_no_task.set()
            with self._guard:
                self._at_work = None

    def watched(
        self, task: TaskId, order: ControlOrder, operator: str, handler: str
    ) -> contextlib.AbstractContextManager[None]:
        """Within this block, a handler of a control operation runs."""
        return self._watch.watching(task, order, operator, handler)

    def sizer(self, program: Digest) -> SliceSizer:
        """The sizer of a program, shared by its tasks: what earlier ones learnt is a good start for the next."""
        return self._sizers.setdefault(program, SliceSizer())

    def forget_all_but(self, live: Collection[Digest]) -> None:
        """Drop everything that no task of the job will use any more. No task may be running in this process.

        The listener thread may be loading blobs for a change. If those are dropped here, the change is over; and what
        it loads after that is dropped when the next task starts.
        """
        forgotten = self.resources.forget_all_but(live)
        for program in forgotten & self._sizers.keys():
            del self._sizers[program]
        _settled.forgotten(forgotten)

    def free(self, lineage: Lineage, bins: Collection[BinId]) -> None:
        """Free bins in the thread that loads others."""
        self._prefetcher.free(lineage, bins)
        self._start_background()

    def keep(self, operator: str, bins: Collection[BinId]) -> None:
        """Do not free bins that are needed again."""
        self._prefetcher.keep(operator, bins)

    def after_task(self, program: Digest) -> None:
        """Tidy up while no task waits."""
        with self._prefetcher.resting() as rests:
            if rests:
                self.state.trim()
        _settled.after_task(program)

    def _listen(self, address: Address) -> None:
        """Listen for changes until the job ends; then close the user's functions.

        Spark ends idle Python workers with a signal that cannot be handled, so the job itself must report its end.
        """
        lifeline = self._lifeline
        with contextlib.closing(lifeline):
            try:
                for message in lifeline.messages(self._listens.set):
                    if isinstance(message, Switch):
                        self._make_ready(message, lifeline.post)
                    elif isinstance(message, Handle):
                        self._handle(message, self._post_from_lifeline)
                    elif isinstance(message, Prefetch):
                        self._prefetcher.take(message)
                        self._start_background()
                self._end = Fenced("the job is over")
            except ChannelError as error:  # the driver is gone, so these functions are not needed any more
                self._end = error
            self._listens.set()
            self._over.set()
            self._prefetcher.has_work.set()
            if self._background is not None:
                self._background.join(PATIENCE_S)
            self._watch.close()
            _workers.pop(address, None)
            self.resources.close()
            lifeline.post(WorkerReleased(self.name))
        self._client.close()

    def _start_background(self) -> None:
        with self._guard:
            if self._background is None:
                thread = threading.Thread(target=self._care_for_base, name="midstream-base", daemon=True)
                self._background = thread
                thread.start()

    def _care_for_base(self) -> None:
        """Load bins that the coordinator asks for, no faster than it allows, and free others, until the job ends.

        Tasks come first: what is loaded ahead must not make the rows wait that it is loaded for.
        """
        with contextlib.suppress(AttributeError, OSError):  # a thread has a priority of its own on Linux only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        with contextlib.suppress(ChannelError), Client(self._address, timeout=PATIENCE_S) as reports:
            while not self._over.is_set():
                self._has_no_task.wait(GAP_S)
                began = time.monotonic()
                done = self._prefetcher.step()
                if isinstance(done, Portion):
                    self._over.wait(max(done.bytes / done.bytes_per_s, REST * (time.monotonic() - began)))
                elif done is not None:
                    reports.post(done)
                elif not self._over.is_set():  # looked at after the step, which may have missed the end's call
                    self._prefetcher.has_work.wait()

    def _make_ready(self, told: Switch, post: Callable[[FromTask], None]) -> None:
        """Load what the task will need while it runs; then tell it to switch."""
        with contextlib.suppress(CheckpointError):  # the task will meet this error, too, and can report it
            preload(self.resources.program(told.change.program), self.resources)
        with self._guard:
            self._told = told
            at_work = self._at_work
        if at_work is not None and at_work[0] == told.task:
            at_work[1].tell(told.change, post)

    def _handle(self, told: Handle, post: Callable[[FromTask], None]) -> None:
        """Have a task run handlers of a control operation. One that has not begun to work will find the message."""
        if (answer := self._answers.to(told)) is not None:  # it was lost with a relay
            post(answer)
            return
        with contextlib.suppress(Exception):  # first, because the task waits meanwhile; it will report this error
            loaded(told.order, self.resources)
        with self._guard:
            at_work = self._at_work
            if at_work is None:
                self._unhandled = [*self._unhandled[1 - UNHANDLED :], told]
        if at_work is not None and at_work[0] == told.task:
            at_work[1].handle(told.order, post)


def _report_overdue(address: Address, report: TaskFailed) -> None:
    with contextlib.suppress(ChannelError), Client(address, timeout=PATIENCE_S) as client:
        client.request(report)


# By address, not by job: a job that was started again has a new address, and the old one no longer answers.
_workers: dict[Address, _Worker] = {}
_settled = Settled()


def _worker_for(at: Whereabouts) -> _Worker:
    if at.address not in _workers:
        _workers[at.address] = _Worker(at)
    return _workers[at.address]
