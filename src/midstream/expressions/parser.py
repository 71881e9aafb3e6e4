"""From text to a tree: Spark's SQL expressions, by precedence climbing.

One reader per level, loosest first: OR, AND, NOT, predicates (comparisons, IS, IN, BETWEEN, LIKE), sums, products,
signs, and what follows a value (a field, a cast).
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Never

import pyarrow as pa

from midstream.data.ddl import parse_ddl
from midstream.errors import SchemaError
from midstream.expressions.lexemes import Lexeme, fail_at, lexemes_of, unescaped
from midstream.expressions.tree import Called, Cased, Cast, Expression, Literal, Named

__all__ = ["STAR", "parse_column", "parse_expression"]

STAR = "*"
"""The result of :func:`parse_column` for all columns."""

_COMPARISONS = {"=": "=", "==": "=", "<>": "<>", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "<=>": "<=>"}
_MOMENTS = ("DATE", "TIMESTAMP", "TIMESTAMP_NTZ", "TIMESTAMP_LTZ")
_RESERVED = frozenset(
    (*("AND", "OR", "NOT", "IS", "IN", "BETWEEN", "LIKE", "ILIKE", "RLIKE", "REGEXP", "CASE", "WHEN", "THEN", "ELSE"),
     *("END", "AS", "NULL", "TRUE", "FALSE", "DIV", "DISTINCT", "FROM", "SELECT", "WHERE", "OVER", "GROUP", "ORDER"),
     *("BY", "UNION", "JOIN"))
)  # fmt: skip
_UNITS_US = {
    "WEEK": 604_800_000_000,
    "DAY": 86_400_000_000,
    "HOUR": 3_600_000_000,
    "MINUTE": 60_000_000,
    "SECOND": 1_000_000,
    "MILLISECOND": 1_000,
    "MICROSECOND": 1,
}
UTC_TIME = pa.timestamp("us", "UTC")
_MOST_DEPTH = 100


def parse_expression(text: str) -> Expression:
    """Read one expression.

    >>> parse_expression("n + 1").function
    '+'
    >>> parse_expression("n +")
    Traceback (most recent call last):
    ...
    midstream.errors.SchemaError: expected a value, found the end
      n +
         ^
    """
    reader = _Reader(text)
    found = reader.expression()
    reader.end()
    return found


def parse_column(text: str) -> tuple[str | None, str, Expression | None]:
    """Read one column of a select: its name, if it has one, the text of its expression, and the expression.

    For :data:`STAR` there is no expression.

    >>> parse_column("eur * 2 AS twice")[:2], parse_column("eur")[:2], parse_column("eur * 2")[:2], parse_column("*")
    (('twice', 'eur * 2'), ('eur', 'eur'), (None, 'eur * 2'), (None, '*', None))
    """
    reader = _Reader(text)
    if reader.take_mark(STAR):
        reader.end()
        return None, STAR, None
    found = reader.expression()
    alone = text[: reader.peek().position].rstrip()
    name = found.name if isinstance(found, Named) else None
    if isinstance(found, Called) and found.function == "field" and isinstance(found.arguments[1], Literal):
        name = found.arguments[1].value
    has_name = reader.take_word("AS") or reader.peek().kind in ("word", "quoted")
    if has_name and reader.peek().word not in _RESERVED:
        name = reader.name()
    reader.end()
    return name, alone, found


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._lexemes = lexemes_of(text)
        self._next = 0
        self._depth = 0

    # ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def peek(self, ahead: int = 0) -> Lexeme:
        """A lexeme that is not taken yet; the end is followed by the end."""
        return self._lexemes[min(self._next + ahead, len(self._lexemes) - 1)]

    def take(self) -> Lexeme:
        """The next lexeme."""
        found = self.peek()
        self._next += 1
        return found

    def take_word(self, *words: str) -> bool:
        """Take these words if they come next."""
        if any(self.peek(i).word != word for i, word in enumerate(words)):
            return False
        self._next += len(words)
        return True

    def take_mark(self, mark: str) -> bool:
        """Take a mark if it comes next."""
        if self.peek().kind != "mark" or self.peek().text != mark:
            return False
        self._next += 1
        return True

    def name(self) -> str:
        """A name, with or without backticks."""
        found = self.take()
        if found.kind == "word":
            return found.text
        if found.kind == "quoted" and len(found.text) > 2:
            return found.text[1:-1].replace("``", "`")
        return self._fail(found, f"expected a name, found {found}")

    def end(self) -> None:
        """Refuse anything but the end."""
        found = self.peek()
        if found.kind == "end":
            return
        if found.word == "OVER":
            self._fail(
                found, "windows over rows are not possible here: rows come slice by slice; use key_by and process"
            )
        self._fail(found, f"expected an operator or the end of the expression, found {found}")

    def _expect_mark(self, mark: str, why: str) -> None:
        if not self.take_mark(mark):
            self._fail(self.peek(), f"expected {mark!r} {why}, found {self.peek()}")

    def _expect_word(self, word: str, why: str) -> None:
        if not self.take_word(word):
            self._fail(self.peek(), f"expected {word} {why}, found {self.peek()}")

    def _fail(self, at: Lexeme, message: str) -> Never:
        fail_at(self._text, at.position, message)

    # ── levels ────────────────────────────────────────────────────────────────────────────────────────────────────

    def expression(self) -> Expression:
        """The loosest level: OR."""
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            self._fail(
                self.peek(), f"the expression is nested more than {_MOST_DEPTH} levels deep; use several columns"
            )
        found = self._conjunction()
        while self.peek().word == "OR":
            at = self.take().position
            found = Called("or", (found, self._conjunction()), at)
        self._depth -= 1
        return found

    def _conjunction(self) -> Expression:
        found = self._negation()
        while self.peek().word == "AND":
            at = self.take().position
            found = Called("and", (found, self._negation()), at)
        return found

    def _negation(self) -> Expression:
        signs = []
        while self.peek().word == "NOT" or (self.peek().kind == "mark" and self.peek().text == "!"):
            signs.append(self.take().position)
        found = self._predicate()
        for at in reversed(signs):
            found = Called("not", (found,), at)
        return found

    def _predicate(self) -> Expression:
        found = self._sum()
        while True:
            here = self.peek()
            if here.kind == "mark" and here.text in _COMPARISONS:
                self.take()
                found = Called(_COMPARISONS[here.text], (found, self._sum()), here.position)
            elif here.word == "IS":
                self.take()
                found = self._is(found, here.position)
            else:
                is_not = here.word == "NOT"
                if self.peek(is_not).word not in ("IN", "BETWEEN", "LIKE", "ILIKE", "RLIKE", "REGEXP"):
                    return found
                if is_not:
                    self.take()
                found = self._matched(found)
                found = Called("not", (found,), here.position) if is_not else found

    def _is(self, value: Expression, at: int) -> Expression:
        is_not = self.take_word("NOT")
        if self.take_word("NULL"):
            found: Expression = Called("isnull", (value,), at)
        elif self.peek().word in ("TRUE", "FALSE"):
            wanted = Literal(self.take().word == "TRUE", pa.bool_(), at)
            found = Called("<=>", (value, wanted), at)
        elif self.take_word("DISTINCT"):
            self._expect_word("FROM", "after IS DISTINCT")
            found = Called("not", (Called("<=>", (value, self._sum()), at),), at)
        else:
            self._fail(self.peek(), f"expected NULL, TRUE, FALSE or DISTINCT FROM after IS, found {self.peek()}")
        return Called("not", (found,), at) if is_not else found

    def _matched(self, value: Expression) -> Expression:
        here = self.take()
        if here.word == "BETWEEN":
            low = self._sum()
            self._expect_word("AND", "between the bounds of BETWEEN")
            high = self._sum()
            both = (Called(">=", (value, low), here.position), Called("<=", (value, high), here.position))
            return Called("and", both, here.position)
        if here.word == "IN":
            self._expect_mark("(", "after IN")
            if self.peek().word == "SELECT":
                self._fail(self.peek(), "a query within an expression is not possible; use a lookup")
            choices = self._arguments(")")
            if not choices:
                self._fail(self.peek(), "IN needs at least one value")
            return Called("in", (value, *choices), here.position)
        function = {"LIKE": "like", "ILIKE": "ilike"}.get(here.word, "rlike")
        return Called(function, (value, self._sum()), here.position)

    def _sum(self) -> Expression:
        found = self._product()
        while self.peek().kind == "mark" and self.peek().text in ("+", "-", "||"):
            here = self.take()
            function = "concat" if here.text == "||" else here.text
            found = Called(function, (found, self._product()), here.position)
        return found

    def _product(self) -> Expression:
        found = self._signed()
        while (self.peek().kind == "mark" and self.peek().text in ("*", "/", "%")) or self.peek().word == "DIV":
            here = self.take()
            found = Called(here.text.lower(), (found, self._signed()), here.position)
        return found

    def _signed(self) -> Expression:
        here = self.peek()
        if here.kind == "mark" and here.text in ("-", "+"):
            self.take()
            if here.text == "-" and self.peek().kind == "number":
                return self._behind(self._number(self.take(), negative=True))
            found = self._signed()
            return Called("negative", (found,), here.position) if here.text == "-" else found
        return self._behind(self._value())

    def _behind(self, found: Expression) -> Expression:
        while self.peek().kind == "mark" and self.peek().text in (".", "::", "["):
            here = self.take()
            if here.text == "::":
                found = Cast(found, self._type(), position=here.position)
            elif here.text == ".":
                at = self.peek().position
                found = Called("field", (found, Literal(self.name(), pa.string(), at)), here.position)
            else:
                found = Called("element", (found, self.expression()), here.position)
                self._expect_mark("]", "behind the index")
        return found

    # ── values ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _value(self) -> Expression:
        here = self.peek()
        if here.kind == "number":
            return self._number(self.take())
        if here.kind == "text":
            self.take()
            return Literal(unescaped(here.text), pa.string(), here.position)
        if here.kind == "bytes":
            return self._bytes(self.take())
        if self.take_mark("("):
            found = self.expression()
            self._expect_mark(")", "to close the bracket")
            return found
        if here.kind == "quoted":
            return Named(self.name(), here.position)
        if here.kind != "word":
            self._fail(here, f"expected a value, found {here}")
        return self._worded()

    def _worded(self) -> Expression:
        here = self.take()
        if here.word in ("TRUE", "FALSE"):
            return Literal(here.word == "TRUE", pa.bool_(), here.position)
        if here.word == "NULL":
            return Literal(None, pa.null(), here.position)
        if here.word == "CASE":
            return self._case(here.position)
        if here.word == "INTERVAL" and self.peek().kind in ("number", "text", "mark"):
            return self._interval(here)
        if here.word in _MOMENTS and self.peek().kind == "text":
            return self._moment(here, self.take())
        if self.peek().kind == "mark" and self.peek().text == "(":
            return self._call(here)
        if here.word in _RESERVED:
            self._fail(here, f"expected a value, found {here}; put a column of that name in `backticks`")
        return Named(here.text, here.position)

    def _call(self, name: Lexeme) -> Expression:
        self._expect_mark("(", "")
        if name.word in ("CAST", "TRY_CAST"):
            value = self.expression()
            self._expect_word("AS", f"within {name.text}")
            kind = self._type()
            self._expect_mark(")", f"to close {name.text}")
            return Cast(value, kind, name.word == "TRY_CAST", name.position)
        if self.peek().kind == "mark" and self.peek().text == "*":
            self._fail(name, f"{name.text}(*) adds up rows; use key_by and aggregate")
        if self.peek().word in ("DISTINCT", "SELECT"):
            self._fail(self.peek(), f"{self.peek().text} is not possible within an expression")
        return Called(name.text.lower(), tuple(self._arguments(")")), name.position)

    def _arguments(self, closing: str) -> list[Expression]:
        found: list[Expression] = []
        if self.take_mark(closing):
            return found
        while True:
            found.append(self.expression())
            if self.take_mark(closing):
                return found
            self._expect_mark(",", f"or {closing!r} behind a value")

    def _case(self, at: int) -> Expression:
        subject = None if self.peek().word == "WHEN" else self.expression()
        cases = []
        while self.take_word("WHEN"):
            here = self.peek().position
            condition = self.expression()
            if subject is not None:
                condition = Called("=", (subject, condition), here)
            self._expect_word("THEN", "behind the condition of a CASE")
            cases.append((condition, self.expression()))
        if not cases:
            self._fail(self.peek(), f"expected WHEN, found {self.peek()}")
        otherwise: Expression = Literal(None, pa.null(), at)
        if self.take_word("ELSE"):
            otherwise = self.expression()
        self._expect_word("END", "to close the CASE")
        return Cased(tuple(cases), otherwise, at)

    def _type(self) -> pa.DataType:
        first = self.peek()
        depth, last = 0, first
        while True:
            here = self.peek()
            if here.kind not in ("word", "number") and here.text not in ("<", ">", "(", ",", ")"):
                break
            if depth == 0 and last is not first and here.text not in ("<", "("):
                break
            depth += here.text in ("<", "(")
            depth -= here.text in (">", ")")
            if depth < 0:
                break
            last = self.take()
            if depth == 0 and last is first and self.peek().text not in ("<", "("):
                break
        stop = self.peek().position if last is not first else first.position + len(first.text)
        try:
            return parse_ddl(f"value {self._text[first.position : stop]}").field(0).type
        except SchemaError as error:
            self._fail(first, f"expected a type: {error.message.splitlines()[0]}")

    # ── constants ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _number(self, here: Lexeme, negative: bool = False) -> Literal:
        text = here.text.lower()
        sign = -1 if negative else 1
        whole = {"l": (64, pa.int64()), "s": (16, pa.int16()), "y": (8, pa.int8())}
        if text.endswith("bd"):
            return self._decimal(here, text[:-2], sign)
        if text[-1] in "df" and not text[-1].isdigit():
            kind = pa.float64() if text[-1] == "d" else pa.float32()
            return Literal(sign * float(text[:-1]), kind, here.position)
        if text[-1] in whole:
            bits, kind = whole[text[-1]]
            if not text[:-1].isdecimal():
                self._fail(here, f"{here.text} is not a whole number")
            return self._integer(here, sign * int(text[:-1]), bits, kind)
        if "e" in text:
            return Literal(sign * float(text), pa.float64(), here.position)
        if "." in text:
            return self._decimal(here, text, sign)
        value = sign * int(text)
        if -(1 << 31) <= value < 1 << 31:
            return Literal(value, pa.int32(), here.position)
        if -(1 << 63) <= value < 1 << 63:
            return Literal(value, pa.int64(), here.position)
        return self._decimal(here, text, sign)

    def _integer(self, here: Lexeme, value: int, bits: int, kind: pa.DataType) -> Literal:
        if not -(1 << bits - 1) <= value < 1 << bits - 1:
            self._fail(here, f"{here.text} does not fit into {bits} bits")
        return Literal(value, kind, here.position)

    def _decimal(self, here: Lexeme, text: str, sign: int) -> Literal:
        value = Decimal(text) * sign
        exponent = value.as_tuple().exponent
        scale = max(-exponent, 0) if isinstance(exponent, int) else 0
        digits = max(len(value.as_tuple().digits), scale)
        if digits > 38:
            self._fail(here, f"{here.text} has more than 38 digits")
        return Literal(value, pa.decimal128(max(digits, 1), scale), here.position)

    def _bytes(self, here: Lexeme) -> Literal:
        try:
            return Literal(bytes.fromhex(here.text[2:-1]), pa.binary(), here.position)
        except ValueError:
            self._fail(here, f"{here.text} is not a number of hexadecimal bytes, as in X'00FF'")

    def _moment(self, word: Lexeme, text: Lexeme) -> Literal:
        written = unescaped(text.text).strip()
        try:
            if word.word == "DATE":
                return Literal(dt.date.fromisoformat(written), pa.date32(), word.position)
            moment = dt.datetime.fromisoformat(written)
        except ValueError as error:
            self._fail(text, f"{text.text} is not a {word.text.lower()} as ISO 8601 writes it: {error}")
        if word.word == "TIMESTAMP_NTZ":
            return Literal(moment.replace(tzinfo=None), pa.timestamp("us"), word.position)
        return Literal(moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC), UTC_TIME, word.position)

    def _interval(self, word: Lexeme) -> Literal:
        negative = self.take_mark("-")
        number = self.take()
        written = unescaped(number.text) if number.kind == "text" else number.text
        unit = self.take()
        us = _UNITS_US.get(unit.word) or _UNITS_US.get(unit.word.removesuffix("S"))
        try:
            count = Decimal(written.strip())
        except ArithmeticError:
            self._fail(number, f"expected a number of units after INTERVAL, as in INTERVAL 5 MINUTES, found {number}")
        if us is None:
            units = ", ".join(f"{name}S" for name in _UNITS_US)
            self._fail(unit, f"{unit} is not a unit of an interval; allowed, because their length is fixed: {units}")
        return Literal(int(count * us) * (-1 if negative else 1), pa.duration("us"), word.position)
