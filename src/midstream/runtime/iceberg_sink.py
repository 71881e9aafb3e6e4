"""Writes tables of Apache Iceberg, on both runtimes: an epoch is one commit, and replaces what it wrote before.

Whose a table is, which life of the driver may write and the newest epoch are properties of the table, which change in
the same commit as the rows. Each commit, also that of a claim, makes a snapshot and counts only if the table's snapshot
is the one that it was made for. So a driver that was replaced, but does not know it yet, cannot write.

The table is written by PyIceberg, not by Spark: it works with all versions of Spark, on both runtimes, and without a
Java archive in the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from midstream.data.schema import parse_ddl, to_ddl, type_name
from midstream.errors import CheckpointError, FlowError, SchemaError, SetupError
from midstream.flow.iceberg_sink import IcebergSink
from midstream.flow.model import Graph, Sink
from midstream.flow.sink_owner import SinkOwner
from midstream.ids import Epoch
from midstream.storage.disk import sync_remaining

__all__ = ["check_tables", "claim_tables", "replace_epoch"]

JOB, FLOW, SINK, DRIVER, EPOCH = (f"midstream.{name}" for name in ("job", "flow", "sink", "driver", "epoch"))
RETRIES = "commit.retry.num-retries"

TRIES = 8
SLICE_BYTES = 128 << 20
"""Most bytes of rows in memory that go to a partitioned table at once: PyIceberg sorts them by partition."""


# ── before the job starts ─────────────────────────────────────────────────────────────────────────────────────────


def check_tables(graph: Graph, job: str) -> None:
    """Refuse tables that cannot be written, or that are not this job's. Only reads."""
    tables: dict[Any, str] = {}
    for name, sink, schema in _iceberg_sinks(graph):
        what = f"sink {name!r}"
        _require_pyiceberg(what)
        if (other := tables.setdefault(sink.place, name)) != name:
            raise FlowError(
                f"the sinks {other!r} and {name!r} both write to the table {sink.table!r}; a table has one owner. "
                f"Unite the streams before the sink, or use a separate table for each"
            )
        with _catalog(sink, what) as catalog:
            table = _opened(catalog, sink, what)
            if table is None:
                _require_namespace(catalog, sink, what)
                continue
            _require_types(table, _columns(sink, schema), sink, what)
            _check_owner(sink, table, SinkOwner(job, graph.name, name, ""), what)


def claim_tables(graph: Graph, job: str, driver: str) -> Graph:
    """Claim the tables for this job and this driver process; return the graph whose sinks may write."""
    payloads = dict(graph.payloads)
    for name, sink, schema in _iceberg_sinks(graph):
        owner = SinkOwner(job, graph.name, name, driver)
        owned = payloads[name] = sink.owned_by(owner)
        what = f"sink {name!r}"
        with _catalog(owned, what) as catalog:
            table = _opened(catalog, owned, what) or _created(catalog, owned, schema, what)
            _check_owner(owned, table, owner, what)
            try:
                conflict = _commit(owned, table, iter(()), None, replaces=False)
            except Exception as error:  # the package raises errors of many kinds, plain ones among them
                raise SetupError(f"{what}: the table {sink.table!r} cannot be written: {_first_line(error)}") from error
        if conflict is not None:
            raise CheckpointError(
                f"{what}: somebody else writes to the table {sink.table!r} at this moment, so it cannot be claimed; "
                f"start again. Only one driver at a time may run a job ({conflict})"
            )
    return replace(graph, payloads=payloads)


def _iceberg_sinks(graph: Graph) -> Iterator[tuple[str, IcebergSink, pa.Schema]]:
    for op in graph.of(Sink):
        target = graph.payloads.get(op.name)
        if isinstance(target, IcebergSink):
            yield op.name, target, op.schema


def _require_pyiceberg(what: str) -> None:
    try:
        import pyiceberg  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"{what}: an IcebergSink needs PyIceberg on the driver ({error}); pip install 'midstream[iceberg]', and "
            f"what PyIceberg needs for your catalog, such as 'pyiceberg[sql-sqlite]'"
        ) from None


@contextmanager
def _catalog(sink: IcebergSink, what: str) -> Iterator[Any]:
    """The sink's catalog. Tables that it gives are of use while it is open."""
    from pyiceberg.catalog import load_catalog

    try:
        catalog = load_catalog(sink.catalog, **sink.catalog_options)
    except Exception as error:
        raise SetupError(f"{what}: the catalog {sink.catalog!r} cannot be opened: {_first_line(error)}") from error
    with catalog:
        yield catalog


