"""The stage runner turns rows into frames and loses nothing. Also tests intake and collector."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from midstream import Flow, ListSource, Stream
from midstream.data.hashing import bins_of, hash_columns
from midstream.data.times import EpochTimes
from midstream.engine.clock import ManualClock
from midstream.engine.collector import FRAME_BYTES, Collector
from midstream.engine.file_outlets import FileOutlets
from midstream.engine.frames import (
    FRAME_ORDER,
    FRAME_SCHEMA,
    Header,
    decode_rows,
    encode_rows,
    frame,
)
from midstream.engine.intake import (
    FRAME_COLUMN,
    INLET_COLUMN,
    Carried,
    IntakeEntry,
    Rows,
    inlet_column,
    is_mixed,
    units,
)
from midstream.engine.resources import Resources
from midstream.engine.runner import RevisedStage, StageRunner
from midstream.engine.slices import SliceSizer
from midstream.engine.steps import OperatorInTask
from midstream.flow.model import Port
from midstream.ids import Epoch, PartitionId, Revision, StageIndex, WireId
from midstream.operators.lookup import Lookup
from midstream.planner.assignment import spread
from midstream.planner.programs import StageProgram, link, pack_blobs
from midstream.planner.stages import Leaves, Wire, compile_plan
from midstream.runtime.local.data import LocalData, by_destination
from midstream.storage.blobs import BlobStore
from tests.frames import headers, payloads

DDL = "n bigint, s string"
SPREAD = spread(4)
TO_FOUR = (StageIndex(1), {StageIndex(1): SPREAD})


def read(rows: Any, epoch: int) -> None:
    """A sink that reads a DataFrame: a single one gets plain columns."""


def batch(rows: Sequence[tuple[int | None, str | None]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"n": n, "s": s} for n, s in rows], schema=pa.schema([("n", pa.int64()), ("s", pa.string())])
    )


NUMBERS = batch([(i, "abc"[i % 3]) for i in range(100)])


class Stages:
    """The linked programs of a flow, and runners for them."""

    def __init__(self, flow: Flow, folder: Path) -> None:
        graph = flow.graph
        store = BlobStore(str(folder))
        self.plan = compile_plan(graph)
        blobs = {name: store.put(blob) for name, blob in pack_blobs(graph).items()}
        self.programs = link(self.plan, blobs, {})
        self.resources = Resources(store)

    def runner(
        self,
        stage: int,
        *,
        partition: int = 0,
        revision: int = 1,
        rows: int = 16,
        clock: Any = None,
    ) -> StageRunner:
        return StageRunner(
            self.programs[stage],
            self.resources,
            partition=PartitionId(partition),
            assignments=dict.fromkeys(self.plan.exchanged, SPREAD),
            revision=Revision(revision),
            clock=clock or ManualClock(),
            sizer=SliceSizer(rows),
            times=EpochTimes(clock=0),
            states={},
            outlets=FileOutlets({}, {}, epoch=Epoch(0), partition=PartitionId(0), durable=False),
        )


@pytest.fixture
def stages(tmp_path: Path):
    return lambda flow: Stages(flow, tmp_path)


def new_flow(ddl: str = DDL) -> tuple[Flow, Stream]:
    flow = Flow("f")
    return flow, flow.source("in", ListSource([[]], ddl))


def all_of(runner: StageRunner, batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return [ready for pause in runner.run(batches) for ready in pause]


def rows_of(frames: Sequence[pa.RecordBatch]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Rows by wire and destination, in order."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for each in frames:
        for header, payload in zip(headers(each), payloads(each), strict=True):
            rows = decode_rows(payload)
            assert header.rows == rows.num_rows > 0
            found[header.wire, header.dest] += rows.to_pylist()
    return dict(found)


# ── the runner ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stage_that_ends_at_one_sink_emits_plain_columns(stages):
    flow, rows = new_flow()
    rows.map("double", lambda row: {"n": 2 * row["n"], "s": row["s"]}).filter(
        "some", lambda row: row["n"] % 3 == 0
    ).sink("out", read)
    out = all_of(stages(flow).runner(0), [NUMBERS.slice(0, 30), NUMBERS.slice(30)])
    assert {each.schema for each in out} == {NUMBERS.schema}
    assert [row["n"] for each in out for row in each.to_pylist()] == [2 * i for i in range(100) if 2 * i % 3 == 0]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_rows_go_to_the_partition_that_owns_their_key_in_order_however_slices_are_cut(stages, size):
    flow, rows = new_flow()
    rows.key_by("k", "s").map("m", lambda row: row).sink("out", read)
    [wire] = [wire for wire in stages(flow).plan.wires if wire.key]
    found = rows_of(all_of(stages(flow).runner(0, rows=size), [NUMBERS]))
    wanted: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for i, row in enumerate(NUMBERS.to_pylist()):
        owner = SPREAD.owners[bins_of(hash_columns(NUMBERS.slice(i, 1), ["s"]))[0]]
        wanted[wire.id, owner].append(row)
    assert found == dict(wanted)
    assert len(found) > 1, "all keys in one place would prove little"


def test_frames_are_numbered_in_the_order_they_leave(stages):
    flow, rows = new_flow()
    keyed = rows.key_by("k", "n")
    keyed.map("m", lambda row: row).sink("out", read)
    rows.sink("raw", read)
    out = all_of(stages(flow).runner(0, partition=3), [NUMBERS])
    found = [header for each in out for header in headers(each)]
    assert [header.seq for header in found] == list(range(len(found)))
    assert {header.src for header in found} == {3}
    assert {header.revision for header in found} == {1}


def test_a_slice_passes_the_whole_stage_before_the_next_one_starts(stages):
    flow, rows = new_flow()
    first = rows.map("a", lambda row: row)
    first.map("b", lambda row: row).map("c", lambda row: row).union("d", first).sink("out", read)
    runner = stages(flow).runner(0, rows=10)
    seen: list[str] = []

    def watched(name, step):
        def traced(piece):
            seen.append(f"{name}{piece.column('n')[0]}")
            return step(piece)

        return traced

    for name, node in runner._nodes.items():
        work = OperatorInTask(tuple(watched(name, step) for step in node.versions[node.latest].work.entries))
        node.versions[node.latest] = replace(node.versions[node.latest], work=work, event_time=None)
    pauses = []
    for ready in runner.run([NUMBERS.slice(0, 10), NUMBERS.slice(10, 10)]):
        pauses.append(len(seen))
        assert len(ready) == (len(pauses) == 3), "rows leave when there are enough of them, or at the end"
    assert seen == ["in0", "a0", "b0", "c0", "d0", "d0", "in10", "a10", "b10", "c10", "d10", "d10"]
    assert pauses == [6, 12, 12], "a pause after each slice, and one at the end"


def test_both_readers_of_a_stream_get_its_rows(stages):
    flow, rows = new_flow()
    small = rows.filter("small", lambda row: row["n"] < 10)
    small.union("both", rows.map("neg", lambda row: {**row, "n": -row["n"]})).sink("out", read)
    small.sink("alone", read)
    found = rows_of(all_of(stages(flow).runner(0), [NUMBERS]))
    counts = {wire: len(rows) for (wire, _), rows in found.items()}
    assert counts == {0: 10, 1: 110}


def test_the_report_counts_rows_in_out_and_on_every_wire(stages):
    flow, rows = new_flow()
    split = rows.route("r", lambda row: "odd" if row["n"] % 2 else "even", branches=("odd", "even"))
    split["odd"].key_by("k", "s").filter("few", lambda row: row["n"] < 5).union("u", split["even"]).sink("out", read)
    prepared = stages(flow)
    first = prepared.runner(0)
    frames = all_of(first, [NUMBERS])
    report = first.report()
    assert {s.operator: (s.rows_in, s.rows_out) for s in report.operators} == {
        "in": (100, 100),
        "r": (100, 100),
        "k": (50, 50),
    }
    even, odd = prepared.plan.wires[0], prepared.plan.wires[1]
    assert (str(even.port), str(odd.port)) == ("r[even]", "k")
    assert report.received == {}
    assert report.sent == report.emitted == {even.id: 50, odd.id: 50}
    totals: Counter[str] = Counter()
    received: Counter[int] = Counter()
    for partition, data in enumerate(by_destination(LocalData([frames]), 4, FRAME_ORDER, random.Random(0)).partitions):
        second = prepared.runner(1, partition=partition)
        all_of(second, data)
        received.update(second.report().received)
        totals.update({s.operator: s.rows_out for s in second.report().operators})
        assert second.report().sent == {}, "behind the last stage there is nobody to count with"
    assert received == {even.id: 50, odd.id: 50}
    assert totals == {"few": 2, "u": 52}


def test_rows_keep_the_revision_they_came_with(stages):
    flow, rows = new_flow()
    rows.key_by("k", "n").map("m", lambda row: row).key_by("k2", "s").map("m2", lambda row: row).sink("out", read)
    prepared = stages(flow)
    [first] = {
        header.revision for each in all_of(prepared.runner(0, revision=7), [NUMBERS]) for header in headers(each)
    }
    assert first == 7, "rows of a source take the task's own"
    old, new = (
        frame(Header(PartitionId(0), WireId(0), Revision(number), PartitionId(0), 0, 100), encode_rows(NUMBERS))
        for number in (5, 7)
    )
    runner = prepared.runner(1, revision=5)
    runner.prepare(RevisedStage(Revision(7), prepared.programs[1], frozenset()))
    out = all_of(runner, [old, new])
    revisions = [header.revision for each in out for header in headers(each)]
    assert sorted(set(revisions)) == [5, 7], "rows of a frame keep theirs"
    assert revisions == sorted(revisions)


def test_latency_is_the_age_of_a_row_when_it_leaves(stages):
    flow = Flow("f")
    rows = flow.source("in", ListSource([[]], "at timestamp, n bigint"), event_time="at")
    rows.map("keep", lambda row: row).map("drop", lambda row: {"n": row["n"]}, returns="n bigint").sink("out", read)
    at = [datetime.fromtimestamp(second, UTC) for second in (0, 6, 8, 9)]
    data = pa.record_batch({"at": pa.array(at, pa.timestamp("us", "UTC")), "n": [1, 2, 3, 4]})
    runner = stages(flow).runner(0, clock=ManualClock(start_us=10_000_000))
    all_of(runner, [data])
    stats = {each.operator: each for each in runner.report().operators}
    assert stats["keep"].latency_ms.count == stats["in"].latency_ms.count == 4
    assert 10_000 <= stats["keep"].latency_ms.quantile(1.0) <= 10_000 * 1.19
    assert 1_000 <= stats["keep"].latency_ms.quantile(0.5) <= 1_000 * 1.19, "two of four stand for the newest"
    assert stats["drop"].latency_ms.count == 0, "its rows no longer say when they were due"


def test_time_is_measured_per_operator(stages):
    flow, rows = new_flow()
    rows.map("m", lambda row: row).sink("out", read)

    class Ticking(ManualClock):
        def stopwatch_ns(self) -> int:
            self.advance(seconds=0.001)
            return super().stopwatch_ns()

    runner = stages(flow).runner(0, rows=50, clock=Ticking())
    all_of(runner, [NUMBERS])
    by_name = {each.operator: each for each in runner.report().operators}
    # Every reading advances the clock by a millisecond, so a step, which is between two readings, takes one.
    assert by_name["m"].busy_us == 1000 * by_name["m"].slices
    assert by_name["m"].slowest_slice_us == 1000


def test_an_empty_input_has_an_empty_output(stages):
    flow, rows = new_flow()
    rows.key_by("k", "n").map("m", lambda row: row).sink("out", read)
    runner = stages(flow).runner(0)
    assert all_of(runner, []) == []
    assert all_of(stages(flow).runner(0), [NUMBERS.slice(0, 0)]) == []
    assert [(s.operator, s.rows_in) for s in runner.report().operators] == [("in", 0), ("k", 0)]


# ── carried frames ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def passing(stages) -> Stages:
    """Three stages; `raw` has no key and `far` has one, and both only pass through the middle one."""
    flow, rows = new_flow()
    deep = rows.key_by("k1", "n").map("m1", lambda row: row).key_by("k2", "n").map("m2", lambda row: row)
    far = rows.key_by("far", "s")
    deep.union("all", rows, far).sink("out", read)
    found: Stages = stages(flow)
    return found


def test_frames_of_carried_wires_pass_unchanged_with_this_tasks_stamp(passing):
    raw, _, far = (next(w for w in passing.plan.wires if str(w.port) == name) for name in ("in", "k1", "far"))
    assert set(passing.programs[1].stage.carries) == {raw.id, far.id}
    arriving = [
        frame(
            Header(PartitionId(2), far.id, Revision(4), PartitionId(9), 17, 2, owner=PartitionId(2)),
            encode_rows(NUMBERS.slice(0, 2)),
        ),
        frame(Header(PartitionId(2), raw.id, Revision(5), PartitionId(9), 18, 3), encode_rows(NUMBERS.slice(2, 3))),
    ]
    runner = passing.runner(1, partition=2)
    out = all_of(runner, [pa.concat_batches(arriving)])
    assert [header for each in out for header in headers(each)] == [
        Header(PartitionId(2), far.id, Revision(4), PartitionId(2), 0, 2, owner=PartitionId(2)),
        Header(PartitionId(2), raw.id, Revision(5), PartitionId(2), 1, 3, owner=PartitionId(2)),
    ]
    assert [row["n"] for rows in rows_of(out).values() for row in rows] == [0, 1, 2, 3, 4]
    assert runner.report().received == runner.report().sent == {far.id: 2, raw.id: 3}
    assert runner.report().emitted == {}, "they start elsewhere"


def test_a_keyed_frame_goes_to_its_owner_and_others_stay_where_they_are(passing):
    raw, far = (next(w for w in passing.plan.wires if str(w.port) == name) for name in ("in", "far"))
    arriving = [
        frame(
            Header(PartitionId(1), wire.id, Revision(1), PartitionId(0), 0, 1, owner=PartitionId(3)),
            encode_rows(NUMBERS.slice(0, 1)),
        )
        for wire in (far, raw)
    ]
    # The task's number exceeds the partitions of the next stage: the first stage of a segment may have more tasks.
    out = all_of(passing.runner(1, partition=6), arriving)
    assert {header.wire: header.dest for each in out for header in headers(each)} == {far.id: 3, raw.id: 6 % 4}


# ── the collector ─────────────────────────────────────────────────────────────────────────────────────────────────


def wire(number: int = 0, key: tuple[str, ...] | None = None) -> Wire:
    return Wire(WireId(number), Port("m"), StageIndex(0), StageIndex(1), ("x",), key, 0)


def collected(
    collector: Collector, *, revision: int = 1, batches: Sequence[tuple[Wire, pa.RecordBatch]]
) -> Iterator[Any]:
    for each, rows in batches:
        collector.add(each, rows, Revision(revision))
        yield from collector.take()
    yield from collector.finish()


def test_small_pieces_are_gathered_into_one_frame():
    pieces = [(wire(), NUMBERS.slice(i, 1)) for i in range(100)]
    [one] = collected(Collector(Leaves.EXCHANGE, PartitionId(1), *TO_FOUR), batches=pieces)
    assert headers(one)[0].rows == 100
    assert decode_rows(payloads(one)[0]).equals(NUMBERS)


def test_revisions_do_not_share_a_frame():
    collector = Collector(Leaves.EXCHANGE, PartitionId(1), *TO_FOUR)
    collector.add(wire(), NUMBERS.slice(0, 10), Revision(1))
    collector.add(wire(), NUMBERS.slice(10, 10), Revision(2))
    assert [(header.revision, header.rows) for each in collector.finish() for header in headers(each)] == [
        (1, 10),
        (2, 10),
    ]


def test_frames_leave_as_soon_as_they_are_full_and_none_is_much_larger():
    text = "x" * 1000
    big = batch([(i, text) for i in range(5_000)])
    collector = Collector(Leaves.EXCHANGE, PartitionId(0), *TO_FOUR)
    collector.add(wire(), big, Revision(1))
    ready = collector.take()
    assert sum(headers(each)[0].rows for each in ready) == 5_000
    assert len(ready) == 5
    assert all(each.nbytes < 1.5 * FRAME_BYTES for each in ready)
    assert [row["n"] for rows in rows_of(ready).values() for row in rows] == list(range(5_000))
    assert collector.finish() == []


def test_rows_wider_than_a_frame_make_one_frame_each():
    wide = batch([(i, "x" * (2 * FRAME_BYTES)) for i in range(3)])
    found = list(collected(Collector(Leaves.EXCHANGE, PartitionId(0), *TO_FOUR), batches=[(wire(), wide)]))
    assert [headers(each)[0].rows for each in found] == [1, 1, 1]


def test_the_size_of_pending_frames_is_bounded_over_all_wires():
    collector = Collector(Leaves.EXCHANGE, PartitionId(0), *TO_FOUR, held_bytes=10_000)
    held = 0
    for number in range(200):
        collector.add(wire(number), NUMBERS, Revision(1))
        held = max(held, collector._held_bytes)
        collector.take()
    assert held <= 10_000 + 2 * NUMBERS.nbytes
    assert sum(collector.emitted.values()) == 200 * 100


def test_the_last_rows_leave_at_the_end_and_only_once():
    collector = Collector(Leaves.EXCHANGE, PartitionId(0), *TO_FOUR)
    collector.add(wire(0, ("n",)), NUMBERS, Revision(1))
    assert collector.take() == []
    assert sum(headers(each)[0].rows for each in collector.finish()) == 100
    assert collector.finish() == []
    assert collector.sent == collector.emitted == {0: 100}


def test_a_null_key_is_a_key_like_any_other():
    rows = batch([(i, None) for i in range(50)])
    found = rows_of(
        list(collected(Collector(Leaves.EXCHANGE, PartitionId(0), *TO_FOUR), batches=[(wire(0, ("s",)), rows)]))
    )
    assert [len(each) for each in found.values()] == [50]


@pytest.mark.parametrize("key", [("n",), ("s",), ("n", "s"), ("s", "n")])
def test_scattering_follows_the_columns_of_the_key(key):
    rows = batch([(i % 7, "abcde"[i % 5]) for i in range(200)])
    found = rows_of(
        list(collected(Collector(Leaves.EXCHANGE, PartitionId(0), *TO_FOUR), batches=[(wire(0, key), rows)]))
    )
    places = defaultdict(set)
    for (_, dest), each in found.items():
        for row in each:
            places[tuple(row[column] for column in key)].add(dest)
    assert all(len(where) == 1 for where in places.values()), "rows of one key went to several partitions"
    assert len(found) > 1, "all keys in one place would prove little"
    dests = np.array(SPREAD.owners)[bins_of(hash_columns(rows, key))]
    assert Counter(dests.tolist()) == {dest: len(each) for (_, dest), each in found.items()}


# ── the intake ────────────────────────────────────────────────────────────────────────────────────────────────────


def mixed(
    program: StageProgram, parts: Sequence[tuple[int, pa.RecordBatch]], types: Sequence[pa.Schema]
) -> pa.RecordBatch:
    """Several inlets in one batch, as Spark's union produces them."""
    columns = [inlet_column(i) for i in range(len(program.stage.inlets))]
    columns += [FRAME_COLUMN] if program.stage.takes_frames else []
    pieces = []
    for number, rows in parts:
        structs = [
            rows.to_struct_array() if i == number else pa.nulls(rows.num_rows, pa.struct(list(schema)))
            for i, schema in enumerate(types)
        ]
        numbers = pa.array([number] * rows.num_rows, pa.int32())
        pieces.append(pa.RecordBatch.from_arrays([numbers, *structs], [INLET_COLUMN, *columns]))
    return pa.concat_batches(pieces)


