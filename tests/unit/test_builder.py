"""The fluent API: the graphs it builds, and the mistakes it refuses at the user's own line."""

from __future__ import annotations

import gzip
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as papq
import pytest

from midstream import ConsoleSink, FileSink, Flow, GeneratorSource, ListSource, MemorySink, NoopSink, Stream
from midstream.checkpoint.layouts import StateLayout
from midstream.data.schema import parse_ddl, to_ddl, type_name
from midstream.errors import FlowError, FunctionError, SchemaError, SourceError
from midstream.flow.model import KeyBy, Port, Sink, Source
from midstream.flow.spec import Contract, Form, How
from midstream.operators.filter import Filter
from midstream.operators.flat_map import FlatMap
from midstream.operators.join import Join
from midstream.operators.lookup import Lookup
from midstream.operators.map import Map
from midstream.operators.process import Process
from midstream.operators.route import Route
from midstream.testing import run_local

DDL = "user string, n bigint, p double"
TABLE = pa.table({"user": ["ann"], "country": ["no"]})


@pytest.fixture
def flow() -> Flow:
    return Flow("f")


@pytest.fixture
def rows(flow: Flow) -> Stream:
    return flow.source("in", ListSource([[]], DDL))


def same(value: Any) -> Any:
    return value


# ── what it builds ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_flow_becomes_a_graph_of_named_operators(flow, rows):
    scored = rows.map("score", same, returns="user string, score double")
    split = scored.filter_batches("good", same).key_by("k", "user").route("r", same, branches=("a", "b"))
    split["a"].lookup("where", TABLE, on="user", how="left").flat_map("words", same).sink("out", MemorySink())
    split["b"].sink("rest", NoopSink())
    graph = flow.graph
    assert [(op.name, op.kind) for op in graph] == [
        ("in", "source"),
        ("score", "map"),
        ("good", "filter"),
        ("k", "key_by"),
        ("r", "route"),
        ("where", "lookup"),
        ("words", "flat_map"),
        ("out", "sink"),
        ("rest", "sink"),
    ]
    assert graph["score"].spec == Map(Form.ROWS)
    assert graph["good"].spec == Filter(Form.BATCHES)
    assert graph["k"].spec == KeyBy(("user",))
    assert graph["r"].spec == Route(Form.ROWS, ("a", "b"))
    assert graph["words"].spec == FlatMap(Form.ROWS)
    assert graph["where"].inputs == (Port("r", "a"),)
    assert isinstance(graph["where"].spec, Lookup)
    assert (graph["where"].spec.on, graph["where"].spec.how) == ((("user", "user"),), How.LEFT)
    assert to_ddl(graph["where"].schema) == "user string, score double, country string"
    assert graph.consumers(Port("r", "b")) == ("rest",)


def test_each_operator_knows_its_contract(flow, rows):
    rows.lookup("one", TABLE, on="user").lookup("many", TABLE.rename_columns(["user", "c2"]), on="user", unique=False)
    rows.flat_map("words", same)
    rows.map("m", same)
    contracts = {op.name: op.contract for op in flow._operators.values()}
    assert contracts == {
        "in": Contract.ONE_TO_ONE,
        "one": Contract.ONE_TO_ONE,
        "many": Contract.ONE_TO_MANY,
        "words": Contract.ONE_TO_MANY,
        "m": Contract.ONE_TO_ONE,
    }


def test_uniqueness_is_a_promise_about_source_rows_and_not_a_contract(flow):
    rows = flow.source("in", ListSource([[]], "user string, at timestamp", event_time="at"))
    keyed, other = rows.key_by("k", "user"), rows.map("m", same, returns="user string, seen timestamp")
    keyed.join("unique join", other.key_by("k2", "user"), within="0 seconds", right_time="seen", unique=True)
    keyed.join("join", other.key_by("k3", "user"), within="0 seconds", right_time="seen")
    keyed.process("unique process", lambda key, row, state: None, unique=True)
    keyed.process_batches("unique batches", lambda keys, batch, state: batch, unique=True)
    keyed.process("process", lambda key, row, state: None)
    keyed.process("one", lambda key, row, state: None, one_to_one=True)
    stateful = {op.name: op for op in flow._operators.values() if isinstance(op.spec, Join | Process)}
    promised = [name for name, op in stateful.items() if op.spec.unique]
    assert promised == ["unique join", "unique process", "unique batches"]
    assert [name for name, op in stateful.items() if op.contract is Contract.ONE_TO_ONE] == ["one"]


