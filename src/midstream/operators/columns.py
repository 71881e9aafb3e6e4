"""Base classes of the operators that compute columns with expressions.

The description holds the expressions as text, so that types are known before any row arrives, and a change of the
columns above is checked by compiling the expressions again. The same text is the operator's payload: what an update
replaces.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import pyarrow as pa

from midstream.engine.bad_rows import batch_step
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import ONLY, OperatorInTask, OperatorStep
from midstream.errors import FlowError, SchemaError
from midstream.expressions.compiler import ColumnOf, column_of
from midstream.expressions.constants import expression_text, name_text
from midstream.expressions.parser import STAR, parse_column, parse_expression
from midstream.expressions.tree import Named
from midstream.flow.functions import pack
from midstream.flow.model import Operator
from midstream.flow.spec import InputChange, Spec
from midstream.flow.validate import check_name
from midstream.operators.rows import StreamRows
from midstream.storage.blobs import Blob

__all__ = ["ColumnsMethods", "ColumnsSpec", "Pairs", "copied", "named_columns", "only_names"]

Pairs = tuple[tuple[str, str], ...]
"""Names and expressions, or names and names."""


@dataclass(frozen=True)
class ColumnsSpec(TaskSpec):
    """An operator that computes the columns of its result with expressions over each row.

    ``keeps`` pairs columns of its input with columns of its result that hold the same values, where operators behind it
    rely on that: rows of a key stay in their task.
    """

    is_updatable: ClassVar[bool] = True
    has_preflight: ClassVar[bool] = True

    keeps: Pairs = ()

    @abstractmethod
    def columns_of(self, takes: pa.Schema, what: str) -> Sequence[tuple[str, str]]:
        """The name and the expression of each column of the result."""

    @abstractmethod
    def with_payload(self, payload: Any) -> Self:
        """The same operator with other expressions, in the form of :meth:`payload_of`."""

    @abstractmethod
    def payload_of(self, given: Any, what: str) -> Any:
        """An update's expressions as plain tuples and texts. Raises :class:`FlowError`."""

    @property
    @abstractmethod
    def payload(self) -> Any:
        """Its expressions, as they are stored."""

    @abstractmethod
    def kept_as(self, column: str) -> str | None:
        """The column of the result that is a copy of a column; None if there is none."""

    def kept(self, columns: tuple[str, ...]) -> tuple[str, ...] | None:
        """The copies of these columns, if all of them are copied."""
        found = [self.kept_as(column) for column in columns]
        return None if None in found else tuple(cast("list[str]", found))

    def keeping(self, columns: tuple[str, ...]) -> Spec:
        """Refuse updates that do not copy these columns."""
        return replace(self, keeps=tuple(zip(columns, self.kept(columns) or (), strict=True)))

    def compiled(self, takes: pa.Schema, what: str) -> list[tuple[str, ColumnOf]]:
        """The columns of the result, ready to run. Raises :class:`SchemaError`."""
        found = []
        for name, text in self.columns_of(takes, what):
            found.append((name, column_of(text, takes, f"{what}, {name}" if text != name_text(name) else what)))
        _refuse_twice([name for name, _ in found], what)
        if not found:
            raise SchemaError(f"{what}: no column is left; keep at least one")
        return found

    def schema_of(self, takes: pa.Schema, what: str) -> pa.Schema:
        """The columns of the result."""
        return pa.schema([pa.field(name, one.kind, one.nullable) for name, one in self.compiled(takes, what)])

    def packed(self, payload: Any, operator: str) -> Blob | None:
        """The expressions as plain tuples and texts."""
        return pack(self.payload, operator)

    @property
    def function_takes(self) -> tuple[str, ...]:
        """Expressions take nothing: they are text."""
        return ()

    def replaced(self, function: Any, local: Any, operator: str, what: str) -> tuple[Spec, Any]:
        """Replace the expressions."""
        spec = self.with_payload(self.payload_of(function, what))
        for column, copy in self.keeps:
            if spec.kept_as(column) != copy:
                raise FlowError(
                    f"{what}: operators behind it keep state by the key, so it must pass the column {column!r} on "
                    f"unchanged" + (f" as {copy!r}" if copy != column else "")
                )
        return spec, spec.payload

    def check_input(self, change: InputChange) -> None:
        """Accept any columns: :meth:`derived` compiles the expressions over the new ones."""

    def derived(
        self, inputs: Sequence[pa.Schema], schema: pa.Schema, payload: Any, what: str
    ) -> tuple[Spec, pa.Schema]:
        """The columns that the expressions compute from the input's columns."""
        return self, self.schema_of(inputs[0], what)

    def instantiate(self, operator: Operator, parts: Parts) -> OperatorInTask:
        """Compile the expressions."""
        return OperatorInTask((self.step(operator, parts.takes(operator)[0]),))

    def step(self, operator: Operator, takes: pa.Schema) -> OperatorStep:
        """The operator's step in a task."""
        columns = [column for _, column in self.compiled(takes, f"{self.kind} {operator.name!r}")]

        def compute(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
            return {ONLY: pa.RecordBatch.from_arrays([one(batch) for one in columns], schema=operator.schema)}

        return batch_step(operator, compute)


def _refuse_twice(names: Sequence[str], what: str) -> None:
    lower = [name.lower() for name in names]
    if twice := [name for name in names if lower.count(name.lower()) > 1]:
        raise SchemaError(f"{what}: two columns would be called {twice[0]!r}; give one of them another name")


def copied(text: str) -> str | None:
    """The column that an expression copies; None if it computes something.

    >>> copied("user"), copied("upper(user)")
    ('user', None)
    """
    found = parse_expression(text)
    return found.name if isinstance(found, Named) else None


def named_columns(given: Iterable[Any], what: str) -> Pairs:
    """Names and expressions of columns that a user passes as texts with a name, as mappings, or as pairs.

    >>> named_columns(["user", "eur * 2 AS twice", {"one": 1}], "select 's'")
    (('user', 'user'), ('twice', 'eur * 2'), ('one', '1'))
    """
    found: list[tuple[str, str]] = []
    for one in given:
        if isinstance(one, Mapping):
            found += [(_checked(name, what), expression_text(value, f"{what}, {name}")) for name, value in one.items()]
        elif isinstance(one, tuple | list) and len(one) == 2:
            found.append((_checked(one[0], what), expression_text(one[1], f"{what}, {one[0]}")))
        elif isinstance(one, str):
            found.append(_named(one, what))
        else:
            raise FlowError(
                f"{what}: expected a text like 'eur * 2 AS twice' or a dict like {{'twice': 'eur * 2'}}, found "
                f"{type(one).__name__} {one!r:.60}"
            )
    return tuple(found)


def _named(text: str, what: str) -> tuple[str, str]:
    try:
        name, alone, found = parse_column(text)
    except SchemaError as error:
        raise SchemaError(f"{what}: {error.message}", **error.fields) from None
    if found is None:
        return STAR, STAR
    if name is None:
        raise FlowError(f"{what}: the column {text!r:.80} has no name; write '… AS name', or name={text!r:.60}")
    return name, alone


def _checked(name: Any, what: str) -> str:
    if not isinstance(name, str) or not name:
        raise FlowError(f"{what}: the name of a column must be a text, found {type(name).__name__} {name!r:.60}")
    return name


def only_names(given: Any, what: str) -> tuple[str, ...]:
    """Names of columns that a user passes: one, or several.

    >>> only_names(["a", "b"], "drop 'd'"), only_names("a", "drop 'd'")
    (('a', 'b'), ('a',))
    """
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else ()
    if not names:
        raise FlowError(f"{what}: name at least one column, found {given!r:.60}")
    return tuple(_checked(name, what) for name in names)


class ColumnsMethods(StreamRows):
    """Base of the methods that add such an operator to a stream."""

    def _columns(self, name: str, spec: ColumnsSpec, given: Any, on_error: str) -> Self:
        what = f"{spec.kind} {check_name(name, spec.kind)!r}"
        spec = spec.with_payload(spec.payload_of(given, what))
        schema = spec.schema_of(self.schema, what)
        return cast(Self, self._flow._add(name, spec, (self._port,), schema, spec.payload, on_error))
