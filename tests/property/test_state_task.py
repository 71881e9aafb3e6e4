"""Merging deltas equals applying them in order; packed structs and objects round-trip."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from midstream.ids import BinId, Revision
from midstream.state.files import bin_ranges, table_of
from midstream.state.task import merged
from midstream.state.values import ObjectCodec, PackedCodec

keys = st.builds(lambda number, name: bytes([number, 0]) + name, st.integers(0, 3), st.binary(max_size=2))
deltas = st.dictionaries(keys, st.none() | st.binary(max_size=3), max_size=12)
bins = st.sets(st.integers(0, 3).map(BinId))


def rows(delta):
    ordered = sorted(delta)
    return table_of(ordered, [delta[key] for key in ordered])


@given(st.lists(st.tuples(deltas, bins), max_size=5))
def test_merged_deltas_have_the_last_change_of_each_key(parts):
    expected: dict[bytes, bytes | None] = {}
    for delta, wanted in parts:
        expected.update({key: value for key, value in delta.items() if key[0] in wanted})
    found = merged([(rows(delta), wanted) for delta, wanted in parts])
    assert found.equals(rows(expected))


@given(deltas)
def test_the_ranges_of_bins_cover_all_rows(delta):
    table = rows(delta)
    covered = [(number, index) for number, start, stop in bin_ranges(table) for index in range(start, stop)]
    assert covered == [(key["key"][0], index) for index, key in enumerate(table.to_pylist())]


@given(st.lists(st.none() | st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))))
def test_structs_round_trip(values):
    codec = PackedCodec(np.dtype([("n", "<i8"), ("x", "<f8")]), "aggregate 'a'")
    known = np.array([value for value in values if value is not None], codec.dtype)
    data = iter(codec.split(known))
    joined, there = codec.join([None if value is None else next(data) for value in values])
    assert there.tolist() == [value is not None for value in values]
    assert joined[there].tolist() == known.tolist()
    assert not joined[~there]["n"].any()


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5), st.integers(0))
def test_objects_round_trip_with_their_revision(value, revision):
    codec = ObjectCodec("process 'p'")
    stored = codec.decode(codec.encode(value, Revision(revision), b"k"), b"k")
    assert (stored.value, stored.revision) == (value, revision)
