"""Tables of a lake that sinks own: whose one is, who may write, and how an epoch is replaced in one commit.

A format says how its tables are opened, made and written (:class:`OwnedTable`); what is refused, and in which words, is
the same for all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, Self

import pyarrow as pa

from midstream.data.schema import type_name
from midstream.errors import CheckpointError, FlowError, MidstreamError, SchemaError, SetupError, first_line
from midstream.flow.delta_sink import DeltaSink
from midstream.flow.iceberg_sink import IcebergSink
from midstream.flow.model import Graph, Sink
from midstream.flow.sink_owner import SinkOwner
from midstream.ids import Epoch
from midstream.runtime.lake_upsert import KeyedTable, require_unique_keys, upsert

__all__ = ["LakeSink", "OwnedTable", "Rows", "check_tables", "claim_tables", "replace_epoch", "shared_table"]

LakeSink = DeltaSink | IcebergSink
Rows = Callable[[], Iterable[pa.RecordBatch]]
"""Makes the rows of an epoch; called again when the epoch begins again."""

TRIES = 8


class OwnedTable(KeyedTable):
    """The table of a sink. It is :meth:`opened` first, and again after each commit."""

    sink_type: ClassVar[type[LakeSink]]
    case_blind: ClassVar[str]
    """Who does not tell apart columns whose names differ by case only."""

    def __init__(self, sink: LakeSink, what: str) -> None:
        self.what = what
        """The name of the sink in errors."""
        self.shown = sink.shown
        self.epoch_column = sink.epoch_column
        self.key = sink.key
        self.owner = sink.owner

    @staticmethod
    @abstractmethod
    def require_package(what: str) -> None:
        """Refuse a driver without the package that writes such tables."""

    @classmethod
    @abstractmethod
    def at(cls, sink: Any, what: str) -> AbstractContextManager[Self]:
        """The table of a sink, which is of use inside."""

    @abstractmethod
    def opened(self) -> bool:
        """Read what the table is now. False if there is none."""

    @abstractmethod
    def require_place(self) -> None:
        """Refuse a place where no table can be made."""

    @abstractmethod
    def create(self, schema: pa.Schema) -> None:
        """Make the table, unless it was made meanwhile, and open it."""

    @abstractmethod
    def require_layout(self, schema: pa.Schema) -> None:
        """Refuse a table that is laid out otherwise than the sink says, or needs columns that the rows lack."""

    @abstractmethod
    def stored(self, kind: pa.DataType) -> pa.DataType:
        """A type of rows, or of the table, as it is compared."""

    @abstractmethod
    def written_columns(self, schema: pa.Schema) -> pa.Schema:
        """The columns that rows have in the table, that of the epoch last."""

    @abstractmethod
    def is_owned_by(self, owner: SinkOwner) -> bool:
        """Whether the table is that of this sink of this job."""

    @abstractmethod
    def is_driven_by(self, owner: SinkOwner) -> bool:
        """Whether this driver process may write."""

    @abstractmethod
    def writer(self) -> str | None:
        """In words, whose the table is. None if it has no owner."""

    @abstractmethod
    def epochs_found(self) -> str | None:
        """In words, which epochs the rows have. None if they have none."""

    @abstractmethod
    def keyed_by(self) -> str | None:
        """What commits say about the key by which rows of the table were replaced. None if they were not."""

    @abstractmethod
    def key_mark(self) -> str:
        """What a commit says about this sink's key."""

    @abstractmethod
    def commit(
        self, rows: Iterator[pa.RecordBatch], columns: pa.Schema | None, epoch: Epoch | None, *, replaces: bool
    ) -> str | None:
        """Add rows in one commit, without those of this epoch and later ones if it ``replaces`` them.

        The commit says who owns the table and, unless it is None, the epoch. It counts only if nobody has claimed the
        table since it was opened. Returns the conflict if another commit got ahead of this one. ``columns`` are those
        of the rows; None if there are no rows.
        """


# ── before the job starts ─────────────────────────────────────────────────────────────────────────────────────────


def check_tables(kind: type[OwnedTable], graph: Graph, job: str) -> None:
    """Refuse tables that cannot be written, or that are not this job's. Only reads."""
    tables: dict[Any, str] = {}
    for name, sink, schema in _sinks(kind, graph):
        what = f"sink {name!r}"
        kind.require_package(what)
        if (other := tables.setdefault(sink.place, name)) != name:
            raise shared_table(other, name, sink.shown)
        with kind.at(sink, what) as table:
            if not table.opened():
                table.require_place()
                continue
            _require_types(table, schema)
            table.require_layout(schema)
            _check_owner(table, SinkOwner(job, graph.name, name, ""))
            _check_key(table)


def claim_tables(kind: type[OwnedTable], graph: Graph, job: str, driver: str) -> Graph:
    """Claim the tables for this job and this driver process; return the graph whose sinks may write."""
    payloads = dict(graph.payloads)
    for name, sink, schema in _sinks(kind, graph):
        owner = SinkOwner(job, graph.name, name, driver)
        owned = payloads[name] = sink.owned_by(owner)
        with kind.at(owned, f"sink {name!r}") as table:
            if not table.opened():
                table.create(schema)
            _check_owner(table, owner)
            try:
                conflict = table.commit(iter(()), None, None, replaces=False)
            except Exception as error:  # the packages raise errors of many kinds, plain ones among them
                raise SetupError(
                    f"{table.what}: the table {table.shown!r} cannot be written: {first_line(error)}"
                ) from error
            if conflict is not None:
                raise CheckpointError(
                    f"{table.what}: somebody else writes to the table {table.shown!r} at this moment, so it cannot be "
                    f"claimed; start again. Only one driver at a time may run a job ({conflict})"
                )
    return replace(graph, payloads=payloads)


