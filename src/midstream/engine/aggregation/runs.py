"""Groups of elements: an order of the elements in which each group is one run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Integers", "Runs", "order_by", "runs_of", "starts_where"]

Integers = npt.NDArray[np.int64]

_DIGIT_BITS = 16


@dataclass(frozen=True)
class Runs:
    """``order`` lists elements run by run, ``starts`` has the start of each run in it. No run is empty."""

    order: Integers
    starts: Integers

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def sizes(self) -> Integers:
        """The number of elements in each run."""
        return np.diff(self.starts, append=len(self.order))

    @property
    def run_of(self) -> Integers:
        """The run of each element of ``order``."""
        return np.repeat(np.arange(len(self.starts)), self.sizes)

    @classmethod
    def single(cls, elements: Integers) -> Runs:
        """Each of these elements as its own run; combining them is the same as selecting them."""
        return cls(elements, np.arange(len(elements)))


def order_by(codes: Integers, count: int) -> Integers:
    """The order that sorts codes below ``count``, stable. numpy sorts 16 bits in linear time, so: digit by digit.

    >>> order_by(np.array([1, 0, 1]), 2).tolist()
    [1, 0, 2]
    """
    order = np.argsort(codes.astype(np.uint16), kind="stable")  # the cast keeps the lowest 16 bits
    for shift in range(_DIGIT_BITS, (count - 1).bit_length() if count else 0, _DIGIT_BITS):
        order = order[np.argsort((codes[order] >> shift).astype(np.uint16), kind="stable")]
    return order


def runs_of(codes: Integers, count: int) -> Runs:
    """Run ``i`` has the elements with code ``i``, in their order. Every code below ``count`` must occur.

    >>> runs_of(np.array([1, 0, 1]), 2)
    Runs(order=array([1, 0, 2]), starts=array([0, 1]))
    """
    sizes = np.bincount(codes, minlength=count)
    return Runs(order_by(codes, count), np.cumsum(sizes) - sizes)


def starts_where(differs: npt.NDArray[np.bool_], length: int) -> Integers:
    """The starts of runs, given for all elements but the first whether they differ from the previous one."""
    return np.flatnonzero(np.concatenate([np.ones(min(length, 1), np.bool_), differs]))
