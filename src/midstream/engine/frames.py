"""Frames: the rows of an exchange. Each holds a chunk of rows with the same destination, wire and revision.

Spark sees a few large binary rows and never looks inside. So Spark does not depend on operators' schemas, and the
revision of a chunk travels with it. The receiver sorts frames by (revision, src, seq): they are FIFO per sender,
replays are deterministic, and all rows of an old revision come before any row of a new one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from midstream.ids import PartitionId, Revision, WireId

FRAME_SCHEMA = pa.schema(
    [
        pa.field("dest", pa.int32()),
        pa.field("owner", pa.int32()),
        pa.field("kind", pa.int8()),
        pa.field("wire", pa.int32()),
        pa.field("revision", pa.int32()),
        pa.field("src", pa.int32()),
        pa.field("seq", pa.int64()),
        pa.field("rows", pa.int32()),
        pa.field("payload", pa.binary()),
    ]
)
FRAME_ORDER = ("revision", "src", "seq")
_HEAD = ["dest", "owner", "wire", "revision", "src", "seq", "rows", "kind"]


_NONE = PartitionId(0)
CONTROL_WIRE = WireId(-1)
"""Used instead of a wire on frames with messages of control operations."""


class FrameKind(enum.IntEnum):
    """The content of a frame."""

    ROWS = 0
    PARTIALS = 1
    """Totals of rows that the sender has combined, see :mod:`.combiner`."""
    CONTROL = 2
    """Messages of control operations, see :mod:`.task_controls`. On no wire: there is one for each next partition."""


@dataclass(frozen=True)
class Header:
    """Everything about a frame except its payload.

    ``dest`` is where it goes next; ``owner``, if its wire has a key, the partition of the wire's target that owns its
    rows. They differ as long as it only passes through stages on its way.
    """

    dest: PartitionId
    wire: WireId
    revision: Revision
    src: PartitionId
    seq: int
    rows: int
    kind: FrameKind = FrameKind.ROWS
    owner: PartitionId = _NONE


def encode_rows(rows: pa.RecordBatch) -> pa.Buffer:
    """The rows as an Arrow IPC stream with one record batch."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_batch(rows)
    return out.getvalue()


def decode_rows(payload: pa.Buffer) -> pa.RecordBatch:
    """The rows of a payload, without copying them.

    >>> rows = pa.RecordBatch.from_pydict({"n": [1, 2]})
    >>> decode_rows(encode_rows(rows)).equals(rows)
    True
    """
    return pa.ipc.open_stream(payload).read_next_batch()


def frame(header: Header, payload: pa.Buffer) -> pa.RecordBatch:
    """One frame as a record batch with one row. The payload is referenced, not copied."""
    offsets = pa.py_buffer(np.array([0, payload.size], dtype=np.int32))
    return pa.RecordBatch.from_arrays(
        [
            pa.array([header.dest], pa.int32()),
            pa.array([header.owner], pa.int32()),
            pa.array([header.kind], pa.int8()),
            pa.array([header.wire], pa.int32()),
            pa.array([header.revision], pa.int32()),
            pa.array([header.src], pa.int32()),
            pa.array([header.seq], pa.int64()),
            pa.array([header.rows], pa.int32()),
            pa.Array.from_buffers(pa.binary(), 1, [None, offsets, payload]),
        ],
        schema=FRAME_SCHEMA,
    )


def frames_of(batch: pa.RecordBatch) -> Iterator[tuple[Header, pa.Buffer]]:
    """The frames of a batch, in order. Rows without a payload are fillers, not frames.

    Arrow copies each payload, which also aligns it.
    """
    payloads = batch.column("payload")
    numbers = np.flatnonzero(payloads.is_valid().to_numpy(zero_copy_only=False))
    head = batch.select(_HEAD).take(pa.array(numbers))
    columns = [head.column(name).to_pylist() for name in _HEAD]
    for number, dest, owner, wire, revision, src, seq, rows, kind in zip(numbers.tolist(), *columns, strict=True):
        yield Header(dest, wire, revision, src, seq, rows, FrameKind(kind), owner), payloads[number].as_buffer()
