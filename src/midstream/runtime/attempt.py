"""The life of one attempt of a task, the same on both runtimes: ask what to run, run it, listen meanwhile, report."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import pyarrow as pa

from midstream.control.messages import FromTask, TaskFailed, TaskId, TaskOrder, TaskStarted, ToTask, WorkerId
from midstream.engine.clock import Clock
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.errors import OperatorFailed
from midstream.ids import Digest
from midstream.runtime.reporting import failure_of
from midstream.runtime.switch_lock import SwitchLock
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess

__all__ = ["TaskHost", "run_attempt"]


class TaskHost(Protocol):
    """The worker process that an attempt runs in, or what stands for it."""

    name: WorkerId
    resources: Resources
    state: StateAccess
    clock: Clock

    def ask(self, message: FromTask) -> ToTask:
        """The coordinator's answer. Raises :class:`~midstream.errors.Fenced` if it refuses."""

    def sizer(self, program: Digest) -> SliceSizer:
        """Decides how long slices are."""

    def forget_all_but(self, live: Collection[Digest]) -> None:
        """Let go of what no task of the job will use any more."""

    def attending(self, task: TaskId, work: TaskRun) -> AbstractContextManager[SwitchLock]:
        """Inside, the task hears of changes."""

    def after_task(self, program: Digest) -> None:
        """A task has reported; nobody waits for this process now."""


def run_attempt(task: TaskId, host: TaskHost, batches: Iterator[pa.RecordBatch]) -> Generator[list[pa.RecordBatch]]:
    """Run one attempt. Never runs on a guessed configuration.

    Yields what is ready to leave, which may be nothing. The pauses are where the runtime may do other things; between
    slices the task can be switched in them. If it is closed in one, the attempt has died there.
    """
    assignment = host.ask(TaskStarted(task, host.name))
    assert isinstance(assignment, TaskOrder)
    host.forget_all_but(assignment.live)
    yield []
    revision = assignment.revision
    try:
        sizer = host.sizer(assignment.program)
        work = TaskRun(task, assignment, host.resources, host.state, clock=host.clock, sizer=sizer)
        with contextlib.closing(work), host.attending(task, work) as lock:
            try:
                for ready in work.run(lock.taking(batches)):
                    with lock.waiting():
                        yield ready
                report = work.finish()
                yield []  # its changes are written, but nobody knows yet
            finally:
                revision = work.revision
    except OperatorFailed as error:
        host.ask(TaskFailed(task, failure_of(error), revision))
        raise error from None
    host.ask(report)
    host.after_task(assignment.program)
