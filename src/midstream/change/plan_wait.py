"""When a change of the plan takes effect, and what it does, in words.

It takes effect within the running epoch if every stage keeps its wires, that is, what enters and leaves it, and for
whom. Tasks then hold two small plans, and each row goes through that of its revision. Otherwise it takes effect from
the next epoch, which simply has another plan.
"""

from __future__ import annotations

from collections.abc import Collection

from midstream.change.configuration import Configuration
from midstream.flow.model import Graph
from midstream.planner.merged_flow import MergedFlow
from midstream.planner.stages import Plan, Stage, Wire, compile_plan

__all__ = ["described_plan", "plan_that_waits"]


def plan_that_waits(before: Configuration, graph: Graph, merged: MergedFlow) -> str | None:
    """Why a change to this graph waits for the next epoch; None if it can take effect within the running one."""
    difference = merged.difference
    if not before.graph.reads_as(graph):
        return "the flow has other sources, to which Spark's query is handed over between two epochs"
    for name in (*difference.added, *difference.removed, *difference.replaced):
        op = graph[name] if name in graph else before.graph[name]
        if op.spec.is_stateful:
            return f"{op.kind} {name!r} keeps state, which a task opens when it starts"
        if op.spec.divides:
            return f"transform {name!r} divides the flow into other stages"
        if name in difference.replaced:
            return f"{name!r} becomes another kind of operator"
    for op in before.graph:
        if op.spec.is_outlet and op.name in graph:
            now = graph[op.name]
            takes = [[g.schema_of(port) for port in each.inputs] for g, each in ((before.graph, op), (graph, now))]
            if takes[0] != takes[1]:
                return f"{op.kind} {op.name!r} gets other columns"
    return _other_wires(before.plan, compile_plan(graph, before.plan.numbers))


def _other_wires(before: Plan, after: Plan) -> str | None:
    if len(before.stages) != len(after.stages):
        return f"the flow has {len(after.stages)} stages then, instead of {len(before.stages)}"
    if before.feeds != after.feeds:
        return "sinks or transforms read other wires"
    now = {wire.id: _ends(wire) for wire in after.wires}
    was = {wire.id: _ends(wire) for wire in before.wires}
    for old, new in zip(before.stages, after.stages, strict=True):
        if _shape(old) != _shape(new) or any(was[wire] != now[wire] for wire in (*old.emits, *old.receives)):
            return f"stage {old.index} ({', '.join(old.operators)}) gets other wires"
    return None


def _ends(wire: Wire) -> tuple[object, ...]:
    """All of a wire but its port: rows on it belong to its readers, whoever sent them."""
    return (wire.origin, wire.target, wire.consumers, wire.key, wire.segment, wire.is_written)


def _shape(stage: Stage) -> tuple[object, ...]:
    wires = (frozenset(stage.receives), frozenset(stage.carries), frozenset(stage.emits))
    return (stage.segment, stage.inlets, wires, stage.leaves)


def described_plan(
    before: Configuration, after: Configuration, merged: MergedFlow, flushed: Collection[str] = ()
) -> list[str]:
    """A line for each operator that comes, goes, or reads something else, and what becomes of its state."""
    difference, lines = merged.difference, []
    for name in (*difference.added, *difference.replaced):
        op = after.graph[name]
        reads = f" behind {', '.join(map(str, op.inputs))}" if op.inputs else ""
        verb = "replaces" if name in difference.replaced else "adds"
        state = ""
        if op.spec.is_stateful:
            found = name in before.kept or name in difference.replaced
            state = "; finds the state that was kept under its name" if found else "; starts without state"
            if name in after.initial and not found:
                state = "; starts with the state that it is given"
        lines.append(f"{verb} {op.kind} {name!r}{reads}{state}")
    for name in difference.removed:
        op = before.graph[name]
        state = "; its state is kept under its name, with all open windows and timers" if op.spec.is_stateful else ""
        if op.spec.reads_stream:
            state = "; how far it was read is kept under its name"
        if name in flushed:
            state = "; the epoch before that emits all that it holds open, and the rest of its state is kept"
        lines.append(f"removes {op.kind} {name!r}{state}")
    for name in difference.rewired:
        was, now = (", ".join(map(str, graph[name].inputs)) for graph in (before.graph, after.graph))
        lines.append(f"{name!r} reads {now} instead of {was}")
    return lines
