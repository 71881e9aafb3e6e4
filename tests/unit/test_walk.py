"""The walk over segments: the order of steps in an epoch, on an engine that only records them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import ConsoleSink, FileSink, Flow, ListSource, MemorySink, NoopSink, Stream
from midstream.flow.model import Operator, Sink, Transform
from midstream.ids import WireId
from midstream.planner.stages import Stage, compile_plan
from midstream.runtime.walk import walk
from tests.examples import examples
from tests.simulation.flows import random_case


class Notes:
    """An engine whose inputs and outputs are texts of how they were made; each step is recorded as a line."""

    def __init__(self, fails_at: int | None = None, *, reads_all: bool = True, in_turn: bool = False) -> None:
        self.lines: list[str] = []
        self.computed: set[str] = set()
        self._fails_at = fails_at
        self._reads_all = reads_all
        self._in_turn = in_turn

    def note(self, line: str, gives: str) -> str:
        if len(self.lines) == self._fails_at:
            raise ValueError(line)
        self.lines.append(line)
        return gives

    def run(self, stage: Stage, rows: str) -> str:
        return self.note(f"run {stage.index} on {rows}", f"s{stage.index}")

    def run_next(self, stage: Stage, before: str) -> str:
        return self.note(f"run {stage.index} behind {before}", f"s{stage.index}")

    def keep(self, left: str) -> str:
        return self.note(f"keep {left}", f"kept {left}")

    def frames(self, left: str, wires: Sequence[WireId]) -> str:
        return f"wires {', '.join(map(str, wires))} of {left}"

    def decoded(self, left: str, wire: WireId) -> str:
        return f"rows of wire {wire} of {left}"

    def columns(self, left: str) -> str:
        return f"columns of {left}"

    def unite(self, inlets: Sequence[str], frames: str | None) -> str:
        return f"({' + '.join([*inlets, *([] if frames is None else [frames])])})"

    def transform(self, operator: Operator, rows: str, *, is_kept: bool) -> str:
        return self.note(f"transform {operator.name} of {rows}{' and keep it' if is_kept else ''}", operator.name)

    def collect(self, left: str, wires: Sequence[WireId]) -> dict[WireId, pa.Table]:
        self.computed.add(left.removeprefix("kept "))
        self.note(f"collect {', '.join(map(str, wires)) or 'nothing'} of {left}", "")
        return {wire: pa.table({"wire": [int(wire)]}) for wire in wires}

    def drain(self, rows: str) -> None:
        self.note(f"drain {rows}", "")

    def is_computed(self, stage: Stage) -> bool:
        return f"s{stage.index}" in self.computed

    def reads_in_turn(self, sink: Operator, stage: Stage) -> bool:
        return self._in_turn

    def give(self, sink: Operator, rows: pa.Table) -> None:
        self.note(f"give {sink.name}: {rows.column_names[0]} {rows.column(0)[0]}", "")

    def table(self, rows: str, schema: pa.Schema) -> pa.Table:
        return pa.table({"table of": [self.note(f"fetch {rows}", rows)]})

    def write_files(self, sink: Operator, rows: str) -> None:
        self.note(f"files {sink.name}: {rows}", "")

    def write(self, sinks: Sequence[tuple[Operator, str]]) -> None:
        if self._reads_all:
            self.computed |= {rows.split("kept ")[-1] for _, rows in sinks}
        self.note(f"write {'; '.join(f'{sink.name}: {rows}' for sink, rows in sinks)}", "")

    def release(self) -> None:
        self.lines.append("release")


def same(value: Any) -> Any:
    return value


def new_flow() -> tuple[Flow, Stream]:
    flow = Flow("f")
    return flow, flow.source("in", ListSource([[]], "u string, n bigint"))


def read(rows: Any, epoch: int) -> None:
    """A sink that reads a DataFrame."""


def walked(flow: Flow, **engine: bool) -> list[str]:
    notes = Notes(**engine)
    walk(compile_plan(flow.graph), notes, "rows")
    return notes.lines


def test_with_any_number_of_built_in_sinks_an_epoch_is_computed_once_and_nothing_is_kept():
    flow, rows = new_flow()
    rows.sink("raw", FileSink("out"))
    rows.sink("look", ConsoleSink())
    made = rows.key_by("k", "u").map("m", same)
    made.sink("none", NoopSink())
    made.sink("all", MemorySink())
    made.sink("again", MemorySink())
    assert walked(flow) == [
        "run 0 on rows",
        "run 1 behind s0",
        "collect 1, 4 of s1",
        "give look: wire 1",
        "give all: wire 4",
        "give again: wire 4",
        "release",
    ]


def test_if_tasks_write_everything_the_driver_gets_no_rows():
    flow, rows = new_flow()
    rows.key_by("k", "u").map("m", same).sink("out", FileSink("out"))
    assert walked(flow) == ["run 0 on rows", "run 1 behind s0", "collect nothing of s1", "release"]


def test_a_single_sink_that_reads_a_dataframe_gets_plain_columns_and_triggers_the_only_job():
    flow, rows = new_flow()
    rows.key_by("k", "u").map("m", same).sink("out", read)
    assert walked(flow) == [
        "run 0 on rows",
        "run 1 behind s0",
        "keep s1",
        "write out: columns of kept s1",
        "release",
    ]


def test_rows_that_a_sink_did_not_read_are_still_computed():
    flow, rows = new_flow()
    rows.key_by("k", "u").map("m", same).sink("out", read)
    assert walked(flow, reads_all=False)[-3:] == [
        "write out: columns of kept s1",
        "collect nothing of kept s1",
        "release",
    ]


def test_rows_are_computed_before_a_sink_reads_one_partition_after_the_other():
    flow, rows = new_flow()
    rows.key_by("k", "u").map("m", same).sink("out", read)
    assert walked(flow, reads_all=False, in_turn=True)[-3:] == [
        "collect nothing of kept s1",
        "write out: columns of kept s1",
        "release",
    ]


def test_several_sinks_that_read_dataframes_share_rows_that_are_computed_once():
    flow, rows = new_flow()
    rows.sink("one", read)
    rows.map("m", same).sink("two", read)
    assert walked(flow) == [
        "run 0 on rows",
        "keep s0",
        "collect nothing of kept s0",
        "write one: rows of wire 0 of kept s0; two: rows of wire 1 of kept s0",
        "release",
    ]


def test_the_job_that_fetches_rows_for_the_driver_also_computes_those_of_other_readers():
    flow, rows = new_flow()
    rows.sink("one", read)
    rows.sink("all", MemorySink())
    assert walked(flow) == [
        "run 0 on rows",
        "keep s0",
        "collect 0 of kept s0",
        "give all: wire 0",
        "write one: rows of wire 0 of kept s0",
        "release",
    ]


def test_the_next_segment_reads_outputs_of_transforms_and_frames_that_bypassed_them():
    flow, rows = new_flow()
    turned = rows.transform("sql", same, local=same)
    turned.union("u", rows).sink("out", NoopSink())
    assert walked(flow) == [
        "run 0 on rows",
        "keep s0",
        "transform sql of rows of wire 0 of kept s0",
        "run 1 on (sql + wires 1 of kept s0)",
        "collect nothing of s1",
        "release",
    ]


def test_a_transform_that_is_read_twice_is_kept_and_one_may_read_another():
    flow, rows = new_flow()
    first = rows.transform("first", same, local=same)
    first.sink("a", FileSink("a"))
    second = first.transform("second", same, local=same)
    second.sink("b", MemorySink())
    second.sink("c", read)
    assert walked(flow) == [
        "run 0 on rows",
        "keep s0",
        "transform first of rows of wire 0 of kept s0 and keep it",
        "transform second of first and keep it",
        "files a: first",
        "fetch second",
        "give b: table of second",
        "drain second",
        "write c: second",
        "release",
    ]


@examples(60)
@given(st.randoms(use_true_random=False))
def test_on_any_graph_everything_happens_once_and_in_order(rng: random.Random):
    plan = compile_plan(random_case(rng).flow.graph)
    notes = Notes()
    walk(plan, notes, "rows")
    done = [line.split()[0] for line in notes.lines]
    assert [line.split()[1] for line in notes.lines if line.startswith("run ")] == [str(s.index) for s in plan.stages]
    transforms = [line.split()[1] for line in notes.lines if line.startswith("transform ")]
    assert sorted(transforms) == sorted(op.name for op in plan.graph.of(Transform))
    given = [line.split()[1].rstrip(":") for line in notes.lines if line.startswith(("give ", "files "))]
    given += [
        part.split(":")[0]
        for line in notes.lines
        if line.startswith("write ")
        for part in line.removeprefix("write ").split("; ")
    ]
    written = {name for wire in plan.wires if wire.is_written for name in wire.consumers}
    drained = {line.split()[1] for line in notes.lines if line.startswith("drain ")}
    dropped = {op.name for op in plan.graph.of(Sink) if plan.feeds[op.name] in drained} - set(given)
    assert sorted([*given, *written, *dropped]) == sorted(op.name for op in plan.graph.of(Sink))
    collected = [line.rsplit(" of ", 1)[1] for line in notes.lines if line.startswith("collect ")]
    assert len(set(collected)) == len(collected), "a segment is computed by one job"
    outputs = [at for at, what in enumerate(done) if what in ("collect", "give", "files", "write", "drain")]
    assert min(outputs) > max(at for at, what in enumerate(done) if what in ("run", "keep", "transform"))
    assert done.count("release") == 1
    assert done[-1] == "release"


@pytest.mark.parametrize("at", range(6))
def test_kept_frames_are_released_wherever_the_walk_fails(at: int):
    flow, rows = new_flow()
    rows.transform("sql", same, local=same).union("u", rows).sink("look", ConsoleSink())
    notes = Notes(fails_at=at)
    with pytest.raises(ValueError, match=r"run|keep|transform|collect|give"):
        walk(compile_plan(flow.graph), notes, "rows")
    assert notes.lines[-1] == "release"
    assert len(notes.lines) == at + 1
