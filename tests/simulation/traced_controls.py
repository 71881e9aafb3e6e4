"""A control operation that records what happens to it, and what Chi's Theorem 1 says about that.

Recorded completes respect every edge of the flow that tasks carry: an operator completes behind all of those that it
reads, in all of their tasks. Edges through a transform are not among them, because Spark runs it.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from typing import Any

from midstream import ControlContext, ControlMessage, ControlOperation
from midstream.flow.model import Graph
from midstream.planner.stages import Leaves, compile_plan
from midstream.testing import ControlAt

MODES = ("blocking", "in-band", "fast")


class Trace(ControlOperation):
    """Records all calls of handlers. Each operator tells those that read it when it completed."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def begin(self, ctx: ControlContext, message: ControlMessage) -> None:
        assert not ctx.variables, "they do not leak between operations, operators or tasks"
        ctx.variables["calls"] = [("begin", message.sender, message.operator)]
        ctx.variables["before"] = []

    def next(self, ctx: ControlContext, message: ControlMessage) -> None:
        ctx.variables["calls"].append(("next", message.sender, message.operator))
        ctx.variables["before"] += message.value or []

    def complete(self, ctx: ControlContext) -> list[Any]:
        now = time.perf_counter_ns()
        ctx.send([(ctx.operator, ctx.partition, now)])
        return [(ctx.operator, ctx.partition, now, ctx.number, ctx.variables["calls"], ctx.variables["before"])]


def random_controls(rng: random.Random, epochs: int) -> list[ControlAt]:
    """Some traced operations; several may be under way at the same time."""
    return [ControlAt(rng.randrange(max(1, epochs - 1)), Trace(rng.choice(MODES))) for _ in range(rng.randint(1, 5))]


def check_traces(graph: Graph, controls: list[ControlAt], *, ends: bool) -> Counter[str]:
    """Check all operations that have ended; how many there were of each mode. ``ends``: all of them must have."""
    found: Counter[str] = Counter()
    for control in controls:
        if ends:
            assert control.handle.is_over, f"{control.handle} does not end"
        if not control.handles or not control.handle.is_over or "the run is over" in str(control.handle.error):
            continue
        assert control.handle.error is None
        check_trace(graph, control.handle.result(0) or [], control.operation.mode, control.handle.number)
        found[control.operation.mode] += 1
    return found


def check_trace(graph: Graph, result: Any, mode: str, number: int) -> None:
    """Check what one operation has recorded."""
    plan = compile_plan(graph)
    stage_of = {name: stage for stage in plan.stages for name in stage.operators}
    places: dict[str, set[int]] = defaultdict(set)
    for operator, partition, _, seen, calls, _ in result:
        assert partition not in places[operator], f"{operator} completed twice at partition {partition}"
        places[operator].add(partition)
        assert seen == number
        [(first, *origin), (second, *same), *more] = calls
        assert (first, second, origin) == ("begin", "next", same)
        assert {call[0] for call in more} <= {"next"}
    if mode == "fast":
        return
    assert places.keys() == {name for name in stage_of if not graph[name].spec.is_outlet}
    tasks: dict[int, int | None] = {}
    for stage in plan.stages:
        found = {frozenset(places[name]) for name in stage.operators if name in places}
        assert len(found) <= 1, "a task takes part as a whole"
        tasks[stage.index] = len(*found) if found else None
    ends = {stage.index for stage in plan.stages if stage.leaves is not Leaves.EXCHANGE}
    for operator, partition, when, _, calls, before in result:
        told: dict[str, list[int]] = defaultdict(list)
        for upstream, at, earlier in before:
            assert earlier < when, f"{upstream} at {at} completed after {operator} at {partition}"
            told[upstream].append(at)
        messages, is_known = 0, True
        for port in () if operator in stage_of[operator].inlets else graph[operator].inputs:
            upstream = port.operator
            here, there = stage_of[operator].index, stage_of.get(upstream)
            if there is None or upstream not in places:
                is_known = False  # a transform
            elif there.index == here:
                assert set(told[upstream]) == {partition}
                messages += 1
            elif here - 1 not in ends:
                messages += tasks[here - 1] or 0
                is_known &= bool(tasks[here - 1])  # a stage that only passes rows on tells nothing
                if not ends & set(range(there.index, here)):  # else Spark stands between them
                    assert set(told[upstream]) == places[upstream], "values of all tasks that sent some"
        both_sides = len({port.operator for port in graph[operator].inputs}) < len(graph[operator].inputs)
        if messages and is_known and not both_sides:
            assert len(calls) - 1 == messages, "one message from each sender and for each wire"
        for upstream, at in told.items():
            assert len(at) == len(set(at)) or both_sides, f"{upstream} was counted twice"
