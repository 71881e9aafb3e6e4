"""Deployments: what differs between a script and what runs, as edits; and how scripts travel to a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, Insert, ListSource, MemorySink, NoopSink, Remove, Rewire, Update, agg
from midstream.change.configuration import Configuration, first_configuration
from midstream.change.deployment import deployment_of
from midstream.change.explain import Explanation
from midstream.change.prepare import prepare
from midstream.change.restart_plan import restart_plan
from midstream.errors import CheckpointError, FlowError
from midstream.flow.edits import Redraw, updates_in
from midstream.flow.functions import likeness
from midstream.flow.model import Graph
from midstream.flow.plan_steps import Add
from midstream.ids import Revision
from midstream.server.messages import DeployRequest, message_of, python_version
from midstream.storage.blobs import BlobStore
from midstream.testing import run_local

ROWS = ListSource([[{"k": "a", "n": 1}]], "k string, n bigint")
RATES = pa.table({"k": ["a"], "rate": [1.0]})


def same(row: Any) -> Any:
    return row


def count_up(key: Any, row: Any, state: Any) -> Any:
    return row


def script(build: Any = None, name: str = "shop", source: ListSource = ROWS) -> Graph:
    flow = Flow(name)
    stream = flow.source("in", source)
    if build is None:
        chain(stream)
    else:
        build(stream)
    return flow.graph


def chain(stream: Any, above: int = 1, rates: pa.Table = RATES) -> None:
    rows = stream.map("m", same).filter("f", lambda row: row["n"] > above).lookup("rates", rates, on="k")
    rows.key_by("by k", "k").process("count", count_up).sink("out", NoopSink())


@pytest.fixture
def running(tmp_path: Path) -> Configuration:
    return first_configuration(script(), BlobStore(str(tmp_path / "blobs")), 2)


def planned(running: Configuration, graph: Graph, tmp_path: Path) -> str:
    edits = deployment_of(running, graph).edits
    return str(Explanation(prepare(running, edits, BlobStore(str(tmp_path / "more")), revision=Revision(2))))


def test_the_same_script_changes_nothing(running):
    found = deployment_of(running, script())
    assert found.edits == ()
    assert found.untouched == ("in", "m", "f", "rates", "by k", "count", "out")


def test_a_table_with_the_same_rows_in_other_memory_is_the_same(running):
    apart = pa.table({"k": ["b", "a"], "rate": [2.0, 1.0]}).slice(1)
    assert deployment_of(running, script(lambda stream: chain(stream, rates=apart))).untouched.count("rates") == 1


def test_a_function_that_moved_to_another_line_is_the_same():
    one: dict[str, Any] = {}
    other: dict[str, Any] = {}
    exec("def f(row):\n    return row['n'] > 1", one)
    exec("\n\n\ndef f(row):\n    return row['n'] > 1", other)
    assert likeness(one["f"], "f") == likeness(other["f"], "f")
    assert likeness(lambda row: row["n"] in {1, 2}, "f") != likeness(lambda row: row["n"] in {1, 3}, "f")


def test_other_values_in_a_function_make_an_update(running):
    found = deployment_of(running, script(lambda stream: chain(stream, above=2)))
    assert [type(edit) for edit in found.edits] == [Update]
    assert [edit.operator for edit in updates_in(found.edits)] == ["f"]
    assert "f" not in found.untouched


def test_another_table_makes_an_update(running, tmp_path):
    wider = pa.table({"k": ["a"], "rate": [2.0]})
    found = deployment_of(running, script(lambda stream: chain(stream, rates=wider)))
    assert [edit.operator for edit in updates_in(found.edits)] == ["rates"]


def test_operators_that_come_go_and_move_are_one_change(running, tmp_path):
    def other(stream: Any) -> None:
        rows = stream.filter("f", lambda row: row["n"] > 1).map("m", same).lookup("rates", RATES, on="k")
        rows.key_by("by n", "n").aggregate("sums", c=agg.count()).sink("totals", NoopSink())

    found = deployment_of(running, script(other))
    assert [type(edit) for edit in found.edits] == [Redraw, Update]  # "f" is written in another way
    told = planned(running, script(other), tmp_path)
    assert "adds aggregate 'sums' behind by n; starts without state" in told
    assert "removes process 'count'; its state is kept under its name" in told
    assert "'f' reads in instead of m" in told
    assert "takes effect from the next epoch" in told


def test_a_filter_between_two_operators_takes_effect_within_the_epoch(running, tmp_path):
    def more(stream: Any) -> None:
        rows = stream.map("m", same).filter("new", lambda row: True).filter("f", lambda row: row["n"] > 1)
        rows.lookup("rates", RATES, on="k").key_by("by k", "k").process("count", count_up).sink("out", NoopSink())

    told = planned(running, script(more), tmp_path)
    assert "takes effect in the running epoch" in told
    assert "waits" not in told
    assert "begins at m" in told


def test_an_operator_of_another_kind_replaces_the_one_of_its_name(running, tmp_path):
    def other(stream: Any) -> None:
        rows = stream.flat_map("m", lambda row: [row]).filter("f", lambda row: row["n"] > 1)
        rows.lookup("rates", RATES, on="k").key_by("by k", "k").process("count", count_up).sink("out", NoopSink())

    told = planned(running, script(other), tmp_path)
    assert "replaces flat_map 'm'" in told


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        (script(name="other"), "the script is of flow 'other', and the job runs flow 'shop'"),
    ],
)
def test_scripts_that_cannot_be_deployed_are_refused(running, graph, told):
    with pytest.raises(FlowError) as refusal:
        deployment_of(running, graph)
    assert told in str(refusal.value)


def test_sources_that_come_go_or_look_different_are_edits(running, tmp_path):
    def two(stream: Any) -> None:
        rows = stream.union("u", stream._flow.source("more", ROWS)).map("m", same).filter("f", lambda row: row["n"] > 1)
        rows.lookup("rates", RATES, on="k").key_by("by k", "k").process("count", count_up).sink("out", NoopSink())

    told = planned(running, script(two), tmp_path)
    assert "adds source 'more'" in told
    assert "hands the sources over" in told
    wider = script(source=ListSource([[{"k": "a", "n": 1, "x": 1}]], "k string, n bigint, x int"))
    assert "replaces source 'in'" in planned(running, wider, tmp_path)


def test_a_migration_of_something_that_does_not_change_is_refused(running):
    with pytest.raises(FlowError, match="migrate= names count, which the script does not change"):
        deployment_of(running, script(), {"count": lambda key, state: None})


def test_a_script_travels_by_value():
    described, payloads = DeployRequest.packed(script())
    graph = DeployRequest(described, payloads, python_version()).unpacked()
    assert graph == script()
    assert graph.payloads["f"]({"n": 2}) is True
    assert graph.payloads["rates"].equals(RATES)
    assert graph.payloads["in"] == ROWS


@pytest.mark.parametrize("edit", [Remove("m"), Rewire("m", to=("in",)), Rewire("j", to=("in",), input=1)])
def test_edits_of_the_plan_travel(edit):
    assert message_of(edit).edit() == edit


def test_an_insert_travels_with_its_function():
    sent = message_of(Insert(lambda rows: rows.filter("even", lambda row: True), between=("in", "m"))).edit()
    assert isinstance(sent, Insert)
    assert (sent.after, sent.before) == (("in",), ("m",))
    assert sent.build is not None
    assert sent.build.__name__ == "<lambda>"


def test_an_insert_of_a_source_travels_with_both_functions():
    inserted = Insert(lambda rows: rows.map("x", same), source=lambda flow: flow.source("more", ROWS), before="all")
    sent = message_of(inserted).edit()
    assert isinstance(sent, Insert)
    assert (sent.after, sent.before) == (None, ("all",))
    assert sent.source is not None
    assert sent.source(Flow("shop")).schema == ROWS.schema


def test_the_plan_of_a_restart_says_what_the_script_changes(tmp_path):
    at = str(tmp_path / "checkpoint")
    flow = Flow("shop")
    flow.source("in", ROWS).map("m", same).sink("out", MemorySink())
    run_local(flow, checkpoint=at)
    assert restart_plan(at, flow.graph) == "the job would run what it ran when it stopped: nothing changes"
    other = script(lambda stream: stream.map("m", same).filter("f", lambda row: True).sink("out", MemorySink()))
    assert "adds filter 'f' behind m" in restart_plan(at, other)
    with pytest.raises(FlowError, match="the script is of flow 'bank'"):
        restart_plan(at, script(name="bank"))
    elsewhere = Flow("shop")
    elsewhere.source("input", ROWS).map("m", same).sink("out", MemorySink())
    with pytest.raises(CheckpointError, match="reads the sources in; the flow now has input"):
        restart_plan(at, elsewhere.graph)


def with_totals(stream: Any) -> None:
    chain(stream)
    stream.key_by("by n", "n").aggregate("totals", c=agg.count()).sink("t", NoopSink())


def test_operators_that_a_script_adds_can_get_state_and_those_that_it_removes_can_be_flushed(
    running: Configuration,
) -> None:
    past = pa.table({"n": [1, 1]})
    edits = deployment_of(running, script(with_totals), state={"totals": past}).edits
    [redraw] = [edit for edit in edits if isinstance(edit, Redraw)]
    assert {str(step): step.state for step in redraw.steps if isinstance(step, Add)}["+totals"] is past


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"state": {"count": RATES}}, "state= names count; the operators with state that the script adds are totals"),
        ({"state": {"tot": RATES}}, "state= names tot; the operators with state that the script adds are totals"),
        ({"flush": ["count"]}, "flush= names count, which the script does not remove; it removes no operator"),
    ],
)
def test_options_of_a_deployment_that_name_other_operators_are_refused(
    running: Configuration, options: Any, says: str
) -> None:
    with pytest.raises(FlowError) as refused:
        deployment_of(running, script(with_totals), **options)
    assert says in str(refused.value)
