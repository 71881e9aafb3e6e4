"""Describes and checks the user's streams, tables and sink functions, without importing Spark."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from midstream.data.durations import duration
from midstream.data.schema import conform, from_spark, parse_ddl, require_columns, to_ddl, type_name
from midstream.errors import FlowError, SchemaError, SourceError
from midstream.flow.delta_source import DeltaSource
from midstream.flow.functions import pack
from midstream.flow.model import Source
from midstream.flow.sources import GeneratorSource, ListSource
from midstream.storage.blobs import Blob

DescribedSource = GeneratorSource | ListSource | DeltaSource
"""Sources of midstream's own, which can be stored. Any other one is a streaming DataFrame."""


def _is_dataframe(value: Any) -> bool:
    """Duck typing, because this package must not import pyspark."""
    return hasattr(value, "isStreaming") and hasattr(value, "sparkSession") and hasattr(value, "schema")


def _dataframe_schema(df: Any, what: str) -> pa.Schema:
    try:
        return from_spark(df.schema)
    except SchemaError as error:
        raise SchemaError(f"{what}: the DataFrame's columns cannot be used: {error}") from error


def describe_stream(stream: Any, what: str) -> tuple[pa.Schema, str | None]:
    """Schema of a source's stream, and its event-time column if the stream itself defines one."""
    if isinstance(stream, DescribedSource):
        return stream.schema, stream.event_time
    if not _is_dataframe(stream):
        raise SourceError(
            f"{what}: expected a streaming DataFrame (spark.readStream…load()), a GeneratorSource, a ListSource or a "
            f"DeltaSource, found {type(stream).__name__}"
        )
    if not stream.isStreaming:
        raise SourceError(
            f"{what}: this DataFrame is a batch; a source needs a stream. Read it with spark.readStream instead of "
            f"spark.read, or join it to a stream with .lookup(…)"
        )
    return _dataframe_schema(stream, what), None


def describe_source(
    stream: Any, what: str, *, event_time: str | None, delay: str, max_ahead: str | None, idle: str | None
) -> tuple[Source, pa.Schema]:
    """Describe a source from its stream and the user's options; also returns the schema of its rows."""
    schema, known_time = describe_stream(stream, what)
    event_time = event_time or known_time
    delay_us = duration(delay, f"{what}: delay", zero=True)
    ahead_us = None if max_ahead is None else duration(max_ahead, f"{what}: max_ahead", zero=True)
    idle_us = None if idle is None else duration(idle, f"{what}: idle")
    if event_time is None:
        for option, value in (("delay", delay if delay_us else None), ("idle", idle)):
            if value is not None:
                raise FlowError(
                    f"{what}: {option}={value!r} needs event_time=; name that column, or leave out {option}="
                )
        return Source(), schema
    require_columns(schema, [event_time], f"{what}: event_time")
    if not pa.types.is_timestamp(schema.field(event_time).type):
        found = type_name(schema.field(event_time).type)
        raise SchemaError(f"{what}: event_time {event_time!r} must be a timestamp, found {found}")
    return Source(event_time, delay_us, ahead_us, idle_us), schema


def packed_source(stream: Any, name: str) -> Blob | None:
    """A source's stream as a blob; None for a DataFrame, which belongs to the process that made it."""
    return pack(stream, name) if isinstance(stream, DescribedSource) else None


def describe_table(table: Any, what: str) -> tuple[Any, pa.Schema]:
    """A lookup's table and its schema; a table that is not a Spark DataFrame is converted to a ``pyarrow.Table``."""
    if _is_dataframe(table):
        if table.isStreaming:
            raise FlowError(f"{what}: the table is a stream; a lookup needs a static table or a batch DataFrame")
        return table, _dataframe_schema(table, what)
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    elif not isinstance(table, pa.Table) and type(table).__module__.startswith("pandas."):
        table = pa.Table.from_pandas(table, preserve_index=False)
    if not isinstance(table, pa.Table):
        raise FlowError(
            f"{what}: expected a pyarrow.Table, a pandas DataFrame or a batch DataFrame, found {type(table).__name__}"
        )
    schema = parse_ddl(to_ddl(table.schema))
    return pa.Table.from_batches([conform(table, schema, what)]), schema


def column_pairs(on: str | Sequence[str] | Mapping[str, str], what: str) -> tuple[tuple[str, str], ...]:
    """The pairs of columns of stream and table that must be equal."""
    if isinstance(on, str):
        return ((on, on),)
    pairs = tuple(on.items()) if isinstance(on, Mapping) else tuple((column, column) for column in on)
    if not pairs:
        raise FlowError(f"{what}: on= names no column; name at least one")
    return pairs


def check_comparable(what: str, mine: str, my_type: pa.DataType, theirs: str, their_type: pa.DataType) -> None:
    """Refuse key columns of types that cannot be equal."""
    if my_type.equals(their_type) or (pa.types.is_integer(my_type) and pa.types.is_integer(their_type)):
        return
    raise SchemaError(
        f"{what}: the stream's {mine!r} is {type_name(my_type)} but the table's {theirs!r} is {type_name(their_type)}; "
        f"keys must have the same type"
    )


def check_sink_signature(function: Any, what: str) -> None:
    """Refuse a function that cannot be called as a sink."""
    try:
        inspect.signature(function).bind(None, 0)
    except TypeError as error:
        raise FlowError(f"{what}: the function is called with (df, epoch), but {error}") from None
    except ValueError:  # builtins without a signature: nothing to check against
        return
