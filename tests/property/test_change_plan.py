"""Plans of changes against brute force: no execution that a plan allows lets one source row meet half of a change.

The oracle knows the protocol and the operators' contracts, and nothing of sub-DAGs, ancestors or rules. It follows one
source row through every interleaving, in which operators switch at any moment, emit whatever their contracts allow, and
take waiting rows in any order. Where a row enters a component (at a head, or from outside behind the heads), it gets
the revision that the operator is at; members that follow go by that. It follows two rows at a time at most: a row that
meets a mixture has two operations that show it, and whatever else came of it may as well have been dropped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from midstream.flow.aggregations import count
from midstream.flow.model import Graph, Operator, Port, Source, Transform, Union
from midstream.flow.spec import LATE, Form, How, Spec
from midstream.flow.windows import tumbling
from midstream.operators.aggregate import Aggregate
from midstream.operators.filter import Filter
from midstream.operators.flat_map import FlatMap
from midstream.operators.join import Join
from midstream.operators.map import Map
from midstream.operators.process import Process
from midstream.operators.route import Route
from midstream.planner.change_plan import ChangePlan, Scheduler, plan_change
from midstream.planner.mcs import components_of, covering
from midstream.planner.pruning import find_forks
from tests.examples import examples
from tests.naive import naive_plan

ROWS = pa.schema([])
FOLLOWED = 2

rngs = st.randoms(use_true_random=False)
some = examples(150)


# ── graphs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def join(unique: bool = False, how: How = How.INNER) -> Join:
    return Join(("k",), ("k",), "t", "t", how, within_us=0, unique=unique)


PIPELINED: tuple[tuple[Spec, int], ...] = (
    (Source(), 0),
    (Map(Form.ROWS), 1),
    (Map(Form.ROWS), 1),
    (Filter(Form.ROWS), 1),
    (FlatMap(Form.ROWS), 1),
    (Union(), 2),
    (Route(Form.ROWS, ("a", "b")), 1),
    (Process(("k",), Form.ROWS), 1),
    (Process(("k",), Form.ROWS, one_to_one=True), 1),
    (Process(("k",), Form.ROWS, unique=True), 1),
    (Process(("k",), Form.ROWS, unique=True), 1),
    (join(), 2),
    (join(unique=True), 2),
    (join(unique=True), 2),
)
BLOCKING: tuple[tuple[Spec, int], ...] = (
    (Aggregate(("k",), (("n", count()),)), 1),
    (Aggregate(("k",), (("n", count()),), tumbling("1 minute"), "t"), 1),
    (Transform(), 1),
    (join(how=How.LEFT), 2),
    (join(how=How.LEFT, unique=True), 2),
    (join(how=How.FULL), 2),
)


def random_graph(rng: random.Random, kinds: tuple[tuple[Spec, int], ...]) -> Graph:
    """Up to seven operators. New ones read mostly what is not read yet, so that there are long paths as well."""
    operators = [Operator("o0", Source(), (), ROWS)]
    unread, ports = [Port("o0")], [Port("o0")]
    for number in range(1, rng.randint(2, 7)):
        spec, inputs = rng.choice(kinds)
        read = tuple(rng.choice(unread if unread and rng.random() < 0.5 else ports) for _ in range(inputs))
        op = Operator(f"o{number}", spec, read, ROWS)
        operators.append(op)
        unread = [port for port in unread if port not in read] + list(op.ports)
        ports += op.ports
    return Graph("g", tuple(operators))


def random_change(rng: random.Random, graph: Graph) -> list[str]:
    names = [op.name for op in graph if not isinstance(op.spec, Source)] or ["o0"]
    return rng.sample(names, rng.randint(1, min(3, len(names))))


# ── the oracle ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, order=True)
class Row:
    """A row on its way to an operator, or (``held``) one that an operator will give at the end of the epoch."""

    at: str
    component: int = -1
    """The component that the row has entered, and the revision that it got there."""
    new: bool = False
    held: bool = False


@dataclass(frozen=True)
class Moment:
    """What matters of an execution so far."""

    rows: tuple[Row, ...]
    switched: frozenset[str] = frozenset()
    spent: frozenset[str] = frozenset()  # unique operators that have given their row
    met: frozenset[bool] = frozenset()  # revisions under which updated operators met the source row


class World:
    """All executions of a flow while a change is made."""

    def __init__(self, graph: Graph, plan: ChangePlan) -> None:
        self.graph = graph
        self.updated = plan.updated
        self.component = {name: i for i, each in enumerate(plan.components) for name in each.operators}
        inside = {edge for component in plan.components for edge in component.edges}
        self.entrances = set(plan.heads) | {
            reader for port, reader in graph.edges if reader in plan.members and (port.operator, reader) not in inside
        }
        self.entrances |= {op.name for op in graph.of(Join) if op.name in plan.members}  # by what they held back
        self.readers: dict[Port, list[str]] = {}
        for op in graph:
            for port in op.inputs:
                self.readers.setdefault(port, []).append(op.name)

    def can_mix(self) -> bool:
        pending = [Moment((row,)) for row in self.beginnings()]
        seen = set(pending)
        while pending:
            moment = pending.pop()
            if len(moment.met) == 2:
                return True
            for after in self.after(moment):
                if after not in seen:
                    seen.add(after)
                    pending.append(after)
        return False

    def beginnings(self) -> Iterator[Row]:
        for op in self.graph:
            if isinstance(op.spec, Source):
                yield Row(op.name)
            if isinstance(op.spec, Aggregate | Transform):
                yield Row(op.name, held=True)

    def after(self, moment: Moment) -> Iterator[Moment]:
        for entrance in self.entrances - moment.switched:
            yield Moment(moment.rows, moment.switched | {entrance}, moment.spent, moment.met)
        for place, row in enumerate(moment.rows):
            others = moment.rows[:place] + moment.rows[place + 1 :]
            component = self.component.get(row.at, row.component)
            new = row.new if component == row.component else row.at in moment.switched
            met = moment.met | {new} if row.at in self.updated and not row.held else moment.met
            for gifts, spends in self.outcomes(row, moment.spent):
                if len(gifts) + len(others) <= FOLLOWED:
                    # What was held back comes out at the end, when nothing is known of how it came.
                    given_on = (Row(at, held=True) if held else Row(at, component, new) for at, held in gifts)
                    rows = [*others, *given_on]
                    spent = moment.spent | {row.at} if spends else moment.spent
                    yield Moment(tuple(sorted(rows)), moment.switched, spent, met)

    def outcomes(self, row: Row, spent: frozenset[str]) -> Iterator[tuple[tuple[tuple[str, bool], ...], bool]]:
        """What an operator may do with a row: whom it gives rows to, and whether a unique one has then given its."""
        op = self.graph[row.at]
        main = op.ports[0] if op.ports else None
        for port in op.ports:
            readers = [(reader, False) for reader in self.readers.get(port, [])]
            each_once = list(subsets(readers))
            match op.spec:
                case Transform() | Aggregate() if port == main:
                    yield from ((chosen, False) for chosen in each_once if row.held or not chosen)
                case Join() | Process() if op.spec.unique and port == main:
                    if row.at not in spent:
                        yield from ((chosen, True) for chosen in each_once)
                case FlatMap() | Process(one_to_one=False) | Join() if port == main:
                    many = list(subsets(readers * 2)) if not row.held else each_once
                    yield from ((chosen, False) for chosen in many)
                case _:
                    yield from ((chosen, False) for chosen in each_once if not row.held)
        yield (), False
        if isinstance(op.spec, Join) and op.spec.how is not How.INNER and not row.held:
            yield ((row.at, True),), False


def subsets(readers: list[tuple[str, bool]]) -> Iterator[tuple[tuple[str, bool], ...]]:
    for size in range(FOLLOWED + 1):
        yield from set(combinations(readers, size))


def is_safe(graph: Graph, plan: ChangePlan) -> bool:
    return plan.from_next_epoch or not World(graph, plan).can_mix()


def shown(graph: Graph, updated: list[str]) -> str:
    reads = [f"{op.name} = {op.kind}({', '.join(map(str, op.inputs))})" for op in graph]
    return "; ".join([*reads, f"updated {updated}"])


# ── what the oracle itself must know ──────────────────────────────────────────────────────────────────────────────


def chain(*specs: Spec) -> Graph:
    """Operators one after the other: o0, o1, …"""
    return Graph(
        "chain",
        tuple(Operator(f"o{i}", spec, (Port(f"o{i - 1}"),) if i else (), ROWS) for i, spec in enumerate(specs)),
    )


def figure_2() -> Graph:
    detector = Process(("k",), Form.ROWS, one_to_one=True)
    return Graph(
        "fraud",
        (
            Operator("payments", Source(), (), ROWS),
            Operator("FC", detector, (Port("payments"),), ROWS),
            Operator("FM", detector, (Port("FC"),), ROWS),
            Operator("MC", Map(Form.ROWS), (Port("FM"),), ROWS),
        ),
    )


def figure_8() -> Graph:
    return Graph(
        "merchants",
        (
            Operator("payments", Source(), (), ROWS),
            Operator("FC", Map(Form.ROWS), (Port("payments"),), ROWS),
            Operator("J", FlatMap(Form.ROWS), (Port("FC"),), ROWS),
            Operator("SP", Route(Form.ROWS, ("x", "y")), (Port("J"),), ROWS),
            Operator("FMX", Map(Form.ROWS), (Port("SP", "x"),), ROWS),
            Operator("FMY", Map(Form.ROWS), (Port("SP", "y"),), ROWS),
            Operator("U", Union(), (Port("FMX"), Port("FMY")), ROWS),
        ),
    )


def test_the_naive_scheduler_mixes_in_figure_2():
    assert not is_safe(figure_2(), naive_plan(figure_2(), ["FM", "MC"]))
    assert is_safe(figure_2(), plan_change(figure_2(), ["FM", "MC"]))


def test_a_change_behind_a_join_mixes_in_figure_8_unless_it_begins_at_the_join():
    for updated in (["FMX"], ["FMX", "FMY"], ["U"]):
        assert not is_safe(figure_8(), naive_plan(figure_8(), updated))
        assert is_safe(figure_8(), plan_change(figure_8(), updated))
    # Without the join, a row goes to one of the two only: the paper's Figure 6.
    split = Graph("g", tuple(op for op in figure_8() if op.name not in ("FC", "J", "SP", "U")))
    source = Operator("SP", Route(Form.ROWS, ("x", "y")), (Port("payments"),), ROWS)
    split = Graph("g", (split.operators[0], source, *split.operators[1:]))
    assert is_safe(split, naive_plan(split, ["FMX", "FMY"]))


def test_one_unique_operator_protects_what_follows_it_but_not_itself():
    flow = chain(Source(), FlatMap(Form.ROWS), Process((), Form.ROWS, unique=True), Map(Form.ROWS))
    assert is_safe(flow, naive_plan(flow, ["o3"]))
    assert not is_safe(flow, naive_plan(flow, ["o2"]))


# ── what holds for every flow ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@some
@given(rngs)
def test_no_consistent_scheduler_lets_a_row_meet_a_mixture(rng):
    graph = random_graph(rng, PIPELINED)
    updated = random_change(rng, graph)
    for scheduler in Scheduler:
        assert is_safe(graph, plan_change(graph, updated, scheduler)), (scheduler, shown(graph, updated))


@pytest.mark.long
@some
@given(rngs)
def test_no_consistent_scheduler_lets_a_row_meet_a_mixture_behind_blocking_operators(rng):
    graph = random_graph(rng, PIPELINED + BLOCKING * 2)
    updated = random_change(rng, graph)
    for scheduler in (Scheduler.FRIES, Scheduler.FRIES_UNPRUNED, Scheduler.MARKER):
        assert is_safe(graph, plan_change(graph, updated, scheduler)), (scheduler, shown(graph, updated))


@some
@given(rngs)
def test_wherever_fries_does_more_than_the_naive_scheduler_the_naive_one_fails(rng):
    graph = random_graph(rng, PIPELINED)
    updated = random_change(rng, graph)
    fries, naive = plan_change(graph, updated), naive_plan(graph, updated)
    assert is_safe(graph, naive) == (fries.components == naive.components), shown(graph, updated)


@some
@given(rngs)
def test_every_fork_is_needed(rng):
    graph = random_graph(rng, PIPELINED)
    updated = random_change(rng, graph)
    forks, _ = find_forks(graph, updated, prune=True)
    assume(forks)
    for fork in forks:
        members = covering(graph, {*updated, *forks} - {fork})
        if fork not in members:
            lacking = ChangePlan(Scheduler.FRIES, tuple(updated), components_of(graph, members, updated))
            assert not is_safe(graph, lacking), (fork, shown(graph, updated))


@some
@given(rngs)
def test_pruning_only_takes_away(rng):
    graph = random_graph(rng, PIPELINED + BLOCKING)
    updated = random_change(rng, graph)
    pruned, unpruned = (plan_change(graph, updated, each) for each in (Scheduler.FRIES, Scheduler.FRIES_UNPRUNED))
    assert set(updated) <= pruned.members <= unpruned.members
    assert not unpruned.pruned
    assert not pruned.members & {each.operator for each in pruned.pruned}
    assert all(each.updated in updated for each in pruned.pruned)


@some
@given(rngs)
def test_components_cover_the_paths_between_members_and_nothing_else(rng):
    graph = random_graph(rng, PIPELINED + BLOCKING)
    plan = plan_change(graph, random_change(rng, graph), rng.choice(list(Scheduler)))
    place = {op.name: i for i, op in enumerate(graph)}
    edges = {(port.operator, reader) for port, reader in graph.edges}
    above = {op.name: {port.operator for port in op.inputs} for op in graph}
    for op in graph:
        above[op.name] |= {far for near in list(above[op.name]) for far in above[near]}
    assert sum(len(component.operators) for component in plan.components) == len(plan.members)
    for component in plan.components:
        members = set(component.operators)
        assert list(component.operators) == sorted(members, key=place.__getitem__)
        assert set(component.edges) == {edge for edge in edges if members & {*edge} and {*edge} <= plan.members}
        assert component.updated
        for name in members:
            assert (name in component.heads) == (not above[name] & plan.members)
            assert name in plan.updated or any(name in above[other] for other in component.updated)


def test_late_rows_pass_an_aggregate_as_they_came():
    windows = Aggregate(("k",), (("n", count()),), tumbling("1 minute"), "t")
    graph = Graph(
        "late",
        (
            Operator("in", Source(), (), ROWS),
            Operator("a", FlatMap(Form.ROWS), (Port("in"),), ROWS),
            Operator("w", windows, (Port("a"),), ROWS),
            Operator("on_time", Map(Form.ROWS), (Port("w"),), ROWS),
            Operator("too_late", Map(Form.ROWS), (Port("w", LATE),), ROWS),
        ),
    )
    assert plan_change(graph, ["on_time"]).members == {"on_time"}
    assert plan_change(graph, ["too_late"]).crosses == ("w",)
    assert not is_safe(graph, naive_plan(graph, ["too_late"]))
