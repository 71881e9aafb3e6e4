"""From an operator's description to the step that runs it."""

from __future__ import annotations

from midstream.engine.operators.base import Step
from midstream.engine.operators.filter import filter_step
from midstream.engine.operators.flat_map import flat_map_step
from midstream.engine.operators.lookup import lookup_step
from midstream.engine.operators.map import map_step
from midstream.engine.operators.passing import pass_on
from midstream.engine.operators.route import route_step
from midstream.engine.program import StageProgram
from midstream.engine.resources import Resources
from midstream.flow.model import Filter, FlatMap, KeyBy, Lookup, Map, Operator, Route, Sink, Source, Transform, Union


def step_of(operator: Operator, program: StageProgram, resources: Resources) -> Step:
    """Load what the operator needs and give its step."""
    match operator.spec:
        case Source() | Transform() | Union() | KeyBy():
            return pass_on
        case Map() as spec:
            return map_step(operator, spec, resources.function(program.blobs[operator.name], operator.name))
        case Filter() as spec:
            return filter_step(operator, spec, resources.function(program.blobs[operator.name], operator.name))
        case FlatMap() as spec:
            return flat_map_step(operator, spec, resources.function(program.blobs[operator.name], operator.name))
        case Route() as spec:
            return route_step(operator, spec, resources.function(program.blobs[operator.name], operator.name))
        case Lookup() as spec:
            on = tuple(theirs for _, theirs in spec.on)
            return lookup_step(operator, spec, resources.table(program.blobs[operator.name], on))
        case Sink():
            raise AssertionError(f"sink {operator.name!r} is written by the runtime, not by a stage")
