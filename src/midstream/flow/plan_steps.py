"""Steps of a change of a flow's plan: an operator is added, dropped, or reads other inputs.

Whatever a user asks for (an :class:`~midstream.Insert`, a new script, the way back to a revision) becomes steps, and
:func:`outlined` makes the flow that they lead to. Pure. Whether functions can take their rows there is decided by
:func:`midstream.flow.edits.revise`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from midstream.data.ddl import closest
from midstream.errors import FlowError, MidstreamError
from midstream.flow.model import Graph, Operator, Port, port_schema
from midstream.flow.validate import validate

__all__ = ["Add", "Connect", "Step", "TakeOut", "outlined", "parse_port", "require_keys"]


@dataclass(frozen=True)
class Add:
    """An operator is added. ``takes`` are the columns of its inputs for which its function was written."""

    operator: Operator
    takes: tuple[pa.Schema, ...]
    payload: Any = field(default=None, compare=False, repr=False)
    state: Any = field(default=None, compare=False, repr=False)
    """The initial state that a user gives it, as a table."""

    def __str__(self) -> str:
        return f"+{self.operator.name}"


@dataclass(frozen=True)
class TakeOut:
    """An operator is dropped, and emits all that it holds before that if ``flush`` is set."""

    name: str
    flush: bool = False

    def __str__(self) -> str:
        return f"-{self.name}{' (flushed)' if self.flush else ''}"


@dataclass(frozen=True)
class Connect:
    """An operator reads other inputs."""

    name: str
    inputs: tuple[Port, ...]

    def __str__(self) -> str:
        return f"{self.name} reads {', '.join(map(str, self.inputs))}"


Step = Add | TakeOut | Connect

_PORT = re.compile(r"([^\[\]:]+)(?:\[([^\[\]:]+)\]|:([^\[\]:]+))?")


def parse_port(text: object, graph: Graph, what: str) -> Port:
    """An output as users name it: ``"split"``, or with a branch ``"split:left"`` or ``"split[left]"``.

    >>> from midstream.flow.model import Source
    >>> graph = Graph("g", (Operator("in", Source(), (), pa.schema([])),))
    >>> parse_port("in", graph, "insert")
    Port(operator='in', branch='')
    """
    found = _PORT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise FlowError(f"{what}: {text!r:.60} does not name an output; write 'operator' or 'operator:branch'")
    name, branch = found[1], found[2] or found[3] or ""
    port = Port(name, branch)
    if name not in graph:
        names = [op.name for op in graph]
        near = closest(name, names)
        raise FlowError(
            f"{what}: flow {graph.name!r} has no operator {name!r}"
            + (f"; did you mean {near!r}?" if near else ".")
            + f" Its operators are {', '.join(map(repr, names))}"
        )
    if port not in graph[name].ports:
        known = ", ".join(
            f"'{each.operator}:{each.branch}'" if each.branch else repr(name) for each in graph[name].ports
        )
        raise FlowError(
            f"{what}: {graph[name].kind} {name!r} has no output {text!r}; it has "
            f"{known or 'none, as nothing follows it'}"
        )
    return port


def outlined(graph: Graph, steps: Iterable[Step], *, is_whole: bool = True) -> Graph:
    """The flow after steps, made in order. Raises :class:`FlowError` if it is not a flow, unless more steps follow.

    Columns follow where they can be derived; :func:`midstream.flow.edits.revise` checks them.
    """
    operators = {op.name: op for op in graph}
    payloads = dict(graph.payloads)
    written_for = dict(graph.written_for)
    for step in steps:
        match step:
            case Add(operator=op, payload=payload, takes=takes):
                if op.name in operators:
                    raise FlowError(
                        f"flow {graph.name!r} has an operator {op.name!r} already (a {operators[op.name].kind}); names "
                        f"identify state and changes and must be unique"
                    )
                operators[op.name] = op
                written_for[op.name] = takes
                payloads.pop(op.name, None)
                if payload is not None:
                    payloads[op.name] = payload
            case TakeOut(name=name):
                _require(name, graph, operators)
                del operators[name]
                payloads.pop(name, None)
                written_for.pop(name, None)
            case Connect(name=name, inputs=inputs):
                _require(name, graph, operators)
                operators[name] = replace(operators[name], inputs=inputs)
    plain = Graph(graph.name, in_order(graph, operators), payloads, written_for)
    return _derived(validate(plain)) if is_whole else plain


def _require(name: str, graph: Graph, operators: Mapping[str, Operator]) -> None:
    if name not in operators:
        raise FlowError(f"flow {graph.name!r} has no operator {name!r} any more; request the change again")


def in_order(before: Graph, operators: Mapping[str, Operator]) -> tuple[Operator, ...]:
    """Operators with inputs before their readers, otherwise in the order of the flow before, new ones at their inputs.

    Ends with operators that lie on a cycle, in any order: :func:`validate` tells of it.
    """
    wanted = [op.name for op in before if op.name in operators]
    wanted += [name for name in operators if name not in before]
    placed: dict[str, Operator] = {}
    waiting = dict.fromkeys(wanted)
    while waiting:
        ready = next(
            (
                name
                for name in waiting
                if all(port.operator in placed or port.operator not in operators for port in operators[name].inputs)
            ),
            next(iter(waiting)),
        )
        del waiting[ready]
        placed[ready] = operators[ready]
    return tuple(placed.values())


def _derived(graph: Graph) -> Graph:
    found: dict[str, Operator] = {}
    for op in graph:
        inputs = [port_schema(found, port) for port in op.inputs]
        try:
            spec, schema = op.spec.derived(inputs, op.schema, graph.payloads.get(op.name), f"{op.kind} {op.name!r}")
        except MidstreamError:  # the check of all columns says it better
            spec, schema = op.spec, op.schema
        found[op.name] = replace(op, spec=spec, schema=schema)
    return replace(graph, operators=tuple(found.values()))


def require_keys(graph: Graph) -> None:
    """Refuse a flow in which an operator with state reads rows that are not brought together by its key."""
    for op in graph:
        for keys, port in zip(op.spec.keys_by_input, op.inputs, strict=False):
            producer = graph[port.operator]
            columns = graph.key_of(port)
            if columns == keys:
                continue
            wanted = f"rows brought together by ({', '.join(keys)})" if keys else "all rows in one task"
            found = (
                f"{str(port)!r}, which brings them together by ({', '.join(columns)})"
                if columns is not None
                else f"{str(port)!r}, a {producer.kind}"
            )
            raise FlowError(
                f"{op.kind} {op.name!r} needs {wanted}, but would read {found}. Between it and a key_by of its own key "
                f"may only be operators that leave the key columns alone: insert before that key_by, or a key_by too"
            )
