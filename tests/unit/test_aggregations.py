"""Custom aggregations, quantiles, and totals of all rows: over restarts and faults, and what they refuse."""

from __future__ import annotations

import datetime as dt
import math
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from midstream import Flow, ListSource, MemorySink, Stream, agg, sessions, tumbling
from midstream.checkpoint.inspection import StateReader
from midstream.engine.aggregation.quantiles import ACCURACY, MOST_BUCKETS, Quantiles
from midstream.engine.aggregation.runs import runs_of
from midstream.errors import FlowError, FunctionError, JobFailed, SchemaError
from midstream.planner.stages import compile_plan
from midstream.testing import Faults, run_local

Row = dict[str, Any]
DDL = "user string, eur double, qty int, at timestamp"
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def row(i: int) -> Row:
    return {"user": f"u{i % 5}", "eur": float(i % 17), "qty": i % 4, "at": START + dt.timedelta(seconds=i)}


EPOCHS = [[row(400 * epoch + i) for i in range(400)] for epoch in range(3)]
ALL = [one for epoch in EPOCHS for one in epoch]


class Weighted:
    """The mean of one column weighted by another."""

    def zero(self) -> Any:
        return [0.0, 0]

    def add(self, total: Any, rows: pa.RecordBatch) -> Any:
        pairs = list(zip(rows["eur"].to_pylist(), rows["qty"].to_pylist(), strict=True))
        return [total[0] + sum(eur * qty for eur, qty in pairs), total[1] + sum(qty for _, qty in pairs)]

    def merge(self, one: Any, other: Any) -> Any:
        return [one[0] + other[0], one[1] + other[1]]

    def result(self, total: Any) -> Any:
        return total[0] / total[1] if total[1] else None


def weighted(rows: list[Row]) -> Any:
    return pytest.approx(sum(one["eur"] * one["qty"] for one in rows) / sum(one["qty"] for one in rows))


def rows_in(flow: Flow, epochs: list[list[Row]]) -> Stream:
    return flow.source("in", ListSource(epochs, DDL, event_time="at", partitions=3))


def price() -> Any:
    return agg.custom(Weighted(), "eur", "qty", returns="double")


# ── custom ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_custom_aggregation_covers_all_rows_in_spite_of_faults_and_a_restart(tmp_path: Path):
    def flow(epochs: list[list[Row]], out: MemorySink) -> Flow:
        made = Flow("f")
        rows_in(made, epochs).key_by("by_user", "user").aggregate("a", price=price(), n=agg.count()).sink("out", out)
        return made

    checkpoint, out = str(tmp_path / "c"), MemorySink()
    bad_luck = Faults(crash=0.1, speculate=0.1, repeat=0.2, lose_output=0.1)
    run_local(flow(EPOCHS[:2], MemorySink()), checkpoint=checkpoint, faults=bad_luck, seed=1)
    run_local(flow(EPOCHS[2:], out), checkpoint=checkpoint, faults=bad_luck, seed=2)
    by_user = {one["user"]: [each for each in ALL if each["user"] == one["user"]] for one in ALL}
    assert {one["user"]: (one["price"], one["n"]) for one in out.rows} == {
        user: (weighted(rows), len(rows)) for user, rows in by_user.items()
    }
    shown = {one["user"]: one["price"] for one in StateReader.at(checkpoint).table("a").to_pylist()}
    assert shown == {user: weighted(rows) for user, rows in by_user.items()}


def test_senders_add_up_custom_totals_before_the_exchange():
    flow = Flow("f")
    rows_in(flow, [[]]).key_by("by_user", "user").aggregate("a", price=price()).sink("out", MemorySink())
    assert flow.graph["a"].spec.combinable
    ordered = Flow("f")
    rows_in(ordered, [[]]).key_by("by_user", "user").aggregate("a", p=price(), f=agg.first_by("eur", "at")).sink(
        "out", MemorySink()
    )
    assert not ordered.graph["a"].spec.combinable


