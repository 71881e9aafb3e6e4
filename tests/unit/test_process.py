"""process: how a function sees its keys, its state and its timers, on the local runtime."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, MemorySink, NoopSink, State, Stream
from midstream.errors import FlowError, FunctionError, JobFailed, SchemaError
from midstream.flow.model import Operator
from midstream.flow.spec import Form
from midstream.ids import Revision
from midstream.operators.process import Process
from midstream.operators.process_step import instantiate_process
from midstream.operators.stream import KeyedStream
from midstream.testing import ManualClock, run_local

Row = dict[str, Any]
START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def keyed(epochs: list[list[Row]], schema: str = "k string, n int", **source: Any) -> tuple[Flow, KeyedStream]:
    flow = Flow("f")
    return flow, flow.source("rows", ListSource(epochs, schema), **source).key_by("by_k", "k")


def ran(epochs: list[list[Row]], function: Any, returns: str, schema: str = "k string, n int", **options: Any) -> Any:
    """The output of a process, in order."""
    flow, rows = keyed(epochs, schema)
    out = MemorySink()
    rows.process("p", function, returns=returns, **options).sink("out", out)
    run_local(flow)
    return out.rows


# ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_key_has_its_own_value_across_epochs() -> None:
    def total(key: str, row: Row, state: State) -> Row:
        state.set(state.get(0) + row["n"])
        return {"k": key, "total": state.get()}

    epochs = [[{"k": "a", "n": 1}, {"k": "b", "n": 10}, {"k": "a", "n": 2}], [{"k": "a", "n": 4}]]
    found = ran(epochs, total, "k string, total int")
    assert [row["total"] for row in found if row["k"] == "a"] == [1, 3, 7]
    assert [row["total"] for row in found if row["k"] == "b"] == [10]


def test_a_key_of_several_columns_is_a_tuple() -> None:
    flow, out = Flow("f"), MemorySink()
    rows = flow.source("rows", ListSource([[{"k": "a", "n": 1}]], "k string, n int")).key_by("by", "n", "k")
    rows.process("p", lambda key, row, state: {"key": repr(key)}, returns="key string").sink("out", out)
    run_local(flow)
    assert out.rows == [{"key": "(1, 'a')"}]


def test_none_is_a_value_and_delete_forgets() -> None:
    def seen(key: str, row: Row, state: State) -> Row:
        before = state.get("nothing")
        if row["n"] == 0:
            state.delete()
        else:
            state.set(None)
        return {"before": repr(before)}

    epochs = [[{"k": "a", "n": 1}], [{"k": "a", "n": 0}, {"k": "a", "n": 0}], [{"k": "a", "n": 1}]]
    found = ran(epochs, seen, "before string")
    assert [row["before"] for row in found] == ["'nothing'", "None", "'nothing'", "'nothing'"]


def test_a_list_keeps_the_most_recent_items() -> None:
    def recent(key: str, row: Row, state: State) -> Row:
        items = state.list("recent")
        items.append(row["n"], keep=3)
        assert items[-1] == row["n"]
        return {"items": list(items)}

    epochs = [[{"k": "a", "n": n} for n in range(start, start + 2)] for start in (0, 2, 4)]
    found = ran(epochs, recent, "items array<int>")
    assert [row["items"] for row in found] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_a_map_behaves_as_a_dict_over_epochs() -> None:
    def note(key: str, row: Row, state: State) -> Row:
        seen = state.map("seen")
        n = row["n"]
        if n < 0:
            seen.pop(-n, None)
        else:
            seen[n] = seen.get(n, 0) + 1
        return {"items": repr(sorted(seen.items())), "size": len(seen)}

    numbers = [[3, 3, 5], [-3, 7], [3, -9], [-5, 7]]
    oracle: dict[int, int] = {}
    wanted = []
    for epoch in numbers:
        for n in epoch:
            if n < 0:
                oracle.pop(-n, None)
            else:
                oracle[n] = oracle.get(n, 0) + 1
            wanted.append({"items": repr(sorted(oracle.items())), "size": len(oracle)})
    found = ran([[{"k": "a", "n": n} for n in epoch] for epoch in numbers], note, "items string, size int")
    assert found == wanted


def test_maps_and_lists_of_different_names_and_keys_are_separate() -> None:
    def note(key: str, row: Row, state: State) -> Row:
        state.map("m")["x"] = row["n"]
        state.map("mx")["x"] = -row["n"]
        state.list("l").append(row["n"])
        state.list("l2").extend([0, 0])
        return {"m": dict(state.map("m"))["x"], "mx": state.map("mx")["x"], "l": len(state.list("l"))}

    epochs = [[{"k": "a", "n": 1}], [{"k": "aa", "n": 2}], [{"k": "a", "n": 3}]]
    found = ran(epochs, note, "m int, mx int, l int")
    assert [tuple(row.values()) for row in found] == [(1, -1, 1), (2, -2, 1), (3, -3, 2)]


def test_clear_forgets_value_lists_and_maps_of_one_key() -> None:
    def note(key: str, row: Row, state: State) -> Row:
        if row["n"] == 0:
            state.clear()
        else:
            state.set(row["n"])
            state.list("l").append(row["n"])
            state.map("m")[row["n"]] = True
        return {"k": key, "left": repr((state.get(), list(state.list("l")), sorted(state.map("m"))))}

    epochs = [[{"k": "a", "n": 1}, {"k": "b", "n": 1}], [{"k": "a", "n": 0}], [{"k": "b", "n": 2}, {"k": "a", "n": 3}]]
    found = {(row["k"], row["left"]) for row in ran(epochs, note, "k string, left string")}
    assert found == {
        ("a", "(1, [1], [1])"),
        ("b", "(1, [1], [1])"),
        ("a", "(None, [], [])"),
        ("b", "(2, [1, 2], [1, 2])"),
        ("a", "(3, [3], [3])"),
    }


@pytest.mark.parametrize("item", [1.5, None, ("a", 2.0), 1 << 70])
def test_invalid_map_keys_are_refused(item: Any) -> None:
    def note(key: str, row: Row, state: State) -> None:
        state.map("m")[item] = 1

    with pytest.raises(
        JobFailed, match=r"operator 'p'.*(cannot be a key of the map 'm'|does not fit the 64 bits of a map key)"
    ):
        ran([[{"k": "a", "n": 1}]], note, "k string")


def test_a_value_that_cannot_be_pickled_fails_the_job_and_names_the_key() -> None:
    def note(key: str, row: Row, state: State) -> None:
        state.set(n for n in [1])

    with pytest.raises(JobFailed, match="the state of key a is a generator that cannot be pickled"):
        ran([[{"k": "a", "n": 1}]], note, "k string")


# ── what a function returns ───────────────────────────────────────────────────────────────────────────────────────


def test_a_function_may_return_a_row_none_or_several() -> None:
    def repeat(key: str, row: Row, state: State) -> Any:
        return None if row["n"] == 0 else row if row["n"] == 1 else (row for _ in range(row["n"]))

    found = ran([[{"k": "a", "n": n} for n in (0, 1, 3)]], repeat, "k string, n int")
    assert [row["n"] for row in found] == [1, 3, 3, 3]


def test_one_to_one_is_checked() -> None:
    with pytest.raises(JobFailed, match="process 'p' is one_to_one but returned 2 rows for one"):
        ran([[{"k": "a", "n": 1}]], lambda key, row, state: [row, row], "k string, n int", one_to_one=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda key, row, state: 1 / 0, "ZeroDivisionError"),
        (lambda key, row, state: 5, "expected a dict"),
        (lambda key, row, state: {"n": "x"}, "column 'n'"),
        (lambda key, row, state: [{"n": 1}, {"m": 1}], "n"),
    ],
)
def test_a_failure_names_operator_and_row(function: Any, message: str) -> None:
    with pytest.raises(JobFailed, match=message) as caught:
        ran([[{"k": "a", "n": 7}]], function, "n int")
    assert caught.value.operator == "p"
    assert "'n': 7" in caught.value.row


def test_a_null_key_fails_the_job_and_names_the_row() -> None:
    with pytest.raises(JobFailed, match="the key column 'k' is null") as caught:
        ran([[{"k": "a", "n": 1}, {"k": None, "n": 2}]], lambda key, row, state: row, "k string, n int")
    assert "'n': 2" in caught.value.row


def test_functions_with_a_wrong_signature_are_refused() -> None:
    _, rows = keyed([[]])
    with pytest.raises(FunctionError, match=r"called with 3 arguments: a key, a dict \(one row\) and its state"):
        rows.process("p", lambda key, row: row)  # type: ignore[arg-type,misc]
    with pytest.raises(FlowError, match="ttl='soon' is not a length of time"):
        rows.process("p", lambda key, row, state: row, ttl="soon")


# ── batches ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_function_sees_the_distinct_keys_of_a_slice() -> None:
    def running(keys: Any, batch: pa.RecordBatch, state: Any) -> pa.RecordBatch:
        totals = state.get(0)
        after = []
        for group, n in zip(keys.group_of_row.tolist(), batch.column("n").to_pylist(), strict=True):
            totals[group] += n
            after.append(totals[group])
        state.set(totals)
        assert [keys[group] for group in keys.group_of_row] == batch.column("k").to_pylist()
        return batch.append_column("total", pa.array(after, pa.int32()))

    flow, rows = keyed([[{"k": k, "n": 1} for k in "abcab" * 20], [{"k": "a", "n": 5}]])
    out = MemorySink()
    rows.process_batches("p", running, returns="k string, n int, total int").sink("out", out)
    run_local(flow, seed=3)
    assert [row["total"] for row in out.rows if row["k"] == "a"] == [*range(1, 41), 45]


def test_a_batch_function_must_set_one_value_per_key() -> None:
    flow, rows = keyed([[{"k": "a", "n": 1}, {"k": "b", "n": 1}]])
    rows.process_batches("p", lambda keys, batch, state: state.set([1, 2, 3, 4])).sink("out", MemorySink())
    with pytest.raises(JobFailed, match=r"4 values were set for \d keys"):
        run_local(flow)


def test_one_to_one_is_checked_for_batches() -> None:
    flow, rows = keyed([[{"k": "a", "n": 1}]])

    def double(keys: Any, batch: pa.RecordBatch, state: Any) -> pa.RecordBatch:
        return pa.concat_batches([batch, batch])

    rows.process_batches("p", double, one_to_one=True).sink("out", MemorySink())
    with pytest.raises(JobFailed, match="is one_to_one but returned 2 rows for 1"):
        run_local(flow)


# ── timers and time to live ───────────────────────────────────────────────────────────────────────────────────────


class Alarm:
    """Fires 10 seconds after each row of a key, and reports the number of rows by then."""

    def __call__(self, key: str, row: Row, state: State) -> None:
        state.set(state.get(0) + 1)
        state.event_timer(row["t"] + timedelta(seconds=10))
        if row["n"] < 0:
            state.cancel_event_timer(row["t"] + timedelta(seconds=10))

    def on_timer(self, key: str, time: datetime, state: State) -> Row:
        assert state.watermark is not None
        assert state.watermark >= time
        return {"k": key, "t": time, "n": state.get()}


def test_event_timers_fire_in_order_when_the_watermark_passes_them() -> None:
    epochs = [
        [{"k": "a", "n": 1, "t": at(0)}, {"k": "b", "n": 1, "t": at(1)}, {"k": "c", "n": -1, "t": at(0)}],
        [{"k": "a", "n": 1, "t": at(5)}],
        [{"k": "z", "n": 1, "t": at(11)}],
        [{"k": "z", "n": 1, "t": at(30)}],
    ]
    flow, rows = keyed(epochs, "k string, n int, t timestamp", event_time="t")
    out = MemorySink()
    rows.process("p", Alarm(), returns="k string, t timestamp, n int").sink("out", out)
    run_local(flow, partitions=1)
    assert [(row["k"], (row["t"] - START).total_seconds(), row["n"]) for row in out.rows] == [
        ("a", 10, 2),
        ("b", 11, 1),
        ("a", 15, 2),
        ("z", 21, 2),
    ]
    assert {epoch: len(found) for epoch, found in out.tables.items()} == {0: 0, 1: 0, 2: 2, 3: 2}


def sets_event_timer(key: str, row: Row, state: State) -> None:
    state.event_timer(START)


def sets_clock_timer(key: str, row: Row, state: State) -> None:
    state.clock_timer(START)


def sets_both(keys: Any, batch: pa.RecordBatch, states: Any) -> pa.RecordBatch:
    states[0].event_timer(START)
    return batch


@pytest.mark.parametrize(("function", "called"), [(sets_event_timer, "event_timer"), (sets_clock_timer, "clock_timer")])
def test_a_timer_without_on_timer_is_an_error_that_names_the_operator_and_the_row(function, called) -> None:
    flow, rows = keyed([[{"k": "a", "n": 7, "t": START}]], "k string, n int, t timestamp", event_time="t")
    rows.process("p", function).sink("out", MemorySink())
    with pytest.raises(JobFailed, match=rf"process 'p': {called} was called, but sets_{called} has no method on_timer"):
        run_local(flow)
    with pytest.raises(JobFailed, match="'n': 7"):
        run_local(flow)


def test_a_timer_of_a_batch_function_is_an_error() -> None:
    flow, rows = keyed([[{"k": "a", "n": 7}]], "k string, n int")
    rows.process_batches("p", sets_both).sink("out", MemorySink())
    with pytest.raises(JobFailed, match="process 'p': event_timer was called, but sets_both has no method on_timer"):
        run_local(flow)


class Snooze:
    """Sets a timer of each given kind, and another one of its kind when it fires."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def __call__(self, key: str, row: Row, state: State) -> None:
        getattr(state, self.kinds[0])(state.now + timedelta(seconds=60))

    def on_timer(self, key: str, time: datetime, state: State) -> None:
        if len(self.kinds) > 1:
            getattr(state, self.kinds[1])(time + timedelta(seconds=10))


