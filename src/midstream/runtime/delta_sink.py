"""Writes tables of Delta Lake, on both runtimes: an epoch is one commit, and replaces what it wrote before.

Three *transactions*, which Delta Lake keeps by name and number, are in every commit. The sink's has the newest epoch as
its ``txnVersion``: an epoch that is not newer is replaced, not appended. The owner's and the driver's are numbers made
from their names. A commit fails if one of them was written since the table was read, so a driver that was replaced, but
does not know it yet, cannot write.

The table is written by the ``deltalake`` package, not by Spark: it works with all versions of Spark, on both runtimes,
and without a Java archive in the session.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from midstream.errors import CheckpointError, SetupError, first_line
from midstream.flow.delta_sink import DeltaSink
from midstream.flow.sink_owner import SinkOwner
from midstream.ids import Epoch
from midstream.runtime.lake_upsert import Upserted, completed, lost_before, positions, ranges, unmatched, with_columns
from midstream.runtime.owned_tables import OwnedTable
from midstream.storage.disk import sync_remaining

__all__ = ["OwnedDelta"]

LOG = "_delta_log"
OWNER, DRIVER = "midstream.owner", "midstream.driver"
KEY = "midstream.key"
ABOUT = "midstream"
"""The entry of a commit that names its writer in words."""

STEP = "midstream_step"
"""The column that says what a row of a merge does."""
PUT, RESTORE, REMOVE = 0, 1, 2
"""Its columns are put in place, all columns are, or the row with its key goes."""

AHEAD = 2
"""Most batches that wait to be written."""


class OwnedDelta(OwnedTable):
    """A table of Delta Lake that a sink writes."""

    sink_type = DeltaSink
    case_blind = "Delta Lake"

    def __init__(self, sink: DeltaSink, what: str) -> None:
        super().__init__(sink, what)
        self._sink = sink
        self._options = dict(sink.storage_options)
        self._table: Any = None

    @staticmethod
    def require_package(what: str) -> None:
        """Refuse a driver without ``deltalake``."""
        try:
            import deltalake  # noqa: F401
        except ImportError as error:
            raise SetupError(
                f"{what}: a DeltaSink needs the deltalake package on the driver ({error}); pip install "
                f"'midstream[delta]'"
            ) from None

    @classmethod
    @contextlib.contextmanager
    def at(cls, sink: DeltaSink, what: str) -> Iterator[OwnedDelta]:
        """The table of a sink."""
        yield cls(sink, what)

    # ── what the table is ─────────────────────────────────────────────────────────────────────────────────────────

    def opened(self) -> bool:
        """Read the newest version."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        place = self._sink.location
        if os.path.isfile(place):
            raise CheckpointError(f"{self.what}: {self.shown!r} is a file; a DeltaSink needs a folder")
        try:
            is_there = DeltaTable.is_deltatable(place, self._options)
            self._table = DeltaTable(place, storage_options=self._options) if is_there else None
        except (DeltaError, OSError, ValueError) as error:
            raise SetupError(f"{self.what}: the table {self.shown!r} cannot be read: {first_line(error)}") from error
        return self._table is not None

    def require_place(self) -> None:
        """Refuse a local folder with other data: the table would look like a part of it."""
        place = self._sink.location
        if os.path.isdir(place) and (found := sorted(os.listdir(place))):
            raise CheckpointError(
                f"{self.what}: the folder {self.shown!r} holds other data ({found[0]}) and is not a table of Delta "
                f"Lake; use a new folder"
            )

    def create(self, schema: pa.Schema) -> None:
        """Make the table, in a folder that is made as well."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            if os.path.isabs(self._sink.location):
                os.makedirs(self._sink.location, exist_ok=True)
            self._table = DeltaTable.create(
                self._sink.location,
                self.written_columns(schema),
                mode="ignore",
                partition_by=list(self._sink.partition_by) or None,
                storage_options=self._options,
            )
        except (DeltaError, OSError, ValueError) as error:
            raise SetupError(f"{self.what}: the table {self.shown!r} cannot be made: {first_line(error)}") from error

    def require_layout(self, schema: pa.Schema) -> None:
        """Refuse a table that is partitioned otherwise, or in which nothing can be replaced."""
        found = self._table.metadata().partition_columns
        if list(self._sink.partition_by) != found:
            raise CheckpointError(
                f"{self.what}: the table {self.shown!r} is partitioned by {found}, and the sink says "
                f"partition_by={list(self._sink.partition_by)}; the table keeps the columns with which it was made"
            )
        if self.key and self._table.metadata().configuration.get("delta.appendOnly", "false") == "true":
            raise CheckpointError(
                f"{self.what}: the table {self.shown!r} has delta.appendOnly, so no row of it can be replaced; use "
                f"mode='append', or another table"
            )

    def stored(self, kind: pa.DataType) -> pa.DataType:
        """A type after it went through a schema of Delta Lake."""
        from deltalake import Schema

        return pa.schema(Schema.from_arrow(pa.schema([pa.field("x", kind)]))).field("x").type

    def written_columns(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows, all of them nullable, and the epoch."""
        # A change may give a flow other columns; those that are gone are null from then on.
        return pa.schema([*(field.with_nullable(True) for field in schema), pa.field(self.epoch_column, pa.int64())])

    def columns_of_table(self) -> pa.Schema:
        """The columns of the newest version."""
        return pa.schema(self._table.schema())

    # ── whose it is ───────────────────────────────────────────────────────────────────────────────────────────────

    def is_owned_by(self, owner: SinkOwner) -> bool:
        """Whether the owner's transaction is that of this sink."""
        return bool(self._table.transaction_version(OWNER) == _number_of(owner))

    def is_driven_by(self, owner: SinkOwner) -> bool:
        """Whether the driver's transaction is that of this process, too."""
        return self.is_owned_by(owner) and bool(self._table.transaction_version(DRIVER) == _number(owner.driver))

    def writer(self) -> str | None:
        """What the newest commit of a sink says in words."""
        if self._table.transaction_version(OWNER) is None:
            return None
        for commit in self._table.history(100):
            if about := commit.get(ABOUT):
                found: dict[str, str] = json.loads(about)
                return f"sink {found['sink']!r} of flow {found['flow']!r} (job {found['job'][:8]})"
        return "another sink"

    def epochs_found(self) -> str | None:
        """The newest epoch of the rows, whose column is read."""
        if self.epoch_column not in self.columns_of_table().names:
            return None
        newest = pc.max(self._table.to_pyarrow_table(columns=[self.epoch_column]).column(0)).as_py()
        return None if newest is None else f" (up to {newest})"

    def newest_epoch(self) -> int | None:
        """The number of the sink's transaction."""
        assert self.owner is not None, "only a sink that was claimed writes"
        found: int | None = self._table.transaction_version(_app_of(self.owner))
        return found

    def keyed_by(self) -> str | None:
        """The number that stands for a key."""
        found = self._table.transaction_version(KEY)
        return None if found is None else str(found)

    def key_mark(self) -> str:
        """The number that stands for the sink's key."""
        return str(_number(json.dumps(self.key)))

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def scan(self, columns: Sequence[str], epoch: Epoch | None = None) -> Iterator[pa.RecordBatch]:
        """Rows of the newest version."""
        import pyarrow.dataset as pads

        condition = None if epoch is None else pads.field(self.epoch_column) >= int(epoch)
        yield from self._table.to_pyarrow_dataset().to_batches(columns=list(columns), filter=condition)

    def scan_before(self) -> Iterator[pa.RecordBatch]:
        """Rows of the version before the newest epoch."""
        from deltalake import DeltaTable

        if (version := self._before) is None:
            return
        try:
            before = DeltaTable(self._sink.location, version, self._options)
            yield from before.to_pyarrow_dataset().to_batches()
        except Exception as error:  # the packages raise errors of many kinds
            raise lost_before(self.shown, f"version {version}", error) from error

    @property
    def _before(self) -> int | None:
        assert self.owner is not None, "only a sink that was claimed writes"
        found: int | None = self._table.transaction_version(_before_of(self.owner))
        return found

    # ── a commit ──────────────────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self, rows: Iterator[pa.RecordBatch], columns: pa.Schema | None, epoch: Epoch | None, *, replaces: bool
    ) -> str | None:
        """Make one version."""
        from deltalake import write_deltalake

        if columns is None:
            rows = iter([pa.RecordBatch.from_pylist([], schema=self.columns_of_table())])

        def write(batches: pa.RecordBatchReader) -> None:
            write_deltalake(
                self._table,
                batches,
                mode="overwrite" if replaces else "append",
                predicate=f"{_quoted(self.epoch_column)} >= {int(epoch)}" if replaces and epoch is not None else None,
                schema_mode="merge",
                commit_properties=self._properties(epoch),
            )

        return self._committed(lambda: _hand_over(rows, write))

    def upsert(self, change: Upserted, epoch: Epoch) -> str | None:
        """Make one version, by a merge."""
        columns = self.columns_of_table()
        added = [column for column in change.columns or () if column.name not in columns.names]
        columns = pa.schema([*columns, *added])
        written = columns.names if change.columns is None else change.columns.names
        before = self._before if self.newest_epoch() == epoch else self._table.version()
        same_key = [f"target.{_quoted(name)} = source.{_quoted(name)}" for name in self.key]
        rows = pa.RecordBatchReader.from_batches(columns.append(pa.field(STEP, pa.int32())), _steps(change, columns))

        def write(batches: pa.RecordBatchReader) -> None:
            (
                self._table.merge(
                    batches,
                    " AND ".join([*same_key, *_within(change)]),
                    source_alias="source",
                    target_alias="target",
                    merge_schema=bool(added),
                    commit_properties=self._properties(epoch, before),
                )
                .when_matched_update(_same(written), f"source.{STEP} = {PUT}")
                .when_matched_update(_same(columns.names), f"source.{STEP} = {RESTORE}")
                .when_matched_delete(f"source.{STEP} = {REMOVE}")
                .when_not_matched_insert(_same(columns.names), f"source.{STEP} <> {REMOVE}")
                .execute()
            )

        return self._committed(lambda: write(rows))

    def _committed(self, write: Callable[[], None]) -> str | None:
        from deltalake.exceptions import CommitFailedError

        before = self._table.version()
        try:
            write()
        except CommitFailedError as error:
            return first_line(error)
        _sync(self._sink, before)
        return None

    def _properties(self, epoch: Epoch | None, before: int | None = None) -> Any:
        from deltalake import CommitProperties, Transaction

        owner = self.owner
        assert owner is not None, "only a sink that was claimed writes"
        # Without a time: a table may forget transactions whose time is long ago, and then an epoch would come twice.
        transactions = [Transaction(OWNER, _number_of(owner)), Transaction(DRIVER, _number(owner.driver))]
        about = {"job": owner.job, "flow": owner.flow, "sink": owner.sink}
        if epoch is not None:
            transactions.append(Transaction(_app_of(owner), int(epoch)))
        if self.key:
            transactions.append(Transaction(KEY, int(self.key_mark())))
        if before is not None:
            transactions.append(Transaction(_before_of(owner), before))
        return CommitProperties(custom_metadata={ABOUT: json.dumps(about)}, app_transactions=transactions)