def test_a_promise_does_not_decide_whether_stored_state_fits(flow):
    rows = flow.source("in", ListSource([[]], "user string, at timestamp", event_time="at"))
    keyed, other = rows.key_by("k", "user"), rows.map("m", same, returns="user string, seen timestamp")
    pair = partial(keyed.join, other=other.key_by("k2", "user"), right_time="seen")
    pair("plain", within="0 seconds")
    pair("unique", within="0 seconds", unique=True)
    pair("wider", within="1 second", unique=True)
    keyed.process("p", lambda key, row, state: None)
    keyed.process("pu", lambda key, row, state: None, unique=True)
    described = {name: layout_of(flow, name).describe() for name in ("plain", "unique", "wider", "p", "pu")}
    assert described["plain"] == described["unique"] != described["wider"]
    assert described["p"] == described["pu"]


def layout_of(flow: Flow, name: str) -> StateLayout:
    operators = flow._operators
    return StateLayout(operators[name], tuple(operators[port.operator].schema for port in operators[name].inputs))


def test_building_runs_nothing_and_a_graph_does_not_change_afterwards(flow, rows):
    def explode(row):
        raise AssertionError("called while building")

    rows.map("m", explode).sink("out", MemorySink())
    graph = flow.graph
    rows.sink("other", NoopSink())
    assert [op.name for op in graph] == ["in", "m", "out"]
    assert "other" in flow.graph
    assert "other" not in graph


def test_the_schema_defaults_to_that_of_the_input(rows):
    assert to_ddl(rows.filter("f", same).schema) == DDL
    assert to_ddl(rows.map("m", same, returns="x int").schema) == "x int"
    assert to_ddl(rows.transform("t", same, returns="y int").schema) == "y int"


def test_added_columns_follow_those_of_the_input(rows):
    assert to_ddl(rows.map("m", same, adds="score double, `a b` int").schema) == f"{DDL}, score double, `a b` int"
    assert to_ddl(rows.map_batches("mb", same, adds="x int").schema) == f"{DDL}, x int"
    assert to_ddl(rows.flat_map("f", same, adds="x int").schema) == f"{DDL}, x int"
    assert to_ddl(rows.flat_map_batches("fb", same, adds="x int NOT NULL").schema) == f"{DDL}, x int NOT NULL"
    with pytest.raises(
        FlowError, match=r"operator 'x': give returns= \(all columns\) or adds= \(the new ones\), not both"
    ):
        rows.map("x", same, returns="x int", adds="y int")
    with pytest.raises(SchemaError, match="column 'User' is declared twice"):
        rows.map("x", same, adds="User string")
    with pytest.raises(SchemaError, match="unknown type 'strng'"):
        rows.map("x", same, adds="y strng")


def test_a_source_knows_its_event_time(flow):
    ddl = "at timestamp, user string"
    flow.source("told", ListSource([[]], ddl), event_time="at").sink("a", NoopSink())
    flow.source("known", ListSource([[]], ddl, event_time="at")).sink("b", NoopSink())
    flow.source("made", GeneratorSource(lambda i, rng: {"n": i}, "n bigint", 10)).sink("c", NoopSink())
    assert [op.spec.event_time for op in flow.graph.of(Source)] == ["at", "at", "event_time"]


def test_a_table_may_be_arrow_or_pandas(rows):
    as_batch = TABLE.to_batches()[0]
    as_pandas = pd.DataFrame({"user": ["ann"], "country": ["no"]})
    for number, table in enumerate((TABLE, as_batch, as_pandas)):
        assert to_ddl(rows.lookup(f"l{number}", table, on="user").schema) == f"{DDL}, country string"


