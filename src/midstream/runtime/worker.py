"""The stage runner inside a Spark task: what ``mapInArrow`` calls in a Python worker.

The closure that Spark ships is this module's function and a :class:`Ticket`; everything else is fetched by digest.
A Python worker runs many tasks, one after the other, so connections, functions and slice sizes are kept per process.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext

from midstream.control.channel import Address, Client
from midstream.control.messages import (
    Assignment,
    FromTask,
    Refused,
    Release,
    TaskFailed,
    TaskFinished,
    TaskId,
    TaskStarted,
    ToTask,
    WorkerJoined,
    WorkerReleased,
)
from midstream.engine.blobs import BlobStore
from midstream.engine.clock import SystemClock
from midstream.engine.frames import decode_rows, payloads
from midstream.engine.resources import Resources
from midstream.engine.runner import StageRunner
from midstream.engine.slices import SliceSizer
from midstream.errors import ChannelError, ControlError, Fenced, OperatorFailed
from midstream.ids import Digest, Epoch, PartitionId, Run, StageIndex
from midstream.runtime.reporting import failure_of

LISTEN_S = 3600.0
# A lost connection is noticed at once; this is for a driver that is merely very busy.
PATIENCE_S = 60.0

Body = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What ``mapInArrow`` calls in a task."""


@dataclass(frozen=True)
class Ticket:
    """What a task is born with."""

    address: Address
    blobs: str
    epoch: Epoch
    run: Run
    stage: StageIndex


def run_stage(ticket: Ticket, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run one task: ask what to run, run it, report. Never runs on a guessed configuration."""
    context = TaskContext.get()
    assert context is not None, "run_stage is called by Spark, inside a task"
    task = TaskId(ticket.epoch, ticket.run, ticket.stage, PartitionId(context.partitionId()), context.taskAttemptId())
    worker = _worker_for(ticket)
    assignment = worker.ask(TaskStarted(task))
    assert isinstance(assignment, Assignment)
    try:
        runner = StageRunner(
            worker.resources.program(assignment.program),
            worker.resources,
            partition=task.partition,
            revision=assignment.revision,
            bins=assignment.bins,
            clock=SystemClock(),
            sizer=worker.sizer(assignment.program),
        )
        for ready in runner.run(batches):
            yield from ready
    except OperatorFailed as error:
        worker.ask(TaskFailed(task, failure_of(error)))
        raise error from None
    report = runner.report()
    worker.ask(TaskFinished(task, report.operators, report.received, report.sent, report.emitted))


def rename_columns(names: Sequence[str], run: Body, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run with the columns' own names, which Spark could not be told."""
    return run(batch.rename_columns(list(names)) for batch in batches)


def decode_frames(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Frames of one wire back to plain columns, for a transform or a sink."""
    for batch in batches:
        for payload in payloads(batch):
            yield decode_rows(payload)


class _Worker:
    """What this process keeps for one life of a job."""

    def __init__(self, ticket: Ticket) -> None:
        self._client = Client(ticket.address, timeout=PATIENCE_S)
        self._end: ControlError | None = None
        self._sizers: dict[Digest, SliceSizer] = {}
        self.resources = Resources(BlobStore(ticket.blobs))
        self._name = (socket.gethostname(), os.getpid())
        pa.array([0])  # pyarrow imports pandas at its first conversion: not inside the first slice, please
        threading.Thread(target=self._listen, args=(ticket,), name="midstream-lifeline", daemon=True).start()

    def ask(self, message: FromTask) -> ToTask:
        try:
            answer = self._client.request(message)
        except ChannelError as error:
            raise self._end or error from None
        if isinstance(answer, Refused):
            raise Fenced(f"the coordinator refused {type(message).__name__}: {answer.reason}")
        return answer

    def sizer(self, program: Digest) -> SliceSizer:
        """Slice sizes learnt by earlier tasks of the same program are a good start for the next one."""
        return self._sizers.setdefault(program, SliceSizer())

    def _listen(self, ticket: Ticket) -> None:
        """Wait for the end of the job, then close the user's functions.

        Spark ends idle Python workers with a signal that no handler sees, so the job itself must say when it is over.
        """
        with Client(ticket.address, timeout=PATIENCE_S) as lifeline:
            try:
                lifeline.request(WorkerJoined(*self._name))
                while not isinstance(lifeline.receive(timeout=LISTEN_S), Release):
                    pass
                self._end = Fenced("the job is over")
            except ChannelError as error:  # the driver is gone: nobody will use these functions again
                self._end = error
            _workers.pop(ticket.address, None)
            self.resources.close()
            lifeline.post(WorkerReleased(*self._name))
        self._client.close()


# By address, not by job: a job that was started again is reached at a new one, and the old one answers no more.
_workers: dict[Address, _Worker] = {}


def _worker_for(ticket: Ticket) -> _Worker:
    if ticket.address not in _workers:
        _workers[ticket.address] = _Worker(ticket)
    return _workers[ticket.address]