@pytest.mark.parametrize("kinds", [("event_timer",), ("clock_timer", "event_timer")])
def test_an_event_timer_without_event_times_is_an_error_in_rows_and_in_timers(kinds) -> None:
    flow, rows = keyed([[{"k": "a", "n": 7}], [], []], "k string, n int")  # a timer fires in an epoch without rows
    rows.process("p", Snooze(*kinds)).sink("out", MemorySink())
    with pytest.raises(JobFailed, match="event_timer was called, but no source of the flow has an event time"):
        run_local(flow, clock=ticking(rows))


def test_a_clock_timer_needs_no_event_times_and_cancelling_needs_nothing() -> None:
    def cancels(key: str, row: Row, state: State) -> Row:
        state.cancel_event_timer(START)
        state.cancel_clock_timer(START)
        return row

    flow, rows = keyed([[{"k": "a", "n": 7}]], "k string, n int")
    out = MemorySink()
    rows.process("p", Snooze("clock_timer")).sink("timers", NoopSink())
    rows.process("q", cancels).sink("out", out)
    run_local(flow)
    assert out.rows == [{"k": "a", "n": 7}]


class Metronome:
    """Ticks every 10 seconds of event time, from its first row on."""

    def __call__(self, key: str, row: Row, state: State) -> None:
        if state.get() is None:
            state.set("ticking")
            state.event_timer(row["t"])

    def on_timer(self, key: str, time: datetime, state: State) -> Row:
        state.event_timer(time + timedelta(seconds=10))
        return {"t": time}


