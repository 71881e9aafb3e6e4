"""transact: each row triggers a transaction over shared tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from midstream.data.schema import columns_of
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import OperatorInTask
from midstream.engine.table_layout import rows_of
from midstream.errors import SchemaError
from midstream.flow.model import KeyBy, Operator
from midstream.flow.spec import LATE, InputChange, Spec, layout_text
from midstream.flow.transactions import Table
from midstream.flow.validate import check_name
from midstream.operators.rows import StreamRows
from midstream.operators.transact_binding import (
    TransactionLike,
    check_events,
    check_owner,
    described,
    schema_of,
    traced,
    transactions_of,
)
from midstream.operators.transact_step import engine_of, instantiate_transact
from midstream.state.key_arrays import decode_keys

if TYPE_CHECKING:
    from midstream.operators.stream import Stream

_ARROW = {"double": pa.float64(), "bigint": pa.int64(), "boolean": pa.bool_(), "object": pa.string()}


@dataclass(frozen=True)
class Transact(TaskSpec):
    """Each row triggers a transaction over shared tables, in the order of the column ``order_by``.

    The column ``which`` holds the name of the transaction that a row triggers; each value of the column ``domain`` has
    its own tables. ``timed``: ``order_by`` is the event time of the source, so rows older than the watermark are late.
    There is no preflight: without the tables, transactions can be traced but not run.
    """

    kind: ClassVar[str] = "transact"
    requires: ClassVar[tuple[str, ...]] = ("numba",)
    runs_whole_epochs: ClassVar[bool] = True
    is_stateful: ClassVar[bool] = True
    is_updatable: ClassVar[bool] = True

    transactions: tuple[str, ...]
    tables: tuple[Table, ...]
    order_by: str
    which: str | None = None
    domain: str | None = None
    timed: bool = False

    @property
    def keyed_by(self) -> tuple[str, ...]:
        """The columns of the key_by before it; none if all rows meet in one task."""
        return () if self.domain is None else (self.domain,)

    @property
    def late_branches(self) -> tuple[str, ...]:
        """Rows are late only if they are ordered by event time."""
        return (LATE,) if self.timed else ()

    @property
    def blocks(self) -> bool:
        """An epoch's rows run as one batch."""
        return True

    @property
    def shared_tables(self) -> tuple[Table, ...]:
        """The tables of its transactions."""
        return self.tables

    def replaced(self, function: Any, local: Any, operator: str, what: str) -> tuple[Spec, Any]:
        """Replace the transactions by one or a list. They are traced once the columns of their events are known."""
        handed = function if isinstance(function, list | tuple) else (function,)
        return self, transactions_of(handed, what)

    def check_input(self, change: InputChange) -> None:
        """Accept any columns: :meth:`derived` traces the transactions again."""

    def derived(
        self, inputs: Sequence[pa.Schema], schema: pa.Schema, payload: Any, what: str
    ) -> tuple[Spec, pa.Schema]:
        """Trace the transactions over the new columns. Existing tables must stay the same."""
        [events] = inputs
        check_events(self, events, what)
        types = traced(payload, events, what)
        revised = described(self, types, what)
        known = {table.name: table for table in self.tables}
        for table in revised.tables:
            if known.get(table.name, table) != table:
                raise SchemaError(
                    f"after the change {what} would have the table {table.name!r} as {table!r} instead of "
                    f"{known[table.name]!r}; its contents cannot be converted. Give the new table another name"
                )
        return revised, schema_of(events, types, what)

    def instantiate(self, operator: Operator, parts: Parts) -> OperatorInTask:
        """Load the transactions; each worker creates their engine once."""
        [takes] = parts.takes(operator)
        transactions: Any = parts.function(operator)
        engine = parts.resources.made(
            "engine",
            parts.program.blobs[operator.name],
            takes.to_string(),
            lambda: engine_of(operator, self, transactions, takes),
        )
        return instantiate_transact(operator, self, engine, parts.state(operator), parts.times, parts.revision)

    def state_layout(self, takes: Sequence[pa.Schema]) -> str:
        """Transactions and the set of tables may change; tables are compared one by one."""
        return layout_text(Transact((), (), order_by="", domain=self.domain), [columns_of(takes[0], self.keyed_by)])

    def shown_state(self, operator: Operator, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        """The rows of all tables, with keys and values as text."""
        parts = []
        for table in self.tables:
            shown = self.shown_table(operator, table, takes, rows)
            values = shown.select([column.name for column in table.columns]).to_pylist()
            columns = {
                "table": pa.array([table.name] * len(shown), pa.string()),
                "key": shown["key"].cast(pa.string()),
                "value": pa.array([str(row["value"] if table.single else row) for row in values], pa.string()),
            }
            domain = {name: shown[name] for name in self.keyed_by}
            parts.append(pa.table({**domain, **columns}))
        return pa.concat_tables(parts)

    def shown_table(self, operator: Operator, table: Table, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        """One table: the domain's column if there is one, ``key``, and the columns of the value."""
        found = rows_of(table, rows, f"transact {operator.name!r}")
        schema = columns_of(takes[0], self.keyed_by)
        domains = decode_keys(pa.array(found.domains, pa.binary()), schema)
        key = pa.array(found.keys, pa.int64() if table.key == "bigint" else pa.string())
        values = [
            pa.array(column, _ARROW[each.kind]) for column, each in zip(found.columns, table.columns, strict=True)
        ]
        names = [*schema.names, "key", *(column.name for column in table.columns)]
        return pa.Table.from_arrays([*domains, key, *values], names)


class TransactMethods(StreamRows):
    """Add a transact to a stream."""

    def transact(
        self,
        name: str,
        *transactions: TransactionLike,
        order_by: str,
        which: str | None = None,
        domain: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Each row triggers a transaction over shared tables, which commits or aborts.

        The result of an epoch equals running its transactions one after the other in the order of ``order_by`` (ties in
        the order of arrival). A transaction has no effect at all if one of its conditions fails. The result has the
        columns of the row, the columns that the transaction returned (null if it aborted), ``committed`` and
        ``reason``, the text of the condition that failed.

        :param transactions: functions of ``t`` and ``e``, usually decorated with ``@transaction``: see
            :class:`midstream.Access`. They are called once, on symbols for whole columns.
        :param order_by: a timestamp or whole number that orders the rows. If it is the event time of the source, rows
            older than the watermark leave at ``.late()`` and trigger nothing.
        :param which: the column with the name of the function that a row triggers; needed if there are several.
        :param domain: each value of this column has its own tables, and domains run in parallel. Without it there is
            one domain: one task runs all transactions, on all of its machine's cores.
        :param on_error: with ``"branch"``, rows that cannot trigger a transaction, and those for which a function given
            to ``t.call`` raises, leave at :meth:`errors` and have no effect.

        >>> from midstream import Flow, ListSource, MemorySink, transaction
        >>> from midstream.testing import run_local
        >>> flow, out = Flow("bank"), MemorySink()
        >>> accounts = flow.table("accounts", key="string", value="double", default=0.0)
        >>> @transaction
        ... def book(t, e):
        ...     balance = t.read(accounts, e.who) + e.eur
        ...     t.require(balance >= 0, "not enough money")
        ...     t.write(accounts, e.who, balance)
        ...     return {"balance": balance}
        >>> rows = [{"n": 2, "who": "ann", "eur": -6.0}, {"n": 1, "who": "ann", "eur": 7.0},
        ...         {"n": 3, "who": "bob", "eur": -1.0}]
        >>> events = flow.source("events", ListSource([rows], "n int, who string, eur double"))
        >>> events.transact("ledger", book, order_by="n").sink("out", out)
        >>> _ = run_local(flow)
        >>> [(row["n"], row["balance"], row["committed"], row["reason"]) for row in out.rows]
        [(2, 1.0, True, None), (1, 7.0, True, None), (3, None, False, 'not enough money')]
        """
        what = f"transact {check_name(name, 'transact')!r}"
        found = transactions_of(transactions, what)
        timed = self._flow._event_time_of(self._port) == order_by
        spec = Transact((), (), order_by, which, domain, timed)
        check_events(spec, self.schema, what)
        types = traced(found, self.schema, what)
        spec = described(spec, types, what)
        owners = {table.name: op.name for op in self._flow._operators.values() for table in op.spec.shared_tables}
        check_owner(spec.tables, owners, self._flow._tables, what)
        schema = schema_of(self.schema, types, what)
        self._flow._require_free(name)
        together = self._flow._add(f"{name}.domain", KeyBy(spec.keyed_by), (self._port,), self.schema)
        return self._flow._add(name, spec, (together._port,), schema, found, on_error)
