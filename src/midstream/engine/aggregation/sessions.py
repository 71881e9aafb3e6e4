"""aggregate over sessions: rows of a key that follow each other within a gap.

Rows of a key belong to one session when a chain of rows links them in which each is less than ``gap`` after the one
before. A session is told by its first and its last time; it ends, and its window does, ``gap`` after the last.

Order of arrival does not matter within an epoch: all of its rows, and the sessions that are open, are linked at its
end. A row is late when it could only be in a session that had ended when the epoch began: it is so old itself, and
linked to nothing that is not.

State holds the open sessions of a key under the key, and a mark for each under the time of its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.aggregation.aggregating import Aggregating
from midstream.engine.aggregation.blocks import Blocks
from midstream.engine.aggregation.partials import (
    Partials,
    Tally,
    by_session,
    joined,
    of_sessions,
    session_runs,
    session_starts,
)
from midstream.engine.aggregation.runs import Integers, Runs, order_by
from midstream.engine.keyed_rows import ended_by, found_keys
from midstream.flow.spec import LATE
from midstream.flow.windows import Session
from midstream.state.key_arrays import split_timers, timer_keys
from midstream.state.keys import Namespace

__all__ = ["Sessions", "split_sessions"]

_SIZE = 4  # bytes of the length before each session in state


@dataclass(frozen=True)
class _Old:
    """Rows that are late unless something links them to a session that is open; and the sessions they make."""

    rows: pa.RecordBatch
    session_of_row: Integers
    partials: Partials


class Sessions:
    """Sessions. They are emitted in the order of bin, end and key."""

    def __init__(self, common: Aggregating, window: Session) -> None:
        self._common = common
        self._gap = window.gap_us
        self._tally = Tally(common.totals, by_session(common.totals, window.gap_us))
        self._blocks = Blocks(self._add)
        self._old: list[tuple[pa.RecordBatch, Integers]] = []
        self._rows = 0

    def take(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Count a slice in. Nothing but bad rows is emitted yet: what is late shows at the end of the epoch."""
        common = self._common
        batch, bad = common.screen(batch)
        times = common.times_of(batch)
        numbers = np.arange(self._rows, self._rows + batch.num_rows)
        self._rows += batch.num_rows
        limit = common.times.late_before
        if limit is not None and len(times) and times.min() + self._gap <= limit:
            old = times + self._gap <= limit
            self._old.append((batch.filter(pa.array(old)), numbers[old]))
            batch, numbers = batch.filter(pa.array(~old)), numbers[~old]
        self._blocks.add(batch.select(common.needed), numbers)
        return bad

    def finish(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Link what is open and what has come, emit what is late and what is closed, and store the rest."""
        self._blocks.flush()
        fresh, old = self._tally.take(), self._old_rows()
        parts = [part for part in (fresh, None if old is None else old.partials) if part is not None]
        touched, values = self._stored(parts)
        before = self._sessions(touched, values)
        parts = [part for part in (before, *parts) if part is not None]
        if not parts:
            return
        links = joined(self._common.totals, parts)
        runs = session_runs(links, self._gap)
        late = np.zeros(len(runs), np.bool_)
        if old is not None:
            late, rows = self._late(old, runs, len(links))
            if rows.num_rows:
                yield {LATE: rows}
        whole = of_sessions(self._common.totals, links, runs)
        ends = whole.times[1] + self._gap
        watermark = self._common.times.watermark
        closed = ~late & (ends <= watermark) if watermark is not None else np.zeros(len(runs), np.bool_)
        self._store(touched, values, before, self._chosen(whole, np.flatnonzero(~late & ~closed)))
        yield from self._emitted(self._chosen(whole, np.flatnonzero(closed)))

    def _add(self, rows: pa.RecordBatch, numbers: Integers) -> None:
        self._tally.add(self._partials(rows, numbers)[0])

    def _partials(self, rows: pa.RecordBatch, numbers: Integers) -> tuple[Partials, Runs]:
        """The sessions that some rows make among themselves, and which rows are in each."""
        common = self._common
        keys = found_keys(common.operator, rows, common.keys, common.what, common.space)
        times: Integers = rows.column(common.time).view(pa.int64()).to_numpy()
        order = np.argsort(times, kind="stable")
        order = order[order_by(keys.group_of_row[order], len(keys.stored))]
        code, time = keys.group_of_row[order], times[order]
        starts = session_starts(code, time, time, self._gap)
        runs = Runs(order, starts)
        lasts = time[starts + runs.sizes - 1]
        stored = keys.stored.take(pa.array(code[starts]))
        return Partials(stored, (time[starts], lasts), common.totals.of_rows(rows, numbers, runs)), runs

    def _old_rows(self) -> _Old | None:
        if not self._old:
            return None
        rows = pa.concat_batches([batch for batch, _ in self._old])
        partials, runs = self._partials(rows, np.concatenate([numbers for _, numbers in self._old]))
        session_of_row = np.empty(rows.num_rows, np.int64)
        session_of_row[runs.order] = runs.run_of
        return _Old(rows, session_of_row, partials)

    def _late(self, old: _Old, runs: Runs, links: int) -> tuple[npt.NDArray[np.bool_], pa.RecordBatch]:
        """Which runs hold nothing but old rows, and these rows as they came. Old ones are the last of the links."""
        first = links - len(old.partials)
        late = np.logical_and.reduceat(runs.order >= first, runs.starts)
        run_of_link = np.empty(links, np.int64)
        run_of_link[runs.order] = runs.run_of
        return late, old.rows.filter(pa.array(late[run_of_link[first + old.session_of_row]]))

    def _stored(self, parts: Sequence[Partials]) -> tuple[list[bytes], list[bytes | None]]:
        """The keys that have rows, or a session that ends by now; ascending, with what is stored of them."""
        state, times = self._common.state, self._common.times
        ending = ended_by(state, Namespace.SESSION_END, times.watermark)
        _, ended = split_timers(pa.array(ending.keys(), pa.binary()), self._common.space)
        keys = pa.concat_arrays([ended, *(part.keys for part in parts)]).unique()
        touched = keys.take(pc.sort_indices(keys)).to_pylist()
        return touched, state.get_many(touched)

    def _sessions(self, touched: Sequence[bytes], values: Sequence[bytes | None]) -> Partials | None:
        """The stored sessions of keys."""
        each = [split_sessions(value) if value is not None else [] for value in values]
        keys = [key for key, sessions in zip(touched, each, strict=True) for _ in sessions]
        if not keys:
            return None
        totals, (first, last) = self._common.totals.unpack([one for sessions in each for one in sessions])
        return Partials(pa.array(keys, pa.binary()), (first, last), totals)

    def _chosen(self, partials: Partials, chosen: Integers) -> Partials:
        return Partials(
            partials.keys.take(pa.array(chosen)),
            tuple(time[chosen] for time in partials.times),
            self._common.totals.combined(partials.totals, Runs.single(chosen)),
        )

    def _store(
        self, touched: Sequence[bytes], values: Sequence[bytes | None], before: Partials | None, still_open: Partials
    ) -> None:
        state = self._common.state
        sessions: dict[bytes, list[bytes]] = {}
        packed = self._common.totals.pack(still_open.totals, still_open.times)
        for key, session in zip(still_open.keys.to_pylist(), packed, strict=True):  # by key and time, as runs are
            sessions.setdefault(key, []).append(session)
        state.put_many(list(sessions), [_framed(of_key) for of_key in sessions.values()])
        known = (key for key, value in zip(touched, values, strict=True) if value is not None)
        state.delete_many([key for key in known if key not in sessions])
        marks = set(self._marks(still_open))
        old_marks = set(self._marks(before)) if before is not None else set()
        state.delete_many(sorted(old_marks - marks))
        new = sorted(marks - old_marks)
        state.put_many(new, [b""] * len(new))

    def _marks(self, partials: Partials) -> list[bytes]:
        marks: list[bytes] = self._mark_array(partials).to_pylist()
        return marks

    def _mark_array(self, partials: Partials) -> pa.Array:
        ends = partials.times[1] + self._gap
        return timer_keys(partials.keys, Namespace.SESSION_END, ends, self._common.space)

    def _emitted(self, closed: Partials) -> Iterator[Mapping[str, pa.RecordBatch]]:
        order = pc.sort_indices(self._mark_array(closed)).to_numpy().astype(np.int64)
        ordered = self._chosen(closed, order)
        first, last = ordered.times
        yield from self._common.emitted(ordered.keys, ordered.totals, (first, last + self._gap))


def _framed(sessions: Sequence[bytes]) -> bytes:
    return b"".join(len(one).to_bytes(_SIZE, "little") + one for one in sessions)


def split_sessions(value: bytes) -> list[bytes]:
    """The sessions that state holds under one key."""
    sessions = []
    at = 0
    while at < len(value):
        end = at + _SIZE + int.from_bytes(value[at : at + _SIZE], "little")
        sessions.append(value[at + _SIZE : end])
        at = end
    return sessions
