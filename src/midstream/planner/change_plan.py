"""Plans a change of a running job: which operators change together, where the change begins, and when.

The updated operators, and the operators upstream that may split a row (:mod:`~midstream.planner.pruning`), span
components (:mod:`~midstream.planner.mcs`), and the change begins at their heads. A row that passes a head after the
head has switched belongs to the new revision, and every member downstream processes it under that revision. A row that
passed before the switch, or did not pass a head, belongs to the old revision.

Why no row meets a mixture of revisions: suppose one source row causes two operations on updated operators. Either one
operator is upstream of the other on the row's path, or some operator split the row. In both cases that upstream or
splitting operator is in one component with both, no head is downstream of it, and so both operations use the revision
that the row had there. An operator that splits rows is left out only if at most one of the resulting rows meets the
change.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial

from midstream.data.ddl import closest
from midstream.errors import FlowError
from midstream.flow.model import Graph
from midstream.planner.mcs import Component, components_of, covering
from midstream.planner.pruning import Pruned, Rule, find_forks
from midstream.planner.stages import Plan, Wire

__all__ = ["ChangePlan", "Component", "Pruned", "Rule", "Scheduler", "crossings", "plan_change"]


class Scheduler(enum.StrEnum):
    """How a change takes effect."""

    FRIES = "fries"
    """Begins as close to the updated operators as consistency allows."""

    FRIES_UNPRUNED = "fries-unpruned"
    """The same, but begins at every one-to-many operator upstream, needed or not; for comparison."""

    MARKER = "marker"
    """Begins at all sources upstream of the updated operators, during an epoch: the barrier of Chi."""

    EPOCH = "epoch"
    """Begins with the next epoch: what every micro-batch engine can do."""

    REPLAY = "replay"
    """Cancels the running epoch and runs it again after the change: the change applies to every uncommitted row."""


@dataclass(frozen=True)
class ChangePlan:
    """The scope of a change of ``updated``; operators are in the graph's order.

    ``crosses`` names the blocking operators that the change would have to cross. They emit rows at the end of an epoch,
    when they can no longer tell which input came after the change, so the change waits for the next epoch.
    """

    scheduler: Scheduler
    updated: tuple[str, ...]
    components: tuple[Component, ...]
    pruned: tuple[Pruned, ...] = ()
    crosses: tuple[str, ...] = ()

    @cached_property
    def members(self) -> frozenset[str]:
        """The operators of all components."""
        return frozenset(name for component in self.components for name in component.operators)

    @cached_property
    def heads(self) -> frozenset[str]:
        """The operators at which the change begins."""
        return frozenset(name for component in self.components for name in component.heads)

    @property
    def from_next_epoch(self) -> bool:
        """Whether the running epoch finishes without the change. False for an epoch that runs again with the change."""
        return self.scheduler is not Scheduler.REPLAY and (bool(self.crosses) or self.scheduler is Scheduler.EPOCH)

    def describe(self) -> str:
        """The plan as text for users.

        >>> import pyarrow as pa
        >>> from midstream.flow.model import Operator, Port, Sink, Source
        >>> from midstream.flow.spec import Form
        >>> from midstream.operators.map import Map
        >>> rows = pa.schema([])
        >>> graph = Graph("fraud", (
        ...     Operator("payments", Source(), (), rows),
        ...     Operator("FM", Map(Form.ROWS), (Port("payments"),), rows),
        ...     Operator("MC", Map(Form.ROWS), (Port("FM"),), rows),
        ...     Operator("alerts", Sink(), (Port("MC"),), rows),
        ...     Operator("archive", Sink(), (Port("payments"),), rows),
        ... ))
        >>> print(plan_change(graph, ["FM", "MC"]).describe())
        change of FM, MC by scheduler fries
          component 1: FM, MC; begins at FM
          pruned: payments (edge-wise one-to-one: it emits at most one row to each reader, and only 'FM' leads to the
                  change)
          takes effect in the running epoch, as soon as the tasks of FM have finished their slices
        """
        if not self.updated:
            return f"change of no function, by scheduler {self.scheduler}\n  {self._effect()}"
        lines = [f"change of {', '.join(self.updated)} by scheduler {self.scheduler}"]
        for number, component in enumerate(self.components, 1):
            members, heads = ", ".join(component.operators), ", ".join(component.heads)
            lines.append(f"  component {number}: {members}; begins at {heads}")
        lines += [f"  pruned: {each.operator} ({each.rule}: {each.why})" for each in self.pruned]
        if self.crosses:
            lines.append(f"  crosses: {', '.join(self.crosses)}")
        return "\n".join([*lines, f"  {self._effect()}"])

    def _effect(self) -> str:
        if self.scheduler is Scheduler.REPLAY:
            return "takes effect for the whole running epoch, which is cancelled and run again"
        if self.crosses:
            return (
                f"takes effect from the next epoch, because {', '.join(self.crosses)} can emit rows at an epoch's end"
            )
        if self.from_next_epoch or not self.updated:
            return "takes effect from the next epoch"
        heads = ", ".join(head for component in self.components for head in component.heads)
        return f"takes effect in the running epoch, as soon as the tasks of {heads} have finished their slices"


def plan_change(graph: Graph, updated: Collection[str], scheduler: Scheduler = Scheduler.FRIES) -> ChangePlan:
    """Plan a change of the operators named ``updated``. Pure, and linear in the size of the graph: O(V + E).

    Without any, the plan is empty: the change does not concern functions.

    >>> import pyarrow as pa
    >>> from midstream.flow.model import Operator, Port, Sink, Source
    >>> from midstream.flow.spec import Form
    >>> from midstream.operators.flat_map import FlatMap
    >>> from midstream.operators.map import Map
    >>> rows = pa.schema([])
    >>> graph = Graph("w4", (
    ...     Operator("groups", Source(), (), rows),
    ...     Operator("U2", FlatMap(Form.ROWS), (Port("groups"),), rows),
    ...     Operator("FD1", Map(Form.ROWS), (Port("U2"),), rows),
    ...     Operator("alerts", Sink(), (Port("FD1"),), rows),
    ... ))
    >>> [str(component) for component in plan_change(graph, ["FD1"]).components]
    ['{U2, FD1}']
    """
    names = _checked(graph, updated)
    components, pruned = _PLANNERS[scheduler](graph, names)
    members = {name for component in components for name in component.operators}
    # A pruned operator may still lie between members.
    pruned = tuple(each for each in pruned if each.operator not in members)
    return ChangePlan(scheduler, names, components, pruned, _crossed(graph, components))


def crossings(plan: Plan, change: ChangePlan) -> tuple[Wire, ...]:
    """The exchanges that the change travels through: wires between members of a component in different stages.

    A change that applies to whole epochs has none.
    """
    if change.from_next_epoch or change.scheduler is Scheduler.REPLAY:
        return ()
    edges = {edge for component in change.components for edge in component.edges}
    return tuple(
        wire
        for wire in plan.wires
        if wire.target is not None and any((wire.port.operator, reader) in edges for reader in wire.consumers)
    )


def _checked(graph: Graph, updated: Collection[str]) -> tuple[str, ...]:
    """The names in the graph's order. Raises :class:`FlowError` if one is unknown or repeated."""
    if isinstance(updated, str):
        raise FlowError(f"the operators to change must be a list of names, found the string {updated!r}")
    for name, count in Counter(updated).items():
        if name not in graph:
            near = closest(str(name), [op.name for op in graph])
            hint = f"; did you mean {near!r}?" if near else "."
            raise FlowError(
                f"flow {graph.name!r} has no operator {name!r} to change{hint} Its operators are {_known(graph)}."
            )
        if count > 1:
            raise FlowError(f"a change names operator {name!r} {count} times; it can update each operator only once")
    wanted = frozenset(updated)
    return tuple(op.name for op in graph if op.name in wanted)


