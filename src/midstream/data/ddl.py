"""Converts between Spark DDL and Arrow schemas.

Users write ``"user string, p double"``; the engine works with :class:`pyarrow.Schema`. This module converts in both
directions and needs no JVM. Import these names from :mod:`midstream.data.schema`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Never, Protocol, runtime_checkable

import pyarrow as pa

from midstream.errors import SchemaError

__all__ = ["Declared", "SparkStruct", "ddl_of", "parse_ddl", "quote_name", "to_ddl", "type_name"]

_SIMPLE: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMAL = frozenset({"decimal", "dec", "numeric"})
_SIZED_STRING = frozenset({"varchar", "char", "character"})
_NESTED = frozenset({"array", "map", "struct"})
_KNOWN_TYPES = (*_SIMPLE, *sorted(_DECIMAL | _SIZED_STRING | _NESTED))
_ALLOWED_TYPES = (
    "boolean, tinyint, smallint, int, bigint, float, double, decimal(p,s), string, binary, date, timestamp, "
    "timestamp_ntz, array<T>, map<K,V>, struct<name: T>"
)
# Types that Spark has and midstream does not, with what to use instead.
_UNSUPPORTED = {
    "interval": "store the length as a bigint of microseconds",
    "variant": "use a string of JSON, or a struct",
    "void": "use the type that the column's values will have",
    "time": "store the time of day as a bigint of microseconds",
    "geometry": "use binary (WKB)",
    "geography": "use binary (WKB)",
    "object": "use binary",
    "collate": "compare with a function; midstream strings have Spark's default collation UTF8_BINARY",
}

_TOKEN = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|/\*.*?\*/)
      | (?P<word>[A-Za-z0-9_]+)
      | (?P<quoted>`(?:[^`]|``)*`)
      | (?P<text>[rR]?'(?:[^'\\]|\\.|'')*'|[rR]?"(?:[^"\\]|\\.|"")*")
      | (?P<mark>[<>(),:])""",
    re.VERBOSE | re.DOTALL,
)
# Spark's lexer reads these as literals, never as names (1L, 2e5, 3BD …).
_NUMBER = re.compile(r"\d+(?:[lsyfd]|bd)?|\d+e\d+(?:[fd]|bd)?", re.IGNORECASE)
_BACKTICK_HINT = "put names with characters other than letters, digits and _ in `backticks`"
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # word, number, quoted, text, mark or end
    text: str
    position: int

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text)


@runtime_checkable
class SparkStruct(Protocol):
    """A ``pyspark.sql.types.StructType``. The local runtime needs no pyspark, so it is recognised by its attributes."""

    @property
    def fields(self) -> Any:
        """Its fields, each with a name, a type, and whether it may be null."""

    def simpleString(self) -> str:
        """Its text, in which names are not quoted."""


Declared = str | SparkStruct
"""Columns as users declare them: Spark's DDL, or a StructType."""


def ddl_of(declared: Declared) -> str:
    """The DDL of columns that a user declares."""
    if not isinstance(declared, SparkStruct):
        return declared
    return ", ".join(f"{quote_name(f.name)} {spark_type(f.dataType)}{_not_null(f)}" for f in declared.fields)


def spark_type(kind: Any, *, not_null: bool = True) -> str:
    """The DDL of one of pyspark's types, with or without NOT NULL; ``simpleString()`` would not quote names."""
    if hasattr(kind, "fields"):
        fields = [
            f"{quote_name(field.name)}: {spark_type(field.dataType, not_null=not_null)}"
            f"{_not_null(field) if not_null else ''}"
            for field in kind.fields
        ]
        return f"struct<{', '.join(fields)}>"
    if hasattr(kind, "elementType"):
        return f"array<{spark_type(kind.elementType, not_null=not_null)}>"
    if hasattr(kind, "keyType"):
        key, value = (spark_type(each, not_null=not_null) for each in (kind.keyType, kind.valueType))
        return f"map<{key}, {value}>"
    return str(kind.simpleString())


