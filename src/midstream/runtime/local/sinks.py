"""Writes sinks that take an epoch's rows as a table: database sinks and functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa

from midstream.engine.failure import USER_ERRORS, failed
from midstream.flow.delta_sink import DeltaSink
from midstream.flow.iceberg_sink import IcebergSink
from midstream.flow.sinks import CallSink, DatabaseSink, SinkTarget
from midstream.ids import Epoch
from midstream.runtime import database_sink
from midstream.runtime.table_claims import replace_epoch


def write(name: str, target: SinkTarget, rows: pa.Table, epoch: Epoch) -> None:
    """Write one epoch to one sink."""
    match target:
        case CallSink(function):
            _call(partial(function, rows, epoch), name)
        case DatabaseSink():
            _call(partial(database_sink.replace_epoch, target, rows.to_batches(), epoch), name)
        case DeltaSink() | IcebergSink():
            _call(partial(replace_epoch, target, rows.to_batches, epoch), name)
        case _:
            raise AssertionError(f"a {type(target).__name__} reads no table")


def _call(function: Callable[[], None], name: str) -> None:
    try:
        function()
    except USER_ERRORS as error:
        raise failed(name, error, None) from error
