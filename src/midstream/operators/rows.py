"""Base classes of the methods that add operators to a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from midstream.data.schema import require_columns, type_name
from midstream.errors import FlowError, SchemaError
from midstream.flow.model import Port

if TYPE_CHECKING:
    from midstream.operators.builder import Flow

Row = dict[str, Any]
RowFunction = Callable[[Row], Row]
BatchFunction = Callable[[pa.RecordBatch], pa.RecordBatch]


class StreamRows:
    """The rows that leave an operator: the base of each operator's methods, which make up a ``Stream``.

    A method checks its arguments, at the user's own line, and calls ``self._flow._add`` with a description.
    """

    _flow: Flow
    _port: Port
    schema: pa.Schema


class KeyedRows(StreamRows):
    """The rows that leave a key_by: the base of the methods of operators that keep state, a ``KeyedStream``'s.

    State belongs to an operator's name and to a key; it survives restarts.
    """

    keys: tuple[str, ...]
    """The key columns."""
    event_time: str | None

    def _time(self, time: str | None, what: str) -> str:
        """The event-time column of this stream: the named one, or the source's if the rows still have it."""
        return checked_time(self.schema, time or self.event_time, what)


def checked_time(schema: pa.Schema, time: str | None, what: str) -> str:
    """A column of event times; refuses one that is missing or no timestamp."""
    if time is None:
        raise FlowError(
            f"{what}: which column is the event time? Name it with time=, or give the source event_time=; the rows "
            f"have {', '.join(schema.names)}"
        )
    require_columns(schema, [time], f"{what}: time")
    found = schema.field(time).type
    if not pa.types.is_timestamp(found):
        raise SchemaError(f"{what}: the event time {time!r} must be a timestamp, found {type_name(found)}")
    return time
