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
import itertools
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from midstream.data.schema import type_name
from midstream.errors import CheckpointError, FlowError, SchemaError, SetupError
from midstream.flow.delta_sink import DeltaSink
from midstream.flow.model import Graph, Sink
from midstream.flow.sink_owner import SinkOwner
from midstream.ids import Epoch
from midstream.storage.disk import sync_remaining

__all__ = ["check_tables", "claim_tables", "replace_epoch"]

LOG = "_delta_log"
OWNER, DRIVER = "midstream.owner", "midstream.driver"
ABOUT = "midstream"
"""The entry of a commit that names its writer in words."""

TRIES = 8
AHEAD = 2
"""Most batches that wait to be written."""


# ── before the job starts ─────────────────────────────────────────────────────────────────────────────────────────


def check_tables(graph: Graph, job: str) -> None:
    """Refuse tables that cannot be written, or that are not this job's. Only reads."""
    tables: dict[str, str] = {}
    for name, sink, schema in _delta_sinks(graph):
        what = f"sink {name!r}"
        _require_deltalake(what)
        if (other := tables.setdefault(sink.location, name)) != name:
            raise FlowError(
                f"the sinks {other!r} and {name!r} both write to the table {sink.path!r}; a table has one owner. "
                f"Unite the streams before the sink, or use a separate table for each"
            )
        table = _opened(sink, what)
        if table is None:
            _require_free_folder(sink, what)
            continue
        _require_types(sink, table, schema, what)
        if list(sink.partition_by) != table.metadata().partition_columns:
            raise CheckpointError(
                f"{what}: the table {sink.path!r} is partitioned by {table.metadata().partition_columns}, and the sink "
                f"says partition_by={list(sink.partition_by)}; the table keeps the columns with which it was made"
            )
        _check_owner(sink, table, SinkOwner(job, graph.name, name, ""), what)


def claim_tables(graph: Graph, job: str, driver: str) -> Graph:
    """Claim the tables for this job and this driver process; return the graph whose sinks may write."""
    payloads = dict(graph.payloads)
    for name, sink, schema in _delta_sinks(graph):
        owner = SinkOwner(job, graph.name, name, driver)
        owned = payloads[name] = sink.owned_by(owner)
        what = f"sink {name!r}"
        table = _opened(owned, what) or _created(owned, schema, what)
        _check_owner(owned, table, owner, what)
        try:
            found = _write(owned, table, _no_rows(table), None)
        except Exception as error:  # the package raises errors of several kinds, plain ones among them
            raise SetupError(f"{what}: the table {sink.path!r} cannot be written: {_first_line(error)}") from error
        if found is not None:
            raise CheckpointError(
                f"{what}: another driver writes to the table {sink.path!r} at this moment; only one driver at a time "
                f"may run a job ({found})"
            )
    return replace(graph, payloads=payloads)


def _delta_sinks(graph: Graph) -> Iterator[tuple[str, DeltaSink, pa.Schema]]:
    for op in graph.of(Sink):
        target = graph.payloads.get(op.name)
        if isinstance(target, DeltaSink):
            yield op.name, target, op.schema


def _require_deltalake(what: str) -> None:
    try:
        import deltalake  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"{what}: a DeltaSink needs the deltalake package on the driver ({error}); pip install 'midstream[delta]'"
        ) from None


