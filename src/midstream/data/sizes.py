"""Numbers of bytes as users write them: ``"16 MB"``, ``"1.5 GiB"``, ``"512 B"``."""

from __future__ import annotations

import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)\s*")


def size_in_bytes(text: object) -> int | None:
    """A number of bytes; None if the text is not one.

    >>> size_in_bytes("16 MB"), size_in_bytes("1 KiB"), size_in_bytes("16 apples")
    (16000000, 1024, None)
    """
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])


def size_in_words(number: int) -> str:
    """A number of bytes in the largest unit that shows it exactly.

    >>> size_in_words(16_000_000), size_in_words(1 << 20), size_in_words(1001)
    ('16 MB', '1 MiB', '1001 B')
    """
    for unit in ("GB", "GiB", "MB", "MiB", "KB", "KiB"):
        if number and number % _UNITS[unit] == 0:
            return f"{number // _UNITS[unit]} {unit}"
    return f"{number} B"
