"""Lengths of time as users write them: ``"500 ms"``, ``"10 seconds"``, ``"1 hour"``."""

from __future__ import annotations

import re

from midstream.errors import FlowError

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
_UNIT_US = {
    "us": 1,
    "microsecond": 1,
    "ms": 1_000,
    "millisecond": 1_000,
    "s": 1_000_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
}
ALLOWED = "'500 ms', '10 seconds', '1.5 minutes', '1 hour', '2 days'"


def microseconds(text: object) -> int | None:
    """A length of time in microseconds; None if the text is not one.

    >>> microseconds("1.5 seconds"), microseconds("3 apples")
    (1500000, None)
    """
    found = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    unit = _UNIT_US.get(found[2]) or _UNIT_US.get(found[2].removesuffix("s"))
    return None if unit is None else round(float(found[1]) * unit)


def duration(text: object, what: str, *, zero: bool = False) -> int:
    """A length of time in microseconds; ``what`` names the option in errors. Zero is refused unless ``zero`` is set.

    >>> duration("10 seconds", "aggregate 'a': size")
    10000000
    """
    found = microseconds(text)
    if found is None or (found == 0 and not zero):
        raise FlowError(f"{what}={text!r} is not a length of time; use for example {ALLOWED}")
    return found
