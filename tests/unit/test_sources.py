"""The guarantees of sources: the same rows however the stream is cut, and clear errors."""

from __future__ import annotations

import datetime as dt
import pickle
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import FlowError, SchemaError, SourceError
from midstream.flow.sources import BLOCK, Constant, GeneratorSource, ListSource, SquareWave, Step
from tests.examples import examples

UTC = dt.UTC


def draws(indexes: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    return {"index": indexes, "draw": rng.random(len(indexes))}


def generator(**options: Any) -> GeneratorSource:
    options = {"make": draws, "returns": "index bigint, draw double", "rate": 1000, **options}
    return GeneratorSource(**options)


def rows(source: GeneratorSource, start: int, end: int, start_us: int = 0) -> pa.Table:
    return pa.Table.from_batches(source.rows(start, end, start_us), source.schema)


# --- schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), 1e-9, 1e10, "fast", True, None])
def test_a_constant_rate_must_be_a_sensible_positive_number(rate: Any):
    with pytest.raises(FlowError, match="Constant"):
        Constant(rate)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), "every rate is 0"),
        (((0, 0), (1, 0)), "every rate is 0"),
        (((0, 1), (0, 2)), "do not increase"),
        (((5, 1), (1, 2)), "do not increase"),
        (((-1, 1),), "at least 0"),
        (((0, -1),), "a rate is -1"),
        (((0, float("nan")),), "finite"),
        (((float("nan"), 1),), "finite"),
        ((1, 2), "give pairs"),
    ],
)
def test_bad_steps_are_refused(steps: Any, message: str):
    with pytest.raises(FlowError, match=message):
        Step(steps)


@pytest.mark.parametrize(
    ("wave", "message"),
    [
        ({"low": 0, "high": 0, "period_s": 1}, "every rate is 0"),
        ({"low": 2, "high": 1, "period_s": 1}, "high must not be less"),
        ({"low": -1, "high": 1, "period_s": 1}, "a rate is -1"),
        ({"low": 0, "high": 1, "period_s": 0}, "period is 0"),
        ({"low": 0, "high": 1, "period_s": float("nan")}, "finite"),
        ({"low": 0, "high": 1, "period_s": 1, "duty": 0}, "duty is 0"),
        ({"low": 0, "high": 1, "period_s": 1, "duty": 1}, "duty is 1"),
    ],
)
def test_bad_waves_are_refused(wave: dict[str, float], message: str):
    with pytest.raises(FlowError, match=message):
        SquareWave(**wave)


def test_nothing_is_due_before_the_first_step_or_while_the_rate_is_zero():
    schedule = Step(((2, 1), (4, 0), (10, 1)))
    assert schedule.time_of(np.arange(4)).tolist() == [2_000_000, 3_000_000, 10_000_000, 11_000_000]
    assert [schedule.count_until(s * 1_000_000) for s in (2, 3, 4, 10, 11)] == [0, 1, 2, 2, 3]


def test_a_month_at_an_awkward_rate_does_not_drift():
    month_us = 30 * 86_400 * 1_000_000
    assert Constant(333.3).count_until(month_us) == 3333 * 30 * 86_400 // 10


def test_schedules_refuse_negative_indexes():
    with pytest.raises(FlowError, match="start at 0"):
        Constant(1).time_of(np.array([-1]))


# --- the generator -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3 * BLOCK), min_size=2, max_size=6).map(sorted))
@examples(25)
def test_an_event_is_the_same_however_the_stream_is_cut(cuts: list[int]):
    source = generator(seed=7)
    whole = rows(source, cuts[0], cuts[-1])
    pieces = [rows(source, a, b) for a, b in pairwise(cuts)]
    assert pa.concat_tables(pieces).combine_chunks().equals(whole.combine_chunks())


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(1, 7))
def test_partitions_share_an_epoch_evenly_and_in_order(start: int, count: int, partitions: int):
    shares = generator(partitions=partitions).split(start, start + count)
    assert len(shares) == partitions
    assert (shares[0][0], shares[-1][1]) == (start, start + count)
    assert all(one[1] == next_one[0] for one, next_one in pairwise(shares))
    assert all(abs((last - first) - count / partitions) <= 1 + count / partitions / 4 for first, last in shares)


