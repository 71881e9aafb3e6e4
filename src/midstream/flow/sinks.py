"""Where rows go. Each sink states what it guarantees when an epoch is run again after a crash.

Sinks are descriptions: the runtime does the writing. Any ``callable(df, epoch)`` is a sink too.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from midstream.errors import FlowError
from midstream.flow.file_options import file_options

EPOCH_COLUMN = "epoch"
"""The partition column that a :class:`FileSink` adds: its folders are called ``epoch=0``, ``epoch=1``, …"""


class FileFormat(enum.StrEnum):
    """File formats that a :class:`FileSink` writes."""

    PARQUET = "parquet"
    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True)
class FileSink:
    """Writes each epoch to a folder of its own, ``path/epoch=n``; all together read as one table.

    **Guarantee: exactly once.** An epoch that runs again replaces its folder. The sink owns its path: a folder that
    holds anything else, or another job's output, is refused before the job starts. A reader that looks while an
    epoch is being written may see a part of that epoch; readers that must not, read up to ``job.progress``.

    ``options`` are those of Spark's writer for the format, such as ``compression`` or, for csv, ``header`` and ``sep``.

    >>> FileSink("out/alerts", "json").format
    <FileFormat.JSON: 'json'>
    """

    path: str
    format: FileFormat = FileFormat.PARQUET
    options: tuple[tuple[str, str], ...] = ()

    drains = True

    def __init__(self, path: Any, format: str = "parquet", **options: Any) -> None:
        if format not in list(FileFormat):
            raise FlowError(f"FileSink: format {format!r} is not known; allowed: {', '.join(FileFormat)}")
        if not str(path):
            raise FlowError("FileSink: the path is empty; give a folder that this job may own")
        object.__setattr__(self, "path", str(path))
        object.__setattr__(self, "format", FileFormat(format))
        object.__setattr__(self, "options", file_options(format, options))


@dataclass(eq=False)
class MemorySink:
    """Keeps every row in the driver's memory: for tests and notebooks.

    **Guarantee: exactly once** within one life of the driver: an epoch that runs again replaces its rows.

    >>> sink = MemorySink()
    >>> sink.put(0, pa.table({"n": [1, 2]}))
    >>> sink.put(0, pa.table({"n": [1, 2]}))
    >>> sink.rows
    [{'n': 1}, {'n': 2}]
    """

    _epochs: dict[int, pa.Table] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    drains = True

    def put(self, epoch: int, table: pa.Table) -> None:
        """Set an epoch's rows. Called by the runtime."""
        with self._lock:
            self._epochs[epoch] = table

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows so far, by epoch, as dicts."""
        return [row for table in self.tables.values() for row in _to_dicts(table)]

    @property
    def tables(self) -> dict[int, pa.Table]:
        """One Arrow table per epoch, in order."""
        with self._lock:
            return dict(sorted(self._epochs.items()))


def _to_dicts(table: pa.Table) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    except TypeError:  # keys that are arrays, maps or structs cannot be keys of a dict: such maps come as pairs
        rows = table.to_pylist()
    return rows


@dataclass(frozen=True)
class ConsoleSink:
    """Prints the first rows of each epoch.

    **Guarantee: at least once.** An epoch that runs again is printed again.
    """

    limit: int = 20

    drains = False

    def __post_init__(self) -> None:
        if type(self.limit) is not int or self.limit < 1:
            raise FlowError(f"ConsoleSink: limit={self.limit!r} is not a number of rows; give a whole number from 1")


@dataclass(frozen=True)
class NoopSink:
    """Drops all rows, after computing them: for benchmarks, and for branches that are dropped on purpose."""

    drains = True


@dataclass(frozen=True)
class CallSink:
    """Hands each epoch to a function, which may do anything with it, as often as it likes.

    On Spark the function gets a DataFrame, on the local runtime a ``pyarrow.Table``. **Guarantee: at least once.** An
    epoch that runs again is handed over again, with the same rows and number; a function that remembers the epoch in
    the same transaction as its rows makes it exactly once.
    """

    function: Callable[[Any, int], Any]

    drains = False


SinkTarget = FileSink | MemorySink | ConsoleSink | NoopSink | CallSink
