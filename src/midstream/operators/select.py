"""select: the columns that a list of expressions computes."""

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
class Select(ColumnsSpec):
    """Gives each row other columns, each with a name and an expression. The name ``*`` stands for all columns."""

    kind: ClassVar[str] = "select"

    columns: Pairs = ()

    def columns_of(self, takes: pa.Schema, what: str) -> Sequence[tuple[str, str]]:
        """Its columns, with those of the input in place of ``*``."""
        found: list[tuple[str, str]] = []
        for name, text in self.columns:
            found += [(each, name_text(each)) for each in takes.names] if name == STAR else [(name, text)]
        return found

    def payload_of(self, given: Any, what: str) -> Pairs:
        """One text, a dict, or a list of them."""
        columns = named_columns([given] if isinstance(given, str | Mapping) else _listed(given, what), what)
        if not columns:
            raise FlowError(f"{what}: name at least one column, e.g. select('pick', 'user', total='eur * qty')")
        return columns

    def with_payload(self, payload: Any) -> Self:
        """Other columns."""
        return replace(self, columns=payload)

    @property
    def payload(self) -> Pairs:
        """Its columns."""
        return self.columns

    def kept_as(self, column: str) -> str | None:
        """The first column whose expression is just this column."""
        for name, text in self.columns:
            if name == STAR:
                return column
            if copied(text) == column:
                return name
        return None


def _listed(given: Any, what: str) -> Sequence[Any]:
    if not isinstance(given, list | tuple):
        raise FlowError(
            f"{what}: expected columns, as a text, a dict or a list of them, found {type(given).__name__} {given!r:.60}"
        )
    return given


class SelectMethods(ColumnsMethods):
    """Add a select to a stream."""

    def select(self, name: str, *columns: str | Mapping[str, Any], on_error: str = "fail", **named: Any) -> Self:
        """Compute the columns of the result with SQL expressions, on whole slices of rows.

        Expressions are Spark's SQL, with its types and values; ``docs/expressions.md`` lists the functions. They are
        checked at once, against the columns of this stream.

        :param columns: names of columns, expressions with a name (``"eur * qty AS total"``), ``"*"``, or dicts of names
            and expressions.
        :param on_error: with ``"branch"``, rows whose values cannot be computed (a zero divisor, an overflow, a text
            that is no number) leave at :meth:`Stream.errors`.
        :param named: more columns: an expression as a text, or a constant as a Python value that is no text.

        >>> from midstream import Flow, ListSource, MemorySink
        >>> from midstream.testing import run_local
        >>> flow, out = Flow("sales"), MemorySink()
        >>> sales = flow.source("sales", ListSource([[{"user": "ann", "eur": 3.5, "qty": 2}]],
        ...                                         "user string, eur double, qty int"))
        >>> sales.select("pick", "upper(user) AS who", total="eur * qty", currency="'EUR'").sink("out", out)
        >>> _ = run_local(flow)
        >>> out.rows
        [{'who': 'ANN', 'total': 7.0, 'currency': 'EUR'}]
        """
        return self._columns(name, Select(), [*columns, named], on_error)