def test_on_may_be_a_name_names_or_a_mapping(flow, rows):
    table = pa.table({"who": ["ann"], "n": pa.array([1], pa.int32()), "x": [1.5]})
    both = rows.lookup("l", table, on={"user": "who", "n": "n"})  # integers of different widths are comparable
    assert to_ddl(both.schema) == f"{DDL}, x double"
    assert flow._operators["l"].spec.on == (("user", "who"), ("n", "n"))
    same_names = pa.table({"user": ["ann"], "n": [1], "x": [1.5]})
    assert to_ddl(rows.lookup("l2", same_names, on=["user", "n"]).schema) == f"{DDL}, x double"


def test_streams_and_flows_have_readable_reprs(flow, rows):
    assert repr(flow) == "Flow('f', operators=['in'])"
    assert repr(rows) == f"Stream('in', {DDL!r})"
    branches = rows.route("r", same, branches=["a", "b"])
    assert list(branches) == ["a", "b"]
    assert len(branches) == 2
    assert repr(branches["b"]) == f"Stream('r[b]', {DDL!r})"


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_name_can_be_used_only_once(rows):
    rows.map("score", same)
    with pytest.raises(FlowError, match=r"flow 'f': there is an operator 'score' already \(a map\).*must be unique"):
        rows.filter("score", same)


@pytest.mark.parametrize("name", ["", " ", "1st", "a/b", "a\nb", "ä" * 101, "-x", "a,b", "x=1"])
def test_odd_names_are_refused(rows, name):
    with pytest.raises(FlowError, match=r"cannot be a name. A name starts with a letter") as caught:
        rows.map(name, same)
    assert repr(name)[:40] in str(caught.value)
    with pytest.raises(FlowError, match=r"flow: .* cannot be a name"):
        Flow(name)


@pytest.mark.parametrize("name", ["FM", "größe", "by user", "v1.2-b_c", "名前"])
def test_ordinary_names_of_any_language_are_accepted(rows, name):
    rows.map(name, same).sink("out", NoopSink())
    assert name in rows._flow.graph


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.map(same, "m"),
        lambda s: s.map_batches(same, "m"),
        lambda s: s.filter(same, "m"),
        lambda s: s.flat_map(same, "m"),
        lambda s: s.route(same, "m", branches=("a",)),
        lambda s: s.transform(same, "m"),
        lambda s: s.sink(NoopSink(), "out"),
        lambda s: s.union(s),
        lambda s: s.lookup(TABLE, "where", on="user"),
        lambda s: s.key_by(None, "user"),
        lambda s: s._flow.source(ListSource([[]], DDL), "in2"),
    ],
)
def test_a_missing_or_misplaced_name_is_reported(rows, call):
    with pytest.raises(FlowError, match=r"^\w+: the name comes first and must be a string, found \w+"):
        call(rows)


def test_a_key_by_without_a_name_shows_how_to_write_it(rows):
    with pytest.raises(
        FlowError, match=re.escape("key_by 'user': name at least one column, e.g. key_by('user', 'user')")
    ):
        rows.key_by("user")


# ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Model:
    def __call__(self, row):
        return row


@pytest.mark.parametrize("function", [same, lambda row: row, Model(), Model().__call__, len, dict.copy, str.upper])
def test_any_callable_with_one_argument_is_accepted(rows, function):
    assert rows.map("m", function).schema == rows.schema


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (None, "operator 'm': expected a function that takes a dict (one row), found NoneType None"),
        ("x", "operator 'm': expected a function that takes a dict (one row), found str 'x'"),
        (Model, "operator 'm': found the class Model; give an instance of it, Model(…)"),
        (lambda: 1, "a lambda() is called with one argument, a dict (one row), but too many positional arguments"),
        (lambda row, n: 1, "a lambda(row, n) is called with one argument, a dict (one row), but missing a required"),
        (lambda *, row: 1, "is called with one argument, a dict (one row), but"),
    ],
)
def test_a_function_that_cannot_take_one_row_is_refused(rows, function, says):
    with pytest.raises(FunctionError) as caught:
        rows.map("m", function)
    assert says in str(caught.value)


