"""Which operators may split one source row into several that meet a change: the change must begin there, or above.

If an operator gives two rows for one and both meet updated operators, then both must meet them before the change, or
both after it. Such an operator, a *fork*, has to take part. Section 6.2 of the Fries paper takes every one-to-many
ancestor of an updated operator for a fork; section 6.3 prunes those of which it is known that one of their rows at most
meets the change.

The rules here are stricter than the paper's in two corners, in which these let a row meet half of a change:

* **Uniqueness.** The paper prunes A for an updated operator o if *each path* from A to o passes *some* unique operator.
  That is not enough if these are different ones, for each lets a row pass: by A → U1 → o and A → U2 → o two rows come
  to o, and by A → U1 → o1 and A → U2 → o2 one source row may meet o1 before and o2 after the change. Here *one and the
  same* unique operator must stand on every path from A to every updated operator.
* **Blocking operators.** What an aggregate or a transform gives are rows of a new source. A source may replicate its
  rows, so these operators are forks when several readers lead to the change. And not all that leaves a blocking
  operator is new: late rows, bad rows, and the pairs of a left join, go on at once, still on behalf of the row that
  came.

Both rules say of A that one row at most meets *any* updated operator, so A is pruned for all of them or for none. The
paper goes on with the earliest of the ancestors that are left. There is no need to look for these: the others lie
between them and the updated operators, so they are in the minimal covering sub-DAG either way.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from midstream.flow.model import Graph, Operator, Port

__all__ = ["Pruned", "Rule", "find_forks"]

_Edges = list[tuple[Port, str]]


class Rule(enum.StrEnum):
    """Why an operator that gives several rows for one need not take part in a change."""

    EDGE_WISE = "edge-wise one-to-one"
    """It gives one row at most to each reader, and only one reader leads to the change."""

    UNIQUENESS = "uniqueness"
    """A unique operator lets one row at most pass on to the change for each source row."""


@dataclass(frozen=True)
class Pruned:
    """A one-to-many operator that need not take part; ``updated`` is the first updated operator that it leads to."""

    operator: str
    updated: str
    rule: Rule
    why: str


def find_forks(graph: Graph, updated: Collection[str], prune: bool) -> tuple[frozenset[str], tuple[Pruned, ...]]:
    """Operators above the updated ones that must take part in their change, and those that were pruned.

    One sweep over the graph, from its end: O(V + E).
    """
    behind = _Behind(graph, updated)
    forks: set[str] = set()
    pruned: list[Pruned] = []
    for op in reversed(graph.operators):
        leading = behind.leading(op)
        behind.note(op, leading)
        if not leading or op.name in updated or not behind.splits(op):
            continue
        found = behind.spared(op, leading) if prune else None
        if found is None:
            forks.add(op.name)
        else:
            pruned.append(found)
    return frozenset(forks), tuple(reversed(pruned))


class _Behind:
    """What lies behind the operators that the sweep has passed."""

    def __init__(self, graph: Graph, updated: Collection[str]) -> None:
        self._updated = updated
        self._place = {op.name: place for place, op in enumerate(graph)}
        self._readers: dict[Port, list[str]] = {}
        for port, reader in graph.edges:  # a self-join reads a port twice, and so gets each row twice
            self._readers.setdefault(port, []).append(reader)
        # Both are about rows that come to an operator; it is in neither if these do not meet the change.
        self._meets: dict[str, str] = {}  # the first updated operator, in the graph's order, that they meet
        self._gate: dict[str, str] = {}  # the last unique operator that they all have to pass before

    def leading(self, op: Operator) -> _Edges:
        """The edges by which rows of an operator go to the change."""
        return [(port, reader) for port in op.ports for reader in self._readers.get(port, ()) if reader in self._meets]

    def note(self, op: Operator, leading: _Edges) -> None:
        """Find out what is behind an operator, from what is behind its readers."""
        if op.name in self._updated:
            # Nothing protects an updated operator from meeting several rows itself, not even that it is unique.
            self._meets[op.name] = op.name
            return
        passing = [(port, reader) for port, reader in leading if not op.spec.begins(port.branch)]
        if not passing:
            return
        self._meets[op.name] = self._first(passing)
        gate = self._common_gate(passing)
        # The promise is about pairs, not about late and bad rows, of which an operator has as many as came.
        if gate is None and op.spec.is_unique and not any(port.branch for port, _ in passing):
            gate = op.name
        if gate is not None:
            self._gate[op.name] = gate

    def splits(self, op: Operator) -> bool:
        """Whether an operator may give several rows for one, as far as its contract says."""
        return any(_gives_many(op, port) or len(self._readers.get(port, ())) > 1 for port in op.ports)

    def spared(self, op: Operator, leading: _Edges) -> Pruned | None:
        """Why an operator that splits rows need not take part, or None if it must.

        What comes of one row leaves by one port: by one branch of a route, as a late row, as a bad row or as a pair. So
        it is enough that from each port one row at most meets the change.
        """
        by_port: dict[Port, _Edges] = {}
        for edge in leading:
            by_port.setdefault(edge[0], []).append(edge)
        reasons: dict[str, Rule] = {}
        for port, edges in by_port.items():
            found = self._one_at_most(op, port, edges)
            if found is None:
                return None
            reasons[found[1]] = found[0]
        rule = max(reasons.values(), key=list(Rule).index)
        return Pruned(op.name, self._first(leading), rule, "; ".join(reasons))

    def _one_at_most(self, op: Operator, port: Port, leading: _Edges) -> tuple[Rule, str] | None:
        alone = leading[0][1] if len(leading) == 1 else None
        if alone is not None and not _gives_many(op, port):
            return Rule.EDGE_WISE, f"it gives each reader one row at most, and only {alone!r} leads to the change"
        if alone is not None and op.spec.is_unique:
            why = f"it gives one row at most for each source row, and only {alone!r} leads to the change"
            return Rule.UNIQUENESS, why
        gate = self._common_gate(leading)
        if gate is not None:
            why = f"its rows come to the change through {gate!r} only, which gives one at most for each source row"
            return Rule.UNIQUENESS, why
        return None

    def _first(self, edges: _Edges) -> str:
        return min((self._meets[reader] for _, reader in edges), key=self._place.__getitem__)

    def _common_gate(self, edges: Iterable[tuple[Port, str]]) -> str | None:
        """The last unique operator on all paths that begin with these edges.

        Paths that have a unique operator in common also have all those in common that must be passed after it. So it
        is enough to compare the last ones, one for each reader.
        """
        gates = {self._gate.get(reader) for _, reader in edges}
        return gates.pop() if len(gates) == 1 else None


def _gives_many(op: Operator, port: Port) -> bool:
    """Whether several rows may leave by a port on behalf of one that came."""
    # A bad row comes out as it came, whatever good ones become.
    return port.branch not in op.error_branches and op.spec.gives_many(port.branch)