@pytest.mark.parametrize("window", [tumbling("5 minutes"), sessions("10 minutes")])
def test_a_custom_aggregation_over_windows(window: Any):
    flow, out = Flow("f"), MemorySink()
    rows_in(flow, EPOCHS).aggregate_all("a", window=window, price=price()).sink("out", out)
    run_local(flow, close_windows=True)
    for found in out.rows:
        inside = [one for one in ALL if found["window_start"] <= one["at"] < found["window_end"]]
        assert found["price"] == weighted(inside)
    assert len(out.rows) == (4 if window == tumbling("5 minutes") else 1)


class Missing:
    def zero(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: agg.custom(cast(Any, Missing()), "eur", returns="int"), FunctionError, "it lacks add, merge, result"),
        (lambda: agg.custom(cast(Any, Weighted), "eur", returns="int"), FunctionError, "give an instance of it"),
        (lambda: agg.custom(Weighted(), returns="int"), FlowError, "name at least one column"),
        (lambda: agg.custom(Weighted(), "eur", returns="flaot"), SchemaError, "did you mean 'float'"),
        (lambda: agg.collect("eur", limit=0), FlowError, "limit must be a whole number from 1 to 10000"),
        (lambda: agg.approx_quantile("eur", 1.5), FlowError, "q must be a number from 0 to 1"),
        (lambda: agg.approx_quantile("eur", []), FlowError, "q must be a number from 0 to 1"),
    ],
)
def test_invalid_parameters_of_an_aggregation_are_refused(make: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("aggregation", "message"),
    [
        (agg.custom(Weighted(), "eur", "qyt", returns="int"), r"there is no column 'qyt'; did you mean 'qty'\?"),
        (agg.stddev("user"), r"stddev\('user'\) cannot take a column of type string"),
        (agg.approx_quantile("user", 0.5), r"approx_quantile\('user'\) cannot take a column of type string"),
        (agg.collect_set("eur"), r"'eur' is double, which cannot be a key"),
        (agg.first_by("eur", "qty"), r"first_by needs a timestamp or a date, found int"),
    ],
)
def test_columns_that_an_aggregation_cannot_read_are_refused(aggregation: Any, message: str):
    with pytest.raises(FlowError, match=message):
        rows_in(Flow("f"), [[]]).key_by("by_user", "user").aggregate("a", x=aggregation)


def test_a_total_that_could_not_be_read_back_is_refused():
    class Dates(Weighted):
        def add(self, total: Any, rows: pa.RecordBatch) -> Any:
            return {"since": [START]}

    flow = Flow("f")
    made = agg.custom(Dates(), "eur", "qty", returns="double")
    rows_in(flow, EPOCHS[:1]).key_by("by_user", "user").aggregate("a", x=made).sink("out", MemorySink())
    with pytest.raises(JobFailed, match=r"a total of a custom aggregation is a datetime; it is stored, so"):
        run_local(flow)


# ── totals of all rows ────────────────────────────────────────────────────────────────────────────────────────────


def test_totals_of_all_rows_are_running_and_take_one_exchange(tmp_path: Path):
    flow, out = Flow("f"), MemorySink()
    rows_in(flow, EPOCHS).aggregate_all("a", n=agg.count(), eur=agg.sum("eur")).sink("out", out)
    assert len(compile_plan(flow.graph).exchanged) == 1
    run_local(flow, partitions=3, checkpoint=str(tmp_path / "c"), faults=Faults(crash=0.1, lose_output=0.1), seed=4)
    sums = [sum(one["eur"] for one in ALL[: 400 * epochs]) for epochs in (1, 2, 3)]
    assert [(one["n"], one["eur"]) for one in out.rows] == [(400, sums[0]), (800, sums[1]), (1200, sums[2])]
    assert StateReader.at(str(tmp_path / "c")).table("a").to_pylist() == [{"n": 1200, "eur": sums[2]}]


