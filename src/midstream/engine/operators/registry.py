"""From an operator's description to the operator at work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from midstream.data.times import EpochTimes
from midstream.engine.operators.aggregate import aggregate_at_work
from midstream.engine.operators.base import AtWork, OperatorStep
from midstream.engine.operators.distinct import distinct_at_work
from midstream.engine.operators.filter import filter_step
from midstream.engine.operators.flat_map import flat_map_step
from midstream.engine.operators.join import join_at_work
from midstream.engine.operators.lookup import lookup_step
from midstream.engine.operators.map import map_step
from midstream.engine.operators.pass_through import passing_step
from midstream.engine.operators.process import keeper_of, process_at_work
from midstream.engine.operators.route import route_step
from midstream.engine.operators.transact import engine_of, transact_at_work
from midstream.engine.resources import Resources
from midstream.flow.model import (
    Aggregate,
    Distinct,
    Filter,
    FlatMap,
    Join,
    KeyBy,
    Lookup,
    Map,
    Operator,
    Process,
    Route,
    Source,
    Transact,
    Transform,
    Union,
)
from midstream.ids import Revision
from midstream.planner.programs import StageProgram
from midstream.state.keeper import HandleKeeper
from midstream.state.task import TaskState


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


def at_work(operator: Operator, parts: Parts) -> AtWork:
    """Load what the operator needs and put it in place."""
    takes = parts.program.inputs[operator.name]
    match operator.spec:
        case Process() as spec:
            migrations = parts.migrations(operator)
            if operator.name not in parts.keepers:
                state = parts.states[operator.name]
                parts.keepers[operator.name] = keeper_of(
                    operator, spec, takes[0], state, parts.times, has_levels=bool(migrations)
                )
            return process_at_work(
                operator,
                spec,
                parts.function(operator),
                takes[0],
                parts.keepers[operator.name],
                parts.revision,
                migrations,
                has_event_times=parts.program.has_event_times,
            )
        case Aggregate() as spec:
            return aggregate_at_work(operator, spec, takes[0], parts.states[operator.name], parts.times)
        case Distinct() as spec:
            return distinct_at_work(operator, spec, takes[0], parts.states[operator.name], parts.times)
        case Join() as spec:
            return join_at_work(operator, spec, (takes[0], takes[1]), parts.states[operator.name], parts.times)
        case Transact() as spec:
            transactions: Any = parts.function(operator)
            engine = parts.resources.made(
                "engine",
                parts.program.blobs[operator.name],
                takes[0].to_string(),
                lambda: engine_of(operator, spec, transactions, takes[0]),
            )
            return transact_at_work(operator, spec, engine, parts.states[operator.name], parts.times, parts.revision)
    return AtWork((_step_of(operator, parts),) * len(takes))


def _step_of(operator: Operator, parts: Parts) -> OperatorStep:
    """The step of an operator without state; it does not matter to it which of its inputs rows come from."""
    match operator.spec:
        case Source() | Transform() | Union() | KeyBy():
            return passing_step(operator)
        case Map() as spec:
            return map_step(operator, spec, parts.function(operator))
        case Filter() as spec:
            return filter_step(operator, spec, parts.function(operator))
        case FlatMap() as spec:
            return flat_map_step(operator, spec, parts.function(operator))
        case Route() as spec:
            return route_step(operator, spec, parts.function(operator))
        case Lookup() as spec:
            on = tuple(theirs for _, theirs in spec.on)
            return lookup_step(operator, spec, parts.resources.table(parts.program.blobs[operator.name], on))
    raise AssertionError(f"{operator.kind} {operator.name!r} does not run in a stage")
