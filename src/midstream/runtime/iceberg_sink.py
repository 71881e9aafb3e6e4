"""Writes tables of Apache Iceberg, on both runtimes: an epoch is one commit, and replaces what it wrote before.

Whose a table is, which life of the driver may write and the newest epoch are properties of the table, which change in
the same commit as the rows. Each commit, also that of a claim, makes a snapshot and counts only if the table's snapshot
is the one that it was made for. So a driver that was replaced, but does not know it yet, cannot write.

The table is written by PyIceberg, not by Spark: it works with all versions of Spark, on both runtimes, and without a
Java archive in the session.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.schema import parse_ddl, to_ddl
from midstream.errors import SchemaError, SetupError, first_line
from midstream.flow.iceberg_sink import IcebergSink
from midstream.flow.sink_owner import SinkOwner
from midstream.ids import Epoch
from midstream.runtime.lake_upsert import Upserted, completed, lost_before, positions, ranges, unmatched, with_columns
from midstream.runtime.owned_tables import OwnedTable
from midstream.storage.disk import sync_remaining

__all__ = ["OwnedIceberg"]

JOB, FLOW, SINK, DRIVER, EPOCH = (f"midstream.{name}" for name in ("job", "flow", "sink", "driver", "epoch"))
KEY, BEFORE = "midstream.key", "midstream.before"
RETRIES = "commit.retry.num-retries"

SLICE_BYTES = 128 << 20
"""Most bytes of rows in memory that go to a partitioned table at once: PyIceberg sorts them by partition."""


class OwnedIceberg(OwnedTable):
    """A table of Apache Iceberg that a sink writes."""

    sink_type = IcebergSink
    case_blind = "Spark"

    def __init__(self, sink: IcebergSink, what: str, catalog: Any) -> None:
        super().__init__(sink, what)
        self._sink = sink
        self._catalog = catalog
        self._table: Any = None

    @staticmethod
    def require_package(what: str) -> None:
        """Refuse a driver without PyIceberg."""
        try:
            import pyiceberg  # noqa: F401
        except ImportError as error:
            raise SetupError(
                f"{what}: an IcebergSink needs PyIceberg on the driver ({error}); pip install 'midstream[iceberg]', "
                f"and what PyIceberg needs for your catalog, such as 'pyiceberg[sql-sqlite]'"
            ) from None

    @classmethod
    @contextmanager
    def at(cls, sink: IcebergSink, what: str) -> Iterator[OwnedIceberg]:
        """The table of a sink, as long as the catalog is open."""
        from pyiceberg.catalog import load_catalog

        try:
            catalog = load_catalog(sink.catalog, **sink.catalog_options)
        except Exception as error:
            raise SetupError(f"{what}: the catalog {sink.catalog!r} cannot be opened: {first_line(error)}") from error
        with catalog:
            yield cls(sink, what, catalog)

    # ── what the table is ─────────────────────────────────────────────────────────────────────────────────────────

    def opened(self) -> bool:
        """Load the table from the catalog."""
        from pyiceberg.exceptions import NoSuchTableError

        try:
            table = self._catalog.load_table(self._sink.table)
        except NoSuchTableError:
            return False
        except Exception as error:
            raise SetupError(f"{self.what}: the table {self.shown!r} cannot be read: {first_line(error)}") from error
        # By default PyIceberg puts rows that met a conflict on top of the newer snapshot, whoever made it. A driver
        # that was replaced must not; so in its eyes, not in the table's, there are no retries. Ours begin with reading.
        table.metadata = table.metadata.model_copy(update={"properties": {**table.metadata.properties, RETRIES: "0"}})
        self._table = table
        return True

    def require_place(self) -> None:
        """Refuse a catalog without the namespace of the table."""
        namespace = self._sink.table.rpartition(".")[0]
        if not self._catalog.namespace_exists(namespace):
            raise SetupError(
                f"{self.what}: the catalog {self._sink.catalog!r} has no namespace {namespace!r}; create it, or "
                f"correct the name of the table, {self.shown!r}"
            )

    def create(self, schema: pa.Schema) -> None:
        """Make the table, without partitions."""
        try:
            self._catalog.create_table_if_not_exists(self._sink.table, self.written_columns(schema))
        except Exception as error:
            raise SetupError(f"{self.what}: the table {self.shown!r} cannot be made: {first_line(error)}") from error
        self.opened()

    def require_layout(self, schema: pa.Schema) -> None:
        """Refuse a table that requires columns which the rows lack."""
        written = self.written_columns(schema).names
        lacking = [
            column.name
            for column in self._table.schema().columns
            if column.required and column.name not in written and column.write_default is None
        ]
        if lacking:
            raise SchemaError(
                f"{self.what}: column {lacking[0]!r} of the table {self.shown!r} is required, and the rows do not have "
                f"it; add it before the sink, or make it optional",
                column=lacking[0],
            )

    def columns_of_table(self) -> pa.Schema:
        """The columns of the table, in types that flows have where they have them."""
        return pa.schema([(column.name, _plain(column.type)) for column in self._table.schema().as_arrow()])

    def stored(self, kind: pa.DataType) -> pa.DataType:
        """A type without what Iceberg notes about fields."""
        return _plain(kind)

    def written_columns(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows, in types that Iceberg has, and the epoch."""
        # A change may give a flow other columns; those that are gone are null from then on.
        wanted = [pa.field(column.name, _widened(column.type)) for column in schema]
        return pa.schema([*wanted, pa.field(self.epoch_column, pa.int64())])

    # ── whose it is ───────────────────────────────────────────────────────────────────────────────────────────────

    def is_owned_by(self, owner: SinkOwner) -> bool:
        """Whether the table's properties name this sink."""
        found = self._table.properties
        return (found.get(JOB), found.get(SINK)) == (owner.job, owner.sink)

    def is_driven_by(self, owner: SinkOwner) -> bool:
        """Whether the table's properties name this process, too."""
        return self.is_owned_by(owner) and bool(self._table.properties.get(DRIVER) == owner.driver)

    def writer(self) -> str | None:
        """What the table's properties say."""
        found = self._table.properties
        if JOB not in found:
            return None
        return f"sink {found.get(SINK)!r} of flow {found.get(FLOW)!r} (job {found[JOB][:8]})"

    def epochs_found(self) -> str | None:
        """Whether rows have epochs."""
        from pyiceberg.expressions import NotNull

        if self.epoch_column not in self._table.schema().column_names:
            return None
        return "" if self._has_rows(NotNull(self.epoch_column)) else None

    def newest_epoch(self) -> int | None:
        """The epoch in the table's properties."""
        found = self._table.properties.get(EPOCH)
        return None if found is None else int(found)

    def _has_rows(self, condition: Any) -> bool:
        return bool(self._table.scan(row_filter=condition, limit=1).to_arrow().num_rows)

    def keyed_by(self) -> str | None:
        """The columns that the table's properties name."""
        found: str | None = self._table.properties.get(KEY)
        return found

    def key_mark(self) -> str:
        """The sink's key, for the table's properties."""
        return json.dumps(self.key)

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def scan(self, columns: Sequence[str], epoch: Epoch | None = None) -> Iterator[pa.RecordBatch]:
        """Rows of the newest snapshot."""
        from pyiceberg.expressions import AlwaysTrue, GreaterThanOrEqual

        condition = AlwaysTrue() if epoch is None else GreaterThanOrEqual(self.epoch_column, int(epoch))
        yield from self._table.scan(condition, tuple(columns)).to_arrow_batch_reader()

    def scan_before(self) -> Iterator[pa.RecordBatch]:
        """Rows of the snapshot before the newest epoch."""
        found = self._table.properties.get(BEFORE)
        if found is None:
            return
        try:
            yield from self._table.scan(snapshot_id=int(found)).to_arrow_batch_reader()
        except Exception as error:  # the package raises errors of many kinds
            raise lost_before(self.shown, f"snapshot {found}", error) from error

    def _rows_of(self, task: Any, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows of a data file, without those that were deleted."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        projected = self._table.schema().select(*names)
        columns = pa.schema([self.columns_of_table().field(name) for name in names])
        scan = ArrowScan(self._table.metadata, self._table.io, projected, AlwaysTrue())
        for batch in scan.to_record_batches([task]):
            yield with_columns(batch, columns)

    # ── a commit ──────────────────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self, rows: Iterator[pa.RecordBatch], columns: pa.Schema | None, epoch: Epoch | None, *, replaces: bool
    ) -> str | None:
        """Make one commit: a snapshot, or two if rows are removed."""
        from pyiceberg.expressions import GreaterThanOrEqual

        about = self._about(epoch)
        transaction = self._begun(about, columns)
        if replaces and epoch is not None and self._has_rows(old := GreaterThanOrEqual(self.epoch_column, int(epoch))):
            transaction.delete(old, snapshot_properties=about)
        if columns is None:
            transaction.append(self._table.schema().as_arrow().empty_table(), snapshot_properties=about)
        else:
            self._append(transaction, rows, columns, about)
        return self._committed(transaction)

    def upsert(self, change: Upserted, epoch: Epoch) -> str | None:
        """Make one commit: files with rows that go are removed, and their other rows added again with the new ones."""
        from pyiceberg.table.update.snapshot import ManageSnapshots

        there = self.columns_of_table()
        added = [column for column in change.columns or () if column.name not in there.names]
        columns = pa.schema([*there, *added])
        about = self._about(epoch)
        current = self._table.current_snapshot().snapshot_id
        if self.newest_epoch() != epoch:
            about[BEFORE] = str(current)
        key = list(self.key)
        going = pa.concat_tables([change.keys, unmatched(change.old.cast(change.keys.schema), key, change.keys)])
        lacking = change.columns is not None and not set(there.names) <= set(change.columns.names)
        hit, base = self._hit_files(going, there.names if lacking else key)
        base = pa.concat_tables([unmatched(base, key, change.old), change.before]) if lacking else change.before

        def rows() -> Iterator[pa.RecordBatch]:
            for task in hit:
                for batch in self._rows_of(task, there.names):
                    kept = batch.filter(pc.is_null(positions(pa.table(batch.select(key)), going)))
                    yield with_columns(kept, columns)
            for batch in change.rows():
                yield completed(batch, columns, base, key)
            for batch in unmatched(change.before, key, change.keys).to_batches():
                yield with_columns(batch, columns)

        transaction = self._begun(about, columns if added else None)
        if hit:
            with transaction.update_snapshot(snapshot_properties=about).overwrite() as removal:
                for task in hit:
                    removal.delete_data_file(task.file)
        self._append(transaction, rows(), columns, about)
        if BEFORE in about:
            # A tag keeps a snapshot when others are expired. It comes last: of several demands on references PyIceberg
            # sends the first, and that must be the one that fences.
            with ManageSnapshots(transaction) as tags:
                tags.create_tag(current, self._tag)
        return self._committed(transaction)

    @property
    def _tag(self) -> str:
        assert self.owner is not None, "only a sink that was claimed writes"
        return f"midstream-before-{self.owner.sink}"

    def _hit_files(self, keys: pa.Table, names: Sequence[str]) -> tuple[list[Any], pa.Table]:
        """The data files with rows of these keys, and these columns of those rows."""
        found: list[Any] = []
        parts: list[pa.RecordBatch] = []
        kinds = pa.schema([self.columns_of_table().field(name) for name in names])
        for task in self._table.scan(_range_of(keys)).plan_files():
            count = len(parts)
            for batch in self._rows_of(task, names):
                part = batch.filter(pc.is_valid(positions(pa.table(batch.select(keys.column_names)), keys)))
                if part.num_rows:
                    parts.append(part)
            if len(parts) > count:
                found.append(task)
        return found, pa.Table.from_batches(parts, kinds)

    def _append(
        self, transaction: Any, rows: Iterator[pa.RecordBatch], columns: pa.Schema, about: dict[str, str]
    ) -> None:
        if self._table.spec().is_unpartitioned():
            transaction.append(pa.RecordBatchReader.from_batches(columns, rows), snapshot_properties=about)
        else:
            for part in _slices(rows, columns):
                transaction.append(part, snapshot_properties=about)

    def _about(self, epoch: Epoch | None) -> dict[str, str]:
        owner = self.owner
        assert owner is not None, "only a sink that was claimed writes"
        about = {JOB: owner.job, FLOW: owner.flow, SINK: owner.sink, DRIVER: owner.driver}
        if self.key:
            about[KEY] = self.key_mark()
        return about if epoch is None else {**about, EPOCH: str(int(epoch))}

    def _begun(self, about: Mapping[str, str], columns: pa.Schema | None) -> Any:
        """A transaction of PyIceberg that also says what a commit is about, and adds columns that the table lacks."""
        transaction = self._table.transaction()
        transaction.set_properties(dict(about))
        if columns is not None and not set(columns.names) <= set(self._table.schema().column_names):
            with transaction.update_schema() as update:
                update.union_by_name(columns)
        return transaction

    def _committed(self, transaction: Any) -> str | None:
        from pyiceberg.exceptions import CommitFailedException

        before = {snapshot.snapshot_id for snapshot in self._table.snapshots()}
        try:
            transaction.commit_transaction()
        except CommitFailedException as error:
            return first_line(error)
        _sync(self._table, before)
        return None


