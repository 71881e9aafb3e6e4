"""`transact`: binds a stream's transactions to its columns, and checks them before anything runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from midstream.data.schema import check_key_columns, require_columns, to_ddl, type_name
from midstream.errors import FlowError, FunctionError, MidstreamError, SchemaError
from midstream.flow.functions import label_of
from midstream.flow.transactions import Table, Transaction, TransactionType, transaction
from midstream.flow.transactions.agreement import require_agreement, returned_by, tables_of

if TYPE_CHECKING:
    from midstream.operators.transact import Transact

__all__ = ["TransactionLike", "check_events", "check_owner", "described", "schema_of", "traced", "transactions_of"]

TransactionLike = Transaction | Callable[[Any, Any], Any]
"""A function, with or without the decorator ``@transaction``."""

_ARROW = {"double": pa.float64(), "bigint": pa.int64(), "boolean": pa.bool_()}


def transactions_of(functions: Sequence[TransactionLike], what: str) -> tuple[Transaction, ...]:
    """The transactions of an operator; refuses duplicate names."""
    if importlib.util.find_spec("numba") is None:
        raise FlowError(
            f"{what}: transactions are compiled with numba, which is not installed: pip install 'midstream[txn]'"
        )
    found = tuple(one if isinstance(one, Transaction) else _declared(one, what) for one in functions)
    if not found:
        raise FlowError(f"{what}: name at least one transaction, e.g. transact('ledger', transfer, order_by='ts')")
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FlowError(
            f"{what}: two transactions are called {twice[0]!r}; events refer to them by name, so rename one"
        )
    return found


def _declared(function: Any, what: str) -> Transaction:
    if not callable(function) or isinstance(function, type):
        raise FunctionError(
            f"{what}: a transaction must be a function of (t, e); found {type(function).__name__} {function!r:.60}"
        )
    return transaction(function)


def traced(transactions: Sequence[Transaction], events: pa.Schema, what: str) -> tuple[TransactionType, ...]:
    """Trace the transactions for events with these columns."""
    types = tuple(_traced(one, events, what) for one in transactions)
    try:
        require_agreement(types)
    except SchemaError as error:
        raise SchemaError(f"{what}: {error}") from None
    returned = {kind: name for name, kind in returned_by(types).items()}
    if "object" in returned:
        raise SchemaError(
            f"{what}: {returned['object']!r} is returned as an object; a transaction can return only numbers and "
            f"booleans. Compute it with t.call(…, returns='double'), or 'bigint' or 'boolean'"
        )
    return types


def _traced(one: Transaction, events: pa.Schema, what: str) -> TransactionType:
    try:
        return one.trace(events)
    except MidstreamError as error:
        raise type(error)(f"{what}: {error}", **error.fields) from None
    except Exception as error:  # a user's function may raise anything
        raise FunctionError(
            f"{what}: {label_of(one.function)} cannot be traced: {type(error).__name__}: {error}", transaction=one.name
        ) from error


def described(spec: Transact, types: Sequence[TransactionType], what: str) -> Transact:
    """The operator with these transactions."""
    if len(types) > 1 and spec.which is None:
        names = ", ".join(one.name for one in types)
        raise FlowError(
            f"{what}: there are several transactions ({names}), so set which= to the column with the name of the "
            f"transaction that an event triggers"
        )
    if not spec.timed and any(one.windows for one in types):
        raise FlowError(
            f"{what}: a window looks back in time, and the watermark decides what it may still need: order by the "
            f"event time of the source (a timestamp column, source(…, event_time=…)), not by {spec.order_by!r}"
        )
    return replace(spec, transactions=tuple(one.name for one in types), tables=tables_of(types))


def check_events(spec: Transact, events: pa.Schema, what: str) -> None:
    """Check that events have the columns for their order, transaction and key."""
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
                f"{what}: which={spec.which!r} must be a string column with the names of transactions; found "
                f"{type_name(events.field(spec.which).type)}",
                column=spec.which,
            )
    if spec.domain is not None:
        check_key_columns(events, [spec.domain], f"{what}: domain")


def schema_of(events: pa.Schema, types: Sequence[TransactionType], what: str) -> pa.Schema:
    """The event's columns, the columns that its transaction returns, and its outcome."""
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
    """Check that an operator of a flow may use these tables: they must be the flow's, and no other operator's."""
    for table in tables:
        if known.get(table.name) != table:
            names = ", ".join(known) or "none"
            raise FlowError(
                f"{what}: the table {table.name!r} is not one of this flow, which has: {names}. Create it with "
                f"flow.table({table.name!r}, …)"
            )
        if table.name in owners:
            raise FlowError(
                f"{what}: the table {table.name!r} belongs to transact {owners[table.name]!r}. Transactions that "
                f"share a table must run in one operator, which orders them: unite the streams, and set which= to the "
                f"column that names an event's transaction"
            )
