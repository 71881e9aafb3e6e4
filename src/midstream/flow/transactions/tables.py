"""Tables that transactions share: the types of key and value, and the value of an unknown key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import pyarrow as pa

from midstream.data.ddl import Declared, ddl_of, parse_ddl, quote_name
from midstream.errors import SchemaError

__all__ = ["Column", "Kind", "Table", "kind_of"]

Kind = Literal["double", "bigint", "boolean", "string", "object"]
"""The kinds of values in a transaction. Strings can only be keys; objects can only be passed to ``t.call``."""

KeyKind = Literal["bigint", "string"]

BIGINT = (-(2**63), 2**63 - 1)
_VALUE_KINDS = ("double", "bigint", "boolean", "object")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table's value."""

    name: str
    kind: Kind
    default: Any


@dataclass(frozen=True, init=False)
class Table:
    """A table that transactions read and write: key → value.

    ``key`` is ``"bigint"`` or ``"string"``. ``value`` is ``"double"``, ``"bigint"``, ``"boolean"``, several of them
    with names (``"speed double, cars bigint"``, or a StructType), or ``"object"``: any Python object, which only
    functions given to ``t.call`` can read. ``default`` is the value of a key that was never written.

    >>> Table("accounts", key="string", value="double", default=0.0).columns
    (Column(name='value', kind='double', default=0.0),)
    >>> tolls = Table("tolls", key="bigint", value="speed double, cars bigint", default={"speed": 0.0, "cars": 0})
    >>> [column.name for column in tolls.columns]
    ['speed', 'cars']
    """

    name: str
    key: KeyKind
    columns: tuple[Column, ...]
    single: bool  # the value is a single unnamed column

    def __init__(self, name: str, *, key: str = "string", value: Declared = "double", default: Any = None) -> None:
        if not name:
            raise SchemaError("a table needs a name")
        if key not in get_args(KeyKind):
            raise SchemaError(f"table {name!r}: a key must be 'bigint' or 'string'; found {key!r}", table=name)
        value = ddl_of(value)
        single = value.strip().lower() in _VALUE_KINDS
        columns = _single_column(name, value, default) if single else _named_columns(name, value, default)
        for field, content in (("name", name), ("key", key), ("columns", columns), ("single", single)):
            object.__setattr__(self, field, content)

    def __reduce__(self) -> tuple[Any, ...]:
        # Transactions in checkpoints refer to it, so it is rebuilt by public names.
        if self.single:
            [column] = self.columns
            value, default = str(column.kind), column.default
        else:
            value = ", ".join(f"{quote_name(column.name)} {column.kind}" for column in self.columns)
            default = {column.name: column.default for column in self.columns}
        return partial(Table, key=self.key, value=value, default=default), (self.name,)

    def column(self, name: str) -> int:
        """Index of a column."""
        for position, column in enumerate(self.columns):
            if column.name == name:
                return position
        known = ", ".join(column.name for column in self.columns)
        raise SchemaError(f"table {self.name!r} has no column {name!r}; it has: {known}", table=self.name, column=name)


def _single_column(table: str, value: str, default: Any) -> tuple[Column, ...]:
    kind: Any = value.strip().lower()
    if default is None and kind != "object":
        raise SchemaError(f"table {table!r} needs a default: the value of a key that was never written", table=table)
    return (Column("value", kind, checked_value(default, kind, f"default of table {table!r}")),)


def _named_columns(table: str, value: str, default: Any) -> tuple[Column, ...]:
    schema = parse_ddl(value)
    if not isinstance(default, Mapping) or set(default) != set(schema.names):
        raise SchemaError(
            f"table {table!r}: the default must have a value for each column ({', '.join(schema.names)}); "
            f"found {default!r}",
            table=table,
        )
    columns = []
    for field in schema:
        kind = kind_of(field.type)
        if kind not in ("double", "bigint", "boolean"):
            raise SchemaError(
                f"table {table!r}: column {field.name!r} is of type {field.type}; a column of a table must be double, "
                "bigint or boolean. Other values need a table with value='object'",
                table=table,
            )
        what = f"default of column {field.name!r} of table {table!r}"
        columns.append(Column(field.name, kind, checked_value(default[field.name], kind, what)))
    return tuple(columns)


def checked_value(value: Any, kind: Kind, what: str) -> Any:
    """A literal as a value of a kind, or an error: 1 may stand for 1.0, but not True for 1, nor 1.5 for 1."""
    if kind == "object":
        return value
    if kind == "boolean" and isinstance(value, bool):
        return value
    if kind == "string" and isinstance(value, str):
        return value
    if kind == "double" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind == "bigint" and isinstance(value, int) and not isinstance(value, bool):
        if BIGINT[0] <= value <= BIGINT[1]:
            return value
        raise SchemaError(f"{what}: {value} does not fit into 64 bits")
    shown = "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)
    raise SchemaError(f"{what}: {shown} is not a {kind}")


def kind_of(kind: pa.DataType) -> Kind:
    """The kind of an Arrow type in a transaction.

    >>> kind_of(pa.int32()), kind_of(pa.float32()), kind_of(pa.list_(pa.int8()))
    ('bigint', 'double', 'object')
    """
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_signed_integer(kind) or (pa.types.is_unsigned_integer(kind) and kind.bit_width < 64):
        return "bigint"
    if pa.types.is_floating(kind):
        return "double"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "string"
    return "object"
