"""What the auditor wants to know: which rows met which operator under which revision."""

from __future__ import annotations

import pyarrow as pa

from midstream.ids import Revision

__all__ = ["HISTORY", "Recorder"]

HISTORY = pa.schema([("row", pa.string()), ("operator", pa.string()), ("revision", pa.int32())])
"""A history: one row for each data operation. ``row`` is the identity of a source's row, as text."""


class Recorder:
    """Records the operations of one task. Rows are told apart by a column that they carry from their source on.

    >>> recorder = Recorder("id")
    >>> recorder.note("FM", pa.RecordBatch.from_pydict({"id": [7]}), Revision(2))
    >>> recorder.table().to_pylist()
    [{'row': '7', 'operator': 'FM', 'revision': 2}]
    """

    def __init__(self, column: str) -> None:
        self._column = column
        self._batches: list[pa.RecordBatch] = []

    def note(self, operator: str, batch: pa.RecordBatch, revision: Revision) -> None:
        """Rows enter an operator. Those that have lost their identity cannot be recorded."""
        if self._column in batch.schema.names and batch.num_rows:
            rows = batch.column(self._column).cast(pa.string())
            n = batch.num_rows
            columns = [rows, pa.repeat(operator, n), pa.repeat(pa.scalar(revision, pa.int32()), n)]
            self._batches.append(pa.RecordBatch.from_arrays(columns, schema=HISTORY))

    def table(self) -> pa.Table:
        """All that was recorded."""
        return pa.Table.from_batches(self._batches, HISTORY)
