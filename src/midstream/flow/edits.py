"""What a change does to a flow: other functions in the same graph.

:func:`revise` is pure: a graph and updates in, another graph out, or an error that says what does not fit. Names and
edges stay; functions, tables and the schemas that follow from them may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from midstream.data.ddl import closest
from midstream.data.schema import parse_ddl
from midstream.errors import FlowError
from midstream.flow.functions import check_callable
from midstream.flow.model import Graph, Operator, port_schema
from midstream.flow.spec import InputChange, OnError, Spec
from midstream.flow.validate import check_error_column

__all__ = ["Update", "revise"]


@dataclass(frozen=True)
class Update:
    """What one operator runs after a change.

    :param operator: the name of a map, filter, flat_map, route, process, transact, lookup or transform.
    :param function: what to run instead, called as the one before it was; for a lookup, another table; for a transact,
        its transactions, in a list if there are several.
    :param migrate: for a process whose new function wants its state in another layout: ``migrate(key, state)`` is
        called once for each key that has state, before the new function first meets it.
    :param returns: the columns of what the new function gives, in Spark's DDL; default: as before.
    :param local: for a transform, the same on a ``pyarrow.Table``, for the local runtime.

    >>> Update("double", lambda row: {"n": 3 * row["n"]}).operator
    'double'
    """

    operator: str
    function: Any
    migrate: Callable[[Any, Any], None] | None = None
    returns: str | None = None
    local: Callable[[pa.Table], pa.Table] | None = None


def revise(graph: Graph, updates: Sequence[Update]) -> Graph:
    """The graph after a change. Raises :class:`FlowError` when the change does not fit it.

    An operator that is not updated keeps its function, so it must be able to take what it is given then: all the
    columns that it had when it was given that function, and perhaps more. What a join keeps in state are whole rows,
    which may not change at all.
    """
    wanted = _by_operator(graph, updates)
    revised: dict[str, Operator] = {}
    payloads = dict(graph.payloads)
    written_for: dict[str, tuple[pa.Schema, ...]] = {}
    for op in graph:
        spec = op.spec
        if (update := wanted.get(op.name)) is not None:
            spec, payloads[op.name] = _updated(op, update)
        inputs = [port_schema(revised, port) for port in op.inputs]
        before = [graph.schema_of(port) for port in op.inputs]
        needed = graph.written_for.get(op.name, before)
        _check_inputs(op, before, inputs, None if update is not None else needed)
        if update is None and inputs != list(needed):
            written_for[op.name] = tuple(needed)
        if op.on_error is OnError.BRANCH:
            for takes in inputs:
                check_error_column(takes, f"after the change {op.kind} {op.name!r}")
        schema = op.schema
        if update is not None and update.returns is not None:
            schema = parse_ddl(update.returns)
        else:
            spec, schema = spec.derived(inputs, schema, payloads.get(op.name), f"{op.kind} {op.name!r}")
        revised[op.name] = replace(op, spec=spec, schema=schema)
    return Graph(graph.name, tuple(revised.values()), payloads, written_for)


def _by_operator(graph: Graph, updates: Iterable[Update]) -> dict[str, Update]:
    wanted: dict[str, Update] = {}
    for update in updates:
        if not isinstance(update, Update):
            raise FlowError(
                f"a change is made of Updates, e.g. Update('FM', new_function); found {type(update).__name__} "
                f"{update!r:.60}"
            )
        if update.operator not in graph:
            names = [op.name for op in graph if op.spec.is_updatable]
            near = closest(str(update.operator), names)
            raise FlowError(
                f"flow {graph.name!r} has no operator {update.operator!r}"
                + (f"; did you mean {near!r}?" if near else "")
                + f" What can be updated: {', '.join(names) or 'nothing'}"
            )
        if update.operator in wanted:
            raise FlowError(f"operator {update.operator!r} is updated twice in one change; give one Update for each")
        wanted[update.operator] = update
    if not wanted:
        raise FlowError("a change needs at least one Update, e.g. job.update(Update('FM', new_function))")
    return wanted


def _updated(op: Operator, update: Update) -> tuple[Spec, Any]:
    """The operator's description and payload after an update."""
    what = f"update of {op.kind} {op.name!r}"
    spec = op.spec
    if update.migrate is not None:
        if not spec.keeps_user_state:
            raise FlowError(f"{what}: migrate= is for the state of a process; a {op.kind} keeps none of the user's")
        check_callable(update.migrate, op.name, "a key", "its state")
    if update.returns is not None and not spec.declares_columns:
        raise FlowError(f"{what}: the columns of a {op.kind} follow from its input; leave out returns=")
    if update.local is not None and not spec.divides:
        raise FlowError(f"{what}: local= is for transforms; the local runtime runs a {op.kind}'s function as it is")
    return spec.replaced(update.function, update.local, op.name, what)


def _check_inputs(
    op: Operator, before: Sequence[pa.Schema], after: Sequence[pa.Schema], written_for: Sequence[pa.Schema] | None
) -> None:
    """Whether an operator can take what it is given after the change.

    ``written_for`` are the columns that its function was made for; None if the change brings another function.
    """
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if not new.equals(old):
            made_for = None if written_for is None else written_for[i]
            op.spec.check_input(InputChange(op.name, op.kind, old, new, made_for))
