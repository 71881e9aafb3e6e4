"""Aggregations: results at the limits of their types, what they refuse, and what they leave in state."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from midstream.data.times import EpochTimes
from midstream.engine.aggregation.runs import Runs, order_by, runs_of
from midstream.engine.aggregation.totals import TotalsOf
from midstream.errors import OperatorFailed, StateError
from midstream.flow import aggregations as agg
from midstream.flow.aggregations import Aggregation, result_type
from midstream.flow.model import Operator
from midstream.flow.spec import LATE
from midstream.flow.windows import Session, Sliding, Tumbling
from midstream.operators.aggregate import Aggregate, instantiate_aggregate
from midstream.operators.distinct import Distinct, instantiate_distinct
from tests.epochs import Epochs, cut, epochs, small_blocks

TIMES = EpochTimes(clock=0)


def over(values, aggregation: Aggregation, kind: pa.DataType | None = None):
    """The result of one aggregation over all values, half of which have been in state in between."""
    rows = pa.record_batch({"v": pa.array(values, kind)})
    totals = TotalsOf([("r", aggregation)], rows.schema, "aggregate 'a'")
    middle = len(values) // 2
    parts = [rows.slice(0, middle), rows.slice(middle)]
    made = [
        totals.of_rows(part, np.arange(part.num_rows), runs_of(np.zeros(part.num_rows, np.int64), 1))
        for part in parts
        if part.num_rows
    ]
    stored = totals.unpack(totals.pack(made[0]))[0]
    whole = totals.joined([stored, *made[1:]])
    (result,) = totals.results(totals.combined(whole, Runs(np.arange(len(made)), np.zeros(1, np.int64))))
    assert result.type == result_type(aggregation, rows.schema, "test")
    result.validate(full=True)
    return result.to_pylist()[0]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (agg.count("v"), 0),
        (agg.sum("v"), None),
        (agg.min("v"), None),
        (agg.max("v"), None),
        (agg.mean("v"), None),
        (agg.approx_distinct("v"), 0),
        (agg.last("v", 2), []),
        (agg.stddev("v"), None),
        (agg.variance_pop("v"), None),
        (agg.collect("v"), []),
        (agg.collect_set("v"), []),
        (agg.approx_quantile("v", 0.5), None),
        (agg.approx_quantile("v", [0.5]), None),
    ],
)
@pytest.mark.parametrize("kind", [pa.int32(), pa.decimal128(5, 2)])
def test_an_aggregate_of_only_nulls_is_that_of_no_values(aggregation, expected, kind):
    assert over([None, None, None], aggregation, kind) == expected


BIG = 2**63 - 1


def test_only_the_final_sum_of_integers_has_to_fit():
    assert over([BIG, BIG, -BIG, -2], agg.sum("v")) == BIG - 2
    assert over([-(2**63), -1, 1], agg.sum("v")) == -(2**63)
    assert over([BIG, BIG, BIG, BIG], agg.mean("v")) == pytest.approx(float(BIG))


@pytest.mark.parametrize("kind", [pa.int64(), pa.decimal128(18, 0), pa.decimal128(38, 0), pa.float64()])
@pytest.mark.parametrize("values", [[-1, 0], [1, 2, -4], [2**40, -3], [-(2**40), 3], [2**52, -(2**52)]])
def test_means_are_as_exact_as_a_double(kind, values):
    assert over(values, agg.mean("v"), kind) == pytest.approx(sum(values) / len(values), rel=1e-15)


@pytest.mark.parametrize("values", [[BIG, 1], [-(2**63), -1], [BIG] * 6])
def test_a_sum_of_integers_beyond_64_bits_is_an_error(values):
    with pytest.raises(StateError, match=rf"column 'r' of the key .*: {sum(values)} does not fit into int64"):
        over(values, agg.sum("v"))


def test_the_error_names_the_key():
    batch = pa.record_batch({"k": ["ann", "bob", "bob"], "x": [1, BIG, BIG]})
    with epochs() as world, pytest.raises(StateError, match=r"aggregate 'op': column 'r' of the key \('bob',\)"):
        run(world, batch, ("r", agg.sum("x")))


LARGEST = Decimal("99999999999999999999999999999999999.999")
SMALLEST = LARGEST.copy_negate()  # unary minus would round to 28 digits


def test_sums_of_decimals_are_exact_up_to_38_digits():
    small = Decimal("0.001")
    assert over([LARGEST, -small, small], agg.sum("v"), pa.decimal128(38, 3)) == LARGEST
    assert over([SMALLEST, LARGEST, SMALLEST], agg.sum("v"), pa.decimal128(38, 3)) == SMALLEST
    assert over([Decimal("1.10"), None, Decimal("-3.35")], agg.sum("v"), pa.decimal128(9, 2)) == Decimal("-2.25")
    assert over([Decimal("1.10"), Decimal("-3.35")], agg.mean("v"), pa.decimal128(9, 2)) == pytest.approx(-1.125)
    for values in ([LARGEST, small], [SMALLEST, -small], [LARGEST] * 5):
        with pytest.raises(StateError, match=r"does not fit into decimal128\(38, 3\)"):
            over(values, agg.sum("v"), pa.decimal128(38, 3))


def test_nan_spoils_sums_and_is_the_largest_number():
    nan, inf = math.nan, math.inf
    assert math.isnan(over([1.0, nan, 2.0], agg.sum("v")))
    assert math.isnan(over([inf, 1.0, -inf], agg.mean("v")))
    assert over([nan, 2.0, nan, 1.0, inf], agg.min("v")) == 1.0
    assert math.isnan(over([nan, 2.0, nan, inf], agg.max("v")))
    assert over([None, 2.0, None, -inf], agg.max("v")) == 2.0
    assert over([None, -inf], agg.max("v")) == -inf
    assert math.isnan(over([nan, None, nan], agg.max("v")))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int8(), [3, -128, 127, None]),
        (pa.int64(), [-(2**63), BIG, 0]),
        (pa.float32(), [0.5, -2.5, None]),
        (pa.string(), ["b", "", "ä", None, "ab"]),
        (pa.binary(), [b"b", b"", b"\xff", None, b"ab"]),
        (pa.bool_(), [True, None, False]),
        (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
        (pa.timestamp("us", "UTC"), [dt.datetime(2024, 2, 29, tzinfo=dt.UTC), dt.datetime(1900, 1, 1, tzinfo=dt.UTC)]),
        (pa.timestamp("us"), [dt.datetime(2024, 2, 29), None, dt.datetime(1900, 1, 1)]),
        (pa.decimal128(38, 3), [LARGEST, SMALLEST, None, Decimal(0)]),
    ],
)
def test_extremes_keep_the_type_of_their_column(kind, values):
    known = [value for value in values if value is not None]
    assert over(values, agg.min("v"), kind) == min(known)
    assert over(values, agg.max("v"), kind) == max(known)
    assert over(values, agg.last("v", 2), kind) == known[-2:]


def test_last_keeps_values_of_any_type():
    kind = pa.struct({"at": pa.timestamp("us"), "tags": pa.list_(pa.string())})
    values = [{"at": dt.datetime(2024, 1, day), "tags": ["a", None] * day} for day in (1, 2, 3)]
    assert over([values[0], None, *values[1:]], agg.last("v", 2), kind) == values[1:]
    far = pa.array([2**61, 2**61 + 1, 5], pa.timestamp("us"))  # years outside Python's range
    totals = TotalsOf([("r", agg.last("v", 2))], pa.schema({"v": far.type}), "aggregate 'a'")
    made = totals.of_rows(pa.record_batch({"v": far}), np.arange(3), runs_of(np.zeros(3, np.int64), 1))
    (result,) = totals.results(totals.unpack(totals.pack(made))[0])
    assert result.flatten().view(pa.int64()).to_pylist() == [2**61 + 1, 5]


@pytest.mark.parametrize("count", [1, 2, 10, 100, 1000, 2600, 5000, 50_000, 300_000])
def test_approx_distinct_is_close_to_the_true_count(count):
    values = np.repeat(np.arange(count), 1 + (count < 1000))
    assert over(values, agg.approx_distinct("v")) == pytest.approx(count, rel=0.08)


def test_the_state_of_approx_distinct_never_changes():
    totals = TotalsOf([("r", agg.approx_distinct("v"))], pa.schema({"v": pa.int64()}), "aggregate 'a'")
    rows = pa.record_batch({"v": [1, 2, 3, 2]})
    (stored,) = totals.pack(totals.of_rows(rows, np.arange(4), runs_of(np.zeros(4, np.int64), 1)))
    assert np.array([116 << 6 | 3, 580 << 6 | 3, 605 << 6 | 2], "<u2").tobytes() in stored
    assert b"\x03\x1d\x03\x91B\x97" in stored


@pytest.mark.parametrize("count", [3, 2**16, 2**16 + 1, 2**33])
def test_ordering_by_codes_is_a_stable_sort(count):
    codes = np.random.default_rng(count).integers(0, count, 5000)
    assert order_by(codes, count).tolist() == np.argsort(codes, kind="stable").tolist()


# ── in an operator ──────────────────────────────────────────────────────────────────────────────────────────────────


def operator_of(takes: pa.Schema, columns, window=None) -> Operator:
    bounds = {} if window is None else {"window_start": takes.field("t").type, "window_end": takes.field("t").type}
    results = {name: result_type(one, takes, "test") for name, one in columns}
    schema = pa.schema({"k": takes.field("k").type} | bounds | results)
    return Operator("op", Aggregate(("k",), tuple(columns), window, "t" if window else None), (), schema)


def run(world: Epochs, batch: pa.RecordBatch, *columns, window=None, times=TIMES, sizes=()):
    operator, takes = operator_of(batch.schema, columns, window), batch.schema
    assert isinstance(operator.spec, Aggregate)
    spec = operator.spec
    (emitted,) = world.run(
        lambda state, times: instantiate_aggregate(operator, spec, takes, state, times), {0: cut(batch, sizes)}, times
    )
    return emitted


def keyed(**columns):
    made = {
        name: pa.array(values, pa.timestamp("us")) if name == "t" else pa.array(values)
        for name, values in columns.items()
    }
    return pa.record_batch(made)


def test_an_epoch_without_rows_emits_nothing_and_stores_nothing():
    with epochs() as world:
        for window in (None, Tumbling(5), Sliding(6, 3), Session(5)):
            empty = keyed(k=["a"], t=[1]).slice(0, 0)
            assert run(world, empty, ("n", agg.count()), window=window, times=EpochTimes(0, 1, 2)) == {}
        assert world.stored() == {}


@pytest.mark.parametrize(
    "columns",
    [
        [("n", agg.sum("x"))],
        [("n", agg.count()), ("m", agg.count())],
        [("n", agg.count("x"))],
        [("n", agg.last("x", 1))],
    ],
)
def test_state_of_other_aggregations_is_refused(columns):
    with epochs() as world:
        batch = pa.record_batch({"k": ["ann"], "x": [1]})
        run(world, batch, ("n", agg.count()))
        with pytest.raises(StateError, match=r"aggregate 'op': the stored .* written with other aggregat"):
            run(world, batch, *columns)


def test_state_of_other_windows_is_refused():
    with epochs() as world:
        batch = keyed(k=["ann"], t=[1])
        run(world, batch, ("n", agg.count()), window=Tumbling(10))
        with pytest.raises(StateError, match="written with other aggregations or windows"):
            run(world, batch, ("n", agg.count()), window=Sliding(10, 5), times=EpochTimes(0, None, 20))


def test_results_may_be_renamed():
    with epochs() as world:
        batch = pa.record_batch({"k": ["ann"]})
        run(world, batch, ("n", agg.count()))
        assert run(world, batch, ("visits", agg.count())) == {"": [{"k": "ann", "visits": 2}]}


@pytest.mark.parametrize("window", [Tumbling(10), Sliding(10, 5), Session(5)])
def test_windows_that_open_and_close_within_an_epoch_leave_no_state(window):
    with epochs() as world:
        emitted = run(
            world, keyed(k=["a", "b"], t=[1, 2]), ("n", agg.count()), window=window, times=EpochTimes(0, None, 100)
        )
        assert sum(row["n"] for row in emitted[""]) == 2 * (2 if isinstance(window, Sliding) else 1)
        assert world.stored() == {}
        assert world.lineage.bins() == []


def test_a_sliding_row_counts_in_the_windows_that_are_open():
    with epochs() as world:
        batch = keyed(k=["a", "a"], t=[12, 3])
        times = EpochTimes(0, late_before=20, watermark=100)
        emitted = run(world, batch, ("n", agg.count()), window=Sliding(15, 5), times=times)
        assert [(row["window_end"].microsecond, row["n"]) for row in emitted[""]] == [(25, 1)]
        assert [row["t"].microsecond for row in emitted[LATE]] == [3]


def test_windows_are_aligned_before_1970_too():
    with epochs() as world:
        times = EpochTimes(0, None, 100)
        emitted = run(world, keyed(k=["a"], t=[-1]), ("n", agg.count()), window=Tumbling(10), times=times)
        start, end = dt.datetime(1970, 1, 1) - dt.timedelta(microseconds=10), dt.datetime(1970, 1, 1)
        assert emitted == {"": [{"k": "a", "window_start": start, "window_end": end, "n": 1}]}


def test_a_row_exactly_a_gap_later_begins_a_session():
    with epochs() as world:
        times = EpochTimes(0, None, 100)
        emitted = run(world, keyed(k=["a"] * 3, t=[4, 0, 9]), ("n", agg.count()), window=Session(5), times=times)
        assert [(row["window_start"].microsecond, row["window_end"].microsecond, row["n"]) for row in emitted[""]] == [
            (0, 9, 2),
            (9, 14, 1),
        ]


def test_a_session_continues_from_its_latest_time_not_its_last_arrival():
    with epochs() as world:
        count = ("n", agg.count())
        run(world, keyed(k=["a"] * 6, t=[0, 4, 8, 12, 16, 20]), count, window=Session(5))
        times = EpochTimes(0, None, 100)
        emitted = run(world, keyed(k=["a"] * 3, t=[2, 24, 29]), count, window=Session(5), times=times)
        assert [(row["window_start"].microsecond, row["n"]) for row in emitted[""]] == [(0, 8), (29, 1)]


@pytest.mark.parametrize("window", [None, Tumbling(100), Sliding(100, 10), Session(30)])
def test_the_sum_of_floats_does_not_depend_on_the_slices(window):
    random = np.random.default_rng(5)
    floats = random.normal(size=1000) * 10.0 ** random.integers(-8, 8, 1000)
    batch = keyed(k=random.integers(0, 3, 1000), t=random.integers(0, 300, 1000), x=floats)
    sums = []
    for sizes in ((), (1,) * 999, (7,) * 100, (64, 1, 500)):
        with epochs() as world, small_blocks(64):
            times = EpochTimes(0, 50, 1000)
            sums.append(run(world, batch, ("sum", agg.sum("x")), window=window, times=times, sizes=sizes)[""])
    assert len(sums[0]) >= 3
    assert all(other == sums[0] for other in sums)


def test_an_old_row_is_not_late_if_it_belongs_to_an_open_session():
    with epochs() as world:
        count = ("n", agg.count())
        run(world, keyed(k=["a"], t=[18]), count, window=Session(10), times=EpochTimes(0, None, 20))
        times = EpochTimes(0, late_before=20, watermark=40)
        emitted = run(world, keyed(k=["a", "a", "b"], t=[1, 9, 9]), count, window=Session(10), times=times)
        assert [(row["window_start"].microsecond, row["n"]) for row in emitted[""]] == [(1, 3)]
        assert [row["k"] for row in emitted[LATE]] == ["b"]


@pytest.mark.parametrize("window", [Tumbling(10), Sliding(10, 5), Session(5)])
@pytest.mark.parametrize(("time", "found"), [(None, "column 't' is null"), (2**62, "too far for an event time")])
def test_a_row_without_a_time_is_refused(window, time, found):
    batch = keyed(k=["a", "b"], t=[1, time])
    with epochs() as world, pytest.raises(OperatorFailed, match=found) as caught:
        run(world, batch, ("n", agg.count()), window=window)
    assert caught.value.operator == "op"
    assert caught.value.row == ({"k": "b", "t": None} if time is None else None)  # Python cannot represent such a time


@pytest.mark.parametrize("window", [None, Tumbling(10), Session(5)])
def test_a_row_without_a_key_is_refused(window):
    with epochs() as world, pytest.raises(OperatorFailed, match=r"column 'k' is null, which cannot be a key") as caught:
        run(world, keyed(k=["a", None], t=[1, 2], x=[1, 2]), ("n", agg.count()), window=window)
    assert caught.value.row["x"] == 2


def test_a_huge_key_is_refused_with_its_row():
    batch = pa.record_batch({"k": ["a", "a", "x" * 500]})
    with epochs() as world, pytest.raises(OperatorFailed, match=r"the key \(k\) of row 2 takes 500 bytes") as caught:
        run(world, batch, ("n", agg.count()))
    assert caught.value.row == {"k": "x" * 500}


def test_distinct_needs_times_only_to_expire_keys():
    batch = keyed(k=["a", "b"], t=[1, None])
    for spec, refuses in ((Distinct(("k",)), False), (Distinct(("k",), "t", 5), True)):
        operator = Operator("once", spec, (), batch.schema)
        with epochs() as world:

            def make(state, times, operator=operator, spec=spec):
                return instantiate_distinct(operator, spec, batch.schema, state, times)

            if refuses:
                with pytest.raises(OperatorFailed, match="column 't' is null, which cannot be an event time"):
                    world.run(make, {0: [batch]}, TIMES)
            else:
                assert [row["k"] for row in world.run(make, {0: [batch]}, TIMES)[0][""]] == ["a", "b"]


@pytest.mark.long
def test_more_keys_than_a_block_has_rows():
    numbers = np.random.default_rng(7).integers(0, 150_000, 300_000)
    expected = np.bincount(numbers)
    with epochs() as world:
        batch = pa.record_batch({"k": numbers, "x": np.ones(len(numbers), np.int64)})
        run(world, batch, ("n", agg.count()), ("sum", agg.sum("x")))
        emitted = run(world, batch, ("n", agg.count()), ("sum", agg.sum("x")))[""]
    assert len(emitted) == np.count_nonzero(expected)
    assert all(row["n"] == row["sum"] == 2 * expected[row["k"]] for row in emitted)
