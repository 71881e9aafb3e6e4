"""Properties of the plans of all graphs. The graphs are those of the simulation."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from midstream.flow.model import Graph, KeyBy, Operator, Port, Sink, Source, Transform
from midstream.flow.spec import Delivery, Form
from midstream.operators.filter import Filter
from midstream.planner.stages import Leaves, Plan, Wire, compile_plan
from tests.examples import examples
from tests.simulation.flows import random_case

rngs = st.randoms(use_true_random=False)
some = examples(40)


def plan_of(rng: random.Random) -> Plan:
    return compile_plan(random_case(rng).flow.graph)


def stage_of(plan: Plan) -> dict[str, int]:
    return {name: stage.index for stage in plan.stages for name in stage.operators}


def is_outlet(operator: Operator) -> bool:
    return isinstance(operator.spec, Sink | Transform)


def feeds_stages(plan: Plan, name: str) -> bool:
    """Whether a transform's rows enter a stage again: at least one reader is not an outlet."""
    return any(not is_outlet(plan.graph[consumer]) for consumer in plan.graph.consumers(Port(name)))


def last_of_segment(plan: Plan, segment: int) -> int:
    return plan.segment(segment)[-1].index


def end_of(plan: Plan, wire: Wire) -> int:
    """The first stage that does not carry the wire."""
    return last_of_segment(plan, wire.segment) + 1 if wire.target is None else wire.target


@some
@given(rngs)
def test_every_operator_runs_in_exactly_one_stage(rng):
    plan = plan_of(rng)
    runs = [name for stage in plan.stages for name in stage.operators]
    wanted = [
        op.name
        for op in plan.graph
        if not isinstance(op.spec, Sink | Transform) or (isinstance(op.spec, Transform) and feeds_stages(plan, op.name))
    ]
    assert sorted(runs) == sorted(wanted)


@some
@given(rngs)
def test_every_edge_is_realised_exactly_once(rng):
    plan = plan_of(rng)
    stages = stage_of(plan)
    for port, consumer in plan.graph.edges:
        wires = [wire for wire in plan.wires if wire.port == port and consumer in wire.consumers]
        handed_over = isinstance(plan.graph[port.operator].spec, Transform) and is_outlet(plan.graph[consumer])
        together = not is_outlet(plan.graph[consumer]) and stages[port.operator] == stages[consumer]
        assert len(wires) + handed_over + together == 1, (port, consumer)
        if is_outlet(plan.graph[consumer]):
            assert plan.feeds[consumer] == (port.operator if handed_over else wires[0].id)
    reads = sum(len(wire.consumers) for wire in plan.wires)
    assert reads <= len(plan.graph.edges)
    assert all((wire.port, name) in plan.graph.edges for wire in plan.wires for name in wire.consumers)


@some
@given(rngs)
def test_consumers_in_one_place_share_a_wire(rng):
    plan = plan_of(rng)
    ends = [(wire.port, wire.target) for wire in plan.wires]
    assert len(set(ends)) == len(ends)


@some
@given(rngs)
def test_wires_only_lead_forward_and_every_stage_between_carries_them(rng):
    plan = plan_of(rng)
    stages = stage_of(plan)
    for number, wire in enumerate(plan.wires):
        assert wire.id == number
        assert wire.origin == stages[wire.port.operator]
        assert wire.origin < end_of(plan, wire)
        if wire.target is not None:
            assert {stages[name] for name in wire.consumers} == {wire.target}
        for stage in plan.stages:
            assert (wire.id in stage.emits) == (stage.index == wire.origin)
            assert (wire.id in stage.receives) == (stage.index == wire.target)
            assert (wire.id in stage.carries) == (wire.origin < stage.index < end_of(plan, wire))


@some
@given(rngs)
def test_an_operator_runs_in_the_earliest_stage_its_inputs_allow(rng):
    """Every operator except sources has an input that is not available in an earlier stage."""
    plan = plan_of(rng)
    stages = stage_of(plan)
    for op in plan.graph:
        if is_outlet(op) or isinstance(op.spec, Source):
            continue
        earliest = []
        for port in op.inputs:
            keyed = isinstance(plan.graph[port.operator].spec, KeyBy) and not port.branch
            earliest.append(stages[port.operator] + keyed)
        # Every stage of a segment except the first follows an exchange, so rows that were keyed in an earlier segment
        # wait for the second stage.
        mine = plan.stages[stages[op.name]]
        first = plan.segment(mine.segment)[0].index
        waits = any(
            isinstance(plan.graph[port.operator].spec, KeyBy)
            and not port.branch
            and plan.stages[stages[port.operator]].segment < mine.segment
            for port in op.inputs
        )
        assert stages[op.name] == max(*earliest, first + 1 if waits and max(earliest) == first else 0, 0), op.name


@some
@given(rngs)
def test_an_exchange_lies_between_a_key_by_and_its_readers(rng):
    plan = plan_of(rng)
    stages = stage_of(plan)
    for op in plan.graph.of(KeyBy):
        assert isinstance(op.spec, KeyBy)
        for name in plan.graph.consumers(Port(op.name)):
            if is_outlet(plan.graph[name]):
                continue
            assert stages[name] > stages[op.name]
            crossed = [plan.stages[index].leaves for index in range(stages[op.name], stages[name])]
            assert Leaves.EXCHANGE in crossed
            [wire] = [wire for wire in plan.wires if wire.port == Port(op.name) and name in wire.consumers]
            assert wire.key == op.spec.columns
    keyed = {wire.port.operator for wire in plan.wires if wire.key}
    assert all(isinstance(plan.graph[name].spec, KeyBy) for name in keyed)


