"""aggregate without windows: running totals of each key.

At the end of an epoch each key that had a row emits its totals over all epochs, ascending by stored key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.aggregation.aggregating import Aggregating
from midstream.engine.aggregation.blocks import Blocks
from midstream.engine.aggregation.partials import Partials, Tally, by_key
from midstream.engine.aggregation.runs import Integers, Runs, runs_of
from midstream.engine.keyed_rows import found_keys, refuse_nulls

__all__ = ["RunningTotals"]

KEYS_AT_ONCE = 1 << 16
"""Number of keys whose stored totals are read and written at a time: as Python objects they take much more memory."""


class RunningTotals:
    """Running totals."""

    def __init__(self, common: Aggregating) -> None:
        self._common = common
        self._tally = Tally(common.totals, by_key(common.totals))
        self._blocks = Blocks(self._add)
        self._rows = 0

    def take(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Add a slice. Only bad rows are emitted yet."""
        common = self._common
        batch, bad = common.screen(batch)
        refuse_nulls(common.operator, batch, common.keys, "a key")
        numbers = np.arange(self._rows, self._rows + batch.num_rows)
        self._rows += batch.num_rows
        self._blocks.add(batch.select(common.needed), numbers)
        return bad

    def take_partials(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Add the partials of a sender."""
        totals, _ = self._common.totals.unpack(batch.column("totals").to_pylist())
        self._tally.add(Partials(batch.column("key"), (), totals))
        return {}

    def finish(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Add the epoch's totals to the stored ones, and emit those of the keys that it touched."""
        self._blocks.flush()
        touched = self._tally.take()
        if touched is None:
            return
        totals, state = self._common.totals, self._common.state
        order = pc.sort_indices(touched.keys)
        for start in range(0, len(order), KEYS_AT_ONCE):
            some = order.slice(start, KEYS_AT_ONCE)
            stored = touched.keys.take(some)
            keys = stored.to_pylist()
            own = totals.combined(touched.totals, Runs.single(some.to_numpy().astype(np.int64)))
            whole = totals.with_stored(state.get_many(keys), own)
            state.put_many(keys, totals.pack(whole))
            yield from self._common.emitted(stored, whole)

    def _add(self, rows: pa.RecordBatch, numbers: Integers) -> None:
        common = self._common
        keys = found_keys(common.operator, rows, common.keys, common.what, common.space)
        runs = runs_of(keys.group_of_row, len(keys.stored))
        self._tally.add(Partials(keys.stored, (), common.totals.of_rows(rows, numbers, runs)))