def shared_table(one: str, other: str, table: str) -> FlowError:
    """The error for two sinks that write to one table."""
    return FlowError(
        f"the sinks {one!r} and {other!r} both write to the table {table!r}; a table has one owner. Unite the streams "
        f"before the sink, or use a separate table for each"
    )


def _sinks(kind: type[OwnedTable], graph: Graph) -> Iterator[tuple[str, LakeSink, pa.Schema]]:
    for op in graph.of(Sink):
        target = graph.payloads.get(op.name)
        if isinstance(target, kind.sink_type):
            yield op.name, target, op.schema


def _require_types(table: OwnedTable, schema: pa.Schema) -> None:
    """Refuse columns of other types than the table's. Columns that it lacks are added to it."""
    there = table.columns_of_table()
    spelt = {name.lower(): name for name in there.names}
    for column in table.written_columns(schema):
        if column.name not in there.names:
            if (other := spelt.get(column.name.lower())) is not None:
                raise SchemaError(
                    f"{table.what}: the column {column.name!r} differs by case only from {other!r} in the table "
                    f"{table.shown!r}, and {table.case_blind} does not tell them apart; rename it before the sink",
                    column=column.name,
                )
        elif not table.stored(column.type).equals(found := table.stored(there.field(column.name).type)):
            raise SchemaError(
                f"{table.what}: column {column.name!r} is {type_name(column.type)}, and in the table {table.shown!r} "
                f"it is {type_name(found)}; cast it before the sink, or use another table",
                column=column.name,
            )


def _check_owner(table: OwnedTable, owner: SinkOwner) -> None:
    if table.is_owned_by(owner):
        return
    if (other := table.writer()) is not None:
        raise CheckpointError(
            f"{table.what}: the table {table.shown!r} belongs to {other}, not to this job ({owner.job[:8]}). Use "
            f"another table; or, to continue that job, start with its checkpoint"
        )
    if (epochs := table.epochs_found()) is not None:
        raise CheckpointError(
            f"{table.what}: the table {table.shown!r} holds rows of epochs{epochs}, and does not say which job wrote "
            f"them. Use another table, or set their {table.epoch_column!r} to null"
        )


def _check_key(table: OwnedTable) -> None:
    """Refuse a table whose rows were replaced by another key, or in which keys are not unique."""
    found = table.keyed_by()
    if found is not None and found != (table.key_mark() if table.key else None):
        wanted = f"mode='upsert' and key={list(table.key)}" if table.key else "mode='append'"
        raise CheckpointError(
            f"{table.what}: rows of the table {table.shown!r} were upserted by another key than the sink has, which "
            f"says {wanted}, so an epoch that runs again could not be undone. Use the same mode and key, or another "
            f"table"
        )
    if table.key and found is None and set(table.key) <= set(table.columns_of_table().names):
        # Once: after the first commit of the sink, it has kept them unique.
        try:
            require_unique_keys(table.scan(table.key), table.key, table.what, table.shown)
        except MidstreamError:
            raise
        except Exception as error:  # such as a table with a feature that the package cannot read
            raise SetupError(f"{table.what}: the table {table.shown!r} cannot be read: {first_line(error)}") from error


# ── an epoch ──────────────────────────────────────────────────────────────────────────────────────────────────────


def replace_epoch(kind: type[OwnedTable], sink: LakeSink, rows: Rows, epoch: Epoch) -> None:
    """Write an epoch in one commit. If it raises, nothing has changed, unless the answer to the commit was lost.

    In this order: 1. read the table, and check that no other driver has taken over; 2. write the rows' files, which no
    reader sees; 3. commit them, with the epoch's number; an epoch that is not newer than the newest one replaces its
    rows, and those of later epochs if the job went back. If another writer commits in between, for example to compact
    the table, this begins again.
    """
    conflict: str | None = None
    with kind.at(sink, "the sink") as table:
        table.what = f"the table {table.shown!r}"
        for _ in range(TRIES):
            _require_mine(table)
            if (conflict := _replace(table, rows(), epoch)) is None:
                return
    raise SetupError(f"{table.what}: other writers keep changing it, so no epoch can be written ({conflict})")


def _require_mine(table: OwnedTable) -> None:
    assert table.owner is not None, "only a sink that was claimed writes"
    if not table.opened():
        raise CheckpointError(f"the table {table.shown!r} is gone; restore it, or start the job with another one")
    if not table.is_driven_by(table.owner):
        raise CheckpointError(
            f"the table {table.shown!r} is no longer written by this driver: its job was restarted elsewhere, or "
            f"another one has taken it. Only one driver at a time may run a job"
        )


def _replace(table: OwnedTable, batches: Iterable[pa.RecordBatch], epoch: Epoch) -> str | None:
    newest = table.newest_epoch()
    replaces = newest is not None and newest >= epoch
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if table.key and first is None:
        return upsert(table, iter(()), None, newest, epoch)
    if first is None:
        return table.commit(iter(()), None, epoch, replaces=True) if replaces else None
    _require_types(table, first.schema)
    table.require_layout(first.schema)
    columns = table.written_columns(first.schema)
    numbered = (_numbered(batch, columns, epoch) for batch in chain([first], rows))
    if table.key:
        return upsert(table, numbered, columns, newest, epoch)
    return table.commit(numbered, columns, epoch, replaces=replaces)


def _numbered(batch: pa.RecordBatch, columns: pa.Schema, epoch: Epoch) -> pa.RecordBatch:
    numbers = pa.repeat(pa.scalar(int(epoch), pa.int64()), batch.num_rows)
    arrays = [array.cast(column.type) for array, column in zip([*batch.columns, numbers], columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)
