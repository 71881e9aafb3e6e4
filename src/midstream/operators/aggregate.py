"""aggregate: running totals of each key, or totals of each window of a key.

:mod:`midstream.engine.aggregation` computes the totals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from midstream.data.key_space import KeySpace
from midstream.data.schema import columns_of, type_name
from midstream.data.times import EpochTimes
from midstream.engine.aggregation.aggregating import Aggregating
from midstream.engine.aggregation.combiner import Combiner
from midstream.engine.aggregation.running import RunningTotals
from midstream.engine.aggregation.sessions import Sessions, split_sessions
from midstream.engine.aggregation.totals import TotalsOf
from midstream.engine.aggregation.windows import Windows
from midstream.engine.initial_rows import fitted, replay
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import OperatorInTask
from midstream.errors import FlowError, SchemaError
from midstream.flow.aggregations import Aggregation, result_type
from midstream.flow.graph_format import CODEC
from midstream.flow.model import KeyBy, Operator
from midstream.flow.spec import LATE, Contract, InputChange, Spec
from midstream.flow.validate import check_name
from midstream.flow.windows import Session, Sliding, Tumbling, Window
from midstream.operators.rows import KeyedRows, StreamRows, checked_time
from midstream.state.contents import in_namespace, keys_of
from midstream.state.key_arrays import decode_keys, split_timers
from midstream.state.keys import Namespace
from midstream.state.task import TaskState

if TYPE_CHECKING:
    from midstream.operators.stream import Stream


WINDOW_COLUMNS = ("window_start", "window_end")


@dataclass(frozen=True)
class Aggregate(TaskSpec):
    """Aggregations per key: running ones, or per window of the event time in the column ``time``."""

    kind: ClassVar[str] = "aggregate"
    is_stateful: ClassVar[bool] = True

    keys: tuple[str, ...]
    columns: tuple[tuple[str, Aggregation], ...]
    window: Window | None = None
    time: str | None = None

    @property
    def keyed_by(self) -> tuple[str, ...]:
        """The key columns."""
        return self.keys

    @property
    def late_branches(self) -> tuple[str, ...]:
        """Only windows have late rows."""
        return () if self.window is None else (LATE,)

    @property
    def contract(self) -> Contract:
        """A row may belong to several windows."""
        return Contract.ONE_TO_MANY

    @property
    def blocks(self) -> bool:
        """Totals are known only at the end of an epoch."""
        return True

    @property
    def combinable(self) -> bool:
        """Whether senders may pre-aggregate rows: not with windows, nor when the order of rows matters."""
        return self.window is None and not any(aggregation.kind.depends_on_order for _, aggregation in self.columns)

    @property
    def holds_back(self) -> bool:
        """Open windows."""
        return self.window is not None

    def begins(self, branch: str) -> bool:
        """Totals are new source rows; late rows leave unchanged."""
        return not branch

    def gives_many(self, branch: str) -> bool:
        """Totals belong to no input row, and a late row leaves once."""
        return False

    def check_input(self, change: InputChange) -> None:
        """The key columns must stay the same, and with windows the event time."""
        change.require(self.keys if self.time is None else (*self.keys, self.time))

    def derived(
        self, inputs: Sequence[pa.Schema], schema: pa.Schema, payload: Any, what: str
    ) -> tuple[Spec, pa.Schema]:
        """The same columns: stored totals cannot be converted."""
        for name, aggregation in self.columns:
            found, kept = result_type(aggregation, inputs[0], f"{what}, {name}"), schema.field(name).type
            if not found.equals(kept):
                raise SchemaError(
                    f"after the change {what} would have to keep {name!r} as {type_name(found)} instead of "
                    f"{type_name(kept)}; its stored totals cannot be converted. Keep the type of that column",
                    column=name,
                )
        return self, schema

    def instantiate(self, operator: Operator, parts: Parts) -> OperatorInTask:
        """See :func:`instantiate_aggregate`."""
        return instantiate_aggregate(operator, self, parts.takes(operator)[0], parts.state(operator), parts.times)

    def load_initial(
        self, operator: Operator, takes: Sequence[pa.Schema], table: pa.Table, state: TaskState, clock: int
    ) -> None:
        """Rows of the past, in the columns of its input that it needs; they are aggregated, and nothing is emitted."""
        totals = totals_of(operator, self, takes[0])
        time = () if self.time is None or self.window is None else (self.time,)
        needed = dict.fromkeys([*self.keys, *time, *totals.inputs])
        what = f"aggregate {operator.name!r}"
        rows = fitted(
            table, [takes[0].field(name) for name in needed], what, ": rows of the past, as its input has them"
        )
        work = instantiate_aggregate(operator, self, takes[0], state, EpochTimes(clock))
        replay(work, rows, takes[0], what)

    def combiner(self, operator: Operator, takes: pa.Schema, space: KeySpace) -> Combiner:
        """Senders emit partial totals instead of rows."""
        return Combiner(operator, self.keys, totals_of(operator, self, takes), space)

    def shown_state(self, operator: Operator, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        """The totals of each key, or of each open window, in the columns of the result."""
        totals = totals_of(operator, self, takes[0])
        bounds: list[Any] = []
        if self.window is None:
            found = in_namespace(rows, Namespace.VALUE)
            keys, values = keys_of(found), found["value"].to_pylist()
        elif isinstance(self.window, Session):
            keys, values, bounds = _sessions(totals, self.window, in_namespace(rows, Namespace.VALUE))
        else:
            found = in_namespace(rows, Namespace.WINDOW)
            ends, keys = split_timers(keys_of(found))
            values, alignment = found["value"].to_pylist(), self.window.alignment
            bounds = [alignment.moments(ends - self.window.size_us), alignment.moments(ends)]
        moments = [pa.array(bound).view(takes[0].field(self.time).type) for bound in bounds]
        results = totals.results(totals.unpack(values)[0]) if values else [[] for _ in self.columns]
        columns = [*decode_keys(keys, columns_of(takes[0], self.keys)), *moments]
        results = [pa.array(r, f.type) for r, f in zip(results, list(operator.schema)[len(columns) :], strict=True)]
        return pa.Table.from_arrays([*columns, *results], schema=operator.schema)


def instantiate_aggregate(
    operator: Operator, spec: Aggregate, takes: pa.Schema, state: TaskState, times: EpochTimes
) -> OperatorInTask:
    """Build an aggregate in a task: running totals, windows or sessions."""
    over = None if spec.window is None else spec.time
    common = Aggregating(operator, spec.keys, over, takes, state, times, totals_of(operator, spec, takes))
    form: RunningTotals | Windows | Sessions
    if spec.window is None:
        form = RunningTotals(common)
    elif isinstance(spec.window, Session):
        form = Sessions(common, spec.window)
    else:
        form = Windows(common, spec.window)
    return OperatorInTask((form.take,), form.finish, form.take_partials if isinstance(form, RunningTotals) else None)


def totals_of(operator: Operator, spec: Aggregate, takes: pa.Schema) -> TotalsOf:
    """The totals that an aggregate keeps for each key, or for each window of a key."""
    kept = ("first", "last") if isinstance(spec.window, Session) else ()
    # A digest of this text is on disk, so the text must not change: fields that came later appear only if they are set.
    window = CODEC.encode(spec.window, Window | None)
    if isinstance(spec.window, Tumbling | Sliding):
        later = {"offset_us": 0, "zone": None}
        window = {name: value for name, value in window.items() if name not in later or value != later[name]}
    windows = str(window)
    return TotalsOf(spec.columns, takes, f"aggregate {operator.name!r}", windows, kept)


def _sessions(totals: TotalsOf, window: Session, rows: pa.Table) -> tuple[pa.Array, list[bytes], list[Any]]:
    each = [split_sessions(value) for value in rows["value"].to_pylist()]
    keys = keys_of(rows).take(pa.array(np.repeat(np.arange(len(each)), [len(one) for one in each])))
    values = [session for sessions in each for session in sessions]
    nothing = np.empty(0, np.int64)
    first, last = totals.unpack(values)[1] if values else (nothing, nothing)
    return keys, values, [first, last + window.gap_us]


class AggregateMethods(KeyedRows):
    """Add an aggregate to a keyed stream."""

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

        Without a window the result has running totals: at the end of an epoch, one row for each key that had rows in
        that epoch. With a window (``tumbling``, ``sliding``, ``sessions``) it has one row for each window of a key,
        with the columns ``window_start`` and ``window_end``, as soon as the watermark has passed the window's end. Rows
        that arrive after that leave at ``.late()``.

        :param time: the timestamp column with the time of a row; default: the event time of the source.
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
        spec, schema = _described(self.schema, self.keys, columns, window, time, self.event_time, what)
        return self._flow._add(name, spec, (self._port,), schema, on_error=on_error)


class AggregateAllMethods(StreamRows):
    """Add an aggregate of all rows to a stream."""

    def aggregate_all(
        self,
        name: str,
        *,
        window: Window | None = None,
        time: str | None = None,
        on_error: str = "fail",
        **columns: Aggregation,
    ) -> Stream:
        """Aggregate all rows of the stream, in one task: like :meth:`KeyedStream.aggregate`, without a key.

        Senders add up their rows first where the order of rows does not matter and there is no window, so that the one
        task gets a row from each of them. It adds two operators: ``name`` and, before it, the key_by ``name.all``.

        >>> from midstream import Flow, ListSource, MemorySink, agg
        >>> from midstream.testing import run_local
        >>> flow, out = Flow("sales"), MemorySink()
        >>> sales = flow.source("sales", ListSource([[{"eur": 3}, {"eur": 4}], [{"eur": 5}]], "eur int"))
        >>> sales.aggregate_all("total", n=agg.count(), eur=agg.sum("eur")).sink("out", out)
        >>> _ = run_local(flow)
        >>> out.rows
        [{'n': 2, 'eur': 7}, {'n': 3, 'eur': 12}]
        """
        what = f"aggregate {check_name(name, 'aggregate')!r}"
        self._flow._require_free(name)
        event_time = self._flow._event_time_of(self._port)
        spec, schema = _described(self.schema, (), columns, window, time, event_time, what)
        together = self._flow._add(f"{name}.all", KeyBy(()), (self._port,), self.schema)
        return self._flow._add(name, spec, (together._port,), schema, on_error=on_error)


def _described(
    takes: pa.Schema,
    keys: tuple[str, ...],
    columns: Mapping[str, Aggregation],
    window: Window | None,
    time: str | None,
    event_time: str | None,
    what: str,
) -> tuple[Aggregate, pa.Schema]:
    """The description and the columns of an aggregate; refuses what does not fit."""
    if not columns:
        raise FlowError(f"{what}: name at least one aggregation, e.g. n=agg.count()")
    fields = [takes.field(key).with_nullable(False) for key in keys]
    if window is not None:
        if not isinstance(window, Tumbling | Sliding | Session):
            raise FlowError(
                f"{what}: window must be made by tumbling(…), sliding(…) or sessions(…), found {window!r:.60}"
            )
        time = checked_time(takes, time or event_time, what)
        fields += [pa.field(column, takes.field(time).type, nullable=False) for column in WINDOW_COLUMNS]
    elif time is not None:
        raise FlowError(f"{what}: time={time!r} needs a window; add window=, or leave out time=")
    for column, aggregation in columns.items():
        if not isinstance(aggregation, Aggregation):
            raise FlowError(
                f"{what}: {column}= must be an aggregation like agg.count() or agg.sum('amount'), found "
                f"{aggregation!r:.60}"
            )
        fields.append(pa.field(column, result_type(aggregation, takes, f"{what}, {column}")))
    _refuse_twice([field.name for field in fields], what)
    return Aggregate(keys, tuple(columns.items()), window, time), pa.schema(fields)


def _refuse_twice(names: list[str], what: str) -> None:
    lower = [name.lower() for name in names]
    if twice := [name for name in names if lower.count(name.lower()) > 1]:
        raise SchemaError(f"{what}: two columns of the result are called {twice[0]!r}; choose another name")
