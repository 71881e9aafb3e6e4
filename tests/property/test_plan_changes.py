"""Changes of the plan against brute force: no execution that a plan allows lets one source row meet half of a change.

The oracle is that of :mod:`tests.property.test_change_plan`, which follows a source row through every interleaving.
What it adds is that a flow has two plans: a row takes the edges of the plan that it is under. That it met one of the
plans is told by an edge which only this plan has, and by the revision of an updated function; of operators that "count
as updated" it knows nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.flow.model import Graph, Operator, Port, Source, Union
from midstream.flow.spec import Form
from midstream.operators.filter import Filter
from midstream.operators.flat_map import FlatMap
from midstream.operators.map import Map
from midstream.planner.change_plan import ChangePlan, Scheduler, plan_change
from midstream.planner.mcs import components_of
from midstream.planner.merged_flow import MergedFlow, merge
from tests.examples import examples
from tests.property.test_change_plan import BLOCKING, PIPELINED, ROWS, Moment, Row, World, random_graph

rngs = st.randoms(use_true_random=False)
some = examples(200)


# ── changes of a plan ─────────────────────────────────────────────────────────────────────────────────────────────


def in_order(operators: dict[str, Operator]) -> tuple[Operator, ...] | None:
    """Inputs first; None if there is a cycle."""
    placed: dict[str, Operator] = {}
    while len(placed) < len(operators):
        ready = [
            name
            for name, op in operators.items()
            if name not in placed and all(port.operator in placed for port in op.inputs)
        ]
        if not ready:
            return None
        placed.update((name, operators[name]) for name in ready)
    return tuple(placed.values())


def edited(rng: random.Random, graph: Graph) -> Graph:
    """The flow after one to three random edits of its plan; dangling ends are fine."""
    while True:
        operators = {op.name: op for op in graph}
        for number in range(rng.randint(1, 3)):
            edit = rng.choice((insert, insert, remove, rewire, exchange))
            edit(rng, operators, f"new{number}")
        ordered = in_order(operators)
        if ordered is not None:
            return Graph(graph.name, ordered)


def ports_of(operators: dict[str, Operator]) -> list[Port]:
    return [port for op in operators.values() for port in op.ports]


def insert(rng: random.Random, operators: dict[str, Operator], name: str) -> None:
    port = rng.choice(ports_of(operators))
    readers = [op for op in operators.values() if port in op.inputs]
    operators[name] = Operator(name, rng.choice((Map(Form.ROWS), Filter(Form.ROWS), FlatMap(Form.ROWS))), (port,), ROWS)
    for op in readers if rng.random() < 0.5 else readers[:1]:
        inputs = tuple(Port(name) if each == port else each for each in op.inputs)
        operators[op.name] = replace(op, inputs=inputs)


def remove(rng: random.Random, operators: dict[str, Operator], name: str) -> None:
    fit = [op for op in operators.values() if len(op.inputs) == 1 and len(op.ports) == 1]
    if fit:
        gone = rng.choice(fit)
        del operators[gone.name]
        for op in list(operators.values()):
            inputs = tuple(gone.inputs[0] if port.operator == gone.name else port for port in op.inputs)
            operators[op.name] = replace(op, inputs=inputs)


def rewire(rng: random.Random, operators: dict[str, Operator], name: str) -> None:
    fit = [op for op in operators.values() if op.inputs]
    if fit:
        op = rng.choice(fit)
        inputs = list(op.inputs)
        inputs[rng.randrange(len(inputs))] = rng.choice(ports_of(operators))
        operators[op.name] = replace(op, inputs=tuple(inputs))


def exchange(rng: random.Random, operators: dict[str, Operator], name: str) -> None:
    """Two neighbours change places."""
    fit = [
        (operators[op.inputs[0].operator], op)
        for op in operators.values()
        if len(op.inputs) == 1 and len(op.ports) == 1 and len(operators[op.inputs[0].operator].inputs) == 1
    ]
    fit = [(first, then) for first, then in fit if len(first.ports) == 1]
    if not fit:
        return
    first, then = rng.choice(fit)
    for op in list(operators.values()):
        inputs = tuple(Port(first.name) if port == Port(then.name) else port for port in op.inputs)
        operators[op.name] = replace(op, inputs=inputs)
    operators[then.name] = replace(then, inputs=first.inputs)
    operators[first.name] = replace(first, inputs=(Port(then.name),))


# ── the oracle ────────────────────────────────────────────────────────────────────────────────────────────────────


class TwoPlans(World):
    """All executions of a flow while its plan is changed."""

    def __init__(self, before: Graph, after: Graph, merged: MergedFlow, plan: ChangePlan, updated: set[str]) -> None:
        super().__init__(merged.graph, plan)
        self.updated = tuple(updated)
        renamed = {name: new for new, name in merged.old.items()}
        self.edges = (edges_of(before, renamed), edges_of(after, {}))
        self.ways = tuple({(port.operator, reader) for port, reader in edges} for edges in self.edges)
        self.by_plan = tuple(readers_of(edges) for edges in self.edges)
        names = [renamed.get(op.name, op.name) for op in before]
        self.gone = {name for name in names if name not in after}

    def after(self, moment: Moment) -> Iterator[Moment]:
        """As before, but a row is given to the readers of its plan, and an edge of one plan only is a proof."""
        for entrance in self.entrances - moment.switched:
            yield Moment(moment.rows, moment.switched | {entrance}, moment.spent, moment.met)
        for place, row in enumerate(moment.rows):
            others = moment.rows[:place] + moment.rows[place + 1 :]
            component = self.component.get(row.at, row.component)
            new = row.new if component == row.component else row.at in moment.switched and row.at not in self.gone
            met = moment.met | {new} if row.at in self.updated and not row.held else moment.met
            self.readers = self.by_plan[new]
            for gifts, spends in list(self.outcomes(row, moment.spent)):
                if len(gifts) + len(others) > 2:
                    continue
                proofs = {
                    new
                    for at, held in gifts
                    if not held
                    and not any((row.at, at) in {(p.operator, r) for p, r in e} for e in (self.edges[not new],))
                }
                rows = [*others, *(Row(at, held=True) if held else Row(at, component, new) for at, held in gifts)]
                spent = moment.spent | {row.at} if spends else moment.spent
                yield Moment(tuple(sorted(rows)), moment.switched, spent, met | proofs)


def edges_of(graph: Graph, renamed: dict[str, str]) -> list[tuple[Port, str]]:
    return [
        (Port(renamed.get(port.operator, port.operator), port.branch), renamed.get(op.name, op.name))
        for op in graph
        for port in op.inputs
    ]


def readers_of(edges: list[tuple[Port, str]]) -> dict[Port, list[str]]:
    found: dict[Port, list[str]] = {}
    for port, reader in edges:
        found.setdefault(port, []).append(reader)
    return found


def planned(before: Graph, after: Graph, updated: set[str], scheduler: Scheduler) -> tuple[MergedFlow, ChangePlan]:
    merged = merge(before, after, updated)
    return merged, plan_change(merged.graph, merged.changed, scheduler)


def can_mix(before: Graph, after: Graph, updated: set[str], merged: MergedFlow, plan: ChangePlan) -> bool:
    return not plan.from_next_epoch and TwoPlans(before, after, merged, plan, updated).can_mix()


def naive(merged: MergedFlow) -> ChangePlan:
    """Every operator that counts as updated takes the new plan by itself."""
    names = merged.changed
    edges = components_of(merged.graph, frozenset(names), names)
    alone = tuple(
        replace(component, operators=(name,), edges=(), heads=(name,), updated=(name,))
        for component in edges
        for name in component.operators
    )
    return ChangePlan(Scheduler.FRIES, names, alone)


def shown(before: Graph, after: Graph, updated: set[str]) -> str:
    sides = ["; ".join(f"{op.name} = {op.kind}({', '.join(map(str, op.inputs))})" for op in g) for g in (before, after)]
    return f"{sides[0]} → {sides[1]}, updated {sorted(updated)}"


def random_case(rng: random.Random, kinds: object = PIPELINED) -> tuple[Graph, Graph, set[str]]:
    before = random_graph(rng, kinds)  # type: ignore[arg-type]
    after = edited(rng, before)
    both = [op.name for op in before if op.name in after and not isinstance(op.spec, Source)]
    return before, after, set(rng.sample(both, rng.randint(0, min(2, len(both)))))


# ── what holds for every flow ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@some
@given(rngs)
def test_no_consistent_scheduler_lets_a_row_follow_two_plans(rng):
    before, after, updated = random_case(rng)
    for scheduler in (Scheduler.FRIES, Scheduler.FRIES_UNPRUNED, Scheduler.MARKER):
        merged, plan = planned(before, after, updated, scheduler)
        assert not can_mix(before, after, updated, merged, plan), (scheduler, shown(before, after, updated))


@pytest.mark.long
@some
@given(rngs)
def test_no_consistent_scheduler_lets_a_row_follow_two_plans_behind_blocking_operators(rng):
    before, after, updated = random_case(rng, PIPELINED + BLOCKING * 2)
    merged, plan = planned(before, after, updated, Scheduler.FRIES)
    assert not can_mix(before, after, updated, merged, plan), shown(before, after, updated)


def test_the_oracle_catches_operators_that_take_the_new_plan_by_themselves():
    caught = total = 0
    for seed in range(150):
        before, after, updated = random_case(random.Random(seed))
        merged, plan = planned(before, after, updated, Scheduler.FRIES)
        if merged.difference and any(len(component.operators) > 1 for component in plan.components):
            total += 1
            caught += TwoPlans(before, after, merged, naive(merged), updated).can_mix()
    assert caught >= 0.3 * total > 10, f"{caught} of {total}"


@some
@given(rngs)
def test_the_merged_flow_has_both_plans_and_no_cycle(rng):
    before, after, updated = random_case(rng, PIPELINED + BLOCKING)
    merged = merge(before, after, updated)
    names = [op.name for op in merged.graph]
    for op in merged.graph:  # inputs first, so there is no cycle
        assert all(names.index(port.operator) < names.index(op.name) for port in op.inputs)
    renamed = {name: new for new, name in merged.old.items()}
    found = set(edges_of(merged.graph, {}))
    assert set(edges_of(after, {})) | set(edges_of(before, renamed)) == found
    # State invariance: an operator is there twice only where one of it would make a cycle.
    once = {op.name: op for op in after}
    for op in before:
        inputs = (*once[op.name].inputs, *op.inputs) if op.name in once else op.inputs
        once[op.name] = replace(op, inputs=inputs)
    assert bool(merged.old) == (in_order(once) is None)


@some
@given(rngs)
def test_heads_are_operators_of_both_plans(rng):
    before, after, updated = random_case(rng, PIPELINED + BLOCKING)
    _, plan = planned(before, after, updated, Scheduler.FRIES)
    assert all(head in before and head in after for head in plan.heads), shown(before, after, updated)


def test_two_operators_that_change_places_occur_twice():
    def chain(*names: str) -> Graph:
        operators = [Operator("in", Source(), (), ROWS)]
        for name in names:
            spec = Union() if name == "out" else Filter(Form.ROWS)
            operators.append(Operator(name, spec, (Port(operators[-1].name),), ROWS))
        return Graph("g", tuple(operators))

    merged = merge(chain("f", "g", "out"), chain("g", "f", "out"), [])
    assert set(merged.old.values()) == {"f", "g"}
    assert [str(component) for component in plan_change(merged.graph, merged.changed).components] == [
        "{in, g, f, f (before), g (before)}"
    ]
