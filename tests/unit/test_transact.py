"""The operator `transact` on the local runtime: its output, its tables, and what it refuses."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from midstream import Flow, ListSource, MemorySink, NoopSink, Table, Update, transaction
from midstream.checkpoint.inspection import StateReader, read_state
from midstream.engine.table_layout import TableLayout, stored_keys, table_prefix
from midstream.errors import CheckpointError, FlowError, FunctionError, JobFailed, SchemaError
from midstream.flow.model import Port
from midstream.flow.spec import LATE
from midstream.operators.transact import Transact
from midstream.state.keys import Namespace
from midstream.testing import ChangeAt, Faults, run_local
from tests.transacted import COLUMNS, Bank, bank, event, outcomes, random_epochs, transactions

pytestmark = pytest.mark.long  # the first test compiles


def balances(checkpoint: str) -> dict[str, float]:
    rows = read_state(checkpoint, "accounts").to_pylist()
    return {row["key"]: row["value"] for row in rows}


# ── results ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("domain", [None, "region"])
@pytest.mark.parametrize("seed", range(6))
def test_outcomes_and_tables_equal_those_of_a_plain_program(seed: int, domain: str | None, tmp_path: Any) -> None:
    epochs = random_epochs(random.Random(seed), epochs=4, rows=30)
    out, plain = MemorySink(), Bank(key=lambda row: row["region"] if domain else "")
    run_local(bank(epochs, out, domain=domain), seed=seed, partitions=3, checkpoint=str(tmp_path))
    assert outcomes(out.rows) == plain.run(epochs)
    found = read_state(str(tmp_path), "accounts").to_pylist()
    assert {(row.get("region", ""), row["key"]): row["value"] for row in found} == plain.accounts


@pytest.mark.parametrize("seed", range(8))
def test_crashes_retries_and_repeated_messages_change_nothing(seed: int, tmp_path: Any) -> None:
    epochs = random_epochs(random.Random(seed), epochs=4, rows=20)
    out, plain = MemorySink(), Bank(key=lambda row: row["region"])
    faults = Faults(crash=0.05, speculate=0.05, repeat=0.3, give_up=0.01, crash_driver=0.01)
    run_local(bank(epochs, out, domain="region"), seed=seed, partitions=2, faults=faults, checkpoint=str(tmp_path))
    assert outcomes(out.rows) == plain.run(epochs)
    found = read_state(str(tmp_path), "accounts").to_pylist()
    assert {(row["region"], row["key"]): row["value"] for row in found} == plain.accounts


def test_a_restart_continues_with_the_tables(tmp_path: Any) -> None:
    first, second = [[event(1, "deposit", "ann", 5.0)]], [[event(2, "transfer", "ann", 4.0, "bob")]]
    out = MemorySink()
    run_local(bank(first, out), checkpoint=str(tmp_path))
    run_local(bank(second, out), checkpoint=str(tmp_path))
    assert outcomes(out.rows)[-1] == (2, True, 1.0, None)
    assert balances(str(tmp_path)) == {"ann": 1.0, "bob": 4.0}


def test_rows_come_out_in_the_order_of_arrival_with_all_their_columns() -> None:
    out = MemorySink()
    run_local(bank([[event(2, "deposit", "b", 1.0), event(1, "deposit", "a", 2.0)]], out), partitions=1)
    assert [row["n"] for row in out.rows] == [2, 1]
    names = ["n", "kind", "region", "src", "dst", "eur", "balance", "committed", "reason"]
    assert list(out.rows[0]) == names


def test_an_epoch_without_rows_runs_nothing() -> None:
    out = MemorySink()
    run_local(bank([[], [event(1, "deposit", "a", 2.0)], []], out))
    assert len(out.rows) == 1


def test_columns_that_a_transaction_does_not_return_are_null() -> None:
    flow, out = Flow("f"), MemorySink()
    counts = flow.table("counts", key="bigint", value="bigint", default=0)

    @transaction
    def bump(t: Any, e: Any) -> Any:
        t.write(counts, e.k, t.read(counts, e.k) + 1)
        return {"seen": t.read(counts, e.k)}

    @transaction
    def reset(t: Any, e: Any) -> None:
        t.write(counts, e.k, 0)

    rows = [{"n": i, "k": 7, "w": w} for i, w in enumerate(["bump", "bump", "reset", "bump"])]
    events = flow.source("events", ListSource([rows], "n bigint, k bigint, w string"))
    events.transact("t", bump, reset, order_by="n", which="w").sink("out", out)
    run_local(flow)
    assert [row["seen"] for row in sorted(out.rows, key=lambda row: row["n"])] == [1, 2, None, 1]


def test_tables_with_named_columns_and_python_objects(tmp_path: Any) -> None:
    flow, out = Flow("f"), MemorySink()
    roads = flow.table("roads", key="bigint", value="speed double, cars bigint", default={"speed": 0.0, "cars": 0})
    seen = flow.table("seen", key="bigint", value="object", default=None)

    def with_car(known: Any, car: int) -> Any:
        return (known or frozenset()) | {car}

    @transaction
    def drive(t: Any, e: Any) -> Any:
        road = t.read(roads, e.road)
        cars = t.call(with_car, t.read(seen, e.road), e.car, returns="object")
        t.write(seen, e.road, cars)
        count = t.call(len, cars, returns="bigint")
        t.write(roads, e.road, {"speed": road.speed + e.speed, "cars": count})
        return {"cars": count}

    rows = [
        [{"n": 1, "road": 1, "car": 5, "speed": 10.0}, {"n": 2, "road": 1, "car": 5, "speed": 20.0}],
        [{"n": 3, "road": 1, "car": 6, "speed": 1.0}],
    ]
    events = flow.source("events", ListSource(rows, "n bigint, road bigint, car bigint, speed double"))
    events.transact("t", drive, order_by="n").sink("out", out)
    run_local(flow, checkpoint=str(tmp_path))
    assert [row["cars"] for row in out.rows] == [1, 1, 2]
    assert read_state(str(tmp_path), "roads").to_pylist() == [{"key": 1, "speed": 31.0, "cars": 2}]
    assert read_state(str(tmp_path), "seen").to_pylist() == [{"key": 1, "value": "frozenset({5, 6})"}]
    assert len(read_state(str(tmp_path), "t")) == 2


def test_a_table_may_have_a_name_of_many_bytes(tmp_path: Any) -> None:
    flow, out = Flow("f"), MemorySink()
    table = flow.table("余" * 100, key="bigint", value="bigint", default=0)

    @transaction
    def bump(t: Any, e: Any) -> None:
        t.write(table, e.n, t.read(table, e.n) + 1)

    flow.source("events", ListSource([[{"n": 1}]], "n bigint")).transact("t", bump, order_by="n").sink("out", out)
    run_local(flow, checkpoint=str(tmp_path))
    assert read_state(str(tmp_path), table.name).to_pylist() == [{"key": 1, "value": 1}]


def test_the_bytes_in_state_never_change() -> None:
    """State on disk contains these bytes; changing them would make checkpoints unreadable."""
    whole = Table("n", key="bigint", value="bigint", default=0)
    named = Table("t", key="string", value="speed double, full boolean", default={"speed": 0.0, "full": False})
    domain = b"\x07\x00eu"
    assert stored_keys(table_prefix(domain, "n"), np.array([-1]), whole) == [
        b"\x07\x1e\x00\x02eu\x00\x01n\x7f\xff\xff\xff\xff\xff\xff\xff"
    ]
    past = table_prefix(domain, "t", Namespace.TABLE_PAST)
    assert stored_keys(past, pa.array(["ann"]), named) == [b"\x07\x1f\x00\x02eu\x00\x01tann"]
    [value] = TableLayout(whole).encoded([np.array([5])])
    assert value.hex() == "92a63d1a0500000000000000"
    [value] = TableLayout(named).encoded([np.array([0.5]), np.array([True])])
    assert value.hex() == "27d7270b000000000000e03f01"
    written = TableLayout(whole).structs([np.array([5])], np.array([7]))
    assert written.tobytes().hex() == "0700000000000000" + "0500000000000000"


# ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def at(second: float) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second)


def timed(
    epochs: list[list[tuple[float, float]]],
    out: MemorySink,
    late: MemorySink,
    size: str,
    delay: str,
    domain: str | None = None,
) -> Flow:
    """Each row writes its value to one key, and returns the sum of the window before it."""
    flow = Flow("f")
    meter = flow.table("meter", key="bigint", value="double", default=0.0)

    @transaction
    def note(t: Any, e: Any) -> Any:
        before = t.window(meter, e.k, size, "sum")
        t.write(meter, e.k, e.x)
        return {"before": before}

    rows = [[{"ts": at(s), "k": 1, "x": x} for s, x in epoch] for epoch in epochs]
    source = ListSource(rows, "ts timestamp, k bigint, x double", event_time="ts")
    done = flow.source("events", source, delay=delay).transact("t", note, order_by="ts", domain=domain)
    done.sink("out", out)
    done.late().sink("late", late)
    return flow


def test_windows_span_epochs_and_forget_writes_that_are_too_old(tmp_path: Any) -> None:
    out, late = MemorySink(), MemorySink()
    epochs = [[(0.0, 1.0), (5.0, 2.0)], [(9.0, 4.0)], [(14.0, 8.0)], [(40.0, 16.0)]]
    run_local(timed(epochs, out, late, "10 seconds", "0 seconds"), checkpoint=str(tmp_path))
    assert [row["before"] for row in out.rows] == [0.0, 1.0, 3.0, 6.0, 0.0]
    rows = StateReader.at(str(tmp_path)).table("t")
    assert len(rows) == 1, "the history is not shown as a table"


def test_a_write_at_the_edge_of_a_window_is_not_forgotten() -> None:
    out, late = MemorySink(), MemorySink()
    microsecond = 1e-6
    epochs = [[(0.0, 1.0), (microsecond, 2.0), (10.0, 4.0)], [(10.0, 8.0)]]
    run_local(timed(epochs, out, late, "10 seconds", "0 seconds"), partitions=1)
    assert out.rows[-1]["before"] == 6.0, "all but the write exactly ten seconds ago"


def test_rows_older_than_the_watermark_are_late() -> None:
    out, late = MemorySink(), MemorySink()
    run_local(timed([[(0, 1.0), (10, 2.0)], [(7, 4.0), (8, 8.0), (12, 1.0)]], out, late, "1 second", "2 seconds"))
    assert [row["x"] for row in late.rows] == [4.0]
    assert [row["x"] for row in out.rows] == [1.0, 2.0, 8.0, 1.0]


@pytest.mark.parametrize("domain", [None, "k"])
def test_an_epoch_with_only_late_rows_runs_nothing(domain: str | None) -> None:
    out, late = MemorySink(), MemorySink()
    run_local(timed([[(10.0, 2.0)], [(3.0, 4.0), (4.0, 8.0)]], out, late, "1 second", "0 seconds", domain))
    assert [row["x"] for row in late.rows] == [4.0, 8.0]
    assert [row["x"] for row in out.rows] == [2.0]


def test_windows_need_event_time() -> None:
    flow = Flow("f")
    meter = flow.table("meter", key="bigint", value="double", default=0.0)

    @transaction
    def note(t: Any, e: Any) -> None:
        t.write(meter, e.k, t.window(meter, e.k, 10, "sum"))

    events = flow.source("events", ListSource([[]], "n bigint, k bigint"))
    with pytest.raises(FlowError, match="order by the event time"):
        events.transact("t", note, order_by="n")


# ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheduler", ["fries", "epoch", "replay", "marker"])
def test_transactions_are_changed_between_epochs(scheduler: str) -> None:
    epochs = [[event(10 * i + j, "deposit", "ann", 5.0) for j in range(5)] for i in range(2)]
    epochs += [[event(100 + 10 * i + j, "transfer", "ann", 1.0, "bob") for j in range(4)] for i in range(3)]
    out = MemorySink()
    flow = bank(epochs, out)
    table = flow.table("unused", default=0.0)
    dearer = transactions(Table("accounts", key="string", value="double", default=0.0), fee=2.0)
    run = run_local(flow, changes=[ChangeAt.of(3, Update("ledger", dearer), scheduler=scheduler)])
    assert table.name == "unused"
    [record] = run.history
    assert str(record.outcome) == "applied"
    found = {n: balance for n, _, balance, _ in outcomes(out.rows)}
    before = [found[100 + j] for j in range(4)]
    after = [found[120 + j] for j in range(4)]
    assert before == [49.0, 48.0, 47.0, 46.0]
    steps = {round(a - b, 3) for a, b in pairwise(after)}
    assert steps == {3.0}
    middle = [found[110 + j] for j in range(4)]
    assert {round(a - b, 3) for a, b in pairwise(middle)} in ({1.0}, {3.0}), "one revision per epoch"


def test_a_change_must_not_change_the_layout_of_a_table() -> None:
    out = MemorySink()
    flow = bank([[event(1, "deposit", "a", 1.0)]], out)
    cents = Table("accounts", key="string", value="bigint", default=0)

    @transaction
    def deposit(t: Any, e: Any) -> None:
        t.write(cents, e.src, t.read(cents, e.src) + 1)

    from midstream.flow.edits import revise

    with pytest.raises(SchemaError, match="Give the new table another name"):
        revise(flow.graph, [Update("ledger", deposit)])


def test_a_transact_operator_describes_itself() -> None:
    out = MemorySink()
    flow = bank([[event(1, "deposit", "a", 1.0)]], out, domain="region")
    spec = flow.graph["ledger"].spec
    assert isinstance(spec, Transact)
    assert (spec.transactions, spec.keyed_by) == (("deposit", "transfer"), ("region",))
    assert flow.graph["ledger"].kind == "transact"
    run = run_local(flow)
    [stats] = [stats for stats in run.progress[-1].operators if stats.operator == "ledger"]
    assert "serial" in stats.note


def test_a_broken_calibration_is_logged_and_does_not_fail_a_job(tmp_path: Any, monkeypatch: Any, caplog: Any) -> None:
    from midstream.txn.calibration import default_path

    monkeypatch.setenv("MIDSTREAM_CACHE", str(tmp_path))
    default_path().parent.mkdir(parents=True, exist_ok=True)
    default_path().write_text("{")
    out = MemorySink()
    run_local(bank([[event(1, "deposit", "a", 1.0)]], out))
    assert outcomes(out.rows) == [(1, True, 1.0, None)]
    assert "prices of a common machine are assumed" in caplog.text


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────


def flow_with(accounts: bool = True) -> tuple[Flow, Any, Any]:
    flow = Flow("f")
    table = flow.table("accounts", default=0.0) if accounts else Table("accounts", default=0.0)
    return flow, table, flow.source("events", ListSource([[]], COLUMNS))


def test_mistakes_are_refused_when_the_flow_is_built() -> None:
    flow, accounts, events = flow_with()
    deposit, transfer = transactions(accounts)

    @transaction
    def branches(t: Any, e: Any) -> None:
        if t.read(accounts, e.src) > 0:
            t.write(accounts, e.src, 0.0)

    @transaction
    def wrong_key(t: Any, e: Any) -> None:
        t.write(accounts, e.n, 0.0)

    @transaction
    def fails(t: Any, e: Any) -> None:
        raise ZeroDivisionError("oh")

    @transaction
    def clashes(t: Any, e: Any) -> Any:
        t.write(accounts, e.src, 0.0)
        return {"EUR": t.read(accounts, e.src)}

    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((), {"order_by": "n"}, "at least one transaction"),
        ((deposit, deposit), {"order_by": "n", "which": "kind"}, "two transactions are called 'deposit'"),
        ((deposit, transfer), {"order_by": "n"}, "set which="),
        ((deposit, transfer), {"order_by": "n", "which": "eur"}, "which='eur' must be a string"),
        ((deposit,), {"order_by": "eur"}, "order_by='eur' must be a timestamp or a whole number"),
        ((deposit,), {"order_by": "ts"}, "ts"),
        ((deposit,), {"order_by": "n", "domain": "eur"}, "eur"),
        ((branches,), {"order_by": "n"}, "if t.read"),
        ((wrong_key,), {"order_by": "n"}, "whose keys must be string"),
        ((fails,), {"order_by": "n"}, "cannot be traced: ZeroDivisionError"),
        ((clashes,), {"order_by": "n"}, "two columns called 'EUR'"),
        ((3,), {"order_by": "n"}, "a transaction must be a function of"),
    ]
    for handed, options, message in wrong:
        with pytest.raises((FlowError, FunctionError, SchemaError), match=message):
            events.transact("ledger", *handed, **options)
    assert list(flow._operators) == ["events"], "refused operators leave nothing behind"


def test_tables_belong_to_one_flow_and_one_operator() -> None:
    flow, accounts, events = flow_with()
    deposit, _ = transactions(accounts)
    events.transact("ledger", deposit, order_by="n").sink("out", NoopSink())
    with pytest.raises(FlowError, match="belongs to transact 'ledger'"):
        events.transact("again", deposit, order_by="n")
    with pytest.raises(FlowError, match="already"):
        flow.table("accounts", default=0.0)
    with pytest.raises(FlowError, match="already"):
        flow.table("ledger", default=0.0)
    with pytest.raises(FlowError, match="already"):
        events.map("accounts", lambda row: row)
    _, _, strangers = flow_with(accounts=False)
    with pytest.raises(FlowError, match="not one of this flow"):
        strangers.transact("ledger", deposit, order_by="n")


def test_only_event_time_has_late_rows() -> None:
    _, accounts, events = flow_with()
    deposit, _ = transactions(accounts)
    done = events.transact("ledger", deposit, order_by="n")
    with pytest.raises(FlowError, match="transacts in the order of event time"):
        done.late()
    assert Port("ledger", LATE) not in done._flow._operators["ledger"].ports


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**event(1, "deposit", "a", 1.0), "n": None}, "'n' is null, which cannot be what rows are ordered by"),
        (event(1, "withdraw", "a", 1.0), "names the transaction 'withdraw'; the transactions are deposit, transfer"),
        ({**event(1, "deposit", "a", 1.0), "eur": None}, "column 'eur' is null"),
        ({**event(1, "deposit", "a", 1.0), "src": None}, "column 'src' is null"),
        (event(1, "deposit", "x" * 600, 1.0), "at most"),
    ],
)
def test_bad_rows_fail_the_epoch_and_lose_nothing(row: Any, message: str, tmp_path: Any) -> None:
    out = MemorySink()
    with pytest.raises(JobFailed, match=message):
        run_local(bank([[event(0, "deposit", "ann", 3.0)], [row]], out), checkpoint=str(tmp_path))
    assert balances(str(tmp_path)) == {"ann": 3.0}


def test_a_function_that_fails_is_shown_with_its_traceback() -> None:
    flow, out = Flow("f"), MemorySink()
    table = flow.table("table", default=0.0)

    def breaks(x: float) -> float:
        raise ValueError("broken on purpose")

    @transaction
    def use(t: Any, e: Any) -> None:
        t.write(table, e.src, t.call(breaks, e.eur))

    flow.source("events", ListSource([[event(1, "", "a", 1.0)]], COLUMNS)).transact("t", use, order_by="n").sink(
        "o", out
    )
    with pytest.raises(JobFailed, match="broken on purpose"):
        run_local(flow)


def test_a_restart_with_another_layout_of_a_table_is_refused(tmp_path: Any) -> None:
    run_local(bank([[event(1, "deposit", "a", 1.0)]], MemorySink()), checkpoint=str(tmp_path))
    flow = Flow("bank")
    accounts = flow.table("accounts", key="string", value="bigint", default=0)

    @transaction
    def deposit(t: Any, e: Any) -> None:
        t.write(accounts, e.src, t.read(accounts, e.src) + 1)

    events = flow.source("events", ListSource([[event(2, "deposit", "a", 1.0)]], COLUMNS))
    events.transact("ledger", deposit, order_by="n").sink("out", NoopSink())
    with pytest.raises(CheckpointError, match="does not fit the flow"):
        run_local(flow, checkpoint=str(tmp_path))
    with_more = bank([[event(2, "deposit", "a", 1.0)]], MemorySink())
    with_more.table("another", default=1.0)
    run_local(with_more, checkpoint=str(tmp_path))
    assert balances(str(tmp_path)) == {"a": 2.0}


def test_an_unknown_table_is_named(tmp_path: Any) -> None:
    run_local(bank([[event(1, "deposit", "a", 1.0)]], MemorySink()), checkpoint=str(tmp_path))
    with pytest.raises(Exception, match="Did you mean 'accounts'"):
        read_state(str(tmp_path), "acounts")
    assert read_state(str(tmp_path), "accounts", ("a",)).to_pylist() == [{"key": "a", "value": 1.0}]
    assert read_state(str(tmp_path), "accounts", ("b",)).num_rows == 0
