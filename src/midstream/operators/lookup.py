"""lookup: joins each row with its matches in a static table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import numpy as np
import pyarrow as pa

from midstream.data.lookup_index import LookupIndex
from midstream.data.schema import check_key_columns, conform, joined_schema, to_ddl, type_name
from midstream.engine.bad_rows import ErrorsBranch, Screen
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.resources import Resources
from midstream.engine.steps import ONLY, OperatorInTask, OperatorStep
from midstream.errors import FlowError, SchemaError
from midstream.flow.inputs import check_comparable, column_pairs, describe_table
from midstream.flow.model import Operator
from midstream.flow.spec import Contract, How, Spec
from midstream.flow.table_refresh import TableRefresh, read_table
from midstream.flow.validate import check_name
from midstream.ids import Digest
from midstream.operators.rows import StreamRows
from midstream.storage.blobs import Blob


@dataclass(frozen=True)
class Lookup(TaskSpec):
    """Joins rows with a static table that every worker holds. ``on`` pairs stream columns with table columns."""

    kind: ClassVar[str] = "lookup"
    is_updatable: ClassVar[bool] = True

    on: tuple[tuple[str, str], ...]
    how: How
    unique: bool
    table_schema: pa.Schema

    def kept(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """All columns stay as they are."""
        return columns

    @property
    def contract(self) -> Contract:
        """One-to-one if the keys of the table are unique, which is checked. This is no promise about source rows."""
        return Contract.ONE_TO_ONE if self.unique else Contract.ONE_TO_MANY

    @property
    def table_keys(self) -> tuple[str, ...]:
        """The table's key columns."""
        return tuple(theirs for _, theirs in self.on)

    def packed(self, payload: Any, operator: str) -> Blob:
        """The table, collected if it is a DataFrame, and checked for uniqueness if that was promised."""
        return table_to_blob(lookup_table(operator, self, payload))

    def loaded(self, data: bytes) -> pa.Table:
        """Read a stored table."""
        return table_from_bytes(data)

    def replaced(self, function: Any, local: Any, operator: str, what: str) -> tuple[Spec, Any]:
        """Replace the table by one with the same key columns."""
        table, schema = describe_table(function, what)
        for name in self.table_keys:
            wanted = self.table_schema.field(name).type
            if name not in schema.names or not schema.field(name).type.equals(wanted):
                raise SchemaError(
                    f"{what}: the new table must have the column {name!r} of type {type_name(wanted)}, by which rows "
                    f"are looked up; it has ({to_ddl(schema)})",
                    column=name,
                )
        return replace(self, table_schema=schema), table

    def derived(
        self, inputs: Sequence[pa.Schema], schema: pa.Schema, payload: Any, what: str
    ) -> tuple[Spec, pa.Schema]:
        """The input's columns, and the table's columns without its keys."""
        keys = {theirs: mine for mine, theirs in self.on}
        return self, joined_schema(
            inputs[0], self.table_schema, keys, what, keeps_left=self.how.keeps_left, keeps_right=False
        )

    def instantiate(self, operator: Operator, parts: Parts) -> OperatorInTask:
        """Load and index the table."""
        table = self.table_in(parts.resources, parts.program.blobs[operator.name])
        return OperatorInTask((lookup_step(operator, self, table),))

    def preload(self, operator: str, digest: Digest, resources: Resources) -> None:
        """Load and index the table before a task needs it."""
        self.table_in(resources, digest)

    def table_in(self, resources: Resources, digest: Digest) -> LookupTable:
        """The table in a worker, indexed once and shared by all tasks that look rows up by the same columns."""
        on = self.table_keys
        return resources.made("table", digest, on, lambda: LookupTable(self.loaded(resources.data(digest)), on))


class LookupTable:
    """A static table, indexed by the columns a lookup joins on."""

    def __init__(self, table: pa.Table, on: tuple[str, ...]) -> None:
        self.index = LookupIndex.build(table, on)
        added = [name for name in table.column_names if name not in on]
        self.added = table.select(added).combine_chunks()


