"""The fluent API: a user adds named operators one after the other, and starts the result.

Building runs nothing and needs no Spark. Every mistake that can be detected here is refused here, at the user's own
line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from midstream.data.ddl import Declared
from midstream.drawing.render import render
from midstream.errors import FlowError
from midstream.flow.inputs import (
    describe_source,
)
from midstream.flow.model import Graph, Operator, Port, port_schema
from midstream.flow.spec import OnError, Spec
from midstream.flow.table_refresh import TableRefresh
from midstream.flow.transactions import Table
from midstream.flow.validate import check_error_column, check_name, validate
from midstream.operators.branches import on_error_of
from midstream.operators.stream import KeyedStream, Stream

if TYPE_CHECKING:
    from midstream.runtime.spark.job import Job


class Flow:
    """A streaming pipeline: named operators over ordinary streaming DataFrames.

    >>> from midstream import Flow, ListSource, MemorySink
    >>> from midstream.testing import run_local
    >>> flow = Flow("greetings")
    >>> names = flow.source("names", ListSource([[{"name": "Ada"}, {"name": "Alan"}]], "name string"))
    >>> hello = names.map("hello", lambda row: {"text": "Hello " + row["name"]}, returns="text string")
    >>> out = MemorySink()
    >>> hello.sink("out", out)
    >>> _ = run_local(flow)
    >>> out.rows
    [{'text': 'Hello Ada'}, {'text': 'Hello Alan'}]
    """

    def __init__(self, name: str) -> None:
        self.name = check_name(name, "flow")
        self._operators: dict[str, Operator] = {}
        self._payloads: dict[str, Any] = {}
        self._tables: dict[str, Table] = {}
        self._refreshes: dict[str, TableRefresh] = {}
        """By lookup: how its table is read again."""

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, operators={list(self._operators)})"

    def _repr_svg_(self) -> str:
        """How a notebook shows it, finished or not."""
        return render(self._unchecked, "svg")

    @classmethod
    def _continuing(cls, graph: Graph) -> Flow:
        """A flow that has all operators of a graph, for adding others."""
        flow = cls(graph.name)
        flow._operators.update((op.name, op) for op in graph)
        flow._payloads.update(graph.payloads)
        flow._tables.update((table.name, table) for op in graph for table in op.spec.shared_tables)
        return flow

    def _stream_of(self, port: Port) -> Stream:
        """The stream of an operator that exists; with a key behind a key_by."""
        schema = port_schema(self._operators, port)
        keys = self._operators[port.operator].spec.partition_by
        if keys is None or port.branch:
            return Stream(self, port, schema)
        return KeyedStream(self, port, schema, keys)

    @property
    def graph(self) -> Graph:
        """The graph built so far, checked and frozen."""
        return validate(Graph(self.name, tuple(self._operators.values()), dict(self._payloads)))

    def source(
        self,
        name: str,
        stream: Any,
        *,
        event_time: str | None = None,
        delay: str = "0 seconds",
        max_ahead: str | None = "1 day",
        idle: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Read rows from a streaming DataFrame, a :class:`GeneratorSource` or a :class:`ListSource`.

        :param event_time: the timestamp column with the time at which an event happened (or was due); latency is
            measured from it, and windows use it. Sources of midstream define their own.
        :param delay: how much later than others an event may arrive. The watermark, which closes windows, is the
            smallest value, over all sources with event times, of the latest event time seen minus this delay.
        :param max_ahead: event times further than this ahead of the epoch's clock do not move the watermark. Their rows
            are processed normally, and counted as ``rows_ahead``. With ``None`` every event time moves the watermark.
        :param idle: when the source has had no row for this long, by the clocks of epochs, the watermark follows the
            other sources. Rows that arrive afterwards may then be late. Default: windows wait for every source.
        :param on_error: with ``"branch"``, rows whose event time is null leave at :meth:`Stream.errors`; by default
            they pass, and the first operator that needs the time fails.
        """
        what = f"source {check_name(name, 'source')!r}"
        spec, schema = describe_source(stream, what, event_time=event_time, delay=delay, max_ahead=max_ahead, idle=idle)
        if spec.event_time is None and on_error_of(on_error, what) is OnError.BRANCH:
            raise FlowError(f"{what}: on_error='branch' needs event_time=; add that, or leave out on_error=")
        return self._add(name, spec, (), schema, stream, on_error)

    def table(self, name: str, *, key: str = "string", value: Declared = "double", default: Any = None) -> Table:
        """Declare a table that the transactions of a :meth:`Stream.transact` share: key → value.

        :param key: ``"bigint"`` or ``"string"``.
        :param value: ``"double"``, ``"bigint"`` or ``"boolean"``; several of them with names, as in
            ``"speed double, cars bigint"`` or a ``StructType``; or ``"object"``, any Python object, which only
            functions given to ``t.call`` can look into.
        :param default: the value of a key that was never written.

        >>> Flow("bank").table("accounts", key="string", value="double", default=0.0).name
        'accounts'
        """
        table = Table(check_name(name, f"flow {self.name!r}, table"), key=key, value=value, default=default)
        self._require_free(name)
        self._tables[name] = table
        return table

    def start(
        self,
        spark: Any,
        *,
        checkpoint: str,
        trigger: str | None = None,
        partitions: int | None = None,
        bins: int | None = None,
        local_state: str | None = None,
        changes: str = "keep",
        audit: str | None = None,
        serve: bool | int = False,
        revert_to: int | None = None,
        durable: bool = True,
        close_windows: bool = False,
        knobs: Mapping[str, str | int] | None = None,
        controllers: Sequence[Any] = (),
    ) -> Job:
        """Run this flow on a SparkSession, in the background, until it is stopped or fails.

        :param spark: the session to use. It is never stopped or reconfigured.
        :param checkpoint: a folder that belongs to this job alone, on storage that driver and executors share. Starting
            again with the same folder continues where the job stopped.
        :param trigger: ``None`` starts an epoch as soon as the previous one is done, ``"500 ms"`` at most that often,
            ``"available-now"`` processes the available input, in as many epochs as needed, and ends.
        :param partitions: tasks per stage behind an exchange; default: as many as in the last committed epoch, and for
            a new job the session's parallelism.
        :param bins: into how many bins keys are divided, the smallest units of state that can move between partitions:
            a power of two up to 65,536; default: 256. It is chosen when a job is made and never changes: a restart with
            another number is refused, and one without it continues with what the job has. More bins allow for more
            partitions and move in smaller steps, and cost a little in every epoch.
        :param local_state: a folder on each worker's local disk for its copy of keyed state. It is only a cache; a
            folder that outlives the application makes a restart with much state faster. Default: a folder of Spark's,
            which Spark removes when the application ends.
        :param changes: what a restart does with operators that were changed while the job ran: ``"keep"`` runs their
            changed functions, ``"drop"`` those of this flow.
        :param audit: a column that identifies the rows of the source. Tasks then record which row met which operator
            under which revision, for :mod:`midstream.audit`. Costs time and space; for tests.
        :param serve: let the command line of this machine's user inspect and change the job, over HTTP on the loopback
            address: ``True`` for any free port, or a port number. Needs ``midstream[server]``.
        :param revert_to: a revision whose functions the job starts with: for a job that cannot start, or fails again
            and again, because of a change. The history records it as a change. State that was migrated since needs
            ``midstream revert CHECKPOINT REVISION --migrate …`` instead.
        :param durable: on a local disk, committed epochs survive a power failure: files are synced before anything they
            replace is removed. ``False`` saves the time for that, a few milliseconds per epoch; the job survives the
            crash of a process either way.
        :param close_windows: with ``trigger="available-now"``: when everything is processed, run one more epoch, which
            has no rows, closes all windows, sessions and joins, and fires all event timers. This also closes the
            checkpoint: all later rows would be late, so the next start refuses it.
        :param knobs: values of knobs other than their defaults, such as ``{"pace": "500 ms"}``; :class:`midstream.Tune`
            lists them, and sets them while the job runs. A tuned value overrides this one, also after a restart, until
            ``changes="drop"``.
        :param controllers: policies that look after the job from its first epoch on, such as
            :class:`midstream.AutoScale`; see :meth:`midstream.Job.attach`.
        """
        from midstream.runtime.spark.doctor import require_installed_pyspark

        require_installed_pyspark()
        from midstream.runtime.spark.start import start
        from midstream.server.start import server_wanted

        return start(
            self.graph,
            spark,
            checkpoint=checkpoint,
            trigger=trigger,
            partitions=partitions,
            bins=bins,
            local_state=local_state,
            changes=changes,
            audit=audit,
            server=server_wanted(serve),
            revert_to=revert_to,
            durable=durable,
            close_windows=close_windows,
            refreshes=self._refreshes,
            knobs=knobs,
            controllers=controllers,
        )

    def _event_time_of(self, port: Port) -> str | None:
        """The source's event-time column, if the rows that leave this port still have it."""
        return self._unchecked.event_time_of(port)

    @property
    def _unchecked(self) -> Graph:
        return Graph(self.name, tuple(self._operators.values()))

    def _add(
        self,
        name: str,
        spec: Spec,
        inputs: tuple[Port, ...],
        schema: pa.Schema,
        payload: Any = None,
        on_error: str = OnError.FAIL,
    ) -> Stream:
        operator = Operator(check_name(name, f"flow {self.name!r}"), spec, inputs, schema)
        what = f"{operator.kind} {name!r}"
        operator = replace(operator, on_error=on_error_of(on_error, what))
        if operator.on_error is OnError.BRANCH:
            for takes in [port_schema(self._operators, port) for port in inputs] or [schema]:
                check_error_column(takes, what)
        self._require_free(name)
        self._operators[name] = operator
        if payload is not None:
            self._payloads[name] = payload
        if spec.is_stateful:
            for port in inputs:
                self._rely_on_key(port)
        return self._stream(Port(name))

    def _stream(self, port: Port) -> Stream:
        """The rows that leave by a port: with the operators that keep state, if they have a key."""
        schema = port_schema(self._operators, port)
        key = self._unchecked.key_of(port)
        return KeyedStream(self, port, schema, key) if key else Stream(self, port, schema)

    def _rely_on_key(self, port: Port) -> None:
        """Make the operators between a key_by and an operator that keeps state keep the key as it is."""
        while (operator := self._operators[port.operator]).spec.partition_by is None:
            [port] = operator.inputs
            key = self._unchecked.key_of(port)
            assert key is not None, "an operator with state reads rows with a key"
            self._operators[operator.name] = replace(operator, spec=operator.spec.keeping(key))

    def _require_free(self, name: str) -> None:
        if name in self._operators or name in self._tables:
            found = (
                f"an operator {name!r} already (a {self._operators[name].kind})"
                if name in self._operators
                else f"a table {name!r} already"
            )
            raise FlowError(
                f"flow {self.name!r}: there is {found}; names identify state and changes and must be unique"
            )
