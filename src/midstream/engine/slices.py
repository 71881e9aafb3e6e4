"""Slices: the portions of input that go through the stage's operators.

A slice should take about 5 ms, or what the knob ``slice`` says. A task hears from the coordinator between slices, so
this bounds the delay of a change; operators never switch inside a slice. Fast vectorised functions get whole chunks,
slow models a few rows. Operators and the exchange copy a slice several times, so one of wide rows is bounded by bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from midstream.flow.knobs import knob_value

TARGET_NS = 1000 * knob_value({}, "slice")
FIRST_ROWS = 16
MAX_ROWS = 1 << 16
MAX_BYTES = 8 << 20
MAX_GROWTH = 8.0
MAX_SHRINK = 4.0


class SliceSizer:
    """Chooses the size of the next slice from the duration of the last one.

    >>> sizer = SliceSizer()
    >>> sizer.observe(rows=16, elapsed_ns=160_000)   # 10 µs a row: 500 rows take 5 ms, but growth is bounded
    >>> sizer.rows
    128
    >>> sizer.observe(rows=128, elapsed_ns=1_280_000)
    >>> sizer.rows
    500
    """

    def __init__(self, rows: int = FIRST_ROWS) -> None:
        self.rows = rows
        self.target_ns = TARGET_NS
        """How long a slice should take."""

    def observe(self, *, rows: int, elapsed_ns: int) -> None:
        """Record the duration of a slice."""
        if rows == 0:
            return
        fitting = self.target_ns * rows / max(elapsed_ns, 1)
        # A short remainder says little about a full slice, so it may shrink the size but grow it only within a bound.
        ceiling = min(max(rows, self.rows) * MAX_GROWTH, MAX_ROWS)
        # A slice during which the process waited for a core says little, too. Without a bound, a busy machine would get
        # ever smaller slices, whose overhead makes it busier still.
        floor = rows / MAX_SHRINK
        self.rows = max(1, int(min(max(fitting, floor), ceiling)))

    def cut(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The batch in slices; the size is recomputed before each one. Never leaves a tiny slice at the end."""
        most = max(1, MAX_BYTES * batch.num_rows // max(1, batch.nbytes))
        start = 0
        while start < batch.num_rows:
            left, rows = batch.num_rows - start, min(self.rows, most)
            size = rows if left > rows * 3 // 2 else left
            yield batch.slice(start, size)
            start += size
