"""Writes sinks without Spark, with the same guarantees: an epoch that runs again replaces what it wrote."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.fs as pafs
import pyarrow.parquet as papq

from midstream.engine.failure import USER_ERRORS, failed
from midstream.flow.file_options import LocalOptions
from midstream.flow.sinks import (
    EPOCH_COLUMN,
    CallSink,
    ConsoleSink,
    DatabaseSink,
    FileFormat,
    FileSink,
    MemorySink,
    NoopSink,
    SinkTarget,
)
from midstream.ids import Epoch
from midstream.runtime.database_sink import replace_epoch
from midstream.storage.blobs import filesystem_of


def write(name: str, target: SinkTarget, rows: pa.Table, epoch: Epoch) -> None:
    """Write one epoch to one sink."""
    match target:
        case FileSink(path, format, options):
            _write_files(path, format, LocalOptions.of(format, options, "FileSink"), rows, epoch)
        case MemorySink():
            target.put(epoch, rows)
        case ConsoleSink(limit):
            print(f"── epoch {epoch} ──")
            print(rows.slice(0, limit).to_pandas().to_string(index=False))
        case NoopSink():
            pass
        case CallSink(function):
            _call(partial(function, rows, epoch), name)
        case DatabaseSink():
            _call(partial(replace_epoch, target, rows.to_batches(), epoch), name)


def _call(function: Callable[[], None], name: str) -> None:
    try:
        function()
    except USER_ERRORS as error:
        raise failed(name, error, None) from error


def _write_files(path: str, format: FileFormat, options: LocalOptions, rows: pa.Table, epoch: Epoch) -> None:
    fs, folder = filesystem_of(path)
    root = posixpath.join(folder, f"{EPOCH_COLUMN}={epoch}")
    if fs.get_file_info(root).type != pafs.FileType.NotFound:
        fs.delete_dir(root)
    fs.create_dir(root, recursive=True)
    # Parquet compresses its own pages; text is compressed as a whole.
    codec = None if format is FileFormat.PARQUET else options.codec
    name = f"part-0.{format}" if codec is None else f"part-0.{format}.gz"
    with fs.open_output_stream(posixpath.join(root, name), compression=codec) as out:
        match format:
            case FileFormat.PARQUET:
                papq.write_table(rows, out, compression=options.codec or "none")
            case FileFormat.CSV:
                layout = pacsv.WriteOptions(include_header=options.header, delimiter=options.separator)
                pacsv.write_csv(rows, out, layout)
            case FileFormat.JSON:
                out.write("".join(json.dumps(row, default=str) + "\n" for row in rows.to_pylist()).encode())
