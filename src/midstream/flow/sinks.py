"""Where rows go. Each sink states what it guarantees when an epoch runs again.

An epoch runs again after a crash, after a failure, and after the rollback of a change; in that last case its rows
differ from those of the first run. A sink that must agree with state therefore *replaces* what it wrote for an epoch.

Sinks are descriptions: the runtime does the writing. Any ``callable(df, epoch)`` is a sink, too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from midstream.data.schema import require_columns, type_name
from midstream.errors import FlowError, SchemaError
from midstream.flow.delta_sink import DeltaSink, check_types
from midstream.flow.iceberg_sink import IcebergSink, check_names
from midstream.flow.kafka_sink import KafkaSink, check_records
from midstream.flow.sink_owner import EPOCH_COLUMN, SinkOwner, check_keys, key_of
from midstream.flow.spec import Delivery, SinkTable
from midstream.storage.blobs import filesystem_of, is_plain_path
from midstream.storage.table_format import FileFormat, TableFormat

EPOCHS_TABLE = "midstream_epochs"
"""The table in which a :class:`DatabaseSink` records the owner of each target table and its last epoch."""

PARAMSTYLES = ("qmark", "numeric", "named", "format", "pyformat")
"""The styles of statement parameters that DB-API 2.0 defines."""


@dataclass(frozen=True)
class FileSink:
    """Writes files of a table to a folder: Parquet, JSON lines or CSV.

    **Guarantee: exactly once.** Tasks write files where readers do not look; when an epoch is committed, its files are
    put in place. So readers see only committed epochs, and each row once. The folder is one table, with the number of
    the epoch in the column ``epoch``. A reader that lists the folder during a commit may see a part of the newest
    epoch; :func:`midstream.committed_files` lists the files of complete epochs. The sink owns its folder: one that
    holds anything else, or another job's output, is refused before the job starts.

    :param partition_by: columns whose values become folders, as in ``country=de/``.
    :param merge: merge small files of committed epochs in the background. Default: yes for Parquet without
        ``rows_per_file``, else no.
    :param options: for every format ``compression`` and ``rows_per_file``; for Parquet ``compression_level`` and
        ``rows_per_group``, for JSON ``ignore_null_fields``, for CSV ``header``, ``sep`` and ``quote_all``.

    >>> FileSink("out/alerts", "json", compression="gzip").layout.extension
    '.json.gz'
    """

    path: str
    layout: TableFormat
    partition_by: tuple[str, ...] = ()
    merge: bool = True

    delivery = Delivery.TASKS

    def __init__(
        self,
        path: Any,
        format: str = "parquet",
        *,
        partition_by: str | Sequence[str] = (),
        merge: bool | None = None,
        **options: Any,
    ) -> None:
        if not str(path):
            raise FlowError("FileSink: the path is empty; give a folder that belongs to this job alone")
        columns = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        if len(set(columns)) != len(columns):
            raise FlowError(f"FileSink: partition_by={list(columns)} names a column twice")
        layout = TableFormat.of(format, options)
        if merge and layout.format is not FileFormat.PARQUET:
            raise FlowError(f"FileSink: merge=True is for Parquet files; found {layout.format}")
        if merge and layout.rows_per_file is not None:
            raise FlowError(
                f"FileSink: merge=True makes larger files, but rows_per_file={layout.rows_per_file} bounds them; give "
                f"one of the two"
            )
        is_merged = layout.format is FileFormat.PARQUET and layout.rows_per_file is None
        object.__setattr__(self, "path", str(path))
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "partition_by", columns)
        object.__setattr__(self, "merge", is_merged if merge is None else merge)

    @property
    def table(self) -> SinkTable:
        """Where and how tasks write its files."""
        local = filesystem_of(self.path)[1] if is_plain_path(self.path) else self.path
        return SinkTable(local, self.layout, self.partition_by, self.merge)


@dataclass(eq=False)
class MemorySink:
    """Keeps every row in the driver's memory: for tests and notebooks.

    **Guarantee: exactly once** within one driver process: an epoch that runs again replaces its rows.

    >>> sink = MemorySink()
    >>> sink.put(0, pa.table({"n": [1, 2]}))
    >>> sink.put(0, pa.table({"n": [1, 2]}))
    >>> sink.rows
    [{'n': 1}, {'n': 2}]
    """

    _epochs: dict[int, pa.Table] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    delivery = Delivery.ROWS

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
    except TypeError:  # keys that are arrays, maps or structs cannot be keys of a dict: such maps become lists of pairs
        rows = table.to_pylist()
    return rows


@dataclass(frozen=True)
class ConsoleSink:
    """Prints the first rows of each epoch.

    **Guarantee: at least once.** An epoch that runs again is printed again.

    >>> from midstream import ConsoleSink, Flow, ListSource
    >>> from midstream.testing import run_local
    >>> flow = Flow("numbers")
    >>> flow.source("in", ListSource([[{"n": 1}, {"n": 2}]], "n int")).sink("shown", ConsoleSink(limit=1))
    >>> _ = run_local(flow)
    ── epoch 0 ──
     n
     1
    … more than 1 rows
    """

    limit: int = 20

    delivery = Delivery.ROWS

    def __post_init__(self) -> None:
        if type(self.limit) is not int or self.limit < 1:
            raise FlowError(f"ConsoleSink: limit={self.limit!r} is not a number of rows; give a whole number from 1")


@dataclass(frozen=True)
class NoopSink:
    """Drops all rows after computing them: for benchmarks, and for branches that are discarded on purpose.

    >>> from midstream import Flow, ListSource, NoopSink
    >>> from midstream.testing import run_local
    >>> flow = Flow("numbers")
    >>> flow.source("in", ListSource([[{"n": 1}, {"n": 2}]], "n int")).sink("nowhere", NoopSink())
    >>> [(each.operator, each.rows_in) for each in run_local(flow).metrics.operators]
    [('in', 2)]
    """

    delivery = Delivery.NONE


@dataclass(frozen=True)
class CallSink:
    """Calls a function with each epoch; it may read the rows any number of times.

    On Spark the function gets a DataFrame, on the local runtime a ``pyarrow.Table``. **Guarantee: at least once.** The
    function is called again, with the same epoch number, when an epoch runs again. The rows are the same if the flow is
    the same: after the rollback of a change they differ. A function that replaces what it wrote for an epoch, in one
    transaction, agrees with state; one that skips an epoch it has seen does not.
    """

    function: Callable[[Any, int], Any]

    delivery = Delivery.FRAME


@dataclass(frozen=True)
class DatabaseSink:
    """Writes to a table of any database that has a DB-API 2.0 driver, each epoch in one transaction.

    **Guarantee: exactly once.** One transaction deletes what the job wrote for this epoch, inserts the epoch's rows
    with the epoch's number in ``epoch_column``, and records the epoch in ``epochs_table``. So rows and state agree for
    every committed epoch: after a crash, a retry, or the rollback of a change.

    ``connect`` is called on the driver for each epoch and returns a new connection that is not in autocommit mode. It
    is closed after the epoch. The table must exist, with the rows' columns and ``epoch_column``. It may have other
    columns (with defaults), and rows of your own whose ``epoch_column`` is null, which are left alone. Only one sink of
    one job may write to it; ``epochs_table`` records which, and is created if it is missing.

    With ``mode="upsert"`` a row takes the place of the one with the same ``key``: columns of the rows, on which the
    table has a unique index. Columns that the rows lack keep their values. Of several rows with one key in an
    epoch the last counts. What an epoch overwrites is kept in a second table, ``<table>_undo``, until the next epoch,
    so that it can be undone when the epoch runs again. That needs a database with ``INSERT … ON CONFLICT``, such as
    PostgreSQL and SQLite.

    A dot in ``table`` separates schema and name; give a name that contains a dot as a tuple of parts. Names are quoted
    with ``quote`` and otherwise used unchanged. ``paramstyle`` defaults to the driver's own.

    >>> import os, sqlite3, tempfile
    >>> from midstream import Flow, ListSource
    >>> from midstream.testing import run_local
    >>> path = os.path.join(tempfile.mkdtemp(), "shop.db")
    >>> database = sqlite3.connect(path)
    >>> _ = database.execute("CREATE TABLE paid (user TEXT, amount REAL, epoch INTEGER)")
    >>> flow = Flow("payments")
    >>> rows = flow.source("in", ListSource([[{"user": "ann", "amount": 3.0}]], "user string, amount double"))
    >>> rows.sink("paid", DatabaseSink(lambda: sqlite3.connect(path), "paid"))
    >>> _ = run_local(flow)
    >>> database.execute("SELECT * FROM paid").fetchall()
    [('ann', 3.0, 0)]
    >>> database.close()
    """

    connect: Callable[[], Any]
    table: tuple[str, ...]
    epoch_column: str
    epochs_table: tuple[str, ...]
    paramstyle: str | None
    quote: str
    key: tuple[str, ...]
    """The columns by which rows are replaced; empty if they are appended."""
    owner: SinkOwner | None

    delivery = Delivery.FRAME

    def __init__(
        self,
        connect: Callable[[], Any],
        table: str | Sequence[str],
        *,
        epoch_column: str = EPOCH_COLUMN,
        epochs_table: str | Sequence[str] = EPOCHS_TABLE,
        paramstyle: str | None = None,
        quote: str = '"',
        mode: str = "append",
        key: str | Sequence[str] = (),
    ) -> None:
        keys = key_of("DatabaseSink", mode, key)
        if not callable(connect):
            raise FlowError(
                f"DatabaseSink: connect must be a function that returns a new connection, found "
                f"{type(connect).__name__}; write e.g. lambda: sqlite3.connect('shop.db')"
            )
        if paramstyle is not None and paramstyle not in PARAMSTYLES:
            raise FlowError(
                f"DatabaseSink: paramstyle {paramstyle!r} is not known; allowed: {', '.join(PARAMSTYLES)}, or None to "
                f"ask the driver"
            )
        if len(quote) != 1:
            raise FlowError(f"DatabaseSink: quote must be one character, found {quote!r}")
        values = {
            "connect": connect,
            "table": _name_parts(table, "table"),
            "epoch_column": _name_parts((epoch_column,), "epoch_column")[0],
            "epochs_table": _name_parts(epochs_table, "epochs_table"),
            "paramstyle": paramstyle,
            "quote": quote,
            "key": keys,
            "owner": None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def place(self) -> tuple[Any, ...]:
        """An identity of its table, to compare it with those of other sinks."""
        return self.table, self.epochs_table

    @property
    def undo_table(self) -> tuple[str, ...]:
        """The table where an upsert keeps the rows that the newest epoch has overwritten."""
        return (*self.table[:-1], f"{self.table[-1]}_undo")

    def owned_by(self, owner: SinkOwner) -> DatabaseSink:
        """The same sink with an owner, which it needs to write. Called by the runtime."""
        owned = copy.copy(self)
        object.__setattr__(owned, "owner", owner)
        return owned


def _name_parts(name: Any, what: str) -> tuple[str, ...]:
    parts = tuple(name.split(".")) if isinstance(name, str) else tuple(name)
    if not parts or not all(isinstance(part, str) and part and "\0" not in part for part in parts):
        raise FlowError(
            f"DatabaseSink: {what} {name!r} is not a name; give e.g. 'payments', 'sales.payments', or a tuple of parts"
        )
    return parts


def check_columns(target: SinkTarget, schema: pa.Schema, what: str) -> None:
    """Refuse columns that a sink cannot write."""
    named = getattr(target, "epoch_column", None)
    added = EPOCH_COLUMN if isinstance(target, FileSink) else named
    if added in schema.names:
        instead = ", or give the sink another epoch_column" if named else ""
        raise SchemaError(
            f"{what}: a {type(target).__name__} adds the column {added!r} (the number of the epoch), but the rows have "
            f"one of that name already; rename it with a map before the sink{instead}"
        )
    if isinstance(target, FileSink):
        check_table(target, schema, what)
    if isinstance(target, KafkaSink):
        check_records(target, schema, what)
    if isinstance(target, DeltaSink):
        check_types(target, schema, what)
    if isinstance(target, IcebergSink):
        check_names(target, schema, what)
    if isinstance(target, DeltaSink | IcebergSink):
        check_keys(target.key, schema, what)
    if isinstance(target, DatabaseSink):
        require_columns(schema, target.key, f"{what}, key")
    for column in schema:
        if isinstance(target, DatabaseSink) and pa.types.is_nested(column.type):
            raise SchemaError(
                f"{what}: column {column.name!r} is {type_name(column.type)}; a DatabaseSink writes only plain "
                f"columns. Turn it into text in a map before the sink, e.g. with json.dumps",
                column=column.name,
            )


def check_table(target: FileSink, schema: pa.Schema, what: str) -> None:
    """Refuse columns that the files cannot hold, and folders that cannot be named."""
    require_columns(schema, target.partition_by, f"{what}, partition_by")
    if target.partition_by and len(target.partition_by) == len(schema.names):
        raise SchemaError(f"{what}: partition_by names all columns; leave at least one for the files")
    for name in target.partition_by:
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind) or pa.types.is_binary(kind):
            raise SchemaError(
                f"{what}: column {name!r} is {type_name(kind)}, which cannot name a folder; partition by text, whole "
                f"numbers, dates, booleans or timestamps",
                column=name,
            )
    target.layout.check(schema, what)


SinkTarget = (
    FileSink | MemorySink | ConsoleSink | NoopSink | CallSink | DatabaseSink | DeltaSink | IcebergSink | KafkaSink
)
