"""What can be done behind a key_by: operators that keep state per key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from midstream.data.durations import duration
from midstream.data.schema import joined_schema, parse_ddl, require_columns, type_name
from midstream.errors import FlowError, SchemaError
from midstream.flow.aggregations import Aggregation, result_type
from midstream.flow.functions import check_callable
from midstream.flow.model import Distinct, Port
from midstream.flow.spec import Form, How
from midstream.flow.validate import check_name
from midstream.flow.windows import Session, Sliding, Tumbling, Window
from midstream.operators.aggregate import Aggregate
from midstream.operators.join import Join
from midstream.operators.process import Process

if TYPE_CHECKING:
    from midstream.operators.builder import Flow
    from midstream.operators.stream import KeyedStream, Stream

WINDOW_COLUMNS = ("window_start", "window_end")
Row = dict[str, Any]


class KeyedOperators:
    """The operators of a keyed stream. State belongs to an operator's name and to a key; it survives restarts."""

    _flow: Flow
    _port: Port
    schema: pa.Schema
    keys: tuple[str, ...]
    """The key columns."""
    event_time: str | None

    def process(
        self,
        name: str,
        function: Callable[[Any, Row, Any], Row | Iterable[Row] | None],
        *,
        returns: str | None = None,
        one_to_one: bool = False,
        unique: bool = False,
        ttl: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Call ``function(key, row, state)`` for each row, in order; what it returns goes on.

        ``key`` is the value of the key column, a tuple if there are several. The function returns a row, several, or
        None. ``state`` holds what it remembers of this key: see :class:`midstream.State`. If the function is an object
        with a method ``on_timer(key, time, state)``, that is called when a timer fires, at the end of an epoch.

        :param returns: the result's columns in Spark's DDL; default: the input's.
        :param one_to_one: promises at most one row for each (checked), which lets changes apply to fewer operators.
        :param unique: promises at most one row for each row of the *source*, however many of its descendants come in
            here; a change of what stands behind this operator may then begin there. Not checked while the flow runs;
            the auditor finds a promise that was broken.
        :param ttl: state of a key that was not written for so long (by the driver's clock) is gone.
        :param on_error: with ``"branch"``, rows on which the function raises leave at :meth:`Stream.errors`, and what
            it had changed of the key's state until then is undone; see there for timers.

        >>> from midstream import Flow, ListSource, MemorySink
        >>> from midstream.testing import run_local
        >>> def count(key, row, state):
        ...     state.set(state.get(0) + 1)
        ...     return {"word": key, "n": state.get()}
        >>> flow, out = Flow("words"), MemorySink()
        >>> words = flow.source("words", ListSource([[{"word": "a"}, {"word": "b"}], [{"word": "a"}]], "word string"))
        >>> counts = words.key_by("by_word", "word").process("count", count, returns="word string, n int")
        >>> counts.sink("out", out)
        >>> _ = run_local(flow)
        >>> sorted((row["word"], row["n"]) for row in out.rows)
        [('a', 1), ('a', 2), ('b', 1)]
        """
        return self._process(name, Form.ROWS, function, returns, one_to_one, unique, ttl, on_error)

    def process_batches(
        self,
        name: str,
        function: Callable[[Any, pa.RecordBatch, Any], pa.RecordBatch],
        *,
        returns: str | None = None,
        one_to_one: bool = False,
        unique: bool = False,
        ttl: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Call ``function(keys, batch, state)`` for each slice of rows, many keys at a time.

        ``keys`` are the distinct keys of the slice and ``keys.group_of_row`` says which of them each row has;
        ``state.get(default)`` gives a list with one value for each of ``keys``, ``state.set(values)`` takes one.
        Parameters are as in :meth:`process`; ``one_to_one`` then means no more rows than the slice had. With
        ``on_error="branch"``, a slice on which the function raises is halved, and state undone, until it is one row.
        """
        return self._process(name, Form.BATCHES, function, returns, one_to_one, unique, ttl, on_error)

    def aggregate(
        self,
        name: str,
        *,
        window: Window | None = None,
        time: str | None = None,
        on_error: str = "fail",
        **columns: Aggregation,
    ) -> Stream:
        """Aggregate the rows of each key; the result has the key columns and one column per aggregation.

        Without a window these are running totals: at the end of an epoch, one row for each key that had rows in it.
        With a window (``tumbling``, ``sliding``, ``sessions``) there is one row for each window of a key, with the
        columns ``window_start`` and ``window_end``, as soon as the watermark has passed its end. Rows that come later
        than that leave at ``.late()``.

        :param time: the timestamp column that says when a row happened; default: the event time of the source.
        :param on_error: with ``"branch"``, rows whose key is null or too long, or whose time is null, leave at
            :meth:`Stream.errors`.

        >>> from midstream import Flow, ListSource, MemorySink, agg
        >>> from midstream.testing import run_local
        >>> flow, out = Flow("sales"), MemorySink()
        >>> sales = flow.source("sales", ListSource([[{"user": "ann", "eur": 3}, {"user": "ann", "eur": 4}]],
        ...                                         "user string, eur int"))
        >>> sales.key_by("by_user", "user").aggregate("spent", n=agg.count(), eur=agg.sum("eur")).sink("out", out)
        >>> _ = run_local(flow)
        >>> out.rows
        [{'user': 'ann', 'n': 2, 'eur': 7}]
        """
        what = f"aggregate {check_name(name, 'aggregate')!r}"
        if not columns:
            raise FlowError(f"{what}: name at least one aggregation, e.g. n=agg.count()")
        fields = [self.schema.field(key).with_nullable(False) for key in self.keys]
        if window is not None:
            if not isinstance(window, Tumbling | Sliding | Session):
                raise FlowError(
                    f"{what}: window must be made by tumbling(…), sliding(…) or sessions(…), found {window!r:.60}"
                )
            time = self._time(time, what)
            fields += [pa.field(column, self.schema.field(time).type, nullable=False) for column in WINDOW_COLUMNS]
        elif time is not None:
            raise FlowError(f"{what}: time={time!r} has a meaning only with a window")
        for column, aggregation in columns.items():
            if not isinstance(aggregation, Aggregation):
                raise FlowError(
                    f"{what}: {column}= must be an aggregation like agg.count() or agg.sum('amount'), found "
                    f"{aggregation!r:.60}"
                )
            fields.append(pa.field(column, result_type(aggregation, self.schema, f"{what}, {column}")))
        _refuse_twice([field.name for field in fields], what)
        spec = Aggregate(self.keys, tuple(columns.items()), window, time)
        return self._flow._add(name, spec, (self._port,), pa.schema(fields), on_error=on_error)

    def distinct(
        self, name: str, *, within: str | None = None, time: str | None = None, on_error: str = "fail"
    ) -> Stream:
        """Only the first row of each key.

        :param within: forget a key when the watermark is so far behind that first row, so that state stays bounded.
        :param on_error: as in :meth:`aggregate`.
        """
        what = f"distinct {check_name(name, 'distinct')!r}"
        if within is None:
            if time is not None:
                raise FlowError(f"{what}: time={time!r} has a meaning only with within=")
            return self._flow._add(name, Distinct(self.keys), (self._port,), self.schema, on_error=on_error)
        spec = Distinct(self.keys, self._time(time, what), duration(within, f"{what}: within"))
        return self._flow._add(name, spec, (self._port,), self.schema, on_error=on_error)

    def join(
        self,
        name: str,
        other: KeyedStream,
        *,
        how: str = "inner",
        window: Tumbling | None = None,
        within: str | None = None,
        left_time: str | None = None,
        right_time: str | None = None,
        unique: bool = False,
        on_error: str = "fail",
    ) -> Stream:
        """Pairs of rows of this keyed stream and another with equal keys, near each other in event time.

        The result has all columns of this stream, then those of the other without its key columns. Give either
        ``window=tumbling(…)``: both rows are in one window; or ``within="10 seconds"``: at most so far apart. Rows are
        kept as long as the watermark allows for a partner; those that come later leave at ``.late("left")`` and
        ``.late("right")``.

        :param how: ``"left"`` also gives each row of this stream that finds no partner, with nulls, when none can
            come any more.
        :param unique: promises at most one row for each row of the *source*, as a self-join on the primary key gives;
            a change of what stands behind the join may then begin there, instead of where the two sides part. Not
            checked while the flow runs; the auditor finds a promise that was broken.
        :param on_error: with ``"branch"``, rows whose key is null or too long, or whose time is null, leave at
            ``.errors("left")`` and ``.errors("right")``.

        >>> from datetime import UTC, datetime
        >>> from midstream import Flow, ListSource, MemorySink
        >>> from midstream.testing import run_local
        >>> flow, out = Flow("orders"), MemorySink()
        >>> rows = [{"id": 1, "eur": 3, "at": datetime(2026, 1, 1, tzinfo=UTC)}]
        >>> orders = flow.source("orders", ListSource([rows], "id int, eur int, at timestamp", event_time="at"))
        >>> cents = orders.map("cents", lambda row: {"id": row["id"], "cents": 100 * row["eur"], "seen": row["at"]},
        ...                    returns="id int, cents int, seen timestamp")
        >>> orders.key_by("left", "id").join("both", cents.key_by("right", "id"), within="0 seconds",
        ...                                  right_time="seen", unique=True).sink("out", out)
        >>> _ = run_local(flow)
        >>> [(row["id"], row["eur"], row["cents"]) for row in out.rows]
        [(1, 3, 300)]
        """
        what = f"join {check_name(name, 'join')!r}"
        self._check_partner(other, what)
        if how not in list(How):
            raise FlowError(f"{what}: how={how!r} is not known; allowed: {', '.join(How)}")
        if (window is None) == (within is None):
            raise FlowError(f"{what}: give either window=tumbling(…) or within='10 seconds'")
        if window is not None and not isinstance(window, Tumbling):
            raise FlowError(f"{what}: a join takes tumbling windows, found {window!r:.60}; or use within=")
        spec = Join(
            left_keys=self.keys,
            right_keys=other.keys,
            left_time=self._time(left_time, f"{what}, left"),
            right_time=other._time(right_time, f"{what}, right"),
            how=How(how),
            window=window,
            within_us=None if within is None else duration(within, f"{what}: within", zero=True),
            unique=unique,
        )
        if (self.schema.field(spec.left_time).type.tz is None) != (other.schema.field(spec.right_time).type.tz is None):
            raise SchemaError(f"{what}: one event time has a time zone and the other has none; cast one of them before")
        schema = joined_schema(self.schema, other.schema, other.keys, nullable=spec.how is How.LEFT, what=what)
        return self._flow._add(name, spec, (self._port, other._port), schema, on_error=on_error)

    # ── what these share ──────────────────────────────────────────────────────────────────────────────────────────

    def _process(
        self,
        name: str,
        form: Form,
        function: Any,
        returns: str | None,
        one_to_one: bool,
        unique: bool,
        ttl: str | None,
        on_error: str,
    ) -> Stream:
        what = f"process {check_name(name, 'process')!r}"
        takes = ("a key", "a dict (one row)") if form is Form.ROWS else ("keys", "a pyarrow.RecordBatch")
        check_callable(function, name, *takes, "its state")
        on_timer = getattr(function, "on_timer", None)
        if on_timer is not None:
            check_callable(on_timer, name, "a key", "a time", "its state")
        spec = Process(
            keys=self.keys,
            form=form,
            one_to_one=one_to_one,
            ttl_us=None if ttl is None else duration(ttl, f"{what}: ttl"),
            has_timers=on_timer is not None,
            unique=unique,
        )
        schema = self.schema if returns is None else parse_ddl(returns)
        return self._flow._add(name, spec, (self._port,), schema, function, on_error)

    def _time(self, time: str | None, what: str) -> str:
        """The event-time column of this stream: the one that was named, or the source's if it is still there."""
        time = time or self.event_time
        if time is None:
            raise FlowError(
                f"{what}: which column is the event time? Name it with time=, or give the source event_time=; the rows "
                f"have {', '.join(self.schema.names)}"
            )
        require_columns(self.schema, [time], f"{what}: time")
        found = self.schema.field(time).type
        if not pa.types.is_timestamp(found):
            raise SchemaError(f"{what}: the event time {time!r} must be a timestamp, found {type_name(found)}")
        return time

    def _check_partner(self, other: KeyedStream, what: str) -> None:
        if not isinstance(other, KeyedOperators):
            raise FlowError(
                f"{what}: the other side must be a keyed stream, found {type(other).__name__}; use key_by first"
            )
        if other._flow is not self._flow:
            raise FlowError(f"{what}: {str(other._port)!r} belongs to another flow; streams join within one flow")
        if len(other.keys) != len(self.keys):
            raise FlowError(
                f"{what}: the left side is keyed by ({', '.join(self.keys)}), the right one by "
                f"({', '.join(other.keys)}); both must have as many columns"
            )
        for mine, theirs in zip(self.keys, other.keys, strict=True):
            left, right = self.schema.field(mine).type, other.schema.field(theirs).type
            if not left.equals(right):
                raise SchemaError(
                    f"{what}: the left {mine!r} is {type_name(left)} but the right {theirs!r} is {type_name(right)}; "
                    f"keys must have the same type"
                )


def _refuse_twice(names: list[str], what: str) -> None:
    lower = [name.lower() for name in names]
    if twice := [name for name in names if lower.count(name.lower()) > 1]:
        raise SchemaError(f"{what}: two columns of the result are called {twice[0]!r}; choose another name")