def parse_ddl(ddl: Declared) -> pa.Schema:
    """Read a schema written in Spark's DDL, or given as a StructType.

    Accepts what Spark accepts: ``name type`` or ``name: type``, backticks, ``NOT NULL``, ``COMMENT '…'`` (dropped:
    streams do not use it), any nesting, and the ``struct<…>`` form of ``df.schema.simpleString()``. Unlike
    Spark it refuses column names that differ only in case, because no query could tell them apart later.

    >>> parse_ddl("user string not null, scores array<double>")
    user: string not null
    scores: list<item: double>
      child 0, item: double

    >>> parse_ddl("user strng")
    Traceback (most recent call last):
    ...
    midstream.errors.SchemaError: unknown type 'strng'; did you mean 'string'?
      user strng
           ^
    """
    ddl = ddl_of(ddl)
    if not isinstance(ddl, str):
        raise SchemaError(
            f"a schema must be Spark DDL, for example 'user string, p double', or a StructType; found "
            f"{type(ddl).__name__} {ddl!r}"
        )
    return _Parser(ddl).schema()


class _Parser:
    """Recursive descent over the tokens; one method per rule of the grammar."""

    def __init__(self, ddl: str) -> None:
        self._ddl = ddl
        self._tokens = self._tokenize()
        self._next = 0

    def schema(self) -> pa.Schema:
        if self._peek().kind == "end":
            self._fail(
                self._peek(), "the schema is empty; give at least one column, for example 'user string, p double'"
            )
        if self._peek().text.lower() == "struct" and self._tokens[1].text == "<":
            start = self._take()
            fields = self._struct_fields()
            if not fields:
                self._fail(start, "the schema is empty; give at least one column")
        else:
            fields = self._fields(closing="")
        if self._peek().kind != "end":
            self._fail(self._peek(), f"expected ',' or the end of the schema, found {self._peek()}")
        return pa.schema(fields)

    def _fields(self, closing: str) -> list[pa.Field]:
        fields: dict[str, pa.Field] = {}
        while True:
            start = self._peek()
            field = self._field(closing)
            twin = fields.setdefault(field.name.lower(), field)
            if twin is not field:
                self._fail(start, f"column {field.name!r} is declared twice{_same_but_case(twin.name, field.name)}")
            if self._peek().text != ",":
                return list(fields.values())
            self._take()

    def _field(self, closing: str) -> pa.Field:
        name = self._name()
        if self._peek().text == ":":
            self._take()
        kind = self._type(f"of column {name!r}")
        nullable = True
        if self._peek_word() == "not":
            self._take()
            self._expect_word("null", "after NOT")
            nullable = False
        if self._peek_word() == "comment":
            self._take()
            if self._peek().kind != "text":
                self._fail(self._peek(), f"expected a quoted comment, found {self._peek()}")
            while self._peek().kind == "text":
                self._take()
        ending = self._peek()
        if ending.kind != "end" and ending.text not in (",", closing):
            end = repr(closing) if closing else "the end of the schema"
            self._fail(ending, f"expected ',', NOT NULL, COMMENT or {end} after column {name!r}, found {ending}")
        return pa.field(name, kind, nullable=nullable)

    def _name(self) -> str:
        token = self._take()
        if token.kind == "word":
            return token.text
        if token.kind == "quoted":
            name = token.text[1:-1].replace("``", "`")
            if not name:
                self._fail(token, "a column name must not be empty")
            return name
        hint = f"; {_BACKTICK_HINT}" if token.kind == "number" else ""
        return self._fail(token, f"expected a column name, found {token}{hint}")

    def _type(self, of: str) -> pa.DataType:
        token = self._take()
        if token.kind != "word":
            self._fail(token, f"expected the type {of}, found {token}")
        word = token.text.lower()
        if word in _SIMPLE:
            if self._peek_word() == "collate":
                self._unsupported(self._peek())
            return _SIMPLE[word]
        if word in _DECIMAL:
            return self._decimal(token)
        if word in _SIZED_STRING:
            self._expect("(", f"and a length after {token.text!r}, as in {word}(20)")
            self._integer("a length")
            self._expect(")", "after the length")
            return pa.string()
        if word == "array":
            self._expect("<", "after 'array', as in array<int>")
            item = self._type("of the array's elements")
            self._expect(">", "after the type of the array's elements")
            return pa.list_(item)
        if word == "map":
            self._expect("<", "after 'map', as in map<string, int>")
            key = self._type("of the map's keys")
            self._expect(",", "after the type of the map's keys")
            value = self._type("of the map's values")
            self._expect(">", "after the type of the map's values")
            return pa.map_(key, value)
        if word == "struct":
            return pa.struct(self._struct_fields())
        if word in _UNSUPPORTED:
            self._unsupported(token)
        near = difflib.get_close_matches(word, _KNOWN_TYPES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed: {_ALLOWED_TYPES}"
        return self._fail(token, f"unknown type {token.text!r}; {hint}")

    def _struct_fields(self) -> list[pa.Field]:
        self._expect("<", "after 'struct', as in struct<a: int, b: string>")
        fields = [] if self._peek().text == ">" else self._fields(closing=">")
        self._expect(">", "after the last field of the struct")
        return fields

    def _decimal(self, start: _Token) -> pa.DataType:
        precision, scale = 10, 0
        if self._peek().text == "(":
            self._take()
            precision = self._integer("a precision")
            if self._peek().text == ",":
                self._take()
                scale = self._integer("a scale")
            self._expect(")", "after precision and scale")
        if not 1 <= precision <= 38 or scale > precision:
            found = f"decimal({precision},{scale})"
            self._fail(start, f"{found} does not exist; allowed: 1 <= precision <= 38 and scale <= precision")
        return pa.decimal128(precision, scale)

    def _integer(self, what: str) -> int:
        token = self._take()
        if not token.text.isdecimal():
            self._fail(token, f"expected {what} (a whole number), found {token}")
        return int(token.text)

    def _unsupported(self, token: _Token) -> Never:
        word = token.text.lower()
        thing = "collations" if word == "collate" else f"the type {word!r}"
        self._fail(token, f"Spark has {thing}, midstream does not; {_UNSUPPORTED[word]}")

    def _tokenize(self) -> list[_Token]:
        tokens = []
        position = 0
        while position < len(self._ddl):
            match = _TOKEN.match(self._ddl, position)
            if match is None:
                char = self._ddl[position]
                hint = "it is never closed" if char in "`'\"" else _BACKTICK_HINT
                self._fail(_Token("mark", char, position), f"unexpected character {char!r}; {hint}")
            kind, text = str(match.lastgroup), match.group()
            if kind != "skip":
                number = kind == "word" and _NUMBER.fullmatch(text)
                tokens.append(_Token("number" if number else kind, text, position))
            position = match.end()
        tokens.append(_Token("end", "", len(self._ddl)))
        return tokens

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _peek_word(self) -> str:
        token = self._peek()
        return token.text.lower() if token.kind == "word" else ""

    def _take(self) -> _Token:
        token = self._peek()
        self._next = min(self._next + 1, len(self._tokens) - 1)  # the end token may be taken repeatedly
        return token

    def _expect(self, mark: str, why: str) -> None:
        token = self._take()
        if token.kind != "mark" or token.text != mark:
            self._fail(token, f"expected {mark!r} {why}, found {token}")

    def _expect_word(self, word: str, why: str) -> None:
        token = self._take()
        if token.kind != "word" or token.text.lower() != word:
            self._fail(token, f"expected {word.upper()} {why}, found {token}")

    def _fail(self, token: _Token, message: str) -> Never:
        start = self._ddl.rfind("\n", 0, token.position) + 1
        line = self._ddl[start:].split("\n", 1)[0].replace("\t", " ")
        caret = " " * (token.position - start) + "^"
        raise SchemaError(f"{message}\n  {line}\n  {caret}", ddl=self._ddl, position=token.position)


def _same_but_case(first: str, second: str) -> str:
    return "" if first == second else f" (to Spark it is the same as {first!r}: the names differ only in case)"


def quote_name(name: str) -> str:
    """A column name for DDL: in backticks only if needed.

    >>> quote_name("user"), quote_name("user id")
    ('user', '`user id`')
    """
    return name if _PLAIN_NAME.fullmatch(name) else f"`{name.replace('`', '``')}`"


def to_ddl(schema: pa.Schema) -> str:
    """Write a schema as Spark DDL, the inverse of :func:`parse_ddl`.

    >>> to_ddl(parse_ddl("`user id` STRING NOT NULL, tags: array<string>"))
    '`user id` string NOT NULL, tags array<string>'
    """
    return ", ".join(f"{quote_name(f.name)} {type_name(f.type)}{_not_null(f)}" for f in schema)


_NAME_BY_ID: dict[int, str] = {
    pa.lib.Type_NA: "void",
    pa.lib.Type_BOOL: "boolean",
    pa.lib.Type_INT8: "tinyint",
    pa.lib.Type_INT16: "smallint",
    pa.lib.Type_INT32: "int",
    pa.lib.Type_INT64: "bigint",
    pa.lib.Type_FLOAT: "float",
    pa.lib.Type_DOUBLE: "double",
    pa.lib.Type_STRING: "string",
    pa.lib.Type_LARGE_STRING: "string",
    pa.lib.Type_STRING_VIEW: "string",
    pa.lib.Type_BINARY: "binary",
    pa.lib.Type_LARGE_BINARY: "binary",
    pa.lib.Type_BINARY_VIEW: "binary",
    pa.lib.Type_FIXED_SIZE_BINARY: "binary",
    pa.lib.Type_DATE32: "date",
    pa.lib.Type_DATE64: "date",
}


def type_name(kind: pa.DataType) -> str:
    """Spark's name of an Arrow type, for messages and DDL, regardless of Arrow's representation.

    >>> type_name(pa.large_string()), type_name(pa.dictionary(pa.int32(), pa.string()))
    ('string', 'string')
    >>> type_name(pa.list_(pa.decimal128(12, 2)))
    'array<decimal(12,2)>'

    Types that Spark does not have keep their Arrow names:

    >>> type_name(pa.uint64())
    'uint64'
    """
    if kind.id in _NAME_BY_ID:
        return _NAME_BY_ID[kind.id]
    if pa.types.is_dictionary(kind):
        return type_name(kind.value_type)
    if pa.types.is_timestamp(kind):
        return "timestamp_ntz" if kind.tz is None else "timestamp"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_map(kind):
        return f"map<{type_name(kind.key_type)},{type_name(kind.item_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{_struct_names(kind)}>"
    if is_list_like(kind):
        return f"array<{type_name(kind.value_type)}>"
    return str(kind)


def is_list_like(kind: pa.DataType) -> bool:
    """Whether this is any of Arrow's list types."""
    return kind.id in _LIST_IDS


_LIST_IDS = frozenset(
    {
        pa.lib.Type_LIST,
        pa.lib.Type_LARGE_LIST,
        pa.lib.Type_FIXED_SIZE_LIST,
        pa.lib.Type_LIST_VIEW,
        pa.lib.Type_LARGE_LIST_VIEW,
    }
)


def _struct_names(kind: Iterable[pa.Field]) -> str:
    return ", ".join(f"{quote_name(f.name)}: {type_name(f.type)}{_not_null(f)}" for f in kind)


def _not_null(field: Any) -> str:
    return "" if field.nullable else " NOT NULL"


def closest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate that a mistyped name most likely meant, or ``None``.

    >>> closest("User", ["user", "users"]), closest("zzz", ["user"])
    ('user', None)
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None