def _opened(catalog: Any, sink: IcebergSink, what: str) -> Any:
    """The table as it is now; None if there is none."""
    from pyiceberg.exceptions import NoSuchTableError

    try:
        table = catalog.load_table(sink.table)
    except NoSuchTableError:
        return None
    except Exception as error:
        raise SetupError(f"{what}: the table {sink.table!r} cannot be read: {_first_line(error)}") from error
    # By default PyIceberg puts rows that met a conflict on top of the newer snapshot, whoever made it. A driver that
    # was replaced must not; so in its eyes, not in the table's, there are no retries. Ours begin with reading.
    table.metadata = table.metadata.model_copy(update={"properties": {**table.metadata.properties, RETRIES: "0"}})
    return table


def _require_namespace(catalog: Any, sink: IcebergSink, what: str) -> None:
    namespace = sink.table.rpartition(".")[0]
    if not catalog.namespace_exists(namespace):
        raise SetupError(
            f"{what}: the catalog {sink.catalog!r} has no namespace {namespace!r}; create it, or correct the name of "
            f"the table, {sink.table!r}"
        )


def _created(catalog: Any, sink: IcebergSink, schema: pa.Schema, what: str) -> Any:
    try:
        catalog.create_table_if_not_exists(sink.table, _columns(sink, schema))
    except Exception as error:
        raise SetupError(f"{what}: the table {sink.table!r} cannot be made: {_first_line(error)}") from error
    return _opened(catalog, sink, what)


