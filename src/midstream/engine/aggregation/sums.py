"""count, sum and mean."""

from __future__ import annotations

from decimal import Context, Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.aggregation.base import Accumulator, Columns, DoesNotFit, filled, valid
from midstream.engine.aggregation.runs import Integers, Runs

__all__ = ["Count", "ExactSum", "FloatSum"]

_EXACT = Context(prec=64)
_LIMB = 32
_MASK = (1 << _LIMB) - 1


class Count(Accumulator):
    """The number of rows, or of values."""

    fields = (("n", "<i8"),)

    def of_rows(self, values: pa.Array | None, numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`; without values, counts rows."""
        if values is None or not values.null_count:
            return (runs.sizes,)
        return self.combined((valid(values).astype(np.int64),), runs)

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        return (np.add.reduceat(columns[0][runs.order], runs.starts),)

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        return pa.array(columns[0], pa.int64())


class FloatSum(Accumulator):
    """The sum of floats, or their mean."""

    fields = (("sum", "<f8"), ("n", "<i8"))

    def __init__(self, *, mean: bool) -> None:
        self._mean = mean

    def of_rows(self, values: pa.Array, numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        return self.combined((filled(values).astype(np.float64), valid(values).astype(np.int64)), runs)

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        with np.errstate(all="ignore"):  # infinities may cancel out
            total = np.add.reduceat(columns[0][runs.order], runs.starts)
        return total, np.add.reduceat(columns[1][runs.order], runs.starts)

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        total, n = columns
        return pa.array(_mean(total, n) if self._mean else total, pa.float64(), mask=n == 0)


class ExactSum(Accumulator):
    """The sum of integers or decimals, or their mean.

    A sum is stored in limbs of 32 bits, lowest first, each in a 64-bit integer. So very many values can be added before
    carrying, only the final sum has to fit its type, and the result depends neither on the order of rows nor on slices.
    """

    def __init__(self, kind: pa.DataType, *, mean: bool) -> None:
        self._mean = mean
        self._scale = kind.scale if pa.types.is_decimal(kind) else None
        self._limbs = 2 if self._scale is None else 4
        low = ((f"limb{index}", "<u4") for index in range(self._limbs - 1))
        self.fields = (*low, ("top", "<i8"), ("n", "<i8"))

    def of_rows(self, values: pa.Array, numbers: Integers, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        words = _decimal_words(values) if self._scale is not None else [filled(values).astype(np.int64)]
        limbs = [limb for word in words[:-1] for limb in (word & _MASK, word >> _LIMB & _MASK)]
        limbs += [words[-1] & _MASK, words[-1] >> _LIMB]
        return self.combined((*limbs, valid(values).astype(np.int64)), runs)

    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """See :class:`Accumulator`."""
        summed = [np.add.reduceat(column[runs.order].astype(np.int64), runs.starts) for column in columns]
        for index in range(self._limbs - 1):
            summed[index + 1] += summed[index] >> _LIMB
            summed[index] &= _MASK
        return tuple(summed)

    def results(self, columns: Columns) -> pa.Array:
        """See :class:`Accumulator`."""
        *limbs, n = columns
        if self._mean:
            return pa.array(_mean(self._as_floats(limbs), n), pa.float64(), mask=n == 0)
        return self._decimals(limbs, n) if self._scale is not None else self._integers(limbs, n)

    def _as_floats(self, limbs: list[Integers]) -> npt.NDArray[np.float64]:
        # The magnitude of a negative sum is ~sum + 1. Adding a negative limb to positive ones would lose small digits.
        negative = limbs[-1] < 0
        total = np.zeros(len(negative))
        for index, limb in reversed(list(enumerate(limbs))):
            flipped = ~limb if index == self._limbs - 1 else _MASK - limb
            total += np.where(negative, flipped, limb).astype(np.float64) * 2.0 ** (_LIMB * index)
        return np.where(negative, -(total + 1), total) / 10.0 ** (self._scale or 0)

    def _integers(self, limbs: list[Integers], n: Integers) -> pa.Array:
        low, top = limbs
        beyond = np.flatnonzero((top < -(1 << 31)) | (top >= 1 << 31))
        if len(beyond):
            at = int(beyond[0])
            raise DoesNotFit(at, (int(top[at]) << _LIMB) + int(low[at]), pa.int64())
        return pa.array((top << _LIMB) | low, pa.int64(), mask=n == 0)

    def _decimals(self, limbs: list[Integers], n: Integers) -> pa.Array:
        kind = pa.decimal128(38, self._scale or 0)
        rough = np.abs(self._as_floats(limbs)) * 10.0 ** (self._scale or 0)
        for at in np.flatnonzero(rough > 0.99e38).tolist():  # floats are inexact, so these are checked one by one
            total = sum(int(limb[at]) << (_LIMB * index) for index, limb in enumerate(limbs))
            if abs(total) >= 10**38:
                raise DoesNotFit(at, Decimal(total).scaleb(-kind.scale, _EXACT), kind)
        words = np.empty((len(n), 2), "<i8")
        words[:, 0] = limbs[0] | (limbs[1] << _LIMB)
        words[:, 1] = limbs[2] | (limbs[3] << _LIMB)
        there = pa.array(n > 0).buffers()[1]
        return pa.Array.from_buffers(kind, len(n), [there, pa.py_buffer(words)])


def _decimal_words(values: pa.Array) -> list[Integers]:
    values = values.cast(pa.decimal128(values.type.precision, values.type.scale))
    count, start = len(values), values.offset
    if not count:
        return [np.zeros(0, np.int64), np.zeros(0, np.int64)]
    stored = np.frombuffer(values.buffers()[1], "<i8")[2 * start : 2 * (start + count)].reshape(count, 2)
    there = valid(values)  # the bytes of a null are arbitrary
    return [np.where(there, stored[:, 0], 0), np.where(there, stored[:, 1], 0)]


def _mean(total: npt.NDArray[np.float64], n: Integers) -> npt.NDArray[np.float64]:
    return total / np.maximum(n, 1)