def lookup_step(operator: Operator, spec: Lookup, table: LookupTable) -> OperatorStep:
    """The step of a lookup. Output rows keep the order of the stream's rows, then that of the table."""
    mine = tuple(stream for stream, _ in spec.on)

    screen = Screen(ErrorsBranch(operator), keys=mine, max_key=None)

    def step(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        batch, bad = screen(batch)
        left, right = table.index.probe(batch, mine)
        if spec.how is How.LEFT:
            left, right = _keep_unmatched(batch.num_rows, left, right)
        whole = len(left) == batch.num_rows and bool((left == np.arange(len(left))).all())
        kept = batch if whole else batch.take(pa.array(left))
        matches = pa.array(right, mask=right < 0)  # a null index takes a null
        added = [column.combine_chunks().take(matches) for column in table.added.columns]
        return {ONLY: pa.RecordBatch.from_arrays([*kept.columns, *added], schema=operator.schema), **bad}

    return step


def _keep_unmatched(
    rows: int, left: np.ndarray[tuple[int], np.dtype[np.int64]], right: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Add every row that matched nothing, paired with -1, where its matches would have been."""
    missing = np.setdiff1d(np.arange(rows), left)
    left = np.concatenate([left, missing])
    right = np.concatenate([right, np.full(len(missing), -1)])
    order = np.argsort(left, kind="stable")
    return left[order], right[order]


def lookup_table(name: str, spec: Lookup, payload: Any) -> pa.Table:
    """A lookup's table, collected if it is a DataFrame, and checked for uniqueness if that was promised."""
    table = payload if isinstance(payload, pa.Table) else payload.toArrow()
    table = pa.Table.from_batches([conform(table, spec.table_schema, f"lookup {name!r}, table")])
    if spec.unique:
        on = spec.table_keys
        if (twice := LookupIndex.build(table, on).duplicates()) is not None:
            raise FlowError(
                f"lookup {name!r}: the table has more than one row for {dict(zip(on, twice, strict=True))}, but "
                f"unique=True promises one. Remove the duplicates, or set unique=False to get a row for each match"
            )
    return table


def table_to_blob(table: pa.Table) -> Blob:
    """A lookup table as a blob: one Arrow IPC stream."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return Blob.of(out.getvalue().to_pybytes())


def table_from_bytes(data: bytes) -> pa.Table:
    """The inverse of :func:`table_to_blob`."""
    return pa.ipc.open_stream(data).read_all()


class LookupMethods(StreamRows):
    """Add a lookup to a stream."""

    def lookup(
        self,
        name: str,
        table: Any,
        *,
        on: str | Sequence[str] | Mapping[str, str],
        how: str = "inner",
        unique: bool = True,
        on_error: str = "fail",
        refresh: str | None = None,
        version: Callable[[], Any] | None = None,
    ) -> Self:
        """Join each row with a static table, which every worker holds in memory; adds the table's columns.

        :param table: a ``pyarrow.Table``, a pandas DataFrame, or a batch DataFrame, which is collected when the job
            starts. With ``refresh`` a function without parameters that reads and returns one of these.
        :param on: the columns that must be equal; ``{"stream_column": "table_column"}`` where names differ. Null equals
            nothing.
        :param how: ``"inner"`` drops rows without a match, ``"left"`` keeps them with nulls.
        :param unique: promises that keys are unique in the table, so that a row has at most one match; checked when the
            job starts.
        :param on_error: with ``"branch"``, rows whose key is null leave at :meth:`errors`; by default they have no
            match.
        :param refresh: how often the function is called again on the driver while a job started by this script runs:
            ``"1 hour"``. A table that differs from the one in use becomes a change like any other, by ``refresh`` in
            the history. The local runtime reads the table once.
        :param version: a function that returns something that changes with the table and is cheaper than reading it,
            such as a file's time or a table's version. The table is read only if this differs from the last time.
        """
        what = f"lookup {check_name(name, 'lookup')!r}"
        refreshed: TableRefresh | None = None
        if refresh is not None:
            refreshed = TableRefresh.of(table, refresh, version, what)
            table = read_table(refreshed.read, what)
        elif version is not None:
            raise FlowError(f"{what}: version= is asked as often as refresh= says; give that, or leave out version=")
        if how not in (How.INNER, How.LEFT):
            raise FlowError(f"{what}: how={how!r} is not known; allowed: {How.INNER}, {How.LEFT}")
        pairs = column_pairs(on, what)
        table, table_schema = describe_table(table, what)
        check_key_columns(self.schema, [mine for mine, _ in pairs], f"{what}, stream")
        check_key_columns(table_schema, [theirs for _, theirs in pairs], f"{what}, table")
        for mine, theirs in pairs:
            check_comparable(what, mine, self.schema.field(mine).type, theirs, table_schema.field(theirs).type)
        keys = {theirs: mine for mine, theirs in pairs}
        schema = joined_schema(self.schema, table_schema, keys, what, keeps_left=How(how).keeps_left, keeps_right=False)
        spec = Lookup(pairs, How(how), unique, table_schema)
        added = cast(Self, self._flow._add(name, spec, (self._port,), schema, table, on_error))
        if refreshed is not None:
            self._flow._refreshes[name] = refreshed
        return added
