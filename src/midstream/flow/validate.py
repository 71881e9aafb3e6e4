"""What every graph must satisfy before anything is planned: checked as a list of small rules."""

from __future__ import annotations

import re
from collections import Counter

import pyarrow as pa

from midstream.data.ddl import closest
from midstream.data.schema import to_ddl
from midstream.errors import FlowError, SchemaError
from midstream.flow.model import Graph, Operator, Sink
from midstream.flow.spec import ERROR_COLUMN

_NAME = re.compile(r"[^\W\d][\w .\-]*")
MAX_NAME = 100


def check_name(name: object, what: str) -> str:
    """A usable name: a string that starts with a letter, of letters, digits, ``_``, ``-``, ``.`` and spaces.

    >>> check_name("FM", "operator")
    'FM'
    """
    if not isinstance(name, str):
        raise FlowError(f"{what}: the name comes first and must be a string, found {type(name).__name__} {name!r:.60}")
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise FlowError(
            f"{what}: {name!r:.120} cannot be a name. A name starts with a letter, holds letters, digits, '_', '-', "
            f"'.' and spaces, and has at most {MAX_NAME} characters: it identifies the operator's state, changes and "
            f"metrics."
        )
    return name


def check_error_column(takes: pa.Schema, what: str) -> None:
    """The errors branch adds a column to those of the rows; they must not have one of that name."""
    if ERROR_COLUMN in (name.lower() for name in takes.names):
        raise SchemaError(
            f"{what}: with on_error='branch' bad rows get the column {ERROR_COLUMN!r}, but the rows have one of that "
            f"name already ({to_ddl(takes)}); rename it in a map before",
            column=ERROR_COLUMN,
        )


def validate(graph: Graph) -> Graph:
    """Check all rules; give the graph back. The first broken one raises :class:`FlowError`."""
    check_name(graph.name, "flow")
    for rule in (_unique_names, _known_inputs, _no_cycle, _has_ends, _nothing_dangles, _idle_among_others):
        rule(graph)
    return graph


def _unique_names(graph: Graph) -> None:
    for name, count in Counter(check_name(op.name, op.kind) for op in graph).items():
        if count > 1:
            kinds = ", ".join(op.kind for op in graph if op.name == name)
            raise FlowError(
                f"flow {graph.name!r}: {count} operators are called {name!r} ({kinds}); names identify state and "
                f"changes and must be unique"
            )


def _known_inputs(graph: Graph) -> None:
    ports = {port for op in graph for port in op.ports}
    for op in graph:
        for port in op.inputs:
            if port not in ports:
                near = closest(str(port), [str(p) for p in ports])
                raise FlowError(
                    f"operator {op.name!r} reads {str(port)!r}, which no operator of flow {graph.name!r} emits"
                    + (f"; did you mean {near!r}?" if near else "")
                )


def _no_cycle(graph: Graph) -> None:
    """Operators must stand in topological order; if they cannot, there is a cycle to show."""
    position = {op.name: i for i, op in enumerate(graph)}
    if all(position[port.operator] < position[op.name] for op in graph for port in op.inputs):
        return
    trail = _find_cycle(graph)
    if trail:
        raise FlowError(f"flow {graph.name!r} has a cycle: {' → '.join(trail)}; a flow must be acyclic")
    raise FlowError(f"flow {graph.name!r}: operators must be listed after the operators they read from")


def _find_cycle(graph: Graph) -> list[str]:
    """Depth-first search along inputs, without recursion; terminates because each operator is finished once."""
    done: set[str] = set()
    for start in graph:
        trail: list[str] = [start.name]
        pending = [iter(start.inputs)]
        while pending:
            port = next(pending[-1], None)
            if port is None:
                pending.pop()
                done.add(trail.pop())
            elif port.operator in trail:
                return [*trail[trail.index(port.operator) :], port.operator][::-1]
            elif port.operator not in done:
                trail.append(port.operator)
                pending.append(iter(graph[port.operator].inputs))
    return []


def _has_ends(graph: Graph) -> None:
    if not graph.sources:
        raise FlowError(f"flow {graph.name!r} has no source; add one with flow.source(name, stream)")
    if not graph.of(Sink):
        raise FlowError(f"flow {graph.name!r} has no sink; end a stream with stream.sink(name, target)")


def _nothing_dangles(graph: Graph) -> None:
    for op in graph:
        for port in op.ports:
            # Late and bad rows are counted whether or not anyone reads them.
            is_aside = port.branch in (*op.late_branches, *op.error_branches)
            if not graph.consumers(port) and not is_aside:
                raise FlowError(f"{_dangling(op, str(port))}; to drop its rows on purpose use .sink(name, NoopSink())")


def _idle_among_others(graph: Graph) -> None:
    timed = {name: source for name, source in graph.sources.items() if source.event_time is not None}
    for name, source in timed.items():
        if source.idle_us is not None and len(timed) == 1:
            raise FlowError(
                f"source {name!r}: idle= lets the watermark go by the other sources, but no other source of flow "
                f"{graph.name!r} has event times, so there is nothing to go by; leave out idle="
            )


def _dangling(op: Operator, port: str) -> str:
    what = f"branch {port!r}" if len(op.ports) > 1 else f"operator {op.name!r} ({op.kind})"
    return f"nothing reads {what}, so its rows would be lost silently. Add a consumer"
