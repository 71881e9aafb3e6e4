"""The words of an expression: names, numbers, texts and marks, each with its position."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Never

from midstream.errors import SchemaError

__all__ = ["Lexeme", "fail_at", "lexemes_of", "unescaped"]

_LEXEME = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|/\*.*?\*/)
      | (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?(?:[lLsSyYfFdD]|[bB][dD])?(?![A-Za-z0-9_]))
      | (?P<bytes>[xX]'[^']*')
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<quoted>`(?:[^`]|``)*`)
      | (?P<text>'(?:[^'\\]|\\.|'')*')
      | (?P<mark><=>|<>|!=|==|<=|>=|\|\||::|[-+*/%<>=(),.\[\]!])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "Z": "\x1a"}


@dataclass(frozen=True, slots=True)
class Lexeme:
    """One word of an expression."""

    kind: str
    """``number``, ``bytes``, ``word``, ``quoted``, ``text``, ``mark`` or ``end``."""
    text: str
    position: int

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text)

    @property
    def word(self) -> str:
        """In upper case, if it is a word without backticks; else empty."""
        return self.text.upper() if self.kind == "word" else ""


def lexemes_of(text: str) -> list[Lexeme]:
    """The words of an expression, and its end.

    >>> [lexeme.text for lexeme in lexemes_of("eur*2 >= `a b`")]
    ['eur', '*', '2', '>=', '`a b`', '']
    """
    found = []
    position = 0
    while position < len(text):
        match = _LEXEME.match(text, position)
        if match is None:
            fail_at(text, position, _why_unexpected(text[position]))
        if match.lastgroup != "skip":
            found.append(Lexeme(str(match.lastgroup), match.group(), position))
        position = match.end()
    return [*found, Lexeme("end", "", len(text))]


def _why_unexpected(char: str) -> str:
    if char == '"':
        return "unexpected '\"'; write texts in 'single quotes', and names with unusual characters in `backticks`"
    if char in "'`":
        return f"unexpected {char}; it is never closed"
    return f"unexpected character {char!r}; put names with characters other than letters, digits and _ in `backticks`"


def unescaped(text: str) -> str:
    r"""The value of a text in single quotes.

    >>> unescaped(r"'it''s\n'")
    "it's\n"
    """
    body = text[1:-1].replace("''", "'")
    return re.sub(r"\\(.)", lambda m: m.group() if m[1] in "%_" else _ESCAPES.get(m[1], m[1]), body, flags=re.DOTALL)


def fail_at(text: str, position: int, message: str) -> Never:
    """Raise an error that shows the place in the expression."""
    start = text.rfind("\n", 0, position) + 1
    line = text[start:].split("\n", 1)[0].replace("\t", " ")
    raise SchemaError(f"{message}\n  {line}\n  {' ' * (position - start)}^", expression=text, position=position)
