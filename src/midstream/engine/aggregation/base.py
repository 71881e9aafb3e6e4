"""The interface of an aggregation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.aggregation.runs import Integers, Runs

__all__ = ["Accumulator", "Columns", "DoesNotFit", "LooseAccumulator", "filled", "integers", "valid"]

Columns = tuple[Any, ...]
"""Arrays of equal length, numpy's or Arrow's, with an element for each key."""


class DoesNotFit(Exception):
    """The result of one key does not fit its type; ``index`` is the element."""

    def __init__(self, index: int, result: object, kind: pa.DataType) -> None:
        super().__init__(f"{result} does not fit into {kind}")
        self.index = index


class Accumulator(ABC):
    """One aggregation with state of fixed width; ``fields`` are the names and types of its columns."""

    fields: tuple[tuple[Any, ...], ...] = ()

    @abstractmethod
    def of_rows(self, values: pa.Array, numbers: Integers, runs: Runs) -> Columns:
        """The aggregate of each run of rows; nulls are ignored. ``numbers`` grow in order of arrival."""

    @abstractmethod
    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """The aggregate of each run of elements."""

    @abstractmethod
    def results(self, columns: Columns) -> pa.Array:
        """The results that users see. Raises :class:`DoesNotFit`."""


class LooseAccumulator(Accumulator):
    """One aggregation with state of varying width: a Python value for each key."""

    @abstractmethod
    def to_values(self, columns: Columns) -> list[Any]:
        """One value, made of plain Python types, for each element."""

    @abstractmethod
    def of_values(self, values: Sequence[Any]) -> Columns:
        """The columns that :meth:`to_values` was given; they count as older than any row still to come."""


def valid(values: pa.Array) -> npt.NDArray[np.bool_]:
    """A mask of the values that are not null."""
    if not values.null_count:
        return np.ones(len(values), np.bool_)
    found: npt.NDArray[np.bool_] = values.is_valid().to_numpy(zero_copy_only=False)
    return found


def filled(values: pa.Array) -> npt.NDArray[Any]:
    """The numbers, with zeros in place of nulls."""
    if values.null_count:
        values = values.fill_null(0)
    found: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return found


def integers(values: pa.Array) -> pa.Array:
    """Dates and times as the integers that store them; other values unchanged."""
    if pa.types.is_timestamp(values.type):
        return values.view(pa.int64())
    return values.view(pa.int32()) if pa.types.is_date32(values.type) else values
