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
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from midstream.errors import CheckpointError, SetupError, first_line
from midstream.flow.delta_sink import DeltaSink
from midstream.flow.sink_owner import SinkOwner
from midstream.ids import Epoch
from midstream.runtime.owned_tables import OwnedTable
from midstream.storage.disk import sync_remaining

__all__ = ["OwnedDelta"]

LOG = "_delta_log"
OWNER, DRIVER = "midstream.owner", "midstream.driver"
ABOUT = "midstream"
"""The entry of a commit that names its writer in words."""

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
        """Refuse a table that is partitioned otherwise."""
        found = self._table.metadata().partition_columns
        if list(self._sink.partition_by) != found:
            raise CheckpointError(
                f"{self.what}: the table {self.shown!r} is partitioned by {found}, and the sink says "
                f"partition_by={list(self._sink.partition_by)}; the table keeps the columns with which it was made"
            )

    def columns(self) -> Mapping[str, pa.DataType]:
        """The types of the newest version."""
        return {field.name: field.type for field in self._schema}

    def stored(self, kind: pa.DataType) -> pa.DataType:
        """A type after it went through a schema of Delta Lake."""
        from deltalake import Schema

        return pa.schema(Schema.from_arrow(pa.schema([pa.field("x", kind)]))).field("x").type

    def written_columns(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows, all of them nullable, and the epoch."""
        # A change may give a flow other columns; those that are gone are null from then on.
        return pa.schema([*(field.with_nullable(True) for field in schema), pa.field(self.epoch_column, pa.int64())])

    @property
    def _schema(self) -> pa.Schema:
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
        import pyarrow.compute as pc

        if self.epoch_column not in self._schema.names:
            return None
        newest = pc.max(self._table.to_pyarrow_table(columns=[self.epoch_column]).column(0)).as_py()
        return None if newest is None else f" (up to {newest})"

    def newest_epoch(self) -> int | None:
        """The number of the sink's transaction."""
        assert self.owner is not None, "only a sink that was claimed writes"
        found: int | None = self._table.transaction_version(_app_of(self.owner))
        return found

    # ── a commit ──────────────────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self, rows: Iterator[pa.RecordBatch], columns: pa.Schema | None, epoch: Epoch | None, *, replaces: bool
    ) -> str | None:
        """Make one version."""
        from deltalake import write_deltalake

        if columns is None:
            rows = iter([pa.RecordBatch.from_pylist([], schema=self._schema)])
        column = self.epoch_column.replace('"', '""')

        def write(batches: pa.RecordBatchReader) -> None:
            write_deltalake(
                self._table,
                batches,
                mode="overwrite" if replaces else "append",
                predicate=f'"{column}" >= {int(epoch)}' if replaces and epoch is not None else None,
                schema_mode="merge",
                commit_properties=self._properties(epoch),
            )

        return self._committed(rows, write)

    def _committed(self, rows: Iterator[pa.RecordBatch], write: Callable[[pa.RecordBatchReader], None]) -> str | None:
        from deltalake.exceptions import CommitFailedError

        before = self._table.version()
        try:
            _hand_over(rows, write)
        except CommitFailedError as error:
            return first_line(error)
        _sync(self._sink, before)
        return None

    def _properties(self, epoch: Epoch | None) -> Any:
        from deltalake import CommitProperties, Transaction

        owner = self.owner
        assert owner is not None, "only a sink that was claimed writes"
        transactions = [Transaction(OWNER, _number_of(owner)), Transaction(DRIVER, _number(owner.driver))]
        about = {"job": owner.job, "flow": owner.flow, "sink": owner.sink}
        if epoch is not None:
            transactions.append(Transaction(_app_of(owner), int(epoch)))
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


def _number_of(owner: SinkOwner) -> int:
    return _number(f"{owner.job}/{owner.sink}")


def _number(name: str) -> int:
    """A number of 63 bits, which a transaction can hold, that stands for this name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1
