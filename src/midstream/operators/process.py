"""process: calls a user's function on the rows and the state of each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pyarrow as pa

from midstream.data.durations import duration
from midstream.data.schema import Declared, columns_of, parse_ddl
from midstream.data.times import EpochTimes
from midstream.engine.initial_rows import fitted, require_unique
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import OperatorInTask
from midstream.errors import SchemaError, StateError
from midstream.flow.functions import check_callable
from midstream.flow.model import Operator
from midstream.flow.spec import Contract, Form, InputChange, Spec, layout_text
from midstream.flow.validate import check_name
from midstream.ids import Revision
from midstream.operators.process_step import instantiate_process, keeper_of
from midstream.operators.rows import KeyedRows, Row
from midstream.state.key_arrays import decode_keys, split_timers
from midstream.state.keys import Namespace, encode_keys, split_item
from midstream.state.task import TaskState
from midstream.state.values import ObjectCodec

if TYPE_CHECKING:
    from midstream.operators.stream import Stream

_AT_ONCE = 1 << 16
FIRST_VALUE = Revision(1)
"""The revision that initial values are stored under, which messages about them name."""
_VIEWS = pa.schema([("view", pa.string()), ("item", pa.string()), ("time", pa.timestamp("us", "UTC"))])


@dataclass(frozen=True)
class Process(TaskSpec):
    """Calls a user's function on the rows and the state of each key. ``keys`` are the columns of the key_by before it.

    State of a key that was not written for ``ttl_us`` expires. ``unique`` is as in a
    :class:`~midstream.operators.join.Join`.
    """

    kind: ClassVar[str] = "process"
    is_stateful: ClassVar[bool] = True
    keeps_user_state: ClassVar[bool] = True
    is_updatable: ClassVar[bool] = True
    has_preflight: ClassVar[bool] = True
    declares_columns: ClassVar[bool] = True

    keys: tuple[str, ...]
    form: Form
    one_to_one: bool = False
    ttl_us: int | None = None
    has_timers: bool = False
    unique: bool = False

    @property
    def keyed_by(self) -> tuple[str, ...]:
        """The key columns."""
        return self.keys

    @property
    def contract(self) -> Contract:
        """One-to-one if the user promised it."""
        return Contract.ONE_TO_ONE if self.one_to_one else Contract.ONE_TO_MANY

    @property
    def is_unique(self) -> bool:
        """Whether the user promised it."""
        return self.unique

    @property
    def holds_back(self) -> bool:
        """Timers of event time."""
        return self.has_timers

    def errors_schema(self, takes: pa.Schema) -> pa.Schema:
        """A timer that fails has a key but no row, so the other columns may be null."""
        columns = [column if column.name in self.keys else column.with_nullable(True) for column in takes]
        return super().errors_schema(pa.schema(columns))

    @property
    def function_takes(self) -> tuple[str, ...]:
        """The function takes a key, a row and the key's state, or their counterparts for a slice."""
        if self.form is Form.ROWS:
            return ("a key", "a dict (one row)", "its state")
        return ("keys", "a pyarrow.RecordBatch", "its state")

    def replaced(self, function: Any, local: Any, operator: str, what: str) -> tuple[Spec, Any]:
        """Replace the function by one with or without timers."""
        check_callable(function, operator, *self.function_takes)
        on_timer = getattr(function, "on_timer", None)
        if on_timer is not None:
            check_callable(on_timer, operator, "a key", "a time", "its state")
        return replace(self, has_timers=on_timer is not None), function

    def check_input(self, change: InputChange) -> None:
        """The key columns must stay the same, and the columns that the function was written for."""
        change.require(self.keys)
        change.require_written_for()

    def instantiate(self, operator: Operator, parts: Parts) -> OperatorInTask:
        """Load the function. All its revisions share the state handles of a task."""
        [takes] = parts.takes(operator)
        migrations = parts.migrations(operator)
        if operator.name not in parts.keepers:
            parts.keepers[operator.name] = keeper_of(
                operator, self, takes, parts.state(operator), parts.times, has_levels=bool(migrations)
            )
        return instantiate_process(
            operator,
            self,
            parts.function(operator),
            takes,
            parts.keepers[operator.name],
            parts.revision,
            migrations,
            has_event_times=parts.program.has_event_times,
        )

    def load_initial(
        self, operator: Operator, takes: Sequence[pa.Schema], table: pa.Table, state: TaskState, clock: int
    ) -> None:
        """The value of each key: the column ``value``, or a dict of the columns beside the key if there is none."""
        what = f"process {operator.name!r}"
        more = ", and for its values a column 'value', or others that make a dict"
        keys = fitted(table, list(columns_of(takes[0], self.keys)), what, more)
        require_unique(keys, self.keys, what)
        others = [name for name in table.column_names if name not in self.keys]
        if not others:
            raise SchemaError(f"{what}: its initial state has only the key columns ({', '.join(self.keys)}){more}")
        values = table["value"].to_pylist() if others == ["value"] else table.select(others).to_pylist()
        keeper = keeper_of(operator, self, takes[0], state, EpochTimes(clock), has_levels=False)
        for at in range(0, table.num_rows, _AT_ONCE):
            [batch] = keys.slice(at, _AT_ONCE).combine_chunks().to_batches()
            stored = encode_keys(batch, self.keys, what, space=state.space)
            for handle, value in zip(keeper.handles(stored), values[at : at + _AT_ONCE], strict=True):
                handle.set(value)
            keeper.write(FIRST_VALUE)

    def state_layout(self, takes: Sequence[pa.Schema]) -> str:
        """Function, form, promises and time to live may change: state holds the user's own objects."""
        return layout_text(Process(self.keys, Form.ROWS), [columns_of(takes[0], self.keys)])

    def shown_state(self, operator: Operator, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        """One row per stored entry: its view, its item or time within the view, and its value as text."""
        schema = columns_of(takes[0], self.keys)
        shown = list(_remembered(ObjectCodec(f"process {operator.name!r}"), rows))
        keys = pa.array([key for key, *_ in shown], pa.binary())
        columns = [
            *decode_keys(keys, schema),
            *(pa.array([one[1 + i] for one in shown], field.type) for i, field in enumerate(_VIEWS)),
            pa.array([one[4] for one in shown], pa.string()),
        ]
        return pa.Table.from_arrays(columns, schema=pa.schema([*schema, *_VIEWS, pa.field("value", pa.string())]))


def _remembered(codec: ObjectCodec, rows: pa.Table) -> Iterator[tuple[bytes, str, str | None, int | None, str | None]]:
    """Key, view, item, time and value of each stored entry."""

    def show(stored: bytes, data: bytes) -> str:
        try:
            return repr(codec.decode(data, stored).value)
        except StateError as error:  # a missing class must not hide the other entries
            return f"<{error}>"

    views: dict[Namespace, Callable[[bytes, bytes], tuple[bytes, str, str | None, int | None, str | None]]] = {
        Namespace.VALUE: lambda key, data: (key, "value", None, None, show(key, data)),
        Namespace.LIST: lambda key, data: (*_item(key, "list"), None, show(key, data)),
        Namespace.MAP: lambda key, data: (*_map_item(key), None, show(key, data)),
        Namespace.EVENT_TIMER: lambda key, _: _timer(key, "event timer"),
        Namespace.CLOCK_TIMER: lambda key, _: _timer(key, "clock timer"),
        Namespace.EXPIRY: lambda key, _: _timer(key, "expires"),
    }
    for key, data in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
        if (view := views.get(Namespace(key[1]))) is not None:
            yield view(key, data)


def _item(stored: bytes, view: str) -> tuple[bytes, str, str]:
    key, item = split_item(stored)
    return key, view, item.decode()


def _map_item(stored: bytes) -> tuple[bytes, str, str]:
    key, item = split_item(stored)
    name, within = item[1 : 1 + item[0]], item[1 + item[0] :]
    return key, "map", f"{name.decode()}[{msgspec.msgpack.decode(within)!r}]"


def _timer(stored: bytes, view: str) -> tuple[bytes, str, None, int, None]:
    times, keys = split_timers(pa.array([stored], pa.binary()))
    return keys[0].as_py(), view, None, int(times[0]), None


class ProcessMethods(KeyedRows):
    """Add a process to a keyed stream."""

    def process(
        self,
        name: str,
        function: Callable[[Any, Row, Any], Row | Iterable[Row] | None],
        *,
        returns: Declared | None = None,
        one_to_one: bool = False,
        unique: bool = False,
        ttl: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Call ``function(key, row, state)`` for each row, in order, and emit the rows that it returns.

        ``key`` is the value of the key column, a tuple if there are several. The function returns a row, several, or
        None. ``state`` holds the state of this key: see :class:`midstream.State`. If the function is an object with a
        method ``on_timer(key, time, state)``, that method is called when a timer fires, at the end of an epoch.

        :param returns: the result's columns in Spark's DDL; default: the input's.
        :param one_to_one: promises at most one row per row (checked), which lets changes apply to fewer operators.
        :param unique: promises at most one row for each row of the *source*, however many of its descendants arrive
            here; a change downstream of this operator may then begin there. Not checked while the flow runs; the
            auditor detects a broken promise.
        :param ttl: state of a key that was not written for this long (by the driver's clock) expires.
        :param on_error: with ``"branch"``, rows on which the function raises leave at :meth:`Stream.errors`, and its
            changes to the key's state are undone; see there for timers.

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
        returns: Declared | None = None,
        one_to_one: bool = False,
        unique: bool = False,
        ttl: str | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Call ``function(keys, batch, state)`` for each slice of rows, many keys at a time.

        ``keys`` are the distinct keys of the slice and ``keys.group_of_row`` holds the index of each row's key;
        ``state.get(default)`` returns a list with one value for each of ``keys``, ``state.set(values)`` takes one.
        Parameters are as in :meth:`process`; ``one_to_one`` means no more rows than the slice has. With
        ``on_error="branch"``, if the function raises, its changes to state are undone and the slice is halved, down to
        single rows.
        """
        return self._process(name, Form.BATCHES, function, returns, one_to_one, unique, ttl, on_error)

    def _process(
        self,
        name: str,
        form: Form,
        function: Any,
        returns: Declared | None,
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