def test_the_error_for_a_batch_function_mentions_the_batch(rows):
    with pytest.raises(FunctionError, match=r"'m': expected a function that takes a pyarrow.RecordBatch"):
        rows.map_batches("m", 3)
    with pytest.raises(FunctionError, match=r"'t': expected a function that takes a pyarrow.Table"):
        rows.transform("t", same, local=3)


def test_an_invalid_schema_is_refused_with_the_position(rows):
    with pytest.raises(SchemaError, match="unknown type 'strng'; did you mean 'string'"):
        rows.map("m", same, returns="user strng")


# ── columns ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_unknown_columns_are_refused_with_a_suggestion(flow, rows):
    with pytest.raises(
        SchemaError, match=r"key_by 'k': there is no column 'usr'; did you mean 'user'\? Available: user, n"
    ):
        rows.key_by("k", "usr")
    with pytest.raises(SchemaError, match="lookup 'l', stream: there is no column 'country'"):
        rows.lookup("l", TABLE, on="country")
    with pytest.raises(SchemaError, match="lookup 'l', table: there is no column 'n'"):
        rows.lookup("l", TABLE, on="n")
    with pytest.raises(SchemaError, match=r"source 'b': event_time: there is no column 'At'; did you mean 'at'"):
        flow.source("b", ListSource([[]], "at timestamp"), event_time="At")


def test_keys_must_compare_exactly(rows):
    with pytest.raises(SchemaError, match="key_by 'k': column 'p' is double, which cannot be a key"):
        rows.key_by("k", "p")
    with pytest.raises(SchemaError, match="column 'user' is given twice"):
        rows.key_by("k", "user", "user")
    with pytest.raises(SchemaError, match="lookup 'l': the stream's 'n' is bigint but the table's 'user' is string"):
        rows.lookup("l", TABLE, on={"n": "user"})


def test_event_time_must_be_a_timestamp(flow):
    with pytest.raises(SchemaError, match="source 's': event_time 'user' must be a timestamp, found string"):
        flow.source("s", ListSource([[]], DDL), event_time="user")


def test_a_lookup_table_must_not_repeat_columns(rows):
    table = pa.table({"user": ["ann"], "N": [1]})  # Spark does not distinguish N from n
    with pytest.raises(SchemaError, match="lookup 'l': both sides have N; rename or drop them on one side"):
        rows.lookup("l", table, on="user")


# ── unions, routes, lookups, transforms ───────────────────────────────────────────────────────────────────────────


def test_a_union_takes_streams_of_one_flow_and_one_schema(rows):
    other = Flow("g").source("theirs", ListSource([[]], DDL))
    with pytest.raises(FlowError, match=r"union 'u': 'theirs' belongs to another flow \('g'\)"):
        rows.union("u", other)
    short = rows.map("short", same, returns="user string, n int")
    with pytest.raises(
        SchemaError, match=r"'in' has \(user string, n bigint, p double\) but 'short' has \(user string, n int\)"
    ):
        rows.union("u", short)
    with pytest.raises(FlowError, match="union 'u': name at least one other stream"):
        rows.union("u")
    with pytest.raises(FlowError, match="union 'u': a stream is named twice"):
        rows.union("u", rows)
    with pytest.raises(FlowError, match="union 'u': expected streams, found str 'in'"):
        rows.union("u", "in")


def test_columns_in_another_order_are_another_schema(rows):
    turned = rows.map("turned", same, returns="n bigint, user string, p double")
    with pytest.raises(SchemaError, match="bring them to the same columns, types and order"):
        rows.union("u", turned)


@pytest.mark.parametrize("branches", ["low", [], ()])
def test_branches_must_be_named(rows, branches):
    with pytest.raises(FlowError, match="route 'r': branches must be a sequence of names"):
        rows.route("r", same, branches=branches)


