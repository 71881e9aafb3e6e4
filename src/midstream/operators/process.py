"""process: a user's function over each key's rows and what it remembers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec
import pyarrow as pa

from midstream.data.schema import columns_of
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import AtWork
from midstream.errors import StateError
from midstream.flow.functions import check_callable
from midstream.flow.model import Operator
from midstream.flow.spec import Contract, Form, InputChange, Spec, layout_text
from midstream.operators.process_step import keeper_of, process_at_work
from midstream.state.key_arrays import decode_keys, split_timers
from midstream.state.keys import Namespace, split_item
from midstream.state.values import ObjectCodec

_VIEWS = pa.schema([("view", pa.string()), ("item", pa.string()), ("time", pa.timestamp("us", "UTC"))])


@dataclass(frozen=True)
class Process(TaskSpec):
    """A user's function over each key's rows and state. ``keys`` are the columns of the key_by before it.

    ``ttl_us``: state of a key that was not written for so long is gone. ``unique`` is as in a
    :class:`~midstream.operators.join.Join`.
    """

    kind: ClassVar[str] = "process"
    is_stateful: ClassVar[bool] = True
    keeps_user_state: ClassVar[bool] = True
    is_updatable: ClassVar[bool] = True
    is_tried: ClassVar[bool] = True
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
        """What the user promises."""
        return Contract.ONE_TO_ONE if self.one_to_one else Contract.ONE_TO_MANY

    @property
    def is_unique(self) -> bool:
        """What the user promises."""
        return self.unique

    def errors_schema(self, takes: pa.Schema) -> pa.Schema:
        """Where a timer fails there is no row, only a key, so the other columns may be null."""
        columns = [column if column.name in self.keys else column.with_nullable(True) for column in takes]
        return super().errors_schema(pa.schema(columns))

    @property
    def function_takes(self) -> tuple[str, ...]:
        """A row or a slice, with what is remembered of its keys."""
        if self.form is Form.ROWS:
            return ("a key", "a dict (one row)", "its state")
        return ("keys", "a pyarrow.RecordBatch", "its state")

    def replaced(self, function: Any, local: Any, operator: str, what: str) -> tuple[Spec, Any]:
        """Another function, which may have timers or not."""
        check_callable(function, operator, *self.function_takes)
        on_timer = getattr(function, "on_timer", None)
        if on_timer is not None:
            check_callable(on_timer, operator, "a key", "a time", "its state")
        return replace(self, has_timers=on_timer is not None), function

    def check_input(self, change: InputChange) -> None:
        """The key must stay, and what the function was made for."""
        change.require(self.keys)
        change.require_written_for()

    def at_work(self, operator: Operator, parts: Parts) -> AtWork:
        """Load the function; revisions of it share the handles of a task."""
        [takes] = parts.takes(operator)
        migrations = parts.migrations(operator)
        if operator.name not in parts.keepers:
            parts.keepers[operator.name] = keeper_of(
                operator, self, takes, parts.state(operator), parts.times, has_levels=bool(migrations)
            )
        return process_at_work(
            operator,
            self,
            parts.function(operator),
            takes,
            parts.keepers[operator.name],
            parts.revision,
            migrations,
            has_event_times=parts.program.has_event_times,
        )

    def state_layout(self, takes: Sequence[pa.Schema]) -> str:
        """It may have another function, form, promises and time to live; what it stores are its own objects."""
        return layout_text(Process(self.keys, Form.ROWS), [columns_of(takes[0], self.keys)])

    def shown_state(self, operator: Operator, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        """A row for all that its function remembers: which view, which item or time in it, and the value as text."""
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
    """Key, view, item, time and value of everything."""

    def show(stored: bytes, data: bytes) -> str:
        try:
            return repr(codec.decode(data, stored).value)
        except StateError as error:  # a class that is not here is no reason not to show the rest
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
