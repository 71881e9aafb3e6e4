"""One attempt of a task, on whatever runtime: from its assignment to its report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from midstream.control.messages import Assignment, StateChange, TaskFinished, TaskId
from midstream.engine.clock import Clock
from midstream.engine.failure import failed
from midstream.engine.resources import Resources
from midstream.engine.runner import StageRunner
from midstream.engine.slices import SliceSizer
from midstream.errors import CheckpointError, StateError
from midstream.ids import BinId
from midstream.state.access import StateAccess
from midstream.state.files import Author
from midstream.state.lineage import Lineage
from midstream.state.task import TaskState


class TaskRun:
    """Runs a task as it was assigned. Used once; what it holds open is closed by :meth:`close`."""

    def __init__(
        self,
        task: TaskId,
        assignment: Assignment,
        resources: Resources,
        access: StateAccess,
        *,
        clock: Clock,
        sizer: SliceSizer,
    ) -> None:
        self._task = task
        self._states: dict[str, TaskState] = {}
        own = [BinId(number) for number, owner in enumerate(assignment.bins) if owner == task.partition]
        try:
            for operator, data in assignment.lineages.items():
                self._states[operator] = _open(access, operator, data, own)
            self._runner = StageRunner(
                resources.program(assignment.program),
                resources,
                partition=task.partition,
                revision=assignment.revision,
                bins=assignment.bins,
                clock=clock,
                sizer=sizer,
                times=assignment.times,
                states=self._states,
            )
        except BaseException:
            self.close()
            raise

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """Process all input; yields after every slice what is ready to leave."""
        return self._runner.run(batches)

    def finish(self) -> TaskFinished:
        """Write what has changed of the state, and report. Only after :meth:`run`."""
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
        )

    def close(self) -> None:
        """Let go of state."""
        for state in self._states.values():
            state.close()

    def _written(self, operator: str, state: TaskState) -> StateChange:
        task = self._task
        author = Author(operator, task.epoch, task.run, task.partition, task.attempt)
        try:
            return StateChange(state.write_delta(author), tuple(state.write_rewrites(author)))
        except (CheckpointError, StateError, OSError) as error:
            raise failed(operator, error, None) from error


def _open(access: StateAccess, operator: str, lineage: bytes, bins: list[BinId]) -> TaskState:
    try:
        return access.open(Lineage.decode(lineage), bins)
    except (CheckpointError, StateError, OSError) as error:
        raise failed(operator, error, None) from error