@some
@given(rngs)
def test_stages_form_a_chain(rng):
    plan = plan_of(rng)
    assert [stage.index for stage in plan.stages] == list(range(len(plan.stages)))
    for before, after in pairwise(plan.stages):
        assert after.segment - before.segment in (0, 1)
        # Only wires that leave one stage can enter the next: no wire skips a stage.
        assert {*after.receives, *after.carries} <= {*before.emits, *before.carries}
        assert (before.leaves is Leaves.EXCHANGE) == (before.segment == after.segment)
    assert plan.stages[-1].leaves is not Leaves.EXCHANGE


@some
@given(rngs)
def test_rows_enter_where_a_segment_starts(rng):
    plan = plan_of(rng)
    for stage in plan.stages:
        kinds = {type(plan.graph[name].spec) for name in stage.inlets}
        is_first = plan.segment(stage.segment)[0] is stage
        assert kinds <= ({Source} if stage.segment == 0 else {Transform})
        assert is_first or not stage.inlets
        assert stage.inlets or stage.takes_frames, "a stage that nothing enters"


@some
@given(rngs)
def test_plain_columns_leave_only_for_a_single_sink_that_reads_a_dataframe(rng):
    plan = plan_of(rng)
    for stage in plan.stages:
        leaving = [wire for wire in plan.wires if wire.id in {*stage.emits, *stage.carries}]
        if stage.leaves is Leaves.TYPED:
            [wire] = [wire for wire in leaving if not wire.is_written]
            assert wire.id in stage.emits, "frames that pass through cannot become columns"
            [name] = wire.consumers
            spec = plan.graph[name].spec
            assert isinstance(spec, Sink)
            assert spec.delivery is Delivery.FRAME
            assert wire.target is None


@some
@given(rngs)
def test_compiling_is_deterministic(rng):
    graph = random_case(rng).flow.graph
    assert compile_plan(graph).describe() == compile_plan(graph).describe()


# ── from one plan to the next ─────────────────────────────────────────────────────────────────────────────────────


def with_filter(graph: Graph, number: int, rng: random.Random) -> Graph:
    """The graph with one more filter, before one reader of a port or before all of them."""
    edges = [(port, name) for port, name in graph.edges if not graph.is_keyed(port)]
    port, reader = rng.choice(edges)
    name, takes_all = f"inserted {number}", rng.random() < 0.5
    operators: list[Operator] = []
    for op in graph:
        if takes_all or op.name == reader:
            op = replace(op, inputs=tuple(Port(name) if each == port else each for each in op.inputs))
        operators.append(op)
        if op.name == port.operator:
            operators.append(Operator(name, Filter(Form.ROWS), (port,), graph.schema_of(port)))
    return replace(graph, operators=tuple(operators))


def without_filter(graph: Graph, rng: random.Random) -> Graph:
    """The graph without one of its filters; the filter's readers read its input instead."""
    filters = [op for op in graph if isinstance(op.spec, Filter) and len(op.ports) == 1]
    if not filters:
        return graph
    gone = rng.choice(filters)
    kept = [
        replace(op, inputs=tuple(gone.inputs[0] if each == Port(gone.name) else each for each in op.inputs))
        for op in graph
        if op.name != gone.name
    ]
    return replace(graph, operators=tuple(kept))


def readers(plan: Plan) -> dict[int, tuple[str, ...]]:
    """Who reads each wire, by number."""
    return {wire.id: wire.consumers for wire in plan.wires}


def identities(plan: Plan) -> dict[int, tuple[Port, tuple[int, int] | None]]:
    """The identity of each wire, by number: its port, and the segment and the depth of the stage it leads to."""
    starts = {segment: plan.segment(segment)[0].index for segment in range(plan.segments)}
    segments = {stage.index: stage.segment for stage in plan.stages}
    return {
        wire.id: (
            wire.port,
            None if wire.target is None else (segments[wire.target], wire.target - starts[segments[wire.target]]),
        )
        for wire in plan.wires
    }


@some
@given(rngs)
def test_wires_keep_their_numbers_and_no_number_is_reused(rng):
    graph = random_case(rng).flow.graph
    plan = compile_plan(graph)
    assert sorted(wire.id for wire in plan.wires) == list(range(len(plan.wires))), "the first plan counts from 0"
    owners, known = identities(plan), readers(plan)
    for step in range(6):
        graph = with_filter(graph, step, rng) if rng.random() < 0.6 else without_filter(graph, rng)
        before, plan = identities(plan), compile_plan(graph, plan.numbers)
        after = identities(plan)
        assert set(after.values()) == set(identities(compile_plan(graph)).values()), "numbers change nothing else"
        for number, wire in before.items():
            if wire in after.values():
                assert after[number] == wire
        for number, wire in after.items():
            was, place = owners.setdefault(number, wire)
            same_readers = (place, known.get(number)) == (wire[1], readers(plan)[number])
            assert (was, place) == wire or same_readers, "a number stays with a port, or with the readers of a place"
        owners.update(after)
        known.update(readers(plan))
        assert {feed for feed in plan.feeds.values() if isinstance(feed, int)} <= set(after)
