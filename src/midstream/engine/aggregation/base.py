"""What an aggregation must be able to do."""

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
"""Arrays of one length, of numpy or of Arrow: an element of each for every key."""


class DoesNotFit(Exception):
    """The result of one key is beyond its type; ``index`` says whose."""

    def __init__(self, index: int, result: object, kind: pa.DataType) -> None:
        super().__init__(f"{result} does not fit into {kind}")
        self.index = index


class Accumulator(ABC):
    """One aggregation. Its state is fixed in width, ``fields`` names and types its columns in it."""

    fields: tuple[tuple[Any, ...], ...] = ()

    @abstractmethod
    def of_rows(self, values: pa.Array, numbers: Integers, runs: Runs) -> Columns:
        """What each run of rows comes to; nulls do not count. ``numbers`` grow in the order of arrival."""

    @abstractmethod
    def combined(self, columns: Columns, runs: Runs) -> Columns:
        """What each run of elements comes to together."""

    @abstractmethod
    def results(self, columns: Columns) -> pa.Array:
        """What users see. Raises :class:`DoesNotFit`."""


class LooseAccumulator(Accumulator):
    """One aggregation whose state varies in width: a Python value for each key."""

    @abstractmethod
    def to_values(self, columns: Columns) -> list[Any]:
        """One value, made of plain Python types, for each element."""

    @abstractmethod
    def of_values(self, values: Sequence[Any]) -> Columns:
        """The columns that :meth:`to_values` was given; older than all rows that are yet to come."""


def valid(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Where there is a value."""
    if not values.null_count:
        return np.ones(len(values), np.bool_)
    found: npt.NDArray[np.bool_] = values.is_valid().to_numpy(zero_copy_only=False)
    return found


def filled(values: pa.Array) -> npt.NDArray[Any]:
    """Numbers, zero in the place of nulls."""
    if values.null_count:
        values = values.fill_null(0)
    found: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return found


def integers(values: pa.Array) -> pa.Array:
    """Dates and times as the integers that they are; other values as they are."""
    if pa.types.is_timestamp(values.type):
        return values.view(pa.int64())
    return values.view(pa.int32()) if pa.types.is_date32(values.type) else values
