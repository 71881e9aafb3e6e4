"""Checks that several transaction types can run together: they must agree on tables, columns and results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from midstream.errors import SchemaError
from midstream.flow.transactions.expressions import TransactionType
from midstream.flow.transactions.tables import Kind, Table

__all__ = ["require_agreement", "returned_by", "tables_of"]


def require_agreement(types: Sequence[TransactionType]) -> None:
    """Refuse types that use one name for different things."""
    if not types:
        raise SchemaError("a program needs at least one transaction type")
    _agree((table.name, repr(table), "table") for kind in types for table in kind.tables)
    _agree((name, kind, "column") for one in types for name, kind in one.columns.items())
    _agree((name, one.nodes[node].kind, "result") for one in types for name, node in one.returns.items())


def tables_of(types: Sequence[TransactionType]) -> tuple[Table, ...]:
    """All tables, in the order in which the types refer to them."""
    return tuple({table.name: table for kind in types for table in kind.tables}.values())


def returned_by(types: Sequence[TransactionType]) -> dict[str, Kind]:
    """The columns that the types return."""
    return {name: one.nodes[node].kind for one in types for name, node in one.returns.items()}


def _agree(named: Iterable[tuple[str, str, str]]) -> None:
    seen: dict[str, str] = {}
    for name, what, sort in named:
        if seen.setdefault(name, what) != what:
            raise SchemaError(
                f"transactions of one stream disagree about {sort} {name!r}: {seen[name]} in one, {what} in another"
            )
