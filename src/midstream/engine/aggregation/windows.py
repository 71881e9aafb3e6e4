"""aggregate over tumbling and sliding windows.

Rows are aggregated by *pane*: the time between the starts of two consecutive windows; a tumbling window is one pane.
Panes are combined into windows only at the end of the epoch, so the cost of a row does not depend on how many windows
it is in.

State holds one value per key and open window, ordered by the end of the window, so that one range scan finds the
windows that close. All times in here and in state are aligned: windows begin at multiples of the time between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.aggregation.aggregating import Aggregating
from midstream.engine.aggregation.blocks import Blocks
from midstream.engine.aggregation.partials import Partials, Tally, by_key_and_time, codes_of, with_times
from midstream.engine.aggregation.runs import Integers, Runs, runs_of
from midstream.engine.aggregation.totals import Totals
from midstream.engine.keyed_rows import ended_by, found_keys
from midstream.flow.spec import LATE
from midstream.flow.windows import Sliding, Tumbling
from midstream.state.key_arrays import split_timers, timer_keys
from midstream.state.keys import Namespace

__all__ = ["Windows"]


class Windows:
    """Windows of one length. They are emitted in the order of bin, end and key."""

    def __init__(self, common: Aggregating, window: Tumbling | Sliding) -> None:
        self._common = common
        self._size = window.size_us
        self._every = window.every_us
        self._alignment = alignment = window.alignment
        times = common.times
        self._late_before = None if times.late_before is None else alignment.aligned_one(times.late_before)
        self._watermark = None if times.watermark is None else alignment.aligned_one(times.watermark)
        self._tally = Tally(common.totals, by_key_and_time(common.totals))
        self._blocks = Blocks(self._add)
        self._rows = 0

    def take(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Add a slice. Emits bad rows, and rows that are late for all of their windows, unchanged."""
        common = self._common
        batch, bad = common.screen(batch)
        times = self._alignment.aligned(common.times_of(batch))
        late = self._late(times)
        emitted = dict(bad)
        if late is not None:
            emitted[LATE] = batch.filter(pa.array(late))
            batch = batch.filter(pa.array(~late))
        numbers = np.arange(self._rows, self._rows + batch.num_rows)
        self._rows += batch.num_rows
        self._blocks.add(batch.select(common.needed), numbers)
        return emitted

    def finish(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Update the windows that the epoch touched, and emit the windows that the watermark closes."""
        state, totals, watermark = self._common.state, self._common.totals, self._watermark
        closing = ended_by(state, Namespace.WINDOW, watermark)
        stored, own = self._touched()
        keys = stored.to_pylist()
        ends, _ = split_timers(stored, self._common.space)
        is_open = np.ones(len(keys), np.bool_) if watermark is None else ends > watermark
        still_open = [keys[index] for index in np.flatnonzero(is_open).tolist()]
        before = dict(zip(still_open, state.get_many(still_open), strict=True)) | closing
        if own is not None:
            own = totals.with_stored([before.get(key) for key in keys], own)
            opened = totals.combined(own, Runs.single(np.flatnonzero(is_open)))
            state.put_many(still_open, totals.pack(opened))
        state.delete_many(list(closing))
        untouched = closing.keys() - set(keys)
        yield from self._closed(stored, own, np.flatnonzero(~is_open), {key: closing[key] for key in untouched})

    def _late(self, times: Integers) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """A mask of the rows whose last window had ended when the epoch began; None if there are none."""
        limit = self._late_before
        # The last window of a row begins with the row's pane.
        if limit is None or not len(times) or self._pane(times.min()) * self._every + self._size > limit:
            return None
        late: np.ndarray[tuple[int], np.dtype[np.bool_]] = self._pane(times) * self._every + self._size <= limit
        return late

    def _pane(self, times: Integers) -> Integers:
        return times // self._every

    def _add(self, rows: pa.RecordBatch, numbers: Integers) -> None:
        common = self._common
        keys = found_keys(common.operator, rows, common.keys, common.what, common.space)
        panes = self._pane(self._alignment.aligned(rows.column(common.time).view(pa.int64()).to_numpy()))
        runs = runs_of(*with_times(keys.group_of_row, len(keys.stored), panes))
        firsts = runs.order[runs.starts]
        stored = keys.stored.take(pa.array(keys.group_of_row[firsts]))
        self._tally.add(Partials(stored, (panes[firsts],), common.totals.of_rows(rows, numbers, runs)))

    def _touched(self) -> tuple[pa.Array, Totals | None]:
        """The stored keys, ascending, of the windows that have rows in this epoch, and the totals of these rows."""
        self._blocks.flush()
        panes = self._tally.take()
        if panes is None:
            return pa.array([], pa.binary()), None
        overlap = self._size // self._every
        source = np.repeat(np.arange(len(panes)), overlap)
        start = panes.times[0][source] - np.tile(np.arange(overlap), len(panes))
        end = start * self._every + self._size
        if self._late_before is not None:
            in_time = end > self._late_before
            source, end = source[in_time], end[in_time]
        keys = timer_keys(panes.keys.take(pa.array(source)), Namespace.WINDOW, end, self._common.space)
        codes, count = codes_of(keys)
        runs = runs_of(codes, count)
        windows = self._common.totals.combined(panes.totals, Runs(source[runs.order], runs.starts))
        distinct = keys.take(pa.array(runs.order[runs.starts]))
        return _ascending(self._common, distinct, windows)

    def _closed(
        self, stored: pa.Array, own: Totals | None, chosen: Integers, untouched: Mapping[bytes, bytes]
    ) -> Iterator[Mapping[str, pa.RecordBatch]]:
        totals = self._common.totals
        keys: list[pa.Array] = []
        parts: list[Totals] = []
        if own is not None:
            keys.append(stored.take(pa.array(chosen)))
            parts.append(totals.combined(own, Runs.single(chosen)))
        if untouched:
            keys.append(pa.array(untouched.keys(), pa.binary()))
            parts.append(totals.unpack(list(untouched.values()))[0])
        if parts:
            ordered, whole = _ascending(self._common, pa.concat_arrays(keys), totals.joined(parts))
            ends, of_keys = split_timers(ordered, self._common.space)
            moments = self._alignment.moments
            yield from self._common.emitted(of_keys, whole, (moments(ends - self._size), moments(ends)))


def _ascending(common: Aggregating, keys: pa.Array, totals: Totals) -> tuple[pa.Array, Totals]:
    order = pc.sort_indices(keys)
    return keys.take(order), common.totals.combined(totals, Runs.single(order.to_numpy().astype(np.int64)))
