"""The state of a join when a bin is divided and when it is united again; see :mod:`midstream.planner.division`.

State itself says what was done: each bin of a division has a mark, which is committed with what it stands for. A task
that owns a bin whose mark and division disagree makes them agree, before it takes any row: in the first epoch with a
division, and again if that epoch is run again.

=========================== =========================================== ==========================================
bin                         has no mark, is divided                     has a mark, is united
=========================== =========================================== ==========================================
the divided one             it is marked                                it takes the spread rows of the others back
one that has a share in it  it copies the copied rows of the divided    it drops all rows of the divided one's
                            one                                         keys
=========================== =========================================== ==========================================

What other tasks own is read as it was committed, so nobody waits for anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.hashing import bins_of, hash_columns
from midstream.ids import BinId
from midstream.planner.assignment import DividedBin
from midstream.state.key_arrays import decode_keys
from midstream.state.keys import Namespace
from midstream.state.panes import Panes
from midstream.state.task import TaskState

__all__ = ["Elsewhere", "SharedBins"]

Elsewhere = Callable[[Collection[BinId]], pa.Table]
"""Stored keys and values of some bins of the join, as they are committed."""

_TIMED = 8  # bytes of a time in front of the key columns
_PANES = {"left": Namespace.JOIN_LEFT, "right": Namespace.JOIN_RIGHT}
_MORE = {"left": Namespace.JOIN_LEFT_MORE, "right": Namespace.JOIN_RIGHT_MORE}
_WAITING = {"left": Namespace.JOIN_WAITING, "right": Namespace.JOIN_RIGHT_WAITING}
_NUMBER = 4  # bytes of the number of a segment, behind the key


class SharedBins:
    """The divided bins of a join in one task."""

    def __init__(
        self,
        state: TaskState,
        keys: pa.Schema,
        divided: Iterable[DividedBin],
        united: Iterable[DividedBin],
        elsewhere: Elsewhere | None,
    ) -> None:
        self._state = state
        self._space = state.space
        self._keys = keys
        self._divided = [each for each in divided if state.bins & set(each.bins)]
        self._united = [each for each in united if state.bins & set(each.bins)]
        self._elsewhere = elsewhere
        self._coming_home: list[tuple[DividedBin, pa.Table]] = []

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_any(self) -> bool:
        """Whether this task has to do with any divided bin."""
        return bool(self._divided or self._united)

    def parts(
        self, side: str, batch: pa.RecordBatch, keys: Sequence[str]
    ) -> Iterator[tuple[pa.RecordBatch, Sequence[int], bool]]:
        """The rows of a slice, taken apart: those of each divided bin, with the bins of this task that keep them, and
        whether late and bad ones leave here; then all others, which are kept in their own bins."""
        bins = bins_of(hash_columns(batch, keys), self._space.bins)
        for each in self._divided:
            here = bins == each.home
            if here.any():
                own = [number for number in each.bins if number in self._state.bins]
                rows = batch.filter(pa.array(here))
                batch, bins = batch.filter(pa.array(~here)), bins[~here]
                yield (rows, own[:1], True) if side == each.spread else (rows, own, each.home in self._state.bins)
        if batch.num_rows:
            yield batch, (), True

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def divide(self) -> None:
        """Copy what bins that got a share lack, and drop what bins that lost theirs have. Before panes are read."""
        for each in self._divided:
            for number in each.bins:
                if number in self._state.bins and self._mark(number) is None:
                    if number != each.home:
                        self._copy(each, number)
                    self._state.put_many([self._mark_key(number)], [self._space.prefix(each.home)])
        for each in self._united:
            home = self._space.prefix(each.home)
            for number in each.bins:
                if number in self._state.bins and self._mark(number) == home:
                    if number == each.home:
                        others = [BinId(other) for other in each.bins[1:]]
                        self._coming_home.append((each, self._read(others)))
                    else:
                        self._drop(each, number)
                    self._state.delete_many([self._mark_key(number)])

    def unite(self, left: Panes, right: Panes) -> None:
        """Take rows back from bins that have lost their share."""
        for each, rows in self._coming_home:
            panes = left if each.spread == "left" else right
            self._take_panes(each, rows, panes)
            self._take_waiting(each, rows)
        self._coming_home.clear()

    def _read(self, bins: Sequence[BinId]) -> pa.Table:
        assert self._elsewhere is not None, "a preflight has no divided bins"
        return self._elsewhere(bins).combine_chunks()

    def _mark_key(self, number: int) -> bytes:
        return self._space.prefix(number, Namespace.JOIN_DIVIDED)

    def _mark(self, number: int) -> bytes | None:
        [found] = self._state.get_many([self._mark_key(number)])
        return found

    def _copy(self, divided: DividedBin, number: int) -> None:
        """Copy the copied side's rows of a divided bin into one that got a share."""
        side = "right" if divided.spread == "left" else "left"
        rows = self._read([BinId(divided.home)])
        prefix, width = self._space.prefix(number), self._space.width
        keys, values = [], []
        wanted = {_PANES[side], _MORE[side]}
        for key, value in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
            if key[width] in wanted:
                keys.append(prefix + key[width:])
                values.append(value)
            elif key[width] == Namespace.JOIN_LATEST and key[width + 1] == _PANES[side]:
                own = prefix + key[width:]
                [latest] = self._state.get_many([own])
                keys.append(own)
                values.append(value if latest is None or latest[:8] < value[:8] else latest)
        self._state.put_many(keys, values)

    def _drop(self, divided: DividedBin, number: int) -> None:
        """Drop all that a bin has of another one's keys."""
        for side in ("left", "right"):
            for namespace in (_PANES[side], _MORE[side], _WAITING[side]):
                keys = [key for key, _ in self._state.scan(BinId(number), namespace)]
                foreign = self._belongs(keys, divided.home, behind=_NUMBER if namespace is _MORE[side] else 0)
                self._state.delete_many([key for key, is_it in zip(keys, foreign, strict=True) if is_it])

    def _belongs(self, keys: list[bytes], home: int, behind: int = 0) -> list[bool]:
        """Whether stored keys, with a time in front of the key columns, are those of a bin."""
        if not keys:
            return []
        head = self._space.head
        plain = [key[:head] + key[head + _TIMED : len(key) - behind] for key in keys]
        columns = decode_keys(pa.array(plain, pa.binary()), self._keys, self._space)
        hashes = hash_columns(pa.RecordBatch.from_arrays(columns, schema=self._keys), self._keys.names)
        found: list[bool] = (bins_of(hashes, self._space.bins) == home).tolist()
        return found

    def _home_key(self, key: bytes, home: int) -> bytes:
        return self._space.prefix(home) + key[self._space.width :]

    def _in(self, rows: pa.Table, namespace: Namespace, home: int, behind: int = 0) -> list[tuple[bytes, bytes]]:
        """Keys and values of a namespace that belong to a bin."""
        width = self._space.width
        chosen = pc.equal(pc.binary_slice(rows["key"], width, width + 1), pa.scalar(bytes([namespace]), pa.binary()))
        found = rows.filter(chosen)
        keys, values = found["key"].to_pylist(), found["value"].to_pylist()
        belongs = self._belongs(keys, home, behind)
        return [(key, value) for key, value, is_it in zip(keys, values, belongs, strict=True) if is_it]

    def _take_panes(self, divided: DividedBin, rows: pa.Table, panes: Panes) -> None:
        """Add the panes of all shares to those of the divided bin."""
        found: dict[bytes, list[bytes]] = {}
        for key, value in self._in(rows, _PANES[divided.spread], divided.home):
            found.setdefault(self._home_key(key, divided.home), []).append(panes.rows_in(value))
        for key, value in self._in(rows, _MORE[divided.spread], divided.home, behind=_NUMBER):
            pane = self._space.prefix(divided.home, _PANES[divided.spread]) + key[self._space.head : -_NUMBER]
            found.setdefault(pane, []).append(value)
        if not found:
            return
        keys = sorted(found)
        batch, counts = panes.codec.decode([b"".join(found[key]) for key in keys])
        stops = np.cumsum(counts)
        panes.add(keys, panes.codec.encode(batch), stops - counts, stops)

    def _take_waiting(self, divided: DividedBin, rows: pa.Table) -> None:
        """Add the rows that wait for a partner."""
        found: dict[bytes, bytes] = {}
        for key, value in self._in(rows, _WAITING[divided.spread], divided.home):
            home = self._home_key(key, divided.home)
            found[home] = found.get(home, b"") + value
        keys = sorted(found)
        known = self._state.get_many(keys)
        self._state.put_many(keys, [(one or b"") + found[key] for key, one in zip(keys, known, strict=True)])
