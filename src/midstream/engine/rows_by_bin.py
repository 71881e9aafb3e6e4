"""Counts rows by the bin of their key."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["RowsByBin"]

_TOGETHER = 1 << 15
_PER_BIN = 4
"""Fewest rows counted at a time, in all and per bin, because each count costs time for every bin."""


class RowsByBin:
    """Counts rows, slice by slice.

    >>> rows = RowsByBin(4)
    >>> rows.add(np.array([1, 3, 3], np.uint16))
    >>> rows.add(np.array([0, 1], np.uint16), rows_each=10.0)
    >>> rows.totals.tolist()
    [10.0, 11.0, 0.0, 2.0]
    """

    def __init__(self, bins: int) -> None:
        self._totals = np.zeros(bins, np.float64)
        self._together = max(_TOGETHER, _PER_BIN * bins)
        self._waiting: list[npt.NDArray[Any]] = []
        self._rows = 0

    def add(self, bins: npt.NDArray[Any], rows_each: float = 1.0) -> None:
        """Add rows; each stands for ``rows_each``."""
        if rows_each != 1.0:
            self._totals += np.bincount(bins, minlength=len(self._totals)) * rows_each
            return
        self._waiting.append(bins)
        self._rows += len(bins)
        if self._rows >= self._together:
            self._settle()

    @property
    def totals(self) -> npt.NDArray[np.float64]:
        """The number of rows by bin."""
        self._settle()
        return self._totals

    def _settle(self) -> None:
        if self._waiting:
            self._totals += np.bincount(np.concatenate(self._waiting), minlength=len(self._totals))
            self._waiting.clear()
            self._rows = 0
