"""Blocks: the rows of a task in portions of equal size, regardless of how they were cut into slices.

Slice sizes adapt to speed. An operator that adds floats block by block has the same result in every run, and one with
work per portion does not do it for a slice of three rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from midstream.engine.aggregation.runs import Integers

__all__ = ["BLOCK", "Blocks"]

BLOCK = 1 << 16
"""Number of rows in a block."""


class Blocks:
    """Collects rows and their numbers, and passes them on as soon as there are enough for a block.

    >>> blocks = Blocks(lambda rows, numbers: print(rows.num_rows, numbers.tolist()), size=2)
    >>> blocks.add(pa.record_batch({"x": [1, 2, 3]}), np.arange(3))
    2 [0, 1]
    >>> blocks.flush()
    1 [2]
    """

    def __init__(self, handle: Callable[[pa.RecordBatch, Integers], None], size: int | None = None) -> None:
        self._handle = handle
        self.size = BLOCK if size is None else size
        self._waiting: list[tuple[pa.RecordBatch, Integers]] = []
        self.room = self.size
        """Number of rows that the current block still takes."""

    def add(self, rows: pa.RecordBatch, numbers: Integers) -> None:
        """Add rows, each with a number that grows in order of arrival."""
        while rows.num_rows:
            part = rows.slice(0, self.room)
            self._waiting.append((part, numbers[: part.num_rows]))
            self.room -= part.num_rows
            rows, numbers = rows.slice(part.num_rows), numbers[part.num_rows :]
            if not self.room:
                self.flush()

    def flush(self) -> None:
        """Pass on the remaining rows. Afterwards only a new block may be started."""
        waiting, self._waiting, self.room = self._waiting, [], self.size
        if len(waiting) == 1:
            self._handle(*waiting[0])
        elif waiting:
            rows = pa.concat_batches([part for part, _ in waiting])
            self._handle(rows, np.concatenate([numbers for _, numbers in waiting]))
