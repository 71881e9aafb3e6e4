"""Finds the operators that may split one source row into several rows that meet a change. The change must begin at or
upstream of these operators.

If an operator emits two rows for one and both meet updated operators, then both must meet them before the change, or
both after it. Such an operator, a *fork*, has to take part. Section 6.2 of the Fries paper treats every one-to-many
ancestor of an updated operator as a fork; section 6.3 prunes those of whose rows at most one is known to meet the
change.

The rules here are stricter than the paper's in two corner cases, in which the paper's let a row meet half of a change:

* **Uniqueness.** The paper prunes A for an updated operator o if *each path* from A to o passes *some* unique operator.
  That is not enough if these operators differ, for each lets a row pass: on A → U1 → o and A → U2 → o two rows reach
  o, and on A → U1 → o1 and A → U2 → o2 one source row may meet o1 before and o2 after the change. Here *one and the
  same* unique operator must be on every path from A to every updated operator.
* **Blocking operators.** The output of an aggregate or a transform counts as new source rows. A source may replicate
  its rows, so these operators are forks when several readers lead to the change. But not all output of a blocking
  operator is new: late rows, bad rows and the pairs of a left join leave at once and still belong to the input row.

Both rules state that at most one row of A meets *any* updated operator, so A is pruned for all of them or for none. The
paper continues with the earliest of the remaining ancestors. Finding these is unnecessary: the other ancestors lie
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
    """Why an operator that emits several rows for one need not take part in a change."""

    EDGE_WISE = "edge-wise one-to-one"
    """It emits at most one row to each reader, and only one reader leads to the change."""

    UNIQUENESS = "uniqueness"
    """A unique operator lets at most one row per source row reach the change."""


@dataclass(frozen=True)
class Pruned:
    """A one-to-many operator that need not take part; ``updated`` is the first updated operator downstream."""

    operator: str
    updated: str
    rule: Rule
    why: str


def find_forks(graph: Graph, updated: Collection[str], prune: bool) -> tuple[frozenset[str], tuple[Pruned, ...]]:
    """Operators upstream of the updated ones that must take part in their change, and those that were pruned.

    One sweep over the graph, from its end: O(V + E).
    """
    downstream = _Downstream(graph, updated)
    forks: set[str] = set()
    pruned: list[Pruned] = []
    for op in reversed(graph.operators):
        leading = downstream.leading(op)
        downstream.note(op, leading)
        if not leading or op.name in updated or not downstream.splits(op):
            continue
        found = downstream.prune(op, leading) if prune else None
        if found is None:
            forks.add(op.name)
        else:
            pruned.append(found)
    return frozenset(forks), tuple(reversed(pruned))


class _Downstream:
    """What lies downstream of the operators that the sweep has visited."""

    def __init__(self, graph: Graph, updated: Collection[str]) -> None:
        self._updated = updated
        self._place = {op.name: place for place, op in enumerate(graph)}
        self._readers: dict[Port, list[str]] = {}
        for port, reader in graph.edges:  # a self-join reads a port twice, and so gets each row twice
            self._readers.setdefault(port, []).append(reader)
        # By operator, for the rows that enter it. Operators whose rows never meet the change are in neither.
        self._meets: dict[str, str] = {}  # the first updated operator, in the graph's order, that the rows meet
        self._gate: dict[str, str] = {}  # the last unique operator that all of the rows must pass before that

    def leading(self, op: Operator) -> _Edges:
        """The edges on which rows of an operator reach the change."""
        return [(port, reader) for port in op.ports for reader in self._readers.get(port, ()) if reader in self._meets]

    def note(self, op: Operator, leading: _Edges) -> None:
        """Derive what is downstream of an operator from what is downstream of its readers."""
        if op.name in self._updated:
            # An updated operator may itself meet several rows, even if it is unique.
            self._meets[op.name] = op.name
            return
        passing = [(port, reader) for port, reader in leading if not op.spec.begins(port.branch)]
        if not passing:
            return
        self._meets[op.name] = self._first(passing)
        gate = self._common_gate(passing)
        # The promise covers pairs, not late and bad rows: all of those that enter also leave.
        if gate is None and op.spec.is_unique and not any(port.branch for port, _ in passing):
            gate = op.name
        if gate is not None:
            self._gate[op.name] = gate

    def splits(self, op: Operator) -> bool:
        """Whether an operator may emit several rows for one, according to its contract and its readers."""
        return any(_gives_many(op, port) or len(self._readers.get(port, ())) > 1 for port in op.ports)

    def prune(self, op: Operator, leading: _Edges) -> Pruned | None:
        """Why an operator that splits rows need not take part, or None if it must.

        The results of one row leave by one port: by one branch of a route, as a late row, as a bad row or as pairs. So
        it is enough that at most one row from each port meets the change.
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
            return Rule.EDGE_WISE, f"it emits at most one row to each reader, and only {alone!r} leads to the change"
        if alone is not None and op.spec.is_unique:
            why = f"it emits at most one row per source row, and only {alone!r} leads to the change"
            return Rule.UNIQUENESS, why
        gate = self._common_gate(leading)
        if gate is not None:
            why = f"its rows reach the change only through {gate!r}, which emits at most one row per source row"
            return Rule.UNIQUENESS, why
        return None

    def _first(self, edges: _Edges) -> str:
        return min((self._meets[reader] for _, reader in edges), key=self._place.__getitem__)

    def _common_gate(self, edges: Iterable[tuple[Port, str]]) -> str | None:
        """The last unique operator on all paths that begin with these edges.

        Paths that share a unique operator also share all unique operators that must be passed after it. So it is enough
        to compare the last one of each reader.
        """
        gates = {self._gate.get(reader) for _, reader in edges}
        return gates.pop() if len(gates) == 1 else None


def _gives_many(op: Operator, port: Port) -> bool:
    """Whether several rows may leave by a port as the result of one input row."""
    # A bad row leaves as one row, whatever the contract for good ones.
    return port.branch not in op.error_branches and op.spec.gives_many(port.branch)
