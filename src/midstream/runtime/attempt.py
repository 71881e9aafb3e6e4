"""The life of one attempt of a task, on both runtimes: ask what to run, run it while listening for changes, report."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import pyarrow as pa

from midstream.control.messages import FromTask, TaskFailed, TaskId, TaskOrder, TaskStarted, ToTask, WorkerId
from midstream.engine.clock import Clock
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlOrder
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.errors import MidstreamError, OperatorFailed
from midstream.flow.knobs import knob_value
from midstream.ids import BinId, Digest, Epoch
from midstream.runtime.known_assignments import KnownAssignments
from midstream.runtime.reporting import failure_of
from midstream.runtime.switch_lock import SwitchLock
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess
from midstream.state.lineage import Lineage
from midstream.state.retirement import Retirement

__all__ = ["TaskHost", "run_attempt"]

_log = logging.getLogger("midstream")


class TaskHost(Protocol):
    """The worker process that an attempt runs in, or its stand-in on the local runtime."""

    name: WorkerId
    resources: Resources
    state: StateAccess
    retirement: Retirement
    clock: Clock
    known: KnownAssignments
    """Replaced when a task gets others."""

    def ask(self, message: FromTask) -> ToTask:
        """Return the coordinator's answer. Raises :class:`~midstream.errors.Fenced` if it refuses."""

    def sizer(self, program: Digest) -> SliceSizer:
        """The sizer of slices for a program."""

    def forget_all_but(self, live: Collection[Digest]) -> None:
        """Drop everything that no task of the job will use any more."""

    def attending(self, task: TaskId, work: TaskRun) -> AbstractContextManager[SwitchLock]:
        """Within this block, the task is notified of changes."""

    def free(self, lineage: Lineage, bins: Collection[BinId]) -> None:
        """Free bins of an operator in the background."""

    def keep(self, operator: str, bins: Collection[BinId]) -> None:
        """Free none of these bins, because the executor needs them again."""

    def watched(self, task: TaskId, order: ControlOrder, operator: str, handler: str) -> AbstractContextManager[None]:
        """Within this block, a handler of a control operation runs; if it does not return in time, the run is given
        up."""

    def after_task(self, program: Digest) -> None:
        """A task has reported, so this process may tidy up."""


def run_attempt(task: TaskId, host: TaskHost, batches: Iterator[pa.RecordBatch]) -> Generator[list[pa.RecordBatch]]:
    """Run one attempt. Never runs on a guessed configuration.

    Yields the batches that are ready to leave, perhaps none. At each yield the runtime may do other things, and may
    switch the task if it is between slices. Closing the generator kills the attempt there.
    """
    known = host.known
    order = host.ask(TaskStarted(task, host.name, known.digest))
    assert isinstance(order, TaskOrder)
    host.known = known = known.under(order)
    host.forget_all_but(order.live)
    yield []
    revision = order.revision
    try:
        sizer = host.sizer(order.program)
        sizer.target_ns = 1000 * knob_value(order.knobs, "slice")
        guard = partial(host.watched, task)
        work = TaskRun(
            task, order, known.assignments, host.resources, host.state, clock=host.clock, sizer=sizer, guard=guard
        )
        with contextlib.closing(work), host.attending(task, work) as lock:
            lock.handle_here(each for each in order.controls if each.mode is ControlMode.FAST)
            try:
                for ready in work.run(lock.taking(batches)):
                    with lock.waiting():
                        yield ready
                report = work.finish()
                yield []  # its changes are written, but not reported yet
            finally:
                revision = work.revision
    except OperatorFailed as error:
        host.ask(TaskFailed(task, failure_of(error), revision, error.fields.get("operation", 0)))
        raise error from None
    host.ask(report)
    if (wanted := work.wanted_bins()) is not None:
        _retire(host, task.epoch, work.lineages, wanted)
    host.after_task(order.program)


def _retire(host: TaskHost, epoch: Epoch, lineages: Collection[Lineage], wanted: Collection[BinId]) -> None:
    """Have bins freed that this host no longer uses. The task is over, so an error here must not fail it."""
    for lineage in lineages:
        name = lineage.operator
        host.keep(name, wanted)
        try:
            due = host.retirement.due(name, epoch, wanted, partial(host.state.held, lineage))
        except (MidstreamError, OSError) as error:
            _log.warning("bins of %r that no partition here owns any more cannot be found: %s", name, error)
            continue
        if due:
            host.free(lineage, due)
