"""Tables that sinks own: who writes to one, the column that tells epochs apart, and whether rows replace others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from midstream.data.schema import require_columns, type_name
from midstream.errors import FlowError, SchemaError

__all__ = ["EPOCH_COLUMN", "SinkOwner", "check_keys", "key_of", "texts_of"]

EPOCH_COLUMN = "epoch"
"""The column that sinks add to rows."""

MODES = ("append", "upsert")
"""What a sink does with rows: adds them, or lets them take the place of rows with the same key."""


@dataclass(frozen=True)
class SinkOwner:
    """The writer of a table: a sink of a job, in one driver process."""

    job: str
    flow: str
    sink: str
    driver: str


def key_of(kind: str, mode: str, key: str | Sequence[str]) -> tuple[str, ...]:
    """The columns by which rows are replaced; none if they are added. ``kind`` is the class of the sink.

    >>> key_of("DeltaSink", "upsert", "user")
    ('user',)
    """
    keys = (key,) if isinstance(key, str) else tuple(key)
    if mode not in MODES:
        raise FlowError(f"{kind}: mode {mode!r} is not known; allowed: {', '.join(MODES)}")
    if mode == "upsert" and (not keys or len(set(keys)) != len(keys)):
        raise FlowError(
            f"{kind}: mode='upsert' needs key=, the columns by which a row replaces another, each once; found "
            f"key={key!r}"
        )
    if mode != "upsert" and keys:
        raise FlowError(f"{kind}: key={key!r} is for mode='upsert'; found mode={mode!r}")
    return keys


def check_keys(key: Sequence[str], schema: pa.Schema, what: str) -> None:
    """Refuse keys that the rows lack, or whose values a lake cannot compare exactly."""
    require_columns(schema, key, f"{what}, key")
    for name in key:
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind):
            raise SchemaError(
                f"{what}: column {name!r} of the key is {type_name(kind)}, by which rows cannot be told apart in a "
                f"table of a lake; use columns of text, whole numbers, decimals, times, booleans or binary",
                column=name,
            )


def texts_of(options: Mapping[str, str] | None, what: str) -> dict[str, str]:
    """Options of a lake, which are texts."""
    found = dict(options or {})
    for name, value in found.items():
        if {type(name), type(value)} != {str}:
            raise FlowError(f"{what} has {name!r}: {type(value).__name__}; give texts only")
    return found
