"""rename: gives columns other names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import pyarrow as pa

from midstream.data.schema import require_columns
from midstream.errors import FlowError
from midstream.expressions.constants import name_text
from midstream.operators.columns import ColumnsMethods, ColumnsSpec, Pairs


@dataclass(frozen=True)
class Rename(ColumnsSpec):
    """Gives columns other names: pairs of the old name and the new one."""

    kind: ClassVar[str] = "rename"

    names: Pairs = ()

    def columns_of(self, takes: pa.Schema, what: str) -> Sequence[tuple[str, str]]:
        """The input's columns in their order."""
        require_columns(takes, [old for old, _ in self.names], what)
        new = dict(self.names)
        return [(new.get(name, name), name_text(name)) for name in takes.names]

    def payload_of(self, given: Any, what: str) -> Pairs:
        """A dict of old and new names."""
        pairs = tuple(given.items()) if isinstance(given, Mapping) else given
        if not isinstance(pairs, list | tuple) or not pairs or not all(map(_is_pair, pairs)):
            raise FlowError(f"{what}: expected a dict like {{'old name': 'new name'}}, found {given!r:.60}")
        return tuple((old, new) for old, new in pairs)

    def with_payload(self, payload: Any) -> Self:
        """Other names."""
        return replace(self, names=payload)

    @property
    def payload(self) -> Pairs:
        """Its pairs of names."""
        return self.names

    def kept_as(self, column: str) -> str:
        """Its new name."""
        return dict(self.names).get(column, column)


def _is_pair(found: Any) -> bool:
    is_pair = isinstance(found, list | tuple) and len(found) == 2
    return is_pair and all(isinstance(name, str) and name for name in found)


class RenameMethods(ColumnsMethods):
    """Add a rename to a stream."""

    def rename(self, name: str, columns: Mapping[str, str]) -> Self:
        """Give columns other names: a dict of old names and new ones. All other columns stay.

        >>> from midstream import Flow, ListSource
        >>> rows = Flow("f").source("in", ListSource([], "user string, eur int"))
        >>> rows.rename("english", {"eur": "euros"}).schema.names
        ['user', 'euros']
        """
        return self._columns(name, Rename(), columns, "fail")