def _range_of(keys: pa.Table) -> Any:
    """A condition that holds for all rows with these keys, by which files are left out."""
    from pyiceberg.expressions import AlwaysTrue, And, GreaterThanOrEqual, LessThanOrEqual

    condition: Any = AlwaysTrue()
    for name, low, high in ranges(keys):
        condition = And(condition, And(GreaterThanOrEqual(name, low), LessThanOrEqual(name, high)))
    return condition


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type as flows have it, without what Iceberg notes about fields; itself if flows do not have it."""
    try:
        return parse_ddl(to_ddl(pa.schema([("x", kind)]))).field("x").type
    except SchemaError:
        return kind


def _widened(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_int8(kind) or pa.types.is_int16(kind):
        return pa.int32()
    if pa.types.is_list(kind):
        return pa.list_(_widened(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_widened(kind.key_type), _widened(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _widened(each.type)) for each in kind])
    return kind


def _slices(batches: Iterator[pa.RecordBatch], columns: pa.Schema) -> Iterator[pa.Table]:
    """The rows in tables of bounded size, at least one."""
    gathered: list[pa.RecordBatch] = []
    for batch in batches:
        gathered.append(batch)
        if sum(each.nbytes for each in gathered) >= SLICE_BYTES:
            yield pa.Table.from_batches(gathered, columns)
            gathered = []
    if gathered:
        yield pa.Table.from_batches(gathered, columns)


def _sync(table: Any, before: set[int]) -> None:
    """Sync what new snapshots consist of, on this machine; PyIceberg leaves that to the system.

    They are committed by then, so somebody may have compacted the table and removed some of it already.
    """
    written = [table.metadata_location]
    for snapshot in table.snapshots():
        if snapshot.snapshot_id in before:
            continue
        written.append(snapshot.manifest_list)
        try:
            for manifest in snapshot.manifests(table.io):
                if manifest.added_snapshot_id == snapshot.snapshot_id:
                    written.append(manifest.manifest_path)
                    written += [entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)]
        except FileNotFoundError:
            continue
    sync_remaining([path for each in written if (path := _local(each)) is not None])


def _local(location: str) -> str | None:
    """The path of a file on this machine; None if it is elsewhere."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        return unquote(parts.path)
    return location if not parts.scheme else None
