"""Each operator on a slice of rows, in both of its forms, and what happens when the user's code fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import midstream
from midstream import Flow, ListSource, MemorySink, Stream
from midstream.data import rows as rows_module
from midstream.data.schema import parse_ddl
from midstream.engine.failure import MAX_ROW_TEXT, user_traceback
from midstream.errors import JobFailed, OperatorFailed, SchemaError
from midstream.flow.model import Operator, Port
from midstream.flow.spec import Form, How
from midstream.operators.filter import Filter, filter_step
from midstream.operators.flat_map import FlatMap, flat_map_step
from midstream.operators.lookup import Lookup, LookupTable, lookup_step
from midstream.operators.map import Map, map_step
from midstream.operators.route import Route, route_step
from midstream.testing import run_local

ROWS = parse_ddl("n bigint, s string")
BATCH = pa.RecordBatch.from_pylist(
    [{"n": 1, "s": "a"}, {"n": 2, "s": None}, {"n": None, "s": ""}, {"n": 4, "s": "é"}], schema=ROWS
)


def op(spec, returns: str | None = None) -> Operator:
    return Operator("op", spec, (Port("in"),), ROWS if returns is None else parse_ddl(returns))


def map_rows(function: Callable[..., Any], returns: str | None = None):
    return map_step(op(Map(Form.ROWS), returns), Map(Form.ROWS), function)


def map_batches(function: Callable[..., Any], returns: str | None = None):
    return map_step(op(Map(Form.BATCHES), returns), Map(Form.BATCHES), function)


def filter_rows(function: Callable[..., Any]):
    return filter_step(op(Filter(Form.ROWS)), Filter(Form.ROWS), function)


def filter_batches(function: Callable[..., Any]):
    return filter_step(op(Filter(Form.BATCHES)), Filter(Form.BATCHES), function)


def flat_map_rows(function: Callable[..., Any], returns: str | None = None):
    return flat_map_step(op(FlatMap(Form.ROWS), returns), FlatMap(Form.ROWS), function)


def flat_map_batches(function: Callable[..., Any], returns: str | None = None):
    return flat_map_step(op(FlatMap(Form.BATCHES), returns), FlatMap(Form.BATCHES), function)


def route(form: Form, function: Callable[..., Any], *branches: str):
    return route_step(op(Route(form, branches)), Route(form, branches), function)


def only(results) -> list[dict[str, Any]]:
    [(branch, batch)] = results.items()
    assert branch == ""
    found: list[dict[str, Any]] = batch.to_pylist()
    return found


# ── what they do ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_map_gives_one_row_for_each():
    def shout(row):
        return {"t": (row["s"] or "nobody").upper()}

    assert only(map_rows(shout, "t string")(BATCH)) == [{"t": "A"}, {"t": "NOBODY"}, {"t": "NOBODY"}, {"t": "É"}]


def test_a_row_function_may_change_the_row_it_is_given():
    def grow(row):
        row["n"] = (row["n"] or 0) + 1
        return row

    step = map_rows(grow)
    assert [row["n"] for row in only(step(BATCH))] == [2, 3, 1, 5]
    assert [row["n"] for row in only(step(BATCH))] == [2, 3, 1, 5], "the input itself was changed"


def test_map_batches_may_return_a_table_other_widths_and_another_order():
    def lengths(batch):
        return pa.table({"s": batch.column("s").cast(pa.large_string()), "n": pc.utf8_length(batch.column("s"))})

    assert only(map_batches(lengths)(BATCH)) == [
        {"n": 1, "s": "a"},
        {"n": None, "s": None},
        {"n": 0, "s": ""},
        {"n": 1, "s": "é"},
    ]


@pytest.mark.parametrize("answers", [[True, False, False, True], [1, 0, None, "yes"], [True, [], {}, object()]])
def test_filter_keeps_the_rows_for_which_the_answer_is_true(answers):
    given = iter(answers)
    assert [row["n"] for row in only(filter_rows(lambda row: next(given))(BATCH))] == [1, 4]


@pytest.mark.parametrize(
    "answer",
    [
        pa.array([True, False, None, True]),
        pa.chunked_array([[True, False], [None, True]]),
        np.array([True, False, False, True]),
        [True, False, None, True],
    ],
)
def test_filter_batches_takes_any_array_of_booleans_and_null_is_no(answer):
    assert [row["n"] for row in only(filter_batches(lambda batch: answer)(BATCH))] == [1, 4]


def test_flat_map_gives_any_number_of_rows_in_order():
    def words(row):
        for i in range(row["n"] or 0):
            yield {"w": f"{row['s']}{i}"}

    found = only(flat_map_rows(words, "w string")(BATCH))
    assert [row["w"] for row in found] == ["a0", "None0", "None1", "é0", "é1", "é2", "é3"]
    as_tuples = flat_map_rows(lambda row: tuple(words(row)), "w string")
    assert only(as_tuples(BATCH)) == found
    assert only(flat_map_rows(lambda row: [], "w string")(BATCH)) == []


def test_flat_map_batches_gives_any_number_of_rows():
    twice = flat_map_batches(lambda batch: pa.Table.from_batches([batch, batch]))
    assert only(twice(BATCH)) == BATCH.to_pylist() * 2
    assert only(flat_map_batches(lambda batch: batch.slice(0, 0))(BATCH)) == []


def test_route_sends_each_row_to_one_branch_in_order():
    step = route(Form.ROWS, lambda row: "few" if (row["n"] or 0) < 3 else "many", "none", "many", "few")
    found = {branch: batch.column("n").to_pylist() for branch, batch in step(BATCH).items()}
    assert found == {"few": [1, 2, None], "many": [4]}


@pytest.mark.parametrize(
    "as_answer",
    [
        pa.array,
        np.array,
        list,
        lambda names: pa.array(names).dictionary_encode(),
        lambda n: pa.array(n, pa.large_string()),
    ],
)
def test_route_batches_takes_any_array_of_names(as_answer):
    step = route(Form.BATCHES, lambda batch: as_answer(["b", "a", "b", "a"]), "a", "b")
    assert {branch: batch.column("n").to_pylist() for branch, batch in step(BATCH).items()} == {
        "a": [2, 4],
        "b": [1, None],
    }


def lookup(how: How, table: pa.Table, unique: bool = False):
    spec = Lookup((("s", "k"),), how, unique, table.schema)
    schema = pa.schema([*ROWS, pa.field("v", pa.int64())])
    return lookup_step(Operator("op", spec, (Port("in"),), schema), spec, LookupTable(table, ("k",)))


TABLE = pa.table({"k": ["é", "a", None, "a", "z"], "v": [1, 2, 3, None, 5]})


def test_an_inner_lookup_gives_a_row_for_each_match_and_null_matches_nothing():
    assert only(lookup(How.INNER, TABLE)(BATCH)) == [
        {"n": 1, "s": "a", "v": 2},
        {"n": 1, "s": "a", "v": None},
        {"n": 4, "s": "é", "v": 1},
    ]


def test_a_left_lookup_keeps_every_row_in_its_place():
    assert only(lookup(How.LEFT, TABLE)(BATCH)) == [
        {"n": 1, "s": "a", "v": 2},
        {"n": 1, "s": "a", "v": None},
        {"n": 2, "s": None, "v": None},
        {"n": None, "s": "", "v": None},
        {"n": 4, "s": "é", "v": 1},
    ]


def test_a_lookup_in_an_empty_table_matches_nothing():
    empty = TABLE.slice(0, 0)
    assert only(lookup(How.INNER, empty)(BATCH)) == []
    assert [row["v"] for row in only(lookup(How.LEFT, empty)(BATCH))] == [None] * 4


# ── what functions may not return ─────────────────────────────────────────────────────────────────────────────────


def failure(step, batch: pa.RecordBatch = BATCH) -> OperatorFailed:
    with pytest.raises(OperatorFailed) as caught:
        step(batch)
    assert caught.value.operator == "op"
    return caught.value


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"n": "4", "s": "x"}, "map 'op': row 3, column 'n': expected bigint, found str '4'"),
        ({"n": 1.5, "s": "x"}, "column 'n': expected bigint, found float 1.5"),
        ({"n": 1}, "column 's': the key is missing; found n. Use None for a null"),
        (
            {"n": 1, "s": "x", "z": 1},
            "column 'z': not declared; the declared columns are n, s. Remove the key, or declare it",
        ),
        (None, "row 3: expected a dict with the keys n, s, found None"),
        ([{"n": 1, "s": "x"}], "row 3: expected a dict with the keys n, s, found list"),
    ],
)
def test_a_map_that_breaks_its_schema_names_the_column_and_the_row(returned, says):
    error = failure(map_rows(lambda row: returned if row["n"] == 4 else row))
    assert says in str(error)
    assert error.row == {"n": 4, "s": "é"}


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            lambda batch: batch.rename_columns(["n", "S"]),
            "map 'op': the columns differ from the declared ones (missing: s; not declared: S). Declared: n bigint,",
        ),
        (
            lambda batch: batch.set_column(0, "n", batch.column("n").cast(pa.float64())),
            "map 'op': column 'n' is declared bigint, but the result is double",
        ),
        (lambda batch: batch.to_pylist(), "map 'op' returned list; allowed: pyarrow.RecordBatch or pyarrow.Table"),
        (lambda batch: None, "map 'op' returned NoneType; allowed: pyarrow.RecordBatch or pyarrow.Table"),
    ],
)
def test_a_batch_that_breaks_the_schema_names_the_column_expected_and_found(function, says):
    assert says in str(failure(map_batches(function)))


@pytest.mark.parametrize(
    ("function", "count"), [(lambda b: b.slice(1), 3), (lambda b: pa.Table.from_batches([b, b]), 8)]
)
def test_map_batches_must_give_as_many_rows_as_it_got(function, count):
    says = str(failure(map_batches(function)))
    assert f"map 'op' returned {count} rows for 4; map_batches gives exactly one row for each" in says
    assert "filter_batches or flat_map_batches" in says


@pytest.mark.parametrize(("returned", "kind"), [({"n": 1, "s": "x"}, "dict"), (None, "NoneType"), ("text", "str")])
def test_flat_map_must_return_rows_not_a_row(returned, kind):
    error = failure(flat_map_rows(lambda row: returned if row["n"] == 2 else []))
    assert f"flat_map 'op' must return an iterable of rows (a list, or yield them), found {kind}" in str(error)
    assert error.row == {"n": 2, "s": None}


def test_a_flat_map_that_breaks_its_schema_names_the_input_row():
    def words(row):
        yield {"n": 1, "s": "fine"}
        yield {"n": 1, "s": 7 if row["n"] == 4 else "fine"}

    error = failure(flat_map_rows(words))
    assert "column 's': expected string, found int 7" in str(error)
    assert error.row == {"n": 4, "s": "é"}


def test_a_generator_that_fails_halfway_blames_its_row():
    def words(row):
        yield row
        if row["n"] == 2:
            raise KeyError("no such word")

    assert failure(flat_map_rows(words)).row == {"n": 2, "s": None}


@pytest.mark.parametrize("answer", ["hgih", None, 3, ["low"], b"low"])
def test_a_route_to_a_branch_that_is_not_there_names_those_that_are(answer):
    error = failure(route(Form.ROWS, lambda row: answer if row["n"] == 4 else "low", "low", "high"))
    assert f"route 'op' chose {answer!r}; its branches are low, high" in str(error)
    assert error.row == {"n": 4, "s": "é"}


def test_a_batch_routed_to_a_branch_that_is_not_there_blames_the_row():
    step = route(
        Form.BATCHES, lambda b: ["low" if n != 4 else "hgih" for n in b.column("n").to_pylist()], "low", "high"
    )
    error = failure(step)
    assert "route 'op' chose 'hgih'; its branches are low, high" in str(error)
    assert error.row == {"n": 4, "s": "é"}
    assert "chose None" in str(failure(route(Form.BATCHES, lambda b: ["low", None, "low", "low"][: len(b)], "low")))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([True], "filter 'op' returned 1 values for 4 rows; it must return one per row"),
        ([1, 0, 1, 0], "filter 'op' must return one bool per row, found an array of int64"),
        (True, "filter 'op' must return one bool per row, found bool"),
        (None, "filter 'op' must return one bool per row, found NoneType"),
    ],
)
def test_filter_batches_must_return_one_boolean_per_row(answer, says):
    assert says in str(failure(filter_batches(lambda batch: answer)))


def test_an_answer_that_is_neither_true_nor_false_is_the_users_failure():
    error = failure(filter_rows(lambda row: np.array([1, 2]) if row["n"] == 2 else True))
    assert "truth value of an array" in str(error)
    assert error.row == {"n": 2, "s": None}


@pytest.mark.parametrize("step", [map_rows(lambda row: row), flat_map_rows(lambda row: [row])])
def test_a_column_that_is_too_large_as_a_whole_blames_no_row(step, monkeypatch):
    def too_large(values, field, what):
        raise SchemaError(f"{what}: column 's': more than 2 GB of text", row_index=None, column="s")

    monkeypatch.setattr(rows_module, "_array", too_large)
    error = failure(step)
    assert error.row is None
    assert "more than 2 GB of text" in str(error)


# ── failures of the user's code ───────────────────────────────────────────────────────────────────────────────────


class NoSuchUser(Exception):
    pass


def fail_at(wanted: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def score(row: dict[str, Any]) -> dict[str, Any]:
        row["s"] = "changed"  # the error must show the row as it came
        if row["n"] == wanted:
            raise NoSuchUser(f"user {row['n']}")  # the user's line
        return row

    return score


def job_of(build: Callable[[Stream], Stream], rows: int = 100, partitions: int = 2) -> tuple[Flow, MemorySink]:
    flow, out = Flow("scores"), MemorySink()
    epochs = [[{"n": i + rows * epoch, "s": "x"} for i in range(rows)] for epoch in range(2)]
    build(flow.source("in", ListSource(epochs, "n bigint, s string", partitions=partitions))).sink("out", out)
    return flow, out


def test_a_job_that_fails_says_where_on_what_and_why():
    flow, out = job_of(lambda rows: rows.map("score", fail_at(177)))
    with pytest.raises(JobFailed) as caught:
        run_local(flow, seed=3)
    error = caught.value
    assert (error.operator, error.epoch, error.partition) == ("score", 1, 1)
    assert error.row == "{'n': 177, 's': 'x'}"
    assert error.error == "NoSuchUser: user 177"
    text = str(error)
    assert text.startswith("job 'scores' failed in operator 'score', epoch 1, partition 1: NoSuchUser: user 177")
    assert "row: {'n': 177, 's': 'x'}" in text
    assert "nothing is missing or doubled" in text
    assert len(out.rows) == 100, "epochs before the failure stay"


def test_the_traceback_is_the_users_alone():
    flow, _ = job_of(lambda rows: rows.map("score", fail_at(5)))
    with pytest.raises(JobFailed) as caught:
        run_local(flow)
    lines = caught.value.user_traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "raise NoSuchUser(f\"user {row['n']}\")  # the user's line" in caught.value.user_traceback
    assert lines[-1].endswith("NoSuchUser: user 5")
    assert str(Path(midstream.__file__).parent) not in caught.value.user_traceback
    assert sum("File " in line for line in lines) == 1


def test_frames_of_a_neighbour_with_a_similar_name_are_the_users():
    """Only what lies in midstream's own folder is left out, not what lies in `…/midstream_app`."""
    file = f"{Path(midstream.__file__).parent}_app/job.py"
    code = compile("def score(row):\n    raise KeyError(row)\n", file, "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    error = failure(map_rows(space["score"]))
    assert file in user_traceback(error.__cause__ or error)


def fails_on(batch: pa.RecordBatch, wanted: int) -> pa.RecordBatch:
    if wanted in batch.column("n").to_pylist():
        raise NoSuchUser(f"user {wanted}")
    return batch


@pytest.mark.parametrize("wanted", [0, 1, 49, 98, 99])
def test_a_batch_function_is_asked_again_until_one_row_is_left(wanted):
    numbers = pa.RecordBatch.from_pylist([{"n": i, "s": "x"} for i in range(100)], schema=ROWS)
    for step in (map_batches, flat_map_batches, filter_batches):
        calls: list[int] = []

        def counted(batch, calls=calls):
            calls.append(batch.num_rows)
            return fails_on(batch, wanted)

        assert failure(step(counted), numbers).row == {"n": wanted, "s": "x"}
        assert len(calls) <= 1 + 2 * 7


def test_a_batch_that_fails_only_as_a_whole_blames_no_row():
    def crowded(batch):
        if batch.num_rows > 2:
            raise MemoryError("too many rows")
        return batch

    error = failure(map_batches(crowded))
    assert error.row is None
    assert str(error) == "operator 'op' failed: MemoryError: too many rows"


def test_another_error_on_the_way_does_not_lead_the_search_astray():
    def fickle(batch):
        if 4 in batch.column("n").to_pylist():
            raise NoSuchUser("4")
        if batch.num_rows < 4:
            raise ValueError("I want four rows")
        return batch

    assert failure(map_batches(fickle)).row == {"n": 4, "s": "é"}


def test_the_row_of_a_batch_function_is_in_the_jobs_error():
    flow, _ = job_of(lambda rows: rows.map_batches("score", lambda batch: fails_on(batch, 42)))
    with pytest.raises(JobFailed) as caught:
        run_local(flow)
    assert (caught.value.row, caught.value.partition) == ("{'n': 42, 's': 'x'}", 0)


@pytest.mark.parametrize("form", ["map", "map_batches"])
def test_a_function_that_exits_fails_its_row_like_any_other(form):
    flow, _ = job_of(lambda rows: getattr(rows, form)("quit", lambda given: sys.exit(3)))
    with pytest.raises(JobFailed, match=r"failed in operator 'quit', epoch 0, partition .: SystemExit: 3"):
        run_local(flow)


def test_a_huge_row_does_not_flood_the_message():
    flow, out = Flow("f"), MemorySink()
    rows = flow.source("in", ListSource([[{"s": "x" * 100_000}]], "s string"))
    rows.filter("m", lambda row: 1 / 0 > 0).sink("out", out)
    with pytest.raises(JobFailed, match="division by zero") as caught:
        run_local(flow)
    assert len(caught.value.row) == MAX_ROW_TEXT
    assert len(str(caught.value)) < 2 * MAX_ROW_TEXT


@pytest.mark.parametrize("part", ["transform", "sink"])
def test_what_fails_outside_of_tasks_fails_the_job_with_its_cause(part):
    def explode(*_):
        raise NoSuchUser("gone")

    flow = Flow("f")
    rows = flow.source("in", ListSource([[{"n": 1}]], "n bigint"))
    if part == "transform":
        rows.transform("sql", lambda df: df, local=explode).sink("out", MemorySink())
    else:
        rows.sink("out", explode)
    where = "in epoch 0" if part == "transform" else "in operator 'out', epoch 0"
    with pytest.raises(JobFailed, match=f"job 'f' failed {where}: NoSuchUser: gone") as caught:
        run_local(flow)
    cause = caught.value.__cause__
    assert isinstance(cause, NoSuchUser) or (cause is not None and isinstance(cause.__cause__, NoSuchUser))
    assert caught.value.epoch == 0


def test_a_transform_is_held_to_its_schema():
    flow = Flow("f")
    rows = flow.source("in", ListSource([[{"n": 1}]], "n bigint"))
    rows.transform("sql", lambda df: df, local=lambda t: t.rename_columns(["m"])).sink("out", MemorySink())
    with pytest.raises(
        JobFailed, match=r"transform 'sql', local: the columns differ from the declared ones \(missing: n"
    ):
        run_local(flow)


# ── open and close ────────────────────────────────────────────────────────────────────────────────────────────────


class Model:
    """Notes what happens to it. By way of `midstream`, which is not packed by value, so that it notes it here."""

    def __init__(self, name: str, fails: str = "") -> None:
        self.name, self.fails, self.opened = name, fails, False

    def note(self, what: str) -> None:
        midstream.events.append(f"{what} {self.name}")  # type: ignore[attr-defined]
        if what == self.fails:
            raise NoSuchUser(f"{self.name} cannot {what}")

    def open(self) -> None:
        self.opened = True
        self.note("open")

    def close(self) -> None:
        self.note("close")

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        assert self.opened, "called before it was opened"
        return row


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    monkeypatch.setattr(midstream, "events", noted, raising=False)
    return noted


def test_functions_are_opened_once_and_closed_once_however_many_tasks_there_are(events):
    flow, out = job_of(lambda rows: rows.map("a", Model("A")).key_by("k", "n").map("b", Model("B")))
    run_local(flow, partitions=4)
    assert len(out.rows) == 200
    assert sorted(events) == ["close A", "close B", "open A", "open B"]
    assert events[:2] == ["open A", "open B"]


def test_the_function_that_the_user_holds_is_not_the_one_that_is_opened(events):
    mine = Model("A")
    flow, _ = job_of(lambda rows: rows.map("a", mine))
    run_local(flow)
    assert events
    assert not mine.opened


def test_a_function_that_cannot_be_opened_fails_the_job_without_a_row(events):
    flow, _ = job_of(lambda rows: rows.map("a", Model("A")).map("b", Model("B", fails="open")))
    with pytest.raises(JobFailed, match=r"failed in operator 'b', epoch 0, .* NoSuchUser: B cannot open") as caught:
        run_local(flow)
    assert caught.value.row is None
    assert "in open" in caught.value.user_traceback
    assert events[-1] == "close A"


def test_functions_are_closed_when_the_job_fails(events):
    flow, _ = job_of(lambda rows: rows.map("a", Model("A")).map("b", fail_at(3)))
    with pytest.raises(JobFailed):
        run_local(flow)
    assert events == ["open A", "close A"]


class Quitter(Model):
    def close(self) -> None:
        super().close()
        sys.exit(1)


@pytest.mark.parametrize("first", [Model("A", fails="close"), Quitter("A")])
def test_one_that_cannot_be_closed_does_not_keep_the_others_from_it(events, first):
    flow, out = job_of(lambda rows: rows.map("a", first).map("b", Model("B")))
    run_local(flow)
    assert len(out.rows) == 200
    assert sorted(events) == ["close A", "close B", "open A", "open B"]
