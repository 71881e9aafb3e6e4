"""with_columns: adds columns that expressions compute, or replaces columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import pyarrow as pa

from midstream.errors import FlowError
from midstream.expressions.constants import name_text
from midstream.expressions.parser import STAR
from midstream.operators.columns import ColumnsMethods, ColumnsSpec, Pairs, copied, named_columns


@dataclass(frozen=True)
class WithColumns(ColumnsSpec):
    """Adds columns behind those of the input, or replaces columns in their place."""

    kind: ClassVar[str] = "with_columns"

    columns: Pairs = ()

    def columns_of(self, takes: pa.Schema, what: str) -> Sequence[tuple[str, str]]:
        """The input's columns, some of them replaced, then the new ones. Expressions see the input's columns only."""
        new = dict(self.columns)
        found = [(name, new.pop(name, name_text(name))) for name in takes.names]
        return [*found, *((name, text) for name, text in self.columns if name in new)]

    def payload_of(self, given: Any, what: str) -> Pairs:
        """A dict, a text with a name, or a list of them."""
        if not isinstance(given, str | Mapping | list | tuple):
            raise FlowError(
                f"{what}: expected a dict like {{'total': 'eur * qty'}}, found {type(given).__name__} {given!r:.60}"
            )
        columns = named_columns([given] if isinstance(given, str | Mapping) else given, what)
        names = [name for name, _ in columns]
        if not columns:
            raise FlowError(f"{what}: name at least one column, e.g. with_columns('more', total='eur * qty')")
        if STAR in names:
            raise FlowError(f"{what}: '*' is not needed here: all columns stay")
        if twice := [name for name in names if names.count(name) > 1]:
            raise FlowError(f"{what}: the column {twice[0]!r} is given twice")
        return columns

    def with_payload(self, payload: Any) -> Self:
        """Other columns."""
        return replace(self, columns=payload)

    @property
    def payload(self) -> Pairs:
        """Its columns."""
        return self.columns

    def kept_as(self, column: str) -> str | None:
        """The column itself, unless it is replaced."""
        text = dict(self.columns).get(column)
        return column if text is None or copied(text) == column else None


class WithColumnsMethods(ColumnsMethods):
    """Add a with_columns to a stream."""

    def with_columns(self, name: str, *columns: str | Mapping[str, Any], on_error: str = "fail", **named: Any) -> Self:
        """Add columns that SQL expressions compute, or replace columns; all others stay.

        :param columns: expressions with a name (``"eur * qty AS total"``), or dicts of names and expressions.
        :param on_error: as in :meth:`select`.
        :param named: more columns: an expression as a text, or a constant as a Python value that is no text.

        >>> from midstream import Flow, ListSource, MemorySink
        >>> from midstream.testing import run_local
        >>> flow, out = Flow("sales"), MemorySink()
        >>> sales = flow.source("sales", ListSource([[{"eur": 3.5, "qty": 2}]], "eur double, qty int"))
        >>> sales.with_columns("more", total="eur * qty", eur="round(eur)", version=2).sink("out", out)
        >>> _ = run_local(flow)
        >>> out.rows
        [{'eur': 4.0, 'qty': 2, 'total': 7.0, 'version': 2}]
        """
        return self._columns(name, WithColumns(), [*columns, named], on_error)
