"""A sink for tables of Apache Iceberg: what it writes, and which columns such a table cannot hold."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from midstream.errors import FlowError, SchemaError
from midstream.flow.sink_owner import EPOCH_COLUMN, SinkOwner, key_of, texts_of
from midstream.flow.spec import Delivery

__all__ = ["IcebergSink", "check_names"]


@dataclass(frozen=True)
class IcebergSink:
    """Writes to a table of Apache Iceberg, each epoch as one commit to the table.

    **Guarantee: exactly once.** A commit has the epoch's rows, with its number in ``epoch_column``; the job, the sink
    and the epoch are in the summary of its snapshot and in the table's properties. An epoch that runs again replaces
    its rows in one commit. So rows and state agree for every committed epoch, and readers see whole epochs only. An
    epoch without rows makes no snapshot.

    ``table`` is a name such as ``"sales.payments"`` in the catalog, which PyIceberg opens: by the name that its own
    configuration gives it, or by properties in ``catalog_options``. The namespace must be there; the table is created
    if it is missing. Columns of the rows that the table lacks are added to it; columns that the rows lack become null.
    Rows whose ``epoch_column`` is null are yours, and left alone. Only one sink of one job may write to a table.

    With ``mode="upsert"`` a row takes the place of the one with the same ``key``: columns of the rows. Columns that the
    rows lack keep their values. Of several rows with one key in an epoch the last counts. An epoch that runs again
    undoes its last run in the same commit, by the snapshot before it, which has a tag.

    Needs ``pip install 'midstream[iceberg]'`` on the driver, with what PyIceberg needs for the catalog, and no package
    in Spark: the driver writes through one process, as a :class:`DatabaseSink` does.

    >>> IcebergSink("sales.payments", catalog_options={"type": "sql", "uri": "sqlite:///lake.db"}).table
    'sales.payments'
    """

    table: str
    catalog: str = "default"
    catalog_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    epoch_column: str = EPOCH_COLUMN
    key: tuple[str, ...] = ()
    """The columns by which rows are replaced; empty if they are appended."""
    owner: SinkOwner | None = field(default=None, repr=False)
    """Set by the runtime."""

    delivery = Delivery.FRAME

    def __init__(
        self,
        table: str,
        *,
        catalog: str = "default",
        catalog_options: Mapping[str, str] | None = None,
        epoch_column: str = EPOCH_COLUMN,
        mode: str = "append",
        key: str | Sequence[str] = (),
    ) -> None:
        if "." not in str(table) or not all(str(table).split(".")):
            raise FlowError(f"IcebergSink: table is {table!r}; give a namespace and a name, such as 'sales.payments'")
        for name, value in (("catalog", catalog), ("epoch_column", epoch_column)):
            if not value:
                raise FlowError(f"IcebergSink: {name} is {value!r}; give a name")
        values: dict[str, Any] = {
            "table": table,
            "catalog": catalog,
            "catalog_options": texts_of(catalog_options, "IcebergSink: catalog_options"),
            "epoch_column": epoch_column,
            "key": key_of("IcebergSink", mode, key),
            "owner": None,
        }
        for field_name, found in values.items():
            object.__setattr__(self, field_name, found)

    @property
    def place(self) -> tuple[Any, ...]:
        """An identity of its table, to compare it with those of other sinks."""
        return (self.catalog, self.table)

    @property
    def shown(self) -> str:
        """The name of its table in errors."""
        return self.table

    def owned_by(self, owner: SinkOwner) -> IcebergSink:
        """The same sink with an owner, which it needs to write. Called by the runtime."""
        owned = copy.copy(self)
        object.__setattr__(owned, "owner", owner)
        return owned


def check_names(target: IcebergSink, schema: pa.Schema, what: str) -> None:
    """Refuse names of columns that differ by case only from the column of the epoch."""
    for name in schema.names:
        if name.lower() == target.epoch_column.lower():
            raise SchemaError(
                f"{what}: the column {name!r} differs by case only from {target.epoch_column!r}, the sink's column "
                f"with the number of the epoch, and Spark does not tell them apart; rename it before the sink",
                column=name,
            )
