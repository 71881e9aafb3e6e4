"""The meaning of a flow, defined a second time: a serial interpreter of a graph over plain lists of dicts.

It shares nothing with the engine but the graph: no planner, no batches, no frames, no hashing. Tests compare a
runtime's output with it. Batch functions cannot be applied row by row, so tests that use them provide their row-level
meaning separately (``meanings``); the comparison then also shows that the two agree.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from midstream.flow.model import Graph, KeyBy, Operator, Port, Sink, Source, Transform, Union
from midstream.flow.spec import ERRORS, LATE, LATE_RIGHT, Form, How, OnError
from midstream.operators.drop import Drop
from midstream.operators.filter import Filter
from midstream.operators.flat_map import FlatMap
from midstream.operators.lookup import Lookup
from midstream.operators.map import Map
from midstream.operators.rename import Rename
from midstream.operators.route import Route
from midstream.operators.select import Select
from midstream.operators.where import Where
from midstream.operators.with_columns import WithColumns

Row = dict[str, Any]
Multiset = Counter[tuple[tuple[str, str, Any], ...]]


def multiset(rows: Iterable[Row]) -> Multiset:
    """Rows without their order. Values of different types are different, although ``1 == True`` in Python."""
    return Counter(
        tuple(sorted((name, type(value).__name__, _hashable(value)) for name, value in row.items())) for row in rows
    )  # names differ, so values are never compared


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Answer:
    """The expected result of one epoch: the rows of every sink, and the rows in and out of every operator.

    The input of a source or a transform equals its output: its rows enter the flow there. Late and bad rows are counted
    separately.
    """

    sinks: Mapping[str, list[Row]]
    taken: Mapping[str, int]
    given: Mapping[str, int]
    late: Mapping[str, int]
    errors: Mapping[str, int]


Remembers = Callable[[Operator, list[list[Row]]], dict[str, list[Row]]]
"""The output of a stateful operator for its inputs' rows, by branch; :mod:`tests.keyed_oracle` has one."""


def interpret(
    graph: Graph,
    sources: Mapping[str, Sequence[Row]],
    meanings: Mapping[str, Callable[..., Any]] | None = None,
    remembers: Remembers | None = None,
) -> Answer:
    """Interpret one epoch. ``sources`` has every source's rows, ``meanings`` the row-level meanings of functions."""
    rows: dict[Port, list[Row]] = {}
    sinks: dict[str, list[Row]] = {}
    taken: dict[str, int] = {}
    given: dict[str, int] = {}
    late: dict[str, int] = {}
    errors: dict[str, int] = {}
    for op in graph:
        incoming = [row for port in op.inputs for row in rows[port]]
        if isinstance(op.spec, Sink):
            sinks[op.name] = incoming
            continue
        if isinstance(op.spec, Source):
            incoming = list(sources[op.name])
        elif isinstance(op.spec, Transform):
            incoming = _transformed(graph, op, incoming)
        late[op.name] = 0
        if op.spec.is_stateful:
            assert remembers is not None, f"{op.name} keeps state: use tests.keyed_oracle"
            outgoing = remembers(op, [rows[port] for port in op.inputs])
            late[op.name] = sum(len(outgoing.get(branch, [])) for branch in (LATE, LATE_RIGHT))
        else:
            outgoing = _outgoing(graph, op, incoming, meanings or {})
        errors[op.name] = sum(len(outgoing.get(branch, [])) for branch in op.error_branches)
        rows.update({port: outgoing[port.branch] for port in op.ports})
        taken[op.name] = len(incoming)
        given[op.name] = sum(map(len, outgoing.values())) - late[op.name] - errors[op.name]
    return Answer(sinks, taken, given, late, errors)


def _transformed(graph: Graph, op: Operator, incoming: list[Row]) -> list[Row]:
    _, local = graph.payloads[op.name]
    result: list[Row] = local(pa.Table.from_pylist(incoming, schema=graph.schema_of(op.inputs[0]))).to_pylist()
    return result


