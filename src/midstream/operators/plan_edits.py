"""Inserts, removals and rewirings of a change, as the steps that they stand for.

An inserted operator is built by the builder of scripts, on a stream of the running flow, so all of its checks apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from midstream.errors import FlowError, MidstreamError
from midstream.flow.edits import Edit, Insert, Redraw, Remove, Rewire
from midstream.flow.functions import check_callable
from midstream.flow.model import Graph, Operator, Port
from midstream.flow.plan_steps import Add, Connect, Step, TakeOut, outlined, parse_port
from midstream.operators.builder import Flow
from midstream.operators.stream import Stream

__all__ = ["require_flushable", "resolved"]


def resolved(graph: Graph, edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """The edits of a change, with one :class:`Redraw` in place of those of the plan. They are made in order.

    Calls the users' functions that build what is inserted. Raises :class:`FlowError` if an edit does not fit.
    """
    steps: list[Step] = []
    others: list[Edit] = []
    now = graph
    for edit in edits:
        match edit:
            case Insert():
                found = _inserted(now, edit)
            case Remove():
                found = _removed(now, edit)
            case Rewire():
                found = _rewired(now, edit)
            case Redraw():
                found = list(edit.steps)
            case _:
                others.append(edit)
                continue
        steps += found
        now = _drawn(now, found)
    if not steps:
        return tuple(others)
    outlined(graph, steps)  # says what is wrong with the whole
    return (Redraw(tuple(steps)), *others)


def _drawn(graph: Graph, steps: Sequence[Step]) -> Graph:
    """The flow so far. What an edit breaks, the next one may mend: only the whole has to be a flow."""
    try:
        return outlined(graph, steps)
    except MidstreamError:
        return outlined(graph, steps, is_whole=False)


def _inserted(graph: Graph, edit: Insert) -> list[Step]:
    what = "Insert"
    check_callable(edit.build, what, *["a stream"] * len(_several(edit.after or "")))
    after, before = edit.after, edit.before
    if edit.between is not None:
        if after is not None or before is not None:
            raise FlowError(f"{what}: between= says both ends; leave out after= and before=")
        if len(_several(edit.between)) != 2:
            raise FlowError(f"{what}: between= is a pair, (after, before); found {edit.between!r:.60}")
        after, before = edit.between
    if after is None:
        raise FlowError(f"{what}: say where, with after='operator' or between=('operator', 'reader')")
    ports = [parse_port(each, graph, what) for each in _several(after)]
    readers = _readers(graph, ports, before, what)
    flow = Flow._continuing(graph)
    try:
        made = edit.build(*[flow._stream_of(port) for port in ports])
    except MidstreamError:
        raise
    except Exception as error:
        raise FlowError(
            f"{what} after {_listed(ports)}: its function raised {type(error).__name__}: {error}"
        ) from error
    added = [op for op in flow._operators.values() if op.name not in graph]
    if not added:
        raise FlowError(f"{what} after {_listed(ports)}: its function adds no operator to the stream that it gets")
    outline = {op.name: op for op in added}
    what = f"{what} of {', '.join(map(repr, outline))}"
    states = _states(edit.state, added, what)
    steps: list[Step] = [
        Add(op, tuple(_schema(flow, port) for port in op.inputs), flow._payloads.get(op.name), states.get(op.name))
        for op in added
    ]
    if made is None:
        if not any(op.delivery is not None for op in added):
            raise FlowError(f"{what}: return the stream that the readers of {_listed(ports)} get, or end it in a sink")
        if before is not None:
            raise FlowError(f"{what}: before= names readers, but the function returns no stream for them")
        return steps
    if not isinstance(made, Stream) or made._flow is not flow:
        raise FlowError(
            f"{what}: its function returned {type(made).__name__} {made!r:.60}; return a stream made of the one that "
            f"it gets, or nothing if that ends in a sink"
        )
    if made._port in ports:
        raise FlowError(f"{what}: its function returned the stream that it got; return the one of the new operator")
    if len(ports) > 1 and before is None:
        raise FlowError(f"{what}: it reads {_listed(ports)}, so say whose input it becomes, with before='reader'")
    for name in readers:
        inputs = [made._port if port in ports else port for port in graph[name].inputs]
        if graph[name].spec.inputs_are_alike:
            inputs = list(dict.fromkeys(inputs))
        steps.append(Connect(name, tuple(inputs)))
    return steps


def _states(given: Any, added: Sequence[Operator], what: str) -> dict[str, Any]:
    """The initial state of each operator."""
    if given is None:
        return {}
    keeping = [op.name for op in added if op.spec.is_stateful]
    if not keeping:
        raise FlowError(f"{what}: state= is given, but nothing that it inserts keeps state")
    if not isinstance(given, Mapping):
        if len(keeping) > 1:
            raise FlowError(f"{what}: several operators keep state, so state= must be a dict by {', '.join(keeping)}")
        return {keeping[0]: given}
    if strangers := [str(name) for name in given if name not in keeping]:
        raise FlowError(
            f"{what}: state= names {', '.join(strangers)}; the operators that it inserts and that keep state are "
            f"{', '.join(keeping)}"
        )
    return dict(given)


def _schema(flow: Flow, port: Port) -> object:
    return flow._stream_of(port).schema


def _readers(graph: Graph, ports: Sequence[Port], before: object, what: str) -> list[str]:
    known = list(dict.fromkeys(name for port in ports for name in graph.consumers(port)))
    if before is None:
        return known
    for name in _several(before):
        if name not in known:
            raise FlowError(
                f"{what}: {name!r} does not read {_listed(ports)}; its readers are "
                f"{', '.join(map(repr, known)) or 'none'}"
            )
    return list(_several(before))


def _removed(graph: Graph, edit: Remove) -> list[Step]:
    what = "Remove"
    op = _operator(graph, edit.operator, what)
    what = f"{what} of {op.kind} {op.name!r}"
    if not op.inputs:
        raise _no_sources(op)
    if edit.flush:
        require_flushable(op, what)
    steps: list[Step] = []
    for port in op.ports:
        readers = graph.consumers(port)
        if not readers:
            continue
        if port.branch or len(op.inputs) != 1:
            branch = f"its branch {port.branch!r}" if port.branch else "it, which has several inputs"
            raise FlowError(
                f"{what}: {', '.join(map(repr, readers))} read {branch}, so what they read instead is not clear; "
                f"Rewire or Remove them before it, in the same change"
            )
        for name in readers:
            inputs = [op.inputs[0] if each == port else each for each in graph[name].inputs]
            if graph[name].spec.inputs_are_alike:
                inputs = list(dict.fromkeys(inputs))
            steps.append(Connect(name, tuple(inputs)))
    return [*steps, TakeOut(op.name, edit.flush)]


def _rewired(graph: Graph, edit: Rewire) -> list[Step]:
    what = "Rewire"
    op = _operator(graph, edit.operator, what)
    what = f"{what} of {op.kind} {op.name!r}"
    if not op.inputs:
        raise FlowError(f"{what}: a source has no inputs")
    ports = tuple(parse_port(each, graph, what) for each in _several(edit.to))
    if op.spec.inputs_are_alike and edit.input is None:
        inputs = ports
    elif len(ports) != 1:
        raise FlowError(f"{what}: only a union takes several inputs at once; found to={edit.to!r:.60}")
    elif len(op.inputs) == 1 and edit.input in (None, 0):
        inputs = ports
    elif type(edit.input) is not int or not 0 <= edit.input < len(op.inputs):
        raise FlowError(
            f"{what}: it has {len(op.inputs)} inputs, {_listed(op.inputs)}; say which with input=, 0 to "
            f"{len(op.inputs) - 1}; found {edit.input!r:.20}"
        )
    else:
        inputs = (*op.inputs[: edit.input], *ports, *op.inputs[edit.input + 1 :])
    if inputs == op.inputs:
        raise FlowError(f"{what} changes nothing: it reads {_listed(inputs)} already")
    return [Connect(op.name, inputs)]


def _operator(graph: Graph, name: object, what: str) -> Operator:
    return graph[parse_operator(name, graph, what)]


def parse_operator(name: object, graph: Graph, what: str) -> str:
    """The name of an operator of the flow; raises :class:`FlowError` if it has none of that name."""
    if isinstance(name, str) and name in graph:
        return name
    return parse_port(name, graph, what).operator


def require_flushable(op: Operator, what: str) -> None:
    """Refuse to flush an operator that holds nothing back."""
    if not op.spec.holds_back:
        why = "emits its totals in every epoch" if op.kind == "aggregate" else "holds no rows or results back"
        raise FlowError(
            f"{what}: flush=True is for what is still open (windows, outer joins, timers of event time), and this "
            f"{op.kind} {why}; leave flush out"
        )


def _no_sources(op: Operator) -> FlowError:
    return FlowError(
        f"source {op.name!r} cannot be removed: Spark fixes the sources of a query, by their number, in its log. To do "
        f"without its rows, rewire what reads it and end it in a NoopSink"
    )


def _several(names: object) -> tuple[str, ...]:
    return tuple(names) if isinstance(names, tuple | list) else (names,)  # type: ignore[return-value]  # checked later


def _listed(ports: Sequence[Port]) -> str:
    return ", ".join(repr(str(port)) for port in ports)
