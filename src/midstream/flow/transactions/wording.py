"""The wording of tracing errors: what to write instead, and the user's own line."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

__all__ = ["HOW", "a_kind", "user_line"]

HOW = (
    "It runs once for all events, on symbols, so Python cannot branch on a value. Use t.where(condition, a, b) to "
    "choose between values, t.require(condition) to abort, & | ~ instead of and, or, not, and (low < x) & (x < high) "
    "instead of low < x < high. For anything else, call a function: t.call(function, x)"
)
_HERE = str(Path(__file__).parent)


def a_kind(kind: str) -> str:
    """A kind with its article."""
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def user_line() -> str:
    """The innermost line outside this package: file, number and text."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{Path(file).name}, line {line}" + (f": {text}" if text else "")
