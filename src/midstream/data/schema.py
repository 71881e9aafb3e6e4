"""Schemas: parsing and writing them, and checking data against them.

The flow checks column names with :func:`require_columns` and :func:`check_key_columns` while it is built. The engine
checks every batch that a user's function returns against the declared schema with :func:`conform`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Never

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.ddl import (
    Declared,
    closest,
    ddl_of,
    is_list_like,
    parse_ddl,
    quote_name,
    spark_type,
    to_ddl,
    type_name,
)
from midstream.errors import SchemaError

__all__ = [
    "Declared",
    "check_key_columns",
    "columns_of",
    "conform",
    "ddl_of",
    "from_spark",
    "parse_ddl",
    "quote_name",
    "require_columns",
    "to_ddl",
    "type_name",
]

_KEY_TYPES = frozenset(
    {
        "boolean",
        "tinyint",
        "smallint",
        "int",
        "bigint",
        "string",
        "binary",
        "date",
        "timestamp",
        "timestamp_ntz",
        "decimal",
    }
)
_INT_BITS = {pa.int8(): 7, pa.int16(): 15, pa.int32(): 31, pa.int64(): 63}
_UNSIGNED_BITS = {pa.uint8(): 8, pa.uint16(): 16, pa.uint32(): 32, pa.uint64(): 64}
_FLOAT_BITS = {pa.float16(): 11, pa.float32(): 24, pa.float64(): 53}  # bits of the significand
_DECIMAL_DIGITS = {7: 3, 8: 3, 15: 5, 16: 5, 31: 10, 32: 10, 63: 19, 64: 20}  # digits of an integer with that many bits


def from_spark(schema: Any) -> pa.Schema:
    """The schema of a DataFrame, given its ``df.schema``; all columns are nullable.

    Uses duck typing, because this package must not import pyspark. ``simpleString()`` would not quote names.
    """
    columns = (f"{quote_name(field.name)} {spark_type(field.dataType, not_null=False)}" for field in schema.fields)
    return parse_ddl(", ".join(columns))


def columns_of(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    """Some of the columns of a schema, in the order of their names, e.g. those of a key.

    >>> to_ddl(columns_of(parse_ddl("user string, p double"), ["p"]))
    'p double'
    """
    return pa.schema([schema.field(name) for name in names])


def require_columns(schema: pa.Schema, names: Iterable[str], what: str) -> None:
    """Refuse names that are not columns of the schema; ``what`` names the operator in errors.

    >>> require_columns(parse_ddl("user string, p double"), ["usr"], "process 'count'")
    Traceback (most recent call last):
    ...
    midstream.errors.SchemaError: process 'count': there is no column 'usr'; did you mean 'user'? Available: user, p
    """
    available = schema.names
    for name in names:
        if name not in available:
            near = closest(str(name), available)
            hint = f"; did you mean {near!r}?" if near else "."
            listed = ", ".join(map(quote_name, available))
            raise SchemaError(f"{what}: there is no column {name!r}{hint} Available: {listed}", column=name)


def check_key_columns(schema: pa.Schema, names: Sequence[str], what: str) -> None:
    """Refuse keys that are not columns, are given twice, or have a type without exact equality.

    >>> check_key_columns(parse_ddl("user string, p double"), ["user"], "process 'count'")
    >>> check_key_columns(parse_ddl("user string, p double"), ["p"], "process 'count'")
    Traceback (most recent call last):
    ...
    midstream.errors.SchemaError: process 'count': column 'p' is double, which cannot be a key: equal amounts can differ
    in their last bit. Allowed: integers, boolean, string, binary, date, timestamp, decimal. Round it to a decimal or
    an integer in an earlier map.
    """
    if not names:
        raise SchemaError(f"{what}: no key column given; use at least one of {', '.join(schema.names)}")
    require_columns(schema, names, what)
    for name in names:
        if list(names).count(name) > 1:
            raise SchemaError(f"{what}: column {name!r} is given twice; name each key column once", column=name)
        kind = schema.field(name).type
        if not _is_key_type(kind):
            why, do = _why_no_key(kind)
            raise SchemaError(
                f"{what}: column {name!r} is {type_name(kind)}, which cannot be a key: {why}. Allowed: integers, "
                f"boolean, string, binary, date, timestamp, decimal. {do}",
                column=name,
            )


def _is_key_type(kind: pa.DataType) -> bool:
    return type_name(kind).split("(")[0] in _KEY_TYPES


def _why_no_key(kind: pa.DataType) -> tuple[str, str]:
    if pa.types.is_floating(kind):
        return "equal amounts can differ in their last bit", "Round it to a decimal or an integer in an earlier map."
    if pa.types.is_nested(kind):
        return "it is nested", "Extract the key fields in an earlier map."
    return "midstream cannot hash it", "Convert it in an earlier map."


def joined_schema(
    left: pa.Schema, right: pa.Schema, keys: Mapping[str, str], what: str, *, keeps_left: bool, keeps_right: bool
) -> pa.Schema:
    """The columns of a join: all of the left side, then those of the right side except its keys.

    ``keys`` maps keys of the right side to those of the left, which have the key of either side. All other columns of a
    side may be null if rows of the other side are kept without a match.
    """
    dropped = set(keys)
    added = [field for field in right if field.name not in dropped]
    taken = {name.lower() for name in left.names}
    if clash := [field.name for field in added if field.name.lower() in taken]:
        raise SchemaError(f"{what}: both sides have {', '.join(clash)}; rename or drop them on one side")
    own = set(keys.values())
    ours = (field.with_nullable(True) if keeps_right and field.name not in own else field for field in left)
    theirs = (field.with_nullable(True) if keeps_left else field for field in added)
    return pa.schema([*ours, *theirs])


def conform(batch: pa.RecordBatch | pa.Table, schema: pa.Schema, what: str) -> pa.RecordBatch:
    """Check a batch against the declared schema, and return it in exactly that schema.

    The order of columns, the representation of a type (``large_string``, dictionaries, other time units …) and lossless
    widening (``int`` to ``bigint``) are converted silently. Anything else is an error that starts with ``what``.

    >>> declared = parse_ddl("user string, n bigint")
    >>> conform(pa.record_batch({"n": pa.array([1], pa.int32()), "user": ["ann"]}), declared, "map 'score'").to_pylist()
    [{'user': 'ann', 'n': 1}]
    """
    if type(batch) is not pa.RecordBatch:
        batch = _single_batch(batch, what)
    if batch.schema.equals(schema):
        for index, field in enumerate(schema):
            if not field.nullable and batch.column(index).null_count:
                _refuse_nulls(what, field.name)
        return batch
    _check_names(batch.schema.names, schema, what)
    columns = [_converted(batch.column(field.name), field, what, field.name) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _single_batch(found: Any, what: str) -> pa.RecordBatch:
    if not isinstance(found, pa.Table):
        raise SchemaError(
            f"{what} returned {type(found).__name__}; allowed: pyarrow.RecordBatch or pyarrow.Table. "
            f"Use a row function to work with dicts."
        )
    batches = found.to_batches()
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=found.schema)


def _check_names(found: Sequence[str], schema: pa.Schema, what: str) -> None:
    missing = [name for name in schema.names if name not in found]
    extra = [name for name in found if name not in schema.names]
    twice = sorted({name for name in found if found.count(name) > 1})
    if not (missing or extra or twice):
        return
    parts = []
    if missing:
        parts.append(f"missing: {', '.join(missing)}")
    if extra:
        parts.append(f"not declared: {', '.join(extra)}")
    if twice:
        parts.append(f"more than once: {', '.join(twice)}")
    near = [(name, closest(name, extra)) for name in missing]
    hints = "".join(f" Did you mean {name!r} by {other!r}?" for name, other in near if other)
    raise SchemaError(
        f"{what}: the columns differ from the declared ones ({'; '.join(parts)}). "
        f"Declared: {to_ddl(schema)}.{hints} Return these columns, or declare others with returns=",
        missing=missing,
        extra=extra,
    )


def _refuse_nulls(what: str, path: str) -> Never:
    raise SchemaError(
        f"{what}: column {path!r} is NOT NULL but the result contains nulls; fill in or drop them, or declare the "
        f"column without NOT NULL",
        column=path,
    )


def _converted(array: pa.Array, field: pa.Field, what: str, path: str) -> pa.Array:
    """The array in the field's type. Recursive, because Arrow's cast neither reorders nor checks inside structs."""
    array = _plain(array)
    found, wanted = array.type, field.type
    if not field.nullable and array.null_count:
        _refuse_nulls(what, path)
    if found.equals(wanted):
        return array
    if pa.types.is_null(found):
        return pa.nulls(len(array), wanted)
    if pa.types.is_struct(wanted) and pa.types.is_struct(found):
        return _converted_struct(array, wanted, what, path)
    if pa.types.is_map(wanted) and pa.types.is_map(found):
        return _converted_map(array, wanted, what, path)
    if pa.types.is_list(wanted) and is_list_like(found):
        values = _converted(array.flatten(), wanted.value_field, what, f"{path}[]")
        return pa.ListArray.from_arrays(_offsets(array), values, type=wanted, mask=_mask(array))
    if not _widens(found, wanted):
        _refuse_type(what, path, wanted, found, "convert the values in the function, or declare that type")
    try:
        return array.cast(wanted)
    except pa.ArrowInvalid as error:
        _refuse_type(what, path, wanted, found, f"a value would change ({error}); convert the values in the function")


def _refuse_type(what: str, path: str, wanted: pa.DataType, found: pa.DataType, do: str) -> Never:
    expected, name = type_name(wanted), type_name(found)
    shown = name if name != expected else str(found)  # different Arrow types can have the same Spark name
    raise SchemaError(
        f"{what}: column {path!r} is declared {expected}, but the result is {shown}; {do}",
        column=path,
        expected=expected,
        found=name,
    )


def _plain(array: pa.Array) -> pa.Array:
    """The array without dictionary or run-end encoding."""
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if pa.types.is_run_end_encoded(array.type):
        return pc.run_end_decode(array)
    return array


def _converted_struct(array: pa.StructArray, wanted: pa.StructType, what: str, path: str) -> pa.StructArray:
    names = [field.name for field in array.type]
    _check_names(names, pa.schema(list(wanted)), f"{what}, struct {path!r}")
    # flatten(), not field(): a child under a null struct may hold anything, and must not count as a value.
    children = dict(zip(names, array.flatten(), strict=True))
    valid = array.is_valid()
    for field in wanted:
        if not field.nullable and array.null_count and not children[field.name].filter(valid).null_count:
            field = field.with_nullable(True)
        children[field.name] = _converted(children[field.name], field, what, f"{path}.{field.name}")
    columns = [children[field.name] for field in wanted]
    return pa.StructArray.from_arrays(columns, fields=list(wanted), mask=_mask(array))


def _converted_map(array: pa.MapArray, wanted: pa.MapType, what: str, path: str) -> pa.MapArray:
    entries = pa.struct([array.type.key_field, array.type.item_field])
    pairs = array.cast(pa.list_(entries))
    keys, values = pairs.flatten().flatten()
    keys = _converted(keys, wanted.key_field, what, f"{path}.key")
    values = _converted(values, wanted.item_field, what, f"{path}.value")
    return pa.MapArray.from_arrays(_offsets(array), keys, values, type=wanted, mask=_mask(array))


def _offsets(array: pa.Array) -> pa.Array:
    """Offsets starting at zero, for any slice and any list layout; a null has length zero."""
    if pa.types.is_map(array.type):
        array = array.cast(pa.list_(pa.struct([array.type.key_field, array.type.item_field])))
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())


def _mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _widens(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether every value of one type is also a value of the other, ignoring representation."""
    if pa.types.is_timestamp(wanted):
        # Other units are tried, and refused by value. A time without a zone is a different type, not another layout.
        return bool(pa.types.is_timestamp(found) and (found.tz is None) == (wanted.tz is None))
    if type_name(found) == type_name(wanted):
        return True
    if wanted in _INT_BITS:
        return _integer_bits(found) <= _INT_BITS[wanted]
    if wanted in _FLOAT_BITS:
        return _integer_bits(found) <= _FLOAT_BITS[wanted] or _FLOAT_BITS.get(found, 99) <= _FLOAT_BITS[wanted]
    if pa.types.is_decimal(wanted):
        whole = wanted.precision - wanted.scale
        if pa.types.is_decimal(found):
            return bool(found.scale <= wanted.scale and found.precision - found.scale <= whole)
        return bool(_DECIMAL_DIGITS.get(_integer_bits(found), 99) <= whole)
    return False


def _integer_bits(kind: pa.DataType) -> int:
    return _INT_BITS.get(kind) or _UNSIGNED_BITS.get(kind) or 99
