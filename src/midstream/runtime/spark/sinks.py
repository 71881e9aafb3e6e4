"""Writes sinks on Spark, and makes sure before the job starts that they may be written."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from midstream.engine.failure import USER_ERRORS, failed
from midstream.engine.frames import decode_rows
from midstream.errors import CheckpointError, FlowError
from midstream.flow.model import Graph, Sink
from midstream.flow.sinks import CallSink, DatabaseSink, FileSink, SinkTarget
from midstream.ids import Epoch
from midstream.runtime.database_sink import replace_epoch
from midstream.runtime.spark.worker import pack_portions
from midstream.storage.blobs import filesystem_of, write_atomically
from midstream.storage.documents import read_struct, write_struct

MARKER = "_midstream.json"


class SinkMarker(msgspec.Struct, frozen=True):
    """Says in an output folder which job's sink it belongs to. Readers of tables skip files that start with ``_``."""

    job: str
    flow: str
    sink: str


def drain(df: DataFrame) -> None:
    """Compute all rows, for nobody."""
    df.write.format("noop").mode("append").save()


def write(name: str, target: SinkTarget, df: DataFrame, epoch: Epoch) -> None:
    """Hand an epoch to a sink that reads it as a DataFrame."""
    match target:
        case CallSink(function):
            _call(function, name, df, epoch)
        case DatabaseSink():
            _call(lambda df, epoch: replace_epoch(target, portions(df), Epoch(epoch)), name, df, epoch)
        case _:
            raise AssertionError(f"a {type(target).__name__} reads no DataFrame")


def portions(df: DataFrame) -> Iterator[pa.RecordBatch]:
    """The rows, fetched one partition after the other: the driver never holds more than the largest one.

    Each partition is a Spark job of its own, so this is for rows that were computed and kept before. Times are in UTC,
    whatever the session's time zone.
    """
    columns = df.columns
    plain = df.toDF(*[f"c{i}" for i in range(len(columns))])  # mapInArrow takes names apart at dots and backticks
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
            raise  # Spark tells it at length; it is shortened later
        raise failed(name, error, None) from error


def check_file_sinks(graph: Graph, job: str) -> dict[str, SinkMarker]:
    """Check that every file sink's folder is this job's or free; gives the markers of the free ones, by path."""
    sinks = {op.name: graph.payloads[op.name] for op in graph.of(Sink)}
    owners: dict[str, str] = {}
    free: dict[str, SinkMarker] = {}
    for name, target in sinks.items():
        if not isinstance(target, FileSink):
            continue
        _, root = filesystem_of(target.path)
        if root in owners:
            raise FlowError(
                f"the sinks {owners[root]!r} and {name!r} both write to {target.path!r}; a folder has one owner"
            )
        owners[root] = name
        if not _is_marked(name, target.path, job):
            free[target.path] = SinkMarker(job, graph.name, name)
    return free


def mark_folders(markers: Mapping[str, SinkMarker]) -> None:
    """Say in each folder whose it is."""
    for path, marker in markers.items():
        fs, root = filesystem_of(path)
        write_atomically(fs, posixpath.join(root, MARKER), write_struct(marker))


def _is_marked(name: str, path: str, job: str) -> bool:
    fs, root = filesystem_of(path)
    info = fs.get_file_info(root)
    if info.type == pafs.FileType.NotFound:
        return False
    if info.type == pafs.FileType.File:
        raise CheckpointError(f"sink {name!r}: {path!r} is a file; a FileSink needs a folder")
    held = sorted(posixpath.basename(entry.path) for entry in fs.get_file_info(pafs.FileSelector(root)))
    if MARKER not in held:
        if held:
            raise CheckpointError(
                f"sink {name!r}: the folder {path!r} holds other data ({', '.join(held[:3])}) that no midstream job "
                f"wrote; a FileSink owns its folder, so give it an empty one"
            )
        return False
    with fs.open_input_stream(posixpath.join(root, MARKER)) as stream:
        data = stream.read()
    marker = read_struct(data, SinkMarker, f"sink {name!r}: {MARKER} in the folder {path!r}")
    if (marker.job, marker.sink) != (job, name):
        raise CheckpointError(
            f"sink {name!r}: the folder {path!r} holds the output of sink {marker.sink!r} of flow {marker.flow!r} "
            f"(job {marker.job[:8]}), not of this job ({job[:8]}). Give another folder; or, to go on with that job, "
            f"start with its checkpoint"
        )
    return True
