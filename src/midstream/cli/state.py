"""The tables of ``midstream state``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from rich.table import Table

from midstream.checkpoint.inspection import HeldState
from midstream.data.schema import type_name
from midstream.errors import StateError
from midstream.ids import Epoch


def held_table(epoch: Epoch | None, found: Sequence[HeldState]) -> Table:
    """All operators that keep state."""
    grid = Table(title=f"state after epoch {epoch}", title_justify="left")
    for name, justify in (("operator", "left"), ("kind", "left"), ("key", "left"), ("files", "right"), ("KB", "right")):
        grid.add_column(name, justify=justify)  # type: ignore[arg-type]
    for held in found:
        kind = f"{held.kind}, removed" if held.is_kept else held.kind
        grid.add_row(held.operator, kind, ", ".join(held.keys), str(held.files), f"{held.nbytes / 1024:,.0f}")
    return grid


def state_table(rows: pa.Table, operator: str, epoch: Epoch | None, limit: int) -> Table:
    """The first rows of an operator's state."""
    grid = Table(title=f"{operator} after epoch {epoch}", title_justify="left")
    for name in rows.column_names:
        grid.add_column(name)
    for row in rows.slice(0, limit).to_pylist():
        grid.add_row(*["" if value is None else str(value) for value in row.values()])
    if rows.num_rows > limit:
        grid.caption = f"{rows.num_rows - limit:,} more rows; --limit shows them"
    return grid


def parse_key(text: str, schema: pa.Schema) -> tuple[Any, ...]:
    """The values of a key given as text, with columns separated by commas.

    >>> parse_key("ann, 7", pa.schema({"user": pa.string(), "n": pa.int64()}))
    ('ann', 7)
    """
    parts = [text] if len(schema) == 1 else [part.strip() for part in text.split(",")]
    if len(parts) != len(schema):
        raise StateError(f"the key has the columns {', '.join(schema.names)}; found {len(parts)} values in {text!r}")
    values = []
    for part, field in zip(parts, schema, strict=True):
        try:
            values.append(pa.scalar(part).cast(field.type).as_py())
        except pa.ArrowInvalid as error:
            raise StateError(
                f"the key column {field.name!r} needs a {type_name(field.type)}, found {part!r}: {error}"
            ) from error
    return tuple(values)
