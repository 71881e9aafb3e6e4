"""The step of a join.

A pair is emitted when its second row arrives. The rows of this epoch, and the stored rows of the keys that it touches,
are in memory as a few sorted runs (:mod:`~midstream.engine.joining.runs`), with which a slice is compared in bulk.
State is read when a slice first needs it and written at the end. :mod:`~midstream.engine.joining.times` defines which
rows are near each other, late, or over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.key_space import KeySpace
from midstream.data.times import EpochTimes
from midstream.engine.bad_rows import ErrorsBranch, Screen
from midstream.engine.failure import failed, row_at
from midstream.engine.joining.division import SharedBins
from midstream.engine.joining.runs import SortedRun, SortedRuns, expand
from midstream.engine.joining.times import Limits, Nearness
from midstream.engine.steps import ONLY, OperatorInTask
from midstream.errors import SchemaError, StateError
from midstream.flow.model import Operator
from midstream.flow.spec import ERRORS, ERRORS_RIGHT, LATE, LATE_RIGHT
from midstream.flow.windows import Tumbling
from midstream.state.integers import integer_bytes
from midstream.state.keys import Namespace, group_keys
from midstream.state.panes import Panes
from midstream.state.task import TaskState

if TYPE_CHECKING:
    from midstream.operators.join import Join

MAX_PAIRS = 1 << 18
"""The approximate number of pairs that a slice emits at once. Further pairs follow at the end of the epoch, so that
memory stays bounded; meanwhile the runner makes its slices smaller."""

_AT_ONCE = 1 << 22  # bytes of stored rows that are decoded together when panes close
_KEYS = 1 << 32  # more keys than a task has
_Integers = npt.NDArray[np.int64]


def instantiate_join(
    operator: Operator,
    spec: Join,
    takes: tuple[pa.Schema, pa.Schema],
    state: TaskState,
    times: EpochTimes,
    shared: SharedBins | None = None,
) -> OperatorInTask:
    """Build a join in a task: its first entry takes rows of the left stream, the second rows of the right one."""
    work = _JoinStep(operator, spec, takes, state, times, shared)
    entries = (partial(work.enter, work.left), partial(work.enter, work.right))
    return OperatorInTask(entries, work.finish, flush=work.flush)


class _Numbers(dict[bytes, int]):
    """Numbers the keys of a task in the order of arrival."""

    def __init__(self, space: KeySpace) -> None:
        super().__init__()
        self._space = space
        self.ends: list[tuple[bytes, bytes]] = []
        """The beginning and the end of a stored key: the bin, and the key."""

    def __missing__(self, key: bytes) -> int:
        self.ends.append((key[: self._space.width], key[self._space.head :]))
        number = self[key] = len(self)
        return number


@dataclass(frozen=True)
class _Role:
    """The properties of the left or the right side."""

    late: str
    """The branch of its late rows."""
    keeps: bool
    """Whether its rows without a partner are emitted with nulls."""
    waiting: Namespace
    """The namespace where such rows wait."""
    shift: int
    """The shift from its event times to its instants."""


class _Side:
    """One of the two streams: its columns, its rows in memory, and its panes in state."""

    def __init__(
        self,
        keys: tuple[str, ...],
        time: str,
        panes: Panes,
        role: _Role,
        limits: tuple[Limits, Limits],
        errors: ErrorsBranch,
    ) -> None:
        self.keys = keys
        self.time = time
        self.panes = panes
        self.late = role.late
        self.keeps = role.keeps
        self.waiting = role.waiting
        self.shift = role.shift
        self.before, self.limits = limits
        """The instants up to which earlier epochs have closed panes, and up to which this one does."""
        self.screen = Screen(errors, keys, (time,))
        self.schema = panes.codec.schema
        """The schema of the stored rows."""
        self.latest = self.panes.latest
        self.arrived = SortedRuns(self.schema)
        self.read = SortedRuns(self.schema)
        self.known: set[int] = set()
        """Panes that have been read: number of the time times :data:`_KEYS` plus number of the key."""


class _JoinStep:
    def __init__(
        self,
        operator: Operator,
        spec: Join,
        takes: tuple[pa.Schema, pa.Schema],
        state: TaskState,
        times: EpochTimes,
        shared: SharedBins | None = None,
    ) -> None:
        self._operator = operator
        self._shared = shared if shared is not None and shared.is_any else None
        if self._shared is not None:
            self._shared.divide()
        self._what = f"join {operator.name!r}"
        self._state = state
        self._near = near = Nearness.of(spec.window, spec.within_us, spec.after_us)
        # With windows, a row has partners if its pane has a counterpart, so no waiting row is stored for it.
        self._stores_waiting = near.reach > 0
        self._numbers = _Numbers(state.space)
        self._times: dict[int, int] = {}
        self._rest: list[Iterator[pa.RecordBatch]] = []
        self._adds = [name for name in takes[1].names if name not in spec.right_keys]
        # The key of a pair comes from its left row. So the right one stores its key only if it may be emitted alone.
        needed = {*self._adds, spec.right_time, *(spec.right_keys if spec.how.keeps_right else ())}
        kept = pa.schema([column for column in takes[1] if column.name in needed])
        layout = _layout(spec, near)

        def limits(shift: int, others_shift: int) -> tuple[Limits, Limits]:
            passed, now = times.late_before, times.watermark
            return (
                Limits.of(near, passed, passed, shift=shift, others_shift=others_shift),
                Limits.of(near, passed, now, shift=shift, others_shift=others_shift),
            )

        self.left = _Side(
            spec.left_keys,
            spec.left_time,
            Panes(state, takes[0], Namespace.JOIN_LEFT, Namespace.JOIN_LEFT_MORE, layout, self._what),
            _Role(LATE, spec.how.keeps_left, Namespace.JOIN_WAITING, near.shift),
            limits(near.shift, 0),
            ErrorsBranch(operator, ERRORS),
        )
        self.right = _Side(
            spec.right_keys,
            spec.right_time,
            Panes(state, kept, Namespace.JOIN_RIGHT, Namespace.JOIN_RIGHT_MORE, layout, self._what),
            _Role(LATE_RIGHT, spec.how.keeps_right, Namespace.JOIN_RIGHT_WAITING, 0),
            limits(0, near.shift),
            ErrorsBranch(operator, ERRORS_RIGHT),
        )
        if self._shared is not None:
            self._shared.unite(self.left.panes, self.right.panes)
            self.left.latest, self.right.latest = self.left.panes.latest, self.right.panes.latest
        # Where the columns of a right row that is emitted alone come from: its key stands in the left columns.
        keys = dict(zip(spec.left_keys, spec.right_keys, strict=True))
        self._from_right = [keys.get(name) for name in takes[0].names] + list(self._adds)

    def enter(self, side: _Side, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Take a slice of one side; returns its pairs with the rows so far, its late rows and its bad rows."""
        if self._shared is None:
            return self._enter(side, batch)
        results = []
        for rows, shares, tells in self._shared.parts("left" if side is self.left else "right", batch, side.keys):
            found = self._enter(side, rows, shares)
            results.append(found if tells else {name: each for name, each in found.items() if name == ONLY})
        names = dict.fromkeys(name for each in results for name in each)
        return {name: pa.concat_batches([each[name] for each in results if name in each]) for name in names}

    def _enter(self, side: _Side, batch: pa.RecordBatch, shares: Sequence[int] = ()) -> dict[str, pa.RecordBatch]:
        """Take rows of one side; if they are those of a divided bin, they are kept in each of ``shares``."""
        batch, bad = side.screen(batch)
        results: dict[str, pa.RecordBatch] = dict(bad)
        instants = self._instants(side, batch)
        late = instants < side.limits.late
        if late.any():
            results[side.late] = batch.filter(pa.array(late))
            batch, instants = batch.filter(pa.array(~late)), instants[~late]
        if not batch.num_rows:
            return results
        kept = pa.RecordBatch.from_arrays([batch.column(name) for name in side.schema.names], schema=side.schema)
        numbers = self._key_numbers(side, batch)
        if shares:
            numbers = np.concatenate([self._in_bin(numbers, share) for share in shares])
            if len(shares) > 1:
                kept = pa.concat_batches([kept] * len(shares))
                instants = np.tile(instants, len(shares))
        run = SortedRun.of(kept, numbers, instants)
        other = self.right if side is self.left else self.left
        self._read(other, run)
        pairs = self._pairs(side, run, other)
        side.arrived.add(run)
        if ready := self._ready(pairs):
            results[ONLY] = ready[0] if len(ready) == 1 else pa.concat_batches(ready)
        return results

    def flush(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Emit the pairs that exceeded :data:`MAX_PAIRS`."""
        for pairs in chain.from_iterable(self._rest):
            yield {ONLY: pairs}
        self._rest.clear()

    def finish(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Close the panes that the watermark has passed, and write the rest to state."""
        # Nothing is deleted before all scans are done: scans are slow over modified state.
        gone: list[bytes] = []
        sides = ((self.left, self.right), (self.right, self.left))
        for side, other in sides:
            if side.keeps:
                for rows in self._closed(side, other, gone):
                    yield {ONLY: self._with_nulls(side, rows)}
        self._forget(gone)
        self._state.delete_many(gone)
        for side, _ in sides:
            if side.keeps and self._stores_waiting:
                self._write_waiting(side)
            self._write(side)

    def _closed(self, side: _Side, other: _Side, gone: list[bytes]) -> Iterator[pa.RecordBatch]:
        """The rows of a side that can no longer get a partner. Adds stored keys to delete to ``gone``."""
        arrived = side.arrived.all()
        lonely = arrived.part(~arrived.matched & (arrived.times < side.limits.over))
        if len(lonely):
            yield lonely.taken()
        for values in _bounded(self._waited(side, gone) if self._stores_waiting else self._alone(side, other)):
            yield side.panes.codec.decode(values)[0]

    # ── pairs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _pairs(self, side: _Side, run: SortedRun, other: _Side) -> Iterator[pa.RecordBatch]:
        """Find all partners of a slice now, and build the pairs lazily."""
        found = []
        for theirs in (*other.read, *other.arrived):
            starts, stops = theirs.partners_of(run, self._near.reach)
            hit = np.flatnonzero(stops > starts)
            if not len(hit):
                continue
            starts, stops = starts[hit], stops[hit]
            if side.keeps:
                run.matched[hit] = True
            if other.keeps:
                theirs.mark(starts, stops)
            found.append((theirs, run.rows[hit], starts, stops - starts))
        return (
            self._paired(run.batch, mine, theirs.batch, others)
            if side is self.left
            else self._paired(theirs.batch, others, run.batch, mine)
            for theirs, rows, starts, counts in found
            for mine, others in _in_portions(rows, theirs.rows, starts, counts)
        )

    def _paired(
        self, left: pa.RecordBatch, lefts: _Integers, right: pa.RecordBatch, rights: _Integers
    ) -> pa.RecordBatch:
        taken = left.take(pa.array(lefts)), right.select(self._adds).take(pa.array(rights))
        return pa.RecordBatch.from_arrays([*taken[0].columns, *taken[1].columns], schema=self._operator.schema)

    def _ready(self, pairs: Iterator[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """The pairs that a slice emits at once; :meth:`flush` emits the rest."""
        ready, count = [], 0
        for batch in pairs:
            ready.append(batch)
            count += batch.num_rows
            if count >= MAX_PAIRS:
                self._rest.append(pairs)
                break
        return ready

    def _with_nulls(self, side: _Side, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows without a partner, with nulls in the place of the other side's columns."""
        schema = self._operator.schema
        names: list[str | None] = list(self._from_right)
        if side is self.left:
            names = [*rows.schema.names, *[None] * len(self._adds)]
        columns = [
            pa.nulls(rows.num_rows, field.type) if name is None else rows.column(name)
            for field, name in zip(schema, names, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    # ── keys and times ────────────────────────────────────────────────────────────────────────────────────────────

    def _instants(self, side: _Side, batch: pa.RecordBatch) -> _Integers:
        column = batch.column(side.time)
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            error = SchemaError(
                f"the event time {side.time!r} is null; a row without a time cannot be joined. Filter such rows out "
                f"before the join, or give them a time in a map"
            )
            raise failed(self._operator.name, error, row_at(batch, row))
        times: _Integers = column.cast(pa.timestamp("us", column.type.tz)).view(pa.int64()).to_numpy()
        return self._near.instants(times, side.shift)

    def _key_numbers(self, side: _Side, batch: pa.RecordBatch) -> _Integers:
        try:
            groups = group_keys(batch, side.keys, self._what, space=self._state.space)
        except StateError as error:
            raise failed(self._operator.name, error, row_at(batch, error.fields.get("row_index"))) from error
        numbers = np.array(list(map(self._numbers.__getitem__, groups.keys)), np.int64)
        return numbers[groups.group_of_row]

    def _in_bin(self, numbers: _Integers, share: int) -> _Integers:
        """The numbers of the same keys in another bin."""
        space, distinct = self._state.space, np.unique(numbers)
        prefix = space.prefix(share, Namespace.VALUE)
        moved = [self._numbers[prefix + self._numbers.ends[number][1]] for number in distinct.tolist()]
        return np.array(moved, np.int64)[np.searchsorted(distinct, numbers)]

    def _stored_keys(self, numbers: _Integers, times: _Integers, namespace: Namespace) -> tuple[list[bytes], _Integers]:
        """The stored keys for keys (by number) and times, ascending, and the permutation that sorts them."""
        distinct, ranks = np.unique(times, return_inverse=True)
        middles = [bytes([namespace]) + integer_bytes(time) for time in distinct.tolist()]
        ends = self._numbers.ends
        named = zip(map(ends.__getitem__, numbers.tolist()), map(middles.__getitem__, ranks.tolist()), strict=True)
        stored = pa.array([first + middle + last for (first, last), middle in named], pa.binary())
        order = pc.sort_indices(stored)
        return stored.take(order).to_pylist(), order.to_numpy()

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, side: _Side, run: SortedRun) -> None:
        """Load the panes of one side in which a slice of the other side may have partners."""
        if side.latest is None:
            return
        keys, starts = self._panes_of(run)
        if self._near.reach:
            width = self._near.width
            keys, starts = np.tile(keys, 3), np.concatenate((starts - width, starts, starts + width))
        there = starts <= side.latest
        keys, starts = self._unread(side, keys[there], starts[there])
        if not len(keys):
            return
        stored, order = self._stored_keys(keys, starts, side.panes.namespace)
        rows, owners = side.panes.read(stored)
        if rows.num_rows:
            side.read.add(SortedRun.of(rows, keys[order][owners], self._instants(side, rows)))

    def _unread(self, side: _Side, keys: _Integers, starts: _Integers) -> tuple[_Integers, _Integers]:
        """The panes that have not been read before; marks them as read."""
        distinct, ranks = np.unique(starts, return_inverse=True)
        numbers = [self._times.setdefault(time, len(self._times)) for time in distinct.tolist()]
        codes, places = np.unique(np.array(numbers, np.int64)[ranks] * _KEYS + keys, return_index=True)
        known = side.known
        new = [place for place, code in zip(places.tolist(), codes.tolist(), strict=True) if code not in known]
        known.update(codes.tolist())
        return keys[new], starts[new]

    def _panes_of(self, run: SortedRun) -> tuple[_Integers, _Integers]:
        """The panes of the rows of a run, as numbers of keys and start times."""
        firsts = run.firsts(self._near.width)
        return run.keys[firsts], run.times[firsts] // self._near.width * self._near.width

    def _write(self, side: _Side) -> None:
        """Add the rows of this epoch to the panes of one side, unless they are over already."""
        run = side.arrived.all()
        run = run.part(run.times >= side.limits.over)
        if not len(run):
            return
        firsts = run.firsts(self._near.width)
        stops = np.append(firsts[1:], len(run))
        stored, order = self._stored_keys(*self._panes_of(run), side.panes.namespace)
        side.panes.add(stored, side.panes.codec.encode(run.taken()), firsts[order], stops[order])

    def _forget(self, gone: list[bytes]) -> None:
        """Add the keys of panes that are over to ``gone``."""
        for side in (self.left, self.right):
            forgotten = side.limits.forgotten
            if forgotten == side.before.forgotten:
                continue
            for bin_id in side.panes.bins_over(forgotten):
                gone += side.panes.keys_over(bin_id, forgotten)

    def _alone(self, side: _Side, other: _Side) -> Iterator[bytes]:
        """The rows of a side's panes that are over and have no counterpart: with windows, they have no partners."""
        forgotten = side.limits.forgotten
        if forgotten == side.before.forgotten:
            return
        run = other.arrived.all()
        stored, _ = self._stored_keys(*self._panes_of(run.part(run.times < forgotten)), other.panes.namespace)
        head = self._state.space.head
        arrived = {key[head:] for key in stored}
        for bin_id in side.panes.bins_over(forgotten):
            there = {name for _, name, _ in other.panes.over(bin_id, forgotten)}
            for _, name, rows in side.panes.over(bin_id, forgotten):
                if name not in there and name not in arrived:
                    yield rows

    # ── rows that wait for a partner, where pairs are not always in one pane ──────────────────────────────────────
    # All rows of one side, key and instant have the same partners, so they start and stop waiting together.

    def _waited(self, side: _Side, gone: list[bytes]) -> Iterator[bytes]:
        """End the wait of rows that have met a partner, and of rows that never will; the latter are returned."""
        met = self._met(side)
        gone += met
        if side.limits.over == side.before.over:
            return
        stop = integer_bytes(side.limits.over)
        for bin_id in self._state.occupied(side.waiting, stop):
            for key, rows in self._state.scan(bin_id, side.waiting, stop=stop):
                if key not in met:
                    gone.append(key)
                    yield rows

    def _met(self, side: _Side) -> set[bytes]:
        """The keys of waiting rows of a side that met a partner in this epoch."""
        met = set[bytes]()
        for run in side.read:
            matched = run.part(run.matched)
            firsts = matched.firsts()
            keys, _ = self._stored_keys(matched.keys[firsts], matched.times[firsts], side.waiting)
            waiting = self._state.get_many(keys)
            met.update(key for key, rows in zip(keys, waiting, strict=True) if rows is not None)
        return met

    def _write_waiting(self, side: _Side) -> None:
        """Store the rows of this epoch that may still meet a partner as waiting."""
        run = side.arrived.all()
        run = run.part(~run.matched & (run.times >= side.limits.over))
        firsts = run.firsts()
        keys, order = self._stored_keys(run.keys[firsts], run.times[firsts], side.waiting)
        rows = side.panes.codec.encode(run.taken())
        starts = rows.offsets[firsts[order]].tolist()
        stops = rows.offsets[np.append(firsts[1:], len(run))[order]].tolist()
        known = self._state.get_many(keys)
        values = [
            (waiting or b"") + rows.data[start:stop] for waiting, start, stop in zip(known, starts, stops, strict=True)
        ]
        self._state.put_many(keys, values)


def _layout(spec: Join, near: Nearness) -> str:
    """A text of all that must not change while rows are stored. Its digest is on disk, so the text must stay."""
    keys = ", ".join(f"{left} = {right}" for left, right in zip(spec.left_keys, spec.right_keys, strict=True))
    apart = f"within {near.reach} us" if spec.window is None else f"in windows of {near.grid} us"
    if near.shift:
        apart = f"within {near.reach - near.shift} us before and {near.reach + near.shift} us after"
    if isinstance(spec.window, Tumbling) and (spec.window.offset_us or spec.window.zone):
        apart += f" from {spec.window.offset_us} us on in {spec.window.zone or 'UTC'}"
    return f"{spec.how} join on {keys}; {spec.left_time} and {spec.right_time} {apart}"


def _in_portions(
    mine: _Integers, theirs: _Integers, starts: _Integers, counts: _Integers
) -> Iterator[tuple[_Integers, _Integers]]:
    """Pairs of rows, about :data:`MAX_PAIRS` at a time: ``mine`` with ``counts`` of ``theirs`` from ``starts`` on."""
    ends = np.cumsum(counts)
    start = 0
    while start < len(mine):
        done = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, done + MAX_PAIRS, side="right")), start + 1)
        owners, partners = expand(starts[start:stop], counts[start:stop])
        yield mine[start:stop][owners], theirs[partners]
        start = stop


def _bounded(values: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The values in lists of bounded size."""
    portion, size = list[bytes](), 0
    for value in values:
        portion.append(value)
        size += len(value)
        if size >= _AT_ONCE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion
