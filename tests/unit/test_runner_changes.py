"""The stage runner during a change: which operator runs which version from which row on, and the final output."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import Flow, ListSource, Stream, Update
from midstream.change.configuration import Configuration, first_configuration
from midstream.change.prepare import prepare
from midstream.data.times import EpochTimes
from midstream.engine.audit_recorder import Recorder
from midstream.engine.clock import ManualClock
from midstream.engine.file_outlets import FileOutlets
from midstream.engine.frames import FRAME_ORDER, Header, decode_rows, encode_rows, frame, frames_of
from midstream.engine.intake import INLET_COLUMN, inlet_column, inlet_origin
from midstream.engine.resources import Resources
from midstream.engine.runner import RevisedStage, StageRunner
from midstream.engine.slices import SliceSizer
from midstream.engine.steps import OperatorInTask
from midstream.errors import MidstreamError, OperatorFailed
from midstream.flow.model import Graph
from midstream.ids import Epoch, InputPosition, Origin, PartitionId, Revision, WireId
from midstream.planner.stages import compile_plan
from midstream.runtime.local.data import LocalData, by_destination
from midstream.storage.blobs import BlobStore
from tests.examples import examples

OLD, NEW = Revision(1), Revision(2)
DDL = "n bigint, trace string"
SCHEMA = pa.schema([("n", pa.int64()), ("trace", pa.string())])


class Mark:
    """Writes its name on the row."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "trace": f"{row['trace']} {self.name}"}


def read(rows: Any, epoch: int) -> None:
    """A sink that reads a DataFrame: a single one gets plain columns."""


def numbers(start: int, stop: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"n": n, "trace": ""} for n in range(start, stop)], schema=SCHEMA)


class Fixed(SliceSizer):
    """Slices of one length."""

    def observe(self, *, rows: int, elapsed_ns: int) -> None:
        return None


def task_of(
    configuration: Configuration, resources: Resources, stage: int, rows: int, recorder: Recorder | None = None
) -> StageRunner:
    """A task of a stage, whose slices have this number of rows."""
    return StageRunner(
        resources.program(configuration.programs[stage]),
        resources,
        partition=PartitionId(0),
        assignments=configuration.assignments,
        revision=OLD,
        clock=ManualClock(),
        sizer=Fixed(rows),
        times=EpochTimes(clock=0),
        states={},
        outlets=FileOutlets({}, {}, epoch=Epoch(0), partition=PartitionId(0), durable=False),
        recorder=recorder,
    )


class Job:
    """A flow, a change of it, and runners of its stages."""

    def __init__(self, folder: Path, build: Flow | Callable[[Stream], Stream], *updates: Update) -> None:
        flow = build if isinstance(build, Flow) else Flow("f")
        if not isinstance(build, Flow):
            build(flow.source("in", ListSource([[]], DDL))).sink("out", read)
        store = BlobStore(str(folder))
        self.before: Configuration = first_configuration(flow.graph, store, 1)
        self.after = prepare(self.before, updates, store, revision=NEW).after
        self.resources = Resources(store)

    def runner(self, *heads: str, stage: int = 0, rows: int = 10, recorder: Recorder | None = None) -> StageRunner:
        """A task that is ready for the change."""
        runner = self.unaware(stage=stage, rows=rows, recorder=recorder)
        runner.prepare(self.revised(*heads, stage=stage))
        return runner

    def unaware(self, *, stage: int = 0, rows: int = 10, recorder: Recorder | None = None) -> StageRunner:
        return task_of(self.before, self.resources, stage, rows, recorder)

    def revised(self, *heads: str, stage: int = 0) -> RevisedStage:
        return RevisedStage(NEW, self.resources.program(self.after.programs[stage]), frozenset(heads))


def chain(rows: Stream) -> Stream:
    return rows.map("a", Mark("a")).map("b", Mark("b"))


def two_stages(rows: Stream) -> Stream:
    return rows.map("a", Mark("a")).key_by("k", "n").map("b", Mark("b"))


BOTH = (Update("a", Mark("A")), Update("b", Mark("B")))
ONE = (Update("a", Mark("A")),)


def ran(
    runner: StageRunner,
    batches: Sequence[pa.RecordBatch],
    after_slices: Mapping[int, Callable[[], None]] | None = None,
) -> dict[int, str]:
    """The trace of each row; runs the given actions between slices."""
    out: list[pa.RecordBatch] = []
    for number, ready in enumerate(runner.run(batches), 1):
        out += ready
        (after_slices or {}).get(number, lambda: None)()
    rows = [row for each in out for row in rows_in(each)]
    return {row["n"]: row["trace"].strip() for row in rows}


