"""The output of a stage: rows collected by wire and destination until there are enough for a frame.

Memory is bounded by the sizes here, not by the epoch: about one frame per wire and destination, and less if there are
very many of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.hashing import bins_of, hash_columns
from midstream.data.key_space import MAX_BINS, KeySpace, pack_counts
from midstream.engine.frames import CONTROL_WIRE, FrameKind, Header, encode_rows, frame
from midstream.engine.intake import Carried
from midstream.engine.rows_by_bin import RowsByBin
from midstream.flow.knobs import knob_value
from midstream.ids import PartitionId, Revision, StageIndex, WireId
from midstream.planner.assignment import Assignments, DividedBin
from midstream.planner.stages import Leaves, Wire

FRAME_BYTES = knob_value({}, "frame")


class _Destination(NamedTuple):
    """The properties that the rows of a frame share."""

    wire: WireId
    dest: int
    owner: int
    revision: Revision
    kind: FrameKind


@dataclass
class _HeldRows:
    batches: list[pa.RecordBatch] = field(default_factory=list)
    nbytes: int = 0


class Collector:
    """Takes slices, returns record batches for Spark: frames, or plain columns at a typed outlet.

    Rows on a wire with a key go to the partition of the wire's target that owns their bin, if that is the next stage;
    else to any partition that passes them on. Rows on a wire without a key stay in ``partition``, as far as the next
    stage has that many. ``following`` is the next stage.
    """

    def __init__(
        self,
        leaves: Leaves,
        partition: PartitionId,
        following: StageIndex,
        assignments: Assignments,
        *,
        frame_bytes: int | None = None,
        held_bytes: int | None = None,
    ) -> None:
        self._frame_bytes = knob_value({}, "frame") if frame_bytes is None else frame_bytes
        self._most_held = knob_value({}, "held_output") if held_bytes is None else held_bytes
        self._typed = leaves is Leaves.TYPED
        self._partition = partition
        self._following = following
        self._partitions = assignments[following].partitions if leaves is Leaves.EXCHANGE else MAX_BINS
        self._stay = partition % self._partitions
        self._owners = {stage: each.owner_array for stage, each in assignments.items()}
        self._divided: dict[WireId, list[DividedBin]] = {}
        self._dealt: Counter[tuple[WireId, int]] = Counter()
        for each in (one for assignment in assignments.values() for one in assignment.divided):
            for number in each.wires:
                self._divided.setdefault(number, []).append(each)
        self._held: dict[_Destination, _HeldRows] = {}
        self._held_bytes = 0
        self._ready: list[pa.RecordBatch] = []
        self._seq = 0
        self.emitted: Counter[WireId] = Counter()
        """Number of rows put on each wire that starts here."""
        self._bin_rows: dict[StageIndex, RowsByBin] = {}
        self.sent: Counter[WireId] = Counter()
        """Number of rows that left in frames on each wire, including those that pass through."""

    def add(self, wire: Wire, batch: pa.RecordBatch, revision: Revision) -> None:
        """Add rows of a wire that starts here."""
        self.emitted[wire.id] += batch.num_rows
        if wire.key is None:
            self._hold(wire, revision, FrameKind.ROWS, [(self._stay, batch)])
        else:
            owners = self._owners_at(wire)
            # Without key columns all rows have the same key.
            bins = bins_of(hash_columns(batch, wire.key), len(owners)) if wire.key else np.zeros(batch.num_rows, int)
            for each in self._divided.get(wire.id, ()):
                bins = self._share(each, wire, bins, batch, revision)
            self._count(wire, bins)
            self._hold(wire, revision, FrameKind.ROWS, _scattered(owners[bins], batch))

    def _share(
        self, divided: DividedBin, wire: Wire, bins: npt.NDArray[Any], batch: pa.RecordBatch, revision: Revision
    ) -> npt.NDArray[Any]:
        """The bins of rows, some of which are spread over others; copies of rows are sent to their owners.

        Rows are dealt out by their number, so that a second attempt of a task sends the same rows to the same tasks.
        """
        here = np.flatnonzero(bins == divided.home)
        if not len(here):
            return bins
        owners = self._owners_at(wire)
        if wire.id == divided.wires[0]:
            shares = np.asarray(divided.bins)
            first = self._dealt[wire.id, divided.home]
            self._dealt[wire.id, divided.home] += len(here)
            bins = bins.copy()
            bins[here] = shares[(first + np.arange(len(here))) % len(shares)]
            return bins
        rows = batch.take(pa.array(here))
        others = {int(owners[number]) for number in divided.bins} - {int(owners[divided.home])}
        self._count(wire, np.repeat(divided.bins[1:], len(here)))
        self._hold(wire, revision, FrameKind.ROWS, [(owner, rows) for owner in sorted(others)])
        return bins

    def add_partials(self, wire: Wire, batch: pa.RecordBatch, revision: Revision) -> None:
        """Add partials of a wire that starts here; a stored key begins with its bin."""
        rows = pc.sum(batch.column("rows")).as_py()
        self.emitted[wire.id] += rows
        numbers = KeySpace(len(self._owners_at(wire))).bins_of_stored(batch.column("key"))
        self._count(wire, numbers, rows / len(numbers))
        self._hold(wire, revision, FrameKind.PARTIALS, _scattered(self._owners_at(wire)[numbers], batch))

    def _count(self, wire: Wire, bins: npt.NDArray[Any], rows_each: float = 1.0) -> None:
        assert wire.target is not None
        found = self._bin_rows.get(wire.target)
        if found is None:
            found = self._bin_rows[wire.target] = RowsByBin(len(self._owners_at(wire)))
        found.add(bins, rows_each)

    @property
    def bin_rows(self) -> dict[StageIndex, bytes]:
        """The number of rows put on wires that start here, by the stage they lead to and the bin of their keys;
        packed."""
        return {stage: pack_counts(rows.totals) for stage, rows in self._bin_rows.items()}

    def _hold(
        self, wire: Wire, revision: Revision, kind: FrameKind, parts: Iterable[tuple[int, pa.RecordBatch]]
    ) -> None:
        for owner, rows in parts:
            key = _Destination(wire.id, self._towards(wire, owner), owner, revision, kind)
            held = self._held.setdefault(key, _HeldRows())
            held.batches.append(rows)
            nbytes = rows.nbytes
            held.nbytes += nbytes
            self._held_bytes += nbytes
            if held.nbytes >= self._frame_bytes:
                self._flush(key)
        if self._held_bytes > self._most_held:
            self._flush_all()

    def pass_on(self, carried: Carried) -> None:
        """Add a frame that only passes through. It is stamped again, so that the receiver keeps this order."""
        header = carried.header
        owner = header.owner if carried.wire.key is not None else self._stay
        place = _Destination(header.wire, self._towards(carried.wire, owner), owner, header.revision, header.kind)
        self._emit(place, header.rows, carried.payload)

    def tell_all(self, payload: pa.Buffer, revision: Revision) -> None:
        """Send messages of control operations to every partition of the next stage, behind all rows added so far."""
        self._flush_all()
        for dest in range(self._partitions):
            self._emit(_Destination(CONTROL_WIRE, dest, dest, revision, FrameKind.CONTROL), 0, payload)

    def _owners_at(self, wire: Wire) -> npt.NDArray[np.uint16]:
        assert wire.target is not None, "rows that leave for an outlet have no key"
        return self._owners[wire.target]

    def _towards(self, wire: Wire, owner: int) -> int:
        """The partition of the next stage through which rows reach their owner."""
        return owner if wire.target == self._following else owner % self._partitions

    def take(self) -> list[pa.RecordBatch]:
        """The batches that are ready to leave."""
        ready, self._ready = self._ready, []
        return ready

    def finish(self) -> list[pa.RecordBatch]:
        """All remaining batches."""
        self._flush_all()
        return self.take()

    def _flush_all(self) -> None:
        for key in list(self._held):
            self._flush(key)

    def _flush(self, place: _Destination) -> None:
        held = self._held.pop(place)
        self._held_bytes -= held.nbytes
        rows = pa.concat_batches(held.batches) if len(held.batches) > 1 else held.batches[0]
        for piece in _pieces(rows, round(held.nbytes / self._frame_bytes)):
            if self._typed:
                self._ready.append(piece)
            else:
                self._emit(place, piece.num_rows, encode_rows(piece))

    def _emit(self, place: _Destination, rows: int, payload: pa.Buffer) -> None:
        wire, dest, owner, revision, kind = place
        header = Header(PartitionId(dest), wire, revision, self._partition, self._seq, rows, kind, PartitionId(owner))
        self._seq += 1
        self.sent[wire] += rows
        self._ready.append(frame(header, payload))


def _scattered(owners: npt.NDArray[np.uint16], batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batch by owner, given that of each row; rows of one owner keep their order."""
    order = np.argsort(owners, kind="stable")
    owners = owners[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(owners)) + 1, [len(owners)]])
    if len(starts) == 2:
        yield int(owners[0]), batch
        return
    arranged = batch.take(pa.array(order))
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        yield int(owners[start]), arranged.slice(start, end - start)


def _pieces(rows: pa.RecordBatch, frames: int) -> Iterator[pa.RecordBatch]:
    """Cut rows into pieces of about the size of a frame; wide rows would otherwise make oversized frames."""
    count = max(1, min(rows.num_rows, frames))
    for i in range(count):
        start = rows.num_rows * i // count
        yield rows.slice(start, rows.num_rows * (i + 1) // count - start)
