"""Rows are counted together, and none is forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from midstream.engine.rows_by_bin import RowsByBin


@pytest.mark.parametrize("bins", [1, 256, 65_536])
def test_all_rows_are_counted_whatever_slices_they_come_in(bins: int) -> None:
    rng = np.random.default_rng(bins)
    rows, wanted = RowsByBin(bins), np.zeros(bins)
    for number in range(60):
        found = rng.integers(0, bins, rng.integers(0, 20_000)).astype(np.uint16)
        each = 2.5 if number % 7 == 0 else 1.0
        rows.add(found, each)
        np.add.at(wanted, found, each)
        if number % 25 == 0:
            assert rows.totals.tolist() == wanted.tolist(), "also when somebody looks in between"
    assert rows.totals.tolist() == wanted.tolist()
