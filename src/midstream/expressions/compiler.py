"""From a tree and a schema to a column of known type; names, types and functions are checked before any row arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Never

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.ddl import closest
from midstream.data.schema import require_columns, to_ddl, type_name
from midstream.errors import SchemaError
from midstream.expressions.arithmetic import ARITHMETIC, arithmetic, negative
from midstream.expressions.conversions import cast
from midstream.expressions.functions import FUNCTIONS, NOT_HERE, mixed
from midstream.expressions.kernels import Computed, as_column, chosen, compared, computed, converted, either
from midstream.expressions.lexemes import fail_at
from midstream.expressions.parser import parse_expression
from midstream.expressions.tree import Called, Cased, Cast, Expression, Literal, Named

__all__ = ["ColumnOf", "column_of", "condition_of"]

_COMPARISONS = ("=", "<>", "<", "<=", ">", ">=", "<=>")


@dataclass(frozen=True)
class ColumnOf:
    """An expression over rows of a schema, ready to run."""

    kind: pa.DataType
    nullable: bool
    copied: str
    """The column that it is a copy of; empty if it computes something."""
    part: Computed

    def __call__(self, batch: pa.RecordBatch) -> pa.Array:
        """Its values, one for each row. Raises the errors that values cause, such as ZeroDivisionError."""
        return as_column(self.part, batch)


@lru_cache(maxsize=1024)
def column_of(text: str, schema: pa.Schema, what: str) -> ColumnOf:
    """Compile an expression; ``what`` names it in errors.

    >>> from midstream.data.schema import parse_ddl
    >>> rows = pa.record_batch({"n": pa.array([1, 2, None], pa.int32())})
    >>> column_of("n * 2 + 1", rows.schema, "map").kind, column_of("n * 2 + 1", rows.schema, "map")(rows).to_pylist()
    (DataType(int32), [3, 5, None])
    >>> column_of("m + 1", rows.schema, "select 'more', m")
    Traceback (most recent call last):
    ...
    midstream.errors.SchemaError: select 'more', m: there is no column 'm'. Available: n
      m + 1
      ^
    """
    try:
        found = _Compiler(text, schema).part(parse_expression(text))
        if pa.types.is_null(found.kind):
            fail_at(text, 0, "NULL alone has no type; write CAST(NULL AS string), or another type")
        if pa.types.is_duration(found.kind):
            fail_at(text, 0, "an interval cannot be a column; store it as a bigint of microseconds")
        nothing = schema.empty_table().to_batches()
        empty = (
            nothing[0] if nothing else pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
        )
        try:
            as_column(found, empty)  # finds patterns that Arrow cannot read, and types that a kernel does not take
        except (pa.ArrowException, ValueError, TypeError) as error:
            fail_at(text, 0, f"Arrow cannot compute this: {error}")
    except SchemaError as error:
        raise SchemaError(f"{what}: {error.message}", **error.fields) from None
    nullable = (
        schema.field(found.shown).nullable if found.shown else not (found.is_constant and found.constant is not None)
    )
    return ColumnOf(found.kind, nullable, found.shown, found)


def condition_of(text: str, schema: pa.Schema, what: str) -> ColumnOf:
    """Compile a condition: an expression that is true, false or null."""
    found = column_of(text, schema, what)
    if not pa.types.is_boolean(found.kind):
        raise SchemaError(
            f"{what}: the condition {text!r:.80} is {type_name(found.kind)}; it must be a boolean, as comparisons are"
        )
    return found


class _Compiler:
    """One method per kind of expression."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text
        self._schema = schema

    def part(self, expression: Expression) -> Computed:
        """A part and, before it, those within it."""
        match expression:
            case Literal():
                return _literal(expression)
            case Named(name, position):
                return self._column(name, position)
            case Cast(argument, kind, lenient, position):
                return cast(self.part(argument), kind, lenient, self._failing(position))
            case Cased(cases, otherwise, position):
                return self._cased(cases, otherwise, self._failing(position))
            case Called():
                return self._called(expression)

    def _failing(self, position: int) -> Callable[[str], Never]:
        return lambda message: fail_at(self._text, position, message)

    def _column(self, name: str, position: int) -> Computed:
        try:
            require_columns(self._schema, [name], "")
        except SchemaError as error:
            fail_at(self._text, position, error.message.removeprefix(": "))
        index = self._schema.names.index(name)
        kind = self._schema.field(index).type
        return Computed(kind, lambda batch: batch.column(name), frozenset({name}), shown=name)

    def _cased(self, cases: Sequence[tuple[Expression, Expression]], otherwise: Expression, fail: Any) -> Computed:
        conditions = [self._boolean(condition, fail, "a condition of CASE") for condition, _ in cases]
        values, kind = mixed([*(self.part(value) for _, value in cases), self.part(otherwise)], fail, "CASE")
        return chosen(list(zip(conditions, values[:-1], strict=True)), values[-1], kind)

    def _boolean(self, expression: Expression, fail: Any, what: str) -> Computed:
        found = self.part(expression)
        if pa.types.is_null(found.kind):
            return converted(found, pa.bool_())
        if not pa.types.is_boolean(found.kind):
            fail(f"{what} must be a boolean, found {type_name(found.kind)}")
        return found

    def _called(self, call: Called) -> Computed:
        name, fail = call.function, self._failing(call.position)
        if name in ("and", "or"):
            left, right = (self._boolean(each, fail, f"a side of {name.upper()}") for each in call.arguments)
            return either(name == "or", left, right)
        if name == "not":
            return computed(pa.bool_(), pc.invert, [self._boolean(call.arguments[0], fail, "what follows NOT")])
        if name == "field":
            return self._field(call)
        parts = [self.part(argument) for argument in call.arguments]
        if name in ARITHMETIC:
            return arithmetic(name, parts[0], parts[1], fail)
        if name == "negative":
            return negative(parts[0], fail)
        if name in _COMPARISONS:
            return self._comparison(name, parts, fail)
        if name == "in":
            found = [self._comparison("=", [parts[0], choice], fail) for choice in parts[1:]]
            whole = found[0]
            for one in found[1:]:
                whole = either(True, whole, one)
            return whole
        if name == "element":
            fail("elements of arrays and maps cannot be taken here; do that in a map")
        return self._function(name, parts, fail)

    def _comparison(self, sign: str, parts: Sequence[Computed], fail: Any) -> Computed:
        (left, right), kind = mixed(parts, fail, sign)
        if pa.types.is_nested(kind):
            fail(f"{sign} cannot compare values of the type {type_name(kind)}")
        if pa.types.is_null(kind):
            left, right = converted(left, pa.bool_()), converted(right, pa.bool_())
        return compared(sign, left, right)

    def _field(self, call: Called) -> Computed:
        inner, name = self.part(call.arguments[0]), call.arguments[1]
        assert isinstance(name, Literal)
        fail = self._failing(name.position)
        if not pa.types.is_struct(inner.kind):
            fail(f"a {type_name(inner.kind)} has no field {name.value!r}; only a struct has fields")
        names = [field.name for field in inner.kind]
        if name.value not in names:
            near = closest(name.value, names)
            hint = f"; did you mean {near!r}?" if near else "."
            fail(f"the struct has no field {name.value!r}{hint} It has ({to_ddl(pa.schema(list(inner.kind)))})")
        kind = inner.kind.field(names.index(name.value)).type
        return computed(kind, lambda a: pc.struct_field(a, name.value), [inner])

    def _function(self, name: str, parts: Sequence[Computed], fail: Any) -> Computed:
        if name in NOT_HERE:
            fail(f"{name} is not possible within an expression: {NOT_HERE[name]}")
        found = FUNCTIONS.get(name)
        if found is None:
            near = closest(name, list(FUNCTIONS))
            hint = f"did you mean {near!r}? " if near else ""
            known = ", ".join(sorted(FUNCTIONS))
            fail(f"there is no function {name!r}; {hint}Others can be called in a map. Known: {known}")
        assert found is not None
        if len(parts) < found.least or (found.most is not None and len(parts) > found.most):
            most = "or more" if found.most is None else f"to {found.most}" if found.most != found.least else ""
            fail(f"{name} takes {found.least} {most}".rstrip() + f" arguments, found {len(parts)}")
        return found.build(parts, fail)


def _literal(literal: Literal) -> Computed:
    value = pa.scalar(literal.value, literal.kind)
    return Computed(literal.kind, lambda batch: value, constant=literal.value, is_constant=True)
