"""select, with_columns, where, rename and drop: what they give and refuse, how they change, and the key they keep."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, KeyedStream, ListSource, MemorySink, Stream, Update, agg
from midstream.data.schema import to_ddl
from midstream.errors import FlowError, JobFailed, SchemaError
from midstream.flow.edits import revise
from midstream.flow.model import Port
from midstream.flow.spec import Contract
from midstream.planner.change_plan import Scheduler, plan_change
from midstream.planner.stages import compile_plan
from midstream.testing import ChangeAt, run_local

Row = dict[str, Any]
DDL = "user string, eur double, qty int"
ROWS: list[Row] = [
    {"user": "ann", "eur": 2.5, "qty": 4},
    {"user": "bob", "eur": None, "qty": 0},
    {"user": None, "eur": 10.0, "qty": 1},
    {"user": "ann", "eur": 100.0, "qty": None},
]


def rows_in(flow: Flow, epochs: list[list[Row]] | None = None, ddl: str = DDL) -> Stream:
    return flow.source("in", ListSource([ROWS] if epochs is None else epochs, ddl))


def result(stream: Stream, **options: Any) -> list[Row]:
    out = MemorySink()
    stream.sink("out", out)
    run_local(stream._flow, **options)
    return out.rows


def by_text(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=repr)


# ── what they give ────────────────────────────────────────────────────────────────────────────────────────────────


def test_select_takes_names_expressions_and_constants():
    rows = rows_in(Flow("f"))
    picked = rows.select(
        "pick",
        "user",
        "eur * qty AS total",
        {"a b": "qty + 1"},
        flag=True,
        price=Decimal("1.50"),
        day=dt.date(2026, 1, 2),
        size="CASE WHEN eur > 5 THEN 'big' WHEN eur IS NULL THEN 'unknown' ELSE 'small' END",
    )
    assert to_ddl(picked.schema) == (
        "user string, total double, `a b` int, flag boolean NOT NULL, price decimal(3,2) NOT NULL, day date NOT NULL, "
        "size string"
    )
    constants = {"flag": True, "price": Decimal("1.50"), "day": dt.date(2026, 1, 2)}
    assert by_text(result(picked)) == by_text(
        [
            {"user": "ann", "total": 10.0, "a b": 5, **constants, "size": "small"},
            {"user": "bob", "total": None, "a b": 1, **constants, "size": "unknown"},
            {"user": None, "total": 10.0, "a b": 2, **constants, "size": "big"},
            {"user": "ann", "total": None, "a b": None, **constants, "size": "big"},
        ]
    )


def test_a_star_is_all_columns():
    assert rows_in(Flow("f")).select("all", "*", twice="qty * 2").schema.names == ["user", "eur", "qty", "twice"]


def test_with_columns_adds_behind_and_replaces_in_place():
    more = rows_in(Flow("f")).with_columns("more", "qty * 2 AS twice", qty="qty + 1")
    assert to_ddl(more.schema) == "user string, eur double, qty int, twice int"
    assert [(row["qty"], row["twice"]) for row in result(more) if row["eur"] == 2.5] == [(5, 8)]


def test_where_keeps_only_what_is_true():
    assert by_text(result(rows_in(Flow("f")).where("big", "eur > 5"))) == by_text([ROWS[2], ROWS[3]])
    assert result(rows_in(Flow("f")).where("none", False)) == []


def test_rename_and_drop():
    rows = rows_in(Flow("f")).rename("names", {"user": "who", "qty": "user"}).drop("less", "eur")
    assert by_text(result(rows)) == by_text([{"who": row["user"], "user": row["qty"]} for row in ROWS])


def test_columns_that_are_not_null_stay_not_null():
    rows = rows_in(Flow("f"), [[]], "id int NOT NULL, n int")
    assert to_ddl(rows.select("s", "id", "n", more="id + 1").schema) == "id int NOT NULL, n int, more int"


def test_a_renamed_event_time_is_still_the_event_time():
    flow = Flow("f")
    source = ListSource([[]], "user string, at timestamp", event_time="at")
    keyed = flow.source("in", source).rename("names", {"at": "seen"}).key_by("by_user", "user")
    assert keyed.event_time == "seen"


def test_a_case_does_not_compute_a_division_that_it_does_not_choose():
    rows = rows_in(Flow("f")).select("s", each="CASE WHEN qty <> 0 THEN eur / qty ELSE 0 END")
    assert sorted(row["each"] for row in result(rows)) == [0.0, 0.0, 0.625, 10.0]


def test_a_condition_is_not_computed_for_rows_that_its_left_side_has_decided():
    assert [row["qty"] for row in result(rows_in(Flow("f")).where("w", "qty <> 0 AND 10 / qty > 5"))] == [1]
    rows = rows_in(Flow("f")).where("w", "qty = 0 OR 10 / qty > 5")
    assert sorted(row["qty"] for row in result(rows)) == [0, 1]


# ── what they refuse ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda rows: rows.select("s", "usr"), r"select 's', usr: there is no column 'usr'; did you mean 'user'\?"),
        (lambda rows: rows.select("s", "eur + 1"), r"select 's': the column 'eur \+ 1' has no name; write '… AS name'"),
        (lambda rows: rows.select("s"), r"select 's': name at least one column"),
        (lambda rows: rows.select("s", "eur", "qty AS EUR"), r"two columns would be called 'eur'"),
        (lambda rows: rows.select("s", n=None), r"select 's', n: NoneType None cannot be an expression"),
        (lambda rows: rows.select("s", n="NULL"), r"NULL alone has no type"),
        (lambda rows: rows.select("s", n="INTERVAL 1 DAY"), r"an interval cannot be a column"),
        (lambda rows: rows.select("s", n="user + 1"), r"\+ takes numbers, found string; use cast"),
        (lambda rows: rows.select("s", n="lenght(user)"), r"there is no function 'lenght'; did you mean 'length'\?"),
        (lambda rows: rows.select("s", n="length(user, 2)"), r"length takes 1 arguments, found 2"),
        (lambda rows: rows.select("s", n="sum(eur)"), r"it adds up rows; use key_by and aggregate"),
        (lambda rows: rows.select("s", n="count(*)"), r"count\(\*\) adds up rows"),
        (lambda rows: rows.select("s", n="row_number() OVER (ORDER BY eur)"), r"looks at other rows|windows over rows"),
        (lambda rows: rows.select("s", n="rand()"), r"an epoch that runs again would give other rows"),
        (lambda rows: rows.select("s", n="now()"), r"use the event time"),
        (lambda rows: rows.select("s", n="eur +"), r"expected a value, found the end\n  eur \+\n       \^"),
        (lambda rows: rows.select("s", n="(eur"), r"expected '\)' to close the bracket"),
        (lambda rows: rows.select("s", n='"eur"'), r"write texts in 'single quotes'"),
        (lambda rows: rows.select("s", n="eur ~ 1"), r"unexpected character '~'"),
        (lambda rows: rows.select("s", n="cast(eur AS flaot)"), r"did you mean 'float'\?"),
        (lambda rows: rows.select("s", n="user RLIKE '('"), r"rlike cannot read the pattern '\('"),
        (lambda rows: rows.where("w", "eur"), r"where 'w': the condition 'eur' is double; it must be a boolean"),
        (
            lambda rows: rows.where("w", lambda row: True),
            r"must be SQL text like 'eur > 100', found function.*use filter",
        ),
        (lambda rows: rows.where("w", "user = 1"), r"= mixes string and int; cast one of them"),
        (lambda rows: rows.with_columns("c"), r"with_columns 'c': name at least one column"),
        (lambda rows: rows.with_columns("c", "*"), r"'\*' is not needed here"),
        (lambda rows: rows.rename("r", {"usr": "who"}), r"rename 'r': there is no column 'usr'; did you mean 'user'\?"),
        (lambda rows: rows.rename("r", {"user": "eur"}), r"two columns would be called 'eur'"),
        (lambda rows: rows.rename("r", {}), r"expected a dict like"),
        (lambda rows: rows.drop("d", "usr"), r"drop 'd': there is no column 'usr'"),
        (lambda rows: rows.drop("d"), r"name at least one column"),
        (lambda rows: rows.drop("d", "user", "eur", "qty"), r"drop 'd': no column is left"),
    ],
)
def test_mistakes_are_found_while_the_flow_is_built(build: Any, message: str):
    with pytest.raises(FlowError, match=message):
        build(rows_in(Flow("f")))


def test_deep_nesting_is_refused_rather_than_a_crash():
    with pytest.raises(SchemaError, match="nested more than 100 levels deep"):
        rows_in(Flow("f")).select("s", n="(" * 5000 + "1" + ")" * 5000)


def test_a_value_that_cannot_be_computed_fails_with_its_operator():
    with pytest.raises(JobFailed, match=r"select 's'|'s'.*division by zero") as failed:
        result(rows_in(Flow("f")).select("s", each="eur / qty", only="1 / qty"))
    assert failed.value.operator == "s"


def test_bad_rows_leave_by_the_errors_branch():
    flow, bad = Flow("f"), MemorySink()
    picked = rows_in(flow).select("s", "user", each="100 / qty", on_error="branch")
    picked.errors().sink("bad", bad)
    assert by_text(result(picked)) == by_text(
        [{"user": "ann", "each": 25.0}, {"user": None, "each": 100.0}, {"user": "ann", "each": None}]
    )
    [row] = bad.rows
    assert row["user"] == "bob"
    assert row["error"].startswith("ZeroDivisionError: division by zero")


# ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_contracts_are_known_to_the_planner():
    flow = Flow("f")
    rows = (
        rows_in(flow).select("s", "*").with_columns("c", n=1).where("w", "n = 1").rename("r", {"n": "m"}).drop("d", "m")
    )
    rows.sink("out", MemorySink())
    graph = flow.graph
    assert {graph[name].contract for name in "scwrd"} == {Contract.ONE_TO_ONE}
    plan = plan_change(graph, {"w"}, Scheduler.FRIES)
    assert [component.operators for component in plan.components] == [("w",)]


def changing(epochs: list[list[Row]], out: MemorySink) -> Flow:
    flow = Flow("f")
    rows = rows_in(flow, epochs).select("s", "user", "eur", "qty").with_columns("c", two="qty * 2", more=1)
    rows.where("w", "qty >= 0").rename("r", {"two": "double"}).drop("d", "more").sink("out", out)
    return flow


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (Update("s", ["user", "eur * 10 AS eur", "qty"]), lambda row: {**row, "eur": row["eur"] * 10}),
        (Update("c", {"two": "qty * 3", "more": 1}), lambda row: {**row, "double": row["qty"] * 3}),
        (Update("w", "qty > 2"), lambda row: row if row["qty"] > 2 else None),
        (Update("r", {"two": "twice"}), lambda row: {("twice" if n == "double" else n): v for n, v in row.items()}),
        (Update("d", "eur"), lambda row: {n: v for n, v in {**row, "more": 1}.items() if n != "eur"}),
    ],
)
def test_an_update_takes_effect_and_a_restart_keeps_it(update: Update, expected: Any, tmp_path: Path):
    epochs = [[{"user": f"u{i}", "eur": float(i), "qty": i % 5} for i in range(50)] for _ in range(6)]
    base = [{"user": f"u{i}", "eur": float(i), "qty": i % 5, "double": i % 5 * 2} for i in range(50)]
    changed = by_text([made for row in base if (made := expected(row)) is not None])
    out, checkpoint = MemorySink(), str(tmp_path / "checkpoint")
    change = ChangeAt.of(2, update, preflight=True, scheduler="epoch")
    run = run_local(changing(epochs, out), changes=[change], checkpoint=checkpoint, seed=3)
    assert run.revision == 2
    assert by_text(out.tables[0].to_pylist()) == by_text(base)
    assert by_text(out.tables[5].to_pylist()) == changed
    later = MemorySink()
    run_local(changing(epochs[:1], later), checkpoint=checkpoint)
    assert by_text(later.rows) == changed


def test_an_update_is_judged_like_the_first_expression():
    graph = changing([[]], MemorySink()).graph
    with pytest.raises(SchemaError, match=r"where 'w': there is no column 'qyt'; did you mean 'qty'\?"):
        revise(graph, [Update("w", "qyt > 2")])
    with pytest.raises(SchemaError, match=r"with_columns 'c', two: there is no column 'qty'"):
        revise(graph, [Update("s", ["user", "eur"])])
    with pytest.raises(FlowError, match=r"update of where 'w': the condition must be SQL text"):
        revise(graph, [Update("w", len)])
    with pytest.raises(FlowError, match=r"the columns of a select follow from its input; leave out returns="):
        revise(graph, [Update("s", "user", returns="user string")])


def test_columns_above_may_change_types_and_the_result_follows():
    flow = Flow("f")
    rows_in(flow).map("m", lambda row: row).with_columns("c", twice="qty * 2").sink("out", MemorySink())
    wider = revise(flow.graph, [Update("m", lambda row: row, returns="user string, qty bigint")])
    assert to_ddl(wider["c"].schema) == "user string, qty bigint, twice bigint"


# ── the key ───────────────────────────────────────────────────────────────────────────────────────────────────────


def exchanges(flow: Flow) -> int:
    return len(compile_plan(flow.graph).exchanged)


def test_an_aggregate_behind_operators_that_keep_the_key_needs_no_second_exchange():
    flow, out = Flow("f"), MemorySink()
    keyed = rows_in(flow, [ROWS, ROWS]).where("named", "user IS NOT NULL").key_by("by_user", "user")
    rows = (
        keyed.where("some", "qty IS NULL OR qty > 0").with_columns("more", twice="qty * 2").rename("n", {"user": "who"})
    )
    rows = rows.select("s", "who", "twice", "eur").drop("d", "eur").filter("all", lambda row: True)
    rows = rows.map("add", lambda row: {**row, "one": 1}, adds="one int")
    assert isinstance(rows, KeyedStream)
    assert rows.keys == ("who",)
    rows.aggregate("total", n=agg.count(), twice=agg.sum("twice"), ones=agg.sum("one")).sink("out", out)
    assert exchanges(flow) == 1
    run_local(flow)
    assert out.tables[1].to_pylist() == [{"who": "ann", "n": 4, "twice": 16, "ones": 4}]


@pytest.mark.parametrize(
    "lose",
    [
        lambda rows: rows.select("x", "upper(user) AS user"),
        lambda rows: rows.select("x", "eur"),
        lambda rows: rows.with_columns("x", user="upper(user)"),
        lambda rows: rows.drop("x", "user"),
        lambda rows: rows.map("x", lambda row: row),
        lambda rows: rows.flat_map("x", lambda row: [row]),
    ],
)
def test_an_operator_that_may_touch_the_key_drops_it_and_is_named(lose: Any):
    rows = lose(rows_in(Flow("f")).key_by("by_user", "user").where("w", "eur > 1"))
    assert not isinstance(rows, KeyedStream)
    with pytest.raises(FlowError, match=r"no key any more: \w+ 'x' comes after key_by 'by_user'"):
        rows.aggregate("a", n=agg.count())


def test_an_update_must_not_touch_a_key_that_others_rely_on():
    flow = Flow("f")
    rows = (
        rows_in(flow).key_by("by_user", "user").with_columns("c", twice="qty * 2").select("s", "user AS who", "twice")
    )
    rows.aggregate("a", n=agg.count()).sink("out", MemorySink())
    graph = flow.graph
    assert graph.key_of(Port("s")) == ("who",)
    revise(graph, [Update("s", ["user AS who", "twice + 1 AS twice"])])
    with pytest.raises(FlowError, match=r"update of select 's': .* must pass the column 'user' on unchanged as 'who'"):
        revise(graph, [Update("s", ["upper(user) AS who", "twice"])])
    with pytest.raises(FlowError, match=r"update of with_columns 'c': .* must pass the column 'user' on unchanged$"):
        revise(graph, [Update("c", {"user": "upper(user)", "twice": "1"})])


def test_a_map_that_breaks_its_promise_to_only_add_columns_fails_if_state_depends_on_it():
    def shout(row: Row) -> Row:
        return {**row, "user": str(row["user"]).upper(), "n": 1}

    flow = Flow("f")
    shouted = rows_in(flow).where("named", "user IS NOT NULL").key_by("by_user", "user").map("m", shout, adds="n int")
    with pytest.raises(JobFailed, match=r"map 'm' changed 'user' from 'ann' to 'ANN'; operators behind it keep state"):
        result(shouted.distinct("d"))
    alone = Flow("f")
    unkeyed = rows_in(alone).key_by("by_user", "user").map("m", shout, adds="n int")
    assert {row["user"] for row in result(unkeyed)} == {"ANN", "BOB", "NONE"}, "without state behind it, it may"


def test_a_key_is_kept_on_the_way_to_a_deeper_stage():
    """The left side of the join is one exchange less deep than the right one; its rows are sent by their key."""
    flow, out = Flow("f"), MemorySink()
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    rows = [{"id": i, "group": i % 3, "at": at} for i in range(60)]
    source = flow.source("in", ListSource([rows], "id int, group int, at timestamp", event_time="at", partitions=3))
    left = source.key_by("left", "id").where("w", "id % 2 = 0")
    right = (
        source.key_by("by_group", "group")
        .select("again", "*")
        .map("m", lambda row: row)
        .rename("n", {"group": "g", "at": "t"})
    )
    both = left.join("both", right.key_by("right", "id"), within="0 seconds", right_time="t")
    both.sink("out", out)
    wires = {wire.port: wire.key for wire in compile_plan(flow.graph).wires}
    assert wires[Port("w")] == ("id",)
    run_local(flow, partitions=3)
    assert sorted(row["id"] for row in out.rows) == list(range(0, 60, 2))
