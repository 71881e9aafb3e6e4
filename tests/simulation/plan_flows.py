"""Changes of the plan for the flows of :mod:`tests.simulation.changing_flows`, and what they make of a flow.

:func:`replanned` is the oracle's own idea of a change: it moves inputs in a dict, and knows no steps and no records.
Edges of different changes do not touch, so a change fits whether or not those before it were rolled back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from midstream import Flow, Insert, Remove, Rewire
from midstream.flow.edits import Edit
from midstream.flow.model import Graph, Operator, Port
from midstream.operators.filter import Filter
from midstream.operators.map import Map
from midstream.operators.stream import Stream

COLUMNS = {"id", "w", "trace"}


@dataclass(frozen=True)
class Inserted:
    """An operator that comes between an output and some readers; a process comes with a key_by."""

    name: str
    kind: str
    function: Any
    port: Port
    readers: tuple[str, ...]

    def build(self, stream: Stream) -> Stream:
        if self.kind == "process":
            return stream.key_by(f"{self.name}.key", "k").process(self.name, self.function, one_to_one=True)
        made: Stream = getattr(stream, self.kind)(self.name, self.function)
        return made

    def edit(self) -> Edit:
        return Insert(self.build, after=str(self.port), before=self.readers)


@dataclass(frozen=True)
class Removed:
    """An operator that goes."""

    name: str

    def edit(self) -> Edit:
        return Remove(self.name)


@dataclass(frozen=True)
class Exchanged:
    """Two operators, one behind the other, change places; ``readers`` read the second."""

    first: str
    then: str
    above: Port
    readers: tuple[tuple[str, int], ...]

    def edits(self) -> list[Edit]:
        moved = [Rewire(name, to=self.first, input=side) for name, side in self.readers]
        return [Rewire(self.then, to=str(self.above)), Rewire(self.first, to=self.then), *moved]


PlanEdit = Inserted | Removed | Exchanged


def edits_of(plan: Sequence[PlanEdit]) -> list[Edit]:
    return [each for edit in plan for each in (edit.edits() if isinstance(edit, Exchanged) else [edit.edit()])]


def replanned(graph: Graph, plan: Sequence[PlanEdit]) -> Graph:
    """The flow after a change of its plan."""
    operators = {op.name: op for op in graph}
    for edit in plan:
        match edit:
            case Inserted(name=name, port=port, readers=readers):
                flow = Flow("oracle")
                flow._operators.update(operators)
                edit.build(flow._stream_of(port))
                operators = dict(flow._operators)
                for reader in readers:
                    inputs = [Port(name) if each == port else each for each in operators[reader].inputs]
                    operators[reader] = replace(operators[reader], inputs=tuple(inputs))
            case Removed(name=name):
                gone = operators.pop(name)
                for op in list(operators.values()):
                    inputs = [gone.inputs[0] if each.operator == name else each for each in op.inputs]
                    operators[op.name] = replace(op, inputs=tuple(inputs))
            case Exchanged(first=first, then=then, above=above, readers=readers):
                operators[then] = replace(operators[then], inputs=(above,))
                operators[first] = replace(operators[first], inputs=(Port(then),))
                for name, side in readers:
                    inputs = list(operators[name].inputs)
                    inputs[side] = Port(first)
                    operators[name] = replace(operators[name], inputs=tuple(inputs))
        operators = inputs_first(operators)
    return Graph(graph.name, tuple(operators.values()))


def inputs_first(operators: dict[str, Operator]) -> dict[str, Operator]:
    placed: dict[str, Operator] = {}
    while len(placed) < len(operators):
        for name, op in operators.items():
            if name not in placed and all(port.operator in placed for port in op.inputs):
                placed[name] = op
    return placed


class Planner:
    """Draws changes of the plan for a case."""

    def __init__(self, rng: random.Random, graph: Graph, fixed: set[str], apart: set[Port]) -> None:
        self.rng = rng
        self.graph = graph
        self.fixed = fixed
        """Operators that changes update, or whose rows are not of the usual columns."""
        self.apart = apart
        """Outputs whose readers must all get the same."""
        self.touched: set[str] = set()
        self.count = 0

    def change(self, make: Any, version: int) -> list[PlanEdit]:
        found: list[PlanEdit] = []
        for _ in range(self.rng.choice((1, 1, 2))):
            edit = self.rng.choice((self.insert, self.insert, self.remove, self.exchange))(make, version)
            if edit is not None:
                found.append(edit)
        return found

    def insert(self, make: Any, version: int) -> PlanEdit | None:
        edges = [
            (port, op.name)
            for op in self.graph
            for port in op.inputs
            if port not in self.apart
            and set(self.graph.schema_of(port).names) >= COLUMNS
            and not op.spec.is_stateful
            and {port.operator, op.name}.isdisjoint(self.touched)
        ]
        if not edges:
            return None
        port, reader = self.rng.choice(edges)
        kind = self.rng.choice(("map", "filter", "filter", "process"))
        if kind == "process" and "k" not in self.graph.schema_of(port).names:
            return None
        self.count += 1
        name = f"inserted{self.count}"
        self.touched |= {port.operator, reader}
        return Inserted(name, kind, make(kind, name, version), port, (reader,))

    def _plain(self, op: Operator) -> bool:
        """A map or filter inside the flow whose output may be its input."""
        return (
            isinstance(op.spec, Map | Filter)
            and op.name not in self.fixed
            and op.name not in self.touched
            and op.schema.equals(self.graph.schema_of(op.inputs[0]))
            and op.inputs[0].operator not in self.touched
            and Port(op.name) not in self.apart
            and op.inputs[0] not in self.apart
        )

    def _readers(self, port: Port) -> tuple[tuple[str, int], ...]:
        return tuple((op.name, side) for op in self.graph for side, each in enumerate(op.inputs) if each == port)

    def remove(self, make: Any, version: int) -> PlanEdit | None:
        fit = []
        for op in self.graph:
            readers = [name for name, _ in self._readers(Port(op.name))]
            above = self.graph.consumers(op.inputs[0]) if op.inputs else ()
            # A union may read a stream once only, and a process follows its key_by.
            if self._plain(op) and set(readers).isdisjoint({*above, *self.touched}):
                fit.append((op, readers))
        if not fit:
            return None
        op, readers = self.rng.choice(fit)
        self.touched |= {op.name, op.inputs[0].operator, *readers}
        return Removed(op.name)

    def exchange(self, make: Any, version: int) -> PlanEdit | None:
        fit = []
        for then in self.graph:
            if not self._plain(then) or then.inputs[0].branch:
                continue
            first = self.graph[then.inputs[0].operator]
            readers = self._readers(Port(then.name))
            is_alone = len(self._readers(Port(first.name))) == 1
            if self._plain(first) and is_alone and {name for name, _ in readers}.isdisjoint(self.touched):
                fit.append((first, then, readers))
        if not fit:
            return None
        first, then, readers = self.rng.choice(fit)
        self.touched |= {first.name, then.name, first.inputs[0].operator, *(name for name, _ in readers)}
        return Exchanged(first.name, then.name, first.inputs[0], readers)
