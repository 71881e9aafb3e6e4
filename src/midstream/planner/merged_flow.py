"""A flow before and after a change of its plan, as one graph on which the change is planned (Chi, section 4.2).

An operator that is the same on both sides, with its state, is one operator of the merged flow; it reads what it reads
on either side. An operator occurs twice if a change replaces it by another one of the same name, or if the merged flow
would otherwise have a cycle, as when two operators change places.

Which plan a row follows is decided where the two plans part: at the operators whose readers differ. So these count as
updated, together with operators that are added, removed or get another function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from midstream.flow.model import Graph, Operator, Port

__all__ = ["MergedFlow", "difference_of", "merge"]


@dataclass(frozen=True)
class PlanDifference:
    """The differences between two plans of a flow, by the names of operators, in the order of flows."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    """Operators that are others under the same name; neither added nor removed."""
    rewired: tuple[str, ...] = ()
    """Operators on both sides that read something else."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.replaced or self.rewired)


def difference_of(before: Graph, after: Graph, replaced: Collection[str] = ()) -> PlanDifference:
    """The difference of two plans; ``replaced`` are operators that are others although their names are the same."""
    shared = [op for op in after if op.name in before]
    return PlanDifference(
        added=tuple(op.name for op in after if op.name not in before),
        removed=tuple(op.name for op in before if op.name not in after),
        replaced=tuple(op.name for op in shared if op.name in replaced),
        rewired=tuple(op.name for op in shared if op.inputs != before[op.name].inputs and op.name not in replaced),
    )


@dataclass(frozen=True)
class MergedFlow:
    """The merged flow. ``changed`` are the operators that count as updated."""

    graph: Graph
    changed: tuple[str, ...]
    difference: PlanDifference = PlanDifference()
    old: Mapping[str, str] = field(default_factory=dict)
    """The operators that occur twice: the name of the one before the change, and the operator's own."""
    functions: frozenset[str] = frozenset()
    """The operators that get another function."""

    @property
    def names(self) -> tuple[str, ...]:
        """All operators, in order."""
        return tuple(op.name for op in self.graph)

    def role(self, name: str) -> str:
        """The effect of a change of the plan on an operator of the merged flow, in a word; empty if there is none."""
        if name in self.old:
            return "removed" if self.old[name] in self.difference.replaced else "before"
        if name in self.difference.removed:
            return "removed"
        if name in self.difference.added or name in self.difference.replaced:
            return "added"
        return "rewired" if name in self.difference.rewired else ""


def merge(before: Graph, after: Graph, updated: Collection[str], replaced: Collection[str] = ()) -> MergedFlow:
    """Merge two plans of a flow. ``updated`` are operators on both sides that get another function.

    >>> import pyarrow as pa
    >>> from midstream.flow.model import Sink, Source
    >>> from midstream.flow.spec import Form
    >>> from midstream.operators.filter import Filter
    >>> rows = pa.schema([])
    >>> start, keep = Operator("in", Source(), (), rows), Operator("keep", Filter(Form.ROWS), (Port("in"),), rows)
    >>> before = Graph("g", (start, Operator("out", Sink(), (Port("in"),), rows)))
    >>> after = Graph("g", (start, keep, Operator("out", Sink(), (Port("keep"),), rows)))
    >>> merged = merge(before, after, [])
    >>> [str(port) for port in merged.graph["out"].inputs], merged.changed
    (['keep', 'in'], ('in', 'keep'))
    """
    difference = difference_of(before, after, replaced)
    if not difference:
        names = tuple(op.name for op in after if op.name in set(updated))
        return MergedFlow(after, names, functions=frozenset(updated))
    twice = set(replaced)
    while True:
        old = {name: _free(f"{name} (before)", before, after) for name in twice}
        operators = _united(before, after, old)
        cycles = _on_cycles(operators) - set(old.values())
        if not cycles:
            break
        # Of each cycle all operators come twice, so the next round has none: see the module's docstring.
        twice |= {name for name in cycles if name in before and name in after}
    kept = {op.name for op in after if op.name in before} - twice
    changed = {*updated, *difference.added, *(old.get(name, name) for name in difference.removed)}
    changed |= {*twice, *old.values()} | {name for name in kept if _readers(before, name) != _readers(after, name)}
    changed |= {name for name in kept if _leads_to(before, name, twice) or _leads_to(after, name, twice)}
    graph = Graph(after.name, _sorted(operators, [*(op.name for op in before), *(op.name for op in after)]))
    names = tuple(op.name for op in graph if op.name in changed)
    return MergedFlow(graph, names, difference, {new: name for name, new in old.items()}, frozenset(updated))


def _free(name: str, *graphs: Graph) -> str:
    while any(name in graph for graph in graphs):
        name += "'"
    return name


def _united(before: Graph, after: Graph, old: Mapping[str, str]) -> dict[str, Operator]:
    found = {op.name: op for op in after}
    for op in before:
        inputs = [Port(old.get(port.operator, port.operator), port.branch) for port in op.inputs]
        name = old.get(op.name, op.name)
        if name in found:
            # A self-join reads a port twice, so inputs are counted.
            more = Counter(inputs) - Counter(found[name].inputs)
            inputs = [*found[name].inputs, *more.elements()]
            found[name] = replace(found[name], inputs=tuple(inputs))
        else:
            found[name] = replace(op, name=name, inputs=tuple(inputs))
    return found


def _readers(graph: Graph, name: str) -> set[tuple[Port, str, int]]:
    """The readers of an operator's outputs; the inputs of a union are all alike."""
    return {
        (port, op.name, 0 if op.spec.inputs_are_alike else side)
        for op in graph
        for side, port in enumerate(op.inputs)
        if port.operator == name
    }


def _leads_to(graph: Graph, name: str, others: Collection[str]) -> bool:
    return any(reader in others for _, reader, _ in _readers(graph, name))


def _on_cycles(operators: Mapping[str, Operator]) -> set[str]:
    """The operators that can be reached from themselves. Flows are small: one search for each."""
    found = set()
    for start in operators:
        seen: set[str] = set()
        pending = [port.operator for port in operators[start].inputs]
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                pending += [port.operator for port in operators[name].inputs]
        if start in seen:
            found.add(start)
    return found


def _sorted(operators: Mapping[str, Operator], order: Iterable[str]) -> tuple[Operator, ...]:
    """Inputs before their readers, otherwise in this order. Ends, as there are no cycles."""
    rank = {name: place for place, name in enumerate(dict.fromkeys([*order, *operators]))}
    placed: dict[str, Operator] = {}
    pending = sorted(operators, key=rank.__getitem__)
    while pending:
        for name in pending:
            if all(port.operator in placed for port in operators[name].inputs):
                placed[name] = operators[name]
                pending.remove(name)
                break
    return tuple(placed.values())
