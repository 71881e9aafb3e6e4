"""drop: leaves columns out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import pyarrow as pa

from midstream.data.schema import require_columns
from midstream.expressions.constants import name_text
from midstream.operators.columns import ColumnsMethods, ColumnsSpec, only_names


@dataclass(frozen=True)
class Drop(ColumnsSpec):
    """Leaves columns out."""

    kind: ClassVar[str] = "drop"

    names: tuple[str, ...] = ()

    def columns_of(self, takes: pa.Schema, what: str) -> Sequence[tuple[str, str]]:
        """The other columns."""
        require_columns(takes, self.names, what)
        return [(name, name_text(name)) for name in takes.names if name not in self.names]

    def payload_of(self, given: Any, what: str) -> tuple[str, ...]:
        """A name, or a list of names."""
        return only_names(given, what)

    def with_payload(self, payload: Any) -> Self:
        """Other names."""
        return replace(self, names=payload)

    @property
    def payload(self) -> tuple[str, ...]:
        """The columns that are left out."""
        return self.names

    def kept_as(self, column: str) -> str | None:
        """The column, unless it is left out."""
        return None if column in self.names else column


class DropMethods(ColumnsMethods):
    """Add a drop to a stream."""

    def drop(self, name: str, *columns: str) -> Self:
        """Leave columns out; all others stay.

        >>> from midstream import Flow, ListSource
        >>> rows = Flow("f").source("in", ListSource([], "user string, eur int, note string"))
        >>> rows.drop("less", "note").schema.names
        ['user', 'eur']
        """
        return self._columns(name, Drop(), list(columns), "fail")