def test_branches_have_proper_names_that_differ(rows):
    with pytest.raises(FlowError, match=r"route 'r': the branches \['a', 'a'\] must be different"):
        rows.route("r", same, branches=["a", "a"])
    with pytest.raises(FlowError, match="route 'r', branch: '' cannot be a name"):
        rows.route("r", same, branches=["a", ""])


def test_an_unknown_branch_is_refused_with_the_known_ones(rows):
    routed = rows.route("r", same, branches=("low", "high"))
    with pytest.raises(FlowError, match="route 'r' has no branch 'hi'; it has low, high"):
        routed["hi"]


@pytest.mark.parametrize("table", [None, {"user": ["ann"]}, [1], "countries"])
def test_a_lookup_needs_a_table(rows, table):
    with pytest.raises(
        FlowError, match=r"lookup 'l': expected a pyarrow.Table, a pandas DataFrame or a batch DataFrame, found"
    ):
        rows.lookup("l", table, on="user")


def test_a_lookup_refuses_unknown_options(rows):
    with pytest.raises(FlowError, match="lookup 'l': how='outer' is not known; allowed: inner, left"):
        rows.lookup("l", TABLE, on="user", how="outer")
    with pytest.raises(FlowError, match="lookup 'l': on= names no column"):
        rows.lookup("l", TABLE, on=[])


def test_a_table_with_two_rows_for_a_key_is_refused_when_one_was_promised(flow, rows):
    twice = pa.table({"user": ["bob", "ann", None, "ann", None], "x": [1, 2, 3, 4, 5]})
    rows.lookup("l", twice, on="user").sink("out", NoopSink())
    with pytest.raises(
        FlowError, match=r"lookup 'l': the table has more than one row for \{'user': 'ann'\}, but unique=True"
    ):
        run_local(flow)


def test_a_transform_without_local_is_refused_by_the_local_runtime_before_it_starts(flow, rows):
    called = []
    rows.transform("sql", same).sink("out", MemorySink())
    rows.sink("other", lambda table, epoch: called.append(epoch))
    with pytest.raises(FlowError, match=r"transform 'sql' needs Spark. To run it on the local runtime, pass local="):
        run_local(flow)
    assert not called


# ── sources and sinks ─────────────────────────────────────────────────────────────────────────────────────────────


def fake_dataframe(ddl: str, *, streaming: bool) -> Any:
    """The attributes of a DataFrame that the builder uses without importing pyspark."""
    fields = [
        SimpleNamespace(name=column.name, dataType=SimpleNamespace(simpleString=partial(type_name, column.type)))
        for column in parse_ddl(ddl)
    ]
    return SimpleNamespace(isStreaming=streaming, sparkSession=None, schema=SimpleNamespace(fields=fields))


def test_a_dataframe_is_recognised_by_its_attributes(flow):
    stream = flow.source("s", fake_dataframe("`a b` bigint, t array<string>", streaming=True))
    assert to_ddl(stream.schema) == "`a b` bigint, t array<string>"


@pytest.mark.parametrize("stream", [None, [{"n": 1}], pd.DataFrame({"n": [1]}), TABLE, "topic"])
def test_only_streams_are_sources(flow, stream):
    with pytest.raises(
        SourceError, match=r"source 's': expected a streaming DataFrame .* found " + type(stream).__name__
    ):
        flow.source("s", stream)


def test_a_batch_is_not_a_stream_and_a_stream_is_not_a_table(flow, rows):
    with pytest.raises(SourceError, match=r"source 's': this DataFrame is a batch.*readStream.*lookup"):
        flow.source("s", fake_dataframe("n bigint", streaming=False))
    with pytest.raises(FlowError, match="lookup 'l': the table is a stream"):
        rows.lookup("l", fake_dataframe("user string", streaming=True), on="user")


