"""Branches of an operator: those of a route, late rows and bad rows; and the errors for streams that lack a branch or a
key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from midstream.errors import FlowError
from midstream.flow.model import Graph, Operator, Port
from midstream.flow.spec import ERRORS, ERRORS_RIGHT, LATE, LATE_RIGHT, OnError

if TYPE_CHECKING:
    from midstream.operators.stream import Stream

__all__ = [
    "Branches",
    "NotKeyed",
    "error_port",
    "late_port",
    "not_keyed",
    "on_error_of",
]


class NotKeyed(FlowError, AttributeError):
    """A stateful operator was requested on a stream without a key."""


class Branches(Mapping[str, "Stream"]):
    """The branches of a route, by name."""

    def __init__(self, name: str, streams: Mapping[str, Stream]) -> None:
        self._name = name
        self._streams = dict(streams)

    def __getitem__(self, branch: str) -> Stream:
        if branch not in self._streams:
            raise FlowError(f"route {self._name!r} has no branch {branch!r}; it has {', '.join(self._streams)}")
        return self._streams[branch]

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def errors(self) -> Stream:
        """The rows for which the function raised or returned an unknown branch: see :meth:`Stream.errors`."""
        return next(iter(self._streams.values())).errors()


def on_error_of(value: str, what: str) -> OnError:
    """Parse the user's ``on_error``.

    >>> on_error_of("branch", "map 'm'")
    <OnError.BRANCH: 'branch'>
    """
    if value not in list(OnError):
        raise FlowError(f"{what}: on_error={value!r} is not known; allowed: {', '.join(OnError)}")
    return OnError(value)


def late_port(operator: Operator, branch: str, side: str) -> Port:
    """The port of late rows; ``branch`` is the branch of the stream on which the user called ``late()``."""
    found = _on_side(operator.late_branches, side, (LATE, LATE_RIGHT))
    if branch or found is None:
        raise FlowError(
            _none_such(operator, "late", side, (LATE, LATE_RIGHT), operator.late_branches)
            or f"{operator.kind} {operator.name!r} has no late({side!r}); only joins, aggregates with windows and "
            f"transacts in the order of event time have late rows"
        )
    return Port(operator.name, found)


def error_port(operator: Operator, branch: str, side: str) -> Port:
    """The port of bad rows. All branches of a route share the route's port."""
    found = _on_side(operator.error_branches, side, (ERRORS, ERRORS_RIGHT))
    if branch in (*operator.late_branches, *operator.error_branches) or found is None:
        raise FlowError(
            _none_such(operator, "errors", side, (ERRORS, ERRORS_RIGHT), operator.error_branches)
            or f"{operator.kind} {operator.name!r} has no errors({side!r}): a bad row fails the epoch. Create "
            f"{operator.name!r} with on_error='branch' if it can have bad rows"
        )
    return Port(operator.name, found)


def _on_side(branches: tuple[str, ...], side: str, sides: tuple[str, str]) -> str | None:
    wanted = dict(zip(("left", "right"), sides, strict=True)).get(side)
    return wanted if wanted in branches else None


def _none_such(
    operator: Operator, method: str, side: str, sides: tuple[str, str], branches: tuple[str, ...]
) -> str | None:
    known = [name for name, branch in zip(("left", "right"), sides, strict=True) if branch in branches]
    if not known:
        return None
    return (
        f"{operator.kind} {operator.name!r} has no {method}({side!r}); it has "
        f"{', '.join(f'{method}({name!r})' for name in known)}"
    )


def not_keyed(graph: Graph, port: Port, schema: pa.Schema, wanted: str) -> NotKeyed:
    """The error for a stateful operator on a stream without a key. It shows what to write instead, with the user's
    names.

    Operators that may change the key columns drop the key.
    """
    between, op = list[Operator](), graph[port.operator]
    while len(op.inputs) == 1 and not (graph.is_keyed(op.inputs[0])):
        between.append(op)
        op = graph[op.inputs[0].operator]
    here = graph[port.operator]
    what = f"{wanted}() needs a keyed stream, and the rows of {here.kind} {here.name!r} have no key"
    if len(op.inputs) != 1:
        first = schema.names[0] if schema.names else "column"
        return NotKeyed(f"{what}: write .key_by('by_{first}', {first!r}).{wanted}(…), with the columns of the key")
    between = [*reversed([*between, op])]
    key_by = graph[op.inputs[0].operator]
    key = key_by.spec.partition_by or ()
    columns = ", ".join(map(repr, key))
    culprits = [each for each in between if graph.key_of(Port(each.name)) is None] or between
    names = f"{culprits[0].kind} {culprits[0].name!r}"
    calls = "".join(f".{each.kind}({each.name!r}, …)" for each in between)
    again = ""
    if set(key) <= set(schema.names):
        again = f". Or key its rows again: .key_by('{key_by.name}_again', {columns}).{wanted}(…)"
    return NotKeyed(
        f"{what} any more: {names} comes after key_by {key_by.name!r} and may change the values of the key columns. "
        f"Put it before the key_by: {calls}.key_by({key_by.name!r}, {columns}).{wanted}(…){again}"
    )
