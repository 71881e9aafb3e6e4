"""The input of a stage as units of work. A stage reads one of three shapes:

* *plain*: the columns of its single inlet (a source, or the result of a transform);
* *frames*: rows of an exchange;
* *mixed*: several inlets, or inlets and frames of an earlier segment, united into one DataFrame with an ``inlet``
  number, one nullable struct per inlet, and one for the frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import pyarrow as pa

from midstream.data.schema import conform
from midstream.engine.frames import FRAME_SCHEMA, FrameKind, Header, decode_rows, frames_of
from midstream.flow.model import Operator, Port
from midstream.ids import Origin, PartitionId, Revision, WireId
from midstream.planner.programs import StageProgram
from midstream.planner.stages import Stage, Wire

INLET_COLUMN = "inlet"
FRAME_COLUMN = "frame"
JOINED_ROWS = 8192
JOINED_BYTES = 1 << 20


def inlet_column(number: int) -> str:
    """The name of the struct with an inlet's rows in the mixed shape."""
    return f"rows{number}"


def inlet_origin(number: int) -> Origin:
    """The origin of an inlet's rows, distinct from all wires.

    >>> inlet_origin(0), inlet_origin(1)
    (-1, -2)
    """
    return Origin(-1 - number)


def is_mixed(stage: Stage) -> bool:
    """Whether this stage has several inputs."""
    return len(stage.inlets) + stage.takes_frames > 1


@dataclass(frozen=True)
class IntakeEntry:
    """An entry point of rows: the operator's name, and which of its inputs."""

    operator: str
    side: int = 0


def entries_of(port: Port, operators: Iterable[Operator]) -> tuple[IntakeEntry, ...]:
    """The entries of these operators for the rows of a port; both inputs of a join may read the same port."""
    return tuple(IntakeEntry(op.name, side) for op in operators for side, read in enumerate(op.inputs) if read == port)


@dataclass(frozen=True)
class Rows:
    """Rows of ``port`` to push into ``entries``. Rows of an inlet use the task's own revision, those of a frame the
    frame's."""

    entries: tuple[IntakeEntry, ...]
    batch: pa.RecordBatch
    revision: Revision | None
    origin: Origin
    kind: FrameKind = FrameKind.ROWS

    @property
    def wire(self) -> WireId | None:
        """The wire on which the rows came; None for an inlet."""
        return WireId(self.origin) if self.origin >= 0 else None


@dataclass(frozen=True)
class Carried:
    """A frame that only passes through this stage."""

    wire: Wire
    header: Header
    payload: pa.Buffer


@dataclass(frozen=True)
class ControlArrival:
    """Messages of control operations, from one task of the stage before."""

    sender: PartitionId
    payload: pa.Buffer


def units(program: StageProgram, batches: Iterable[pa.RecordBatch]) -> Iterator[Rows | Carried | ControlArrival]:
    """Convert Spark's batches into units of work, in order."""
    stage = program.stage
    for batch in batches:
        if is_mixed(stage):
            yield from _mixed(program, batch)
        elif stage.inlets:
            yield _inlet(program, 0, batch)
        else:
            yield from _frames(program, batch)


def _inlet(program: StageProgram, number: int, batch: pa.RecordBatch) -> Rows:
    name = program.stage.inlets[number]
    # Spark labels timestamps with the session's time zone and may use other string layouts: convert them to ours.
    rows = conform(batch, program.inputs[name][0], f"rows of {name!r}")
    return Rows((IntakeEntry(name),), rows, None, inlet_origin(number))


def _frames(program: StageProgram, batch: pa.RecordBatch) -> Iterator[Rows | Carried | ControlArrival]:
    wires = {wire.id: wire for wire in program.wires}
    received = {wire: entries_on(program, wire) for wire in program.stage.receives}
    alike = groupby(frames_of(batch), key=lambda frame: (frame[0].wire, frame[0].revision, frame[0].kind))
    for (wire, revision, kind), group in alike:
        if wire in received:
            for rows in _joined(decode_rows(payload) for _, payload in group):
                yield Rows(received[wire], rows, revision, Origin(wire), kind)
        elif kind is FrameKind.CONTROL:
            yield from (ControlArrival(header.src, payload) for header, payload in group)
        else:
            yield from (Carried(wires[wire], header, payload) for header, payload in group)


def entries_on(program: StageProgram, number: WireId) -> tuple[IntakeEntry, ...]:
    """Where the rows of a wire enter this stage."""
    wire = next(each for each in program.wires if each.id == number)
    return entries_of(wire.port, (op for op in program.operators if op.name in wire.consumers))


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small batches: many senders send many small frames, and a slice never spans two batches."""
    held: list[pa.RecordBatch] = []
    rows = nbytes = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        nbytes += batch.nbytes
        # A frame has few wide rows, and Arrow cannot hold more than 2 GB of text in one batch.
        if rows >= JOINED_ROWS or nbytes >= JOINED_BYTES:
            yield pa.concat_batches(held)
            held, rows, nbytes = [], 0, 0
    if held:
        yield pa.concat_batches(held)


def _mixed(program: StageProgram, batch: pa.RecordBatch) -> Iterator[Rows | Carried | ControlArrival]:
    """Cut the batch where the inlet number changes; Spark's union mostly keeps inlets in separate partitions."""
    numbers = batch.column(INLET_COLUMN).to_numpy()
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), batch.num_rows]
    for start, end in pairwise(cuts):
        if start == end:
            continue
        number = int(numbers[start])
        if number == len(program.stage.inlets):
            yield from _frames(program, _unpack(batch, FRAME_COLUMN, start, end).cast(FRAME_SCHEMA))
        else:
            yield _inlet(program, number, _unpack(batch, inlet_column(number), start, end))


def _unpack(batch: pa.RecordBatch, column: str, start: int, end: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_struct_array(batch.column(column).slice(start, end - start))
