"""Lineage: the files that make up an operator's state at an epoch. Pure data, stored in the epoch's manifest.

A lineage is a list of entries, oldest first. An entry is a file and the bins it is *live* for. The history of a bin is
the list of entries live for it: at most one snapshot, then deltas. A rewrite (a snapshot of some bins, or several
deltas merged) takes its bins from the entries that it replaces; an entry that is live for no bin is dropped.

A base stores a *position* per bin: the digest of the last delta applied. An epoch number would not be enough: if an
epoch runs again after a driver crash, its delta is a different file, and a base with the first must not pass for one
with the second. A snapshot keeps the position of the state it was taken from, so the base it was read from does not
have to load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

import msgspec
import numpy as np
import numpy.typing as npt

from midstream.errors import CheckpointError, StateError
from midstream.ids import BINS, BinId, Epoch
from midstream.state.files import FileRef, epoch_and_operator

__all__ = ["EMPTY", "Lineage", "LineageEntry", "LineageStep", "Position", "Rewrite", "Steps", "garbage"]

Position = NewType("Position", bytes)
"""The state a bin has reached: the digest of the last delta applied to it."""

EMPTY = Position(b"")
"""The position of a bin that has never had any state."""

MIN_ROWS = 1000
"""A bin whose deltas have fewer rows than this does not get a snapshot because of them."""

MERGED_AT_ONCE = 16
"""Number of single-epoch deltas that are merged into one file."""

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


class Rewrite(msgspec.Struct, frozen=True, array_like=True):
    """A file that replaces several others for some bins: a snapshot if it is complete, otherwise merged deltas."""

    file: FileRef
    bins: bytes
    """The bins, ascending. The file need not have rows for all of them."""
    replaces: tuple[bytes, ...]
    """Digests of the replaced files."""
    complete: bool


@dataclass(frozen=True)
class LineageStep:
    """Apply a file's rows for some bins; afterwards those bins are at these positions."""

    file: FileRef
    positions: dict[BinId, Position]


@dataclass(frozen=True)
class Steps:
    """The work of a base to catch up: clear some bins, then apply files in this order."""

    clear: frozenset[BinId]
    apply: tuple[LineageStep, ...]

    def __bool__(self) -> bool:
        return bool(self.clear or self.apply)