def _opened(sink: DeltaSink, what: str) -> Any:
    """The newest version of the table; None if there is no table."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    if os.path.isfile(sink.location):
        raise CheckpointError(f"{what}: {sink.path!r} is a file; a DeltaSink needs a folder")
    options = dict(sink.storage_options)
    try:
        return DeltaTable(sink.location, storage_options=options) if _exists(sink) else None
    except (DeltaError, OSError, ValueError) as error:
        raise SetupError(f"{what}: the table {sink.path!r} cannot be read: {_first_line(error)}") from error


def _exists(sink: DeltaSink) -> bool:
    from deltalake import DeltaTable

    return bool(DeltaTable.is_deltatable(sink.location, dict(sink.storage_options)))


def _created(sink: DeltaSink, schema: pa.Schema, what: str) -> Any:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        if os.path.isabs(sink.location):
            os.makedirs(sink.location, exist_ok=True)
        return DeltaTable.create(
            sink.location,
            _columns(sink, schema),
            mode="ignore",
            partition_by=list(sink.partition_by) or None,
            storage_options=dict(sink.storage_options),
        )
    except (DeltaError, OSError, ValueError) as error:
        raise SetupError(f"{what}: the table {sink.path!r} cannot be made: {_first_line(error)}") from error


def _require_free_folder(sink: DeltaSink, what: str) -> None:
    """Refuse a local folder with other data: the table would look like a part of it."""
    place = sink.location
    if os.path.isdir(place) and (found := sorted(os.listdir(place))):
        raise CheckpointError(
            f"{what}: the folder {sink.path!r} holds other data ({found[0]}) and is not a table of Delta Lake; use "
            f"a new folder"
        )


def _require_types(sink: DeltaSink, table: Any, schema: pa.Schema, what: str) -> None:
    """Refuse columns of other types than the table's. Columns that it lacks are added to it."""
    wanted = [*schema, pa.field(sink.epoch_column, pa.int64())]
    there = {field.name: field.type for field in pa.schema(table.schema())}
    spelt = {name.lower(): name for name in there}
    for field in wanted:
        if field.name not in there and (other := spelt.get(field.name.lower())) is not None:
            raise SchemaError(
                f"{what}: the column {field.name!r} differs by case only from {other!r} in the table {sink.path!r}, "
                f"and Delta Lake does not tell them apart; rename it before the sink",
                column=field.name,
            )
        if field.name in there and not _stored(field.type).equals(there[field.name]):
            raise SchemaError(
                f"{what}: column {field.name!r} is {type_name(field.type)}, and in the table {sink.path!r} it is "
                f"{type_name(there[field.name])}; cast it before the sink, or use another table",
                column=field.name,
            )


def _stored(kind: pa.DataType) -> pa.DataType:
    """The type as a table of Delta Lake gives it back."""
    from deltalake import Schema

    return pa.schema(Schema.from_arrow(pa.schema([pa.field("x", kind)]))).field("x").type


def _check_owner(sink: DeltaSink, table: Any, owner: SinkOwner, what: str) -> None:
    number = table.transaction_version(OWNER)
    if number == _number_of(owner):
        return
    if number is not None:
        found = _last_writer(table)
        who = f"sink {found['sink']!r} of flow {found['flow']!r} (job {found['job'][:8]})" if found else "another sink"
        raise CheckpointError(
            f"{what}: the table {sink.path!r} belongs to {who}, not to this job ({owner.job[:8]}). Use another table; "
            f"or, to continue that job, start with its checkpoint"
        )
    if sink.epoch_column in [field.name for field in table.schema().fields] and (newest := _newest(sink, table)):
        raise CheckpointError(
            f"{what}: the table {sink.path!r} holds rows of epochs (up to {newest}), and does not say which job wrote "
            f"them. Use another table, or set their {sink.epoch_column!r} to null"
        )


def _newest(sink: DeltaSink, table: Any) -> str:
    """The newest epoch of the rows in a table, as text; empty if they have none."""
    import pyarrow.compute as pc

    numbers = table.to_pyarrow_table(columns=[sink.epoch_column]).column(0)
    newest = pc.max(numbers).as_py()
    return "" if newest is None else str(newest)


def _last_writer(table: Any) -> dict[str, str] | None:
    for commit in table.history(100):
        if found := commit.get(ABOUT):
            about: dict[str, str] = json.loads(found)
            return about
    return None


# ── an epoch ──────────────────────────────────────────────────────────────────────────────────────────────────────


def replace_epoch(sink: DeltaSink, batches: Callable[[], Iterable[pa.RecordBatch]], epoch: Epoch) -> None:
    """Write an epoch in one commit. If it raises, nothing has changed, unless the answer to the commit was lost.

    In this order: 1. read the table's newest version, and check that no other driver has taken over; 2. write the
    rows' files, which no reader sees; 3. commit them, with the epoch's number; an epoch that is not newer than the
    newest one replaces its rows, and those of later epochs if the job went back. If another writer commits in between,
    for example to compact the table, this begins again.
    """
    what = f"the table {sink.path!r}"
    for _ in range(TRIES):
        table = _opened(sink, what)
        _require_mine(sink, table)
        if (conflict := _replace(sink, table, batches(), epoch)) is None:
            return
    raise SetupError(f"{what}: other writers keep changing it, so no epoch can be written ({conflict})")


