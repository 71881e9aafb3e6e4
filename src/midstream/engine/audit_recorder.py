"""Records for the auditor which rows met which operator under which revision."""

from __future__ import annotations

import pyarrow as pa

from midstream.ids import Revision

__all__ = ["HISTORY", "Recorder"]

HISTORY = pa.schema([("row", pa.string()), ("operator", pa.string()), ("revision", pa.int32())])
"""A history: one row per data operation. ``row`` identifies a source row, as text."""


class Recorder:
    """Records the operations of one task. A column that rows carry from their source identifies them.

    >>> recorder = Recorder("id")
    >>> recorder.note("FM", pa.RecordBatch.from_pydict({"id": [7]}), Revision(2))
    >>> recorder.table().to_pylist()
    [{'row': '7', 'operator': 'FM', 'revision': 2}]
    """

    def __init__(self, column: str) -> None:
        self._column = column
        self._batches: list[pa.RecordBatch] = []

    def note(self, operator: str, batch: pa.RecordBatch, revision: Revision) -> None:
        """Record rows that enter an operator. Rows that have lost the identifying column cannot be recorded."""
        if self._column in batch.schema.names and batch.num_rows:
            rows = batch.column(self._column).cast(pa.string())
            n = batch.num_rows
            columns = [rows, pa.repeat(operator, n), pa.repeat(pa.scalar(revision, pa.int32()), n)]
            self._batches.append(pa.RecordBatch.from_arrays(columns, schema=HISTORY))

    def table(self) -> pa.Table:
        """The history recorded so far."""
        return pa.Table.from_batches(self._batches, HISTORY)
