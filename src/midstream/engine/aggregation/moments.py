"""variance and standard deviation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.aggregation.base import Accumulator, Columns, valid
from midstream.engine.aggregation.runs import Integers, Runs

__all__ = ["Moments"]


class Moments(Accumulator):
    """The variance of numbers, or its root: the count, the mean, and the sum of squared distances from the mean.

    These combine without the cancellation that a sum of squares suffers from (Chan, Golub and LeVeque, 1979).
    """

    fields = (("n", "<i8"), ("mean", "<f8"), ("squares", "<f8"))

    def __init__(self, *, sample: bool, root: bool) -> None:
        self._sample = sample
        self._root = root

    def of_rows(self, values: pa.Array, numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        there = valid(values)
        floats = values.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False)
        return self.combined((there.astype(np.int64), floats, np.zeros(len(floats))), runs)

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        n, mean, squares = (column[runs.order] for column in columns)
        with np.errstate(all="ignore"):  # infinities have no variance; NaN says so
            count = np.add.reduceat(n, runs.starts)
            # Distances from some value of the run, so that large values with small differences lose no digits.
            first = mean[_first_there(n, runs)]
            shift = np.repeat(first, runs.sizes)
            centre = np.add.reduceat(np.where(n > 0, n * (mean - shift), 0.0), runs.starts) / np.maximum(count, 1)
            apart = np.where(n > 0, mean - shift - np.repeat(centre, runs.sizes), 0.0)
            total = np.add.reduceat(squares + n * apart * apart, runs.starts)
        return count, np.where(count > 0, first + centre, 0.0), total

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        n, _, squares = columns
        least = 2 if self._sample else 1
        with np.errstate(all="ignore"):
            found = squares / np.maximum(n - (1 if self._sample else 0), 1)
            found = np.sqrt(found) if self._root else found
        return pa.array(found, pa.float64(), mask=n < least)


def _first_there(n: Integers, runs: Runs) -> npt.NDArray[np.int64]:
    """The place of the first element of each run that has values; of its first element if none has."""
    places = np.where(n > 0, np.arange(len(n)), len(n))
    found: npt.NDArray[np.int64] = np.minimum.reduceat(places, runs.starts)
    return np.where(found == len(n), runs.starts, found)
