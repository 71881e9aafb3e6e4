"""Edits: what a change does to a flow. So far there is one kind, other functions in the same graph.

:func:`revise` is pure: a graph and updates in, another graph out, or an error that says what does not fit. Names and
edges stay; functions, tables and the schemas that follow from them may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from midstream.data.ddl import closest
from midstream.data.schema import joined_schema, parse_ddl, to_ddl, type_name
from midstream.errors import FlowError, SchemaError
from midstream.flow.aggregations import result_type
from midstream.flow.branches import check_error_column
from midstream.flow.functions import check_callable, refuse_timers
from midstream.flow.inputs import describe_table
from midstream.flow.model import (
    Aggregate,
    Distinct,
    Filter,
    FlatMap,
    Form,
    Graph,
    How,
    Join,
    KeyBy,
    Lookup,
    Map,
    OnError,
    Operator,
    Process,
    Route,
    Sink,
    Spec,
    Transact,
    Transform,
    Union,
    port_schema,
)
from midstream.flow.transactions.binding import check_events, described, schema_of, traced, transactions_of

__all__ = ["Edit", "Update", "as_updates", "declares_columns", "function_takes", "revise"]

_FUNCTIONS = Map | Filter | FlatMap | Route | Process | Transform | Transact
_DECLARED = Map | FlatMap | Process | Transform
"""Operators whose columns are what the user says they are."""


@dataclass(frozen=True)
class Edit:
    """One of the edits that make a change; its class is its kind. They are taken together: all of them, or none."""


@dataclass(frozen=True)
class Update(Edit):
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


def as_updates(edits: Iterable[Edit]) -> tuple[Update, ...]:
    """The edits of a change, all of which must be of a kind that is known.

    >>> as_updates(["FM"])
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: a change is made of edits, found str 'FM'; allowed: Update, e.g. Update('FM', function)
    """
    known = []
    for edit in edits:
        if not isinstance(edit, Update):
            raise FlowError(
                f"a change is made of edits, found {type(edit).__name__} {edit!r:.60}; allowed: Update, e.g. "
                f"Update('FM', function)"
            )
        known.append(edit)
    return tuple(known)


def declares_columns(spec: Spec) -> bool:
    """Whether the columns of an operator are what the user says, and do not follow from its inputs."""
    return isinstance(spec, _DECLARED)


def function_takes(spec: Spec) -> tuple[str, ...]:
    """What the function of an operator is called with, in words."""
    match spec:
        case Transform():
            return ("a DataFrame",)
        case Process(form=Form.ROWS):
            return ("a key", "a dict (one row)", "its state")
        case Process():
            return ("keys", "a pyarrow.RecordBatch", "its state")
        case Map(form=Form.ROWS) | Filter(form=Form.ROWS) | FlatMap(form=Form.ROWS) | Route(form=Form.ROWS):
            return ("a dict (one row)",)
        case _:
            return ("a pyarrow.RecordBatch",)


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
        elif isinstance(spec, Transact):
            spec, schema = _transacted(op, spec, payloads[op.name], inputs[0])
        elif not isinstance(spec, _DECLARED):
            schema = _derived(replace(op, spec=spec), inputs)
        revised[op.name] = replace(op, spec=spec, schema=schema)
    return Graph(graph.name, tuple(revised.values()), payloads, written_for)


def _by_operator(graph: Graph, updates: Iterable[Update]) -> dict[str, Update]:
    wanted: dict[str, Update] = {}
    for update in updates:
        if update.operator not in graph:
            names = [op.name for op in graph if isinstance(op.spec, _FUNCTIONS | Lookup)]
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
        if not isinstance(spec, Process):
            raise FlowError(f"{what}: migrate= is for the state of a process; a {op.kind} keeps none of the user's")
        check_callable(update.migrate, op.name, "a key", "its state")
    if update.returns is not None and not isinstance(spec, _DECLARED):
        raise FlowError(f"{what}: the columns of a {op.kind} follow from its input; leave out returns=")
    if update.local is not None and not isinstance(spec, Transform):
        raise FlowError(f"{what}: local= is for transforms; the local runtime runs a {op.kind}'s function as it is")
    if isinstance(spec, Lookup):
        return _updated_lookup(spec, update, what)
    if not isinstance(spec, _FUNCTIONS):
        raise FlowError(
            f"{what}: a {op.kind} has no function that could be replaced. What can be updated are map, filter, "
            f"flat_map, route, process, transact, lookup (its table) and transform"
        )
    if isinstance(spec, Transact):
        handed = update.function if isinstance(update.function, list | tuple) else (update.function,)
        return spec, transactions_of(handed, what)
    check_callable(update.function, op.name, *function_takes(spec))
    if isinstance(spec, Process):
        on_timer = getattr(update.function, "on_timer", None)
        if on_timer is not None:
            check_callable(on_timer, op.name, "a key", "a time", "its state")
        return replace(spec, has_timers=on_timer is not None), update.function
    refuse_timers(update.function, op.name)
    if isinstance(spec, Transform):
        if update.local is not None:
            check_callable(update.local, op.name, "a pyarrow.Table")
        return spec, (update.function, update.local)
    return spec, update.function


def _transacted(op: Operator, spec: Transact, payload: Any, events: pa.Schema) -> tuple[Transact, pa.Schema]:
    """A transact with other transactions, or with events of other columns. Its tables stay as they are."""
    what = f"{op.kind} {op.name!r}"
    check_events(spec, events, what)
    types = traced(payload, events, what)
    revised = described(spec, types, what)
    known = {table.name: table for table in spec.tables}
    for table in revised.tables:
        if known.get(table.name, table) != table:
            raise SchemaError(
                f"after the change {what} would have the table {table.name!r} as {table!r} instead of "
                f"{known[table.name]!r}; what it holds cannot be converted. Give the new table another name"
            )
    return revised, schema_of(events, types, what)


def _updated_lookup(spec: Lookup, update: Update, what: str) -> tuple[Spec, Any]:
    table, schema = describe_table(update.function, what)
    for _, theirs in spec.on:
        if theirs not in schema.names or not schema.field(theirs).type.equals(spec.table_schema.field(theirs).type):
            raise SchemaError(
                f"{what}: the new table must have the column {theirs!r} of type "
                f"{type_name(spec.table_schema.field(theirs).type)}, by which rows are looked up; it has "
                f"({to_ddl(schema)})",
                column=theirs,
            )
    return replace(spec, table_schema=schema), table


def _check_inputs(
    op: Operator, before: Sequence[pa.Schema], after: Sequence[pa.Schema], written_for: Sequence[pa.Schema] | None
) -> None:
    """Whether an operator can take what it is given after the change.

    ``written_for`` are the columns that its function was made for; None if the change brings another function.
    """
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if new.equals(old):
            continue
        what = f"the change gives {op.kind} {op.name!r} other columns: ({to_ddl(new)}) instead of ({to_ddl(old)})"
        match op.spec:
            case Join():
                raise SchemaError(
                    f"{what}. A join keeps whole rows, so they cannot change; keep the columns, or give the new ones "
                    f"to an operator behind the join"
                )
            case Union() | Sink() | Transform() | Transact():
                # Unions compare their inputs, a transact is traced anew, others depend on the time of the change.
                pass
            case Process(keys=keys) | Aggregate(keys=keys) | Distinct(keys=keys) | KeyBy(columns=keys):
                # Aggregates with windows and distinct may need the event time as well.
                times = [time for time in (getattr(op.spec, "time", None),) if time is not None]
                _require([*keys, *times], old, new, f"{what}, and it needs")
                if isinstance(op.spec, Process) and written_for is not None:
                    _require(written_for[i].names, written_for[i], new, _advice(op, what))
            case _ if written_for is not None:
                _require(written_for[i].names, written_for[i], new, _advice(op, what))
            case _:
                pass


def _advice(op: Operator, what: str) -> str:
    return f"{what}. Add an Update({op.name!r}, …) to the change that can take them; it needs"


def _require(names: Iterable[str], old: pa.Schema, new: pa.Schema, what: str) -> None:
    """Refuse when one of these columns is gone or has another type."""
    for name in names:
        wanted = old.field(name).type
        if name not in new.names or not new.field(name).type.equals(wanted):
            raise SchemaError(f"{what} {name!r} of type {type_name(wanted)}", column=name)


def _derived(op: Operator, inputs: list[pa.Schema]) -> pa.Schema:
    """The columns of an operator whose columns follow from its inputs'."""
    what = f"{op.kind} {op.name!r}"
    match op.spec:
        case Union():
            for other in inputs[1:]:
                if not other.equals(inputs[0]):
                    raise SchemaError(
                        f"after the change {what} would unite ({to_ddl(inputs[0])}) and ({to_ddl(other)}); update all "
                        f"its inputs, so that they have the same columns"
                    )
            return inputs[0]
        case Filter() | KeyBy() | Route() | Distinct() | Sink():
            return inputs[0]
        case Lookup(on=on, how=how, table_schema=table):
            keys = [theirs for _, theirs in on]
            return joined_schema(inputs[0], table, keys, nullable=how is How.LEFT, what=what)
        case Aggregate(columns=columns):
            for name, aggregation in columns:
                found = result_type(aggregation, inputs[0], f"{what}, {name}")
                if not found.equals(op.schema.field(name).type):
                    raise SchemaError(
                        f"after the change {what} would have to keep {name!r} as {type_name(found)} instead of "
                        f"{type_name(op.schema.field(name).type)}; what it has kept so far cannot be converted",
                        column=name,
                    )
            return op.schema
        case _:
            return op.schema