def test_several_sources_are_told_apart_even_within_one_batch(stages):
    flow, left = new_flow()
    right = flow.source("in2", ListSource([[]], "x string"))
    left.sink("l", read)
    right.sink("r", read)
    program = stages(flow).programs[0]
    assert is_mixed(program.stage)
    words = pa.record_batch({"x": ["one", "two"]})
    parts = [(0, NUMBERS.slice(0, 3)), (1, words), (0, NUMBERS.slice(3, 2)), (1, words.slice(1))]
    found = list(units(program, [mixed(program, parts, [NUMBERS.schema, words.schema])]))
    assert [(unit.entries, unit.batch.to_pylist()) for unit in found if isinstance(unit, Rows)] == [
        ((IntakeEntry("in"),), NUMBERS.slice(0, 3).to_pylist()),
        ((IntakeEntry("in2"),), words.to_pylist()),
        ((IntakeEntry("in"),), NUMBERS.slice(3, 2).to_pylist()),
        ((IntakeEntry("in2"),), words.slice(1).to_pylist()),
    ]


def test_the_input_of_a_stage_may_mix_rows_and_frames(stages):
    flow, rows = new_flow()
    made = rows.transform("sql", lambda df: df)
    made.key_by("k", "n").map("m", lambda row: row).union("late", rows, made).sink("out", read)
    prepared = stages(flow)
    program = prepared.programs[1]
    [carried] = program.stage.carries
    one = frame(Header(PartitionId(0), carried, Revision(3), PartitionId(0), 0, 100), encode_rows(NUMBERS))
    data = mixed(program, [(0, NUMBERS.slice(0, 5)), (1, one)], [NUMBERS.schema, FRAME_SCHEMA])
    plain, passing = units(program, [data])
    assert isinstance(plain, Rows)
    assert (plain.entries, plain.batch.num_rows, plain.revision) == ((IntakeEntry("sql"),), 5, None)
    assert isinstance(passing, Carried)
    assert (passing.header.wire, passing.header.revision) == (carried, 3)
    assert decode_rows(passing.payload).equals(NUMBERS)


