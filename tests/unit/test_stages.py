"""Plans of typical graphs, as text. A changed snapshot means a changed plan: review it before you accept it."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from midstream import ConsoleSink, FileSink, Flow, ListSource, MemorySink, NoopSink, Stream
from midstream.planner.stages import Leaves, compile_plan


def new_flow(*sources: str) -> tuple[Flow, list[Stream]]:
    flow = Flow("f")
    return flow, [flow.source(name, ListSource([[]], "u string, n bigint")) for name in sources]


def same(value: Any) -> Any:
    return value


def read(rows: Any, epoch: int) -> None:
    """A sink that reads a DataFrame."""


def plan_text(flow: Flow) -> str:
    return compile_plan(flow.graph).describe()


def snapshot(text: str) -> str:
    return dedent(text).strip()


def test_without_a_key_everything_is_one_stage_with_plain_columns():
    flow, [rows] = new_flow("in")
    rows.map("m", same).filter("f", same).sink("out", read)
    assert plan_text(flow) == snapshot("""
        stage 0 (segment 0) leaves as typed
          runs: in, m, f
          inlets: in
          emits: 0
        wire 0: f → outlet [out]
        out reads wire 0
        """)


def test_a_key_by_adds_an_exchange():
    flow, [rows] = new_flow("in")
    rows.map("m", same).key_by("by_user", "u").map("score", same).key_by("by_n", "n", "u").map("rank", same).sink(
        "out", read
    )
    assert plan_text(flow) == snapshot("""
        stage 0 (segment 0) leaves as exchange
          runs: in, m, by_user
          inlets: in
          emits: 0
        stage 1 (segment 0) leaves as exchange
          runs: score, by_n
          receives: 0
          emits: 1
        stage 2 (segment 0) leaves as typed
          runs: rank
          receives: 1
          emits: 2
        wire 0: by_user → stage 1 by (u) [score]
        wire 1: by_n → stage 2 by (n, u) [rank]
        wire 2: rank → outlet [out]
        out reads wire 2
        """)


def test_a_key_before_a_sink_needs_no_exchange():
    flow, [rows] = new_flow("in")
    rows.key_by("by_user", "u").sink("out", read)
    assert plan_text(flow) == snapshot("""
        stage 0 (segment 0) leaves as typed
          runs: in, by_user
          inlets: in
          emits: 0
        wire 0: by_user → outlet [out]
        out reads wire 0
        """)


def test_a_union_runs_at_the_depth_of_its_deepest_input():
    flow, [left, right] = new_flow("left", "right")
    deep = left.key_by("k1", "u").map("m1", same).key_by("k2", "u").map("m2", same)
    deep.union("all", right, left).sink("out", read)
    assert plan_text(flow) == snapshot("""
        stage 0 (segment 0) leaves as exchange
          runs: left, right, k1
          inlets: left, right
          emits: 0, 1, 2
        stage 1 (segment 0) leaves as exchange
          runs: m1, k2
          receives: 2
          carries: 0, 1
          emits: 3
        stage 2 (segment 0) leaves as typed
          runs: m2, all
          receives: 0, 1, 3
          emits: 4
        wire 0: left → stage 2 [all]
        wire 1: right → stage 2 [all]
        wire 2: k1 → stage 1 by (u) [m1]
        wire 3: k2 → stage 2 by (u) [m2]
        wire 4: all → outlet [out]
        out reads wire 4
        """)


def test_consumers_in_one_place_share_a_wire():
    flow, [rows] = new_flow("in")
    keyed = rows.key_by("k", "u")
    keyed.map("a", same).sink("out_a", read)
    keyed.map("b", same).sink("out_b", read)
    keyed.sink("raw", read)
    rows.sink("rawer", MemorySink())
    assert plan_text(flow) == snapshot("""
        stage 0 (segment 0) leaves as exchange
          runs: in, k
          inlets: in
          emits: 0, 1, 2
        stage 1 (segment 0) leaves as frames
          runs: a, b
          receives: 1
          carries: 0, 2
          emits: 3, 4
        wire 0: in → outlet [rawer]
        wire 1: k → stage 1 by (u) [a, b]
        wire 2: k → outlet [raw]
        wire 3: a → outlet [out_a]
        wire 4: b → outlet [out_b]
        out_a reads wire 3
        out_b reads wire 4
        raw reads wire 2
        rawer reads wire 0
        """)


def test_each_branch_of_a_route_has_its_own_port():
    flow, [rows] = new_flow("in")
    split = rows.route("r", same, branches=("low", "high"))
    split["high"].key_by("k", "u").map("m", same).union("all", split["low"]).sink("out", read)
    assert plan_text(flow) == snapshot("""
        stage 0 (segment 0) leaves as exchange
          runs: in, r, k
          inlets: in
          emits: 0, 1
        stage 1 (segment 0) leaves as typed
          runs: m, all
          receives: 0, 1
          emits: 2
        wire 0: r[low] → stage 1 [all]
        wire 1: k → stage 1 by (u) [m]
        wire 2: all → outlet [out]
        out reads wire 2
        """)


def test_a_transform_divides_the_flow_and_other_rows_bypass_it():
    flow, [rows] = new_flow("in")
    rows.transform("sql", same).map("m", same).union("all", rows).sink("out", read)
    assert plan_text(flow) == snapshot("""
        stage 0 (segment 0) leaves as frames
          runs: in
          inlets: in
          emits: 0, 1
        stage 1 (segment 1) leaves as typed
          runs: sql, m, all
          inlets: sql
          receives: 1
          emits: 2
        wire 0: in → outlet [sql]
        wire 1: in → stage 1 [all]
        wire 2: all → outlet [out]
        sql reads wire 0
        out reads wire 2
        """)


def test_transforms_in_a_row_and_before_a_sink_need_no_stage():
    flow, [rows] = new_flow("in")
    rows.transform("one", same).transform("two", same).sink("out", read)
    assert plan_text(flow) == snapshot("""
        stage 0 (segment 0) leaves as frames
          runs: in
          inlets: in
          emits: 0
        wire 0: in → outlet [one]
        one reads wire 0
        two reads one
        out reads two
        """)


def test_rows_keyed_before_a_transform_still_meet_after_it():
    """A segment does not begin with an exchange, so the consumer runs after the first exchange of its segment."""
    flow, [rows] = new_flow("in")
    rows.key_by("k", "u").union("all", rows.transform("sql", same)).sink("out", read)
    assert plan_text(flow) == snapshot("""
        stage 0 (segment 0) leaves as frames
          runs: in, k
          inlets: in
          emits: 0, 1
        stage 1 (segment 1) leaves as exchange
          runs: sql
          inlets: sql
          carries: 1
          emits: 2
        stage 2 (segment 1) leaves as typed
          runs: all
          receives: 1, 2
          emits: 3
        wire 0: in → outlet [sql]
        wire 1: k → stage 2 by (u) [all]
        wire 2: sql → stage 2 [all]
        wire 3: all → outlet [out]
        sql reads wire 0
        out reads wire 3
        """)


@pytest.mark.parametrize(
    ("sinks", "leaves"),
    [
        ((read,), Leaves.TYPED),
        ((read, FileSink("out")), Leaves.TYPED),
        ((read, read), Leaves.FRAMES),
        ((MemorySink(),), Leaves.FRAMES),
        ((ConsoleSink(), NoopSink()), Leaves.FRAMES),
        ((NoopSink(),), Leaves.NOTHING),
        ((FileSink("out"), NoopSink(), FileSink("other", "csv")), Leaves.NOTHING),
    ],
)
def test_rows_leave_as_columns_for_one_sink_that_reads_a_dataframe_and_not_at_all_if_tasks_write_them(sinks, leaves):
    flow, [rows] = new_flow("in")
    for number, sink in enumerate(sinks):
        rows.sink(f"out{number}", sink)
    assert [stage.leaves for stage in compile_plan(flow.graph).stages] == [leaves]


def test_rows_of_file_and_noop_sinks_leave_no_stage():
    flow, [rows] = new_flow("in")
    rows.sink("raw", FileSink("out"))
    rows.sink("dropped", NoopSink())
    rows.sink("seen", MemorySink())
    rows.key_by("k", "u").map("m", same).sink("counted", NoopSink())
    assert plan_text(flow) == snapshot("""
        stage 0 (segment 0) leaves as exchange
          runs: in, k
          inlets: in
          emits: 0, 1, 2
        stage 1 (segment 0) leaves as frames
          runs: m
          receives: 2
          carries: 1
          emits: 3
        wire 0: in → written [raw, dropped]
        wire 1: in → outlet [seen]
        wire 2: k → stage 1 by (u) [m]
        wire 3: m → written [counted]
        raw reads wire 0
        dropped reads wire 0
        seen reads wire 1
        counted reads wire 3
        """)


def test_rows_that_pass_through_the_last_stage_stay_frames():
    flow, [rows] = new_flow("in")
    rows.sink("early", read)
    rows.key_by("k", "u").map("m", same).sink("out", FileSink("out"))
    assert [stage.leaves for stage in compile_plan(flow.graph).stages] == [Leaves.EXCHANGE, Leaves.FRAMES]


def test_sources_enter_by_name_whatever_the_order_in_which_they_were_added():
    """Spark finds the offsets of a source by its position, so a script that was merely rearranged must not move it."""

    def inlets(*names: str) -> tuple[str, ...]:
        flow = Flow("f")
        first, second = (flow.source(name, ListSource([[]], "n bigint")) for name in names)
        first.union("both", second).sink("out", NoopSink())
        return compile_plan(flow.graph).stages[0].inlets

    assert inlets("a", "b") == inlets("b", "a") == ("a", "b")