def test_a_large_epoch_is_cut_at_block_boundaries():
    (_, cut), _ = generator(partitions=2).split(100, 100 + 20 * BLOCK)
    assert cut % BLOCK == 0


def test_the_time_column_holds_the_scheduled_time():
    start = dt.datetime(2024, 5, 1, tzinfo=UTC)
    source = generator(rate=Step(((0, 1000), (1, 10))), time_column="due")
    table = rows(source, 999, 1002, start_us=int(start.timestamp()) * 1_000_000)
    assert source.event_time == "due"
    assert table.schema.field("due").type == pa.timestamp("us", tz="UTC")
    assert table["due"].to_pylist() == [start + dt.timedelta(milliseconds=ms) for ms in (999, 1000, 1100)]


def test_different_seeds_and_blocks_draw_different_values():
    one, other = rows(generator(seed=1), 0, 2 * BLOCK), rows(generator(seed=2), 0, 2 * BLOCK)
    assert one["draw"] != other["draw"]
    assert one["draw"][:BLOCK].to_pylist() != one["draw"][BLOCK:].to_pylist()


def test_batches_are_made_one_at_a_time_and_stay_small():
    calls = []

    def counted(indexes: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
        calls.append(len(indexes))
        return draws(indexes, rng)

    batches = generator(make=counted).rows(10, 10**12, 0)
    first = next(batches)
    assert first.num_rows == BLOCK - 10
    assert calls == [BLOCK]


def test_make_may_return_a_batch_or_columns_of_any_array_like_kind():
    as_batch = generator(
        make=lambda index, rng: pa.record_batch({"n": index, "s": ["x"] * BLOCK}), returns="s string, n bigint"
    )
    as_columns = generator(
        make=lambda index, rng: {"n": pa.array(index), "s": np.full(BLOCK, "x")}, returns="s string, n bigint"
    )
    assert rows(as_batch, 3, 5) == rows(as_columns, 3, 5)
    assert rows(as_batch, 3, 5).select(["s", "n"]).to_pylist() == [{"s": "x", "n": 3}, {"s": "x", "n": 4}]


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        ({"index": [1, 2], "draw": [1.0, 2.0]}, SourceError, f"2 rows for {BLOCK} indexes"),
        ({"index": [1, 2], "draw": [1.0]}, SchemaError, "differ in length"),
        ({"index": [1]}, SchemaError, "missing: draw"),
        ({"index": [1], "draw": [1.0], "extra": 5}, SchemaError, "not declared: extra"),
        ({"index": ["a"], "draw": [1.0]}, SchemaError, "'index' is declared bigint"),
        ({"index": [1.5], "draw": [1.0]}, SchemaError, "'index' is declared bigint"),
        ({"index": 5, "draw": [1.0]}, SchemaError, "'index' is declared bigint"),
        ([1, 2], SchemaError, "returned list"),
    ],
)
def test_the_result_of_make_is_checked_against_the_declaration(made: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        rows(generator(make=lambda index, rng: made), 0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make": 5}, "make is 5"),
        ({"rate": 0}, "every rate is 0"),
        ({"rate": "1"}, "finite number"),
        ({"partitions": 0}, "partitions is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"max_rows_per_epoch": 1.5}, "max_rows_per_epoch is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"time_column": "Draw"}, "leave it out of returns"),
        ({"time_column": ""}, "leave it out of returns"),
        ({"returns": "a wrong_type"}, "wrong_type"),
    ],
)
def test_bad_options_are_refused_when_the_source_is_described(options: dict[str, Any], message: str):
    with pytest.raises(FlowError, match=message):
        generator(**options)


