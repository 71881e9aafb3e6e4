"""The minimal covering sub-DAG (MCS) of a set of operators, and the components it falls into.

The MCS of operators M has every operator and every edge on a path between two of them. Its *components* (what hangs
together, whichever way the edges point) can change independently of each other; a component's *heads* are where a
change of it begins, and from there it travels along the component's edges.

An operator is in the MCS exactly if it can be reached from M and can reach M, and so is every edge between two such
operators. Two sweeps over the graph find them, one down and one up: O(V + E).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from midstream.flow.model import Graph

__all__ = ["Component", "components_of", "covering"]


@dataclass(frozen=True)
class Component:
    """Operators that change together, in the graph's order.

    ``edges`` are those along which the change travels, ``heads`` the members that it begins at (no edge leads to them
    from inside), ``updated`` the members that get something new; the others only pass on how far the change has come.

    No member stands above a head: rows that reach a head have met nothing of the change yet.
    """

    operators: tuple[str, ...]
    edges: tuple[tuple[str, str], ...]
    heads: tuple[str, ...]
    updated: tuple[str, ...]

    def __str__(self) -> str:
        return f"{{{', '.join(self.operators)}}}"


def covering(graph: Graph, chosen: Collection[str]) -> frozenset[str]:
    """The operators of the MCS of the chosen ones.

    >>> import pyarrow as pa
    >>> from midstream.flow.model import Operator, Port, Sink, Source
    >>> from midstream.flow.spec import Form
    >>> from midstream.operators.filter import Filter
    >>> from midstream.operators.map import Map
    >>> rows = pa.schema([])
    >>> graph = Graph("g", (
    ...     Operator("in", Source(), (), rows),
    ...     Operator("a", Map(Form.ROWS), (Port("in"),), rows),
    ...     Operator("b", Map(Form.ROWS), (Port("a"),), rows),
    ...     Operator("c", Filter(Form.ROWS), (Port("b"),), rows),
    ...     Operator("out", Sink(), (Port("c"),), rows),
    ... ))
    >>> sorted(covering(graph, {"a", "c"}))
    ['a', 'b', 'c']
    """
    below = set(chosen)
    for op in graph:
        if any(port.operator in below for port in op.inputs):
            below.add(op.name)
    above = set(chosen)
    for op in reversed(graph.operators):
        if op.name in above:
            above.update(port.operator for port in op.inputs)
    return frozenset(below & above)


def components_of(graph: Graph, members: Collection[str], updated: Collection[str]) -> tuple[Component, ...]:
    """Divide members into components, ordered by their first operators. ``members`` is what :func:`covering` gave."""
    edges = dict.fromkeys(
        (port.operator, consumer) for port, consumer in graph.edges if port.operator in members and consumer in members
    )
    number = _numbered(graph, members, edges)
    operators: dict[int, list[str]] = {}
    for op in graph:
        if op.name in number:
            operators.setdefault(number[op.name], []).append(op.name)
    inside: dict[int, list[tuple[str, str]]] = {}
    for edge in edges:
        inside.setdefault(number[edge[0]], []).append(edge)
    entered = {head for _, head in edges}
    return tuple(
        Component(
            operators=tuple(names),
            edges=tuple(inside.get(component, ())),
            heads=tuple(name for name in names if name not in entered),
            updated=tuple(name for name in names if name in updated),
        )
        for component, names in operators.items()
    )


def _numbered(graph: Graph, members: Collection[str], edges: Collection[tuple[str, str]]) -> Mapping[str, int]:
    """The number of each member's component, in the order of their first operators."""
    beside: dict[str, list[str]] = {name: [] for name in members}
    for tail, head in edges:
        beside[tail].append(head)
        beside[head].append(tail)
    number: dict[str, int] = {}
    found = 0
    for op in graph:
        if op.name in beside and op.name not in number:
            for name in _connected(op.name, beside):
                number[name] = found
            found += 1
    return number


def _connected(start: str, beside: Mapping[str, list[str]]) -> Iterator[str]:
    seen = {start}
    pending = [start]
    while pending:
        name = pending.pop()
        yield name
        for other in beside[name]:
            if other not in seen:
                seen.add(other)
                pending.append(other)
