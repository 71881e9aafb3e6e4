"""Streams of the fluent API: what can be done with the rows of an operator, and with rows that have a key.

Every mistake that can be seen here is refused here, at the user's own line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from midstream.data.schema import (
    check_key_columns,
    joined_schema,
    parse_ddl,
    to_ddl,
)
from midstream.errors import FlowError, SchemaError
from midstream.flow.branches import (
    KEYED_ONLY,
    Branches,
    error_port,
    late_port,
    not_keyed,
)
from midstream.flow.functions import check_callable, refuse_timers
from midstream.flow.inputs import (
    check_comparable,
    check_sink_signature,
    column_pairs,
    describe_table,
)
from midstream.flow.keyed import KeyedOperators
from midstream.flow.model import (
    ERRORS,
    Filter,
    FlatMap,
    Form,
    How,
    KeyBy,
    Lookup,
    Map,
    OnError,
    Port,
    Route,
    Sink,
    Transact,
    Transform,
    Union,
    port_schema,
)
from midstream.flow.sinks import (
    CallSink,
    ConsoleSink,
    DatabaseSink,
    FileSink,
    MemorySink,
    NoopSink,
    SinkTarget,
    check_columns,
)
from midstream.flow.transactions.binding import (
    AnyTransaction,
    check_events,
    check_owner,
    described,
    schema_of,
    traced,
    transactions_of,
)
from midstream.flow.validate import check_name

if TYPE_CHECKING:
    from midstream.flow.builder import Flow

Row = dict[str, Any]
RowFunction = Callable[[Row], Row]
BatchFunction = Callable[[pa.RecordBatch], pa.RecordBatch]

_A_ROW = "a dict (one row)"
_A_BATCH = "a pyarrow.RecordBatch (a slice of rows)"


class Stream:
    """The rows that leave an operator. Each method adds one operator behind it and gives back *its* rows.

    Using one stream several times replicates its rows. Functions come in two forms: for rows, which are dicts, and
    for batches (the methods whose names end in ``_batches``), which are ``pyarrow.RecordBatch``. ``returns`` is the
    schema of the result in Spark's DDL, by default the input's; ``adds`` names only the columns that a function puts
    behind those of its input. What functions return is held to it.

    With ``on_error="branch"``, rows that an operator cannot take leave at :meth:`errors`; by default they fail the job.
    """

    def __init__(self, flow: Flow, port: Port, schema: pa.Schema) -> None:
        self._flow = flow
        self._port = port
        self.schema = schema

    def __repr__(self) -> str:
        return f"Stream({str(self._port)!r}, {to_ddl(self.schema)!r})"

    if not TYPE_CHECKING:  # mypy would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            if name in KEYED_ONLY:
                raise not_keyed(self._flow._unchecked, self._port, self.schema, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def map(
        self,
        name: str,
        function: RowFunction,
        *,
        returns: str | None = None,
        adds: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Each row gives exactly one row."""
        return self._function(name, Map(Form.ROWS), function, returns, adds, on_error)

    def map_batches(
        self,
        name: str,
        function: BatchFunction,
        *,
        returns: str | None = None,
        adds: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Each slice of rows gives as many rows, in the same order; the number is checked."""
        return self._function(name, Map(Form.BATCHES), function, returns, adds, on_error)

    def filter(self, name: str, function: Callable[[Row], bool], *, on_error: str = "fail") -> Stream:
        """Keep the rows for which the function returns something true."""
        return self._function(name, Filter(Form.ROWS), function, on_error=on_error)

    def filter_batches(self, name: str, function: Callable[[pa.RecordBatch], Any], *, on_error: str = "fail") -> Stream:
        """Keep the rows at which the function's result, a boolean array, is true."""
        return self._function(name, Filter(Form.BATCHES), function, on_error=on_error)

    def flat_map(
        self,
        name: str,
        function: Callable[[Row], Iterable[Row]],
        *,
        returns: str | None = None,
        adds: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Each row gives any number of rows; the function may be a generator."""
        return self._function(name, FlatMap(Form.ROWS), function, returns, adds, on_error)

    def flat_map_batches(
        self,
        name: str,
        function: BatchFunction,
        *,
        returns: str | None = None,
        adds: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Each slice of rows gives any number of rows."""
        return self._function(name, FlatMap(Form.BATCHES), function, returns, adds, on_error)

    def late(self, side: str = "left") -> Stream:
        """The rows that came too late for this operator's windows, as they came in; of a join, those of one side."""
        operator = self._flow._operators[self._port.operator]
        return self._branch(late_port(operator, self._port.branch, side))

    def errors(self, side: str = "left") -> Stream:
        """The rows that this operator could not take, as they came in, and why: a column ``error`` behind theirs.

        The operator must have been made with ``on_error="branch"``. Bad rows are those for which its function raised or
        returned something that is not of the declared columns, whose key is null or too long, or whose event time is
        null. They change no state. Nobody has to read them: ``errors`` of the operator's metrics counts them. Of a
        join, ``side`` says which input's rows are meant.

        A timer that fails has no row: its error has the columns of the key, null in the others, and the timer's time in
        its text. A timer fires once, so it is gone.

        >>> from midstream import Flow, ListSource, MemorySink
        >>> from midstream.testing import run_local
        >>> flow, out, bad = Flow("parsing"), MemorySink(), MemorySink()
        >>> texts = flow.source("texts", ListSource([[{"text": "1"}, {"text": "x"}, {"text": "3"}]], "text string"))
        >>> parsed = texts.map("parse", lambda row: {"n": int(row["text"])}, returns="n int", on_error="branch")
        >>> parsed.sink("out", out)
        >>> parsed.errors().sink("bad", bad)
        >>> _ = run_local(flow)
        >>> [row["n"] for row in out.rows]
        [1, 3]
        >>> bad.rows
        [{'text': 'x', 'error': "ValueError: invalid literal for int() with base 10: 'x'"}]
        """
        operator = self._flow._operators[self._port.operator]
        return self._branch(error_port(operator, self._port.branch, side))

    def key_by(self, name: str, *columns: str, on_error: str = "fail") -> KeyedStream:
        """Rows with equal values in these columns meet in one task downstream, in a deterministic order.

        What comes back has the operators that keep state per key: ``process``, ``aggregate``, ``distinct``, ``join``.
        With ``on_error="branch"``, rows whose key is null or too long leave at :meth:`errors`; by default they go on,
        and the first operator that keeps state fails.
        """
        check_name(name, "key_by")
        if not columns:
            raise FlowError(
                f"key_by {name!r}: name at least one column, e.g. key_by({name!r}, {self.schema.names[0]!r})"
            )
        check_key_columns(self.schema, columns, f"key_by {name!r}")
        self._flow._add(name, KeyBy(tuple(columns)), (self._port,), self.schema, on_error=on_error)
        return KeyedStream(self._flow, Port(name), self.schema, tuple(columns))

    def transact(
        self,
        name: str,
        *transactions: AnyTransaction,
        order_by: str,
        which: str | None = None,
        domain: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Each row triggers a transaction over tables that all of them share; it comes out committed or aborted.

        The result of an epoch equals running its transactions one after the other in the order of ``order_by`` (of
        equal ones, in the order of arrival). A transaction one of whose conditions fails has no effect at all. Rows
        come out with their own columns, those that the transaction returned (null where it was aborted), ``committed``
        and ``reason``, the text of the condition that failed.

        :param transactions: functions of ``t`` and ``e``, usually made with ``@transaction``: see
            :class:`midstream.Access`. They are called once, on symbols for whole columns.
        :param order_by: a timestamp or whole number that orders the rows. If it is the event time of the source, rows
            of before the watermark leave at ``.late()`` and trigger nothing.
        :param which: the column that says, by the function's name, which transaction a row triggers; needed if there
            are several.
        :param domain: rows that agree in this column have tables of their own, and domains run in parallel. Without it
            there is one domain: one task runs all transactions, on all of its machine's cores.
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
        owners = {
            table.name: op.name
            for op in self._flow._operators.values()
            if isinstance(op.spec, Transact)
            for table in op.spec.tables
        }
        check_owner(spec.tables, owners, self._flow._tables, what)
        schema = schema_of(self.schema, types, what)
        self._flow._require_free(name)
        together = self._flow._add(f"{name}.domain", KeyBy(spec.keys), (self._port,), self.schema)
        return self._flow._add(name, spec, (together._port,), schema, found, on_error)

    def union(self, name: str, *others: Stream) -> Stream:
        """Rows of this stream and the others, which must have the same columns, as one stream."""
        check_name(name, "union")
        if not others:
            raise FlowError(f"union {name!r}: name at least one other stream")
        for other in others:
            self._check_union(name, other)
        ports = (self._port, *(other._port for other in others))
        if len(set(ports)) < len(ports):
            raise FlowError(f"union {name!r}: a stream is named twice; a union takes each stream once")
        return self._flow._add(name, Union(), ports, self.schema)

    def route(
        self, name: str, function: Callable[[Row], str], *, branches: Sequence[str], on_error: str = "fail"
    ) -> Branches:
        """Each row goes to exactly one branch, the one whose name the function returns: ``routed["branch"]``.

        With ``on_error="branch"`` bad rows leave at ``routed.errors()``.
        """
        return self._route(name, Form.ROWS, function, branches, on_error)

    def route_batches(
        self, name: str, function: Callable[[pa.RecordBatch], Any], *, branches: Sequence[str], on_error: str = "fail"
    ) -> Branches:
        """Like :meth:`route`, for a function that returns one branch name per row, as an array."""
        return self._route(name, Form.BATCHES, function, branches, on_error)

    def lookup(
        self,
        name: str,
        table: Any,
        *,
        on: str | Sequence[str] | Mapping[str, str],
        how: str = "inner",
        unique: bool = True,
        on_error: str = "fail",
    ) -> Stream:
        """Join each row with a static table, which every worker holds in memory; the table's columns are added.

        :param table: a ``pyarrow.Table``, a pandas DataFrame, or a batch DataFrame, which is collected when the job
            starts.
        :param on: the columns that must be equal; ``{"stream_column": "table_column"}`` where names differ. Null
            equals nothing.
        :param how: ``"inner"`` drops rows without a match, ``"left"`` keeps them with nulls.
        :param unique: the key is unique in the table, so that a row has at most one match; checked when the job starts.
        :param on_error: with ``"branch"``, rows whose key is null leave at :meth:`errors`; by default they have no
            match.
        """
        what = f"lookup {check_name(name, 'lookup')!r}"
        if how not in list(How):
            raise FlowError(f"{what}: how={how!r} is not known; allowed: {', '.join(How)}")
        pairs = column_pairs(on, what)
        table, table_schema = describe_table(table, what)
        check_key_columns(self.schema, [mine for mine, _ in pairs], f"{what}, stream")
        check_key_columns(table_schema, [theirs for _, theirs in pairs], f"{what}, table")
        for mine, theirs in pairs:
            check_comparable(what, mine, self.schema.field(mine).type, theirs, table_schema.field(theirs).type)
        keys = [theirs for _, theirs in pairs]
        schema = joined_schema(self.schema, table_schema, keys, nullable=how == How.LEFT, what=what)
        spec = Lookup(pairs, How(how), unique, table_schema)
        return self._flow._add(name, spec, (self._port,), schema, table, on_error)

    def transform(
        self,
        name: str,
        function: Callable[[Any], Any],
        *,
        returns: str | None = None,
        local: Callable[[pa.Table], pa.Table] | None = None,
    ) -> Stream:
        """Run any DataFrame → DataFrame function on the epoch's rows: Spark SQL, joins with tables, ML pipelines.

        Catalyst runs it inside the epoch's plan, and the flow's stages end and start at it. It sees one epoch at a
        time. ``local`` does the same on a ``pyarrow.Table``, for the local runtime, which has no Spark.
        """
        check_callable(function, check_name(name, "transform"), "a DataFrame")
        if local is not None:
            check_callable(local, name, "a pyarrow.Table")
        schema = self.schema if returns is None else parse_ddl(returns)
        return self._flow._add(name, Transform(), (self._port,), schema, (function, local))

    def sink(self, name: str, target: SinkTarget | Callable[[Any, int], Any]) -> None:
        """Rows go out: to a :class:`FileSink`, a :class:`DatabaseSink`, … or any ``callable(df, epoch)``."""
        what = f"sink {check_name(name, 'sink')!r}"
        if not isinstance(target, FileSink | DatabaseSink | MemorySink | ConsoleSink | NoopSink | CallSink):
            if not callable(target):
                raise FlowError(
                    f"{what}: expected a FileSink, DatabaseSink, MemorySink, ConsoleSink, NoopSink or a "
                    f"function(df, epoch), found {type(target).__name__} {target!r:.60}"
                )
            if inspect.isclass(target):  # could be called with (df, epoch), and would swallow the rows
                raise FlowError(
                    f"{what}: found the class {target.__name__}; give an instance of it, {target.__name__}(…)"
                )
            check_sink_signature(target, what)
            target = CallSink(target)
        if isinstance(target, MemorySink):
            for other, known in self._flow._payloads.items():
                if known is target:  # each would replace what the other one wrote
                    raise FlowError(f"{what}: its MemorySink is that of sink {other!r}; give each sink one of its own")
        check_columns(target, self.schema, what)
        self._flow._add(name, Sink(target.drains), (self._port,), self.schema, target)

    def _function(
        self,
        name: str,
        spec: Map | Filter | FlatMap,
        function: Any,
        returns: str | None = None,
        adds: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        name = check_name(name, "operator")
        check_callable(function, name, _A_ROW if spec.form is Form.ROWS else _A_BATCH)
        refuse_timers(function, name)
        schema = self._returned(name, returns, adds)
        return self._flow._add(name, spec, (self._port,), schema, function, on_error)

    def _branch(self, port: Port) -> Stream:
        return Stream(self._flow, port, port_schema(self._flow._operators, port))

    def _returned(self, name: str, returns: str | None, adds: str | None) -> pa.Schema:
        if adds is None:
            return self.schema if returns is None else parse_ddl(returns)
        if returns is not None:
            raise FlowError(f"operator {name!r}: give returns= (all columns) or adds= (the new ones), not both")
        return parse_ddl(f"{to_ddl(self.schema)}, {adds}")

    def _route(self, name: str, form: Form, function: Any, branches: Sequence[str], on_error: str) -> Branches:
        what = f"route {check_name(name, 'route')!r}"
        if isinstance(branches, str) or not branches:
            raise FlowError(
                f"{what}: branches must be a sequence of names, e.g. branches=('low', 'high'), found {branches!r}"
            )
        if len(set(branches)) < len(branches):
            raise FlowError(f"{what}: the branches {list(branches)} must be different")
        for branch in branches:
            check_name(branch, f"{what}, branch")
        if on_error == OnError.BRANCH and ERRORS in branches:
            raise FlowError(f"{what}: with on_error='branch' the branch for bad rows is {ERRORS!r}; rename yours")
        check_callable(function, name, _A_ROW if form is Form.ROWS else _A_BATCH)
        refuse_timers(function, name)
        self._flow._add(name, Route(form, tuple(branches)), (self._port,), self.schema, function, on_error)
        return Branches(name, {b: Stream(self._flow, Port(name, b), self.schema) for b in branches})

    def _check_union(self, name: str, other: Stream) -> None:
        if not isinstance(other, Stream):
            raise FlowError(f"union {name!r}: expected streams, found {type(other).__name__} {other!r:.60}")
        if other._flow is not self._flow:
            raise FlowError(
                f"union {name!r}: {str(other._port)!r} belongs to another flow ({other._flow.name!r}); streams can "
                f"only be combined within one flow"
            )
        if not other.schema.equals(self.schema):
            raise SchemaError(
                f"union {name!r}: {str(self._port)!r} has ({to_ddl(self.schema)}) but {str(other._port)!r} has "
                f"({to_ddl(other.schema)}); bring them to the same columns, types and order with a map first"
            )


class KeyedStream(KeyedOperators, Stream):
    """The rows that leave a key_by. A stream like any other, and with operators that keep state per key."""

    def __init__(self, flow: Flow, port: Port, schema: pa.Schema, keys: tuple[str, ...]) -> None:
        super().__init__(flow, port, schema)
        self.keys = keys
        self.event_time = flow._event_time_of(port)