def test_the_stream_ends_at_the_limit_or_where_the_schedule_ends():
    ending = Step(((0, 10), (5, 0)))
    assert generator().total is None
    assert generator(limit=7).total == 7
    assert generator(rate=ending).total == 50
    assert generator(rate=ending, limit=7).total == 7
    assert generator(rate=ending, limit=99).total == 50
    assert [generator(limit=7).due(us) for us in (-1, 0, 5_000, 10**9)] == [0, 0, 5, 7]


def test_asking_for_an_event_that_is_never_due_is_an_error():
    with pytest.raises(SourceError, match="event 50 is never due; the stream has 50 events"):
        rows(generator(rate=Step(((0, 10), (5, 0)))), 49, 51)


def test_a_source_is_frozen_and_picklable():
    source = generator(rate=5)
    with pytest.raises(AttributeError):
        source.seed = 3  # type: ignore[misc]
    assert rows(cloudpickle.loads(cloudpickle.dumps(source)), 0, 9) == rows(source, 0, 9)


# --- the list ----------------------------------------------------------------------------------------------------


def test_a_list_source_holds_its_epochs():
    source = ListSource([[{"n": 1}, {"n": 2}], [], [{"n": 3, "s": "x"}]], "n int, s string", partitions=2)
    assert [epoch.to_pylist() for epoch in source.epochs] == [
        [{"n": 1, "s": None}, {"n": 2, "s": None}],
        [],
        [{"n": 3, "s": "x"}],
    ]
    assert pickle.loads(pickle.dumps(source)) == source


@given(st.integers(0, 30), st.integers(1, 6))
def test_the_partitions_of_an_epoch_make_up_the_epoch(count: int, partitions: int):
    source = ListSource([[{"n": n} for n in range(count)]], "n int", partitions=partitions)
    shares = [source.batches(0, partition) for partition in range(partitions)]
    assert [row["n"] for share in shares for row in share.to_pylist()] == list(range(count))
    assert max(share.num_rows for share in shares) - min(share.num_rows for share in shares) <= 1


def test_event_time_must_be_a_timestamp_column():
    at = dt.datetime(2024, 1, 1, tzinfo=UTC)
    assert ListSource([[{"t": at}]], "t timestamp", event_time="t").epochs[0].to_pylist() == [{"t": at}]
    with pytest.raises(SchemaError, match="is bigint; it must be timestamp"):
        ListSource([], "t bigint", event_time="t")
    with pytest.raises(SchemaError, match="no column 'when'"):
        ListSource([], "t timestamp", event_time="when")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"n": "one"}, "epoch 0: column 'n' is declared int"),
        ({"n": 2**40}, "epoch 0: column 'n' is declared int"),
        ({"n": 1.5}, "epoch 0: column 'n' is declared int"),
        ({"n": None}, "NOT NULL"),
        ({}, "NOT NULL"),
        ({"n": 1, "m": 2}, "no column 'm'"),
        ((1,), "give dicts"),
    ],
)
def test_rows_that_do_not_fit_the_schema_are_refused(row: Any, message: str):
    with pytest.raises(SchemaError, match=message):
        ListSource([[row]], "n int NOT NULL")


@pytest.mark.parametrize("count", [0, -1, "two"])
def test_sizes_must_be_positive(count: Any):
    with pytest.raises(SourceError, match="epoch_rows"):
        ListSource.of([], schema="n int", epoch_rows=count)
    with pytest.raises(SourceError, match="partitions"):
        ListSource([], "n int", partitions=count)


def test_both_are_stream_sources():
    sources: list[GeneratorSource | ListSource] = [generator(), ListSource([], "n int")]
    assert [source.event_time for source in sources] == ["event_time", None]
    assert [source.schema.names for source in sources] == [["index", "draw", "event_time"], ["n"]]
