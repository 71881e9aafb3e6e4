"""Finds pickles in any bytes, and which modules of midstream they name."""

from __future__ import annotations

import base64
import binascii
import importlib.util
import pickletools
import re
from collections.abc import Iterator

PUBLIC = frozenset({"midstream", "midstream.errors", "midstream.testing"})
"""The modules whose names are public, and stay."""

_START = re.compile(rb"\x80[\x02-\x05]")
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{16,}={0,2}")
_MODULE = re.compile(r"midstream(\.\w+)*")


def midstream_names(data: bytes) -> set[str]:
    """The modules of midstream that pickles within these bytes name, at any depth, also in base64."""
    found = {name for text in _strings(data) for name in _modules(text)}
    for match in _BASE64.finditer(data):
        try:
            inner = base64.b64decode(match.group(), validate=True)
        except binascii.Error:
            continue
        if _START.search(inner):
            found |= {name for text in _strings(inner) for name in _modules(text)}
    return found


def count_pickles(data: bytes) -> int:
    """How many pickles begin within these bytes, and end."""
    return sum(1 for match in _START.finditer(data) if _texts(data[match.start() :]) is not None)


def _strings(data: bytes) -> Iterator[str]:
    for match in _START.finditer(data):
        yield from _texts(data[match.start() :]) or ()


def _texts(data: bytes) -> list[str] | None:
    """All strings of the pickle that begins here, with those of pickles inside of it; None if none begins here."""
    found: list[str] = []
    try:
        for _, argument, _ in pickletools.genops(data):
            if isinstance(argument, str):
                found += argument.split()  # the old opcode for globals has module and name in one
            elif isinstance(argument, bytes | bytearray):
                found += _strings(bytes(argument))
    except (ValueError, IndexError, UnicodeDecodeError, OverflowError):
        return None
    return found


def _modules(text: str) -> Iterator[str]:
    if _MODULE.fullmatch(text):
        try:
            known = importlib.util.find_spec(text) is not None
        except ModuleNotFoundError:  # a class or function of a module
            known = False
        if known:
            yield text