def test_an_inlet_takes_sparks_layout_of_a_type(stages):
    flow = Flow("f")
    flow.source("in", ListSource([[]], "at timestamp, s string")).sink("out", read)
    sparks = pa.record_batch(
        {"at": pa.array([0], pa.timestamp("us", "Europe/Oslo")), "s": pa.array(["x"], pa.large_string())}
    )
    [unit] = units(stages(flow).programs[0], [sparks])
    assert isinstance(unit, Rows)
    assert unit.batch.schema == pa.schema([("at", pa.timestamp("us", "UTC")), ("s", pa.string())])


def test_frames_of_wide_rows_are_not_joined(stages):
    flow, rows = new_flow()
    rows.key_by("k", "n").map("m", lambda row: row).sink("out", read)
    program = stages(flow).programs[1]

    def arriving(width: int) -> pa.RecordBatch:
        payload = encode_rows(batch([(1, "x" * width)]))
        header = Header(PartitionId(0), program.stage.receives[0], Revision(1), PartitionId(0), 0, 1)
        return pa.concat_batches([frame(header, payload)] * 3)

    assert [unit.batch.num_rows for unit in units(program, [arriving(10)]) if isinstance(unit, Rows)] == [3]
    assert [unit.batch.num_rows for unit in units(program, [arriving(1 << 20)]) if isinstance(unit, Rows)] == [1, 1, 1]


