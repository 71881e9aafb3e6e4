"""Slices take about five milliseconds each, whatever a row costs."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.engine.slices import FIRST_ROWS, MAX_BYTES, MAX_GROWTH, MAX_ROWS, MAX_SHRINK, TARGET_NS, SliceSizer


def batch(rows: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(rows), pa.int64())})


def run(sizer: SliceSizer, rows: int, ns_per_row: float) -> list[int]:
    """Cut a batch whose rows cost ``ns_per_row`` each; return the sizes of the slices."""
    sizes = []
    for piece in sizer.cut(batch(rows)):
        sizes.append(piece.num_rows)
        sizer.observe(rows=piece.num_rows, elapsed_ns=round(piece.num_rows * ns_per_row))
    return sizes


@given(st.integers(0, 3000), st.lists(st.integers(1, 500), min_size=1))
def test_slices_make_up_the_batch_in_order(rows, sizes):
    sizer, found = SliceSizer(), []
    for piece, size in zip(sizer.cut(whole := batch(rows)), sizes * 3000, strict=False):
        assert piece.num_rows > 0
        found += piece.column("n").to_pylist()
        sizer.rows = size
    assert found == whole.column("n").to_pylist()


@pytest.mark.parametrize("us_per_row", [0.01, 0.1, 1, 10, 100, 1000])
def test_slices_soon_take_about_the_target_time(us_per_row):
    sizes = run(SliceSizer(), 2_000_000 if us_per_row < 10 else 20_000, us_per_row * 1000)
    settled = sizes[len(sizes) // 2 : -1]
    fitting = min(TARGET_NS / (us_per_row * 1000), MAX_ROWS)
    assert all(0.9 * fitting <= size <= 1.1 * fitting + 1 for size in settled), sizes


def test_a_slow_model_gets_single_rows():
    sizer = SliceSizer()
    sizes = run(sizer, 40, 50_000_000)
    assert sizes[:2] == [FIRST_ROWS, FIRST_ROWS // 4]
    assert set(sizes[2:-1]) == {1}
    assert sizer.rows == 1


def test_wide_rows_make_small_slices_at_once():
    sizer = SliceSizer(rows=MAX_ROWS)
    wide = pa.record_batch({"text": pa.array(["x" * (1 << 20)] * 30)})
    sizes = [piece.num_rows for piece in sizer.cut(wide)]
    assert sum(sizes) == 30
    assert max(piece.nbytes for piece in sizer.cut(wide)) <= MAX_BYTES * 3 // 2 + 100
    assert [piece.num_rows for piece in sizer.cut(pa.record_batch({"text": ["x" * (3 * MAX_BYTES)] * 2}))] == [1, 1]


def test_growth_is_bounded_because_one_fast_slice_may_be_luck():
    sizer = SliceSizer(rows=10)
    sizer.observe(rows=10, elapsed_ns=1)
    assert sizer.rows == 10 * MAX_GROWTH
    for _ in range(20):
        sizer.observe(rows=sizer.rows, elapsed_ns=0)  # the clock did not even tick
    assert sizer.rows == MAX_ROWS


def test_a_short_remainder_neither_raises_nor_resets_the_size():
    sizer = SliceSizer(rows=1000)
    sizer.observe(rows=3, elapsed_ns=15_000)  # 5 µs per row, so 1000 rows fit the target
    assert sizer.rows == 1000


def test_an_empty_slice_does_not_change_the_size():
    sizer = SliceSizer(rows=100)
    sizer.observe(rows=0, elapsed_ns=10**9)
    assert sizer.rows == 100


def test_no_tiny_slice_is_left_at_the_end():
    assert [piece.num_rows for piece in SliceSizer(rows=100).cut(batch(249))] == [100, 149]
    assert [piece.num_rows for piece in SliceSizer(rows=100).cut(batch(251))] == [100, 100, 51]
    assert [piece.num_rows for piece in SliceSizer(rows=100).cut(batch(0))] == []


def test_one_slice_that_waited_for_a_core_does_not_collapse_the_size():
    sizer = SliceSizer(rows=8000)
    sizer.observe(rows=8000, elapsed_ns=1000 * TARGET_NS)
    assert sizer.rows == 8000 / MAX_SHRINK
