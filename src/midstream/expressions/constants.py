"""Python values as expressions: what users may pass instead of SQL text."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

from midstream.data.schema import quote_name
from midstream.errors import FlowError

__all__ = ["expression_text", "name_text"]


def name_text(name: str) -> str:
    """A column as an expression.

    >>> name_text("user id"), name_text("end")
    ('`user id`', '`end`')
    """
    quoted = quote_name(name)
    return quoted if quoted.startswith("`") else f"`{name}`"


def expression_text(value: Any, what: str) -> str:
    """The text of an expression: a text is one, any other value is written as a constant.

    >>> [expression_text(value, "") for value in ("eur * 2", 2, 2.5, True, Decimal("1.50"))]
    ['eur * 2', '2', '2.5D', 'TRUE', '1.50BD']
    """
    match value:
        case str():
            return value
        case bool():
            return "TRUE" if value else "FALSE"
        case int() if -(1 << 63) <= value < 1 << 63:
            return str(value)
        case float() if math.isfinite(value):
            return f"{value!r}D"
        case float():
            return f"CAST('{value}' AS double)"
        case Decimal() if value.is_finite():
            return f"{value:f}BD"
        case bytes():
            return f"X'{value.hex()}'"
        case dt.datetime():
            return f"TIMESTAMP{'' if value.tzinfo else '_NTZ'} '{value.isoformat()}'"
        case dt.date():
            return f"DATE '{value.isoformat()}'"
    raise FlowError(
        f"{what}: {type(value).__name__} {value!r:.60} cannot be an expression; give SQL text, or a boolean, a "
        f"number, a decimal, bytes, a date or a datetime (a constant text is written '…' within the SQL; null is "
        f"'CAST(NULL AS string)')"
    )
