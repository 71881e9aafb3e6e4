"""Operators that are inserted with state from a table: checked first, there exactly once, whatever crashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from midstream import Flow, Insert, ListSource, MemorySink, State, agg, tumbling
from midstream.checkpoint.change_records import InsertRecord, Outcome
from midstream.checkpoint.inspection import StateReader, read_state
from midstream.errors import FlowError, MidstreamError
from midstream.runtime.edge import DriverCrashed
from midstream.runtime.local.runtime import _Runtime
from midstream.testing import ChangeAt, Faults, LocalRun, ManualClock, run_local
from tests.keyed_oracle import moment
from tests.oracle import Row

pytestmark = pytest.mark.long

EPOCHS, KEYS = 5, 40
BAD_LUCK = Faults(crash=0.05, speculate=0.05, repeat=0.3, give_up=0.01, crash_driver=0.02, lose=0.3, lose_output=0.05)
STEPS = ("computed", "sealed", "manifest written", "published", "counted")
MINUTE = 60_000_000
NARROW = pa.schema([("k", pa.int32()), ("value", pa.int64())])


def flow_of(out: MemorySink, epochs: range = range(EPOCHS)) -> Flow:
    flow = Flow("begun")
    rows = [[{"k": k, "c": 0, "at": moment(MINUTE * epoch)} for k in range(0, KEYS, 2)] for epoch in epochs]
    source = ListSource(rows, "k bigint, c bigint, at timestamp", event_time="at", partitions=2)
    flow.source("in", source).sink("out", out)
    return flow


def count_up(key: int, row: Row, state: State) -> Row:
    state.set(state.get(0) + 1)
    return {**row, "c": state.get()}


def counting(state: Any, name: str = "count") -> Insert:
    return Insert(lambda rows: rows.key_by("by k", "k").process(name, count_up), after="in", state=state)


def given(keys: int = KEYS) -> pa.Table:
    return pa.table({"k": range(keys), "value": [1000 * k for k in range(keys)]})


def check(run: LocalRun, out: MemorySink) -> None:
    """Every key's counts go on from the table without a gap, from some epoch on."""
    [record] = [each for each in run.history if each.outcome is not Outcome.REFUSED]
    assert record.outcome is Outcome.APPLIED
    for k in range(0, KEYS, 2):
        counts = [row["c"] for table in out.tables.values() for row in table.to_pylist() if row["k"] == k]
        before = counts.count(0)
        assert before < EPOCHS
        assert counts == [0] * before + [1000 * k + n for n in range(1, EPOCHS - before + 1)]


@pytest.mark.parametrize(
    "state",
    [
        given(),
        given().to_pandas(),
        given().to_pylist(),
        {"count": given()},
        given().cast(NARROW),
    ],
    ids=["arrow", "pandas", "rows", "by name", "narrower keys"],
)
def test_a_process_goes_on_from_values(state: Any) -> None:
    out = MemorySink()
    run = run_local(flow_of(out), changes=[ChangeAt.of(1, counting(state))], clock=ManualClock())
    check(run, out)
    assert "adds process 'count' behind by k; starts with the state that it is given" in run.history[0].plan


@pytest.mark.parametrize("seed", range(12))
def test_initial_state_is_there_once_whatever_crashes(seed: int) -> None:
    out = MemorySink()
    changes = [ChangeAt.of(seed % 3, counting(given()))]
    check(run_local(flow_of(out), seed=seed, faults=BAD_LUCK, changes=changes, clock=ManualClock()), out)


