"""A deployment: the edits that turn what a job runs into what a script says. Operators are compared by their names.

Functions are compared by what they do, not by where they stand: moving a function to another line changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from midstream.change.configuration import Configuration
from midstream.data.schema import to_ddl
from midstream.errors import FlowError, FunctionError, MidstreamError
from midstream.flow.edits import Edit, Redraw, Update
from midstream.flow.functions import likeness
from midstream.flow.model import Graph, Operator
from midstream.flow.plan_steps import Add, Connect, Step, TakeOut
from midstream.flow.sinks import CallSink, DatabaseSink, MemorySink
from midstream.operators.plan_edits import require_flushable

__all__ = ["Deployment", "deployment_of"]


@dataclass(frozen=True)
class Deployment:
    """The edits, empty if the job runs what the script says; and the operators that stay as they are."""

    edits: tuple[Edit, ...]
    untouched: tuple[str, ...]


def deployment_of(
    current: Configuration,
    script: Graph,
    migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
    flush: Collection[str] = (),
    state: Mapping[str, Any] | None = None,
) -> Deployment:
    """Compare a script with what a job runs. ``migrate`` has functions that convert the state of updated processes,
    ``flush`` the operators that emit all they hold before they go, ``state`` the initial state of those that come.

    Sources are compared by what their rows look like and when they happened: what a DataFrame reads cannot be compared.

    Raises :class:`FlowError` for the script of another flow.
    """
    graph = current.graph
    if script.name != graph.name:
        raise FlowError(
            f"the script is of flow {script.name!r}, and the job runs flow {graph.name!r}; deploy the script of that "
            f"flow"
        )
    migrations, given = dict(migrate or {}), dict(state or {})
    _check_given(given, script, graph)
    dropped: list[Step] = [TakeOut(op.name, op.name in flush) for op in graph if op.name not in script]
    _check_flushed(flush, graph, [op.name for op in graph if op.name not in script])
    added: list[Step] = []
    connected: list[Step] = []
    updates: list[Update] = []
    untouched: list[str] = []
    for op in script:
        payload = script.payloads.get(op.name)
        takes = tuple(script.schema_of(port) for port in op.inputs)
        addition = Add(op, takes, payload, None if op.name in graph else given.get(op.name))
        if op.name not in graph:
            added.append(addition)
            continue
        old = graph[op.name]
        update = _update(old, op, graph.payloads.get(op.name), payload, migrations.get(op.name))
        if update is _ANOTHER:
            dropped.append(TakeOut(op.name))
            added.append(addition)
            continue
        if old.inputs != op.inputs:
            connected.append(Connect(op.name, op.inputs))
        if update is not None:
            updates.append(update)
        elif old.inputs == op.inputs:
            untouched.append(op.name)
    if strangers := sorted(set(migrations) - {update.operator for update in updates}):
        raise FlowError(
            f"migrate= names {', '.join(strangers)}, which the script does not change; it changes "
            f"{', '.join(update.operator for update in updates) or 'no function'}"
        )
    steps = (*dropped, *added, *connected)
    return Deployment((*([Redraw(steps)] if steps else []), *updates), tuple(untouched))


def _check_given(given: Collection[str], script: Graph, graph: Graph) -> None:
    new = [op.name for op in script if op.spec.is_stateful and op.name not in graph]
    if strangers := sorted(set(given) - set(new)):
        raise FlowError(
            f"state= names {', '.join(strangers)}; the operators with state that the script adds are "
            f"{', '.join(new) or 'none'}"
        )


def _check_flushed(flush: Collection[str], graph: Graph, gone: Collection[str]) -> None:
    if strangers := sorted(set(flush) - set(gone)):
        raise FlowError(
            f"flush= names {', '.join(strangers)}, which the script does not remove; it removes "
            f"{', '.join(gone) or 'no operator'}"
        )
    for name in flush:
        require_flushable(graph[name], f"Removal of {graph[name].kind} {name!r}")


_ANOTHER = Update("", None)
"""No update turns one operator into the other."""


def _update(old: Operator, new: Operator, before: Any, after: Any, migrate: Any) -> Update | None:
    """The update that turns an operator into the one of the script; None if they are the same."""
    if new.delivery is not None:
        return None if _is_same_sink(old, new, before, after) else _ANOTHER
    if old.kind != new.kind or old.on_error != new.on_error:
        return _ANOTHER
    if new.spec.reads_stream:
        return None if old.spec == new.spec and old.schema.equals(new.schema) else _ANOTHER
    if not new.spec.is_updatable:
        return None if old.spec == new.spec else _ANOTHER
    function, local = after if new.spec.divides else (after, None)
    is_same = old.spec == new.spec and (_packs_alike(new, before, after) or _is_alike(old.name, before, after))
    declares = new.spec.declares_columns
    if is_same and (not declares or old.schema.equals(new.schema)):
        return None
    try:
        spec, _ = old.spec.replaced(function, local, old.name, f"deployment of {new.kind} {new.name!r}")
    except MidstreamError:
        return _ANOTHER
    if spec != new.spec:
        return _ANOTHER
    return Update(new.name, function, migrate, to_ddl(new.schema) if declares else None, local)


def _packs_alike(op: Operator, before: Any, after: Any) -> bool:
    """Whether two objects, such as tables, are packed into the same blob."""
    try:
        blobs = [op.spec.packed(payload, op.name) for payload in (before, after)]
    except MidstreamError:
        return False
    return blobs[0] is not None and blobs[0] == blobs[1]


def _is_alike(name: str, before: Any, after: Any) -> bool:
    try:
        return likeness(before, name) == likeness(after, name)
    except FunctionError:  # a transform may hold DataFrames
        return False


def _is_same_sink(old: Operator, new: Operator, before: Any, after: Any) -> bool:
    """Whether two sinks write to the same place in the same way. A sink that lives in this process stays as it is."""
    if old.spec != new.spec or type(before) is not type(after):
        return False
    if isinstance(after, CallSink):
        return _is_alike(old.name, before.function, after.function)
    if isinstance(after, DatabaseSink):
        return _table_of(before) == _table_of(after)
    return isinstance(after, MemorySink) or repr(before) == repr(after)


def _table_of(sink: DatabaseSink) -> tuple[Any, ...]:
    return sink.table, sink.epoch_column, sink.epochs_table, sink.key
