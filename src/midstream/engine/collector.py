"""The output of a stage: rows collected by wire and destination until there are enough for a frame.

Memory is bounded by the sizes here, not by the epoch: about one frame per wire and destination, and less if there are
very many of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.hashing import bins_of, hash_columns
from midstream.engine.frames import FrameKind, Header, encode_rows, frame
from midstream.engine.intake import Carried
from midstream.ids import PartitionId, Revision, WireId
from midstream.planner.stages import Leaves, Wire

FRAME_BYTES = 1 << 20
HELD_BYTES = 64 << 20


class _Destination(NamedTuple):
    """The properties that the rows of a frame share."""

    wire: WireId
    dest: int
    revision: Revision
    kind: FrameKind


@dataclass
class _HeldRows:
    batches: list[pa.RecordBatch] = field(default_factory=list)
    nbytes: int = 0


class Collector:
    """Takes slices, returns record batches for Spark: frames, or plain columns at a typed outlet.

    ``bins`` maps each bin to its partition of the next stage. Rows on a wire without a key stay in ``partition``, if
    the next stage has that many partitions.
    """

    def __init__(self, leaves: Leaves, partition: PartitionId, bins: Sequence[int]) -> None:
        self._typed = leaves is Leaves.TYPED
        self._partition = partition
        self._stay = partition % (max(bins) + 1)
        self._bins = np.asarray(bins, dtype=np.int64)
        # Few destinations fit in 16 bits, for which numpy's stable sort is a radix sort.
        self._dest_type = np.uint16 if max(bins) < 1 << 16 else np.int64
        self._held: dict[_Destination, _HeldRows] = {}
        self._held_bytes = 0
        self._ready: list[pa.RecordBatch] = []
        self._seq = 0
        self.emitted: Counter[WireId] = Counter()
        """Number of rows put on each wire that starts here."""
        self.sent: Counter[WireId] = Counter()
        """Number of rows that left in frames on each wire, including those that pass through."""

    def add(self, wire: Wire, batch: pa.RecordBatch, revision: Revision) -> None:
        """Add rows of a wire that starts here."""
        self.emitted[wire.id] += batch.num_rows
        if wire.key is None:
            self._hold(wire, revision, FrameKind.ROWS, [(self._stay, batch)])
        else:
            # Without key columns all rows have the same key.
            bins = bins_of(hash_columns(batch, wire.key)) if wire.key else np.zeros(batch.num_rows, np.uint8)
            self._hold(wire, revision, FrameKind.ROWS, self._scatter(bins, batch))

    def add_partials(self, wire: Wire, batch: pa.RecordBatch, revision: Revision) -> None:
        """Add partials of a wire that starts here; a stored key begins with its bin."""
        self.emitted[wire.id] += pc.sum(batch.column("rows")).as_py()
        bins = pc.binary_slice(batch.column("key"), 0, 1)
        numbers = np.frombuffer(b"".join(bins.to_pylist()), np.uint8)
        self._hold(wire, revision, FrameKind.PARTIALS, self._scatter(numbers, batch))

    def _hold(
        self, wire: Wire, revision: Revision, kind: FrameKind, parts: Iterable[tuple[int, pa.RecordBatch]]
    ) -> None:
        for dest, rows in parts:
            key = _Destination(wire.id, dest, revision, kind)
            held = self._held.setdefault(key, _HeldRows())
            held.batches.append(rows)
            nbytes = rows.nbytes
            held.nbytes += nbytes
            self._held_bytes += nbytes
            if held.nbytes >= FRAME_BYTES:
                self._flush(key)
        if self._held_bytes > HELD_BYTES:
            self._flush_all()

    def pass_on(self, carried: Carried) -> None:
        """Add a frame that only passes through. It is stamped again, so that the receiver keeps this order."""
        header = carried.header
        dest = header.dest if carried.wire.key is not None else self._stay
        self._emit(_Destination(header.wire, dest, header.revision, header.kind), header.rows, carried.payload)

    def take(self) -> list[pa.RecordBatch]:
        """The batches that are ready to leave."""
        ready, self._ready = self._ready, []
        return ready

    def finish(self) -> list[pa.RecordBatch]:
        """All remaining batches."""
        self._flush_all()
        return self.take()

    def _scatter(self, bins: npt.NDArray[np.uint8], batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The batch by destination; the rows of one destination keep their order."""
        dests = self._bins[bins].astype(self._dest_type)
        order = np.argsort(dests, kind="stable")
        dests = dests[order]
        starts = np.concatenate([[0], np.flatnonzero(np.diff(dests)) + 1, [len(dests)]])
        if len(starts) == 2:
            yield int(dests[0]), batch
            return
        arranged = batch.take(pa.array(order))
        for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
            yield int(dests[start]), arranged.slice(start, end - start)

    def _flush_all(self) -> None:
        for key in list(self._held):
            self._flush(key)

    def _flush(self, place: _Destination) -> None:
        held = self._held.pop(place)
        self._held_bytes -= held.nbytes
        rows = pa.concat_batches(held.batches) if len(held.batches) > 1 else held.batches[0]
        for piece in _pieces(rows, held.nbytes):
            if self._typed:
                self._ready.append(piece)
            else:
                self._emit(place, piece.num_rows, encode_rows(piece))

    def _emit(self, place: _Destination, rows: int, payload: pa.Buffer) -> None:
        wire, dest, revision, kind = place
        header = Header(PartitionId(dest), wire, revision, self._partition, self._seq, rows, kind)
        self._seq += 1
        self.sent[wire] += rows
        self._ready.append(frame(header, payload))


def _pieces(rows: pa.RecordBatch, nbytes: int) -> Iterator[pa.RecordBatch]:
    """Cut rows into pieces of about the size of a frame; wide rows would otherwise make oversized frames."""
    count = max(1, min(rows.num_rows, round(nbytes / FRAME_BYTES)))
    for i in range(count):
        start = rows.num_rows * i // count
        yield rows.slice(start, rows.num_rows * (i + 1) // count - start)
