"""A sink for tables of Delta Lake: what it writes, and which columns such a table cannot hold."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from midstream.data.schema import require_columns, type_name
from midstream.errors import FlowError, SchemaError
from midstream.flow.sink_owner import EPOCH_COLUMN, SinkOwner, key_of, texts_of
from midstream.flow.spec import Delivery
from midstream.storage.blobs import filesystem_of, is_plain_path

__all__ = ["DeltaSink", "check_types"]


@dataclass(frozen=True)
class DeltaSink:
    """Writes to a table of Delta Lake, each epoch as one version of the table.

    **Guarantee: exactly once.** A commit has the epoch's rows, with its number in ``epoch_column``, and the number as a
    *transaction* of the job (``txnAppId``, ``txnVersion``). An epoch that runs again replaces its rows in one commit.
    So rows and state agree for every committed epoch, and readers see whole epochs only. An epoch without rows makes no
    version.

    The table is created if it is missing, by ``partition_by``. Columns of the rows that the table lacks are added to
    it; columns that the rows lack become null. Rows whose ``epoch_column`` is null are yours, and left alone. Only one
    sink of one job may write to a table; the job's transactions say which.

    With ``mode="upsert"`` a row takes the place of the one with the same ``key``: columns of the rows. Columns that the
    rows lack keep their values. Of several rows with one key in an epoch the last counts. An epoch that runs again
    undoes its last run in the same commit, by the version of the table before it.

    Needs ``pip install 'midstream[delta]'`` on the driver, and no package in Spark: the driver writes through one
    process, as a :class:`DatabaseSink` does. ``storage_options`` are those of the ``deltalake`` package, such as keys
    of S3.

    >>> DeltaSink("lake/payments", partition_by="country").partition_by
    ('country',)
    """

    path: str
    epoch_column: str = EPOCH_COLUMN
    partition_by: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    """The columns by which rows are replaced; empty if they are appended."""
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    owner: SinkOwner | None = field(default=None, repr=False)
    """Set by the runtime."""

    delivery = Delivery.FRAME

    def __init__(
        self,
        path: Any,
        *,
        epoch_column: str = EPOCH_COLUMN,
        partition_by: str | Sequence[str] = (),
        mode: str = "append",
        key: str | Sequence[str] = (),
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        if not str(path):
            raise FlowError("DeltaSink: the path is empty; give the folder of a table, such as 'lake/payments'")
        if not epoch_column:
            raise FlowError(f"DeltaSink: epoch_column is {epoch_column!r}; give the name of a column")
        columns = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        if len(set(columns)) != len(columns):
            raise FlowError(f"DeltaSink: partition_by={list(columns)} names a column twice")
        values: dict[str, Any] = {
            "path": str(path),
            "epoch_column": epoch_column,
            "partition_by": columns,
            "key": key_of("DeltaSink", mode, key),
            "storage_options": texts_of(storage_options, "DeltaSink: storage_options"),
            "owner": None,
        }
        for field_name, found in values.items():
            object.__setattr__(self, field_name, found)

    @property
    def location(self) -> str:
        """Where the table is. A path on this machine is absolute."""
        return filesystem_of(self.path)[1] if is_plain_path(self.path) else self.path

    @property
    def place(self) -> tuple[Any, ...]:
        """An identity of its table, to compare it with those of other sinks."""
        return (self.location,)

    @property
    def shown(self) -> str:
        """The name of its table in errors."""
        return self.path

    def owned_by(self, owner: SinkOwner) -> DeltaSink:
        """The same sink with an owner, which it needs to write. Called by the runtime."""
        owned = copy.copy(self)
        object.__setattr__(owned, "owner", owner)
        return owned


def check_types(target: DeltaSink, schema: pa.Schema, what: str) -> None:
    """Refuse columns that a table of Delta Lake cannot hold, and folders that cannot be named."""
    require_columns(schema, target.partition_by, f"{what}, partition_by")
    if target.partition_by and len(target.partition_by) == len(schema.names):
        raise SchemaError(f"{what}: partition_by names all columns; leave at least one for the files")
    for name in target.partition_by:
        if pa.types.is_nested(schema.field(name).type):
            raise SchemaError(
                f"{what}: column {name!r} is {type_name(schema.field(name).type)}, by which a table cannot be "
                f"partitioned; partition by plain columns",
                column=name,
            )
    for name in schema.names:
        if name.lower() == target.epoch_column.lower():
            raise SchemaError(
                f"{what}: the column {name!r} differs by case only from {target.epoch_column!r}, the sink's column "
                f"with the number of the epoch, and Delta Lake does not tell them apart; rename it before the sink",
                column=name,
            )