def _require_types(table: Any, wanted: pa.Schema, sink: IcebergSink, what: str) -> None:
    """Refuse columns of other types than the table's. Columns that it lacks are added to it."""
    there = {column.name: column.type for column in table.schema().as_arrow()}
    spelt = {name.lower(): name for name in there}
    for column in wanted:
        if column.name not in there:
            if (other := spelt.get(column.name.lower())) is not None:
                raise SchemaError(
                    f"{what}: the column {column.name!r} differs by case only from {other!r} in the table "
                    f"{sink.table!r}, and Spark does not tell them apart; rename it before the sink",
                    column=column.name,
                )
        elif not _plain(column.type).equals(found := _plain(there[column.name])):
            raise SchemaError(
                f"{what}: column {column.name!r} is {type_name(column.type)}, and in the table {sink.table!r} it is "
                f"{type_name(found)}; cast it before the sink, or use another table",
                column=column.name,
            )
    lacking = [
        column.name
        for column in table.schema().columns
        if column.required and column.name not in wanted.names and column.write_default is None
    ]
    if lacking:
        raise SchemaError(
            f"{what}: column {lacking[0]!r} of the table {sink.table!r} is required, and the rows do not have it; add "
            f"it before the sink, or make it optional",
            column=lacking[0],
        )


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type as flows have it, without what Iceberg notes about fields."""
    return parse_ddl(to_ddl(pa.schema([("x", kind)]))).field("x").type


def _check_owner(sink: IcebergSink, table: Any, owner: SinkOwner, what: str) -> None:
    from pyiceberg.expressions import NotNull

    found = table.properties
    if (found.get(JOB), found.get(SINK)) == (owner.job, owner.sink):
        return
    if JOB in found:
        raise CheckpointError(
            f"{what}: the table {sink.table!r} belongs to sink {found.get(SINK)!r} of flow {found.get(FLOW)!r} (job "
            f"{found[JOB][:8]}), not to this job ({owner.job[:8]}). Use another table; or, to continue that job, start "
            f"with its checkpoint"
        )
    if sink.epoch_column in table.schema().column_names and _has_rows(table, NotNull(sink.epoch_column)):
        raise CheckpointError(
            f"{what}: the table {sink.table!r} holds rows of epochs, and does not say which job wrote them. Use "
            f"another table, or set their {sink.epoch_column!r} to null"
        )


def _has_rows(table: Any, condition: Any) -> bool:
    return bool(table.scan(row_filter=condition, limit=1).to_arrow().num_rows)


# ── an epoch ──────────────────────────────────────────────────────────────────────────────────────────────────────


def replace_epoch(sink: IcebergSink, batches: Callable[[], Iterable[pa.RecordBatch]], epoch: Epoch) -> None:
    """Write an epoch in one commit. If it raises, nothing has changed, unless the answer to the commit was lost.

    In this order: 1. read the table, and check that no other driver has taken over; 2. write the rows' files, which no
    reader sees; 3. commit them, with the epoch's number; an epoch that is not newer than the newest one replaces its
    rows, and those of later epochs if the job went back. If another writer commits in between, for example to compact
    the table, this begins again.
    """
    what = f"the table {sink.table!r}"
    conflict: str | None = None
    with _catalog(sink, what) as catalog:
        for _ in range(TRIES):
            table = _opened(catalog, sink, what)
            _require_mine(sink, table)
            if (conflict := _replace(sink, table, batches(), epoch)) is None:
                return
    raise SetupError(f"{what}: other writers keep changing it, so no epoch can be written ({conflict})")


def _replace(sink: IcebergSink, table: Any, batches: Iterable[pa.RecordBatch], epoch: Epoch) -> str | None:
    newest = int(table.properties.get(EPOCH, -1))
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:
        if newest < epoch:
            return None  # nothing was written, nothing is to be
        return _commit(sink, table, iter(()), epoch, replaces=True)
    columns = _columns(sink, first.schema)
    _require_types(table, columns, sink, f"the table {sink.table!r}")
    numbered = (_numbered(batch, columns, epoch) for batch in chain([first], rows))
    return _commit(sink, table, numbered, epoch, replaces=newest >= epoch, columns=columns)


def _numbered(batch: pa.RecordBatch, columns: pa.Schema, epoch: Epoch) -> pa.RecordBatch:
    numbers = pa.repeat(pa.scalar(int(epoch), pa.int64()), batch.num_rows)
    arrays = [array.cast(column.type) for array, column in zip([*batch.columns, numbers], columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _columns(sink: IcebergSink, schema: pa.Schema) -> pa.Schema:
    """The columns of a table for these rows. Iceberg has no whole numbers of 8 and 16 bits."""
    # A change may give a flow other columns; those that are gone are null from then on.
    wanted = [pa.field(column.name, _widened(column.type)) for column in schema]
    return pa.schema([*wanted, pa.field(sink.epoch_column, pa.int64())])


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


def _commit(
    sink: IcebergSink,
    table: Any,
    batches: Iterator[pa.RecordBatch],
    epoch: Epoch | None,
    *,
    replaces: bool,
    columns: pa.Schema | None = None,
) -> str | None:
    """Commit rows; return the conflict if another commit got ahead of this one."""
    from pyiceberg.exceptions import CommitFailedException
    from pyiceberg.expressions import GreaterThanOrEqual

    owner = sink.owner
    assert owner is not None, "only a sink that was claimed writes"
    about = {JOB: owner.job, FLOW: owner.flow, SINK: owner.sink, DRIVER: owner.driver}
    if epoch is not None:
        about[EPOCH] = str(int(epoch))
    before = {snapshot.snapshot_id for snapshot in table.snapshots()}
    transaction = table.transaction()
    transaction.set_properties(about)
    if columns is not None and not set(columns.names) <= set(table.schema().column_names):
        with transaction.update_schema() as update:
            update.union_by_name(columns)
    if replaces and epoch is not None and _has_rows(table, old := GreaterThanOrEqual(sink.epoch_column, int(epoch))):
        transaction.delete(old, snapshot_properties=about)
    if columns is None:
        transaction.append(table.schema().as_arrow().empty_table(), snapshot_properties=about)
    elif table.spec().is_unpartitioned():
        transaction.append(pa.RecordBatchReader.from_batches(columns, batches), snapshot_properties=about)
    else:
        for part in _slices(batches, columns):
            transaction.append(part, snapshot_properties=about)
    try:
        transaction.commit_transaction()
    except CommitFailedException as error:
        return _first_line(error)
    _sync(table, before)
    return None


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


def _require_mine(sink: IcebergSink, table: Any) -> None:
    owner = sink.owner
    assert owner is not None, "only a sink that was claimed writes"
    if table is None:
        raise CheckpointError(f"the table {sink.table!r} is gone; restore it, or start the job with another one")
    found = table.properties
    if (found.get(JOB), found.get(SINK), found.get(DRIVER)) != (owner.job, owner.sink, owner.driver):
        raise CheckpointError(
            f"the table {sink.table!r} is no longer written by this driver: its job was restarted elsewhere, or "
            f"another one has taken it. Only one driver at a time may run a job"
        )


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


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
