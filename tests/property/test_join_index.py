from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.data import lookup_index as join_index
from midstream.data.lookup_index import LookupIndex
from midstream.errors import SchemaError

keys = st.tuples(st.none() | st.integers(0, 4), st.none() | st.sampled_from(["", "a", "b", "a\0"]))
tables = st.lists(keys, max_size=12)
chunk_sizes = st.integers(1, 12)


def nested_loop(left, right):
    """All pairs with equal keys without nulls, by left row and then by right row."""
    return [
        (i, j)
        for i, mine in enumerate(left)
        for j, other in enumerate(right)
        if mine == other and None not in mine
    ]  # fmt: skip


def first_duplicate(right):
    return next((key for key in right if None not in key and right.count(key) > 1), None)


def table_of(rows, chunk_size=12) -> pa.Table:
    schema = pa.schema([("n", pa.int64()), ("s", pa.string())])
    chunks = [
        pa.RecordBatch.from_pylist([{"n": n, "s": s} for n, s in rows[at : at + chunk_size]], schema=schema)
        for at in range(0, len(rows), chunk_size)
    ]
    return pa.Table.from_batches(chunks, schema=schema)


def batch_of(rows) -> pa.RecordBatch:
    """A slice of a larger batch, with narrower integers and other string types than the table."""
    rows = [(9, "x"), *rows, (9, "x")]
    batch = pa.record_batch(
        {"t": pa.array([s for _, s in rows], pa.large_string()), "m": pa.array([n for n, _ in rows], pa.int8())}
    )
    return batch[1:-1]


def pairs(index: LookupIndex, batch: pa.RecordBatch, on) -> list[tuple[int, int]]:
    left, right = index.probe(batch, on)
    assert left.dtype == right.dtype == np.int64
    return list(zip(left.tolist(), right.tolist(), strict=True))


@given(tables, tables, chunk_sizes)
def test_probing_finds_what_a_nested_loop_finds_in_the_same_order(left, right, chunk_size):
    index = LookupIndex.build(table_of(right, chunk_size), ["n", "s"])
    assert pairs(index, batch_of(left), ["m", "t"]) == nested_loop(left, right)
    assert index.duplicates() == first_duplicate(right)


@pytest.fixture(scope="class")
def all_hashes_collide():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join_index, "hash_columns", lambda batch, on: np.zeros(batch.num_rows, np.uint64))
        yield


@pytest.mark.usefixtures("all_hashes_collide")
class TestWhenAllHashesCollide:
    @given(left=tables, right=tables, portion=st.integers(1, 40))
    def test_keys_with_colliding_hashes_are_compared_exactly(self, left, right, portion):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(join_index, "_PAIRS", portion)
            index = LookupIndex.build(table_of(right), ["n", "s"])
            assert pairs(index, batch_of(left), ["m", "t"]) == nested_loop(left, right)
            assert index.duplicates() == first_duplicate(right)


@pytest.mark.parametrize(
    ("right", "left"),
    [
        (pa.array([1, 2, None], pa.int64()), pa.array([2, None, 3], pa.int8())),
        (pa.array(["x", "y", None]), pa.array(["y", None, "z"]).dictionary_encode()),
        (pa.array(["x", "y", None]).dictionary_encode(), pa.array(["y", None, "z"], pa.string_view())),
        (pa.array([b"xx", b"yy", None], pa.binary(2)), pa.array([b"yy", None, b"zz"], pa.large_binary())),
        (pa.array([True, False, None]), pa.array([False, None])),
        (pa.array([0, 1, None], pa.int32()).cast(pa.date32()), pa.array([86_400_000, None], pa.date64())),
        (pa.array([0, 1000, None], pa.timestamp("us", "UTC")), pa.array([1, None], pa.timestamp("ms", "Asia/Tokyo"))),
        (pa.array([0, 1000, None], pa.timestamp("us")), pa.array([1, None], pa.timestamp("ms"))),
        (pa.array([Decimal("0.10"), Decimal("1.10"), None]), pa.array([Decimal("1.10"), None], pa.decimal128(20, 2))),
    ],
)
def test_keys_match_whatever_their_representation(right, left):
    index = LookupIndex.build(pa.table({"k": right}), ["k"])
    assert pairs(index, pa.record_batch({"j": left}), ["j"]) == [(0, 1)]


def test_the_table_keeps_its_order():
    table = pa.table({"k": pa.chunked_array([[3, 1], [2]]), "v": pa.chunked_array([["c"], ["a", "b"]])})
    index = LookupIndex.build(table, ["k"])
    _, right = index.probe(pa.record_batch({"k": [1, 2, 3]}), ["k"])
    assert index.table.column("v").take(pa.array(right)).to_pylist() == ["a", "b", "c"]


def test_matches_of_one_key_are_in_table_order():
    left = [(number, "a") for number in range(50)]
    right = [(row * row % 50, "a") for row in range(3000)]  # enough to expose an unstable sort
    index = LookupIndex.build(table_of(right, 100), ["n"])
    assert pairs(index, batch_of(left), ["m"]) == nested_loop(left, right)


def test_the_first_duplicate_is_the_one_whose_key_comes_first_in_the_table():
    rows = [(7, "x"), (1, "x"), (2, "x"), (2, "x"), (1, "x")]
    assert LookupIndex.build(table_of(rows), ["n"]).duplicates() == (1,) == first_duplicate([(n,) for n, _ in rows])


def test_empty_sides_match_nothing():
    empty = LookupIndex.build(table_of([]), ["n"])
    assert pairs(empty, batch_of([(1, "a")]), ["m"]) == []
    assert empty.duplicates() is None
    assert pairs(LookupIndex.build(table_of([(1, "a")]), ["n"]), batch_of([]), ["m"]) == []


def test_keys_of_different_types_are_refused():
    index = LookupIndex.build(pa.table({"k": ["1"]}), ["k"])
    with pytest.raises(SchemaError, match=r"'j' \(bigint\) of the stream with column 'k' \(string\) of the table"):
        index.probe(pa.record_batch({"j": [1]}), ["j"])
    with pytest.raises(SchemaError, match="needs as many columns"):
        index.probe(pa.record_batch({"j": ["1"]}), ["j", "j"])
    zoned = LookupIndex.build(pa.table({"k": [datetime(2020, 1, 1, tzinfo=UTC)]}), ["k"])
    with pytest.raises(SchemaError, match="give both the same type"):
        zoned.probe(pa.record_batch({"k": [datetime(2020, 1, 1)]}), ["k"])
    cents = LookupIndex.build(pa.table({"k": [Decimal("1.10")]}), ["k"])
    with pytest.raises(SchemaError, match="give both the same type"):
        cents.probe(pa.record_batch({"k": [Decimal("1.1")]}), ["k"])


def test_a_table_without_the_key_or_with_a_float_key_is_refused():
    with pytest.raises(SchemaError, match="the table of a lookup: there is no column 'q'"):
        LookupIndex.build(pa.table({"k": [1]}), ["q"])
    with pytest.raises(SchemaError, match="cannot be a key"):
        LookupIndex.build(pa.table({"k": [1.5]}), ["k"])
