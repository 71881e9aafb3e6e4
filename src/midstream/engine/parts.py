"""From an operator's description to the operator at work in a task."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from midstream.data.times import EpochTimes
from midstream.engine.aggregation.combiner import Combiner
from midstream.engine.bad_rows import Aside, Screen
from midstream.engine.resources import Resources
from midstream.engine.steps import ONLY, AtWork, OperatorStep
from midstream.flow.model import Operator, Source
from midstream.flow.spec import OnError, Spec
from midstream.ids import Digest, Revision
from midstream.planner.programs import StageProgram
from midstream.state.keeper import HandleKeeper
from midstream.state.task import TaskState

__all__ = ["Parts", "TaskSpec", "at_work", "combiner_of", "pass_on", "preload"]


@dataclass(frozen=True)
class Parts:
    """What a task has to put its operators together from.

    ``keepers`` holds what has been put together of processes; revisions of one share it.
    """

    program: StageProgram
    resources: Resources
    states: Mapping[str, TaskState]
    times: EpochTimes
    revision: Revision
    keepers: dict[str, HandleKeeper] = field(default_factory=dict)

    def under(self, program: StageProgram, revision: Revision) -> Parts:
        """The same task, another revision."""
        return replace(self, program=program, revision=revision)

    def function(self, operator: Operator) -> Callable[..., Any]:
        """The user's function of an operator, opened."""
        return self.resources.function(self.program.blobs[operator.name], operator.name)

    def migrations(self, operator: Operator) -> list[tuple[Revision, Callable[..., Any]]]:
        """The functions that bring an operator's state up to date."""
        return [
            (each.revision, self.resources.function(each.function, operator.name))
            for each in self.program.migrations.get(operator.name, ())
        ]

    def takes(self, operator: Operator) -> tuple[pa.Schema, ...]:
        """The schemas of the rows that an operator takes, one for each input."""
        return self.program.inputs[operator.name]

    def state(self, operator: Operator) -> TaskState:
        """The state of an operator in this task."""
        return self.states[operator.name]


class TaskSpec(Spec, ABC):
    """The description of an operator that does something to rows in a task; others let them pass as they are."""

    @abstractmethod
    def at_work(self, operator: Operator, parts: Parts) -> AtWork:
        """Load what the operator needs and put it in place."""

    def preload(self, operator: str, digest: Digest, resources: Resources) -> None:
        """Load one of its blobs before a task needs it."""
        resources.function(digest, operator)

    def combiner(self, operator: Operator, takes: pa.Schema) -> Combiner:
        """What adds up rows before they travel to it, if it is :attr:`combinable`."""
        raise NotImplementedError(f"rows for a {self.kind} cannot be added up before")


def at_work(operator: Operator, parts: Parts) -> AtWork:
    """Load what an operator needs and put it in place."""
    spec = operator.spec
    if isinstance(spec, TaskSpec):
        return spec.at_work(operator, parts)
    return AtWork((_passing_step(operator),) * len(parts.takes(operator)))


def combiner_of(operator: Operator, takes: pa.Schema) -> Combiner:
    """What adds up rows of these columns before they travel to an operator that is combinable."""
    assert isinstance(operator.spec, TaskSpec)
    return operator.spec.combiner(operator, takes)


def preload(program: StageProgram, resources: Resources) -> None:
    """Load all that a program needs. What cannot be loaded is left for the task that wants it, which can say so."""
    for op in program.operators:
        if isinstance(op.spec, TaskSpec):
            with contextlib.suppress(Exception):
                for digest in program.digests_of(op.name):
                    op.spec.preload(op.name, digest, resources)


def pass_on(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
    """Rows in, the same rows out."""
    return {ONLY: batch}


def _passing_step(operator: Operator) -> OperatorStep:
    """The step of operators that let rows pass as they are: sources and transforms (where rows enter), unions, key_by.

    What a key_by means happens on its wires, which send each row to the partition that owns its key. With
    ``on_error="branch"``, sources and key_bys let only those rows pass that have a usable time or key.
    """
    if operator.on_error is OnError.FAIL:
        return pass_on
    spec = operator.spec
    screen = Screen(
        Aside(operator),
        keys=spec.partition_by or (),
        times=(spec.event_time,) if isinstance(spec, Source) and spec.event_time is not None else (),
    )

    def step(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        good, aside = screen(batch)
        return {ONLY: good, **aside}

    return step
