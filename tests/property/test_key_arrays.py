"""Stored keys as arrays have the same bytes and values as one by one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from midstream.state.key_arrays import decode_keys, split_timers, timer_keys
from midstream.state.keys import Namespace, encode_keys, timer_key
from tests.property.test_state_keys import keyed_batches

times = st.integers(-(2**62), 2**62)


@given(keyed_batches())
def test_keys_are_decoded_as_columns(case):
    _, batch = case
    stored = pa.array([b"before", *encode_keys(batch, batch.schema.names, "test")], pa.binary())[1:]
    assert pa.record_batch(decode_keys(stored, batch.schema), schema=batch.schema).equals(batch)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=5), times)), st.integers(0, 2))
def test_timer_key_arrays_match_single_timer_keys(pairs, skipped):
    keys = [key[:1] + b"\x00" + key[1:] for key, _ in pairs]
    moments = np.array([time for _, time in pairs], np.int64)
    array = pa.array([b"\x00\x00", *keys], pa.binary())[1:]
    made = timer_keys(array, Namespace.WINDOW, moments)
    assert made.to_pylist() == [
        timer_key(key, Namespace.WINDOW, time) for key, (_, time) in zip(keys, pairs, strict=True)
    ]
    split, back = split_timers(made[skipped:])
    assert (split.tolist(), back.to_pylist()) == (moments[skipped:].tolist(), keys[skipped:])
