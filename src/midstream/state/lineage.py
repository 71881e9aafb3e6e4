"""Lineage: the files that make up an operator's state at an epoch. Pure data, stored in the epoch's manifest.

A lineage is a list of entries, oldest first. An entry is a file and the bins it is *live* for. The history of a bin is
the list of entries live for it: at most one snapshot, then deltas. A rewrite (a snapshot of some bins, or several
deltas merged) takes its bins from the entries that it replaces; an entry that is live for no bin is dropped.

Up to 256 bins a lineage is written as a plain msgpack array. With more, its bitmaps and counters are large but regular,
so it is compressed (65,536 bins: see the State section of docs/architecture.md for sizes).

A base stores a *position* per bin: the digest of the last delta applied. An epoch number would not be enough: if an
epoch runs again after a driver crash, its delta is a different file, and a base with the first must not pass for one
with the second. A snapshot keeps the position of the state it was taken from, so the base it was read from does not
have to load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NewType

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.data.key_space import BinNumbers, KeySpace
from midstream.errors import CheckpointError, FlowError, StateError
from midstream.ids import BINS, BinId, Epoch, PartitionId
from midstream.state.files import FileRef

__all__ = [
    "EMPTY",
    "Lineage",
    "LineageEntry",
    "LineageStep",
    "Position",
    "Positions",
    "Rewrite",
    "Steps",
    "StoredLineage",
]

Position = NewType("Position", bytes)
"""The state a bin has reached: the digest of the last delta applied to it."""

EMPTY = Position(b"")
"""The position of a bin that has never had any state."""

Positions = npt.NDArray[np.bytes_]
"""The position of each bin, indexed by bin."""

MIN_ROWS = 1000
"""A bin whose deltas have fewer rows than this does not get a snapshot because of them."""

MERGED_AT_ONCE = 16
"""Number of single-epoch deltas that are merged into one file."""

FOLLOWED = 8
"""For so many epochs a base may be behind when deltas are merged without having to load bins anew."""

_STRIDE = 7
"""The distance of the turns at which two neighbouring partitions merge deltas; odd, so that few share a turn."""

MAX_ENTRIES = 80
"""A bin with a longer history gets a snapshot even if it has few rows, because restoring opens every file."""

SMALL_REWRITE = 20_000
"""Rows that any epoch may rewrite, no matter how few rows it touched."""


class LineageEntry(msgspec.Struct, frozen=True, array_like=True):
    """A file and the bins it is live for."""

    file: FileRef
    live: bytes
    """Bitmap of bins."""
    complete: bool = False
    """Whether this is a snapshot, which holds everything its bins have."""
    single: bool = True
    """Whether this is the delta of a single epoch, not yet merged with others."""
    leads_to: tuple[tuple[Position, bytes], ...] = ()
    """Positions after this file, each with a bitmap of bins; empty if it is the file's own digest for all bins."""
    within: tuple[tuple[Position, bytes], ...] = ()
    """Positions that merged deltas led to, each with a bitmap of bins. A base at one of them needs this file and newer
    ones: it has the last row of each key that any of them changed. Kept for a few epochs."""


class Rewrite(msgspec.Struct, frozen=True, array_like=True):
    """A file that replaces several others for some bins: a snapshot if it is complete, otherwise merged deltas."""

    file: FileRef
    bins: bytes
    """The bins, ascending and packed (:meth:`.KeySpace.pack`). The file need not have rows for all of them."""
    replaces: tuple[bytes, ...]
    """Digests of the replaced files."""
    complete: bool
    sizes: tuple[int, ...] = ()
    """Bytes of keys and values of each bin that has rows."""


@dataclass(frozen=True)
class LineageStep:
    """Apply a file's rows for some bins; afterwards those bins are at these positions."""

    file: FileRef
    leads_to: tuple[tuple[Position, BinNumbers], ...]
    """Positions after the file, each with its bins."""

    @property
    def positions(self) -> dict[BinId, Position]:
        """The position of each bin after this step."""
        return {BinId(number): position for position, bins in self.leads_to for number in bins.tolist()}

    @cached_property
    def bins(self) -> BinNumbers:
        """The bins of this step, ascending."""
        parts = [bins for _, bins in self.leads_to]
        return parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))


