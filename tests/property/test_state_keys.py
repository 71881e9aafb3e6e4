"""Stored keys: equal keys have equal bytes, decoding returns the key, groups are exactly the distinct keys."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from midstream.data.hashing import bins_of, hash_columns
from midstream.data.rows import from_rows
from midstream.state.keys import decode_key, encode_key, encode_keys, group_keys

WHO = "process 'p'"
VALUES = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=9),
    pa.binary(): st.binary(max_size=9),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(UTC)),
    pa.decimal128(38, 3): st.decimals(-(10**34), 10**34, places=3, allow_nan=False),
}


@st.composite
def keyed_batches(draw):
    kinds = draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=3))
    schema = pa.schema([pa.field(f"c{index}", kind) for index, kind in enumerate(kinds)])
    pool = draw(st.lists(st.tuples(*(VALUES[kind] for kind in kinds)), min_size=1, max_size=8))
    keys = draw(st.lists(st.sampled_from(pool), max_size=20))
    return keys, from_rows([dict(zip(schema.names, key, strict=True)) for key in keys], schema, WHO)


def comparable(key):
    return tuple(value.normalize() if isinstance(value, Decimal) else value for value in key)


@given(keyed_batches())
def test_keys_are_equal_exactly_when_their_bytes_are(case):
    keys, batch = case
    stored = encode_keys(batch, batch.schema.names, WHO)
    assert [decode_key(one, batch.schema) for one in stored] == keys
    for a, b in zip(keys, stored, strict=True):
        for c, d in zip(keys, stored, strict=True):
            assert (a == c) == (b == d)
    assert [one[0] for one in stored] == bins_of(hash_columns(batch, batch.schema.names)).tolist()
    assert [encode_key(key, batch.schema, WHO) for key in keys] == stored


@given(keyed_batches())
def test_groups_are_the_distinct_keys_in_order(case):
    _, batch = case
    groups = group_keys(batch, batch.schema.names, WHO)
    assert groups.keys == sorted(set(encode_keys(batch, batch.schema.names, WHO)))
    assert [groups.keys[index] for index in groups.group_of_row] == encode_keys(batch, batch.schema.names, WHO)
    decoded = [comparable(decode_key(key, batch.schema)) for key in groups.keys]
    assert decoded == [comparable(row.values()) for row in groups.distinct.to_pylist()]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_the_bytes_of_integers_sort_as_the_integers_do(numbers):
    schema = pa.schema({"k": pa.int64()})
    by_bytes = sorted(numbers, key=lambda number: encode_key((number,), schema, WHO)[2:])
    assert by_bytes == sorted(numbers)


@given(st.dates(), st.dates())
def test_different_days_are_different_keys(one: date, other: date):
    schema = pa.schema({"k": pa.date32()})
    assert (encode_key((one,), schema, WHO) == encode_key((other,), schema, WHO)) == (one == other)


@given(st.datetimes(timezones=st.just(UTC)))
def test_an_instant_is_the_same_key_in_every_zone(moment: datetime):
    utc, berlin = pa.schema({"k": pa.timestamp("us", "UTC")}), pa.schema({"k": pa.timestamp("us", "Europe/Berlin")})
    assert encode_key((moment,), utc, WHO) == encode_key((moment,), berlin, WHO)