@pytest.mark.parametrize("step", STEPS)
def test_initial_state_is_there_once_if_the_driver_dies_at_a_step_of_the_first_commit(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[int] = []

    def at(runtime: Any, now: str) -> None:
        if not died and now == step and runtime._driver.changes.configuration.initial:
            died.append(runtime._epoch)
            raise DriverCrashed

    monkeypatch.setattr(_Runtime, "at", at)
    out = MemorySink()
    check(run_local(flow_of(out), changes=[ChangeAt.of(0, counting(given()))], clock=ManualClock()), out)
    assert died


def test_keys_without_rows_are_there_and_survive_a_restart(tmp_path: Path) -> None:
    at = str(tmp_path / "job")
    run_local(flow_of(MemorySink()), checkpoint=at, changes=[ChangeAt.of(1, counting(given()))], clock=ManualClock())
    assert read_state(at, "count").num_rows == KEYS
    out = MemorySink()
    run_local(flow_of(out, range(EPOCHS, EPOCHS + 2)), checkpoint=at, clock=ManualClock())
    assert all(row["c"] > 1000 * row["k"] for row in out.rows)
    assert read_state(at, "count").num_rows == KEYS


def test_a_change_that_fails_leaves_no_state(tmp_path: Path) -> None:
    at, out = str(tmp_path / "job"), MemorySink()

    def fails(row: Row) -> Row:
        raise ValueError("no")

    broken = Insert(lambda rows: rows.map("broken", fails), before="out", after="count")
    changes = [ChangeAt.of(1, counting(given()), broken, preflight=False)]
    run = run_local(flow_of(out), checkpoint=at, changes=changes, clock=ManualClock())
    assert run.history[0].outcome is Outcome.ROLLED_BACK
    assert StateReader.at(at).overview() == []
    assert {row["c"] for row in out.rows} == {0}


def test_several_columns_make_a_dict() -> None:
    def spent(key: int, row: Row, state: State) -> Row:
        held = state.get({"n": 0, "name": "?"})
        state.set({**held, "n": held["n"] + 1})
        return {"k": key, "told": f"{held['name']} {held['n']}"}

    flow, out = Flow("dicts"), MemorySink()
    flow.source("in", ListSource([[{"k": 1}]] * 3, "k bigint")).map(
        "m", lambda row: {**row, "told": ""}, adds="told string"
    ).sink("out", out)
    insert = Insert(
        lambda rows: rows.key_by("by k", "k").process("spent", spent, returns="k bigint, told string"),
        after="m",
        state=pd.DataFrame({"k": [1, 2], "n": [7, 8], "name": ["ann", "bob"]}),
    )
    run_local(flow, changes=[ChangeAt.of(0, insert, scheduler="epoch")], clock=ManualClock())
    assert [row["told"] for row in out.rows][-1].startswith("ann ")


def test_an_aggregate_has_aggregated_rows_of_the_past_and_a_distinct_has_seen_keys() -> None:
    past = pa.table({"k": [0, 0, 2], "c": [5, 7, 100]})

    def both(rows: Any) -> None:
        keyed = rows.key_by("by k", "k")
        keyed.aggregate("totals", n=agg.count(), mean=agg.mean("c"), top=agg.max("c")).sink("t", totals)
        keyed.distinct("new").sink("n", new)

    flow, totals, new = flow_of(MemorySink()), MemorySink(), MemorySink()
    state = {"totals": past, "new": pa.table({"k": list(range(0, KEYS, 4))})}
    run_local(flow, changes=[ChangeAt.of(1, Insert(both, after="in", state=state))], clock=ManualClock())
    first = next(table.to_pylist() for table in totals.tables.values() if table.num_rows)
    by_key = {row["k"]: row for row in first}
    assert by_key[0] == {"k": 0, "n": 3, "mean": 4.0, "top": 7}
    assert by_key[2] == {"k": 2, "n": 2, "mean": 50.0, "top": 100}
    assert by_key[4] == {"k": 4, "n": 1, "mean": 0.0, "top": 0}
    assert sorted(row["k"] for row in new.rows) == list(range(2, KEYS, 4))


def test_windows_begin_with_rows_of_the_past() -> None:
    def windows(rows: Any) -> None:
        rows.key_by("by k", "k").aggregate("w", window=tumbling("1 hour"), n=agg.count()).sink("w.out", out)

    out = MemorySink()
    past = [{"k": 0, "at": moment(0)}, {"k": 0, "at": moment(1)}]
    flow = flow_of(MemorySink())
    insert = Insert(windows, after="in", state=past)
    run_local(flow, changes=[ChangeAt.of(0, insert, scheduler="epoch")], clock=ManualClock(), close_windows=True)
    counts = {row["k"]: row["n"] for row in out.rows}
    assert counts[0] == counts[2] + 2


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (
            pa.table({"user": [1], "value": [1]}),
            "its initial state lacks the column 'k'; it has (user, value)",
        ),
        (
            pa.table({"k": [1]}),
            "has only the key columns (k), and for its values a column 'value', or others",
        ),
        (
            pa.table({"k": ["a"], "value": [1]}),
            "column 'k' of its initial state is string, and the operator needs big",
        ),
        (
            pa.table({"k": [1, 1], "value": [1, 2]}),
            "1 key(s) of its initial state occur more than once, such as {'k'",
        ),
        (pa.table({"k": [1, None], "value": [1, 2]}), "the key column 'k' of its initial state has 1 null(s)"),
        ("file.parquet", "expected a pyarrow.Table, a pandas DataFrame or a batch DataFrame, found str"),
        ([1, 2], "the rows of its initial state must be dicts"),
        ({"other": given()}, "state= names other; the operators that it inserts and that keep state are count"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_anything_changes(state: Any, says: str, tmp_path: Path) -> None:
    at = str(tmp_path / "job")
    with pytest.raises(MidstreamError) as refused:
        run_local(flow_of(MemorySink()), checkpoint=at, changes=[ChangeAt.of(1, counting(state))], clock=ManualClock())
    assert says in str(refused.value)
    run = run_local(flow_of(MemorySink(), range(1)), checkpoint=at, clock=ManualClock())
    assert [each.outcome for each in run.history] == [Outcome.REFUSED]


def joining(rows: Any) -> Any:
    other = rows.map("r", lambda row: {"k": row["k"], "t": row["at"]}, returns="k bigint, t timestamp").key_by("y", "k")
    return rows.key_by("x", "k").join("j", other, within="1 hour", left_time="at", right_time="t")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda rows: rows.filter("f", lambda row: True), "nothing that it inserts keeps state"),
        (
            lambda rows: rows.key_by("by k", "k").process("a", count_up).key_by("b k", "k").process("b", count_up),
            "several operators keep state, so state= must be a dict by a, b",
        ),
        (
            joining,
            "join 'j' cannot be given an initial state; a process, an aggregate or a distinct can",
        ),
    ],
)
def test_operators_that_cannot_take_initial_state_are_named(build: Any, says: str) -> None:
    with pytest.raises(FlowError) as refused:
        run_local(flow_of(MemorySink()), changes=[ChangeAt.of(1, Insert(build, after="in", state=given()))])
    assert says in str(refused.value)


def test_state_that_was_kept_is_not_overwritten(tmp_path: Path) -> None:
    from midstream import Remove

    at = str(tmp_path / "job")
    changes = [ChangeAt.of(0, counting(given()), scheduler="epoch"), ChangeAt.of(3, Remove("count"), scheduler="epoch")]
    run_local(flow_of(MemorySink()), checkpoint=at, changes=changes, clock=ManualClock())
    again = Insert(lambda rows: rows.process("count", count_up), after="by k", state=given())
    with pytest.raises(FlowError, match="there is state under this name already"):
        run_local(
            flow_of(MemorySink(), range(5, 8)), checkpoint=at, changes=[ChangeAt.of(6, again)], clock=ManualClock()
        )


def test_the_record_names_the_initial_state() -> None:
    run = run_local(flow_of(MemorySink()), changes=[ChangeAt.of(1, counting(given()))], clock=ManualClock())
    assert [edit.state is not None for edit in run.history[0].edits if isinstance(edit, InsertRecord)] == [False, True]
