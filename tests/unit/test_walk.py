"""The walk over segments: the order of steps in an epoch, on an engine that only records them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import ConsoleSink, Flow, ListSource, MemorySink, NoopSink, Stream
from midstream.flow.model import Operator, Sink, Transform
from midstream.ids import WireId
from midstream.planner.stages import Stage, compile_plan
from midstream.runtime.walk import walk
from tests.examples import examples
from tests.simulation.flows import random_case


class Notes:
    """An engine whose inputs and outputs are texts of how they were made; each step is recorded as a line."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.lines: list[str] = []
        self._fails_at = fails_at

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

    def drain(self, rows: str) -> None:
        self.note(f"drain {rows}", "")

    def write(self, sink: Operator, rows: str) -> None:
        self.note(f"write {sink.name}: {rows}", "")

    def release(self) -> None:
        self.lines.append("release")


def same(value: Any) -> Any:
    return value


def new_flow() -> tuple[Flow, Stream]:
    flow = Flow("f")
    return flow, flow.source("in", ListSource([[]], "u string, n bigint"))


def walked(flow: Flow) -> list[str]:
    notes = Notes()
    walk(compile_plan(flow.graph), notes, "rows")
    return notes.lines


def test_stages_run_in_order_and_a_single_sink_gets_plain_columns():
    flow, rows = new_flow()
    rows.key_by("k", "u").map("m", same).sink("out", NoopSink())
    assert walked(flow) == ["run 0 on rows", "run 1 behind s0", "write out: columns of s1", "release"]


def test_frames_with_several_readers_are_kept_and_sinks_that_read_every_row_come_first():
    flow, rows = new_flow()
    rows.sink("look", ConsoleSink())
    rows.map("m", same).sink("all", MemorySink())
    assert walked(flow) == [
        "run 0 on rows",
        "keep s0",
        "write all: rows of wire 1 of kept s0",
        "drain rows of wire 0 of kept s0",
        "write look: rows of wire 0 of kept s0",
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
        "write out: columns of s1",
        "release",
    ]


def test_a_transform_that_is_read_twice_is_kept_and_one_may_read_another():
    flow, rows = new_flow()
    first = rows.transform("first", same, local=same)
    first.sink("a", NoopSink())
    first.transform("second", same, local=same).sink("b", NoopSink())
    assert walked(flow) == [
        "run 0 on rows",
        "keep s0",
        "transform first of rows of wire 0 of kept s0 and keep it",
        "transform second of first",
        "write a: first",
        "write b: second",
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
    sinks = [line.split()[1].rstrip(":") for line in notes.lines if line.startswith("write ")]
    assert sorted(sinks) == sorted(op.name for op in plan.graph.of(Sink))
    drains = [plan.graph.payloads[name].drains for name in sinks]
    assert drains == sorted(drains, reverse=True), "sinks that read every row come first"
    assert done.index("write") > max(at for at, what in enumerate(done) if what in ("run", "keep", "transform"))
    assert done.count("release") == 1
    assert done[-1] == "release"


@pytest.mark.parametrize("at", range(7))
def test_kept_frames_are_released_wherever_the_walk_fails(at: int):
    flow, rows = new_flow()
    rows.transform("sql", same, local=same).union("u", rows).sink("look", ConsoleSink())
    notes = Notes(fails_at=at)
    with pytest.raises(ValueError, match=r"run|keep|transform|drain|write"):
        walk(compile_plan(flow.graph), notes, "rows")
    assert notes.lines[-1] == "release"
    assert len(notes.lines) == at + 1
