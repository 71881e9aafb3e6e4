"""The graph of a flow after a change: refused changes, and derived columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, NoopSink, Update, agg, tumbling
from midstream.data.schema import to_ddl
from midstream.errors import FlowError, FunctionError, SchemaError
from midstream.flow.edits import Edit, check_edits, revise
from midstream.flow.model import Graph
from midstream.operators.process import Process
from midstream.operators.stream import Stream

DDL = "k string, n int, at timestamp"
WIDER = f"{DDL}, more int"
TABLE = pa.table({"k": ["a"], "city": ["Rome"]})
PARIS = pa.table({"k": ["a"], "city": ["Paris"], "people": pa.array([2], pa.int32())})


def same(row: Any) -> Any:
    return row


def flow_of(build: Any) -> Graph:
    """A source, the map ``m``, and the operators that ``build`` adds after it."""
    flow = Flow("f")
    rows = flow.source("in", ListSource([[]], DDL), event_time="at")
    build(rows.map("m", same))
    return flow.graph


def to_sink(stream: Stream) -> None:
    stream.sink("out", NoopSink())


def plain() -> Graph:
    return flow_of(to_sink)


def refused(graph: Graph, *updates: Any) -> str:
    with pytest.raises(FlowError) as caught:
        revise(graph, updates)
    return str(caught.value)


def columns(graph: Graph, name: str) -> str:
    return to_ddl(graph[name].schema)


def wider(graph: Graph, *others: Update) -> Graph:
    return revise(graph, [Update("m", same, returns=WIDER), *others])


def narrower(graph: Graph, returns: str = "k string, at timestamp") -> str:
    return refused(graph, Update("m", same, returns=returns))


# ── which operators ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_has_at_least_one_edit():
    with pytest.raises(FlowError) as refusal:
        check_edits([])
    assert str(refusal.value) == "a change needs at least one edit, e.g. job.update(Update('FM', new_function))"


@pytest.mark.parametrize(("edit", "shown"), [("m", "str 'm'"), (Edit(), "Edit Edit()")])
def test_edits_of_an_unknown_kind_are_refused(edit, shown):
    with pytest.raises(FlowError) as refusal:
        check_edits([Update("m", same), edit])
    assert str(refusal.value) == (
        f"a change is made of edits, found {shown}; allowed: Update, Insert, Remove, Rewire, Move, Rescale and Tune, "
        f"e.g. Update('FM', function)"
    )


def test_an_operator_is_updated_only_once_per_change():
    assert "'m' is updated twice in one change" in refused(plain(), Update("m", same), Update("m", same))


def test_an_unknown_operator_is_refused_with_a_suggestion_and_all_names():
    graph = flow_of(lambda rows: to_sink(rows.map("score", same)))
    found = refused(graph, Update("scores", same))
    assert found == "flow 'f' has no operator 'scores'; did you mean 'score'? Operators that can be updated: m, score"


@pytest.mark.parametrize("name", ["in", "key", "total", "out"])
def test_an_operator_without_a_function_cannot_be_updated(name: str):
    graph = flow_of(lambda rows: to_sink(rows.key_by("key", "k").aggregate("total", n=agg.count())))
    assert "has no function to replace" in refused(graph, Update(name, same))


# ── what is put in ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_new_function_takes_the_same_arguments_as_the_old_one():
    with pytest.raises(FunctionError, match="is called with one argument, a dict"):
        revise(plain(), [Update("m", lambda key, row: row)])


def test_an_update_without_a_function_is_refused():
    assert "expected a function that takes a dict (one row), found int 7" in refused(plain(), Update("m", 7))


def process() -> Graph:
    return flow_of(lambda rows: to_sink(rows.key_by("key", "k").process("p", lambda key, row, state: row)))


def test_the_function_of_a_process_takes_three_arguments():
    assert "is called with 3 arguments: a key, a dict (one row) and its state" in refused(process(), Update("p", same))


class Timed:
    def __call__(self, key: Any, row: Any, state: Any) -> Any:
        return row

    def on_timer(self, key: Any, time: Any, state: Any) -> None:
        return None


class Mistimed(Timed):
    def on_timer(self, key: Any) -> None:  # type: ignore[override]
        return None


def test_an_update_may_add_timers_to_a_process():
    spec = revise(process(), [Update("p", Timed())])["p"].spec
    assert isinstance(spec, Process)
    assert spec.has_timers


def test_a_timer_that_cannot_be_called_is_refused():
    assert "is called with 3 arguments: a key, a time and its state" in refused(process(), Update("p", Mistimed()))


def test_migrate_is_for_the_state_of_a_process():
    found = refused(plain(), Update("m", same, migrate=lambda key, state: None))
    assert found == "update of map 'm': migrate= is for the state of a process; a map has no user-defined state"


def test_migrate_takes_a_key_and_its_state():
    one_argument: Any = len
    update = Update("p", lambda key, row, state: row, migrate=one_argument)
    assert "is called with 2 arguments: a key and its state" in refused(process(), update)


def test_a_filter_has_the_columns_of_its_input():
    graph = flow_of(lambda rows: to_sink(rows.filter("few", same)))
    assert "the columns of a filter follow from its input; leave out returns=" in refused(
        graph, Update("few", same, returns=DDL)
    )


def test_local_is_for_transforms():
    assert "local= is for transforms" in refused(plain(), Update("m", same, local=same))


def test_a_transform_takes_a_function_for_each_runtime():
    graph = flow_of(lambda rows: to_sink(rows.transform("sql", same, local=same)))
    revised = revise(graph, [Update("sql", same, local=len)])
    assert revised.payloads["sql"] == (same, len)
    two_arguments: Any = isinstance
    assert "is called with one argument, a pyarrow.Table" in refused(graph, Update("sql", same, local=two_arguments))


def lookup(how: str = "inner") -> Graph:
    return flow_of(lambda rows: to_sink(rows.lookup("cities", TABLE, on="k", how=how)))


def test_a_lookup_gets_another_table_and_its_columns():
    revised = revise(lookup(), [Update("cities", PARIS)])
    assert columns(revised, "cities") == f"{DDL}, city string, people int"
    assert revised.payloads["cities"].num_rows == 1


def test_a_lookups_new_table_has_the_same_key_columns():
    for table in (TABLE.rename_columns(["key", "city"]), pa.table({"k": [1], "city": ["Rome"]})):
        assert "the new table must have the column 'k' of type string" in refused(lookup(), Update("cities", table))


def test_a_lookups_new_table_must_be_a_table():
    assert "expected a pyarrow.Table" in refused(lookup(), Update("cities", same))


def test_functions_are_described_by_their_arguments():
    graph = process()
    assert graph["m"].spec.function_takes == ("a dict (one row)",)
    assert graph["p"].spec.function_takes == ("a key", "a dict (one row)", "its state")
    batches = flow_of(lambda rows: to_sink(rows.map_batches("b", same)))
    assert batches["b"].spec.function_takes == ("a pyarrow.RecordBatch",)


# ── what comes of it ──────────────────────────────────────────────────────────────────────────────────────────────


def test_names_edges_and_other_functions_stay_the_same():
    graph = flow_of(lambda rows: to_sink(rows.map("other", same)))
    revised = revise(graph, [Update("m", len, returns=DDL)])
    assert revised.edges == graph.edges
    assert (revised.payloads["m"], revised.payloads["other"]) == (len, same)
    assert graph.payloads["m"] is same, "the graph before is as it was"


def test_columns_stay_the_same_by_default():
    assert columns(revise(plain(), [Update("m", len)]), "m") == DDL


def test_added_columns_pass_through_operators_that_derive_their_columns():
    def build(rows: Stream) -> None:
        split = rows.filter("few", same).route("split", same, branches=("a", "b"))
        to_sink(split["a"].union("all", split["b"]).key_by("key", "k").distinct("first"))

    revised = wider(flow_of(build))
    assert {columns(revised, name) for name in ("m", "few", "split", "all", "key", "first", "out")} == {WIDER}


def test_an_operator_with_declared_columns_accepts_more_and_emits_the_same():
    revised = wider(flow_of(lambda rows: to_sink(rows.map("other", same))))
    assert columns(revised, "other") == DDL


def test_a_lookup_adds_its_columns_to_those_of_its_input():
    assert columns(wider(lookup("left")), "cities") == f"{WIDER}, city string"


def test_an_aggregate_keeps_its_columns():
    graph = flow_of(lambda rows: to_sink(rows.key_by("key", "k").aggregate("total", n=agg.sum("n"))))
    assert columns(wider(graph), "total") == columns(graph, "total")


def test_a_change_of_columns_must_update_their_consumer():
    graph = flow_of(lambda rows: to_sink(rows.map("other", same)))
    other = "k string, at timestamp"
    assert "Add an Update('other', …) to the change that can take them; it needs 'n' of type int" in narrower(graph)
    revised = revise(graph, [Update("m", same, returns=other), Update("other", same)])
    assert columns(revised, "other") == DDL


def test_a_column_of_another_type_counts_as_missing():
    graph = flow_of(lambda rows: to_sink(rows.filter("few", same)))
    assert "it needs 'n' of type int" in narrower(graph, "k string, n string, at timestamp")


# ── columns that operators cannot do without ──────────────────────────────────────────────────────────────────────


def test_key_columns_must_stay_the_same():
    for build in (
        lambda rows: to_sink(rows.key_by("key", "n")),
        lambda rows: to_sink(rows.key_by("key", "n").distinct("first")),
        lambda rows: to_sink(rows.key_by("key", "n").aggregate("total", rows=agg.count())),
    ):
        assert "and it needs 'n' of type int" in narrower(flow_of(build))


def test_a_process_needs_its_columns_unless_it_is_updated():
    graph = process()
    assert "Add an Update('p', …)" in narrower(graph)
    updates = [Update("m", same, returns="k string, at timestamp"), Update("p", lambda key, row, state: row)]
    assert columns(revise(graph, updates), "p") == DDL


@pytest.mark.parametrize("what", ["window", "distinct"])
def test_an_event_time_must_stay_the_same(what: str):
    def build(rows: Stream) -> None:
        keyed = rows.key_by("key", "k")
        if what == "window":
            to_sink(keyed.aggregate("w", window=tumbling("1 minute"), n=agg.count()))
        else:
            to_sink(keyed.distinct("first", within="1 minute"))

    assert "it needs 'at' of type timestamp" in narrower(flow_of(build), "k string, n int")


def test_an_aggregated_column_keeps_its_type():
    graph = flow_of(lambda rows: to_sink(rows.key_by("key", "k").aggregate("total", most=agg.max("n"))))
    found = narrower(graph, "k string, n double, at timestamp")
    assert "would have to keep 'most' as double instead of int; its stored totals cannot be converted" in found


def test_columns_of_a_join_cannot_change():
    def build(rows: Stream) -> None:
        right = rows.map("right", lambda row: row, returns="k2 string, m int, at2 timestamp").key_by("by_k2", "k2")
        to_sink(rows.key_by("by_k", "k").join("both", right, within="1 second", right_time="at2"))

    with pytest.raises(SchemaError, match="A join stores whole rows, so its columns cannot change"):
        wider(flow_of(build))


def test_all_inputs_of_a_union_change_together():
    def build(rows: Stream) -> None:
        to_sink(rows.map("one", same).union("all", rows.map("two", same)))

    graph = flow_of(build)
    assert "after the change union 'all' would unite" in refused(graph, Update("one", same, returns=WIDER))
    both = [Update("one", same, returns=WIDER), Update("two", same, returns=WIDER)]
    assert columns(revise(graph, both), "all") == WIDER
