"""The input of a stage: frames of many small senders become few batches, in order."""

from __future__ import annotations

import pyarrow as pa

from midstream import Flow, ListSource, MemorySink, NoopSink
from midstream.engine.frames import Header, encode_rows, frame
from midstream.engine.intake import JOINED_ROWS, Carried, ControlArrival, Rows, units
from midstream.ids import PartitionId, Revision, WireId
from midstream.planner.programs import StageProgram, link
from midstream.planner.stages import compile_plan


def second_stage() -> StageProgram:
    """Receives wire 0 (keyed rows); wire 1, on its way to a sink, only passes through."""
    flow = Flow("f")
    rows = flow.source("in", ListSource([[]], "n bigint"))
    rows.key_by("by n", "n").union("u", flow.source("other", ListSource([[]], "n bigint"))).sink("out", NoopSink())
    rows.sink("raw", MemorySink())
    return link(compile_plan(flow.graph), {}, {})[1]


def frames(*found: tuple[int, int, list[int]]) -> pa.RecordBatch:
    """Frames given as (wire, revision, values)."""
    parts = []
    for seq, (wire, revision, values) in enumerate(found):
        rows = pa.RecordBatch.from_pydict({"n": values})
        header = Header(PartitionId(0), WireId(wire), Revision(revision), PartitionId(0), seq, len(values))
        parts.append(frame(header, encode_rows(rows)))
    return pa.concat_batches(parts)


def shown(program: StageProgram, *batches: pa.RecordBatch) -> list[tuple[int | None, int | None, list[int]]]:
    """Units as (wire, revision, values); a carried frame has no values."""
    found: list[tuple[int | None, int | None, list[int]]] = []
    for unit in units(program, batches):
        assert not isinstance(unit, ControlArrival)
        if isinstance(unit, Rows):
            found.append((unit.wire, unit.revision, unit.batch.column("n").to_pylist()))
        else:
            found.append((unit.header.wire, unit.header.revision, []))
    return found


def wires(program: StageProgram) -> tuple[int, int]:
    """The first wire that ends here, and one that passes through."""
    return program.stage.receives[0], program.stage.carries[0]


def test_neighbouring_small_frames_of_a_wire_are_joined():
    program = second_stage()
    ends, _ = wires(program)
    assert shown(program, frames((ends, 1, [1]), (ends, 1, [2, 3]))) == [(ends, 1, [1, 2, 3])]


def test_frames_of_different_revisions_are_not_joined():
    program = second_stage()
    ends, _ = wires(program)
    assert shown(program, frames((ends, 1, [1]), (ends, 2, [2]))) == [(ends, 1, [1]), (ends, 2, [2])]


def test_passing_frames_stay_whole_and_in_order():
    program = second_stage()
    ends, passes = wires(program)
    found = shown(program, frames((ends, 1, [1]), (passes, 1, [7]), (passes, 1, [8]), (ends, 1, [2])))
    assert found == [(ends, 1, [1]), (passes, 1, []), (passes, 1, []), (ends, 1, [2])]
    carried = [unit for unit in units(program, [frames((passes, 1, [7]))]) if isinstance(unit, Carried)]
    assert carried[0].header.rows == 1


def test_large_batches_are_not_joined_further():
    program = second_stage()
    ends, _ = wires(program)
    big = list(range(JOINED_ROWS))
    assert [len(values) for _, _, values in shown(program, frames((ends, 1, big), (ends, 1, [1]), (ends, 1, [2])))] == [
        JOINED_ROWS,
        2,
    ]