def _hand_over(batches: Iterator[pa.RecordBatch], write: Callable[[pa.RecordBatchReader], None]) -> None:
    """Have ``write`` read the batches in a thread of its own, while this thread makes them.

    The writer reads in threads of its own, to which the jobs that make rows must not belong: Spark knows by the thread
    which run of an epoch a job is for.
    """
    first = next(batches)
    ready: queue.Queue[pa.RecordBatch | None] = queue.Queue(AHEAD)
    failures: list[BaseException] = []
    done, given_up = threading.Event(), threading.Event()

    def rows() -> Iterator[pa.RecordBatch]:
        yield first
        while (batch := ready.get()) is not None:
            yield batch
        if given_up.is_set():
            raise RuntimeError("the rows were not made; nothing is written")

    def run() -> None:
        try:
            write(pa.RecordBatchReader.from_batches(first.schema, rows()))
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="midstream-delta", daemon=True)
    thread.start()
    try:
        for batch in batches:
            if not _put(ready, batch, done):
                break
    except BaseException:
        given_up.set()
        raise
    finally:
        _put(ready, None, done)
        thread.join()
    if failures:
        raise failures[0]


def _put(ready: queue.Queue[pa.RecordBatch | None], batch: pa.RecordBatch | None, done: threading.Event) -> bool:
    """Pass a batch on, unless its reader has ended."""
    while not done.is_set():
        try:
            ready.put(batch, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _sync(sink: DeltaSink, before: int) -> None:
    """Sync the versions of a table on this machine since another one; the writer leaves that to the system.

    They are committed by then, so somebody may have compacted and vacuumed them already.
    """
    if not os.path.isabs(sink.location):
        return
    written, version = list[str](), before + 1
    with contextlib.suppress(FileNotFoundError):
        while True:
            log = os.path.join(sink.location, LOG, f"{version:020}.json")
            with open(log, encoding="utf-8") as file:
                added = [entry["add"]["path"] for line in file if "add" in (entry := json.loads(line))]
            written += [log, *(os.path.join(sink.location, unquote(path)) for path in added)]
            version += 1
    sync_remaining(written)


def _app_of(owner: SinkOwner) -> str:
    """The name of the transaction that has the newest epoch."""
    return f"midstream-{owner.job}-{owner.sink}"


def _before_of(owner: SinkOwner) -> str:
    """The name of the transaction that has the version before the newest epoch, for upserts."""
    return f"{_app_of(owner)}-before"


def _steps(change: Upserted, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a merge, with all columns, and what each of them does."""
    key = change.keys.column_names
    before = change.before.select([name for name in change.before.column_names if name in columns.names])
    for batch in change.rows():
        is_old = pc.is_valid(positions(pa.table(batch.select(key)), change.old))
        yield _as_step(completed(batch, columns, before, key), pc.if_else(is_old, RESTORE, PUT))
    restored = unmatched(before, key, change.keys)
    gone = unmatched(unmatched(change.old, key, change.keys), key, before.select(key))
    for rows, step in ((restored, RESTORE), (gone, REMOVE)):
        for batch in rows.to_batches():
            yield _as_step(with_columns(batch, columns), pa.repeat(step, batch.num_rows))


def _as_step(batch: pa.RecordBatch, steps: pa.Array) -> pa.RecordBatch:
    return batch.append_column(pa.field(STEP, pa.int32()), steps.cast(pa.int32()))


def _within(change: Upserted) -> Iterator[str]:
    """Conditions that all keys of a merge meet, by which files are left out."""
    for name, low, high in ranges(pa.concat_tables([change.keys, change.old.cast(change.keys.schema)])):
        if isinstance(low, str):
            low, high = (f"'{value.replace(chr(39), 2 * chr(39))}'" for value in (low, high))
        elif low == -(2**63):  # no literal of SQL
            continue
        yield f"target.{_quoted(name)} >= {low} AND target.{_quoted(name)} <= {high}"


def _same(names: Iterable[str]) -> dict[str, str]:
    """Columns that become what the rows of a merge have."""
    return {_quoted(name): f"source.{_quoted(name)}" for name in names}


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _number_of(owner: SinkOwner) -> int:
    return _number(f"{owner.job}/{owner.sink}")


def _number(name: str) -> int:
    """A number of 63 bits, which a transaction can hold, that stands for this name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1
