"""Builds the operators of a task from their descriptions."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pyarrow as pa

from midstream.data.key_space import KeySpace
from midstream.data.times import END_OF_TIME, EpochTimes
from midstream.engine.aggregation.combiner import Combiner
from midstream.engine.bad_rows import ErrorsBranch, Screen
from midstream.engine.resources import Resources
from midstream.engine.steps import ONLY, OperatorInTask, OperatorStep
from midstream.errors import FlowError
from midstream.flow.model import Operator, Source
from midstream.flow.spec import OnError, Spec
from midstream.ids import BinId, Digest, Revision
from midstream.planner.assignment import DividedBin
from midstream.planner.programs import StageProgram
from midstream.state.keeper import HandleKeeper
from midstream.state.task import TaskState

__all__ = ["Parts", "TaskSpec", "combiner_of", "instantiate", "pass_on", "preload"]


@dataclass(frozen=True)
class Parts:
    """What a task builds its operators from.

    ``keepers`` holds the state handles of each process, which all revisions of its function share.
    """

    program: StageProgram
    resources: Resources
    states: Mapping[str, TaskState]
    times: EpochTimes
    revision: Revision
    keepers: dict[str, HandleKeeper] = field(default_factory=dict)
    divided: tuple[DividedBin, ...] = ()
    """Bins of this stage whose rows others share."""
    united: tuple[DividedBin, ...] = ()
    """Bins that were divided before."""
    elsewhere: Callable[[str, Collection[BinId]], pa.Table] | None = None
    """The committed state of an operator in some bins, also of other tasks, as stored keys and values."""
    flushed: frozenset[str] = frozenset()
    """Operators for which time ends with this epoch: they close everything open."""

    def under(self, program: StageProgram, revision: Revision) -> Parts:
        """The parts of the same task under another revision."""
        return replace(self, program=program, revision=revision)

    def function(self, operator: Operator) -> Callable[..., Any]:
        """The user's function of an operator, after ``open()``."""
        return self.resources.function(self.program.blobs[operator.name], operator.name)

    def migrations(self, operator: Operator) -> list[tuple[Revision, Callable[..., Any]]]:
        """The functions that migrate an operator's state, with their revisions."""
        return [
            (each.revision, self.resources.function(each.function, operator.name))
            for each in self.program.migrations.get(operator.name, ())
        ]

    def takes(self, operator: Operator) -> tuple[pa.Schema, ...]:
        """The schemas of an operator's inputs."""
        return self.program.inputs[operator.name]

    def state(self, operator: Operator) -> TaskState:
        """The state of an operator in this task."""
        return self.states[operator.name]


class TaskSpec(Spec, ABC):
    """The description of an operator that processes rows in a task; all other operators pass rows on unchanged."""

    @abstractmethod
    def instantiate(self, operator: Operator, parts: Parts) -> OperatorInTask:
        """Load what the operator needs and build it in a task."""

    def preload(self, operator: str, digest: Digest, resources: Resources) -> None:
        """Load one of the operator's blobs before a task needs it."""
        resources.function(digest, operator)

    def load_initial(
        self, operator: Operator, takes: Sequence[pa.Schema], table: pa.Table, state: TaskState, clock: int
    ) -> None:
        """Write a table that a user gives as initial state into the state of all bins; ``clock`` is the current time.

        Raises :class:`FlowError` if the table does not fit.
        """
        raise FlowError(
            f"{self.kind} {operator.name!r} cannot be given an initial state; a process, an aggregate or a distinct can"
        )

    def combiner(self, operator: Operator, takes: pa.Schema, space: KeySpace) -> Combiner:
        """Pre-aggregates rows on their way to this operator. Only called if it is :attr:`combinable`."""
        raise AssertionError(f"rows for a {self.kind} cannot be pre-aggregated")


def instantiate(operator: Operator, parts: Parts) -> OperatorInTask:
    """Load what an operator needs and build it in a task."""
    spec = operator.spec
    if operator.name in parts.flushed:
        parts = replace(parts, times=msgspec.structs.replace(parts.times, watermark=END_OF_TIME))
    if isinstance(spec, TaskSpec):
        return spec.instantiate(operator, parts)
    return OperatorInTask((_passing_step(operator),) * len(parts.takes(operator)))


def combiner_of(operator: Operator, takes: pa.Schema, space: KeySpace) -> Combiner:
    """Pre-aggregates rows with these columns on their way to a combinable operator."""
    assert isinstance(operator.spec, TaskSpec)
    return operator.spec.combiner(operator, takes, space)


def preload(program: StageProgram, resources: Resources) -> None:
    """Load everything a program needs. Failures are ignored here; the task that needs the blob reports them."""
    for op in program.operators:
        if isinstance(op.spec, TaskSpec):
            with contextlib.suppress(Exception):
                for digest in program.digests_of(op.name):
                    op.spec.preload(op.name, digest, resources)


def pass_on(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
    """The step of an operator that passes all rows on unchanged."""
    return {ONLY: batch}


def _passing_step(operator: Operator) -> OperatorStep:
    """The step of operators that pass rows on unchanged: sources and transforms (where rows enter), unions, key_bys.

    The work of a key_by happens on its wires, which send each row to the partition that owns its key. With
    ``on_error="branch"``, sources and key_bys pass on only rows with a usable time or key.
    """
    if operator.on_error is OnError.FAIL:
        return pass_on
    spec = operator.spec
    screen = Screen(
        ErrorsBranch(operator),
        keys=spec.partition_by or (),
        times=(spec.event_time,) if isinstance(spec, Source) and spec.event_time is not None else (),
    )

    def step(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        good, bad = screen(batch)
        return {ONLY: good, **bad}

    return step
