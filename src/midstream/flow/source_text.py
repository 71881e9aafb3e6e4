"""The text of functions, for the history."""

from __future__ import annotations

import inspect
import linecache
from types import CodeType
from typing import Any

__all__ = ["source_text"]


def source_text(function: Any) -> str:
    """The lines of a function as it was written, or of an object's ``__call__``; empty if they cannot be found.

    They are found by the positions that Python keeps with compiled code: ``inspect`` would read the tokens of the file,
    which takes fifteen times as long, while a user waits for a change.

    >>> def double(row):
    ...     return {"n": 2 * row["n"]}
    >>> source_text(double).splitlines()[-1]
    '    return {"n": 2 * row["n"]}'
    >>> source_text(len)
    ''
    """
    called = type(function).__call__ if callable(function) and not inspect.isroutine(function) else function
    code = getattr(inspect.unwrap(called), "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, getattr(called, "__globals__", None))
    return "".join(lines[code.co_firstlineno - 1 : _last_line(code)])


def _last_line(code: CodeType) -> int:
    lines = [end for _, end, _, _ in code.co_positions() if end is not None]
    within = [_last_line(each) for each in code.co_consts if isinstance(each, CodeType)]
    return max([code.co_firstlineno, *lines, *within])
