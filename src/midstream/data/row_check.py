"""Checks a single row against a schema immediately, for callers that cannot wait for the other rows of a slice."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa

from midstream.data.rows import from_rows

__all__ = ["RowCheck"]

Sure = Callable[[Any], bool]


class RowCheck:
    """Checks single rows against a schema. Rows of plain values pass without building a batch.

    >>> check = RowCheck(pa.schema([("n", pa.int32())]), "process 'p'")
    >>> check({"n": 1})
    >>> check({"n": 1 << 40})
    Traceback (most recent call last):
    ...
    midstream.errors.SchemaError: process 'p': row 0, column 'n': expected int, found int 1099511627776 (Value ...
    """

    def __init__(self, schema: pa.Schema, what: str) -> None:
        self._schema = schema
        self._what = what
        self._columns = [(field.name, _sure(field.type), field.nullable) for field in schema]

    def __call__(self, row: Any) -> None:
        """Raise :class:`SchemaError` if the row does not fit."""
        if not self._surely_fits(row):
            from_rows([row], self._schema, self._what)

    def _surely_fits(self, row: Any) -> bool:
        if type(row) is not dict or len(row) != len(self._columns):
            return False
        for name, is_sure, nullable in self._columns:
            if name not in row:
                return False
            value = row[name]
            if not (nullable if value is None else is_sure(value)):
                return False
        return True


def _sure(kind: pa.DataType) -> Sure:
    """Whether a value certainly fits a type; uncertain values are checked by building a batch."""
    if pa.types.is_boolean(kind):
        return lambda value: type(value) is bool
    if pa.types.is_signed_integer(kind):
        limit = 1 << (kind.bit_width - 1)
        return lambda value: type(value) is int and -limit <= value < limit
    if pa.types.is_float64(kind):
        return lambda value: type(value) is float
    if pa.types.is_string(kind):
        return lambda value: type(value) is str and value.isascii()
    if pa.types.is_binary(kind):
        return lambda value: type(value) is bytes
    if pa.types.is_date(kind):
        return lambda value: type(value) is date
    if pa.types.is_timestamp(kind):
        zone = None if kind.tz is None else UTC
        return lambda value: type(value) is datetime and value.tzinfo is zone
    return lambda _: False
