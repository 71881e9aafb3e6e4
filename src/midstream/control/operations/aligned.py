"""Control operations whose messages travel among the rows of one run: in band, or blocking, behind all of its rows.

They are fixed when the run is opened, so all attempts of a place get the same operations, and do the same. Which
messages a task waits for follows from how many tasks the stage before had, and on Spark all of these have finished when
the first task behind them starts. What a task reports of an operation is part of its report, so exactly the attempts
that count for the epoch count for the operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from midstream.control.messages import (
    ChangeBegun,
    Commit,
    Event,
    Instruction,
    OperationMessage,
    TaskFailed,
    TaskFinished,
    TaskId,
    TaskOrder,
)
from midstream.control.run_book import Place
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.ids import StageIndex

__all__ = ["Aligned"]


class Aligned:
    """An :class:`~midstream.control.operations.operation.Operation`: all control operations of a run that travel among
    its rows."""

    def __init__(self, orders: Sequence[ControlOrder]) -> None:
        self._orders = tuple(orders)
        self._reports: dict[Place, tuple[ControlReport, ...]] = {}
        self._finished: Counter[StageIndex] = Counter()
        """How many partitions of a stage have finished."""

    @property
    def is_over(self) -> bool:
        """They end with the run."""
        return False

    def on_begun(self, listening: Mapping[TaskId, bytes]) -> list[Instruction]:
        """No task runs yet."""
        return []

    def excludes(self, event: Event) -> str | None:
        """Messages are not ordered among rows of two revisions, so changes wait for the next epoch."""
        return "control operations are in progress" if isinstance(event, ChangeBegun) else None

    def on_task_started(self, task: TaskId, assignment: TaskOrder) -> TaskOrder:
        """Every task takes part."""
        senders = self._finished[StageIndex(task.stage - 1)]
        return msgspec.structs.replace(assignment, controls=(*assignment.controls, *self._orders), senders=senders)

    def on_message(self, peer: bytes, message: OperationMessage) -> list[Instruction] | None:
        """Tasks say nothing before they report."""
        return None

    def on_handled(self, places: Sequence[Place], report: ControlReport) -> list[Instruction] | None:
        """That is of a fast one."""
        return None

    def on_heard_again(self, task: TaskId, peer: bytes) -> list[Instruction]:
        """Tasks learn all there is to know when they start."""
        return []

    def on_task_ended(self, report: TaskFinished | TaskFailed) -> list[Instruction]:
        """The first attempt that has finished counts, as it does for everything else."""
        place = (report.task.stage, report.task.partition)
        if isinstance(report, TaskFinished) and place not in self._reports:
            self._reports[place] = report.controls
            self._finished[report.task.stage] += 1
        return []

    def on_run_over(self, commit: Commit) -> Commit:
        """The epoch is whole, so all tasks have reported."""
        found: dict[int, list[ControlReport]] = {order.number: [] for order in self._orders}
        for place in sorted(self._reports):
            for report in self._reports[place]:
                if report.number in found:
                    found[report.number].append(report)
        complete = {number: tuple(reports) for number, reports in found.items()}
        return msgspec.structs.replace(commit, controls={**commit.controls, **complete})