def _known(graph: Graph) -> str:
    return ", ".join(repr(op.name) for op in graph)


def _spanned(graph: Graph, updated: tuple[str, ...], others: Collection[str]) -> tuple[Component, ...]:
    return components_of(graph, covering(graph, {*updated, *others}), frozenset(updated))


def _by_forks(
    graph: Graph, updated: tuple[str, ...], *, prune: bool = True
) -> tuple[tuple[Component, ...], tuple[Pruned, ...]]:
    forks, pruned = find_forks(graph, frozenset(updated), prune=prune)
    return _spanned(graph, updated, forks), pruned


def _by_sources(graph: Graph, updated: tuple[str, ...]) -> tuple[tuple[Component, ...], tuple[Pruned, ...]]:
    return _spanned(graph, updated, _sources_above(graph, updated)), ()


_PLANNERS: dict[Scheduler, Callable[[Graph, tuple[str, ...]], tuple[tuple[Component, ...], tuple[Pruned, ...]]]] = {
    Scheduler.FRIES: _by_forks,
    Scheduler.FRIES_UNPRUNED: partial(_by_forks, prune=False),
    Scheduler.MARKER: _by_sources,
    Scheduler.EPOCH: _by_forks,
    Scheduler.REPLAY: _by_forks,
}
"""How each scheduler finds the components of a change and the pruned operators. Tests replace entries by wrong ones."""


def _sources_above(graph: Graph, names: Collection[str]) -> set[str]:
    above = set(names)
    for op in reversed(graph.operators):
        if op.name in above:
            above.update(port.operator for port in op.inputs)
    return {name for name in graph.sources if name in above}


def _crossed(graph: Graph, components: Collection[Component]) -> tuple[str, ...]:
    """Blocking operators between members, updated ones with members downstream, and updated transforms and transacts.

    A transform is one query over an epoch's rows, and a transact runs them as one batch. Other blocking operators may
    end a component, because they take rows in the order of revisions. They may be heads if they are not updated,
    because all their output then belongs to one revision.
    """
    entered = {head for component in components for _, head in component.edges}
    left = {tail for component in components for tail, _ in component.edges}
    updated = {name for component in components for name in component.updated}
    crossed = []
    for op in graph:
        between = op.name in left and (op.name in entered or op.name in updated)
        if op.spec.blocks and (between or (op.name in updated and op.spec.runs_whole_epochs)):
            crossed.append(op.name)
    return tuple(crossed)
