"""Tables that users pass as the initial state of inserted operators: the columns they need, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.schema import to_ddl, type_name
from midstream.engine.steps import OperatorInTask
from midstream.errors import FlowError, SchemaError
from midstream.flow.inputs import describe_table
from midstream.flow.spec import ERRORS

__all__ = ["fitted", "replay", "require_unique", "table_given"]

_AT_ONCE = 1 << 16


def table_given(given: Any, what: str) -> pa.Table:
    """A table from what a user passes: a pyarrow Table or RecordBatch, a pandas or Spark DataFrame, or a list of rows.

    >>> table_given([{"k": 1, "value": 2}], "process 'count'").num_rows
    1
    """
    if isinstance(given, list | tuple):
        if not all(isinstance(row, Mapping) for row in given):
            raise FlowError(f"{what}: the rows of its initial state must be dicts")
        return pa.Table.from_pylist([dict(row) for row in given])
    table, _ = describe_table(given, f"{what}: its initial state")
    return table if isinstance(table, pa.Table) else table.toArrow()


def fitted(table: pa.Table, wanted: Sequence[pa.Field], what: str, more: str = "") -> pa.Table:
    """These columns of a table, in these types. Raises :class:`SchemaError` if one is missing, null or does not fit."""
    columns = []
    for field in wanted:
        if field.name not in table.column_names:
            raise SchemaError(
                f"{what}: its initial state lacks the column {field.name!r}; it has ({', '.join(table.column_names)}), "
                f"and needs ({to_ddl(pa.schema(list(wanted)))}){more}",
                column=field.name,
            )
        column = table[field.name]
        try:
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise SchemaError(
                f"{what}: column {field.name!r} of its initial state is {type_name(column.type)}, and the operator "
                f"needs {type_name(field.type)}: {error}",
                column=field.name,
            ) from error
    return pa.Table.from_arrays(columns, schema=pa.schema([field.with_nullable(True) for field in wanted]))


def replay(work: OperatorInTask, rows: pa.Table, takes: pa.Schema, what: str) -> None:
    """Let an operator take rows of the past and write its state. What it emits is dropped."""
    nothing = pa.nulls(rows.num_rows)
    columns = [rows[field.name] if field.name in rows.column_names else nothing.cast(field.type) for field in takes]
    schema = pa.schema([field.with_nullable(True) for field in takes])
    for batch in pa.Table.from_arrays(columns, schema=schema).combine_chunks().to_batches(_AT_ONCE):
        bad = work.entries[0](batch.cast(takes) if batch.schema != takes else batch).get(ERRORS)
        if bad is not None and bad.num_rows:
            raise SchemaError(
                f"{what}: {bad.num_rows} row(s) of its initial state are bad: {bad.to_pylist()[0]!r:.300}"
            )
    for _ in work.finish() if work.finish is not None else ():
        pass


def require_unique(table: pa.Table, keys: Sequence[str], what: str) -> None:
    """Refuse keys that are null or occur twice."""
    for name in keys:
        if table[name].null_count:
            raise SchemaError(
                f"{what}: the key column {name!r} of its initial state has {table[name].null_count} null(s); leave "
                f"these rows out",
                column=name,
            )
    counted = table.select(list(keys)).group_by(list(keys)).aggregate([([], "count_all")])
    twice = counted.filter(pc.greater(counted["count_all"], 1))
    if twice.num_rows:
        [first] = twice.select(list(keys)).slice(0, 1).to_pylist()
        raise SchemaError(
            f"{what}: {twice.num_rows} key(s) of its initial state occur more than once, such as {first!r:.100}; "
            f"give one row for each key"
        )