@dataclass(frozen=True)
class Steps:
    """The work of a base to catch up: clear some bins, then apply files in this order."""

    clear: frozenset[BinId]
    apply: tuple[LineageStep, ...]

    def __bool__(self) -> bool:
        return bool(self.clear or self.apply)


class StoredLineage(msgspec.Struct, frozen=True, array_like=True):
    """A lineage in a manifest. With more than 256 bins, ``rows`` and ``keys`` are arrays of 64-bit numbers."""

    operator: str
    epoch: Epoch
    entries: tuple[LineageEntry, ...] = ()
    rows: tuple[int, ...] | bytes = (0,) * BINS
    """Per bin: number of delta rows since its snapshot."""
    keys: tuple[int, ...] | bytes = (0,) * BINS
    """Per bin: number of rows in its snapshot."""


_COMPRESSED = b"\xc1"
"""Before a compressed lineage; no msgpack document starts with this byte."""

_Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lineage:
    """The files that make up an operator's state at the end of an epoch.

    >>> delta = FileRef("count/0000000000-0-0-0-delta-0123456789abcdef.arrow", 300, b"d0", 2, b"\\x07", (2,))
    >>> lineage = Lineage.start("count").after(Epoch(0), [delta])
    >>> lineage.position(BinId(7))
    b'd0'
    >>> [(step.file.digest, step.positions) for step in lineage.missing({}, [BinId(7)]).apply]
    [(b'd0', {7: b'd0'})]
    >>> Lineage.decode(lineage.encode()) == lineage
    True
    """

    operator: str
    epoch: Epoch
    space: KeySpace
    rows: _Counts = field(repr=False)
    """Per bin: number of delta rows since its snapshot."""
    keys: _Counts = field(repr=False)
    """Per bin: number of rows in its snapshot."""
    entries: tuple[LineageEntry, ...] = ()

    @classmethod
    def start(cls, operator: str, bins: int = BINS) -> Lineage:
        """The lineage of an operator that has no state yet."""
        return cls(
            operator, Epoch(-1), KeySpace(bins), _fixed(np.zeros(bins, np.int64)), _fixed(np.zeros(bins, np.int64))
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lineage) and self._encoded == other._encoded

    def __hash__(self) -> int:
        return hash(self._encoded)

    def encode(self) -> bytes:
        """Compact bytes for the manifest."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        if self.space.width == 1:
            counts = tuple(self.rows.tolist()), tuple(self.keys.tolist())
            return msgspec.msgpack.encode(StoredLineage(self.operator, self.epoch, self.entries, *counts))
        packed = self.rows.astype("<i8").tobytes(), self.keys.astype("<i8").tobytes()
        data = msgspec.msgpack.encode(StoredLineage(self.operator, self.epoch, self.entries, *packed))
        compressed: bytes = pa.compress(data, "zstd", asbytes=True)
        return _COMPRESSED + len(data).to_bytes(8, "little") + compressed

    @classmethod
    def decode(cls, data: bytes) -> Lineage:
        """The lineage that :meth:`encode` was given."""
        try:
            if data[:1] == _COMPRESSED:
                size = int.from_bytes(data[1:9], "little")
                data = pa.decompress(data[9:], size, "zstd", asbytes=True)
            stored = msgspec.msgpack.decode(data, type=StoredLineage)
            rows, keys = _counts(stored.rows), _counts(stored.keys)
            if len(rows) != len(keys):
                raise ValueError(f"it counts {len(rows)} and {len(keys)} bins")
            return cls(stored.operator, stored.epoch, KeySpace(len(rows)), rows, keys, stored.entries)
        except (msgspec.MsgspecError, OSError, ValueError, FlowError) as error:
            raise CheckpointError(
                f"a state lineage is damaged, or was written by another version of midstream: {error}"
            ) from error

    def after(self, epoch: Epoch, deltas: Sequence[FileRef], rewrites: Sequence[Rewrite] = ()) -> Lineage:
        """The lineage after an epoch has been committed.

        ``deltas`` are the changes of its tasks, at most one per bin; ``rewrites`` were made from the state before it.
        """
        if epoch <= self.epoch:
            raise StateError(f"operator {self.operator!r}: epoch {epoch} cannot follow epoch {self.epoch}")
        entries = [_forgetful(entry, epoch) for entry in self.entries]
        rows, keys, space = self.rows.copy(), self.keys.copy(), self.space
        for rewrite in rewrites:
            entries = self._rewritten(entries, rewrite)
            if rewrite.complete:
                bins = space.unpack(rewrite.bins)
                rows[bins] = keys[bins] = 0
                keys[space.unpack(rewrite.file.bins)] = rewrite.file.counts
        taken = 0
        for delta in deltas:
            bins = space.unpack(delta.bins)
            live = _mask(bins)
            if live & taken:
                raise StateError(
                    f"operator {self.operator!r}, epoch {epoch}: two tasks changed the bins "
                    f"{_bins(live & taken).tolist()}; a bin belongs to one task ({delta.name!r} is the second)"
                )
            taken |= live
            entries.append(LineageEntry(_without_bins(delta), self._bitmap(live)))
            rows[bins] += np.asarray(delta.counts, np.int64)
        return Lineage(self.operator, epoch, space, _fixed(rows), _fixed(keys), tuple(entries))

    def _bitmap(self, mask: int) -> bytes:
        return mask.to_bytes(max(1, self.space.bins // 8), "little")

    def _rewritten(self, entries: list[LineageEntry], rewrite: Rewrite) -> list[LineageEntry]:
        bins, replaced = _mask(self.space.unpack(rewrite.bins)), set(rewrite.replaces)
        unknown = replaced - {entry.file.digest for entry in entries}
        if unknown or not replaced:
            raise StateError(
                f"operator {self.operator!r}: {rewrite.file.name!r} replaces {len(unknown) or 'no'} files that are not "
                f"part of epoch {self.epoch}; it was made from another state"
            )
        reached: dict[Position, int] = {}
        within: list[tuple[Position, bytes]] = []
        left: list[LineageEntry] = []
        place = 0
        for entry in entries:
            live = _mask_of(entry.live)
            if entry.file.digest in replaced or (rewrite.complete and live & bins):
                for position, group in _positions(entry):
                    reached = {known: mask & ~group for known, mask in reached.items()}
                    reached[position] = reached.get(position, 0) | (group & bins)
                    within.append((position, self._bitmap(group & bins)))
                if live & ~bins:
                    left.append(msgspec.structs.replace(entry, live=self._bitmap(live & ~bins)))
                place = len(left)
            else:
                left.append(entry)
        leads_to = tuple((position, self._bitmap(mask)) for position, mask in reached.items() if mask)
        live = sum(reached.values())  # the masks are disjoint; bins without a history are left out
        known = () if rewrite.complete else tuple(within[-FOLLOWED:])
        made = LineageEntry(_without_bins(rewrite.file), self._bitmap(live), rewrite.complete, False, leads_to, known)
        left.insert(place, made)
        return left

    def position(self, bin_id: BinId) -> Position:
        """The position of a base that has all of a bin."""
        return self.positions([bin_id])[bin_id]

    def positions(self, bins: Iterable[BinId]) -> dict[BinId, Position]:
        """The positions of a base that has all of these bins."""
        found = dict.fromkeys(bins, EMPTY)
        open_ = _mask(found)
        for entry in reversed(self.entries):
            for position, group in _positions(entry):
                if here := group & open_:
                    found.update(dict.fromkeys(map(BinId, _bins(here).tolist()), position))
                open_ &= ~group
            if not open_:
                break
        return found

    def position_array(self, bins: Iterable[int]) -> Positions:
        """The same for all bins at once; the positions of bins that were not asked for are empty."""
        found = np.zeros(self.space.bins, "S16")
        open_ = _mask(bins)
        for entry in reversed(self.entries):
            for position, group in _positions(entry):
                if here := group & open_:
                    found[_bins(here)] = position
                open_ &= ~group
            if not open_:
                break
        return found

    def missing(self, held: Mapping[BinId, Position] | Positions, bins: Iterable[int]) -> Steps:
        """The steps for a base to have all of ``bins``; ``held`` has the position of each bin that it has.

        If a position is not part of a bin's history (because an epoch was run again, it is another job's, or it is too
        old), the base rebuilds that bin from scratch.
        """
        at = held if isinstance(held, np.ndarray) else _as_array(held, self.space.bins)
        open_ = _mask(bins)
        # Walk back from the newest entry until each bin reaches the base's position: usually one step, however long the
        # history.
        steps: list[LineageStep] = []
        for entry in reversed(self.entries):
            leads_to: list[tuple[Position, BinNumbers]] = []
            for position, group in _positions(entry):
                if not (here := group & open_):
                    continue
                numbers = _bins(here)
                there = at[numbers] == position
                if there.any():
                    open_ &= ~_mask(numbers[there])
                    numbers = numbers[~there]
                if len(numbers):
                    leads_to.append((position, numbers))
            if leads_to:
                steps.append(LineageStep(entry.file, tuple(leads_to)))
                for position, bitmap in entry.within:
                    numbers = _bins(_mask_of(bitmap) & _mask_of(entry.live) & open_)
                    open_ &= ~_mask(numbers[at[numbers] == position])
            if not open_:
                break
        left = _bins(open_)
        return Steps(frozenset(map(BinId, left[at[left] != EMPTY].tolist())), tuple(reversed(steps)))

    def only(self, bins: Iterable[int], entries: Iterable[LineageEntry] | None = None) -> Lineage:
        """What a task that owns just these bins needs to know. ``entries``: all that are live for any of them, if the
        caller knows.

        >>> delta = FileRef("count/0000000000-0-0-0-delta-0123456789abcdef.arrow", 300, b"d0", 2, b"\\x07", (2,))
        >>> lineage = Lineage.start("count").after(Epoch(0), [delta])
        >>> len(lineage.only([7]).entries), len(lineage.only([8]).entries)
        (1, 0)
        """
        numbers = np.fromiter(bins, np.int64)
        mask = _mask(numbers)
        found = []
        for entry in self.entries if entries is None else entries:
            if live := _mask_of(entry.live) & mask:
                groups = ((position, _mask_of(group) & live) for position, group in entry.leads_to)
                leads_to = tuple((position, self._bitmap(group)) for position, group in groups if group)
                within = tuple((position, self._bitmap(_mask_of(group) & live)) for position, group in entry.within)
                changed = msgspec.structs.replace(entry, live=self._bitmap(live), leads_to=leads_to, within=within)
                found.append(changed)
        rows, keys = np.zeros_like(self.rows), np.zeros_like(self.keys)
        rows[numbers], keys[numbers] = self.rows[numbers], self.keys[numbers]
        return Lineage(self.operator, self.epoch, self.space, _fixed(rows), _fixed(keys), tuple(found))

    def _lengths(self) -> _Counts:
        """The number of entries of each bin."""
        bitmaps = np.frombuffer(b"".join(entry.live for entry in self.entries), np.uint8)
        bits = np.unpackbits(bitmaps.reshape(len(self.entries), -1), axis=1, count=self.space.bins, bitorder="little")
        lengths: _Counts = bits.sum(axis=0, dtype=np.int64)
        return lengths

    def due_for_snapshot(self, bins: Iterable[BinId], touched: int) -> list[BinId]:
        """Those of ``bins`` whose state should be written as a snapshot, most urgent first.

        A bin is due when its deltas have as many rows as its snapshot; so the amortised cost per delta row is constant.
        An epoch rewrites at most four times the rows that it ``touched``: bins that become due together are spread over
        several epochs, but are rewritten faster than they become due.
        """
        if not self.entries:
            return []
        lengths, numbers = self._lengths(), np.fromiter(bins, np.int64)
        urgency = np.maximum(self.rows / np.maximum(MIN_ROWS, self.keys), lengths / MAX_ENTRIES)
        due = numbers[(urgency[numbers] > 1) & (lengths[numbers] > 0)]
        due = due[np.argsort(-urgency[due], kind="stable")]
        # At least one, and as many more as the budget covers.
        spent = np.cumsum(self.keys[due] + self.rows[due])
        within = max(1, int(np.searchsorted(spent, max(SMALL_REWRITE, 4 * touched), side="right")))
        return [BinId(number) for number in due[:within].tolist()]

    def due_for_merging(
        self, bins: Iterable[BinId], epoch: Epoch, partition: PartitionId
    ) -> list[tuple[FileRef, list[BinId]]]:
        """The single-epoch deltas of ``bins``, oldest first, each with the bins it is live for.

        Empty unless there are enough to merge. Each partition has a turn every :data:`MERGED_AT_ONCE` epochs, and
        merges nothing before unless it has far too many: rows would wait for an epoch in which all merge.

        A rewrite takes its bins from everything older, so these are the newest entries in the history of each bin.
        """
        mask = _mask(bins)
        single = [
            (entry.file, [BinId(number) for number in _bins(_mask_of(entry.live) & mask).tolist()])
            for entry in self.entries
            if entry.single and _mask_of(entry.live) & mask
        ]
        is_turn = (epoch + _STRIDE * partition) % MERGED_AT_ONCE == 0
        enough = -(-MERGED_AT_ONCE // 2) if is_turn else MERGED_AT_ONCE * 3 // 2
        return single if len(single) >= max(2, enough) else []

    def live_files(self) -> Iterator[tuple[FileRef, set[BinId]]]:
        """All files, oldest first, each with the bins it is live for."""
        for entry in self.entries:
            yield entry.file, set(map(BinId, _bins(_mask_of(entry.live)).tolist()))

    def files_of(self, bins: Iterable[BinId]) -> list[FileRef]:
        """The files that are live for any of ``bins``, oldest first."""
        mask = _mask(bins)
        return [entry.file for entry in self.entries if _mask_of(entry.live) & mask]

    def bins(self) -> list[BinId]:
        """The bins that have a history."""
        live = 0
        for entry in self.entries:
            live |= _mask_of(entry.live)
        return [BinId(number) for number in _bins(live).tolist()]

    def bytes_behind(self, held: Positions, bins: Iterable[int]) -> npt.NDArray[np.float64]:
        """Per bin: about how many bytes of files a base with ``held`` has to read for it."""
        live = {entry.file.digest: max(1, _mask_of(entry.live).bit_count()) for entry in self.entries}
        sizes = np.zeros(self.space.bins)
        for step in self.missing(held, bins).apply:
            sizes[step.bins] += step.file.size / live[step.file.digest]
        return sizes


def _positions(entry: LineageEntry) -> Iterator[tuple[Position, int]]:
    """The positions that an entry leads to, each with its bins as a mask."""
    live = _mask_of(entry.live)
    if not entry.leads_to:
        yield Position(entry.file.digest), live
    for position, group in entry.leads_to:
        yield position, _mask_of(group) & live


def _forgetful(entry: LineageEntry, epoch: Epoch) -> LineageEntry:
    """The entry as it is kept with an epoch: no base is expected to be far behind."""
    if entry.within and entry.file.epoch + FOLLOWED < epoch:
        return msgspec.structs.replace(entry, within=())
    return entry


def _without_bins(ref: FileRef) -> FileRef:
    return FileRef(ref.name, ref.size, ref.digest, ref.rows)


def _mask(bins: Iterable[int]) -> int:
    """Bins as a whole number with one bit for each: unions and differences of many bins take microseconds."""
    numbers = bins if isinstance(bins, np.ndarray) else np.fromiter(bins, np.int64)
    if not len(numbers):
        return 0
    bits = np.zeros(int(numbers.max()) + 1, np.bool_)
    bits[numbers] = True
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def _bins(mask: int) -> BinNumbers:
    """The bins of a mask, ascending."""
    data = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
    return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little"))


def _mask_of(bitmap: bytes) -> int:
    return int.from_bytes(bitmap, "little")


def _as_array(positions: Mapping[BinId, Position], bins: int) -> Positions:
    found = np.zeros(bins, "S16")
    for number, position in positions.items():
        found[number] = position
    return found


def _counts(stored: tuple[int, ...] | bytes) -> _Counts:
    found = np.frombuffer(stored, "<i8") if isinstance(stored, bytes) else stored
    return _fixed(np.array(found, np.int64))


def _fixed(counts: _Counts) -> _Counts:
    counts.flags.writeable = False
    return counts
