"""Combines rows before the exchange: sends aggregates of keys instead of rows.

For a running aggregate it does not matter where rows are aggregated. If many of a sender's rows share their keys, it
aggregates them itself and sends *partials*: a key, its packed totals, and the number of rows they stand for. If few do,
the rows are sent as they are. This is decided block by block, and while combining does not pay, only tried now and
then.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from midstream.data.key_space import KeySpace
from midstream.engine.aggregation.blocks import Blocks
from midstream.engine.aggregation.partials import Partials, Tally, by_key
from midstream.engine.aggregation.runs import Integers, runs_of
from midstream.engine.aggregation.totals import TotalsOf
from midstream.engine.bad_rows import ErrorsBranch, Screen, without
from midstream.engine.keyed_rows import found_keys, refuse_nulls
from midstream.flow.model import Operator

__all__ = ["PARTIAL_SCHEMA", "Combiner"]

PARTIAL_SCHEMA = pa.schema([("key", pa.binary()), ("totals", pa.binary()), ("rows", pa.int64())])
"""The schema of a frame of partials."""

WORTH = 2
"""Average number of rows per key from which combining pays."""
PATIENCE = 16
"""Number of blocks to skip after a block in which combining did not pay."""
MAX_HELD = 1 << 18


class Combiner:
    """Combines the rows that one task sends to one running aggregate."""

    def __init__(self, operator: Operator, keys: tuple[str, ...], totals: TotalsOf, space: KeySpace) -> None:
        self._operator = operator
        self._keys = keys
        self._totals = totals
        self._space = space
        self._screen = Screen(ErrorsBranch(operator), keys)
        self._tally = self._new_tally()
        self._blocks = Blocks(self._add)
        self._combined = 0
        self._skip = 0
        self._as_they_are: list[pa.RecordBatch] = []
        self._partials: list[pa.RecordBatch] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows. :meth:`rows` and :meth:`partials` return what to send."""
        if reasons := self._screen.reasons(rows):  # bad rows are sent as they are; the receiver sets them aside
            self._as_they_are.append(rows.take(pa.array(sorted(reasons))))
            rows = without(rows, reasons)
        refuse_nulls(self._operator, rows, self._keys, "a key")
        # Cut at block boundaries, so that the result does not depend on slices.
        while rows.num_rows:
            part = rows.slice(0, self._skip or self._blocks.room)
            rows = rows.slice(part.num_rows)
            if self._skip:
                self._skip -= part.num_rows
                self._as_they_are.append(part)
            else:
                self._blocks.add(part, np.zeros(part.num_rows, np.int64))

    def finish(self) -> None:
        """Flush; no more rows will be added."""
        self._blocks.flush()
        self._empty_tally()

    def rows(self) -> Iterator[pa.RecordBatch]:
        """The rows to send as they are, since the last call."""
        found, self._as_they_are = self._as_they_are, []
        yield from found

    def partials(self) -> Iterator[pa.RecordBatch]:
        """The partials to send, since the last call."""
        found, self._partials = self._partials, []
        yield from found

    def _add(self, rows: pa.RecordBatch, numbers: Integers) -> None:
        what = f"aggregate {self._operator.name!r}"
        keys = found_keys(self._operator, rows, self._keys, what, self._space)
        if len(keys.stored) * WORTH > rows.num_rows:
            self._as_they_are.append(rows)
            self._skip = PATIENCE * self._blocks.size
            return
        runs = runs_of(keys.group_of_row, len(keys.stored))
        self._tally.add(Partials(keys.stored, (), self._totals.of_rows(rows, numbers, runs)))
        self._combined += rows.num_rows
        if len(self._tally) > MAX_HELD:
            self._empty_tally()

    def _empty_tally(self) -> None:
        partials, self._tally = self._tally.take(), self._new_tally()
        if partials is None:
            return
        # Only the total number of rows matters, not which partial stands for how many.
        rows = np.zeros(len(partials), np.int64)
        rows[0], self._combined = self._combined, 0
        columns = [partials.keys, pa.array(self._totals.pack(partials.totals), pa.binary()), pa.array(rows)]
        self._partials.append(pa.RecordBatch.from_arrays(columns, schema=PARTIAL_SCHEMA))

    def _new_tally(self) -> Tally:
        return Tally(self._totals, by_key(self._totals))