def rows_in(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    if "payload" not in batch.schema.names:
        yield from batch.to_pylist()
    else:
        for _, payload in frames_of(batch):
            yield from decode_rows(payload).to_pylist()


def revisions_of(batches: Sequence[pa.RecordBatch]) -> list[int]:
    return [header.revision for each in batches for header, _ in frames_of(each)]


def framed(rows: pa.RecordBatch, revision: Revision, seq: int = 0, wire: int = 0) -> pa.RecordBatch:
    header = Header(PartitionId(0), WireId(wire), revision, PartitionId(0), seq, rows.num_rows)
    return frame(header, encode_rows(rows))


def first_new(traces: Mapping[int, str], new: str) -> int:
    """The first row under the new version; all earlier rows are old and all later ones are new."""
    found = [trace == new for _, trace in sorted(traces.items())]
    assert found == sorted(found)
    return found.index(True)


# ── switching ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prepared_task_stays_with_the_old_revision(tmp_path: Path):
    traces = ran(Job(tmp_path, chain, *BOTH).runner("a"), [numbers(0, 30)])
    assert set(traces.values()) == {"a b"}


def test_from_the_switch_on_rows_meet_only_new_versions(tmp_path: Path):
    runner = Job(tmp_path, chain, *BOTH).runner("a")
    traces = ran(runner, [numbers(0, 60)], {2: runner.switch})
    assert first_new(traces, "A B") == 20


def test_a_running_task_may_be_prepared_and_switched(tmp_path: Path):
    job = Job(tmp_path, chain, *BOTH)
    runner = job.unaware()

    def change() -> None:
        runner.prepare(job.revised("a"))
        runner.switch()

    assert first_new(ran(runner, [numbers(0, 60)], {3: change}), "A B") == 30


def test_operators_upstream_of_a_head_are_not_affected(tmp_path: Path):
    runner = Job(tmp_path, chain, Update("b", Mark("B"))).runner("b")
    assert first_new(ran(runner, [numbers(0, 60)], {2: runner.switch}), "a B") == 20


def test_the_position_counts_rows_by_origin(tmp_path: Path):
    runner = Job(tmp_path, chain, *BOTH).runner("a")
    seen: list[InputPosition] = []
    ran(runner, [numbers(0, 15), numbers(15, 25)], {1: lambda: seen.append(runner.position)})
    assert seen == [{inlet_origin(0): 15}]
    assert runner.position == {inlet_origin(0): 25}


# ── switching where an earlier attempt did ────────────────────────────────────────────────────────────────────────


def test_another_attempt_switches_at_the_same_row_however_its_slices_are_cut(tmp_path: Path):
    job = Job(tmp_path, chain, *BOTH)
    for size, at in product((1, 10, 1000), (0, 1, 17, 29, 30, 31, 59, 60)):
        runner = job.runner("a", rows=size)
        runner.switch({inlet_origin(0): at})
        traces = ran(runner, [numbers(0, 30), numbers(30, 60)])
        assert [trace == "A B" for _, trace in sorted(traces.items())] == [n >= at for n in range(60)]


def test_an_attempt_that_switches_at_the_start_uses_the_new_version_from_its_first_row(tmp_path: Path):
    runner = Job(tmp_path, chain, *BOTH).runner("a")
    runner.switch({})
    assert set(ran(runner, [numbers(0, 30)]).values()) == {"A B"}


def test_each_origin_has_its_own_position(tmp_path: Path):
    flow = Flow("f")
    left, right = (flow.source(name, ListSource([[]], DDL)) for name in ("left", "right"))
    left.union("u", right).map("a", Mark("a")).sink("out", read)
    job = Job(tmp_path, flow, *ONE)
    data = [mixed(0, numbers(0, 20)), mixed(1, numbers(100, 120)), mixed(0, numbers(20, 40))]

    first = job.runner("a")
    once = ran(first, data, {3: first.switch})  # after 20 rows of the left and 10 of the right
    assert {n for n, trace in once.items() if trace == "A"} == {*range(110, 120), *range(20, 40)}
    for size in (1, 7, 100):
        again = job.runner("a", rows=size)
        again.switch({inlet_origin(0): 20, inlet_origin(1): 10})
        assert ran(again, data) == once
    unnamed = job.runner("a")
    unnamed.switch({inlet_origin(0): 20})
    found = {n for n, trace in ran(unnamed, data).items() if trace == "A"}
    assert found == {*range(100, 120), *range(20, 40)}, "what is not named had given nothing"


def mixed(number: int, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of one of two inlets."""
    kind = pa.struct(list(SCHEMA))
    columns = [rows.to_struct_array() if i == number else pa.nulls(rows.num_rows, kind) for i in range(2)]
    which = pa.array([number] * rows.num_rows, pa.int32())
    return pa.RecordBatch.from_arrays([which, *columns], [INLET_COLUMN, inlet_column(0), inlet_column(1)])


# ── behind an exchange ────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_that_a_switched_head_emits_carry_the_new_revision(tmp_path: Path):
    runner = Job(tmp_path, two_stages, *BOTH).runner("a")
    runner.switch({inlet_origin(0): 15})
    out = [ready for pause in runner.run([numbers(0, 30)]) for ready in pause]
    by_revision = {header.revision: decode_rows(payload) for each in out for header, payload in frames_of(each)}
    assert {number: rows.num_rows for number, rows in by_revision.items()} == {OLD: 15, NEW: 15}
    assert set(by_revision[NEW].column("trace").to_pylist()) == {" A"}


def test_other_members_use_the_revision_that_rows_carry(tmp_path: Path):
    runner = Job(tmp_path, two_stages, *BOTH).runner(stage=1)
    traces = ran(runner, [framed(numbers(0, 10), OLD), framed(numbers(10, 20), NEW, seq=1)])
    assert first_new(traces, "B") == 10


def test_after_an_exchange_all_rows_of_the_old_revision_come_first():
    sent = [(NEW, 0, 0), (OLD, 1, 0), (NEW, 1, 1), (OLD, 0, 1)]
    frames = [
        frame(Header(PartitionId(0), WireId(0), revision, PartitionId(src), seq, 1), encode_rows(numbers(0, 1)))
        for revision, src, seq in sent
    ]
    exchanged = by_destination(LocalData([frames]), 1, FRAME_ORDER, random.Random(1))
    assert revisions_of(exchanged.partitions[0]) == [OLD, OLD, NEW, NEW]


def test_a_head_uses_its_own_switch_whatever_revision_rows_carry(tmp_path: Path):
    runner = Job(tmp_path, two_stages, Update("b", Mark("B"))).runner("b", stage=1)
    runner.switch({Origin(0): 5})
    assert first_new(ran(runner, [framed(numbers(0, 20), OLD)]), "B") == 5
    unswitched = Job(tmp_path, two_stages, Update("b", Mark("B"))).runner("b", stage=1)
    assert set(ran(unswitched, [framed(numbers(0, 20), NEW)]).values()) == {"b"}


def test_updated_operators_that_new_rows_have_reached_are_reported_once(tmp_path: Path):
    runner = Job(tmp_path, chain, *BOTH).runner("a")
    told: list[tuple[str, ...]] = []
    asks: dict[int, Callable[[], None]] = {n: lambda: told.append(runner.newly_reached()) for n in (1, 3, 4)}
    ran(runner, [numbers(0, 60)], {**asks, 2: runner.switch})
    assert told == [(), ("a", "b"), ()]


def test_an_operator_that_is_not_updated_is_not_reported(tmp_path: Path):
    runner = Job(tmp_path, chain, *ONE).runner("a")
    runner.switch()
    ran(runner, [numbers(0, 10)])
    assert runner.newly_reached() == ("a",)


def test_unchanged_operators_are_reused(tmp_path: Path):
    runner = Job(tmp_path, chain, *ONE).runner("a")
    versions = runner._nodes["b"].versions
    assert versions[OLD] is versions[NEW]
    assert runner._nodes["a"].is_updated
    assert not runner._nodes["b"].is_updated


def test_the_audit_records_the_revision_under_which_rows_were_taken(tmp_path: Path):
    recorder = Recorder("n")
    runner = Job(tmp_path, chain, *BOTH).runner("a", recorder=recorder)
    runner.switch({inlet_origin(0): 5})
    ran(runner, [numbers(0, 10)])
    found = {(row["operator"], int(row["row"])): row["revision"] for row in recorder.table().to_pylist()}
    assert all(found[name, n] == (NEW if n >= 5 else OLD) for name in ("a", "b") for n in range(10))
    assert {found["in", n] for n in range(10)} == {OLD}


# ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────


def with_ends(runner: StageRunner, name: str, said: list[tuple[str, int]], *, what: str = "finish") -> None:
    """Make an operator report its revision when it finishes, or is flushed before rows of another revision."""

    def saying(revision: Revision) -> Callable[[], Iterator[Mapping[str, pa.RecordBatch]]]:
        def say() -> Iterator[Mapping[str, pa.RecordBatch]]:
            said.append((what, revision))
            yield {"": pa.RecordBatch.from_pylist([{"n": 1000 + revision, "trace": "said"}], schema=SCHEMA)}

        return say

    node = runner._nodes[name]
    for revision, version in list(node.versions.items()):
        work = version.work
        finish, flush = (saying(revision), None) if what == "finish" else (None, saying(revision))
        node.versions[revision] = replace(version, work=OperatorInTask(work.entries, finish, work.take_partials, flush))


@pytest.mark.parametrize(("switches", "wanted"), [(True, NEW), (False, OLD)])
def test_a_heads_final_output_uses_its_current_revision(tmp_path: Path, switches: bool, wanted: Revision):
    runner, said = Job(tmp_path, chain, *ONE).runner("a"), list[tuple[str, int]]()
    with_ends(runner, "a", said)
    if switches:
        runner.switch({inlet_origin(0): 25})  # even if no row came after it
    ran(runner, [numbers(0, 20)])
    assert said == [("finish", wanted)]


def test_the_final_output_of_other_operators_uses_the_new_revision(tmp_path: Path):
    runner, said = Job(tmp_path, two_stages, *BOTH).runner(stage=1), list[tuple[str, int]]()
    with_ends(runner, "b", said)
    ran(runner, [framed(numbers(0, 20), OLD)])
    assert said == [("finish", NEW)]


def test_without_a_change_final_output_uses_the_only_revision(tmp_path: Path):
    runner, said = Job(tmp_path, chain, *ONE).unaware(), list[tuple[str, int]]()
    with_ends(runner, "a", said)
    ran(runner, [numbers(0, 20)])
    assert said == [("finish", OLD)]


def test_final_output_meets_operators_downstream_under_the_same_revision(tmp_path: Path):
    runner, said = Job(tmp_path, chain, *BOTH).runner("a"), list[tuple[str, int]]()
    with_ends(runner, "a", said)
    runner.switch({})
    assert ran(runner, [numbers(0, 5)])[1000 + NEW] == "said B"


def test_a_task_cannot_switch_once_all_input_is_taken(tmp_path: Path):
    runner = Job(tmp_path, chain, *BOTH).runner("a")
    seen = [runner.is_finishing for _ in runner.run([numbers(0, 20)])]
    assert seen == [False, False, True]


def test_pending_results_are_flushed_before_rows_of_another_revision(tmp_path: Path):
    runner, said = Job(tmp_path, two_stages, *BOTH).runner(stage=1), list[tuple[str, int]]()
    with_ends(runner, "b", said, what="flush")
    frames = [framed(numbers(0, 10), OLD), framed(numbers(10, 20), NEW, seq=1), framed(numbers(20, 30), NEW, seq=2)]
    ran(runner, frames)
    assert said == [("flush", OLD), ("flush", NEW)], "once between them and once at the end"


# ── whose fault it is ─────────────────────────────────────────────────────────────────────────────────────────────


class Fails:
    """Fails on a row."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == self.n:
            raise ValueError("no")
        return row


@pytest.mark.parametrize(("at", "guilty"), [(0, NEW), (30, OLD)])
def test_a_failure_is_blamed_on_the_revision_being_processed(tmp_path: Path, at: int, guilty: Revision):
    def build(rows: Stream) -> Stream:
        return rows.map("a", Fails(25))

    runner = Job(tmp_path, build, Update("a", Fails(25))).runner("a")
    runner.switch({inlet_origin(0): at})
    with pytest.raises(OperatorFailed):
        ran(runner, [numbers(0, 40)])
    assert runner.at_work_under == guilty


class FailsToOpen(Mark):
    """Cannot be used in a worker."""

    def open(self) -> None:
        raise RuntimeError("no model")


def test_a_function_that_cannot_be_loaded_is_blamed_on_the_new_revision(tmp_path: Path):
    job = Job(tmp_path, chain, Update("a", FailsToOpen("A")))
    runner = job.unaware()
    with pytest.raises(MidstreamError, match="no model"):
        runner.prepare(job.revised("a"))
    assert runner.at_work_under == NEW


def test_failures_after_preparation_are_blamed_on_the_old_revision(tmp_path: Path):
    assert Job(tmp_path, chain, *BOTH).runner("a").at_work_under == OLD


# ── two graphs ────────────────────────────────────────────────────────────────────────────────────────────────────


class TwoGraphs:
    """Two graphs that differ in the operator `x`, and runners for both."""

    def __init__(self, folder: Path, build: Callable[[Stream, bool], None], *, removes: bool) -> None:
        store = BlobStore(str(folder))
        self.before = first_configuration(self.flow(build, with_x=removes), store, 1)
        after = first_configuration(self.flow(build, with_x=not removes), store, 1)
        plan = compile_plan(after.graph, self.before.plan.numbers)
        self.after = replace(after, plan=plan, revision=NEW).store(store)
        self.resources = Resources(store)
        self.names = {OLD: "a x b" if removes else "a b", NEW: "a b" if removes else "a x b"}

    @staticmethod
    def flow(build: Callable[[Stream, bool], None], *, with_x: bool) -> Graph:
        flow = Flow("f")
        build(flow.source("in", ListSource([[]], DDL)), with_x)
        return flow.graph

    def runner(self, stage: int, *heads: str, rows: int = 10) -> StageRunner:
        runner = task_of(self.before, self.resources, stage, rows)
        after = self.resources.program(self.after.programs[stage])
        runner.prepare(RevisedStage(NEW, after, frozenset(heads)))
        return runner


def maybe_x(rows: Stream, with_x: bool) -> Stream:
    return rows.map("x", Mark("x")) if with_x else rows


def x_in_a_chain(rows: Stream, with_x: bool) -> None:
    maybe_x(rows.map("a", Mark("a")), with_x).map("b", Mark("b")).sink("out", read)


def x_behind_an_exchange(rows: Stream, with_x: bool) -> None:
    """`x` is the first or the last to read a wire; both versions have the same wires."""
    seen = rows.map("a", Mark("a"))
    maybe_x(seen.key_by("k", "n").filter("all", lambda row: True), with_x).map("b", Mark("b")).sink("out", read)


def x_before_one_of_two_readers(rows: Stream, with_x: bool) -> None:
    seen = rows.map("a", Mark("a")).key_by("k", "n")
    first = seen.map("x", Mark("x")) if with_x else seen
    first.map("b", Mark("b")).sink("out", read)
    seen.map("c", Mark("c")).sink("other", read)


@pytest.mark.parametrize("removes", [False, True])
def test_from_the_switch_on_rows_pass_through_the_graph_of_their_revision(tmp_path: Path, removes: bool):
    graphs = TwoGraphs(tmp_path, x_in_a_chain, removes=removes)
    runner = graphs.runner(0, "a")
    traces = ran(runner, [numbers(0, 60)], {2: runner.switch})
    assert traces == {n: graphs.names[OLD if n < 20 else NEW] for n in range(60)}
    met = {stats.operator: stats.rows_in for stats in runner.report().operators}
    assert met == {"in": 60, "a": 60, "x": 20 if removes else 40, "b": 60}
    # A row meets the change where it leaves "a", whose readers are others.
    assert set(runner.newly_reached()) == ({"a"} if removes else {"a", "x"})


def test_both_graphs_share_equal_operators(tmp_path: Path):
    runner = TwoGraphs(tmp_path, x_in_a_chain, removes=False).runner(0, "a")
    for name in ("in", "a", "b"):
        versions = runner._nodes[name].versions
        assert versions[OLD].work is versions[NEW].work
    assert set(runner._nodes["x"].versions) == {NEW}
    assert list(runner._nodes) == ["in", "a", "x", "b"], "in an order in which both can end"


@examples(40)
@given(st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_rows_of_both_revisions_may_arrive_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random, removes: bool, forks: bool
) -> None:
    build = x_before_one_of_two_readers if forks else x_behind_an_exchange
    graphs = TwoGraphs(tmp_path_factory.mktemp("graphs"), build, removes=removes)
    assert {wire.id for wire in graphs.before.plan.wires} & {wire.id for wire in graphs.after.plan.wires}
    [wire] = graphs.resources.program(graphs.before.programs[1]).stage.receives
    frames, revisions, start = [], {}, 0
    for seq in range(rng.randint(1, 8)):
        revision, size = rng.choice((OLD, NEW)), rng.randint(1, 25)
        rows = pa.RecordBatch.from_pylist([{"n": n, "trace": "a"} for n in range(start, start + size)], schema=SCHEMA)
        frames.append(framed(rows, revision, seq, wire))
        revisions.update(dict.fromkeys(range(start, start + size), revision))
        start += size
    runner = graphs.runner(1, rows=rng.randint(1, 30))
    out = [row for ready in runner.run(frames) for each in ready for row in rows_in(each)]
    wanted = [(n, graphs.names[revision]) for n, revision in revisions.items()]
    if forks:
        wanted += [(n, "a c") for n in revisions]
    assert sorted((row["n"], row["trace"]) for row in out) == sorted(wanted)