def test_a_timer_can_set_the_next_one_and_catches_up() -> None:
    epochs = [[{"k": "a", "n": 1, "t": at(t)}] for t in (0, 35, 36)]
    flow, rows = keyed(epochs, "k string, n int, t timestamp", event_time="t")
    out = MemorySink()
    rows.process("p", Metronome(), returns="t timestamp").sink("out", out)
    run_local(flow)
    assert [(row["t"] - START).total_seconds() for row in out.rows] == [0, 10, 20, 30]


class Stuck(Metronome):
    def on_timer(self, key: str, time: datetime, state: State) -> Row:
        state.event_timer(time)
        return {"t": time}


def test_a_timer_that_would_fire_forever_is_refused() -> None:
    flow, rows = keyed([[{"k": "a", "n": 1, "t": at(0)}]], "k string, n int, t timestamp", event_time="t")
    rows.process("p", Stuck(), returns="t timestamp").sink("out", MemorySink())
    with pytest.raises(JobFailed, match="it must be later, or it would fire forever"):
        run_local(flow)


class Reminder:
    """Fires when the clock has advanced by 60 seconds."""

    def __call__(self, key: str, row: Row, state: State) -> Row:
        state.clock_timer(state.now + timedelta(seconds=60))
        return {"what": f"row at {state.now:%H:%M:%S}"}

    def on_timer(self, key: str, time: datetime, state: State) -> Row:
        return {"what": f"rang for {time:%H:%M:%S} at {state.now:%H:%M:%S}"}