def _replace(sink: DeltaSink, table: Any, batches: Iterable[pa.RecordBatch], epoch: Epoch) -> str | None:
    newest = table.transaction_version(_app_of(sink))
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:
        if newest is None or newest < epoch:
            return None  # nothing was written, nothing is to be
        return _write(sink, table, _no_rows(table), epoch, replaces=True)
    _require_types(sink, table, first.schema, f"the table {sink.path!r}")
    replaces = newest is not None and newest >= epoch
    return _write(sink, table, _numbered(sink, first, rows, epoch), epoch, replaces=replaces)


def _numbered(
    sink: DeltaSink, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch], epoch: Epoch
) -> Iterator[pa.RecordBatch]:
    columns = _columns(sink, first.schema)
    for batch in itertools.chain([first], rest):
        numbers = pa.repeat(pa.scalar(int(epoch), pa.int64()), batch.num_rows)
        yield pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=columns)


def _columns(sink: DeltaSink, schema: pa.Schema) -> pa.Schema:
    """The columns of a table for these rows."""
    # A change may give a flow other columns; those that are gone are null from then on.
    return pa.schema([*(field.with_nullable(True) for field in schema), pa.field(sink.epoch_column, pa.int64())])


def _write(
    sink: DeltaSink, table: Any, batches: Iterator[pa.RecordBatch], epoch: Epoch | None, *, replaces: bool = False
) -> str | None:
    """Commit rows; return the conflict if another commit got ahead of this one."""
    from deltalake import CommitProperties, Transaction, write_deltalake
    from deltalake.exceptions import CommitFailedError

    owner = sink.owner
    assert owner is not None, "only a sink that was claimed writes"
    transactions = [Transaction(OWNER, _number_of(owner)), Transaction(DRIVER, _number(owner.driver))]
    about = {"job": owner.job, "flow": owner.flow, "sink": owner.sink}
    if epoch is not None:
        transactions.append(Transaction(_app_of(sink), int(epoch)))
    properties = CommitProperties(custom_metadata={ABOUT: json.dumps(about)}, app_transactions=transactions)
    column = sink.epoch_column.replace('"', '""')
    before = table.version()

    def write(rows: pa.RecordBatchReader) -> None:
        write_deltalake(
            table,
            rows,
            mode="overwrite" if replaces else "append",
            predicate=f'"{column}" >= {int(epoch)}' if replaces and epoch is not None else None,
            schema_mode="merge",
            commit_properties=properties,
        )

    try:
        _hand_over(batches, write)
    except CommitFailedError as error:
        return _first_line(error)
    _sync(sink, before)
    return None


def _require_mine(sink: DeltaSink, table: Any) -> None:
    owner = sink.owner
    assert owner is not None, "only a sink that was claimed writes"
    if table is None:
        raise CheckpointError(f"the table {sink.path!r} is gone; restore it, or start the job with another one")
    found = table.transaction_version(OWNER), table.transaction_version(DRIVER)
    if found != (_number_of(owner), _number(owner.driver)):
        raise CheckpointError(
            f"the table {sink.path!r} is no longer written by this driver: its job was restarted elsewhere, or another "
            f"one has taken it. Only one driver at a time may run a job"
        )


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


def _no_rows(table: Any) -> Iterator[pa.RecordBatch]:
    columns = pa.schema(table.schema())
    yield pa.RecordBatch.from_pylist([], schema=columns)


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


def _app_of(sink: DeltaSink) -> str:
    """The name of the transaction that has the newest epoch."""
    assert sink.owner is not None, "only a sink that was claimed writes"
    return f"midstream-{sink.owner.job}-{sink.owner.sink}"


def _number_of(owner: SinkOwner) -> int:
    return _number(f"{owner.job}/{owner.sink}")


def _number(name: str) -> int:
    """A number of 63 bits, which a transaction can hold, that stands for this name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