@pytest.mark.parametrize("window", [None, tumbling("1 hour")])
def test_rows_can_be_counted_without_any_of_their_columns(window: Any):
    flow, out = Flow("f"), MemorySink()
    rows_in(flow, EPOCHS[:1]).aggregate_all("a", window=window, n=agg.count()).sink("out", out)
    run_local(flow, close_windows=window is not None)
    assert [one["n"] for one in out.rows] == [400]


def test_invalid_totals_of_all_rows_are_refused():
    rows = rows_in(Flow("f"), [[]])
    with pytest.raises(FlowError, match=r"aggregate 'a': name at least one aggregation"):
        rows.aggregate_all("a")
    with pytest.raises(FlowError, match=r"time='at' needs a window"):
        rows.aggregate_all("a", time="at", n=agg.count())
    rows.aggregate_all("a", n=agg.count())
    with pytest.raises(FlowError, match=r"an operator 'a' already"):
        rows.aggregate_all("a", n=agg.count())


# ── quantiles ─────────────────────────────────────────────────────────────────────────────────────────────────────


def sketched(values: list[float], fractions: tuple[float, ...], parts: int = 1) -> list[float]:
    sketch = Quantiles(fractions, many=True)
    cuts = [values[i::parts] for i in range(parts)]
    made = []
    for cut in cuts:
        one_run = runs_of(np.zeros(len(cut), np.int64), 1)
        stored = sketch.to_values(sketch.of_rows(pa.array(cut, pa.float64()), np.arange(len(cut)), one_run))
        made.append(sketch.of_values(stored))
    whole = tuple(pa.concat_arrays([one[i] for one in made]) for i in range(2))
    combined = sketch.combined(whole, runs_of(np.zeros(len(made), np.int64), 1))
    found: list[float] = sketch.results(combined).to_pylist()[0]
    return found


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_a_quantile_is_within_its_accuracy_however_rows_were_cut(parts: int, spread: float):
    rng = random.Random(7)
    values = [rng.choice((-1, 1, 1)) * rng.lognormvariate(0, spread) for _ in range(3000)] + [0.0] * 50
    fractions = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)
    exact = [sorted(values)[max(math.ceil(q * len(values)), 1) - 1] for q in fractions]
    assert sketched(values, fractions, parts) == pytest.approx(exact, rel=ACCURACY * 1.0001)
    assert sketched(values, fractions, parts) == sketched(values[::-1], fractions, 3)


def test_extremes_of_a_quantile():
    values = [math.inf, -math.inf, math.nan, 0.0, -0.0, 5e-324, 1.7e308]
    low, *middle, high = sketched(values, (0.0, 0.5, 6 / 7, 1.0))
    assert (low, middle[1]) == (-math.inf, math.inf)
    assert math.isnan(high)


def test_a_sketch_of_a_wide_range_keeps_its_upper_quantiles_and_its_size():
    values = [10.0 ** (power / 20) for power in range(-6000, 6001)]
    found = sketched(values, (0.0, 0.99, 1.0), parts=5)
    assert found[1:] == pytest.approx([10.0**294, 10.0**300], rel=0.06), "0.06: between two of the values"
    sketch = Quantiles((0.5,), many=False)
    made = sketch.of_rows(pa.array(values), np.arange(len(values)), runs_of(np.zeros(len(values), np.int64), 1))
    assert len(made[0][0]) <= MOST_BUCKETS


def test_the_state_of_a_sketch_never_changes():
    sketch = Quantiles((0.5,), many=False)
    values = pa.array([1.0, 1.0, -250.5, 0.0, math.nan, math.inf])
    made = sketch.of_rows(values, np.arange(6), runs_of(np.zeros(6, np.int64), 1))
    [(buckets, counts)] = sketch.to_values(made)
    assert np.frombuffer(buckets, "<i4").tolist() == [-65813, 0, 65536, 1 << 18, 1 << 19]
    assert np.frombuffer(counts, "<i8").tolist() == [1, 1, 2, 1, 1]
