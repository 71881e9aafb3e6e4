"""One attempt of a task, on any runtime: from its order to its report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import pyarrow as pa

from midstream.checkpoint.audit_files import write_history
from midstream.control.messages import (
    Exhausted,
    Handled,
    Reached,
    StageChange,
    StateChange,
    SwitchRequested,
    TaskFinished,
    TaskId,
    TaskOrder,
)
from midstream.engine.audit_recorder import Recorder
from midstream.engine.clock import Clock
from midstream.engine.control_handlers import Guard, HandlersInTask, Surroundings, unguarded
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlOrder
from midstream.engine.failure import failed
from midstream.engine.file_outlets import FileOutlets
from midstream.engine.resources import Resources
from midstream.engine.runner import RevisedStage, StageRunner
from midstream.engine.slices import SliceSizer
from midstream.engine.task_controls import TaskControls
from midstream.errors import CheckpointError, StateError
from midstream.ids import BinId, Digest, Revision
from midstream.planner.assignment import Assignments
from midstream.planner.programs import StageProgram
from midstream.state.access import StateAccess, resident_bytes
from midstream.state.files import Author
from midstream.state.lineage import Lineage
from midstream.state.task import TaskState


class TaskRun:
    """Runs a task by its order. Used once; :meth:`close` releases what it holds."""

    def __init__(
        self,
        task: TaskId,
        order: TaskOrder,
        assignments: Assignments,
        resources: Resources,
        access: StateAccess,
        *,
        clock: Clock,
        sizer: SliceSizer,
        guard: Guard = unguarded,
    ) -> None:
        self._task = task
        self._resources = resources
        self._held: list[Digest] = []
        self._states: dict[str, TaskState] = {}
        self._audit = order.audit
        self._recorder = None if self._audit is None else Recorder(self._audit.column)
        self._outlets: FileOutlets | None = None
        self._clock = clock
        self._began_at = clock.wall_us() / 1e6
        try:
            program = self._program(order.program)
            self._outlets = FileOutlets(
                program.tables, program.schemas, epoch=task.epoch, partition=task.partition, durable=access.durable
            )
            self._around = Surroundings(
                program, lambda: self._runner.nodes, resources, clock, task.epoch, task.partition, guard
            )
            here = assignments.get(task.stage)
            own = () if here is None else here.owned_by(task.partition)
            for operator, data in order.lineages.items():
                self._states[operator] = _open(access, operator, data, own)
            self._runner = StageRunner(
                program,
                resources,
                partition=task.partition,
                assignments=assignments,
                revision=order.revision,
                clock=clock,
                sizer=sizer,
                times=order.times,
                states=self._states,
                outlets=self._outlets,
                recorder=self._recorder,
                knobs=order.knobs,
                flushed=order.flushed,
                elsewhere=lambda operator, bins: access.contents(self._states[operator].lineage, bins),
            )
            aligned = [each for each in order.controls if each.mode is not ControlMode.FAST]
            if aligned:
                self._runner.take_part(TaskControls(aligned, order.senders, self._around))
        except BaseException:
            self.close()
            raise
        self._own = own
        self._beside = None if order.beside is None or here is None else tuple(map(here.owned_by, order.beside))
        self._awaited = order.awaited
        self._change = order.change
        self._switch_at = order.switch_at

    @property
    def revision(self) -> Revision:
        """The revision of the rows being processed."""
        return self._runner.at_work_under

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """Process all input; yield the batches that are ready to leave after every slice."""
        if self._change is not None:
            self._prepare(self._change)
            if self._switch_at is not None:
                self._runner.switch(self._switch_at)
        return self._runner.run(batches)

    def offer(self, change: StageChange) -> SwitchRequested | Exhausted | None:
        """The request to the coordinator when the task was told to switch; None if it is too late.

        Only between slices. If the coordinator agrees, :meth:`switch` comes next, else :meth:`stay`.
        """
        if self._change is not None:
            return None
        if self._runner.is_finishing:
            return self.exhausted(change)
        self._change = change
        self._prepare(change)
        return SwitchRequested(self._task, change.revision, self._runner.position)

    def exhausted(self, change: StageChange) -> Exhausted | None:
        """The message to the coordinator if the change can no longer affect this task; may be called at any time."""
        return Exhausted(self._task, change.revision) if self._runner.is_exhausted else None

    def switch(self) -> None:
        """Run under the new revision from now on."""
        self._runner.switch()

    def stay(self) -> None:
        """Run to the end as if there were no change, as other attempts of the task may have to."""
        self._runner.stay()

    def reached(self) -> Reached | None:
        """The report of operators that rows of the new revision have reached since the last call, or None."""
        operators = self._runner.newly_reached()
        return Reached(self._task, self.revision, operators) if operators else None

    def handle(self, order: ControlOrder) -> Handled:
        """Run the handlers of a fast control operation, and return the report. Only between slices."""
        handlers = HandlersInTask(order, self._around)
        handlers.sweep(reaches_state=False)
        return Handled(self._task, handlers.report())

    def _prepare(self, change: StageChange) -> None:
        self._runner.prepare(RevisedStage(change.revision, self._program(change.program), frozenset(change.heads)))

    def _program(self, digest: Digest) -> StageProgram:
        """Load a program, and hold it in this process until the task is over."""
        self._resources.hold(digest)
        self._held.append(digest)
        return self._resources.program(digest)

    def finish(self) -> TaskFinished:
        """Write the changes of state, and return the report. Only after :meth:`run`."""
        report = self._runner.report()
        return TaskFinished(
            task=self._task,
            operators=report.operators,
            received=report.received,
            sent=report.sent,
            emitted=report.emitted,
            states={operator: self._written(operator, state) for operator, state in self._states.items()},
            event_times=report.event_times,
            widest_row=report.widest_row,
            state_read=sum(state.bytes_read for state in self._states.values()),
            audit=self._recorded(),
            samples=report.samples,
            files={} if self._outlets is None else self._outlets.finish(),
            began_at=self._began_at,
            ended_at=self._clock.wall_us() / 1e6,
            bin_rows=report.bin_rows,
            memory=resident_bytes(),
            controls=report.controls,
        )

    def wanted_bins(self) -> frozenset[BinId] | None:
        """The bins of its stage that its executor owns or will own, as far as the order says; None if it does not."""
        if self._beside is None:
            return None
        return frozenset(chain(self._own, self._awaited, *self._beside))

    @property
    def lineages(self) -> tuple[Lineage, ...]:
        """The state that it began with, of those of its operators that have some."""
        return tuple(state.lineage for state in self._states.values())

    def _recorded(self) -> str | None:
        if self._recorder is None or self._audit is None:
            return None
        task = self._task
        name = f"{task.epoch}.{task.run}-{task.stage}-{task.partition}-{task.attempt}.arrow"
        write_history(self._audit.location, name, self._recorder.table())
        return name

    def close(self) -> None:
        """Release the state and everything that was loaded; remove the files of an attempt that did not finish."""
        if self._outlets is not None:
            self._outlets.close()
        for state in self._states.values():
            state.close()
        while self._held:
            self._resources.release(self._held.pop())

    def _written(self, operator: str, state: TaskState) -> StateChange:
        task = self._task
        author = Author(operator, task.epoch, task.run, task.partition, task.attempt)
        try:
            delta = state.write_delta(author)
            return StateChange(delta, tuple(state.write_rewrites(author)), state.delta_sizes)
        except (CheckpointError, StateError, OSError) as error:
            raise failed(operator, error, None) from error


def _open(access: StateAccess, operator: str, lineage: bytes, bins: tuple[BinId, ...]) -> TaskState:
    try:
        return access.open(Lineage.decode(lineage), bins)
    except (CheckpointError, StateError, OSError) as error:
        raise failed(operator, error, None) from error