def ticking(rows: Stream) -> ManualClock:
    """A clock that each epoch of a flow puts forward by 40 seconds, by a sink."""
    clock = ManualClock()
    rows.sink("tick", lambda table, epoch: clock.advance(seconds=40))
    return clock


def test_clock_timers_use_the_clock_at_the_start_of_an_epoch() -> None:
    flow, rows = keyed([[{"k": "a", "n": 1}], [], [], []])
    out = MemorySink()
    rows.process("p", Reminder(), returns="what string").sink("out", out)
    run_local(flow, clock=ticking(rows))
    assert [row["what"][:4] for row in out.rows] == ["row ", "rang"]
    assert [len(found) for found in out.tables.values()] == [1, 0, 1, 0]


def test_state_not_written_within_its_time_to_live_is_deleted() -> None:
    def count(key: str, row: Row, state: State) -> Row:
        if row["n"]:
            state.set(state.get(0) + 1)
            state.list("l").append(row["n"])
            state.map("m")[row["n"]] = 1
        return {"k": key, "n": state.get(0), "left": len(state.list("l")) + len(state.map("m"))}

    a, b, look = {"k": "a", "n": 1}, {"k": "b", "n": 1}, {"k": "a", "n": 0}
    flow, rows = keyed([[a, b], [b], [b], [look, b], [a]])
    out = MemorySink()
    rows.process("p", count, returns="k string, n int, left int", ttl="100 seconds").sink("out", out)
    run_local(flow, clock=ticking(rows))
    assert [(row["n"], row["left"]) for row in out.rows if row["k"] == "a"] == [(1, 2), (0, 0), (1, 2)]
    assert [row["n"] for row in out.rows if row["k"] == "b"] == [1, 2, 3, 4]


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_later_run_continues_with_earlier_state(tmp_path: Any) -> None:
    def count(key: str, row: Row, state: State) -> Row:
        state.set(state.get(0) + 1)
        return {"k": key, "n": state.get()}

    totals = []
    for partitions in (2, 3):
        flow, rows = keyed([[{"k": "a", "n": 1}], [{"k": "b", "n": 1}, {"k": "a", "n": 1}]])
        out = MemorySink()
        rows.process("p", count, returns="k string, n int").sink("out", out)
        run_local(flow, checkpoint=str(tmp_path), partitions=partitions)
        totals.append(sorted((row["k"], row["n"]) for row in out.rows))
    assert totals == [[("a", 1), ("a", 2), ("b", 1)], [("a", 3), ("a", 4), ("b", 2)]]


def test_schema_errors_of_windows_and_keys_are_raised_before_anything_runs() -> None:
    flow = Flow("f")
    rows = flow.source("rows", ListSource([[]], "k string, x double, t timestamp"))
    with pytest.raises(SchemaError, match="x"):
        rows.key_by("by_x", "x")


def test_only_a_process_without_timers_is_quiet_at_the_end():
    """A change need not wait for a task that is quiet: none of its functions is called any more."""

    class Timed:
        def __call__(self, key: str, row: Row, state: State) -> Row:
            return row

        def on_timer(self, key: str, time: datetime, state: State) -> None:
            return None

    schema = pa.schema([("k", pa.string())])
    for function, is_quiet in ((lambda key, row, state: row, True), (Timed(), False)):
        spec = Process(("k",), Form.ROWS, has_timers=not is_quiet)
        operator = Operator("p", spec, (), schema)
        keeper: Any = SimpleNamespace(what="process 'p'")
        assert instantiate_process(operator, spec, function, schema, keeper, Revision(1)).is_quiet is is_quiet
