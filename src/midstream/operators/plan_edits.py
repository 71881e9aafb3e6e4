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
    """The flow so far. A later edit may repair what an earlier one breaks: only the result has to be a flow."""
    try:
        return outlined(graph, steps)
    except MidstreamError:
        return outlined(graph, steps, is_whole=False)


def _inserted(graph: Graph, edit: Insert) -> list[Step]:
    what = "Insert"
    _check_functions(edit, what)
    after, before = edit.after, edit.before
    if edit.between is not None:
        if after is not None or before is not None:
            raise FlowError(f"{what}: between= says both ends; leave out after= and before=")
        if len(_several(edit.between)) != 2:
            raise FlowError(f"{what}: between= is a pair, (after, before); found {edit.between!r:.60}")
        after, before = edit.between
    if after is None and edit.source is None:
        raise FlowError(f"{what}: say where, with after='operator' or between=('operator', 'reader')")
    ports = [parse_port(each, graph, what) for each in _several(after)] if after is not None else []
    if not ports:
        return _inserted_source(graph, edit, before)
    readers = _readers(graph, ports, before, what)
    flow = Flow._continuing(graph)
    made, steps = _built(flow, graph, edit, ports, f"{what} after {_listed(ports)}")
    added = [step.operator for step in steps if isinstance(step, Add)]
    what = f"{what} of {', '.join(repr(op.name) for op in added)}"
    if made is None:
        if not any(op.delivery is not None for op in added):
            raise FlowError(f"{what}: return the stream that the readers of {_listed(ports)} get, or end it in a sink")
        if before is not None:
            raise FlowError(f"{what}: before= names readers, but the function returns no stream for them")
        return steps
    _require_stream(made, flow, what)
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


def _check_functions(edit: Insert, what: str) -> None:
    reads = 1 if edit.between is not None or edit.source is None else 0
    streams = ["a stream"] * (reads if edit.after is None else len(_several(edit.after)))
    if edit.source is not None:
        check_callable(edit.source, f"{what}, source", "the flow")
        streams.append("the stream of the source")
    if edit.build is not None:
        check_callable(edit.build, what, *streams)
    elif edit.source is None:
        raise FlowError(
            f"{what}: give a function that builds what is inserted, e.g. lambda rows: rows.filter('even', f)"
        )
    elif edit.after is not None or edit.between is not None:
        raise FlowError(
            f"{what}: it reads {edit.after or edit.between!r} and adds a source, so say how the two streams meet: give "
            f"a function of both, e.g. lambda old, new: old.union('all', new)"
        )


def _built(flow: Flow, graph: Graph, edit: Insert, ports: Sequence[Port], what: str) -> tuple[Any, list[Step]]:
    """The results of the user's functions, and the operators that they add to the flow."""
    made = None
    try:
        streams = [flow._stream_of(port) for port in ports]
        if edit.source is not None:
            made = edit.source(flow)
            _require_source(made, flow, graph, what)
            streams.append(made)
        if edit.build is not None:
            made = edit.build(*streams)
    except MidstreamError:
        raise
    except Exception as error:
        raise FlowError(f"{what}: its function raised {type(error).__name__}: {error}") from error
    added = [op for op in flow._operators.values() if op.name not in graph]
    if not added:
        raise FlowError(f"{what}: its function adds no operator to the stream that it gets")
    if edit.source is None and (strangers := [op.name for op in added if not op.inputs]):
        raise FlowError(f"{what}: its function adds the source {strangers[0]!r}; give it with source=lambda flow: …")
    states = _states(edit.state, added, f"{what} of {', '.join(repr(op.name) for op in added)}")
    return made, [
        Add(op, tuple(_schema(flow, port) for port in op.inputs), flow._payloads.get(op.name), states.get(op.name))
        for op in added
    ]


def _require_source(made: Any, flow: Flow, graph: Graph, what: str) -> None:
    if not isinstance(made, Stream) or made._flow is not flow:
        raise FlowError(
            f"{what}: source= returned {type(made).__name__} {made!r:.60}; return the stream of a new source, e.g. "
            f"lambda flow: flow.source('more', stream)"
        )
    if all(op.inputs for op in flow._operators.values() if op.name not in graph):
        raise FlowError(f"{what}: source= adds no source; call flow.source(name, stream) and return its stream")


def _require_stream(made: Any, flow: Flow, what: str) -> None:
    if not isinstance(made, Stream) or made._flow is not flow:
        raise FlowError(
            f"{what}: its function returned {type(made).__name__} {made!r:.60}; return a stream made of the one that "
            f"it gets, or nothing if that ends in a sink"
        )


def _inserted_source(graph: Graph, edit: Insert, before: object) -> list[Step]:
    """A source that reads nothing of the flow: it ends in sinks, leads to unions, or other edits wire it."""
    flow = Flow._continuing(graph)
    made, steps = _built(flow, graph, edit, (), "Insert of a source")
    what = f"Insert of {', '.join(repr(step.operator.name) for step in steps if isinstance(step, Add))}"
    if before is None:
        return steps
    _require_stream(made, flow, what)
    for name in _several(before):
        reader = _operator(graph, name, what)
        if not reader.spec.inputs_are_alike:
            raise FlowError(
                f"{what}: {reader.kind} {reader.name!r} reads what it reads already, and only a union takes one input "
                f"more. Unite the streams before it, e.g. Insert(lambda old, new: old.union('all', new), between=("
                f"{str(reader.inputs[0]) if reader.inputs else '…'!r}, {reader.name!r}), source=…)"
            )
        steps.append(Connect(reader.name, (*reader.inputs, made._port)))
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
    if edit.flush:
        require_flushable(op, what)
    steps: list[Step] = []
    if not op.inputs:
        return [*_without_source(graph, op, what), TakeOut(op.name)]
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


def _without_source(graph: Graph, op: Operator, what: str) -> list[Step]:
    """Unions continue without a source that is removed. Other readers need another input first."""
    steps: list[Step] = []
    for port in op.ports:
        for name in graph.consumers(port):
            inputs = tuple(each for each in graph[name].inputs if each != port)
            if not graph[name].spec.inputs_are_alike or not inputs:
                raise FlowError(
                    f"{what}: {graph[name].kind} {name!r} reads it, and would have no input; Rewire or Remove it "
                    f"before, in the same change"
                )
            steps.append(Connect(name, inputs))
    return steps


def _several(names: object) -> tuple[str, ...]:
    return tuple(names) if isinstance(names, tuple | list) else (names,)  # type: ignore[return-value]  # checked later


def _listed(ports: Sequence[Port]) -> str:
    return ", ".join(repr(str(port)) for port in ports)