def test_the_local_runtime_refuses_dataframes(flow):
    flow.source("s", fake_dataframe("n bigint", streaming=True)).sink("out", NoopSink())
    with pytest.raises(SourceError, match=r"source 's' is a DataFrame, which needs Spark.*ListSource"):
        run_local(flow)


def test_a_file_sink_refuses_rows_with_an_epoch_column(flow):
    epochs = flow.source("s", ListSource([[]], "epoch bigint"))
    with pytest.raises(SchemaError, match=r"sink 'out': a FileSink adds the column 'epoch'.*rename it"):
        epochs.sink("out", FileSink("somewhere"))
    epochs.sink("mem", MemorySink())  # a MemorySink adds no column
    assert flow.graph.of(Sink)[0].name == "mem"


def test_a_file_sink_knows_its_formats():
    with pytest.raises(FlowError, match="FileSink: format 'orc' is not known; allowed: parquet, json, csv"):
        FileSink("out", "orc")
    with pytest.raises(FlowError, match="FileSink: the path is empty"):
        FileSink("")


def test_a_file_sink_refuses_options_that_its_format_does_not_know():
    with pytest.raises(FlowError, match="FileSink: json has no option 'mode'"):
        FileSink("out", "json", mode="append")
    with pytest.raises(FlowError, match="header=None is neither True nor False"):
        FileSink("out", "csv", header=None)
    with pytest.raises(FlowError, match="merge=True is for Parquet files; found csv"):
        FileSink("out", "csv", merge=True)
    with pytest.raises(FlowError, match="merge=True makes larger files, but rows_per_file=10 bounds them; give one"):
        FileSink("out", merge=True, rows_per_file=10)
    assert not FileSink("out", rows_per_file=10).merge


def test_options_may_be_written_as_in_spark():
    csv = FileSink("out", "csv", header=True, SEP=";", quoteAll="true")
    assert csv.layout == FileSink("out", "csv", header="True", delimiter=";", quote_all=True).layout
    assert (FileSink("out").merge, FileSink("out", merge=False).merge, csv.merge) == (True, False, False)


@pytest.mark.parametrize(
    ("columns", "error", "says"),
    [
        (("a", "a"), FlowError, r"partition_by=\['a', 'a'\] names a column twice"),
        ("missing", SchemaError, "missing"),
        (("a", "b", "x"), SchemaError, "all columns"),
        ("x", SchemaError, "'x' is double"),
    ],
)
def test_a_partition_by_that_cannot_work_is_refused(flow, columns, error, says):
    rows = flow.source("s", ListSource([[]], "a int, b string, x double"))
    with pytest.raises(error, match=says):
        rows.sink("out", FileSink("somewhere", partition_by=columns))
    assert not flow._operators.keys() & {"out"}


def test_csv_refuses_nested_types_when_the_sink_is_added(flow):
    rows = flow.source("s", ListSource([[]], "a int, tags array<string>"))
    with pytest.raises(SchemaError, match=r"sink 'out': column 'tags' is array<string>, which csv cannot hold"):
        rows.sink("out", FileSink("somewhere", "csv"))


@pytest.mark.parametrize("limit", [0, -1, True, 2.5, "20", None])
def test_a_console_sink_shows_a_number_of_rows(limit):
    with pytest.raises(FlowError, match=r"ConsoleSink: limit=.* is not a number of rows"):
        ConsoleSink(limit)


def test_files_follow_the_options(flow, tmp_path):
    rows = flow.source("s", ListSource([[{"a": 1, "b": "x"}]], "a int, b string"))
    rows.sink("csv", FileSink(tmp_path / "csv", "csv", Header=True, delimiter=";", compression="gzip"))
    rows.sink("parquet", FileSink(tmp_path / "parquet", compression="zstd"))
    run_local(flow)
    [file] = (tmp_path / "csv").glob("epoch-*")
    assert file.name.endswith(".csv.gz")
    assert gzip.decompress(file.read_bytes()).decode().splitlines() == ['"a";"b";"epoch"', '1;"x";0']
    [file] = (tmp_path / "parquet").glob("epoch-*")
    assert papq.ParquetFile(file).metadata.row_group(0).column(0).compression == "ZSTD"


