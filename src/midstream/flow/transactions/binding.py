"""`transact`: what a stream's transactions and its columns make of each other, checked before anything runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from midstream.data.schema import check_key_columns, require_columns, to_ddl, type_name
from midstream.errors import FlowError, FunctionError, MidstreamError, SchemaError
from midstream.flow.functions import label_of
from midstream.flow.model import Transact
from midstream.flow.transactions import Table, Transaction, TransactionType, transaction
from midstream.flow.transactions.agreement import require_agreement, returned_by, tables_of

__all__ = ["AnyTransaction", "check_events", "check_owner", "described", "schema_of", "traced", "transactions_of"]

AnyTransaction = Transaction | Callable[[Any, Any], Any]
"""What users give: a function with ``@transaction``, or one without, which is then taken for one."""

_ARROW = {"double": pa.float64(), "bigint": pa.int64(), "boolean": pa.bool_()}


def transactions_of(given: Sequence[AnyTransaction], what: str) -> tuple[Transaction, ...]:
    """The transactions of an operator; each has a name of its own."""
    if importlib.util.find_spec("numba") is None:
        raise FlowError(
            f"{what}: transactions are compiled with numba, which is not installed: pip install 'midstream[txn]'"
        )
    found = tuple(one if isinstance(one, Transaction) else _declared(one, what) for one in given)
    if not found:
        raise FlowError(f"{what}: name at least one transaction, e.g. transact('ledger', transfer, order_by='ts')")
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FlowError(
            f"{what}: two transactions are called {twice[0]!r}; events name theirs, so give them other names"
        )
    return found


def _declared(function: Any, what: str) -> Transaction:
    if not callable(function) or isinstance(function, type):
        raise FunctionError(
            f"{what}: a transaction is a function of (t, e), found {type(function).__name__} {function!r:.60}"
        )
    return transaction(function)


def traced(transactions: Sequence[Transaction], events: pa.Schema, what: str) -> tuple[TransactionType, ...]:
    """What the transactions do to events with these columns."""
    types = tuple(_traced(one, events, what) for one in transactions)
    try:
        require_agreement(types)
    except SchemaError as error:
        raise SchemaError(f"{what}: {error}") from None
    returned = {kind: name for name, kind in returned_by(types).items()}
    if "object" in returned:
        raise SchemaError(
            f"{what}: {returned['object']!r} is returned as an object; what is returned are numbers and truths. "
            f"Compute them with t.call(…, returns='double'), or 'bigint' or 'boolean'"
        )
    return types


def _traced(one: Transaction, events: pa.Schema, what: str) -> TransactionType:
    try:
        return one.trace(events)
    except MidstreamError as error:
        raise type(error)(f"{what}: {error}", **error.fields) from None
    except Exception as error:  # whatever the user's function raises
        raise FunctionError(
            f"{what}: {label_of(one.function)} cannot be traced: {type(error).__name__}: {error}", transaction=one.name
        ) from error


def described(spec: Transact, types: Sequence[TransactionType], what: str) -> Transact:
    """The same operator with these transactions."""
    if len(types) > 1 and spec.which is None:
        names = ", ".join(one.name for one in types)
        raise FlowError(
            f"{what}: there are several transactions ({names}), so give which=, the column that says by name which one "
            f"an event triggers"
        )
    if not spec.timed and any(one.windows for one in types):
        raise FlowError(
            f"{what}: a window looks back in time, so what it may still need must be known: order by the event time of "
            f"the source (a timestamp column, source(…, event_time=…)), not by {spec.order_by!r}"
        )
    return replace(spec, transactions=tuple(one.name for one in types), tables=tables_of(types))


def check_events(spec: Transact, events: pa.Schema, what: str) -> None:
    """Whether events have what orders, names and divides them."""
    require_columns(events, [spec.order_by], f"{what}: order_by")
    found = events.field(spec.order_by).type
    if not (pa.types.is_timestamp(found) or pa.types.is_signed_integer(found)):
        raise SchemaError(
            f"{what}: order_by={spec.order_by!r} must be a timestamp or a whole number, found {type_name(found)}",
            column=spec.order_by,
        )
    if spec.which is not None:
        require_columns(events, [spec.which], f"{what}: which")
        if not pa.types.is_string(events.field(spec.which).type):
            raise SchemaError(
                f"{what}: which={spec.which!r} must be a string, the name of a transaction, found "
                f"{type_name(events.field(spec.which).type)}",
                column=spec.which,
            )
    if spec.domain is not None:
        check_key_columns(events, [spec.domain], f"{what}: domain")


def schema_of(events: pa.Schema, types: Sequence[TransactionType], what: str) -> pa.Schema:
    """The event's columns, what its transaction returned, and what became of it."""
    added = [pa.field(name, _ARROW[kind]) for name, kind in returned_by(types).items()]
    added += [pa.field("committed", pa.bool_(), nullable=False), pa.field("reason", pa.string())]
    known = {name.lower() for name in events.names}
    for field in added:
        if field.name.lower() in known:
            raise SchemaError(
                f"{what}: the result would have two columns called {field.name!r}; the events have ({to_ddl(events)}). "
                f"Rename one of them",
                column=field.name,
            )
        known.add(field.name.lower())
    return pa.schema([*events, *added])


def check_owner(tables: Sequence[Table], owners: dict[str, str], known: dict[str, Table], what: str) -> None:
    """Whether an operator of a flow may use these tables: they are the flow's, and no other operator's."""
    for table in tables:
        if known.get(table.name) != table:
            names = ", ".join(known) or "none"
            raise FlowError(
                f"{what}: the table {table.name!r} is not one of this flow; it has: {names}. Make it with "
                f"flow.table({table.name!r}, …)"
            )
        if table.name in owners:
            raise FlowError(
                f"{what}: the table {table.name!r} belongs to transact {owners[table.name]!r}. Transactions that share "
                f"a table run in one operator, so that they have one order: unite the streams, and say with which= "
                f"what an event triggers"
            )