class Lineage(msgspec.Struct, frozen=True, array_like=True):
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
    entries: tuple[LineageEntry, ...] = ()
    rows: tuple[int, ...] = (0,) * BINS
    """Per bin: number of delta rows since its snapshot."""
    keys: tuple[int, ...] = (0,) * BINS
    """Per bin: number of rows in its snapshot."""

    @classmethod
    def start(cls, operator: str) -> Lineage:
        """The lineage of an operator that has no state yet."""
        return cls(operator, Epoch(-1))

    def encode(self) -> bytes:
        """Compact bytes for the manifest."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Lineage:
        """The lineage that :meth:`encode` was given."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise CheckpointError(
                f"a state lineage is damaged, or was written by another version of midstream: {error}"
            ) from error

    def after(self, epoch: Epoch, deltas: Sequence[FileRef], rewrites: Sequence[Rewrite] = ()) -> Lineage:
        """The lineage after an epoch has been committed.

        ``deltas`` are the changes of its tasks, at most one per bin; ``rewrites`` were made from the state before it.
        """
        if epoch <= self.epoch:
            raise StateError(f"operator {self.operator!r}: epoch {epoch} cannot follow epoch {self.epoch}")
        entries, rows, keys = list(self.entries), list(self.rows), list(self.keys)
        for rewrite in rewrites:
            entries = self._rewritten(entries, rewrite)
            if rewrite.complete:
                counts = dict(zip(rewrite.file.bins, rewrite.file.counts, strict=True))
                for number in rewrite.bins:
                    rows[number], keys[number] = 0, counts.get(number, 0)
        taken = 0
        for delta in deltas:
            live = _mask(delta.bins)
            if live & taken:
                raise StateError(
                    f"operator {self.operator!r}, epoch {epoch}: two tasks changed the bins "
                    f"{list(_bins(live & taken))}; a bin belongs to one task ({delta.name!r} is the second)"
                )
            taken |= live
            entries.append(LineageEntry(_without_bins(delta), _bitmap(live)))
            for number, count in zip(delta.bins, delta.counts, strict=True):
                rows[number] += count
        return Lineage(self.operator, epoch, tuple(entries), tuple(rows), tuple(keys))

    def _rewritten(self, entries: list[LineageEntry], rewrite: Rewrite) -> list[LineageEntry]:
        bins, replaced = _mask(rewrite.bins), set(rewrite.replaces)
        unknown = replaced - {entry.file.digest for entry in entries}
        if unknown or not replaced:
            raise StateError(
                f"operator {self.operator!r}: {rewrite.file.name!r} replaces {len(unknown) or 'no'} files that are not "
                f"part of epoch {self.epoch}; it was made from another state"
            )
        reached: dict[Position, int] = {}
        left: list[LineageEntry] = []
        place = 0
        for entry in entries:
            live = _mask_of(entry.live)
            if entry.file.digest in replaced or (rewrite.complete and live & bins):
                for position, group in _positions(entry):
                    reached = {known: mask & ~group for known, mask in reached.items()}
                    reached[position] = reached.get(position, 0) | (group & bins)
                if live & ~bins:
                    left.append(msgspec.structs.replace(entry, live=_bitmap(live & ~bins)))
                place = len(left)
            else:
                left.append(entry)
        leads_to = tuple((position, _bitmap(mask)) for position, mask in reached.items() if mask)
        live = sum(reached.values())  # the masks are disjoint; bins without a history are left out
        left.insert(place, LineageEntry(_without_bins(rewrite.file), _bitmap(live), rewrite.complete, False, leads_to))
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
                for number in _bins(group & open_):
                    found[number] = position
                open_ &= ~group
            if not open_:
                break
        return found

    def missing(self, held: Mapping[BinId, Position], bins: Iterable[BinId]) -> Steps:
        """The steps for a base to have all of ``bins``; ``held`` has the position of each bin that it has.

        If a position is not part of a bin's history (because an epoch was run again, it is another job's, or it is too
        old), the base rebuilds that bin from scratch.
        """
        open_ = _mask(bins)
        at: dict[Position, int] = {}
        for number in _bins(open_):
            position = held.get(number, EMPTY)
            at[position] = at.get(position, 0) | 1 << number
        # Walk back from the newest entry until each bin reaches the base's position: usually one step, however long the
        # history.
        steps: list[LineageStep] = []
        for entry in reversed(self.entries):
            positions: dict[BinId, Position] = {}
            for position, group in _positions(entry):
                here = group & open_
                there = here & at.get(position, 0)
                open_ &= ~there
                positions.update(dict.fromkeys(_bins(here & ~there), position))
            if positions:
                steps.append(LineageStep(entry.file, positions))
            if not open_:
                break
        return Steps(frozenset(_bins(open_ & ~at.get(EMPTY, 0))), tuple(reversed(steps)))

    def _lengths(self) -> npt.NDArray[np.int64]:
        """The number of entries of each bin."""
        bitmaps = np.frombuffer(b"".join(entry.live for entry in self.entries), np.uint8).reshape(-1, BINS // 8)
        lengths: npt.NDArray[np.int64] = np.unpackbits(bitmaps, axis=1, bitorder="little").sum(axis=0, dtype=np.int64)
        return lengths

    def due_for_snapshot(self, bins: Iterable[BinId], touched: int) -> list[BinId]:
        """Those of ``bins`` whose state should be written as a snapshot, most urgent first.

        A bin is due when its deltas have as many rows as its snapshot; so the amortised cost per delta row is constant.
        An epoch rewrites at most four times the rows that it ``touched``: bins that become due together are spread over
        several epochs, but are rewritten faster than they become due.
        """
        lengths = self._lengths().tolist()
        urgency = {
            number: max(self.rows[number] / max(MIN_ROWS, self.keys[number]), lengths[number] / MAX_ENTRIES)
            for number in bins
            if lengths[number]
        }
        due = sorted((number for number in urgency if urgency[number] > 1), key=lambda number: -urgency[number])
        budget = max(SMALL_REWRITE, 4 * touched)
        chosen: list[BinId] = []
        for number in due:
            budget -= self.keys[number] + self.rows[number]
            if budget < 0 and chosen:
                break
            chosen.append(number)
        return chosen

    def due_for_merging(self, bins: Iterable[BinId]) -> list[tuple[FileRef, list[BinId]]]:
        """The single-epoch deltas of ``bins``, oldest first, each with the bins it is live for.

        Empty unless there are enough to merge.

        A rewrite takes its bins from everything older, so these are the newest entries in the history of each bin.
        """
        mask = _mask(bins)
        single = [
            (entry.file, list(_bins(_mask_of(entry.live) & mask)))
            for entry in self.entries
            if entry.single and _mask_of(entry.live) & mask
        ]
        return single if len(single) >= MERGED_AT_ONCE else []

    def live_files(self) -> Iterator[tuple[FileRef, set[BinId]]]:
        """All files, oldest first, each with the bins it is live for."""
        for entry in self.entries:
            yield entry.file, set(_bins(_mask_of(entry.live)))

    def files_of(self, bins: Iterable[BinId]) -> list[FileRef]:
        """The files that are live for any of ``bins``, oldest first."""
        mask = _mask(bins)
        return [entry.file for entry in self.entries if _mask_of(entry.live) & mask]

    def bins(self) -> list[BinId]:
        """The bins that have a history."""
        live = 0
        for entry in self.entries:
            live |= _mask_of(entry.live)
        return list(_bins(live))


def garbage(names: Iterable[str], kept: Iterable[Lineage], settled: Epoch) -> list[str]:
    """Those of ``names`` that are no longer needed.

    ``kept`` are the lineages of all manifests from which a restart may continue. Files that they refer to stay, and so
    do files written after the epoch ``settled``, the last epoch that cannot be run again.

    >>> garbage(["count/0000000003-0-0-0-delta-0123456789abcdef.arrow"], [], settled=Epoch(2))
    []
    >>> garbage(["count/0000000003-0-0-0-delta-0123456789abcdef.arrow"], [], settled=Epoch(3))
    ['count/0000000003-0-0-0-delta-0123456789abcdef.arrow']
    """
    needed = {entry.file.name for lineage in kept for entry in lineage.entries}
    removable = []
    for name in names:
        found = epoch_and_operator(name)
        if found is not None and found[0] <= settled and name not in needed:
            removable.append(name)
    return removable


def _positions(entry: LineageEntry) -> Iterator[tuple[Position, int]]:
    """The positions that an entry leads to, each with its bins as a mask."""
    live = _mask_of(entry.live)
    if not entry.leads_to:
        yield Position(entry.file.digest), live
    for position, group in entry.leads_to:
        yield position, _mask_of(group) & live


def _without_bins(ref: FileRef) -> FileRef:
    return FileRef(ref.name, ref.size, ref.digest, ref.rows)


def _mask(bins: Iterable[int]) -> int:
    mask = 0
    for number in bins:
        mask |= 1 << number
    return mask


def _bins(mask: int) -> Iterator[BinId]:
    while mask:
        lowest = mask & -mask
        yield BinId(lowest.bit_length() - 1)
        mask ^= lowest


def _bitmap(mask: int) -> bytes:
    return mask.to_bytes(BINS // 8, "little")


def _mask_of(bitmap: bytes) -> int:
    return int.from_bytes(bitmap, "little")
