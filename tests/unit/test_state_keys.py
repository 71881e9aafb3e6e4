"""Stored keys: their encoding, and what cannot be a key."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from midstream.errors import SchemaError, StateError
from midstream.state.keys import MAX_KEY, Namespace, decode_key, encode_key, encode_keys, group_keys, item_key

WHO = "process 'count'"


@pytest.mark.parametrize(
    ("schema", "values", "stored"),
    [
        ({"k": pa.int64()}, (7,), "63008000000000000007"),
        ({"k": pa.int64()}, (-1,), "e4007fffffffffffffff"),
        ({"k": pa.bool_()}, (True,), "91008000000000000001"),
        ({"k": pa.date32()}, (date(1970, 1, 3),), "97008000000000000002"),
        ({"k": pa.timestamp("us")}, (datetime(1970, 1, 1, 0, 0, 1),), "680080000000000f4240"),
        ({"k": pa.decimal128(10, 2)}, (Decimal("-0.01"),), "4a007fffffffffffffffffffffffffffffff"),
        ({"k": pa.string()}, ("ann",), "8400616e6e"),
        ({"k": pa.string()}, ("",), "4800"),
        ({"a": pa.string(), "b": pa.binary()}, ("ann", b"\x00"), "d7000003616e6e00"),
        ({"a": pa.int64(), "b": pa.string()}, (1, "x"), "aa00800000000000000178"),
    ],
)
def test_the_bytes_of_a_key_never_change(schema, values, stored):
    assert encode_key(values, pa.schema(schema), WHO).hex() == stored
    assert decode_key(bytes.fromhex(stored), pa.schema(schema)) == values


@pytest.mark.parametrize(
    "other",
    [
        pa.array([3, -3], pa.int8()),
        pa.array([3, -3], pa.int16()),
        pa.array([3, -3], pa.int32()),
        pa.array([3, -3]).dictionary_encode(),
        pa.array([9, 3, -3])[1:],
    ],
)
def test_the_representation_of_an_integer_does_not_matter(other):
    plain = pa.record_batch({"k": pa.array([3, -3], pa.int64())})
    assert encode_keys(pa.record_batch({"k": other}), ["k"], WHO) == encode_keys(plain, ["k"], WHO)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_the_representation_of_a_string_does_not_matter(kind):
    values = ["", "ä", "long enough to leave the view"]
    plain = pa.record_batch({"k": values})
    other = pa.record_batch({"k": pa.array(values).cast(kind)})
    assert encode_keys(other, ["k"], WHO) == encode_keys(plain, ["k"], WHO)
    assert group_keys(other, ["k"], WHO).keys == group_keys(plain, ["k"], WHO).keys


def test_neighbouring_columns_cannot_be_confused():
    batch = pa.record_batch({"a": ["x", "xy"], "b": ["yz", "z"]})
    first, second = encode_keys(batch, ["a", "b"], WHO)
    assert first[2:] != second[2:]


def test_items_of_different_keys_cannot_be_confused():
    short, long = b"\x07\x00a", b"\x07\x00ab"
    assert not item_key(long, Namespace.LIST, b"1").startswith(item_key(short, Namespace.LIST))


def test_a_null_is_refused_with_its_row_and_column():
    batch = pa.record_batch({"a": ["x", "y"], "b": [1, None]})
    for function in (encode_keys, group_keys):
        with pytest.raises(StateError, match=r"process 'count': the key column 'b' is null in row 1") as caught:
            function(batch, ["a", "b"], WHO)
        assert (caught.value.column, caught.value.row_index) == ("b", 1)


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.list_(pa.int64()), pa.struct({"x": pa.int64()})])
def test_types_without_exact_equality_are_refused_before_any_row(kind):
    with pytest.raises(SchemaError, match="cannot be a key"):
        group_keys(pa.record_batch({"k": pa.array([], kind)}), ["k"], WHO)


def test_times_finer_than_microseconds_are_refused():
    batch = pa.record_batch({"k": pa.array([1], pa.timestamp("ns"))})
    with pytest.raises(SchemaError, match="finer than Spark's microseconds"):
        encode_keys(batch, ["k"], WHO)


def test_a_key_may_be_long_but_not_huge():
    fits = encode_keys(pa.record_batch({"k": ["x" * MAX_KEY]}), ["k"], WHO)
    assert len(fits[0]) == MAX_KEY + 2
    with pytest.raises(StateError, match=r"the key \(k\) of row 1 takes 481 bytes; at most 480 are allowed"):
        encode_keys(pa.record_batch({"k": ["x", "x" * (MAX_KEY + 1)]}), ["k"], WHO)
    with pytest.raises(StateError, match="of row 0 takes 70"):
        encode_keys(pa.record_batch({"k": ["x" * 70_000], "n": [1]}), ["k", "n"], WHO)


def test_a_time_with_a_zone_is_decoded_in_utc():
    schema = pa.schema({"k": pa.timestamp("us", "Europe/Berlin")})
    moment = datetime(2024, 2, 29, 12, 0, 0, 5, tzinfo=UTC)
    assert decode_key(encode_key((moment,), schema, WHO), schema) == (moment,)


def test_a_year_outside_pythons_range_is_decoded_as_a_number():
    batch = pa.record_batch({"k": pa.array([2**62], pa.timestamp("us"))})
    assert decode_key(encode_keys(batch, ["k"], WHO)[0], batch.schema) == (2**62,)


@pytest.mark.parametrize("stored", [b"\x00\x00\x00", b"\x00\x00\x00\x05ab", b"\x00\x00\x00\x01a" + bytes(9)])
def test_bytes_that_are_not_such_a_key_are_refused(stored):
    with pytest.raises(StateError, match="a stored key"):
        decode_key(stored, pa.schema({"a": pa.string(), "n": pa.int64()}))


def test_a_key_with_too_few_values_is_refused():
    with pytest.raises(StateError, match="the key has the columns a, b, but 1 values were given"):
        encode_key((1,), pa.schema({"a": pa.int64(), "b": pa.int64()}), WHO)


def test_an_empty_batch_has_no_keys():
    groups = group_keys(pa.record_batch({"k": pa.array([], pa.string())}), ["k"], WHO)
    assert (groups.keys, len(groups.group_of_row), groups.distinct.num_rows) == ([], 0, 0)