def test_two_sinks_cannot_share_a_memory_sink(rows):
    memory = MemorySink()
    rows.sink("one", memory)
    with pytest.raises(FlowError, match="sink 'two': sink 'one' has the same MemorySink; give each sink its own"):
        rows.sink("two", memory)
    rows.sink("two", MemorySink())


class Alarmed:
    def __call__(self, row: Any) -> Any:
        return row

    def on_timer(self, key: Any, time: Any, state: Any) -> None:
        pass


def test_on_timer_is_refused_where_nobody_calls_it(rows):
    for add in (
        lambda: rows.map("m", Alarmed()),
        lambda: rows.filter("m", Alarmed()),
        lambda: rows.flat_map_batches("m", Alarmed()),
        lambda: rows.route("m", Alarmed(), branches=("a", "b")),
    ):
        with pytest.raises(FunctionError, match="operator 'm': Alarmed has a method on_timer, which only a process"):
            add()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            None,
            "expected a FileSink, DatabaseSink, DeltaSink, IcebergSink, KafkaSink, MemorySink, ConsoleSink, NoopSink "
            "or a function(df, epoch), found",
        ),
        (None, "found NoneType None"),
        ("out/", "found str 'out/'"),
        (lambda df: None, "the function is called with (df, epoch), but too many positional arguments"),
    ],
)
def test_a_target_that_cannot_take_rows_is_refused(rows, target, says):
    with pytest.raises(FlowError) as caught:
        rows.sink("out", target)
    assert "sink 'out': " in str(caught.value)
    assert says in str(caught.value)


def test_a_sink_class_must_be_instantiated(rows):
    with pytest.raises(
        FlowError, match=r"sink 'out': found the class MemorySink; give an instance of it, MemorySink\(…\)"
    ):
        rows.sink("out", MemorySink)


# ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_flow_needs_a_source_and_a_sink(flow):
    with pytest.raises(FlowError, match=r"flow 'f' has no source; add one with flow.source"):
        _ = flow.graph
    flow.source("in", ListSource([[]], DDL))
    with pytest.raises(FlowError, match=r"flow 'f' has no sink; end a stream with stream.sink"):
        _ = flow.graph


def test_a_stream_without_a_reader_is_refused(flow, rows):
    rows.sink("out", NoopSink())
    routed = rows.map("score", same).route("r", same, branches=("a", "b"))
    routed["a"].sink("a", NoopSink())
    with pytest.raises(FlowError, match=r"nothing reads branch 'r\[b\]', so its rows would be lost silently.*NoopSink"):
        _ = flow.graph
    routed["b"].filter("last", same)
    with pytest.raises(FlowError, match=r"nothing reads operator 'last' \(filter\)"):
        _ = flow.graph


@pytest.mark.parametrize("partitions", [0, -1, 257, 1.5, True, "2"])
def test_the_number_of_partitions_is_checked(flow, rows, partitions):
    rows.sink("out", NoopSink())
    with pytest.raises(FlowError, match="give a whole number from 1 to 256"):
        run_local(flow, partitions=partitions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"how": "outer", "within": "1 second"}, "how='outer' is not known; allowed: inner, left, right, full"),
        ({}, "give either window="),
        ({"within": ("1 second",)}, "has 1 lengths of time; give one for both directions, or two"),
        ({"within": ("1 second", "soon")}, "within='soon' is not a length of time"),
        ({"within": ("0 seconds", "1 us")}, "odd number of microseconds; add one to either"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(options, message):
    flow = Flow("pairs")
    times = ListSource([[]], "k string, t timestamp", event_time="t")
    left = flow.source("left", times)
    right = flow.source("right", times).map("rename", lambda row: row, returns="rk string, rt timestamp")
    with pytest.raises(FlowError, match=message):
        left.key_by("l", "k").join("pairs", right.key_by("r", "rk"), right_time="rt", **options)
