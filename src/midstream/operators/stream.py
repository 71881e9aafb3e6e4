"""Streams of the fluent API: the operations on the rows of an operator, and on rows with a key.

The bases of the two classes list all operators that have their own module; the methods here add those that give a flow
its structure. A method refuses every mistake that it can detect, at the user's own line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from midstream.data.schema import (
    Declared,
    check_key_columns,
    parse_ddl,
    to_ddl,
)
from midstream.errors import FlowError, SchemaError
from midstream.flow.functions import check_callable
from midstream.flow.inputs import (
    check_sink_signature,
)
from midstream.flow.model import KeyBy, Port, Sink, Transform, Union
from midstream.flow.sinks import (
    CallSink,
    ConsoleSink,
    FileSink,
    MemorySink,
    SinkTarget,
    check_columns,
)
from midstream.flow.validate import check_name
from midstream.operators.aggregate import AggregateAllMethods, AggregateMethods
from midstream.operators.branches import error_port, late_port, not_keyed
from midstream.operators.distinct import DistinctMethods
from midstream.operators.drop import DropMethods
from midstream.operators.filter import FilterMethods
from midstream.operators.flat_map import FlatMapMethods
from midstream.operators.join import JoinMethods
from midstream.operators.lookup import LookupMethods
from midstream.operators.map import MapMethods
from midstream.operators.process import ProcessMethods
from midstream.operators.rename import RenameMethods
from midstream.operators.route import RouteMethods
from midstream.operators.select import SelectMethods
from midstream.operators.transact import TransactMethods
from midstream.operators.where import WhereMethods
from midstream.operators.with_columns import WithColumnsMethods

if TYPE_CHECKING:
    from midstream.operators.builder import Flow


class Stream(
    SelectMethods,
    WithColumnsMethods,
    WhereMethods,
    RenameMethods,
    DropMethods,
    MapMethods,
    FilterMethods,
    FlatMapMethods,
    RouteMethods,
    LookupMethods,
    TransactMethods,
    AggregateAllMethods,
):
    """The rows that leave an operator. Each method adds one operator that reads them and returns *its* rows.

    Using one stream several times replicates its rows. Functions come in two forms: for rows, which are dicts, and
    for batches (the methods whose names end in ``_batches``), which are ``pyarrow.RecordBatch``. ``returns`` is the
    schema of the result in Spark's DDL, by default the input's; ``adds`` names only the columns that a function appends
    to those of its input. The results of functions are checked against that schema.

    With ``on_error="branch"``, rows that an operator cannot take leave at :meth:`errors`; by default they fail the job.

    >>> from midstream import Flow, ListSource, MemorySink
    >>> from midstream.testing import run_local
    >>> flow, out = Flow("numbers"), MemorySink()
    >>> numbers = flow.source("in", ListSource([[{"n": 1}, {"n": 2}]], "n int"))
    >>> even = numbers.filter("even", lambda row: row["n"] % 2 == 0)
    >>> even.map("square", lambda row: {"n": row["n"] ** 2}).sink("out", out)
    >>> _ = run_local(flow)
    >>> out.rows
    [{'n': 4}]
    """

    def __init__(self, flow: Flow, port: Port, schema: pa.Schema) -> None:
        self._flow = flow
        self._port = port
        self.schema = schema

    def __repr__(self) -> str:
        return f"Stream({str(self._port)!r}, {to_ddl(self.schema)!r})"

    if not TYPE_CHECKING:  # otherwise mypy would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if hasattr(KeyedStream, name) and not name.startswith("_"):
                raise not_keyed(self._flow._unchecked, self._port, self.schema, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def late(self, side: str = "left") -> Stream:
        """The rows that arrived too late for this operator's windows, unchanged; for a join, those of one side."""
        operator = self._flow._operators[self._port.operator]
        return self._branch(late_port(operator, self._port.branch, side))

    def errors(self, side: str = "left") -> Stream:
        """The bad rows of this operator: the input's columns, and the reason in the column ``error``.

        The operator must have been created with ``on_error="branch"``. Bad rows are rows for which its function raised
        or returned other columns than declared, whose key is null or too long, or whose event time is null. They change
        no state. The branch needs no reader: ``errors`` in the operator's metrics counts bad rows. For a join, ``side``
        selects the input.

        A timer that fails has no row: its error row has the columns of the key, nulls in the others, and the timer's
        time in the reason. A timer fires once, so it is gone.

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
        """Bring rows with equal values in these columns together in one task downstream, in a deterministic order.

        The result has the operators that keep state per key: ``process``, ``aggregate``, ``distinct``, ``join``. With
        ``on_error="branch"``, rows whose key is null or too long leave at :meth:`errors`; by default they pass, and the
        first operator that keeps state fails.
        """
        check_name(name, "key_by")
        if not columns:
            raise FlowError(
                f"key_by {name!r}: name at least one column, e.g. key_by({name!r}, {self.schema.names[0]!r})"
            )
        check_key_columns(self.schema, columns, f"key_by {name!r}")
        keyed = self._flow._add(name, KeyBy(tuple(columns)), (self._port,), self.schema, on_error=on_error)
        assert isinstance(keyed, KeyedStream)
        return keyed

    def union(self, name: str, *others: Stream) -> Stream:
        """Merge this stream and the others, which must have the same columns, into one stream."""
        check_name(name, "union")
        if not others:
            raise FlowError(f"union {name!r}: name at least one other stream")
        for other in others:
            self._check_union(name, other)
        ports = (self._port, *(other._port for other in others))
        if len(set(ports)) < len(ports):
            raise FlowError(f"union {name!r}: a stream is named twice; a union takes each stream once")
        return self._flow._add(name, Union(), ports, self.schema)

    def transform(
        self,
        name: str,
        function: Callable[[Any], Any],
        *,
        returns: Declared | None = None,
        local: Callable[[pa.Table], pa.Table] | None = None,
    ) -> Stream:
        """Run any DataFrame → DataFrame function on the epoch's rows: Spark SQL, joins with tables, ML pipelines.

        Catalyst runs it inside the epoch's plan, and the flow's stages end and start at it. It sees one epoch at a
        time. ``local`` is the equivalent on a ``pyarrow.Table``, for the local runtime, which has no Spark.
        """
        check_callable(function, check_name(name, "transform"), "a DataFrame")
        if local is not None:
            check_callable(local, name, "a pyarrow.Table")
        schema = self.schema if returns is None else parse_ddl(returns)
        return self._flow._add(name, Transform(), (self._port,), schema, (function, local))

    def sink(self, name: str, target: SinkTarget | Callable[[Any, int], Any]) -> None:
        """Write the rows to a :class:`FileSink`, a :class:`DatabaseSink`, … or any ``callable(df, epoch)``."""
        what = f"sink {check_name(name, 'sink')!r}"
        if not isinstance(target, SinkTarget):
            if not callable(target):
                raise FlowError(
                    f"{what}: expected a FileSink, DatabaseSink, DeltaSink, IcebergSink, KafkaSink, MemorySink, "
                    f"ConsoleSink, NoopSink or a function(df, epoch), found {type(target).__name__} {target!r:.60}"
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
                    raise FlowError(f"{what}: sink {other!r} has the same MemorySink; give each sink its own")
        check_columns(target, self.schema, what)
        spec = Sink(
            target.delivery,
            target.table if isinstance(target, FileSink) else None,
            target.limit + 1 if isinstance(target, ConsoleSink) else None,
        )
        self._flow._add(name, spec, (self._port,), self.schema, target)

    def _branch(self, port: Port) -> Stream:
        return self._flow._stream(port)

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


class KeyedStream(ProcessMethods, AggregateMethods, DistinctMethods, JoinMethods, Stream):
    """The rows that leave a key_by: a stream with additional operators that keep state per key.

    Operators that leave the key columns alone give such a stream again: ``where``, ``filter``, ``lookup``, ``distinct``
    and ``route``; ``select``, ``with_columns``, ``rename`` and ``drop`` if they copy the key; ``map`` with ``adds=``.

    >>> from midstream import Flow, ListSource, MemorySink, agg
    >>> from midstream.testing import run_local
    >>> flow, out = Flow("payments"), MemorySink()
    >>> rows = [{"user": "ann", "eur": 3}, {"user": "ann", "eur": 4}]
    >>> payments = flow.source("in", ListSource([rows], "user string, eur int"))
    >>> payments.key_by("by user", "user").aggregate("total", eur=agg.sum("eur")).sink("out", out)
    >>> _ = run_local(flow)
    >>> out.rows
    [{'user': 'ann', 'eur': 7}]
    """

    def __init__(self, flow: Flow, port: Port, schema: pa.Schema, keys: tuple[str, ...]) -> None:
        super().__init__(flow, port, schema)
        self.keys = keys
        self.event_time = flow._event_time_of(port)