def _outgoing(
    graph: Graph, op: Operator, incoming: list[Row], meanings: Mapping[str, Callable[..., Any]]
) -> dict[str, list[Row]]:
    """Rows by branch; most operators have only the empty branch."""
    match op.spec:
        case Source(event_time):
            good, bad = divided(op, incoming, times=[event_time] if event_time else [])
            return {"": good, ERRORS: bad}
        case KeyBy(columns):
            good, bad = divided(op, incoming, columns)
            return {"": good, ERRORS: bad}
        case Transform() | Union():
            return {"": incoming}
        case Lookup() as spec:
            good, bad = divided(op, incoming, [mine for mine, _ in spec.on])
            return {"": _joined(spec, good, graph.payloads[op.name].to_pylist()), ERRORS: bad}
        case Select() | WithColumns() | Where() | Rename() | Drop():  # what their text means is up to the test
            return {"": [row for one in incoming if (row := meanings[op.name](one)) is not None]}
        case Map(form) | Filter(form) | FlatMap(form) | Route(form, _):
            function = meanings[op.name] if form is Form.BATCHES else graph.payloads[op.name]
            answers, bad = _answers(op, incoming, function)
    match op.spec:
        case Map():
            return {"": [answer for _, answer in answers], ERRORS: bad}
        case Filter():
            return {"": [row for row, answer in answers if answer], ERRORS: bad}
        case FlatMap():
            return {"": [each for _, answer in answers for each in answer], ERRORS: bad}
        case Route(_, branches):
            chosen = {branch: [row for row, answer in answers if answer == branch] for branch in branches}
            return {**chosen, ERRORS: bad}
    raise AssertionError(f"the oracle does not know {op.kind}")


def _answers(
    op: Operator, incoming: list[Row], function: Callable[[Row], Any]
) -> tuple[list[tuple[Row, Any]], list[Row]]:
    """The function's answer to each row, and the rows on which it raises."""
    answers: list[tuple[Row, Any]] = []
    bad: list[Row] = []
    for row in incoming:
        try:
            answer = function(copy.deepcopy(row))
            if isinstance(op.spec, FlatMap):
                answer = list(answer)
            for each in [answer] if isinstance(op.spec, Map) else answer if isinstance(op.spec, FlatMap) else []:
                require_fit(each, op.schema)
        except Exception as error:
            if op.on_error is OnError.FAIL:
                raise
            bad.append({**row, "error": f"{type(error).__name__}: {error}"})
        else:
            answers.append((row, answer))
    return answers, bad


class SchemaError(ValueError):
    """The oracle's error for a row of the wrong type; it has the name of the engine's, which is part of the reason."""


def require_fit(row: Row, schema: pa.Schema) -> None:
    """Functions in tests are wrong in one way only: they return a text where a number was declared."""
    for field in schema:
        if pa.types.is_integer(field.type) and isinstance(row[field.name], str):
            kind = {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}[field.type.bit_width]
            raise SchemaError(f"column {field.name!r}: expected {kind}, found str {row[field.name]!r}")


def divided(
    op: Operator, incoming: Iterable[Row], keys: Sequence[str] = (), times: Sequence[str] = ()
) -> tuple[list[Row], list[Row]]:
    """Rows that have a key and a time and, if the operator sets bad rows aside, those that do not."""
    good: list[Row] = []
    bad: list[Row] = []
    for row in incoming:
        reason = _lack(row, keys, times, limit=480 if not isinstance(op.spec, Lookup) else 1 << 30)
        if op.on_error is OnError.FAIL or reason is None:
            good.append(row)
        else:
            bad.append({**row, "error": reason})
    return good, bad


def _lack(row: Row, keys: Sequence[str], times: Sequence[str], limit: int) -> str | None:
    for key in keys:
        if row[key] is None:
            return f"SchemaError: column {key!r} is null, which cannot be a key"
    sizes = [len(row[key].encode()) if isinstance(row[key], str) else 8 for key in keys]
    lengths = sum(2 for key in keys[:-1] if isinstance(row[key], str))
    if sum(sizes) + lengths > limit:
        took = sum(sizes) + lengths
        return f"StateError: the key ({', '.join(keys)}) takes {took} bytes; at most {limit} are allowed"
    for time in times:
        if row[time] is None:
            return f"SchemaError: column {time!r} is null, which cannot be an event time"
    return None


def _joined(spec: Lookup, incoming: list[Row], table: list[Row]) -> list[Row]:
    """A nested loop. Null equals nothing, not even null."""
    theirs = [their for _, their in spec.on]
    added = [name for name in spec.table_schema.names if name not in theirs]
    joined = []
    for row in incoming:
        matches = [
            other for other in table if all(row[my] is not None and row[my] == other[their] for my, their in spec.on)
        ]
        if not matches and spec.how is How.LEFT:
            matches = [dict.fromkeys(added)]
        joined += [row | {name: match[name] for name in added} for match in matches]
    return joined