# ── the exchange of the local runtime ─────────────────────────────────────────────────────────────────────────────


def test_an_exchange_delivers_every_frame_sorted_by_revision_sender_and_number():
    def one(dest: int, revision: int, src: int, seq: int) -> pa.RecordBatch:
        header = Header(PartitionId(dest), WireId(0), Revision(revision), PartitionId(src), seq, 1)
        return frame(header, encode_rows(NUMBERS.slice(seq, 1)))

    frames = [one(0, 2, 0, 0), one(1, 1, 0, 1), one(0, 1, 1, 1), one(0, 1, 1, 0), one(0, 1, 0, 2)]
    left, right = by_destination(LocalData([frames[:2], frames[2:]]), 2, FRAME_ORDER, random.Random(0)).partitions
    arrived = [(h.revision, h.src, h.seq) for each in left for h in headers(each)]
    assert arrived == [(1, 0, 2), (1, 1, 0), (1, 1, 1), (2, 0, 0)]
    assert [(h.revision, h.src, h.seq) for each in right for h in headers(each)] == [(1, 0, 1)]


# ── programs and resources ────────────────────────────────────────────────────────────────────────────────────────


def test_a_stored_program_is_read_unchanged(stages):
    flow, rows = new_flow()
    rows.key_by("k", "n").map("m", lambda row: row).sink("out", read)
    prepared = stages(flow)
    for program in prepared.programs:
        assert StageProgram.from_bytes(program.to_blob().data) == program


def test_everything_is_loaded_once(stages):
    flow, rows = new_flow()
    table = pa.table({"s": ["a"], "v": [1]})
    rows.lookup("l", table, on="s").map("m", lambda row: row).sink("out", read)
    prepared = stages(flow)
    blobs = prepared.programs[0].blobs
    resources = prepared.resources
    assert resources.function(blobs["m"], "m") is resources.function(blobs["m"], "m")
    lookup = prepared.programs[0].operator("l").spec
    assert isinstance(lookup, Lookup)
    assert lookup.table_in(resources, blobs["l"]) is lookup.table_in(resources, blobs["l"])
    before = resources.function(blobs["m"], "m")
    resources.close()
    assert resources.function(blobs["m"], "m") is not before
