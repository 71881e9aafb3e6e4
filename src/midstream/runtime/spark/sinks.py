"""Sinks that read an epoch's rows as a DataFrame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from midstream.engine.failure import USER_ERRORS, failed
from midstream.engine.frames import decode_rows
from midstream.flow.delta_sink import DeltaSink
from midstream.flow.iceberg_sink import IcebergSink
from midstream.flow.kafka_sink import KafkaSink
from midstream.flow.sinks import CallSink, DatabaseSink, SinkTarget
from midstream.ids import Epoch
from midstream.runtime import database_sink
from midstream.runtime.spark.kafka import EpochNotes, write_records
from midstream.runtime.spark.worker import pack_portions
from midstream.runtime.table_claims import replace_epoch


def drain(df: DataFrame) -> None:
    """Compute all rows, without output."""
    df.write.format("noop").mode("append").save()


def write(name: str, target: SinkTarget, df: DataFrame, epoch: Epoch, notes: EpochNotes) -> None:
    """Pass an epoch to a sink that reads it as a DataFrame. ``notes`` informs readers of Kafka sinks."""
    match target:
        case CallSink(function):
            _call(function, name, df, epoch)
        case DatabaseSink():
            _call(lambda df, epoch: database_sink.replace_epoch(target, portions(df), Epoch(epoch)), name, df, epoch)
        case DeltaSink() | IcebergSink():
            rows = partial(portions, df)
            _call(lambda _, epoch: replace_epoch(target, rows, Epoch(epoch)), name, df, epoch)
        case KafkaSink():
            write_records(target, df, notes.begin(name, target, epoch))
        case _:
            raise AssertionError(f"a {type(target).__name__} reads no DataFrame")


def fetches_rows(target: SinkTarget) -> bool:
    """Whether a sink gets its rows by :func:`portions`."""
    return isinstance(target, DatabaseSink | DeltaSink | IcebergSink)


def portions(df: DataFrame) -> Iterator[pa.RecordBatch]:
    """The rows, fetched one partition after the other: the driver never holds more than the largest one.

    Each partition is a separate Spark job, so this is for rows that were computed and kept before. Times are in UTC,
    whatever the session's time zone.
    """
    columns = df.columns
    plain = df.toDF(*[f"c{i}" for i in range(len(columns))])  # mapInArrow splits names at dots and backticks
    for row in plain.mapInArrow(pack_portions, "portion binary").toLocalIterator():
        batch = decode_rows(pa.py_buffer(row.portion))
        fields = [
            pa.field(name, pa.timestamp("us", "UTC") if getattr(kind, "tz", None) else kind)
            for name, kind in zip(columns, batch.schema.types, strict=True)
        ]
        yield batch.rename_columns(columns).cast(pa.schema(fields))


def _call(function: Callable[[DataFrame, int], Any], name: str, df: DataFrame, epoch: Epoch) -> None:
    try:
        function(df, epoch)
    except USER_ERRORS as error:
        if isinstance(error, PySparkException) or hasattr(error, "java_exception"):
            raise  # Spark's error is long; it is shortened later
        raise failed(name, error, None) from error
